"""The benchmark of a pool shows the tier next to Mooncake's own calls."""

import asyncio
import json
import sys


async def test_the_bench_shows_the_tier_beside_mooncakes_own_calls(pool, prefix, tmp_path) -> None:
    config = tmp_path / "engine.toml"
    config.write_text(
        'cpu_bytes_to_use = "4MiB"\nchunk_bytes = "8KiB"\nrunner = "process"\n'
        f'[[secondary_tiers]]\ntype = "mooncake"\nmaster = "{pool.address}"\nprefix = "{prefix}"\n'
    )
    options = ("--size", "256KiB", "--rounds", "1", "--json=-")
    bench = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvtier", "bench", config, *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    told, why = await bench.communicate()
    assert bench.returncode == 0, why.decode()
    rows = {row["operation"]: row for row in json.loads(told)["rows"]}
    assert rows["load"]["limit_is"] == rows["store"]["limit_is"] == "Mooncake's own zero-copy calls"
    assert rows["load"]["figure"] > 0
