"""The page on vLLM: its configurations are accepted, its table names every option."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from kvtier.config import TierLimits
from kvtier.integrations.vllm_options import (
    CONNECTOR,
    SecondaryLimits,
    SecondaryOptions,
    VllmOptions,
    read_line,
    read_options,
    read_secondary_options,
)
from kvtier.settings.hints import IgnoredHints, hint_of

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "vllm.md").read_text()
VLLMS_OWN = {"type", "module_path"}  # Fields of a secondary tier that vLLM takes out before the tier sees them.


def configurations():
    return [json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]


def test_every_configuration_of_the_page_is_accepted():
    connectors = [given["kv_connector"] for given in configurations()]
    assert connectors == [*[CONNECTOR] * (len(connectors) - 1), "OffloadingConnector"]
    assert all(map(read_line, configurations()))
    *first_door, second_door = [given["kv_connector_extra_config"] for given in configurations()]
    assert [read_options(extra).cpu_bytes_to_use for extra in first_door] == [256 << 30, 128 << 30]
    (tier,) = second_door["secondary_tiers"]
    options = read_secondary_options({name: tier[name] for name in tier.keys() - VLLMS_OWN})
    assert (options.backend, options.options["capacity_bytes"]) == ("fs", "1TiB")


def test_the_page_names_the_engines_limits_that_a_tier_behind_vllms_manager_has():
    (row,) = re.findall(r"^\| `limits` .*`close_s`.*$", PAGE, re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", row.partition("in the same table")[2].partition(". ")[0]))
    assert named == set(SecondaryLimits.__struct_fields__) - set(TierLimits.__struct_fields__)


@pytest.mark.parametrize(
    ("heading", "options", "unnamed"),
    [
        ("Options", VllmOptions, {"spec_name", "spec_module_path"}),
        ("Keep vLLM's manager", SecondaryOptions, {"options"}),
    ],
)
def test_a_table_of_options_names_every_field_with_its_default(heading, options, unnamed):
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| .*\|$", section, re.MULTILINE)
    named = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    fields = {field.name: field for field in msgspec.structs.fields(options)}
    assert named.keys() == fields.keys() - unnamed
    required = {name for name, default in named.items() if default == "required"}
    assert required == {name for name, field in fields.items() if field.required}
    for name, default in named.items():
        if default == "none":
            assert fields[name].default is None
        elif default.startswith("`"):
            assert default.strip("`") == msgspec.json.encode(fields[name].default).decode()


def test_the_hints_of_the_page_are_hints():
    ignored, written = IgnoredHints(), re.findall(r'"kvtier": (\{.*?\})', PAGE)
    assert len(written) == 3
    for hint in written:
        assert hint_of(json.loads(hint.replace("True", "true")), ignored) is not None, ignored.counts
