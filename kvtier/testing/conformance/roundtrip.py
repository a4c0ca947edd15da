"""What goes in comes out, under any key, and only there."""

import msgspec
import pytest

from kvtier.backend import Backend, Durability, Write
from kvtier.keys import OffloadKey, make_offload_key
from kvtier.testing.conformance.lender import Lender, key_of, keys_of, label
from kvtier.testing.conformance.promises import Promises

ODD_KEYS: dict[str, OffloadKey] = {
    "an empty hash": make_offload_key(b""),
    "a slash": make_offload_key(b"/"),
    "a dot": make_offload_key(b"."),
    "two dots": make_offload_key(b".."),
    "a way out": make_offload_key(b"../../../etc/passwd"),
    "a zero byte": make_offload_key(b"\0"),
    "two zero bytes": make_offload_key(b"\0\0"),
    "a line break": make_offload_key(b"\n"),
    "a percent sign": make_offload_key(b"%00"),
    "not text": make_offload_key(b"\xc3\x28"),
    "a lower case letter": make_offload_key(b"a"),
    "an upper case letter": make_offload_key(b"A"),
    "lower case digits": make_offload_key(b"deadbeef"),
    "upper case digits": make_offload_key(b"DEADBEEF"),
    "a hash": key_of(0),
    "the hash's first half": make_offload_key(key_of(0)[:16]),
    "the hash in the next group": key_of(0, group=1),
    "the hash in a far group": key_of(0, group=256),
    "the hash in the last group": key_of(0, group=0xFFFF_FFFF),
    "a long hash": make_offload_key(bytes(range(64))),
    "all ones": OffloadKey(b"\xff" * 36),
}
CONTENTS = {
    "zeros": b"\0",
    "ones": b"\xff",
    "text": b"KV cache. ",
    "every byte": bytes(range(256)),
}


class WhatGoesInComesOut(Promises):
    async def test_what_was_stored_is_loaded_bit_for_bit(self, backend: Backend, lender: Lender) -> None:
        """A chunk for which `store` answered None is what `load` gives."""
        keys = keys_of(8)
        await lender.keep(backend, keys)
        assert await lender.recall(backend, keys) == [label(key) for key in keys]

    async def test_what_was_loaded_can_be_loaded_again(self, backend: Backend, lender: Lender) -> None:
        """Loading takes nothing away."""
        await lender.keep(backend, [key_of(1)])
        for _ in range(3):
            assert await lender.recall(backend, [key_of(1)]) == [label(key_of(1))]

    async def test_what_was_never_stored_is_missing(self, backend: Backend, lender: Lender) -> None:
        """`BlockMissing` is a value, and the only answer for a key that the tier does not have."""
        assert await lender.recall(backend, keys_of(4)) == ["BlockMissing"] * 4

    async def test_a_probe_says_what_a_load_would_find(self, backend: Backend, lender: Lender) -> None:
        """In a tier where nothing else goes on the hint is right."""
        keys = keys_of(6)
        await lender.keep(backend, keys[::2])
        assert list(await backend.probe(keys)) == [True, False] * 3

    async def test_the_last_store_of_a_key_counts(self, backend: Backend, lender: Lender) -> None:
        """A store puts its chunk in place of what was there under its key."""
        keys = keys_of(4)
        for version in range(3):
            await lender.keep(backend, keys, version)
            assert await lender.recall(backend, keys) == [label(key, version) for key in keys]

    @pytest.mark.parametrize("odd", ODD_KEYS)
    async def test_an_odd_key_is_a_key_like_any_other(self, backend: Backend, lender: Lender, odd: str) -> None:
        """Keys are bytes: no value of theirs is special."""
        key = ODD_KEYS[odd]
        assert list(await backend.probe([key])) == [False]
        await lender.keep(backend, [key])
        assert list(await backend.probe([key])) == [True]
        assert await lender.recall(backend, [key]) == [label(key)]
        await backend.delete([key])
        assert await lender.recall(backend, [key]) == ["BlockMissing"]

    async def test_keys_that_look_alike_are_different_chunks(self, backend: Backend, lender: Lender) -> None:
        """No two keys share a chunk, whatever they have in common: letters, a beginning, a hash."""
        keys = list(ODD_KEYS.values())
        await lender.keep(backend, keys)
        assert await lender.recall(backend, keys) == [label(key) for key in keys]
        await backend.delete(keys[::2])
        assert list(await backend.probe(keys)) == [index % 2 == 1 for index in range(len(keys))]

    @pytest.mark.parametrize("content", CONTENTS)
    async def test_any_bytes_come_back(self, backend: Backend, lender: Lender, content: str) -> None:
        """A chunk's bytes are the tier's to keep, not to understand."""
        block = (CONTENTS[content] * self.chunk_bytes)[: self.chunk_bytes]
        row = lender.rows(1)[0]
        row[:] = block
        assert list(await backend.store([Write(key_of(1), row)])) == [None]
        reads = lender.reads([key_of(1)])
        assert list(await backend.load(reads)) == [None]
        assert bytes(reads[0].into) == block

    async def test_a_tier_says_what_it_promises_and_takes(self, backend: Backend) -> None:
        """`durability` and `Options` are declared, and options are frozen and closed to unknown fields."""
        assert isinstance(backend.durability, Durability)
        assert issubclass(backend.Options, msgspec.Struct)
        settings = backend.Options.__struct_config__
        assert (settings.frozen, settings.forbid_unknown_fields) == (True, True)
