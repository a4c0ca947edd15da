"""The examples of a fleet: vLLM's own command line takes their arguments, and kvtier what they configure."""

import pytest
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvtier.integrations.vllm_options import read_options
from tests.docs.fleet import ENGINES


@pytest.mark.parametrize("engine", ENGINES, ids=[engine.where for engine in ENGINES])
def test_vllm_takes_the_arguments_of_an_example_and_kvtier_its_options(engine):
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(engine.arguments)
    assert parsed.model_tag == engine.arguments[0]
    assert parsed.shutdown_timeout == int(engine.flag("shutdown-timeout"))
    given = parsed.kv_transfer_config.kv_connector_extra_config
    assert parsed.kv_transfer_config.kv_connector == engine.connector["kv_connector"]
    options = read_options(given)
    assert (options.revision, options.cpu_bytes_to_use) == (parsed.revision, engine.config.cpu_bytes_to_use)
    assert [tier.type for tier in options.secondary_tiers] == [kind for kind, _ in engine.tiers]
