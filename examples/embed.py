"""Embed kvtier in an asyncio program: what was computed for one prompt is fetched for the next that begins alike.

    python examples/embed.py [DIRECTORY]

The model is a stand-in that makes a page of "KV" for every four words. Everything else is as in earnest: keys name a
chunk with all that came before it, prompts are answered at the same time, and what they stored is still there when the
program is started again. Give a DIRECTORY and run it twice to see that.
"""

import asyncio
import hashlib
import sys
import tempfile

from kvtier import EngineConfig, OffloadKey, TierConfig, TieringOffloadingManager, make_offload_key

CHUNK_BYTES = 4_096
WORDS_A_CHUNK = 4
SYSTEM = "You are a patient librarian who answers in one short sentence and never invents a book. "
PROMPTS = (
    SYSTEM + "Who wrote the Odyssey?",
    SYSTEM + "Which of Ovid's works tells of change?",
    SYSTEM + "Who wrote the Odyssey? Homer, it is said. And who the Aeneid?",
)


def prefix_keys(prompt: str) -> list[OffloadKey]:
    """Name each whole chunk of a prompt by a hash of everything up to its end."""
    words = prompt.split()
    hashed = hashlib.sha256()
    keys: list[OffloadKey] = []
    for end in range(WORDS_A_CHUNK, len(words) + 1, WORDS_A_CHUNK):
        hashed.update(" ".join(words[end - WORDS_A_CHUNK : end]).encode())
        keys.append(make_offload_key(hashed.digest()))
    return keys


def compute(key: OffloadKey) -> bytes:
    """Stand in for a model's forward pass over one chunk, the expensive part."""
    return hashlib.shake_256(key).digest(CHUNK_BYTES)


async def answer(cache: TieringOffloadingManager, prompt: str) -> None:
    """Use what is there of a prompt's prefix, compute the rest, and store that for others."""
    keys = prefix_keys(prompt)
    async with cache.fetch(keys) as chunks:  # They are lent, and may not be evicted meanwhile.
        found = len(chunks)
        assert [bytes(chunk) for chunk in chunks] == [compute(key) for key in keys[:found]]
    await cache.put(keys[found:], [compute(key) for key in keys[found:]])
    print(f"{found} of {len(keys)} chunks found: …{prompt.removeprefix(SYSTEM)}")


async def main(directory: str) -> None:
    config = EngineConfig(
        cpu_bytes_to_use=64 * CHUNK_BYTES,
        chunk_bytes=CHUNK_BYTES,
        secondary_tiers=(TierConfig(type="fs", options={"root": directory}),),
    )
    async with TieringOffloadingManager.open(config) as cache:
        await answer(cache, PROMPTS[0])
        await asyncio.gather(*(answer(cache, prompt) for prompt in PROMPTS[1:]))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            asyncio.run(main(temporary))
