"""Reports as commands write them, without the work."""

from array import array
from typing import Any

from kvtier.config import EngineConfig
from kvtier.tools.bench.figures import Figures, Row, load, this_machine
from kvtier.tools.replay.replay import Sample, Tally, TierTotals
from kvtier.tools.replay.report import ModelPart, Report, distribution, make_report
from kvtier.tools.replay.study import Extent

ROW_BYTES = 4_096


def config_of(*tiers: str) -> EngineConfig:
    given = [{"type": "dummy", "name": name, "latency_s": "1ms"} for name in tiers]
    return EngineConfig.from_dict({"cpu_bytes_to_use": "1MiB", "chunk_bytes": ROW_BYTES, "secondary_tiers": given})


def replay_report(
    *, tiers: tuple[str, ...] = ("disk",), samples: int = 20, trace: str = "trace.jsonl", **given: Any
) -> Report:
    """Return the report of a replay in virtual time that found a half of ten chunks a request, a second each."""
    tally = Tally(samples)
    for number in range(1, samples + 1):
        tally.requests = number
        tally.looked_up(10, 5, ())
        tally.time("fetch", number / 1_000)
        for name in tiers:
            tally.time(f"{name} load", number / 100)
        lower = {
            name: TierTotals(
                3 * number, 4 * number, 5 * number, {"budget": 7, "[i]": 1}, {"failed": number}, {"late": 2}
            )
            for name in tiers
        }
        tally.samples.append(
            Sample(float(number), number, 10 * number, {"cpu": TierTotals(2 * number, number, number), **lower})
        )
    tally.seconds = float(samples)
    fixed: dict[str, Any] = {
        "seed": 0,
        "extent": Extent(100, 4, 100, 3, {}),
        "config": config_of(*tiers),
        "engine": {
            "rows": 256,
            "chunk_bytes": ROW_BYTES,
            "tiers": dict.fromkeys(tiers, "dummy"),
            "prefill": {"slots": 4},
        },
        "interrupted": False,
        "ttft_s": {"with_tiering": array("d", [0.1, 1.0]), "without_tiering": array("d", [0.2, 2.0])},
        "model": [ModelPart(name, {"load_bytes_per_s": 7e9, "capacity_bytes": None}, "assumed") for name in tiers],
    }
    return make_report(tally, **{"trace": trace, **fixed, **given})


def bench_report(command: str = "kvtier bench fs", *, factor: float = 1.0, sizes: int = 2, lines: int = 3) -> Figures:
    """Return the report of a benchmark with so many operations, beside two limits."""
    rows = [
        Row(
            operation=f"store {line}",
            chunk_bytes=(128 << 10) << size,
            settings={"layout": "files" if line % 2 else "segments", "depth": 4},
            unit="MB/s",
            figure=factor * 100.0 * (line + 1),
            limit=250.0,
            limit_is=limit,
            ratio=factor * 0.4 * (line + 1),
            spread=(factor * 0.3 * (line + 1), factor * (0.9 if line == 1 else 0.5) * (line + 1)),
            figure_spread=(90.0, 110.0),
            limit_spread=(240.0, 260.0),
            rounds=3,
            figure_times=distribution(array("d", [0.001, 0.002, 0.1])) if line == 0 else None,
            limit_times=distribution(array("d", [0.001, 0.001, 0.002])) if line == 0 else None,
        )
        for limit in ("pwritev of one file", "preadv <of> one file")
        for line in range(lines)
        for size in range(sizes)
    ]
    return Figures(command=command, machine=this_machine(load(), "/"), seconds=1.0, rows=rows)
