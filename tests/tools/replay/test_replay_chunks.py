import pytest

from kvtier.tools.replay.replay import ChunkSource


@pytest.mark.parametrize("chunk_bytes", [1, 7, 8, 4_096, 16_384, 20_000])
def test_a_generated_chunk_is_right_for_its_key_and_as_long_as_a_chunk(chunk_bytes):
    source = ChunkSource(chunk_bytes)
    keys = list(map(source.key, range(50)))
    chunks = source.chunks(keys)
    assert ([len(chunk) for chunk in chunks], source.wrong(keys, chunks)) == ([chunk_bytes] * 50, [])


def test_every_word_of_a_chunk_differs_from_the_same_word_of_any_other_and_from_its_neighbours():
    source = ChunkSource(16_384)
    words = [memoryview(bytes(chunk)).cast("Q").tolist() for chunk in source.chunks(list(map(source.key, range(20))))]
    assert all(len({chunk[place] for chunk in words}) == len(words) for place in range(len(words[0])))
    assert all(len(set(chunk)) == len(chunk) for chunk in words)


def test_exchanged_mixed_shifted_short_chunks_and_a_wrong_bit_are_found_and_absent_ones_are_not_compared():
    source = ChunkSource(4_096)
    keys = list(map(source.key, range(9)))
    good = list(map(bytes, source.chunks(keys)))
    mixed, shifted = good[2][:8] + good[3][8:16] + good[2][16:], good[4][8:] + good[4][:8]
    flipped = bytes([good[6][0] ^ 1]) + good[6][1:]
    given = [good[1], good[0], mixed, good[3], shifted, good[5], flipped, good[7][:-8]]
    assert source.wrong(keys, list(map(memoryview, given))) == [keys[index] for index in (0, 1, 2, 4, 6, 7)]


def test_comparing_keeps_no_reference_to_the_chunks():
    source = ChunkSource(4_096)
    keys = [source.key(1)]
    chunk = source.chunks(keys)[0].toreadonly()
    assert source.wrong(keys, [chunk]) == []
    chunk.release()  # Raises BufferError if a view of it is still held.


def test_chunks_differ_by_seed_and_trace_only():
    same = ChunkSource(4_096, seed=1, trace=b"a"), ChunkSource(4_096, seed=1, trace=b"a")
    assert same[0].key(5) == same[1].key(5)
    assert same[0].chunks([same[0].key(5)]) == same[1].chunks([same[1].key(5)])
    others = ChunkSource(4_096, seed=2, trace=b"a"), ChunkSource(4_096, seed=1, trace=b"b"), same[0]
    assert len({source.key(5) for source in others}) == 3
    assert len({bytes(source.chunks([same[0].key(5)])[0]) for source in others}) == 3
