"""The README holds what it says, and its links work in a clone, in a fork and on a package index."""

import json
import re
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from kvtier.integrations.vllm_options import CONNECTOR, VllmOptions, read_line
from tests.docs import fleet, readme

ROOT = Path(__file__).parents[2]
HOME = "https://github.com/kvtier/kvtier"
FILES = f"{HOME}/blob/main/"  # As a reader's browser shows them,
RAW = "https://raw.githubusercontent.com/kvtier/kvtier/main/"  # and as a page takes its pictures.
BADGES, ADVISORIES = "https://img.shields.io/", f"{HOME}/security/advisories/"
PICTURE = "docs/assets/first-token.svg"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PICTURE_BYTES_MAX = 8_192
SVG = "{http://www.w3.org/2000/svg}"


def links(text):
    for token in MarkdownIt().enable("table").parse(text):
        for child in token.children or []:
            if child.type in ("link_open", "image"):
                yield str(child.attrs["href" if child.type == "link_open" else "src"])


def headings(page):
    tokens = MarkdownIt().parse(page.read_text())
    titles = [tokens[at + 1].children or [] for at, token in enumerate(tokens) if token.type == "heading_open"]
    return {readme.anchor("".join(part.content for part in title)) for title in titles}


def leads_nowhere(link, base=ROOT):
    """Return True unless the link is the path of a file of this tree, with a heading of that name."""
    name, _, anchor = link.partition("#")
    page = (base / name).resolve()
    return not page.is_relative_to(ROOT) or not page.exists() or bool(anchor and anchor not in headings(page))


@pytest.mark.parametrize("page", ["README.md", ".github/CONTRIBUTING.md", ".github/SECURITY.md"])
def test_every_link_is_relative_and_leads_to_a_file_and_a_heading_that_are_here(page):
    found = [link for link in links((ROOT / page).read_text()) if not link.startswith((BADGES, ADVISORIES))]
    assert found
    assert [link for link in found if leads_nowhere(link, (ROOT / page).parent)] == []


def test_it_is_short():
    assert len(readme.TEXT.split()) <= 600
    (sample,) = readme.blocks("python")
    assert len(sample.splitlines()) <= 15


def test_the_addresses_of_the_package_lead_into_this_tree():
    urls = PROJECT["urls"]
    assert {urls["Homepage"], urls["Source"]} == {HOME}
    assert [
        urls[name] for name in ("Documentation", "Changelog") if leads_nowhere(urls[name].removeprefix(FILES))
    ] == []


def test_the_picture_is_small_and_asks_for_nothing_and_says_what_it_shows():
    picture = ROOT / PICTURE
    assert picture.stat().st_size <= PICTURE_BYTES_MAX
    root = ET.fromstring(picture.read_text())
    assert (root.tag, {root[0].tag, root[1].tag}) == (f"{SVG}svg", {f"{SVG}title", f"{SVG}desc"})
    tags = {one.tag for one in root.iter()}
    assert not tags & {f"{SVG}{tag}" for tag in ("script", "image", "foreignObject", "style")}
    assert [value for one in root.iter() for value in one.attrib.values() if "//" in value] == []


def test_it_opens_with_one_sentence():
    first = readme.TEXT.split("\n\n")[1]
    assert re.fullmatch(r"kvtier [^.]*\.", first.replace("\n", " "))


def test_its_picture_shows_what_the_demo_prints():
    """The page of first steps shows the demo's lines, and a test runs it."""
    page = (ROOT / "docs" / "tutorial" / "first-steps.md").read_text()
    rows = dict(re.findall(r"^(with\w*_tiering) +([\d. ]+)", page, re.MULTILINE))
    (median, tail, *_), (median_without, tail_without, *_) = (
        rows[name].split() for name in ("with_tiering", "without_tiering")
    )
    shown = re.findall(r">([\d.]+)</text>", (ROOT / PICTURE).read_text())
    assert shown == [median_without, tail_without, median, tail]
    told = f"from {median_without} to {median} seconds, the 99th percentile from {tail_without} to {tail} seconds"
    assert told in readme.TEXT


def test_the_lines_that_start_vllm_name_a_connector_and_a_configuration_of_ours():
    program, verb, model, option, written = readme.serve_arguments()
    assert (program, verb, model, option) == ("vllm", "serve", readme.MODEL, "--kv-transfer-config")
    assert len(readme.serve().splitlines()) == 3
    connector = json.loads(written)
    assert connector["kv_role"] == "kv_both"
    assert connector["kv_connector"] == CONNECTOR
    assert isinstance(read_line(connector), VllmOptions)
    engine = fleet.Engine("README.md", readme.serve_arguments(), set(), "", None, 0, 0, 0.0)
    assert engine.config.cpu_bytes_to_use == 8 << 30
    ((kind, options),) = engine.tiers
    assert (kind, options.root, options.capacity_bytes) == ("fs", readme.DIRECTORY, 100 << 30)


def test_the_sample_prints_what_stands_below_it(outside, capsys):
    (sample,) = readme.blocks("python")
    exec(compile(sample, "README.md", "exec"), {"__name__": "__page__"})
    printed = capsys.readouterr().out
    assert printed == "True\n"
    assert f"```text\n{printed}```" in readme.section("In a program")


def test_it_names_the_versions_of_python_and_of_vllm_that_the_package_does():
    pythons = re.findall(r":: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)
    assert f"with Python {', '.join(pythons[:-1])} or {pythons[-1]}:" in readme.section("Install")
    assert f"![Python {pythons[0]} to {pythons[-1]}](" in readme.TEXT
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    known = re.findall(r"^\| (0\.\d+) \|", (ROOT / "docs/reference/compatibility.md").read_text(), re.MULTILINE)
    assert f"Inside vLLM {' and '.join(known)} on Linux" in readme.TEXT
    assert f"![vLLM {', '.join(known)}](" in readme.TEXT


def test_it_says_early_that_no_gpu_has_run_a_model_with_it():
    assert "**without a model**" in readme.TEXT.partition("\n- ")[0]


def test_it_names_each_extra_that_an_installer_can_ask_for():
    for extra in re.findall(r"'\.\[(\w+)\]'", readme.TEXT):
        assert extra in PROJECT["optional-dependencies"]
