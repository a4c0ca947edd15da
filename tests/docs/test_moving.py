"""The pages on moving from other tiering: every option of kvtier's that they name is one, and tables are whole."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from kvtier.backend.contract import backend_class, known_types
from kvtier.config import EngineConfig, EngineLimits, TierConfig, TierLimits
from kvtier.integrations.vllm_options import CONNECTOR, VllmOptions, read_line
from kvtier.settings.hints import Hint

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "how-to").glob("move-from-*.md"))
OF_REQUESTS = {"kv_load_tiers"}  # In vLLM's `kv_transfer_params`.

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def options():
    structs = [EngineConfig, EngineLimits, TierConfig, TierLimits, Hint, VllmOptions]
    structs += [backend_class(name).options_type for name in known_types()]
    return OF_REQUESTS.union(field.encode_name for struct in structs for field in msgspec.structs.fields(struct))


def tables(page):
    found = re.findall(r"^\| \w+'s .*\|\n\|[-|]+\|\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE)
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()] for table in found]


def names(cell):
    return set(re.findall(r"`([a-z_0-9]+)`", cell))


@every_page
def test_every_option_of_kvtiers_that_a_table_names_exists(page):
    rows = [row for table in tables(page) for row in table if len(row) == 3]
    assert len(rows) > 15
    known = options()
    assert {name for _, ours, _ in rows for name in names(ours)} - known == set()
    assert all(names(ours) or ours.startswith("none") or "options of the tier" in ours for _, ours, _ in rows)
    assert all(theirs.startswith("`") or theirs == "none" for theirs, _, _ in rows)


@every_page
def test_the_configurations_of_a_page_are_accepted(page):
    blocks = map(json.loads, re.findall(r"```json\n(.*?)```", page.read_text(), re.DOTALL))
    ours = [read_line(block) for block in blocks if block["kv_connector"] == CONNECTOR]
    assert ours
    assert [options.cpu_bytes_to_use for options in ours] == [64 << 30] * len(ours)
