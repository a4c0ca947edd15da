"""Answers off the wire are bounded and typed before they are used: addresses, tables of slots, lengths."""

import socket
import threading
from contextlib import suppress

import pytest

from kvtier_backends.redis import RedisOptions
from kvtier_backends.redis.backend import target_of
from kvtier_backends.redis.link import Refused, refusal_of
from kvtier_backends.redis.options import Address
from kvtier_backends.redis.servers import SLOTS, Away, Login, make_topology
from tests.own import until_end
from tests.redis.test_faults import QUICK

PASSWORD = "KVTIER_TEST_PASSWORD"
ASKED = Address("10.0.0.1", 6_379)
WHOLE = f":0\r\n:{SLOTS - 1}\r\n".encode()
OTHERS = b":1\r\n"  # To every other command: what a chunk that is not there is answered.


class Node:
    def __init__(self, answers):
        self.answers = {b"AUTH": b"+OK\r\n", b"PING": b"+PONG\r\n"} | answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.address = Address("127.0.0.1", self.port)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self._listener.accept()[0],), daemon=True).start()

    def _serve(self, client):
        with client, suppress(OSError), client.makefile("rb") as asked:
            while count := asked.readline()[1:]:
                words = [asked.read(int(asked.readline()[1:]) + 2)[:-2] for _ in range(int(count))]
                client.sendall(self.answers.get(b" ".join(words[:2]), self.answers.get(words[0], OTHERS)))


@pytest.fixture
def node(request):
    return lambda answers: until_end(request, started := Node(answers), started.close)


def slots(*nodes, of=WHOLE):
    return b"*1\r\n*%d\r\n%b%b" % (2 + len(nodes), of, b"".join(nodes))


def at(host, port):
    named = b"$-1" if host is None else b"$%d\r\n%b" % (len(host), host)
    return b"*4\r\n%b\r\n:%d\r\n$2\r\nid\r\n*0\r\n" % (named, port)


@pytest.fixture
def told_by(request):
    def told_by(node, scheme, path="", **about):
        options = RedisOptions(url=f"{scheme}://127.0.0.1:{node.port}{path}", **about, **QUICK)
        return until_end(request, topology := make_topology(options, Login(options)), topology.close)

    return told_by


CLUSTER = {"scheme": "redis+cluster"}
SENTINEL = {"scheme": "redis+sentinel", "path": "/cache"}


@pytest.mark.parametrize(
    "told",
    [
        slots(at(b"h", 1), of=b":0\r\n:%d\r\n" % (1 << 40)),
        slots(at(b"h", 1), of=b":0\r\n:%d\r\n" % SLOTS),
        slots(at(b"h", 1), of=b":-1\r\n:5\r\n"),
        slots(at(b"h", 1), of=b":9\r\n:5\r\n"),
        slots(at(b"h", 1), of=b":%b\r\n:5\r\n" % (b"9" * 4_000)),
        slots(at(b"h", -1)),
        slots(at(b"h", 0)),
        slots(at(b"h", 65_536)),
        slots(at(b"h\x1b[2J", 1)),
        slots(at(b"h\0", 1)),
        slots(at(b"a b", 1)),
        slots(at(b"/tmp/socket", 1)),
        slots(at(b"\xff", 1)),
        slots(at(b"h" * 300, 1)),
        slots(),
        b"*1\r\n*3\r\n%b$1\r\nh\r\n" % WHOLE,
        b"*1\r\n*3\r\n%b*2\r\n$99999999999\r\nh" % WHOLE,
        b"*%d\r\n" % (1 << 60),
        b"*99999\r\n" + b"*3\r\n" * 9_999,
        b"*1\r\n" * 100_000,
        b"*1\r\n*4\r\n" + WHOLE + at(b"h", 1) + b"*1\r\n" * 100_000,
        b"*-1\r\n",
        b"+OK\r\n",
        b"-ERR \x1b]0;title\x07\r\n",
    ],
)
def test_a_table_that_no_cluster_has_is_refused(node, told_by, told):
    topology = told_by(node({b"CLUSTER SLOTS": told}), **CLUSTER)
    with pytest.raises(Away) as refused:
        topology.refresh()
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1_000


@pytest.mark.parametrize(
    "told",
    [
        b"*2\r\n$1\r\nh\r\n$5\r\n65536\r\n",
        b"*2\r\n$1\r\nh\r\n$1\r\n0\r\n",
        b"*2\r\n$0\r\n\r\n$1\r\n1\r\n",
        b"*3\r\n$1\r\nh\r\n$1\r\n1\r\n:1\r\n",
        b"*-1\r\n",
    ],
)
def test_a_sentinel_that_names_no_address_is_refused(node, told_by, told):
    with pytest.raises(Away, match="sentinels"):
        told_by(node({b"SENTINEL": told}), **SENTINEL).refresh()


def test_a_sentinel_gets_no_password_without_sentinel_login(node, told_by, monkeypatch):
    monkeypatch.setenv(PASSWORD, "geheim")
    sentinel = node({b"SENTINEL": b"*2\r\n$9\r\n127.0.0.1\r\n$4\r\n6379\r\n", b"AUTH": b"-ERR no password is set\r\n"})
    topology = told_by(sentinel, password_env=PASSWORD, **SENTINEL)
    topology.refresh()
    assert topology.server_of(b"name").address == Address("127.0.0.1", 6_379)
    with pytest.raises(Away, match="no password is set"):
        told_by(sentinel, password_env=PASSWORD, sentinel_login=True, **SENTINEL).refresh()


@pytest.mark.parametrize(
    ("host", "where"), [(None, "127.0.0.1"), (b"", "127.0.0.1"), (b"::1", "::1"), (b"node-1.example", "node-1.example")]
)
def test_a_table_names_hosts_or_means_the_one_that_was_asked(node, told_by, host, where):
    table, unknown = slots(at(host, 7_000), at(b"replica", 7_001)), node({b"CLUSTER SLOTS": slots(at(b"?", 7_000))})
    for asked, address in ((node({b"CLUSTER SLOTS": table}), Address(where, 7_000)), (unknown, unknown.address)):
        topology = told_by(asked, **CLUSTER)
        topology.refresh()
        assert topology.server_of(b"name").address == address


@pytest.mark.parametrize(
    ("told", "where"),
    [
        ("12 ::1:7000", Address("::1", 7_000)),
        ("12 [::1]:7000", Address("::1", 7_000)),
        ("12 :7000", Address("10.0.0.1", 7_000)),  # Without a host: another port of the same one.
        *(
            (f"{'12 ' * bool(told)}{told}", ASKED)
            for told in ("", "h", "h:", "h:0", "h:65536", "h:٣", "?:7000", "/a:1")
        ),
        *((told, ASKED) for told in ("12", "12 h\x1b:1", "12 a b:1")),
    ],
)
def test_a_redirect_leads_to_an_address_or_nowhere_else(told, where):
    assert target_of(Refused(f"MOVED {told}"), ASKED) == where


def test_a_servers_error_is_short_and_printable_wherever_it_is_shown():
    said = str(refusal_of(b"-ERR \x1b[2J\x9b" + b"x" * 4_000))
    assert said.isprintable()
    assert said.startswith("ERR ")
    assert len(said) < 500
