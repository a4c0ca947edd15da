"""Suites of remote tiers: the contract, damaged values, and a disturbed network."""

import asyncio
from functools import partial

import pytest

from kvtier.backend import SEAL_BYTES, Abandoned, BackendUnavailable
from kvtier.errors import cause_of
from kvtier.testing import conformance
from kvtier.testing.conformance import BackendConformance, keys_of, label
from tests.remote.remotes import Held
from tests.remote.servers import PATIENCE_S
from tests.remote.tiers import CHUNK_BYTES, kept, recovers, used_again
from tests.testing.suites import Reopened

KEYS = "KVTIER_TEST_KEYS"


CONTRACT = (conformance.DurableBackendConformance, conformance.NamespacedConformance, conformance.DescribedConformance)


class RemoteSuites(Reopened, BackendConformance, *CONTRACT):
    """The contract. Needs the fixture `open_tier`, which takes the chunks' length and `fields`."""

    chunk_bytes = 8_192

    @pytest.fixture
    def fields(self):
        return {}

    @pytest.fixture
    def open_tier(self, open_tier, fields):
        return partial(open_tier, chunk_bytes=self.chunk_bytes, **fields)


class CodedSuites(RemoteSuites):
    """The contract with rows that are coded by one `codec`, and sealed: `CodedValues` has each codec with each seal."""

    codec: str
    seal: str

    @pytest.fixture
    def fields(self, monkeypatch):
        return {"codec": self.codec, **sealed_by(self.seal, monkeypatch)}


def sealed_by(seal, monkeypatch):
    monkeypatch.setenv(KEYS, "ab" * 32)
    return {} if seal == "xxh3" else {"seal": seal, "seal_key_env": KEYS}


def flipped(data, at):
    at %= len(data)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


class DamagedValues(conformance.CountedConformance):
    """Values that are not the chunk. Needs the fixtures `open_tier` and `stored`."""

    chunk_bytes = CHUNK_BYTES

    @pytest.fixture
    async def backend(self, open_tier):
        return await open_tier()

    @pytest.fixture
    def provoke(self, backend, stored, lender):
        (key,) = keys_of(1, start=1_000)

        async def provoke():
            await lender.keep(backend, [key])
            held = stored.held(key)
            stored.plant(key, held._replace(row=flipped(held.row, 100)))
            assert await lender.recall(backend, [key]) == ["ChunkCorrupt"]

        return provoke

    @pytest.mark.promise("Stored bytes are damaged, torn, cut off, or another chunk's")
    @pytest.mark.parametrize("at", [0, CHUNK_BYTES // 2, -1])
    @pytest.mark.parametrize("part", ["row", "seal"])
    async def test_a_flipped_byte_is_corrupt_and_is_deleted(self, backend, stored, lender, part, at):
        keys = keys_of(3)
        await lender.keep(backend, keys)
        held = stored.held(keys[1])
        stored.plant(keys[1], held._replace(**{part: flipped(getattr(held, part), at)}))
        assert await lender.recall(backend, keys) == [label(keys[0]), "ChunkCorrupt", label(keys[2])]
        assert await backend.probe(keys) == [True, False, True]
        assert stored.held(keys[1]) is None
        assert sum(total for name, total in backend.counts().items() if name.startswith("corrupt_")) == 1

    @pytest.mark.parametrize("length", [0, CHUNK_BYTES - 1, CHUNK_BYTES + 1, 20 << 20])
    async def test_a_value_of_another_length_is_corrupt_and_costs_no_sibling(self, backend, stored, lender, length):
        keys = keys_of(40)
        await lender.keep(backend, keys)
        for key in keys[1:3]:
            stored.plant(key, stored.held(key)._replace(row=bytes(length)))
        whole = [label(key) for key in keys]
        assert await lender.recall(backend, keys) == [whole[0], "ChunkCorrupt", "ChunkCorrupt", *whole[3:]]
        assert backend.counts()["corrupt_length"] == 2
        await lender.keep(backend, keys, version=1)
        assert await lender.recall(backend, keys) == [label(key, 1) for key in keys]

    async def test_a_foreign_value_is_corrupt_and_is_replaced(self, backend, stored, lender):
        (key,) = keys_of(1)
        await lender.keep(backend, [key])
        foreign = Held(b"x" * CHUNK_BYTES, b"x" * SEAL_BYTES)
        stored.plant(key, foreign)
        assert await lender.recall(backend, [key]) == ["ChunkCorrupt"]
        assert backend.counts() == {"corrupt_foreign": 1}
        stored.plant(key, foreign)
        await lender.keep(backend, [key])
        assert await lender.recall(backend, [key]) == [label(key)]

    async def test_another_keys_value_is_not_taken_for_this_ones(self, backend, stored, lender):
        keys = keys_of(2)
        await lender.keep(backend, keys)
        stored.plant(keys[0], stored.held(keys[1]))
        assert await lender.recall(backend, keys) == ["ChunkCorrupt", label(keys[1])]
        assert backend.counts() == {"corrupt_swapped": 1}

    async def test_a_tier_without_the_key_misses_and_deletes_nothing(self, open_tier, monkeypatch, lender):
        tiers = []
        for keys_given in ("11" * 32, "22" * 32, "22" * 32 + "\n" + "11" * 32):
            monkeypatch.setenv(KEYS, keys_given)
            tiers.append(await open_tier(seal="aes-256-gcm", seal_key_env=KEYS))
        old, new, both = tiers
        plain, keys = await open_tier(), keys_of(2)
        await lender.keep(old, keys)
        assert await lender.recall(new, keys) == await lender.recall(plain, keys) == ["ChunkMissing"] * 2
        assert (new.counts(), plain.counts()) == ({"sealed_key": 2}, {"sealed_kind": 2})
        assert await lender.recall(both, keys) == await lender.recall(old, keys) == [label(key) for key in keys]


class CodedValues:
    """Values that are coded. Needs the fixtures `open_tier` and `stored`."""

    @pytest.fixture(autouse=True)
    def patience(self, monkeypatch):
        """Let rows wait to be coded: on a busy machine each would be stored unchanged."""
        monkeypatch.setattr("kvtier.backend.codec.TURN_S", PATIENCE_S)

    @pytest.mark.parametrize("seal", ["xxh3", "aes-256-gcm"])
    @pytest.mark.parametrize("codec", ["bf16", "fp8", "auto"])
    async def test_rows_of_any_codec_are_read_with_others(self, open_tier, stored, lender, codec, seal, monkeypatch):
        sealed = sealed_by(seal, monkeypatch)
        coding, plain, keys = await open_tier(codec=codec, **sealed), await open_tier(**sealed), keys_of(8)
        for writer, reader, version, shorter in ((coding, plain, 0, 8), (plain, coding, 1, 0)):
            await lender.keep(writer, keys, version)
            assert sum(len(stored.held(key).row) < CHUNK_BYTES for key in keys) == shorter
            assert await reader.probe(keys) == [True] * len(keys)
            assert await lender.recall(reader, keys) == [label(key, version) for key in keys]
        assert coding.counts()["coded"] == 8
        assert "codec" not in plain.description()
        assert coding.description()["codec"] == codec


class DisturbedNetwork:
    """Failures between tier and service. Needs `open_by_proxy`, whose time-outs are short, and `proxy`."""

    @pytest.mark.promise("It hangs, or sends a byte at a time")
    @pytest.mark.parametrize(
        ("begin", "end", "cause"), [("refuse", "listen", "ECONNREFUSED"), ("hold", "pass_on", "ETIMEDOUT")]
    )
    async def test_a_server_that_refuses_or_hangs_fails_calls_in_time(
        self, open_by_proxy, proxy, lender, begin, end, cause
    ):
        tier, keys = await kept(lender, open_by_proxy(), 64)
        getattr(proxy, begin)()
        reads, writes = lender.reads(keys), lender.writes(keys, version=1)
        for call in (tier.load(reads), tier.store(writes), tier.probe(keys_of(2, start=90)), tier.delete(keys)):
            with pytest.raises(BackendUnavailable) as failed:
                await call
            assert cause_of(failed.value) == cause
        with pytest.raises(BackendUnavailable):
            await open_by_proxy()
        await used_again(lender, rows_of(reads, writes))
        getattr(proxy, end)()
        await used_again(lender, rows_of(reads, writes))
        await recovers(tier, lender, keys)

    async def test_a_connection_reset_while_idle_costs_nothing(self, open_by_proxy, proxy, lender):
        tier, keys = await kept(lender, open_by_proxy(), 8)
        proxy.reset()
        assert await lender.recall(tier, keys) == [label(key) for key in keys]
        proxy.reset()
        await lender.keep(tier, keys, version=1)
        assert await lender.recall(tier, keys) == [label(key, 1) for key in keys]

    async def test_a_byte_flipped_in_transfer_is_never_loaded(self, open_by_proxy, proxy, lender):
        tier, keys = await open_by_proxy(), keys_of(8)
        for turn in range(20):
            proxy.reply = lambda passed: passed
            await recovers(tier, lender, keys)
            proxy.reply = flips(turn * 6_662)
            try:
                outcomes = await lender.recall(tier, keys)
            except BackendUnavailable:
                continue
            for key, chunk in zip(keys, outcomes, strict=True):
                assert chunk in (label(key), "ChunkCorrupt", "ChunkMissing", "TransferFailed"), chunk

    async def test_a_cancelled_call_to_a_hung_server_ends_with_its_time_out(self, open_by_proxy, proxy, lender):
        tier, keys = await kept(lender, open_by_proxy(), 4)
        proxy.hold()
        reads, writes = lender.reads(keys), lender.writes(keys)
        starts = (tier.load(reads), tier.store(writes), tier.probe(keys_of(2, start=90)))
        calls = [asyncio.create_task(call) for call in starts]
        for _ in range(3):
            await asyncio.sleep(0.01)
            for call in calls:
                call.cancel()
        for call in calls:
            with pytest.raises(asyncio.CancelledError):
                await call
        await used_again(lender, rows_of(reads, writes))
        proxy.pass_on()
        await recovers(tier, lender, keys)

    async def test_closing_ends_calls_that_hang(self, open_by_proxy, proxy, lender):
        tier, keys = await kept(lender, open_by_proxy(timeout_s=PATIENCE_S), 4)
        proxy.hold()
        reads, writes = lender.reads(keys), lender.writes(keys)
        calls = [asyncio.create_task(call) for call in (tier.load(reads), tier.store(writes))]
        async with asyncio.timeout(PATIENCE_S):
            while len(proxy.held) < len(calls):
                await asyncio.sleep(0.01)
        await tier.aclose(0.05)
        for call in calls:
            with pytest.raises(BackendUnavailable):
                await call
        await used_again(lender, rows_of(reads, writes))
        assert await tier.aclose(10) == Abandoned(0)


def rows_of(reads, writes):
    return [*(read.into for read in reads), *(write.row for write in writes)]


def flips(at):
    seen = 0

    def flip(passed):
        nonlocal seen
        place, seen = at - seen, seen + len(passed)
        return flipped(passed, place) if 0 <= place < len(passed) else passed

    return flip
