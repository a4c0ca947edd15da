import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.backend.namespace import OffloadKey
from kvtier.runner import messages
from kvtier.settings.hints import Hint

KEYS = messages.pack_keys([OffloadKey(b"k" * 36), OffloadKey(b""), OffloadKey(b"\xff" * 36)])
ROWS = messages.pack_rows([0, 1, 2**32 - 1])
ACTIONS = [
    messages.Promote(1, 0, KEYS, ROWS),
    messages.Cascade(2**40, 1, KEYS, ROWS),
    messages.Probe(3, 2, KEYS),
    messages.Delete(4, 0, KEYS),
    messages.Advise(1, "rank", KEYS, Hint(over=True)),
    messages.Advise(1, "retain", KEYS, seconds=60.0, priority=7),
    messages.Acknowledge(5),
    messages.Close(0.5),
]
MESSAGES = [
    messages.Finished(1, messages.pack_rows([0, 2]), b"\x01\x04", 0.25),
    messages.Finished(2, b"", b"", 30.0, lent=True),
    messages.Finished(3, messages.pack_rows([0]), b"\x04", 0.25, cause="EROFS"),
    messages.Answered(3, b"", 0.001, "ESTALE"),
    messages.Returned(2),
    messages.Answered(3, b"\x01\x00\x01", 0.001),
    messages.Found(0, KEYS),
    messages.Gone(1, KEYS),
    messages.Scanned(2, complete=True),
    messages.TierUsage(0, 10, 40_960, None),
    messages.TierUsage(0, 10, 40_960, 1 << 40),
    messages.Opened(),
    messages.OpenFailed("no such directory", config=True),
    messages.Beat(),
    messages.Logged(
        {"name": "kvtier.runner.runner", "levelno": 30, "msg": "tier disk: away", "created": 1_700_000_000.25}
    ),
    messages.Closed(3),
]


async def stream_of(received):
    reader = asyncio.StreamReader(limit=16)
    reader.feed_data(received)
    reader.feed_eof()
    return reader


@pytest.mark.parametrize(("sent", "read"), [(ACTIONS, messages.actions_of), (MESSAGES, messages.messages_of)])
def test_every_action_and_message_arrives_as_it_was_sent(sent, read):
    assert [read(messages.frame([one])[4:]) for one in sent] == [[one] for one in sent]


async def test_frames_are_read_one_by_one_whatever_their_length():
    reader = await stream_of(messages.frame(ACTIONS) + messages.framed(b"") + messages.framed(b"x" * 100_000))
    assert messages.actions_of(await messages.read_frame(reader)) == ACTIONS
    assert await messages.read_frame(reader) == b""
    assert await messages.read_frame(reader) == b"x" * 100_000
    for left in range(6):
        assert await messages.read_frame(await stream_of(messages.frame(ACTIONS)[:left])) is None


@given(bodies=st.lists(st.binary(max_size=300)), pieces=st.lists(st.integers(1, 50), min_size=1))
def test_frames_are_cut_out_of_a_stream_however_it_is_torn(bodies, pieces):
    sent, buffer = b"".join(map(messages.framed, bodies)), messages.FrameBuffer()
    received: list[bytes] = []
    turn = 0
    while sent:
        size = pieces[turn % len(pieces)]
        received += buffer.feed(sent[:size])
        sent = sent[size:]
        turn += 1
    assert received == bodies
