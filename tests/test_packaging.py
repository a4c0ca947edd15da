"""The published archives: the source distribution, and the wheel that an installer builds from it."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import kvtier
from tests.docs.test_readme import FILES, PICTURE, RAW, links

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def sdist(outside, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    build("sdist", ROOT, folder)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        members.extractall(folder, filter="data")
    (source,) = (path for path in folder.iterdir() if path.is_dir())
    return source


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Return the wheel that the source distribution builds, unpacked as in site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    build("wheel", sdist, folder)
    (archive,) = folder.glob("*.whl")
    site = folder / "site"
    with zipfile.ZipFile(archive) as members:
        members.extractall(site)
    return site


def build(target, source, folder):
    command = [sys.executable, "-B", "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr


def modules_below(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*.py")}


def test_the_wheel_holds_the_engine_and_its_tiers_typed_and_with_their_licence_and_nothing_else(wheel):
    (information,) = wheel.glob("*.dist-info")
    assert {path.name for path in wheel.iterdir()} == {"kvtier", "kvtier_backends", information.name}
    assert modules_below(wheel / "kvtier") == modules_below(ROOT / "kvtier")
    assert modules_below(wheel / "kvtier_backends") == modules_below(ROOT / "backends" / "kvtier_backends")
    assert (wheel / "kvtier" / "py.typed").is_file()
    assert (wheel / "kvtier_backends" / "py.typed").is_file()
    page = ROOT / "docs" / "how-to" / "troubleshooting.md"
    assert (wheel / "kvtier" / "tools" / page.name).read_text() == page.read_text()
    (licence,) = wheel.glob("*.dist-info/licenses/LICENSE")
    assert "Apache License" in licence.read_text()


def test_the_source_distribution_brings_no_tests_and_no_workspace(sdist):
    assert {path.name for path in sdist.iterdir()} == {
        ".gitignore",  # hatchling adds it, so that an sdist builds the same wheel as a checkout.
        ".hatch.py",
        "CHANGELOG.md",
        "LICENSE",
        "PKG-INFO",
        "README.md",
        "backends",
        "docs",
        "kvtier",
        "pyproject.toml",
    }


def test_every_version_says_the_same(wheel):
    (information,) = wheel.glob("*.dist-info")
    version = information.name.removeprefix("kvtier-").removesuffix(".dist-info")
    newest = re.findall(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert version == kvtier.__version__ == newest
    examples = [*(ROOT / "examples").rglob("*.yaml"), *(ROOT / "docs").rglob("*.md")]
    images = {found for path in examples for found in re.findall(r"kvtier-engine:([\d.]+)", path.read_text())}
    assert images == {version}


def test_the_metadata_says_whose_it_is_and_where_it_lives(wheel):
    (metadata,) = wheel.glob("*.dist-info/METADATA")
    head, _, description = metadata.read_text().partition("\n\n")
    for line in ("License-Expression: Apache-2.0", "Author: The kvtier authors", "Requires-Python: >=3.11"):
        assert line in head.splitlines()
    assert "Description-Content-Type: text/markdown" in head
    given, whole = links((ROOT / "README.md").read_text()), links(description)
    assert [FILES + link if "//" not in link else link for link in given] == [
        link.replace(RAW, FILES) for link in whole
    ]
    assert f"({RAW}{PICTURE})" in description
