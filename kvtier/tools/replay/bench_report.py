"""What `kvtier bench fs --json` measured on a disk, as the figures of a device: for models of fs tiers.

A benchmark gives rates, and no latency. With so many threads each way one chunk takes depth * chunk / rate (Little's
law), of which chunk / rate are its bytes on the link; the rest is the latency.
"""

import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from kvtier.errors import ConfigError

COMMAND = "kvtier bench fs"


class Disk(NamedTuple):
    """How fast a disk is, and who says so."""

    load_bytes_per_s: float
    store_bytes_per_s: float
    latency_s: float
    concurrency: int
    source: str


class Row(msgspec.Struct, frozen=True):
    """One operation of a benchmark, as far as a model needs it."""

    operation: str
    settings: Mapping[str, Any]
    unit: str
    figure: float
    chunk_bytes: int | None = None


class BenchReport(msgspec.Struct, frozen=True):
    """A benchmark's report."""

    command: str
    rows: list[Row]
    path: str = ""

    def disk(self, row_bytes: int, options: Mapping[str, Any]) -> Disk:
        """Return the disk for an fs tier with these options: the rates of the chunk size that is nearest to its rows.

        Raises `ConfigError` if the benchmark left out the tier's layout, naming, fsync or way of I/O.
        """
        load = self._row("load", row_bytes, options, options["load_lanes"])
        storing = "store" if options["capacity_bytes"] is None else "store, evicting"
        store = self._row(storing, row_bytes, options, options["store_lanes"])
        load_bytes_per_s, depth = load.figure * 1e6, load.settings["depth"]
        return Disk(
            load_bytes_per_s=load_bytes_per_s,
            store_bytes_per_s=store.figure * 1e6,
            latency_s=(depth - 1) * (load.chunk_bytes or 0) / load_bytes_per_s,
            concurrency=depth + store.settings["depth"],
            source=f"{os.path.basename(self.path)}: load of {load.chunk_bytes:,} bytes, "
            f"{storing} of {store.chunk_bytes:,} bytes",
        )

    def _row(self, operation: str, row_bytes: int, options: Mapping[str, Any], lanes: int) -> Row:
        """Return the row of the nearest chunk size, then the way of I/O and then the number of threads."""
        wanted = {"layout": options["layout"], "fsync": options["fsync"]}
        if options["layout"] == "files":
            wanted["naming"] = options["naming"]
        if options["io"] != "auto":
            wanted["io"] = options["io"]
        fitting = [row for row in self.rows if row.operation == operation and _is_rate(row) and _has(row, wanted)]
        if not fitting:
            settings = ", ".join(f"{name} {value}" for name, value in wanted.items())
            raise ConfigError(
                f"--bench {self.path}: no figure of {operation!r} with {settings}; a report of {COMMAND} that "
                "measured it accepted (--layouts, --namings, --fsync, --io)"
            )
        return min(
            fitting,
            key=lambda row: (
                abs(math.log((row.chunk_bytes or 1) / row_bytes)),
                row.settings.get("io") != "direct",
                abs(row.settings["depth"] - lanes),
            ),
        )


def read_bench(path: str) -> BenchReport:
    """Read a report. Raises `ConfigError` if the file is none, or another benchmark's."""
    accepted = f"a report of {COMMAND} --json accepted"
    try:
        with open(path, "rb") as file:
            report = msgspec.json.decode(file.read(), type=BenchReport)
    except OSError as error:
        raise ConfigError(f"--bench {path}: cannot be read: {error.strerror}; {accepted}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--bench {path}: {error}; {accepted}") from error
    if report.command != COMMAND:
        raise ConfigError(f"--bench {path}: a report of {report.command!r} given, {accepted}")
    return msgspec.structs.replace(report, path=path)


def _is_rate(row: Row) -> bool:
    depth = row.settings.get("depth")
    return row.unit == "MB/s" and row.figure > 0 and bool(row.chunk_bytes) and isinstance(depth, int) and depth > 0


def _has(row: Row, wanted: Mapping[str, Any]) -> bool:
    return row.settings.get("checksum") is not False and all(row.settings.get(name) == wanted[name] for name in wanted)
