"""The README holds what it says, and its links work wherever it is read, on a package index, too."""

import json
import re
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

from markdown_it import MarkdownIt

from tests.docs import fleet, readme

ROOT = Path(__file__).parents[2]
HOME = "https://github.com/kvtier/kvtier"
FILES = f"{HOME}/blob/main/"  # As a reader's browser shows them,
RAW = "https://raw.githubusercontent.com/kvtier/kvtier/main/"  # and as a page takes its pictures.
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PICTURE_BYTES_MAX = 8_192
SVG = "{http://www.w3.org/2000/svg}"


def links(text):
    """Return where the links and pictures of a page lead."""
    for token in MarkdownIt().enable("table").parse(text):
        for child in token.children or []:
            if child.type in ("link_open", "image"):
                yield str(child.attrs["href" if child.type == "link_open" else "src"])


def headings(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    tokens = MarkdownIt().parse(page.read_text())
    titles = [tokens[at + 1].children or [] for at, token in enumerate(tokens) if token.type == "heading_open"]
    plain = ("".join(part.content for part in title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


def leads_nowhere(link):
    """Return True unless the link is the address of a file of this tree, with a heading of that name."""
    if link.startswith(RAW):
        return not (ROOT / link.removeprefix(RAW)).is_file()
    if not link.startswith(FILES):
        return True
    name, _, anchor = link.removeprefix(FILES).partition("#")
    page = ROOT / name
    return not page.is_file() or bool(anchor and anchor not in headings(page))


def test_every_link_is_a_whole_address_of_a_file_that_is_here_and_of_a_heading_in_it():
    found = list(links(readme.TEXT))
    assert len(found) > 20
    assert [link for link in found if leads_nowhere(link)] == []


def test_the_addresses_of_the_package_lead_into_this_tree():
    urls = PROJECT["urls"]
    assert {urls["Homepage"], urls["Source"]} == {HOME}
    assert [urls[name] for name in ("Documentation", "Changelog") if leads_nowhere(urls[name])] == []


def test_the_picture_is_small_and_asks_for_nothing_and_says_what_it_shows():
    (link,) = (link for link in links(readme.TEXT) if link.startswith(RAW))
    picture = ROOT / link.removeprefix(RAW)
    assert picture.stat().st_size <= PICTURE_BYTES_MAX
    root = ET.fromstring(picture.read_text())
    assert (root.tag, {root[0].tag, root[1].tag}) == (f"{SVG}svg", {f"{SVG}title", f"{SVG}desc"})
    tags = {one.tag for one in root.iter()}
    assert not tags & {f"{SVG}{tag}" for tag in ("script", "image", "foreignObject", "style")}
    assert [value for one in root.iter() for value in one.attrib.values() if "//" in value] == []


def test_it_opens_with_one_sentence():
    first = readme.TEXT.split("\n\n")[1]
    assert re.fullmatch(r"kvtier [^.]*\.", first.replace("\n", " "))


def test_its_figure_is_the_one_of_the_performance_page():
    number = r"([\d.]+)"
    claim = rf"\*\*{number} requests a second, .*? serves {number}: {number} times as many\*\* \({number} to {number} "
    ((ours, theirs, times, least, most),) = re.findall(claim, readme.TEXT)
    page = (ROOT / "docs" / "explanation" / "performance.md").read_text()
    assert f"| fs | requests a second | {ours} | {theirs} | {times} ({least} to {most}) |" in page


def test_the_lines_that_start_vllm_name_a_connector_and_a_configuration_of_ours():
    program, verb, model, option, written = readme.serve_arguments()
    assert (program, verb, model, option) == ("vllm", "serve", readme.MODEL, "--kv-transfer-config")
    assert len(readme.serve().splitlines()) == 3
    connector = json.loads(written)
    assert connector["kv_role"] == "kv_both"
    extra = connector["kv_connector_extra_config"]
    exported = (ROOT / "kvtier" / "integrations" / "vllm" / "__init__.py").read_text()
    for module, name in (
        (connector["kv_connector_module_path"], connector["kv_connector"]),
        (extra["spec_module_path"], extra["spec_name"]),
    ):
        assert module == "kvtier.integrations.vllm"
        assert f'"{name}"' in exported
    engine = fleet.Engine("README.md", readme.serve_arguments(), set(), "", None, 0, 0, 0.0)
    assert engine.config.cpu_bytes_to_use == 8 << 30
    ((kind, options),) = engine.tiers
    assert (kind, options.root, options.capacity_bytes) == ("fs", readme.DIRECTORY, 100 << 30)


def test_the_sample_prints_what_stands_below_it(outside, capsys):
    (sample,) = readme.blocks("python")
    exec(compile(sample, "README.md", "exec"), {"__name__": "__page__"})
    printed = capsys.readouterr().out
    assert printed.count("\n") == 2
    assert f"```text\n{printed}```" in readme.section("In a program of yours")


def test_it_names_the_versions_of_python_and_of_vllm_that_the_package_does():
    install = readme.section("Install")
    pythons = re.findall(r":: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)
    assert f"Python {', '.join(pythons[:-1])} or {pythons[-1]}" in install
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    source = (ROOT / "kvtier" / "integrations" / "vllm" / "__init__.py").read_text()
    (known,) = re.findall(r"^KNOWN_VERSIONS = \((.*)\)$", source, re.MULTILINE)
    versions = " or ".join(re.findall(r"[\d.]+", known))
    assert f"vLLM may be {versions};" in install


def test_it_says_first_that_it_has_never_run_on_a_gpu():
    assert readme.section("Maturity").lstrip().startswith("**kvtier has never run on a GPU.**")


def test_it_names_each_extra_that_an_installer_can_ask_for():
    for extra in re.findall(r"'\.\[(\w+)\]'", readme.TEXT):
        assert extra in PROJECT["optional-dependencies"]
