"""`make dist`: the wheel on every Python of this machine and the sdist on the first, in empty environments.

    python -m tests.dist DIST

Each runs the README's sample, `kvtier --version`, and the demo's replay with every byte checked. With the sdist comes
the extra `plot`, and the replay draws its picture. Nothing of the checkout can be imported there.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.docs import readme

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
AT_ONCE = 2  # Environments; each is mostly one process that unpacks.
# Compiling every package would take longest; modules that are imported are compiled then.
INSTALL = ("install", "--quiet", "--no-compile")
PNG = b"\x89PNG\r\n\x1a\n"
RUNS = "import sys, venv; print('.'.join(map(str, sys.version_info[:2])))"
WHERE = "import kvtier, kvtier_backends.fs, sys; print(kvtier.__file__, kvtier_backends.fs.__file__)"


class Trial(NamedTuple):
    """One archive to try with one Python."""

    version: str
    python: str
    archive: Path

    def __str__(self):
        return f"Python {self.version}, {self.archive.name}"


class Failed(Exception):
    """A command of a trial has failed."""


def main(dist):
    archives, wanted = [*dist.glob("*.tar.gz"), *dist.glob("*.whl")], supported()
    found = pythons(wanted)
    missing = [version for version in wanted if version not in found]
    if missing:
        print(f"not tried, because this machine has none: Python {', '.join(missing)}")
    if len(archives) != 2 or not found:
        print(f"nothing to try: {len(archives)} archives in {dist}, {len(found)} Pythons")
        return 1
    sdist, wheel = archives
    trials = [Trial(version, python, wheel) for version, python in found.items()]
    trials.append(trials[0]._replace(archive=sdist))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return max(pool.map(reported, trials))


def supported():
    return [found[1] for one in PROJECT["classifiers"] if (found := re.search(r":: (3\.\d+)$", one))]


def pythons(wanted):
    found = {}
    for version in wanted:
        for name in candidates(version):
            if runs(name) == version:
                found[version] = name
                break
    return found


def candidates(version):
    for folder in os.get_exec_path():
        if (named := shutil.which(f"python{version}", path=folder)) is not None:
            yield named
    for kept in ("~/.pyenv/versions/{}.*", "~/.local/share/uv/python/cpython-{}.*"):
        folder, _, pattern = os.path.expanduser(kept).rpartition("/")
        yield from (f"{one}/bin/python3" for one in sorted(Path(folder).glob(pattern.format(version)), reverse=True))


def runs(python):
    try:
        done = subprocess.run([python, "-I", "-c", RUNS], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def reported(trial):
    with tempfile.TemporaryDirectory(prefix="kvtier-dist-") as folder:
        try:
            tried(trial, Path(folder))
        except Failed as failure:
            print(f"{trial}: FAILED\n{failure}", flush=True)
            return 1
    print(f"{trial}: installed; the README's sample and the demo ran", flush=True)
    return 0


def tried(trial, folder):
    """Install an archive in an empty environment, and follow the README there."""
    environment, elsewhere = folder / "environment", folder / "elsewhere"
    elsewhere.mkdir()
    run([trial.python, "-m", "venv", "--without-pip", str(environment)], elsewhere)
    python = str(environment / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    plot = trial.archive.name.endswith(".tar.gz")
    run([*pip, *INSTALL, f"{trial.archive}{'[plot]' if plot else ''}"], elsewhere)
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
    picture = ["--plot", "replay.png"] if plot else []
    run([kvtier, "replay", "generated", "--json", "replay.json", *picture], elsewhere)
    report = json.loads((elsewhere / "replay.json").read_text())
    expect(report["hit_ratio"] > 0, "the demo had no hits")
    expect(not plot or (elsewhere / "replay.png").read_bytes().startswith(PNG), "replay.png is not a picture")


def run(command, folder):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, check=False)
    expect(done.returncode == 0, f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def expect(true, otherwise):
    if not true:
        raise Failed(otherwise)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
