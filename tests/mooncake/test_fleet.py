"""The examples of a fleet on Mooncake: their command lines start a pool that engines as they are configured share."""

import urllib.request
from contextlib import ExitStack, suppress

import pytest

from kvtier.engine.manager import TieringOffloadingManager
from tests.docs.fleet import COMPOSE, ENGINES, command_of, here, make_secrets, of_service
from tests.engine.kit import at_rest, found, put
from tests.mooncake.pools import Program, folder, free_port, until


@pytest.fixture
def programs():
    with ExitStack() as programs:
        yield programs


@pytest.mark.parametrize("path", of_service("mooncake"), ids=lambda path: path.name)
async def test_a_pool_as_it_is_started_serves_engines_as_they_are_configured(outside, path, programs, tmp_path):
    master, metrics = free_port(), free_port()
    names = ("master", "owner-a", "owner-b") if path in COMPOSE else ("mooncake-master", *["mooncake-owner"] * 3)
    start(command_of(path, names[0]), programs, tmp_path / "master", rpc_port=master, metrics_port=metrics)
    until(lambda: healthy(metrics))
    for index, name in enumerate(names[1:]):
        health = free_port()
        ports = {"port": free_port(), "http_port": health}
        place = {"host": "127.0.0.1", "master_server_address": f"127.0.0.1:{master}", "global_segment_size": "64MB"}
        start(command_of(path, name), programs, tmp_path / f"owner{index}", **ports, **place)
        until(lambda health=health: healthy(health))
    (engine, *_) = [engine for engine in ENGINES if engine.where.startswith(f"{path.name} ")]
    made = make_secrets(tmp_path / "secrets")
    remote = {"master": f"127.0.0.1:{master}", "local_host": "127.0.0.1"}
    first, second = (here(engine, made, tmp_path / one, **remote) for one in "ab")
    async with TieringOffloadingManager.open(first) as one:
        assert await put(one, range(32)) == 32
        assert await at_rest(one)
    async with TieringOffloadingManager.open(second) as another:
        assert await found(another, range(32)) == 32


def start(command, programs, log, **changed):
    """Start one as the example does, but for addresses and sizes, which it must have given."""
    program, *arguments = command
    given = dict(argument.removeprefix("--").split("=", 1) for argument in arguments)
    assert changed.keys() <= given.keys()
    flags = [f"--{name}={value}" for name, value in (given | changed).items()]
    programs.callback(Program(log, folder() / program, *flags, MC_TCP_BIND_ADDRESS="127.0.0.1").kill)


def healthy(port):
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
        return bool(answer.status == 200)
    return False
