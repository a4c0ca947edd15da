"""`kvtier config check` and `kvtier vllm-config`: configurations, and what would fail on this machine."""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import typer

from kvtier.backend import Options
from kvtier.config import EngineConfig, TierConfig, placed, read_json, read_tables, tier_options
from kvtier.errors import ConfigError, one_line
from kvtier.integrations.vllm_options import (
    ANYWHERE,
    CONNECTOR,
    WHERE,
    SecondaryOptions,
    VllmOptions,
    is_line,
    read_line,
)
from kvtier.settings import option_fields, read_toml
from kvtier.settings.fields import is_list, is_secret, is_table, without_login
from kvtier.tools import statuses
from kvtier.tools.options import JsonOption
from kvtier.tools.outputs import STDOUT, check_outputs, encoded, plain_table, write_json

Config = EngineConfig | VllmOptions | tuple[SecondaryOptions, ...]
SECRET_NAME = re.compile(r"(?i)pass|secret|token|credential|(?:^|_)key(?:$|_)")  # Options of tiers that are not ours.


class CheckedConfig(msgspec.Struct, frozen=True):
    configuration: dict[str, Any]  # Every field, with defaults filled in, and without secrets.
    doubts: list[str]  # Reasons why it would fail on this machine.


def check(
    path: Annotated[str, typer.Argument(metavar="FILE|-", help="TOML, JSON, or vLLM's --kv-transfer-config.")],
    json_path: JsonOption = None,
) -> None:
    """Check a configuration, and show its fields with defaults, without secrets. Status 1: it would fail here."""
    check_outputs(json_path)
    config = read(path)
    doubts = list(_doubts(config))
    told = _told({"secondary_tiers": config} if isinstance(config, tuple) else config)
    table = plain_table("field", "value")
    for name, value in _flat(told, ""):
        table.add_row(name, value)
    write_json(json_path, CheckedConfig(told, doubts)).print(table)
    _report(doubts, path)


def vllm_config(
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Host memory, of all workers of an engine together.")],
    disk: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR:SIZE", help="A directory, and the most that it takes. May be given several times."),
    ] = None,
) -> None:
    """Print vLLM's option for kvtier, quoted for a shell. Status 1: it would fail on this machine."""
    extra = {"cpu_bytes_to_use": memory, "secondary_tiers": [_disk(each) for each in disk or ()]}
    line = {"kv_connector": CONNECTOR, "kv_role": "kv_both", WHERE: extra}
    doubts = list(_doubts(read_line(line)))
    typer.echo(f"--kv-transfer-config {shlex.quote(encoded(line).decode())}")
    _report(doubts, "vllm-config")


def _disk(given: str) -> dict[str, str]:
    root, _, size = given.rpartition(":")
    if not root:
        raise ConfigError(f"--disk {given!r}: expected DIR:SIZE, such as /var/tmp/kvtier:100G")
    return {"type": "fs", "root": os.path.abspath(root), "capacity_bytes": size}


def _report(doubts: Sequence[str], where: str) -> None:
    for doubt in doubts:
        typer.echo(one_line(f"kvtier: {where}: {doubt}"), err=True)
    if doubts:
        raise typer.Exit(statuses.DATA_WRONG)


def read(path: str) -> Config:
    try:
        tables = _stdin() if path == STDOUT else read_tables(path)
        if is_line(tables):
            return read_line(tables)
        return EngineConfig.from_dict(tables) if path == STDOUT else EngineConfig.load(path)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(f"{path}: is malformed: {error}") from error
    except ConfigError as error:
        named = str(error).startswith(f"{path}: ")
        raise ConfigError(f"{'' if named else f'{path}: '}{error}") from error


def _stdin() -> object:
    text = sys.stdin.read()
    return read_json(text) if text.lstrip().startswith("{") else read_toml(text)


def tiers(config: Config) -> Iterator[tuple[str, str, Any]]:
    """Yield each tier's place in the configuration, type and options."""
    given: Sequence[TierConfig | SecondaryOptions] = config if isinstance(config, tuple) else config.secondary_tiers
    in_vllm = not isinstance(config, EngineConfig)
    for index, tier in enumerate(map(_tier, given)):
        where = f"secondary_tiers[{index}]"
        yield where, tier.type, tier_options(placed(tier, ANYWHERE) if in_vllm else tier, where)


def _tier(tier: TierConfig | SecondaryOptions) -> TierConfig:
    return tier if isinstance(tier, TierConfig) else TierConfig(type=tier.backend, options=tier.options)


def _doubts(config: Config) -> Iterator[str]:
    roots: dict[str, tuple[str, bool]] = {}  # Each root's first tier, and whether that tier shares it.
    for where, _, options in tiers(config):
        if isinstance(options, Options):
            yield from (f"{where}.{doubt}" for doubt in options.doubts())
        if (root := getattr(options, "root", None)) is None:
            continue
        shared = getattr(options, "shared", False)
        first, first_shares = roots.setdefault(os.path.realpath(root), (where, shared))
        if first != where and not (shared and first_shares):
            yield f"{where}.root: {root!r} given, a directory that no other tier uses accepted: {first} uses it"


def _told(value: Any) -> Any:
    """Return a value as plain data, without secrets; a tier's own options stand beside its other fields."""
    if is_table(value):
        return {name: _told(inner) for name, inner in value.items()}
    if is_list(value):
        return [_told(element) for element in value]
    if not isinstance(value, msgspec.Struct):
        return value
    told = {name: _shown(field, getattr(value, field.name)) for name, field in option_fields(type(value)).items()}
    if isinstance(value, TierConfig | SecondaryOptions):
        told |= _told(tier_options(placed(_tier(value), ANYWHERE), "secondary_tiers[]"))
    return told


def _shown(field: msgspec.structs.FieldInfo, value: Any) -> Any:
    if not isinstance(value, str):
        return _told(value)
    return "(not shown)" if is_secret(field.type) or SECRET_NAME.search(field.name) else without_login(value)


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if is_table(value) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{path}.{name}" if path else name)
    elif is_list(value) and any(map(is_table, value)):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{path}[{index}]")
    else:
        yield path, encoded(value).decode()
