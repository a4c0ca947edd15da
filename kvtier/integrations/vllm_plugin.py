"""vLLM's plug-in: makes kvtier known by name, so that a configuration needs no module's path.

vLLM calls `register` in each of its processes before it reads a configuration. Only an engine whose configuration names
them imports these modules; other starts cost the import of vLLM's own factories, which its engine imports anyway.
"""

import logging
from contextlib import suppress
from importlib import import_module
from operator import attrgetter

from kvtier.errors import Remedy
from kvtier.integrations.vllm_options import CONNECTOR, PACKAGE, SECOND, SPEC, TIER

NAMES = (  # Module and registrar of each factory; the name that configurations use, and its class.
    ("distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory.register_connector", CONNECTOR, CONNECTOR),
    ("v1.kv_offload.factory", "OffloadingSpecFactory.register_spec", SPEC, SPEC),
    ("v1.kv_offload.tiering.factory", "SecondaryTierFactory.register_tier", TIER, SECOND),
    ("v1.kv_offload.tiering.factory", "SecondaryTierFactory.register_tier", SECOND, SECOND),
)


def register() -> None:
    """Register all names, or, in a vLLM without these factories, none and log one warning. Never raises."""
    try:
        registrars = [attrgetter(path)(import_module(f"vllm.{module}")) for module, path, *_ in NAMES]
    except Exception as error:  # noqa: BLE001  # An unknown vLLM must start all the same.
        logging.getLogger(__name__).warning(
            "kvtier registers nothing with this vLLM, whose factories differ: %s; see %s", error, Remedy.CONFIGURATION
        )
        return
    for registrar, (*_, name, class_name) in zip(registrars, NAMES, strict=True):
        with suppress(ValueError):  # It is registered already.
            registrar(name, PACKAGE, class_name)
