"""With a primary of half the working set, what an LRU would keep is what is there, although vLLM never touches."""

from kvtier.backend.namespace import OffloadKey
from tests.vllm.engines import Engine, hits, kvtier, prompts, right, tokens
from tests.vllm.models import gemma3
from tests.vllm.vllm_tiering import vllm_tiering

BLOCK_BYTES = 64 << 10
CHUNKS = 31  # Of a prompt of 1,000 tokens.
GEMMA_BLOCK_BYTES = 8 << 10  # Of one of its groups.
DEPTHS = (300, 500, 700, 700, 700, 300)


def test_the_chunks_that_survive_are_those_of_an_lru(llama):
    asked = prompts(8)
    order = [0, 1, 2, 3, 0, 4, 1, 5, 0, 6, 1, 7, 0]  # 0 and 1 are used again and again; memory is for four prompts.
    expected = dict(enumerate(right(llama, asked)))
    with Engine(llama, kvtier(cpu_bytes_to_use=4 * CHUNKS * BLOCK_BYTES)) as engine:
        keys = keys_by_prompt(engine)
        for turn, index in enumerate(order, 1):
            (answer,) = engine.answer([asked[index]])
            engine.settle()
            assert answer.tokens == expected[index]
            latest = dict(zip(reversed(order[:turn]), reversed(keys), strict=True))
            assert set(engine.ledger.primary.ready) == {key for chunks in list(latest.values())[:4] for key in chunks}
        assert tokens(answers := engine.answer([asked[0], asked[1]])) == [expected[0], expected[1]]
        assert min(hits(answers)) > 0


def test_of_a_prompt_that_does_not_fit_the_beginning_survives(llama):
    asked = prompts(3)
    with Engine(llama, kvtier(cpu_bytes_to_use=(CHUNKS + 10) * BLOCK_BYTES)) as engine:
        keys = keys_by_prompt(engine)
        for prompt in asked[:2]:
            engine.answer([prompt])
            engine.settle()
        assert [key in engine.ledger.primary.ready for key in keys[0]] == [True] * 10 + [False] * (CHUNKS - 10)


def test_a_hybrid_models_prompts_that_do_not_all_fit_hit_no_less_than_with_vllms_own_manager(checkpoints):
    """Its groups' keys come one group after the other, and long prompts in pieces."""
    trunks, ends = prompts(3, tokens=700), prompts(6, tokens=280, seed=9)
    asked = [trunks[index % 3][:depth] + end for index, (depth, end) in enumerate(zip(DEPTHS, ends, strict=True))]
    memory, answers = 96 * GEMMA_BLOCK_BYTES, {}
    for name, extra in {
        "kvtier": kvtier(cpu_bytes_to_use=memory),
        "vllm": vllm_tiering(None, cpu_bytes_to_use=memory),
    }.items():
        with Engine(gemma3(checkpoints), extra, gpu_blocks=260, max_num_batched_tokens=256, max_num_seqs=4) as engine:
            answers[name] = []
            for index in (0, 1, 0, 2, 3, 0, 4, 1, 5, 0, 3, 1):
                answers[name] += engine.answer([asked[index]])
                engine.settle()
    assert tokens(answers["kvtier"]) == tokens(answers["vllm"])
    assert sum(hits(answers["kvtier"])) >= sum(hits(answers["vllm"])) > 0, [hits(each) for each in answers.values()]


def keys_by_prompt(engine):
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
