"""The page on moving from vLLM's own tiering: what it names of vLLM's is there."""

import ast
import os
import re
from pathlib import Path

import pytest
import vllm
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvtier.integrations import vllm_plugin

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "move-from-vllm.md").read_text()
PARTS = ("v1/kv_offload", "distributed/kv_transfer/kv_connector/v1/offloading")
VERSIONS = [Path(vllm.__file__).parent, *(Path(given) / "vllm" for given in (os.environ.get("VLLM_NEWER"),) if given)]


def vocabulary(root):
    """Return what vLLM's offloading could call an option: texts, arguments and fields."""
    found = set[str]()
    for path in (file for part in PARTS for file in (root / part).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Constant(value=str(text)):
                    found.add(text)
                case ast.arg(arg=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(name)
    return found


def theirs(*, newest):
    """Return the options of vLLM's that the page names; what only the newest version has is said to be so."""
    tables = re.findall(r"^\| vLLM's \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    rows = [line for table in tables for line in table.splitlines() if newest or "vLLM 0.33 has it" not in line]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


@pytest.mark.parametrize("root", VERSIONS, ids=lambda root: root.parent.name)
def test_every_option_of_vllms_that_the_page_names_exists(root):
    named = theirs(newest="0.33" in str(root) or vllm.__version__.startswith("0.33"))
    assert len(named) > 25
    assert named - vocabulary(root) == set()


def test_the_page_names_every_type_of_tier_that_vllm_has_but_for_its_example():
    kvtiers = {vllm_plugin.TIER, vllm_plugin.SECOND}  # An engine of this process may have registered them.
    assert all(f"`{name}`" in PAGE for name in (SecondaryTierFactory._registry.keys() - {"example"} - kvtiers))
