"""Options that several commands have, each declared once, and the values that are lists."""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from kvtier.errors import ConfigError

REQUESTS_MAX = 1_000_000_000  # Reading them takes hours; a larger limit is a typing error.
SLOTS_MAX = 65_536  # Servers. A heap has an entry for each; no cluster has more.
PREFILL_TOKENS_PER_S_MAX = 1e9  # Ten thousand times one GPU; beyond it computing takes no time.
GPU_CACHE_TOKENS_MAX = 1_000_000_000  # Of one server; no GPU holds more.
SEED_MAX = (1 << 63) - 1  # The report has it, and readers of JSON take no more.
JSON = "--json"

TraceArgument = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        help="A file in Mooncake's format (.jsonl, .jsonl.gz, .jsonl.zst); 'generated' is a made-up workload.",
    ),
]
JsonOption = Annotated[
    str | None,
    typer.Option(JSON, metavar="[FILE|-]", help="Write JSON to this file; without one, or to -, on stdout alone."),
]
PlotOption = Annotated[
    str | None, typer.Option("--plot", metavar="OUT", help="Draw the figures to this file: .png, .pdf or .svg.")
]
LimitOption = Annotated[int | None, typer.Option(min=1, max=REQUESTS_MAX, help="Read at most this many requests.")]
SeedOption = Annotated[
    int, typer.Option(min=0, max=SEED_MAX, help="Seed of the chunks' bytes and of the generated workload.")
]

PrefillOption = Annotated[
    float, typer.Option(min=1.0, max=PREFILL_TOKENS_PER_S_MAX, help="Prompt tokens that one server computes a second.")
]
SlotsOption = Annotated[int, typer.Option(min=1, max=SLOTS_MAX, help="Servers that compute prompts.")]
GpuCacheOption = Annotated[
    int,
    typer.Option(
        min=0, max=GPU_CACHE_TOKENS_MAX, help="Tokens in the LLM engine's own prefix cache, of each server; 0: none."
    ),
]
DiskSpeedOption = Annotated[
    str, typer.Option("--disk-speed", metavar="READ,WRITE", help="Rates of the modelled disk, as in 7GB/s,4GB/s.")
]
LoadAlwaysOption = Annotated[
    bool, typer.Option("--load-always", help="Load every chunk that a tier has, even if computing is faster.")
]

COMMON: dict[str, tuple[Any, object]] = {
    "verbose": (
        Annotated[
            int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Log to stderr; -vv: everything.")
        ],
        0,
    ),
    "quiet": (
        Annotated[
            bool, typer.Option("--quiet", "-q", help="Show results and errors only: no progress, notes or warnings.")
        ],
        False,
    ),
}
"""The options of every command, with their defaults."""

T = TypeVar("T")


def parsed(option: str, text: str, parse: Callable[[str], T], accepted: str) -> T:
    """Return an option's value; a `ValueError` of `parse` becomes a `ConfigError`."""
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: expected {accepted}") from error


def listed(option: str, text: str, parse: Callable[[str], T], accepted: str) -> list[T]:
    """Parse values separated by commas, without duplicates, as `parsed` does."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{option} {text!r}: expected {accepted}, and none of them empty")
    return parsed(option, text, lambda _: list(dict.fromkeys(map(parse, parts))), accepted)


def parse_share(text: str) -> float:
    """Parse a share such as 1% or 0.01; ValueError unless it is above 0 and at most 1."""
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0.0 < value <= 1.0:
        raise ValueError(text)
    return value
