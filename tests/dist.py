"""`make dist`: sdist and wheel in empty environments, on every Python that is here, away from the source tree.

    python -m tests.dist DIST

What a reader of the README does is done in each: its sample, `kvtier --version`, and the demo's replay with every byte
checked. Then the extra `report` is installed, and the replay draws its picture and its page. Nothing of the checkout
can be imported there.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.docs import readme

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
AT_ONCE = 2  # Environments; each is mostly one process that unpacks.
# Compiling all that comes would take longer than all else; what is imported is compiled then.
INSTALL = ("install", "--quiet", "--no-compile")
PNG = b"\x89PNG\r\n\x1a\n"
RUNS = "import sys, venv; print('.'.join(map(str, sys.version_info[:2])))"
WHERE = "import kvtier, kvtier_backends.fs, sys; print(kvtier.__file__, kvtier_backends.fs.__file__)"


class Trial(NamedTuple):
    """One archive to try with one Python."""

    version: str
    python: str
    archive: Path

    def __str__(self) -> str:
        return f"Python {self.version}, {self.archive.name}"


class Failed(Exception):
    """A command of a trial has failed."""


def main(dist: Path) -> int:
    archives = sorted([*dist.glob("*.whl"), *dist.glob("*.tar.gz")])
    wanted = supported()
    found = pythons(wanted)
    missing = [version for version in wanted if version not in found]
    if missing:
        print(f"not tried, for there is none here: Python {', '.join(missing)}")
    trials = [Trial(version, python, archive) for version, python in found.items() for archive in archives]
    if len(archives) != 2 or not trials:
        print(f"nothing to try: {len(archives)} archives in {dist}, {len(found)} Pythons")
        return 1
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return max(pool.map(reported, trials))


def supported() -> list[str]:
    """Return the versions of Python that the package says it supports."""
    return [found[1] for one in PROJECT["classifiers"] if (found := re.search(r":: (3\.\d+)$", one))]


def pythons(wanted: Sequence[str]) -> dict[str, str]:
    """Return a Python that runs for each of these versions, wherever people have them."""
    found: dict[str, str] = {}
    for version in wanted:
        for name in candidates(version):
            if runs(name) == version:
                found[version] = name
                break
    return found


def candidates(version: str) -> Iterator[str]:
    """Name Pythons of a version: on the path, of pyenv, of uv."""
    for folder in os.get_exec_path():
        if (named := shutil.which(f"python{version}", path=folder)) is not None:
            yield named
    for kept in ("~/.pyenv/versions/{}.*", "~/.local/share/uv/python/cpython-{}.*"):
        folder, _, pattern = os.path.expanduser(kept).rpartition("/")
        yield from (f"{one}/bin/python3" for one in sorted(Path(folder).glob(pattern.format(version)), reverse=True))


def runs(python: str) -> str:
    """Return a Python's version if it runs and makes environments: version managers leave names that do not."""
    try:
        done = subprocess.run([python, "-I", "-c", RUNS], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def reported(trial: Trial) -> int:
    with tempfile.TemporaryDirectory(prefix="kvtier-dist-") as folder:
        try:
            tried(trial, Path(folder))
        except Failed as failure:
            print(f"{trial}: FAILED\n{failure}", flush=True)
            return 1
    print(f"{trial}: installed; the README's sample, the demo and its report ran", flush=True)
    return 0


def tried(trial: Trial, folder: Path) -> None:
    """Install an archive in an empty environment, and do there what the README says."""
    environment, elsewhere = folder / "environment", folder / "elsewhere"
    elsewhere.mkdir()
    run([trial.python, "-m", "venv", "--without-pip", str(environment)], elsewhere)
    python = str(environment / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]  # This one serves for all.
    run([*pip, *INSTALL, str(trial.archive)], elsewhere)
    run([*pip, "check"], elsewhere)
    imported = run([python, "-c", WHERE], elsewhere).split()
    expect(all(Path(one).is_relative_to(environment) for one in imported), f"imported {imported}")
    (sample,) = readme.blocks("python")
    (elsewhere / "sample.py").write_text(sample)
    printed = run([python, "-W", "error", "sample.py"], elsewhere)
    expect(f"```text\n{printed}```" in readme.TEXT, f"the sample printed {printed!r}")
    kvtier = str(environment / "bin" / "kvtier")
    expect(
        trial.archive.name.startswith(run([kvtier, "--version"], elsewhere).strip().replace(" ", "-")), "the version"
    )
    run([kvtier, "replay", "generated", "--json", "replay.json"], elsewhere)
    report = json.loads((elsewhere / "replay.json").read_text())
    expect(report["hit_ratio"] > 0, "the demo found nothing again")
    run([*pip, *INSTALL, f"{trial.archive}[plot]"], elsewhere)
    run([kvtier, "replay", "generated", "--plot", "replay.png"], elsewhere)
    drawn = (elsewhere / "replay.png").read_bytes().startswith(PNG)
    expect(drawn, "the picture is none")


def run(command: Sequence[str], folder: Path) -> str:
    """Run a command of which nothing leads into the checkout; return what it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, check=False)
    expect(done.returncode == 0, f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def expect(true: bool, otherwise: str) -> None:
    if not true:
        raise Failed(otherwise)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
