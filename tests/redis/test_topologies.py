"""Several servers, a primary that sentinels watch, a cluster that moves its slots, TLS and access lists."""

import asyncio
import datetime as dt
import ipaddress
import os
import signal
import socket
import ssl
import threading
import time
from contextlib import ExitStack, suppress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvtier.backend import Abandoned, BackendUnavailable, ConfigError, chunk_hash
from kvtier.testing.conformance import keys_of, label
from kvtier_backends.redis import RedisOptions
from kvtier_backends.redis.link import Lost
from kvtier_backends.redis.options import Address
from kvtier_backends.redis.servers import Away, Login, Server, make_topology
from tests.redis.servers import PATIENCE_S, Proxy, RedisServer, free_port, until
from tests.redis.test_faults import QUICK
from tests.remote.tiers import kept, recovers

PASSWORD = "KVTIER_TEST_PASSWORD"


def topology_of(url):
    options = RedisOptions(url=url)
    return make_topology(options, Login(options))


def owners(*servers, count=4_000):
    topology = topology_of(f"redis://{','.join(servers)}")
    return [str(topology.server_of(b"name %d" % number).address) for number in range(count)]


def test_servers_share_chunks_evenly_and_a_new_one_takes_its_share_only():
    three, four = owners("a:1", "b:1", "c:1"), owners("d:1", "c:1", "b:1", "a:1")
    assert all(1_200 < three.count(server) < 1_470 for server in ("a:1", "b:1", "c:1"))
    moved = [new for old, new in zip(three, four, strict=True) if old != new]
    assert set(moved) == {"d:1"}
    assert 850 < len(moved) < 1_150


async def test_a_tier_opens_if_one_of_its_servers_answers(opened, server, lender):
    gone = f"127.0.0.1:{free_port()}"
    tier, keys = await opened(server.address, gone, **QUICK), keys_of(20)
    outcomes = {type(outcome).__name__ for outcome in await tier.store(lender.writes(keys))}
    assert outcomes == {"NoneType", "TransferFailed"}
    with pytest.raises(BackendUnavailable, match="refused"):
        await opened(gone, **QUICK)


@pytest.mark.promise("Password, bucket, certificate or topology are wrong")
async def test_a_wrong_password_is_a_config_error(opened, own_server, monkeypatch, lender):
    server = own_server("--requirepass", "right", password="right")
    with pytest.raises(ConfigError, match=r"^password_file: .*NOAUTH"):
        await opened(server.address)
    monkeypatch.setenv(PASSWORD, "wrong")
    with pytest.raises(ConfigError, match=r"^password_env: .*WRONGPASS"):
        await opened(server.address, password_env=PASSWORD)
    monkeypatch.setenv(PASSWORD, "right")
    await lender.keep(await opened(server.address, password_env=PASSWORD), keys_of(3))


async def test_an_access_list_that_lacks_a_command_is_named_at_the_start(opened, own_server, monkeypatch, lender):
    server = own_server()
    monkeypatch.setenv(PASSWORD, "right")
    user = ["ACL", "SETUSER", "kv", "on", ">right", "~test-*", "-@all", "+ping", "+exists", "+get", "+set"]
    server.ask(*user)
    with pytest.raises(ConfigError, match=r"url: .* does not allow its user UNLINK"):
        await opened(server.address, user="kv@", password_env=PASSWORD)
    server.ask(*user, "+unlink")
    tier, keys = await kept(lender, opened(server.address, user="kv@", password_env=PASSWORD), 3)
    await tier.delete(keys[:1])
    assert await lender.recall(tier, keys) == ["ChunkMissing", *(label(key) for key in keys[1:])]


async def test_no_error_shows_a_password_that_a_server_sends_back(opened, own_server, monkeypatch):
    """One without passwords repeats it in its error; an echo server sends back everything."""
    monkeypatch.setenv(PASSWORD, "geheim")
    with pytest.raises(ConfigError, match=r"^password_env: .*unknown command") as refused:
        await opened(own_server("--rename-command", "AUTH", "").address, password_env=PASSWORD)
    assert "geheim" not in str(refused.value)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_echo, args=(listener,), daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(BackendUnavailable, match="does not speak Redis") as failed:
            await opened(address, user="kv@", password_env=PASSWORD, **QUICK)
        assert "geheim" not in str(failed.value)


def _echo(listener):
    with suppress(OSError), listener.accept()[0] as connection:
        while passed := connection.recv(1 << 16):
            connection.sendall(passed)


async def test_a_server_is_reached_by_an_address_of_the_sixth_version(opened, server, lender):
    try:
        proxy = Proxy(server.port, host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    try:
        tier, keys = await kept(lender, opened(proxy.address, lanes=1), 12)
        assert await lender.recall(tier, keys) == [label(key) for key in keys]
        assert list(await tier.probe(keys)) == [True] * 12
    finally:
        proxy.end()


async def test_a_program_with_thousands_of_open_files_uses_it_as_any_other(opened, cluster, server, lender):
    """`select` takes numbers up to 1,023."""
    with ExitStack() as stack:
        for _ in range(1_100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        keys = keys_of(12)
        for servers, about in ((server.address, {}), (cluster[0].address, {"scheme": "redis+cluster"})):
            tier = await opened(servers, **about)
            for _ in range(2):  # The second time over connections that were kept.
                await lender.keep(tier, keys)
                assert await lender.recall(tier, keys) == [label(key) for key in keys]
            assert tier.counts() == {}


@pytest.fixture
def front(server, certified):
    front = Proxy(server.port, tls=certified)
    yield front
    front.end()


@pytest.fixture
def certified(tmp_path):
    """Return a certificate of this host's, and leave it in `ca.pem`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvtier test")])
    now, day = dt.datetime.now(dt.UTC), dt.timedelta(days=1)
    host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    made = made.add_extension(host, False).add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (tmp_path / "ca.pem").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(pem))
    (tmp_path / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.pem", tmp_path / "key.pem")
    return context


async def test_chunks_travel_over_tls_and_closing_ends_calls_that_hang(opened, own_server, certified, tmp_path, lender):
    server = own_server()
    front = Proxy(server.port, tls=certified)
    opening = opened(front.address, scheme="rediss", tls_ca_file=str(tmp_path / "ca.pem"), timeout_s=600)
    tier, keys = await kept(lender, opening, 64)
    assert await lender.recall(tier, keys) == [label(key) for key in keys]
    assert list(await tier.probe(keys)) == [True] * 64
    server.signal(signal.SIGSTOP)
    load = asyncio.create_task(tier.load(lender.reads(keys[:8])))
    await asyncio.sleep(0.05)
    assert await tier.aclose(0.05) == Abandoned(1)
    with pytest.raises(BackendUnavailable):
        await load
    assert tier.counts() == {"connections_lost": 1, "unreachable": 8}
    server.signal(signal.SIGCONT)
    front.end()


@pytest.mark.promise("Password, bucket, certificate or topology are wrong")
async def test_an_untrusted_certificate_is_refused_and_a_server_without_any_unavailable(opened, front, server):
    with pytest.raises(ConfigError, match=r"^tls_ca_file: .*certificate is refused"):
        await opened(front.address, scheme="rediss")
    with pytest.raises(BackendUnavailable):
        await opened(server.address, scheme="rediss", **QUICK)


async def test_nodes_that_report_the_topology_need_trusted_certificates(opened, certified, cluster, tmp_path):
    front = Proxy(cluster[0].port, tls=certified)  # Its certificate is that of 127.0.0.1.
    other = f"localhost:{front.address.rpartition(':')[2]}"
    with pytest.raises(BackendUnavailable, match="certificate is refused"):
        await opened(other, scheme="rediss+cluster", tls_ca_file=str(tmp_path / "ca.pem"), **QUICK)
    front.end()


def test_a_failure_of_tls_is_not_taken_for_an_error_of_the_systems():
    """TLS has numbers of its own: the 1 of any failure is the system's "not permitted"."""

    def answer_in_the_clear(listener):
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"-ERR there is no TLS here\r\n")
            connection.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        options = RedisOptions(url=f"rediss://127.0.0.1:{listener.getsockname()[1]}")
        answering = threading.Thread(target=answer_in_the_clear, args=(listener,))
        answering.start()
        with pytest.raises(Away, match="SSL") as failed:
            Server(options.target().addresses[0], Login(options)).borrow(time.monotonic() + PATIENCE_S)
        answering.join()
    assert failed.value.number == 0


@pytest.fixture
def watched(own_server, tmp_path):
    primary = own_server()
    replica = own_server("--replicaof", "127.0.0.1", str(primary.port))
    port = free_port()
    (tmp_path / "sentinel.conf").write_text(
        f"sentinel monitor cache 127.0.0.1 {primary.port} 1\n"
        "sentinel down-after-milliseconds cache 500\nsentinel failover-timeout cache 2000\n"
    )
    sentinel = own_server("--sentinel", port=port, program_arguments=[str(tmp_path / "sentinel.conf")])
    until(lambda: replica.ask("INFO", "replication")["master_link_status"] == "up")
    until(lambda: len(sentinel.ask("SENTINEL", "REPLICAS", "cache")) == 1)
    return primary, replica, sentinel


@pytest.mark.promise("`redis`: a primary fails under sentinels; a cluster moves slots")
async def test_a_tier_follows_the_primary_that_sentinels_name(opened, watched, lender):
    primary, replica, sentinel = watched
    about = {"scheme": "redis+sentinel", "path": "/cache"}
    tier, keys = await kept(lender, opened(sentinel.address, **about, **QUICK), 12)
    assert primary.ask("DBSIZE") >= 12
    primary.kill()
    until(lambda: replica.ask("ROLE")[0] == b"master")
    await recovers(tier, lender, keys)
    assert replica.ask("DBSIZE") >= 12


async def test_neither_an_unknown_primary_nor_a_sentinel_itself_is_a_server(opened, watched):
    with pytest.raises(BackendUnavailable, match="sentinels"):
        await opened(watched[2].address, scheme="redis+sentinel", path="/other", **QUICK)
    with pytest.raises(ConfigError, match=r"url: .* keeps no values"):
        await opened(watched[2].address)


@pytest.fixture(scope="module")
def nodes(outside, tmp_path_factory):
    folder, nodes = tmp_path_factory.mktemp("cluster"), []
    for _ in range(2):
        port = free_port(with_bus=True)
        about = ("--cluster-enabled", "yes", "--cluster-config-file", f"nodes-{port}.conf")
        nodes.append(RedisServer(folder, *about, "--cluster-require-full-coverage", "no", port=port).start())
    nodes[0].ask("CLUSTER", "ADDSLOTS", *range(8_192))
    nodes[1].ask("CLUSTER", "ADDSLOTS", *range(8_192, 16_384))
    nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", nodes[1].port)
    until(lambda: all(node.ask("CLUSTER", "INFO").startswith(b"cluster_state:ok") for node in nodes))
    until(lambda: all(len(node.ask("CLUSTER", "SLOTS")) == 2 for node in nodes))
    yield nodes[0], nodes[1]
    for node in nodes:
        node.kill()


@pytest.fixture
def cluster(nodes):
    for node in nodes:
        node.ask("FLUSHALL")
    yield nodes
    for node in nodes:
        node.signal(signal.SIGCONT)


def moving(cluster, name):
    slot = cluster[0].ask("CLUSTER", "KEYSLOT", name)
    ids = [node.ask("CLUSTER", "MYID") for node in cluster]
    cluster[1].ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
    cluster[0].ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])

    def ended():
        for node in reversed(cluster):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[1])

    return ended


def stored_as(node, prefix, key):
    names = node.ask("KEYS", f"{prefix}*{chunk_hash(key).hex()}.bin")
    return names[0] if names else None


@pytest.mark.parametrize("model_name", ["plain", "org/{model}-v1"])
async def test_chunks_go_to_the_nodes_that_have_their_slots(opened, cluster, lender, model_name):
    """Of a name with braces, only what is between them would say where it goes."""
    tier, keys = await kept(lender, opened(cluster[0].address, scheme="redis+cluster", model_name=model_name), 60)
    assert await lender.recall(tier, keys) == [label(key) for key in keys]
    assert list(await tier.probe(keys)) == [True] * 60
    assert min([node.ask("DBSIZE") for node in cluster]) >= 10
    await tier.delete(keys)
    assert (await lender.recall(tier, keys), tier.counts()) == (["ChunkMissing"] * 60, {})


def test_a_server_that_is_no_node_any_more_is_forgotten(nodes, server):
    """With its connections, except those in use: they are closed when they are given back, or with the tier."""
    topology = topology_of(f"redis+cluster://{nodes[0].address}")
    old = topology.at(Address("127.0.0.1", server.port))  # A redirect has named it.
    links = [old.borrow(time.monotonic() + PATIENCE_S)[0] for _ in range(3)]
    old.give_back(links[0])
    topology.refresh()
    assert {str(known.address) for known in topology.known()} == {node.address for node in nodes}
    assert [link.closed for link in links] == [True, False, False]
    old.give_back(links[1])
    assert [link.closed for link in links] == [True, True, False]
    topology.close()
    with pytest.raises(Lost):
        links[2].head()
    old.drop(links[2])


@pytest.mark.promise("`redis`: a primary fails under sentinels; a cluster moves slots")
async def test_a_slot_that_moves_is_followed_at_every_moment_of_it(opened, cluster, prefix, lender):
    """ASK while it moves, MOVED afterwards; each chunk is found, and stored, in the same call."""
    tier, keys = await kept(lender, opened(cluster[0].address, scheme="redis+cluster"), 40)
    key = next(key for key in keys if stored_as(cluster[0], prefix, key))
    name = stored_as(cluster[0], prefix, key)
    has_moved = moving(cluster, name)
    assert await lender.recall(tier, [key]) == [label(key)]  # It is still where it was.
    cluster[0].ask("MIGRATE", "127.0.0.1", cluster[1].port, name, 0, 5_000)
    assert await lender.recall(tier, keys) == [label(key) for key in keys]
    await lender.keep(tier, [key], version=1)
    has_moved()
    assert await lender.recall(tier, [key]) == [label(key, 1)]
    assert tier.counts()["redirected"] >= 3
    before = tier.counts()["redirected"]
    assert await lender.recall(tier, [key]) == [label(key, 1)]  # By now it knows.
    assert tier.counts()["redirected"] == before


async def test_a_refused_asking_does_not_shift_the_replies(opened, cluster, prefix, lender, monkeypatch):
    """ASKING and the request after it have a reply each, also when the first is a refusal."""
    for node in cluster:
        node.ask("ACL", "SETUSER", "kv", "on", ">right", "~*", "+@all", "-asking")
    monkeypatch.setenv(PASSWORD, "right")
    about = {"scheme": "redis+cluster", "user": "kv@", "password_env": PASSWORD}
    with pytest.raises(ConfigError, match=r"url: .* does not allow its user ASKING"):
        await opened(cluster[0].address, **about)
    for node in cluster:
        node.ask("ACL", "SETUSER", "kv", "+asking")
    tier, keys = await opened(cluster[0].address, **about, lanes=1), keys_of(40)
    for node in cluster:
        node.ask("ACL", "SETUSER", "kv", "-asking")
    await lender.keep(tier, keys)
    key = next(key for key in keys if stored_as(cluster[0], prefix, key))
    name = stored_as(cluster[0], prefix, key)
    has_moved = moving(cluster, name)
    cluster[0].ask("MIGRATE", "127.0.0.1", cluster[1].port, name, 0, 5_000)
    for _ in range(3):
        assert list(await tier.probe(keys)) == [one != key for one in keys]
        assert await lender.recall(tier, keys) == ["TransferFailed" if one == key else label(one) for one in keys]
    assert not any(name.startswith("corrupt") for name in tier.counts())
    has_moved()


async def test_calls_do_not_wait_for_a_new_table_of_slots(opened, cluster, names_hang, lender):
    tier, keys = await kept(lender, opened(f"localhost:{cluster[0].port}", scheme="redis+cluster", **QUICK), 40)
    cluster[1].signal(signal.SIGSTOP)
    names_hang.clear()
    for _ in range(2):  # The first finds it out, the others would ask for what is new.
        with suppress(BackendUnavailable):
            await lender.recall(tier, keys)
        with suppress(BackendUnavailable):
            await tier.probe(keys)
    names_hang.set()
    cluster[1].signal(signal.SIGCONT)
    await recovers(tier, lender, keys)


@pytest.mark.promise("Password, bucket, certificate or topology are wrong")
async def test_a_url_that_does_not_fit_its_servers_is_a_mistake_of_the_configuration(opened, cluster, server):
    for address, about, told in (
        (server.address, {"path": "/1000"}, r"^url: .*DB index is out of range"),
        (cluster[0].address, {"path": "/1"}, r"^url: .*SELECT is not allowed in cluster mode"),
        (cluster[0].address, {}, "is a node of a cluster"),
    ):
        with pytest.raises(ConfigError, match=told):
            await opened(address, **about)
    with pytest.raises((ConfigError, BackendUnavailable), match="cluster"):
        await opened(server.address, scheme="redis+cluster")
