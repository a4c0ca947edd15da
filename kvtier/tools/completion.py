"""`kvtier completion`: what has a shell complete kvtier's commands and options when Tab is pressed."""

from enum import Enum
from typing import Annotated

import typer
from typer.completion import get_completion_inspect_parameters, shell_complete

from kvtier.tools.commands import COMPLETE, PROGRAM, command_line


class Shell(Enum):
    """Shells that can be told."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> None:
    """Print what has a shell complete kvtier's commands and options.

    For this shell alone: source <(kvtier completion bash). For all: write it to where your shell looks for it.
    """
    get_completion_inspect_parameters()  # It registers how shells are spoken to.
    shell_complete(typer.main.get_command(command_line([])), {}, PROGRAM, COMPLETE, f"source_{shell.value}")
