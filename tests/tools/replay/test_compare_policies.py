import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "compare_policies.py"


@pytest.mark.usefixtures("thorough")
def test_the_example_tells_policies_apart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    ratios = {name: float(ratio) for name, ratio in re.findall(r"(\w+)  hit ratio (0\.\d+)", capsys.readouterr().out)}
    assert ratios["AnyOfThem"] < ratios["FIFO"] < ratios["LRU"] < ratios["everything"]
    assert {"S3FIFO", "ARC"} <= ratios.keys()
