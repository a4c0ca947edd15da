import re

import pytest

from kvtier import ConfigError, EngineConfig, Namespace

FS = {"type": "fs", "root": "/mnt/kvtier"}
TIER = "secondary_tiers[0]"
OF_OTHERS = Namespace(model_name="m", row_bytes=4_096)
IN_FLIGHT, LEAST = "store_chunks_in_flight", "at least one row of 16,384"


def engine(**changes):
    return {"cpu_bytes_to_use": "1MiB", "chunk_bytes": "16KiB", **changes}


def tier(**changes):
    return engine(secondary_tiers=[{**FS, **changes}])


def of_type(name, **options):
    return engine(secondary_tiers=[{"type": name, **options}])


MISTAKES = [
    (engine(cpu_bytes_to_use="10gb"), "cpu_bytes_to_use: '10gb' given", "did you mean '10GB'?"),
    (engine(cpu_bytes_to_use="10 gigs"), "cpu_bytes_to_use: '10 gigs' given", "did you mean '10GiB'?"),
    (engine(cpu_bytes_to_use="1073741824"), "cpu_bytes_to_use: '1073741824' given", "did you mean '1073741824B'?"),
    (engine(limits={"lease_s": "5m"}), "limits.lease_s: '5m' given", "did you mean '5min'?"),
    (engine(limits={"lease_s": "10 seconds"}), "limits.lease_s: '10 seconds' given", "did you mean '10s'?"),
    (tier(ttl_s="7days"), f"{TIER}.ttl_s: '7days' given", "did you mean '7d'?"),
    (tier(capacity_bytes="2tb"), f"{TIER}.capacity_bytes: '2tb' given", "did you mean '2TB'?"),
    (tier(capacity_bytes=0), f"{TIER}.capacity_bytes: 0 given", "at least 1"),
    (engine(root="/x"), "root: no such field", f"did you mean '{TIER}.root'?"),
    (engine(lease_s=3), "lease_s: no such field", "did you mean 'limits.lease_s'?"),
    (engine(model_name="m"), "model_name: no such field", "did you mean 'namespace.model_name'?"),
    (tier(deadline_s=3), f"{TIER}.deadline_s: no such field", f"did you mean '{TIER}.limits.deadline_s'?"),
    (tier(lease_s=3), f"{TIER}.lease_s: no such field", "did you mean 'limits.lease_s'?"),
    (tier(cpu_bytes_to_use=1), f"{TIER}.cpu_bytes_to_use: no such field", "did you mean 'cpu_bytes_to_use'?"),
    (tier(limits={"root": "/x"}), f"{TIER}.limits.root: no such field", f"did you mean '{TIER}.root'?"),
    (engine(cpu_byte_to_use=1), "cpu_byte_to_use: no such field", "did you mean 'cpu_bytes_to_use'?"),
    (engine(tiers=[FS]), "tiers: no such field", "did you mean 'secondary_tiers'?"),
    (engine(block_size=16), "block_size: no such field", "did you mean 'chunk_bytes'?"),
    (engine(num_cpu_blocks=1000), "num_cpu_blocks: no such field", "did you mean 'cpu_bytes_to_use'?"),
    (engine(eviction_policy="lruu"), "eviction_policy: 'lruu' is no policy", "did you mean 'lru'?"),
    (engine(eviction_policy="LRU"), "eviction_policy: 'LRU' is no policy", "did you mean 'lru'?"),
    (engine(runner="fork"), "runner: 'fork' given", "'inline' or 'process' accepted"),
    (engine(events="yes"), "events: 'yes' given", "true or false accepted"),
    (engine(secondary_tiers=[FS, "fs"]), "secondary_tiers[1]: 'fs' given", "a table"),
    (tier(capacity="1GiB"), f"{TIER}.capacity: no such field", "did you mean 'capacity_bytes'?"),
    (of_type("fs", path="/x"), f"{TIER}.path: no such field", "did you mean 'root'?"),
    (of_type("fs", root_dir="/x"), f"{TIER}.root_dir: no such field", "did you mean 'root'?"),
    (of_type("redis", host="h"), f"{TIER}.host: no such field", "did you mean 'url', such as 'redis://host"),
    (of_type("redis", password="hunter2"), f"{TIER}.password: no such field", "'password_file' or 'password_env'"),
    (of_type("object", bucket="b"), f"{TIER}.bucket: no such field", "did you mean 'url', such as 's3://bucket"),
    (of_type("disk", root="/x"), f"{TIER}.type: 'disk' is no tier type", "did you mean 'fs'?"),
    (of_type("s3", url="s3://b"), f"{TIER}.type: 's3' is no tier type", "did you mean 'object'?"),
    (of_type("valkey"), f"{TIER}.type: 'valkey' is no tier type", "did you mean 'redis'?"),
    (
        of_type("ram"),
        f"{TIER}.type: 'ram' is no tier type",
        "did you mean 'memory', or the primary, which cpu_bytes_to_use sizes?",
    ),
    (engine(secondary_tiers=[{"root": "/x"}]), f"{TIER}.type: missing", "text"),
    (of_type("fs"), f"{TIER}.root: missing", "a path"),
    (of_type("object"), f"{TIER}.url: missing", "text"),
    (engine(secondary_tiers=FS), "secondary_tiers: a table given", "a list"),
    (tier(seal="aes-256-gcm"), f"{TIER}.seal: 'aes-256-gcm' given", "seal_key_file or seal_key_env"),
    (of_type("redis", url="10.0.0.1:6379"), f"{TIER}.url: no URL of servers given", "'redis://host:6379'"),
    (of_type("mooncake") | {"runner": "inline"}, "runner: 'inline' given", "'process' accepted"),
    (engine(cpu_bytes_to_use="2000PiB"), "cpu_bytes_to_use: '2000PiB' given", "bytes as an integer, or text such as"),
    (engine(eviction_policy=""), "eviction_policy: '' given", "text"),
    (engine(limits={"heartbeat_s": "99ms"}), "limits.heartbeat_s: '99ms' given", "seconds as a number"),
    (engine(limits={"heartbeat_s": "40d"}), "limits.heartbeat_s: '40d' given", "seconds as a number"),
    (engine(limits={"lease_s": "25h"}), "limits.lease_s: '25h' given", "seconds as a number"),
    (engine(limits={"close_s": "25h"}), "limits.close_s: '25h' given", "seconds as a number"),
    (engine(limits={"action_chunks": 1 << 30}), "limits.action_chunks: 1073741824 given", "at least 1 and at most"),
    (engine(namespace={"model_name": "a\0"}), "namespace.model_name: 'a\\x00' given", "accepted"),
    (engine(namespace=OF_OTHERS), "namespace.row_bytes: 4,096 given", "but chunk_bytes makes rows of 16,384"),
    (engine(secondary_tiers=[FS, {**FS, "name": "0:fs"}]), "secondary_tiers[1].name: '0:fs' given", "a unique name"),
    (tier(name="cpu"), f"{TIER}.name: 'cpu' given", "a unique name accepted"),
    (tier(medium="DISK"), f"{TIER}.medium: 'DISK' given", "'CPU' or 'STORAGE'"),
    (tier(options={"root": "/y"}), f"{TIER}.options: no such field", "Known here"),
    (tier(limits={"answer_ttl_s": "1us"}), f"{TIER}.limits.answer_ttl_s: '1us' given", "seconds as a number"),
    (tier(limits={"deadline_s": "25h"}), f"{TIER}.limits.deadline_s: '25h' given", "seconds as a number"),
    (tier(limits={IN_FLIGHT: 1 << 30}), f"{TIER}.limits.{IN_FLIGHT}: 1073741824 given", "at least 1 and at most"),
    (tier(limits={"store_bytes_in_flight": "12KiB"}), f"{TIER}.limits.store_bytes_in_flight: 12,288 bytes", LEAST),
    (tier(limits={"load_bytes_in_flight": "12KiB"}), f"{TIER}.limits.load_bytes_in_flight: 12,288 bytes", LEAST),
]


@pytest.mark.parametrize(("given", "begins", "remedy"), MISTAKES, ids=[begins for _, begins, _ in MISTAKES])
def test_a_usual_mistake_is_refused_with_its_field_its_value_and_a_remedy(given, begins, remedy):
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_dict(given)
    message = str(refused.value)
    assert message.startswith(begins)
    assert remedy in message
    assert "hunter2" not in message
    assert not re.search(r"/work|site-packages", message)


@pytest.mark.parametrize("where", ["", "kv_connector_extra_config"])
def test_a_remedys_path_begins_where_the_mistakes_path_does(where):
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_dict(engine(secondary_tiers=[FS, {**FS, "deadline_s": 1}]), where)
    top = f"{where}." if where else ""
    assert f"did you mean '{top}secondary_tiers[1].limits.deadline_s'?" in str(refused.value)
