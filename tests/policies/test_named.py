import re

import pytest

from kvtier.errors import ConfigError
from kvtier.policies import ARC, FIFO, LRU, S3FIFO, Density, Policy, known_policies, policy_class

HERE = __name__


class Own(FIFO):
    pass


class Half(Policy):
    def insert(self, keys):
        pass


@pytest.fixture
def own_policies(distribution):
    distribution("own", {"own": f"{HERE}:Own", "lru": f"{HERE}:Own", "gone": f"{HERE}:Gone"}, "policies")


def test_the_built_in_policies_are_found_by_name():
    found = {name: policy_class(name) for name in known_policies()}
    assert found == {"arc": ARC, "density": Density, "fifo": FIFO, "lru": LRU, "s3fifo": S3FIFO}


def test_a_distribution_brings_policies_and_replaces_no_built_in_one(own_policies):
    assert policy_class("own") is policy_class(f"{HERE}:Own") is Own
    assert policy_class("lru") is LRU
    assert {"own", "lru"} <= set(known_policies())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lrru", "'lrru' is no policy; did you mean 'lru'? Known: arc, density, fifo, gone, lru, own, s3fifo"),
        ("", "'' is no policy; Known: arc"),
        ("gone", f"module {HERE!r} has no 'Gone'"),
        (f"{HERE}:HERE", "is no subclass of kvtier.policies.Policy"),
        ("builtins:int", "is no subclass of kvtier.policies.Policy"),
        (f"{HERE}:Half", "Half does not implement __init__, evict, rank, remove, touch"),
    ],
)
def test_an_unknown_or_invalid_policy_raises_a_config_error(own_policies, name, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        policy_class(name)
