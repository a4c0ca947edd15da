"""Tables of the reference, made from the code when the pages are built, and labels for the cells of wide tables.

A line that is only a link to source, such as `[Options of fs](../../backends/kvtier_backends/fs/options.py)`, becomes
the table of this name. Meanings are the comment or the docstring at a field, help texts, and the help of metrics.
A table of failures gets a column with the tests whose mark `promise` has the text of a row's first cell.
"""

import ast
import functools
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import typer

from kvtier.backend.contract import backend_class, known_types
from kvtier.backend.namespace import Group, Namespace
from kvtier.backend.seal_options import SealOptions
from kvtier.config import EngineConfig, EngineLimits, TierConfig, TierLimits
from kvtier.engine import metrics
from kvtier.settings.fields import option_fields, struct_fields
from kvtier.settings.units import parse_duration, parse_path, parse_size, unit_of
from kvtier.tools import options
from kvtier.tools.commands import COMMANDS, command_line
from kvtier.tools.configuration import CheckedConfig
from kvtier.tools.directory import DirectoryUsage, ListedChunk, VerifyReport
from kvtier.tools.figures import Figures
from kvtier.tools.prune import PruneReport
from kvtier.tools.replay.report import Report
from kvtier.tools.replay.size import SizeReport
from kvtier.tools.selftest import SelftestReport
from kvtier.tools.top import EngineNow

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"^\[([^\]]+)\]\(\.\./\.\./((?:kvtier|backends)/[\w/]+\.py)\)$", re.MULTILINE)
FAILURES = re.compile(r"^\| failure \|.*\n\|.*\n(?:\|.*\n)+", re.MULTILINE)
UNLABELLED = ("meaning", "answer", "remedy", "")  # Columns that need no name in a card.
WIDE_CELL = 50  # Characters. A table with a longer cell is shown as cards on a phone.

STRUCTS: dict[str, type[msgspec.Struct]] = {
    "Fields of the engine": EngineConfig,
    "Limits of the engine": EngineLimits,
    "Fields of a tier": TierConfig,
    "Limits of a tier": TierLimits,
    "Fields of the namespace": Namespace,
    "Fields of a group": Group,
    "Options of the seal": SealOptions,
    **{f"Options of {name}": backend_class(name).options_type for name in known_types()},
}
REPORTS: dict[str, Any] = {
    "policies": dict[str, dict[str, float]],
    "config check": CheckedConfig,
    "verify": VerifyReport,
    "du": DirectoryUsage,
    "ls": list[ListedChunk],
    "prune": PruneReport,
    "top": EngineNow,
    "replay": Report,
    "simulate": Report,
    "size": SizeReport,
    "selftest": SelftestReport,
    "bench": Figures,
}
"""The type of each command's JSON, by the command's name."""

METRICS = {
    "Metrics of the engine": (metrics.RUNNER_METRICS, metrics.LEDGER_METRICS, metrics.WAIT_SECONDS),
    "Metrics of the primary": (metrics.PRIMARY_METRICS,),
    "Metrics of each tier": (metrics.DECISION_METRICS, metrics.TIER_METRICS, metrics.TRANSFER_SECONDS),
}
JSON_TYPES = {int: "integer", float: "number", str: "text", bool: "boolean", NoneType: "null", dict: "object"}


def on_files(files: Any, config: Any) -> Any:
    """Add a JSON Schema for each command that writes JSON."""
    from mkdocs.structure.files import File

    for name, kind in REPORTS.items():
        files.append(
            File.generated(config, f"reference/{schema_name(name)}", content=json.dumps(schema(kind), indent=1))
        )
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables in the place of the links to their source, and tests into the rows of failures that they prove."""
    return LINK.sub(lambda link: table(link[1], link[2]), FAILURES.sub(_proved, markdown))


def _proved(found: re.Match[str]) -> str:
    head, rule, *rows = found[0].splitlines()
    tests = (" ".join(f"`{test}`" for test in promises()[failure_of(row)]) for row in rows)
    return "\n".join((f"{head} proved by |", f"{rule}---|", *map("{} {} |".format, rows, tests), ""))


def failure_of(row: str) -> str:
    return row.removeprefix("| ").partition(" | ")[0]


@functools.cache
def promises() -> dict[str, list[str]]:
    """Return the places of the tests that are marked with `promise`, by the failure whose row they prove."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if "@pytest.mark.promise(" in (text := path.read_text()):
            for node in ast.walk(ast.parse(text)):
                for mark in getattr(node, "decorator_list", ()):
                    if ast.unparse(mark).startswith("pytest.mark.promise("):
                        place = f"{path.relative_to(ROOT / 'tests')}:{node.lineno}"
                        found.setdefault(mark.args[0].value, []).append(place)
    return found


def on_page_content(html: str, **_: Any) -> str:
    """Give each cell of a table with long cells its column's head as a label, for narrow windows."""
    return re.sub(r"<table>.*?</table>", _labelled, html, flags=re.DOTALL)


def _labelled(found: re.Match[str]) -> str:
    heads = [re.sub("<[^>]+>", "", head) for head in re.findall(r"<th\b[^>]*>(.*?)</th>", found[0], re.DOTALL)]
    cells = re.findall(r"<td\b[^>]*>(.*?)</td>", found[0], re.DOTALL)
    if not heads or max((len(re.sub("<[^>]+>", "", cell)) for cell in cells), default=0) < WIDE_CELL:
        return found[0]
    labels = iter(heads * (len(cells) // len(heads)))
    labelled = re.sub(r"<td\b", lambda cell: cell[0] + _label(next(labels)), found[0])
    return labelled.replace("<table>", "<table data-cards>", 1)


def _label(head: str) -> str:
    return "" if head in UNLABELLED else f' data-label="{head}"'


def table(name: str, source: str) -> str:
    """Return a table by its name. `source` is the file that has its content, relative to the checkout."""
    program, _, command = name.partition(" ")
    if name in STRUCTS:
        module, made = STRUCTS[name].__module__, options_of(STRUCTS[name])
    elif name in METRICS:
        module, made = metrics.__name__, _metrics(name)
    elif name == "kvtier --help":
        module, made = options.__name__, _help("ls", common=True)
    elif program == "kvtier" and (called := command.removesuffix(" --help")) in COMMANDS:
        module, made = _module(called), _help(called)
    elif program == "kvtier" and (called := command.removesuffix(f" {options.JSON}")) in COMMANDS:
        module, made = _module(called), _json(called)
    else:
        raise ValueError(f"[{name}]: no table has this name")
    if source.removeprefix("backends/").removesuffix(".py").replace("/", ".") != module:
        raise ValueError(f"[{name}]({source}): it is in {module}")
    return made


def _rows(*rows: tuple[str, ...]) -> str:
    head, *rest = rows
    lines = (head, ("---",) * len(head), *rest)
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# Structs.


def meanings(struct: type) -> dict[str, str]:
    """Return the comment or the docstring of each field of a struct, in one line; fields without one are left out."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            found |= _meanings(base)
    return found


def _meanings(struct: type) -> Iterator[tuple[str, str]]:
    lines = textwrap.dedent(inspect.getsource(struct)).splitlines()
    (definition,) = ast.parse("\n".join(lines)).body
    assert isinstance(definition, ast.ClassDef)
    body = definition.body
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = lines[(node.end_lineno or 0) - 1].encode()[node.end_col_offset :].decode().partition("# ")[2]
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = " ".join(str(after.value.value).split())
            if text:
                yield node.target.id, sentence(text)


def sentence(text: str) -> str:
    """Return text with a capital and a full stop, safe in a table's cell."""
    text = text.strip()
    text = re.sub(r"<(?=[^`]*(?:`[^`]*`[^`]*)*$)", "&lt;", text[:1].upper() + text[1:])
    return text if text.endswith((".", "!", "?")) else f"{text}."


def options_of(struct: type[msgspec.Struct]) -> str:
    told = meanings(struct)
    rows = [
        (f"`{name}`", default(field), values(field.type), told.get(field.name, ""))
        for name, field in option_fields(struct).items()
        if struct is SealOptions or name not in option_fields(SealOptions)
    ]
    return _rows(("option", "default", "values", "meaning"), *rows)


def default(field: Any) -> str:
    """Return a field's default in TOML's words and with the largest unit that fits."""
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None or isinstance(value, msgspec.Struct | dict | msgspec.UnsetType):
        return "none"
    if field.name.endswith("_s"):
        return f"`{value:g}`"
    if "bytes" in field.name and isinstance(value, int):
        return f'`"{value >> 20}MiB"`'
    return f"`{json.dumps(value)}`"


def _members(kind: Any) -> tuple[Any, ...]:
    return tuple(one for one in get_args(kind) if one is not NoneType) if is_union(kind) else (kind,)


def is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def values(kind: Any) -> str:
    """Return the values that a field accepts, in words."""
    return " or ".join(dict.fromkeys(map(_values, _members(kind))))


def _values(kind: Any) -> str:
    bare, *metas = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    metas = [meta for meta in metas if isinstance(meta, msgspec.Meta)]
    unit = next(filter(None, map(unit_of, metas)), None)
    if get_origin(bare) is Literal:
        return ", ".join(f"`{json.dumps(one)}`" for one in get_args(bare))
    if unit is not None and unit.parse is not parse_duration:
        return {parse_size: "size", parse_path: "path"}.get(unit.parse, "name")  # type: ignore[call-overload]
    if (isinstance(bare, type) and issubclass(bare, msgspec.Struct)) or get_origin(bare) in (dict, Mapping):
        return "table"
    if bare is bool:
        return "`true`, `false`"
    if get_origin(bare) in (list, tuple):
        return "list"
    least = next((f"{meta.ge:g}" for meta in metas if meta.ge is not None), "above 0")
    most = next((meta.le for meta in metas if meta.le is not None), None)
    if most is None:
        return JSON_TYPES.get(bare, "text")
    bounds = f"{least} or more" if most == (1 << 31) - 1 else f"{least} to {_number(most)}"
    return f"duration, {bounds} s" if unit is not None else bounds


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


# JSON.


def schema_name(command: str) -> str:
    return f"schemas/{command.replace(' ', '-')}.json"


def schema(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a type, with the meaning of each field."""
    made = msgspec.json.schema(kind)
    structs = {struct.__name__: struct for struct in _structs(kind)}
    for name, definition in made.get("$defs", {}).items():
        if name in structs:
            told = meanings(structs[name])
            for field in struct_fields(structs[name]).values():
                definition["properties"][field.encode_name] |= {"description": told.get(field.name, "")}
    return made


def _structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for field in struct_fields(kind).values():
            yield from _structs(field.type)
    for one in get_args(kind):
        yield from _structs(one)


def _json(command: str) -> str:
    rows = [(f"`{path}`", kind, meaning) for path, kind, meaning in fields(REPORTS[command], "")]
    made = _rows(("field", "type", "meaning"), *rows) if rows else ""
    return f"{made}\n\n[JSON Schema]({schema_name(command)})"


def fields(kind: Any, path: str, seen: dict[type, str] | None = None) -> Iterator[tuple[str, str, str]]:
    """Yield path, type and meaning of each field of a type's JSON; `[]` is any element, `*` any key."""
    seen = {} if seen is None else seen
    for one in _members(kind):
        origin, arguments = get_origin(one), get_args(one)
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            told = meanings(one)
            if one in seen:
                yield f"{path}.*", "object", f"As `{seen[one]}`."
                return
            seen[one] = path
            for name, field in struct_fields(one).items():
                inner = f"{path}.{name}" if path else name
                yield inner, json_type(field.type), told.get(field.name, "")
                yield from fields(field.type, inner, seen)
        elif origin is list:
            yield from fields(arguments[0], f"{path}[]", seen)
        elif origin in (dict, Mapping) or getattr(origin, "__name__", "") == "Mapping":
            yield from fields(arguments[1], f"{path}.*" if path else "*", seen)


def json_type(kind: Any) -> str:
    kinds = [one for one in (get_args(kind) if is_union(kind) else (kind,)) if one is not msgspec.UnsetType]
    return " or ".join(dict.fromkeys(map(_json_type, kinds)))


def _json_type(kind: Any) -> str:
    origin = get_origin(kind)
    if origin in (list, tuple):
        return "array"
    if origin is Literal or (isinstance(kind, type) and kind.__module__.startswith("kvtier") and not _is_struct(kind)):
        return "text"
    return JSON_TYPES.get(kind, "object")


def _is_struct(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct)


# Commands.


def command_named(name: str) -> Any:
    command: Any = typer.main.get_command(command_line(name.split()))
    for word in name.split():
        command = command.commands[word]
    return command


def _module(command: str) -> str:
    return f"kvtier.tools.{COMMANDS[command].place.partition(':')[0]}"


def _help(name: str, *, common: bool = False) -> str:
    """Return a command's description, examples and options; or only the options that all commands have."""
    command = command_named(name)
    rows = [
        (f"`{param.opts[0]}`" + "".join(f", `{other}`" for other in param.opts[1:]), _given(param), _told(param))
        for param in command.params
        if param.opts[0].startswith("--") and (param.name in options.COMMON) == common
    ]
    written = _rows(("option", "default", "meaning"), *rows)
    if common:
        return written
    arguments = " ".join(param.metavar for param in command.params if not param.opts[0].startswith("--"))
    lines = (f"kvtier {name} [OPTIONS] {arguments}".rstrip(), *(f"# {one}" for one in COMMANDS[name].examples))
    usage = "\n".join(lines)
    return f"{inspect.cleandoc(command.help)}\n\n``` {{ .text .wrap }}\n{usage}\n```\n\n{written}"


def _given(param: Any) -> str:
    if param.default is False:
        return "off"
    return "none" if param.default is None else f"`{param.default}`"


def _told(param: Any) -> str:
    kind = param.type_descriptor.annotation
    if param.max is not None:
        accepted = f" {_number(param.min)} to {_number(param.max)}."
    else:
        accepted = f" {values(kind).replace(chr(34), '')}." if get_origin(kind) is Literal else ""
    return sentence(param.help) + accepted


# Metrics.


def _metrics(name: str) -> str:
    rows = list[tuple[str, ...]]()
    for each in METRICS[name]:
        if isinstance(each, metrics.Durations):
            rows.append((f"`{each.name}`", "histogram", _labels(each.labels), sentence(each.help)))
            continue
        for metric in each.metrics:
            full = each.prefix + metric.name + ("_total" if metric.kind == "counter" else "")
            rows.append((f"`{full}`", metric.kind, _labels((*each.labels, *metric.labels)), sentence(metric.help)))
    return _rows(("metric", "kind", "labels", "meaning"), *rows)


def _labels(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
