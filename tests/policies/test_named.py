import re
import sys

import pytest

from kvtier.errors import ConfigError
from kvtier.policies import ARC, FIFO, LRU, S3FIFO, Density, known_policies, policy_class

OWN_POLICY = """
from kvtier.policies import FIFO, Policy

class Own(FIFO):
    pass

class Half(Policy):
    def insert(self, keys):
        pass

def not_a_class():
    pass
"""


@pytest.fixture
def own_policies(tmp_path, monkeypatch):
    """Install a distribution with policies; return the name of its module."""
    (tmp_path / "own_policies.py").write_text(OWN_POLICY)
    dist_info = tmp_path / "own-1.0.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (dist_info / "entry_points.txt").write_text(
        "[kvtier.policies]\nown = own_policies:Own\nlru = own_policies:Own\ngone = own_policies:Gone\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_policies", raising=False)
    return "own_policies"


def test_the_built_in_policies_are_found_by_name():
    found = {name: policy_class(name) for name in known_policies()}
    assert found == {"arc": ARC, "density": Density, "fifo": FIFO, "lru": LRU, "s3fifo": S3FIFO}


def test_a_distribution_brings_policies_and_replaces_no_built_in_one(own_policies):
    assert policy_class("own") is policy_class(f"{own_policies}:Own")
    assert policy_class("lru") is LRU
    assert {"own", "lru"} <= set(known_policies())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lrru", "'lrru' is no policy; did you mean 'lru'? Known: arc, density, fifo, gone, lru, own, s3fifo"),
        ("", "'' is no policy; Known: arc"),
        ("gone", "module 'own_policies' has no 'Gone'"),
        ("own_policies:not_a_class", "is no subclass of kvtier.policies.Policy"),
        ("builtins:int", "is no subclass of kvtier.policies.Policy"),
        ("own_policies:Half", "Half does not implement __init__, evict, rank, remove, touch"),
    ],
)
def test_an_unknown_or_invalid_policy_raises_a_config_error(own_policies, name, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        policy_class(name)
