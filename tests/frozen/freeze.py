"""The frozen figures: what no change of the code's shape may change.

    .venv/bin/python -m tests.frozen.freeze

writes `frozen.json` again: hit ratios on generated and real traces, public names, and the promises of the conformance
suite. Run it with a change that is meant to change one of them; the diff then shows which.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import kvtier
import kvtier.backend
from kvtier.testing import conformance
from tests.tools.replay.real import AGENTIC, CONVERSATION, MINI_SWE

FROZEN = Path(__file__).parent / "frozen.json"
ROOT = Path(__file__).parents[2]
POLICIES = "fifo,lru,arc,s3fifo,density,opt"
REPLAYED = ("requests", "chunk_references", "hits", "wrong_chunks", "tiers")


def names():
    return {"kvtier": sorted(kvtier.__all__), "kvtier.backend": sorted(public(kvtier.backend))}


def public(module):
    return {name for name, value in vars(module).items() if name[0] != "_" and not isinstance(value, ModuleType)}


def promises():
    suites = [value for name, value in vars(conformance).items() if name.endswith("Conformance")]
    return sorted({f"{suite.__name__}.{name}" for suite in suites for name in dir(suite) if name.startswith("test_")})


def policies(trace, *options):
    return told("policies", trace, *options)


def replayed(trace, *options):
    report = told("simulate", trace, "--seed", "0", *options)
    return {name: report[name] for name in REPLAYED}


def told(*command):
    line = [sys.executable, "-m", "kvtier", *command, "--quiet", "--json", "-"]
    return json.loads(subprocess.run(line, cwd=ROOT, check=True, capture_output=True).stdout)


GENERATED = {
    "policies": lambda: policies("generated", "--limit", "800", "--policies", POLICIES, "--sizes", "0.01,0.05,0.2"),
    "replay": lambda: replayed("generated", "--limit", "400"),
}
"""Figures on the generated workload."""

REAL = {
    "conversation": (CONVERSATION, lambda path: policies(path, "--policies", POLICIES, "--sizes", "0.05,0.25")),
    "conversation, replay": (CONVERSATION, lambda path: replayed(path, "--limit", "600")),
    "mini_swe": (MINI_SWE, lambda path: policies(path, "--policies", POLICIES, "--sizes", "0.05,0.25")),
    "agents": (AGENTIC, lambda path: policies(path, "--policies", "lru,density", "--sizes", "0.01", "--limit", "6000")),
}
"""Figures on real traces, with the file that each needs."""


def main(folder):
    frozen = {
        "names": names(),
        "promises": promises(),
        "generated": {name: figures() for name, figures in GENERATED.items()},
        "real": {name: figures(str(folder / file)) for name, (file, figures) in REAL.items()},
    }
    FROZEN.write_text(json.dumps(frozen, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(*sys.argv[1:]) if sys.argv[1:] else ROOT.parent / "shared" / "traces")
