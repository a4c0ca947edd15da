import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.backend.namespace import OffloadKey
from kvtier.runner.messages import (
    Acknowledge,
    Advise,
    Answered,
    Beat,
    Cascade,
    Close,
    Closed,
    Delete,
    Finished,
    Found,
    FrameBuffer,
    Gone,
    Logged,
    Opened,
    OpenFailed,
    Probe,
    Promote,
    Returned,
    Scanned,
    TierUsage,
    actions_of,
    frame,
    framed,
    messages_of,
    pack_keys,
    pack_rows,
    read_frame,
)
from kvtier.settings.hints import Hint

KEYS = pack_keys([OffloadKey(b"k" * 36), OffloadKey(b""), OffloadKey(b"\xff" * 36)])
ROWS = pack_rows([0, 1, 2**32 - 1])
ACTIONS = [
    Promote(1, 0, KEYS, ROWS),
    Cascade(2**40, 1, KEYS, ROWS),
    Probe(3, 2, KEYS),
    Delete(4, 0, KEYS),
    Advise(1, "rank", KEYS, Hint(over=True)),
    Advise(1, "retain", KEYS, seconds=60.0, priority=7),
    Acknowledge(5),
    Close(0.5),
]
MESSAGES = [
    Finished(1, pack_rows([0, 2]), b"\x01\x04", 0.25),
    Finished(2, b"", b"", 30.0, lent=True),
    Finished(3, pack_rows([0]), b"\x04", 0.25, cause="EROFS"),
    Answered(3, b"", 0.001, "ESTALE"),
    Returned(2),
    Answered(3, b"\x01\x00\x01", 0.001),
    Found(0, KEYS),
    Gone(1, KEYS),
    Scanned(2, complete=True),
    TierUsage(0, 10, 40_960, None),
    TierUsage(0, 10, 40_960, 1 << 40),
    Opened(),
    OpenFailed("no such directory", config=True),
    Beat(),
    Logged({"name": "kvtier.runner.runner", "levelno": 30, "msg": "tier disk: away", "created": 1_700_000_000.25}),
    Closed(3),
]


async def stream_of(received):
    reader = asyncio.StreamReader(limit=16)
    reader.feed_data(received)
    reader.feed_eof()
    return reader


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: type(action).__name__)
def test_every_action_arrives_as_it_was_sent(action):
    assert actions_of(frame([action])[4:]) == [action]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_arrives_as_it_was_sent(message):
    assert messages_of(frame([message])[4:]) == [message]


async def test_frames_are_read_one_by_one_whatever_their_length():
    reader = await stream_of(frame(ACTIONS) + framed(b"") + framed(b"x" * 100_000))
    assert actions_of(await read_frame(reader)) == ACTIONS
    assert await read_frame(reader) == b""
    assert await read_frame(reader) == b"x" * 100_000
    for left in range(6):
        assert await read_frame(await stream_of(frame(ACTIONS)[:left])) is None


@given(bodies=st.lists(st.binary(max_size=300)), pieces=st.lists(st.integers(1, 50), min_size=1))
def test_frames_are_cut_out_of_a_stream_however_it_is_torn(bodies, pieces):
    sent = b"".join(map(framed, bodies))
    buffer = FrameBuffer()
    received: list[bytes] = []
    turn = 0
    while sent:
        size = pieces[turn % len(pieces)]
        received += buffer.feed(sent[:size])
        sent = sent[size:]
        turn += 1
    assert received == bodies
