"""With a primary of half the working set, what an LRU would keep is what is there, although vLLM never touches."""

from collections import OrderedDict

from kvtier.keys import OffloadKey
from tests.vllm.engines import Engine, hits, kvtier, prompts, right, tokens

BLOCK_BYTES = 64 << 10
CHUNKS = 31  # Of a prompt of 1,000 tokens.


def test_the_chunks_that_survive_are_those_of_an_lru(llama):
    asked = prompts(8)
    order = [0, 1, 2, 3, 0, 4, 1, 5, 0, 6, 1, 7, 0]  # 0 and 1 are used again and again; memory is for four prompts.
    expected = dict(enumerate(right(llama, asked)))
    model = LeastRecentlyUsed(4 * CHUNKS)
    with Engine(llama, kvtier(cpu_bytes_to_use=4 * CHUNKS * BLOCK_BYTES)) as engine:
        keys = keys_by_prompt(engine)
        for index in order:
            (answer,) = engine.answer([asked[index]])
            engine.settle()
            assert answer.tokens == expected[index]
            model.use(keys[-1])
            assert set(engine.kvtier.ledger.primary.ready) == model.keys
        assert tokens(answers := engine.answer([asked[0], asked[1]])) == [expected[0], expected[1]]
        assert min(hits(answers)) > 0


def test_of_a_prompt_that_does_not_fit_the_beginning_survives(llama):
    asked = prompts(3)
    with Engine(llama, kvtier(cpu_bytes_to_use=(CHUNKS + 10) * BLOCK_BYTES)) as engine:
        keys = keys_by_prompt(engine)
        for prompt in asked[:2]:
            engine.answer([prompt])
            engine.settle()
        survivors = [key in engine.kvtier.ledger.primary.ready for key in keys[0]]
        assert survivors == [True] * 10 + [False] * (CHUNKS - 10)


class LeastRecentlyUsed:
    """An LRU of chunks, ranked at a request's end so that a prefix outlives its continuation."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept = OrderedDict[OffloadKey, None]()

    @property
    def keys(self) -> set[OffloadKey]:
        return set(self._kept)

    def use(self, keys: list[OffloadKey]) -> None:
        absent = [key for key in keys if key not in self._kept]
        present = [key for key in keys if key in self._kept]
        for key in present:
            self._kept.move_to_end(key)
        for _ in range(len(self._kept) + len(absent) - self._capacity):
            self._kept.popitem(last=False)
        for key in reversed(keys):
            self._kept[key] = None
            self._kept.move_to_end(key)


def keys_by_prompt(engine: Engine) -> list[list[OffloadKey]]:
    """Collect the keys of each request, in prefix order, as the manager is asked for them."""
    asked: list[list[OffloadKey]] = []
    seen: dict[str, list[OffloadKey]] = {}
    finished = engine.manager.on_request_finished

    def noted(context):
        positions = context._offload_key_positions
        seen[context.req_id] = sorted(positions, key=positions.__getitem__)
        asked.append(seen[context.req_id])
        finished(context)

    engine.manager.on_request_finished = noted
    return asked
