"""SIGTERM with vLLM's defaults: it kills its engine at once; the runner outlives that and closes its tiers."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import readme
from tests.vllm.leftovers import leftovers, wait_until_gone
from tests.vllm.test_examples import EXAMPLES, environment_in
from tests.vllm.test_readme import PROMPT_HITS, asked, served

TIER = '"capacity_bytes": "100G"'
WARNED = "--shutdown-timeout is 0"


@pytest.mark.parametrize(("cascade", "kept"), [("store", PROMPT_HITS), ("evict", None)])
def test_a_server_that_is_told_to_end_keeps_its_checkpoint_and_says_first_what_it_may_lose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cascade: str, kept: int | None
) -> None:
    model, disk, given = tmp_path / "model", tmp_path / "tier", environment_in(tmp_path)
    subprocess.run([sys.executable, str(EXAMPLES / "vllm_tiny_model.py"), str(model)], env=given, check=True)
    given |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    lines = readme.serve().replace(TIER, f'{TIER}, "cascade": "{cascade}"')
    monkeypatch.setattr(readme, "serve", lambda: lines)
    before = leftovers()
    with served(model, disk, given) as address:
        asked(address, model)
    assert wait_until_gone(before) == set()
    assert list(disk.rglob("index*"))  # The checkpoint, which the runner writes as it closes the tier.
    assert (WARNED in (tmp_path / "server.log").read_text()) == (cascade == "evict")
    if kept is not None:
        with served(model, disk, given) as address:
            assert asked(address, model)[1] == kept
