"""The schemas of what the commands write as JSON. Run as a program, it writes the page that has them."""

import json
from pathlib import Path
from typing import Any

import msgspec

from kvtier.tools.configuration import CheckedConfig
from kvtier.tools.directory import DirectoryUsage, ListedChunk, VerifyReport
from kvtier.tools.figures import Figures
from kvtier.tools.prune import PruneReport
from kvtier.tools.replay.report import Report
from kvtier.tools.replay.size import SizeReport
from kvtier.tools.selftest import SelftestReport
from kvtier.tools.top import EngineNow

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "json.md"
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

HEAD = """# JSON of the commands

`--json` has a command write [JSON](cli.md#options-of-every-command). Here is a [JSON Schema](https://json-schema.org)
of what each writes. The [page on the command line](cli.md) explains the fields. Later versions may add fields. Those
that are here keep their names and their meaning, until the change log says otherwise.
"""


def page():
    """Return the page as it should be; commands that write the same have one section."""
    sections = [f"## {heading}\n\n``` {{ .json .wrap }}\n{written(kind)}\n```\n" for heading, kind in headed()]
    return "\n".join((HEAD, *sections))


def headed():
    """Yield each section's heading, and what its commands write."""
    names: dict[str, list[str]] = {}
    for name, kind in REPORTS.items():
        names.setdefault(str(kind), []).append(f"kvtier {name}")
    for same in names.values():
        yield ", ".join(same), REPORTS[same[0].removeprefix("kvtier ")]


def written(kind):
    return json.dumps(msgspec.json.schema(kind), indent=1)


if __name__ == "__main__":
    PAGE.write_text(page())
