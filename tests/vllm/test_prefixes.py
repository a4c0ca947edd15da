"""A prefix that the engine forgot comes back, with the tokens that the engine would have computed."""

import random

from vllm.v1.request import RequestStatus

from tests.vllm.engines import PROMPT_HITS, Answer, Engine, hits, kvtier, prompts, right, sampling, tokens

MIB = 1 << 20
BLOCK_BYTES = 64 << 10  # Of the tiny llama, for 32 tokens.


def families(count, sizes=(256, 512, 900), seed=3):
    dice, trunks = random.Random(seed), prompts(4, tokens=1_000, seed=seed)
    ends = prompts(count, tokens=100, seed=seed + 1)
    made = [dice.choice(trunks)[: dice.choice(sizes)] + end for end in ends]
    dice.shuffle(made)
    return made


def test_wrong_kv_would_be_seen_in_the_tokens(llama, disk):
    asked = prompts(2)
    expected = right(llama, asked)
    with Engine(llama, kvtier(disk)) as engine:
        engine.answer(asked)
        engine.settle()
        for row in engine.ledger.primary.ready.values():
            engine.kvtier.region.row(row)[:BLOCK_BYTES] = bytes(BLOCK_BYTES)
        assert tokens(engine.answer(asked)) != expected


def test_shared_prefixes_in_random_order_fifty_at_once(llama, disk):
    asked = families(50)
    expected = right(llama, asked)
    with Engine(llama, kvtier(disk), gpu_blocks=96) as engine:
        assert (tokens(engine.answer(asked)), tokens(warm := engine.answer(asked))) == (expected, expected)
        assert sum(hits(warm)) >= 0.9 * sum(len(prompt) // 32 * 32 for prompt in asked)


def test_requests_aborted_at_random_disturb_no_other(llama, disk):
    dice, asked = random.Random(5), families(40)
    expected = dict(zip(map(tuple, asked), right(llama, asked), strict=True))
    with Engine(llama, kvtier(disk, cpu_bytes_to_use=8 * MIB), gpu_blocks=96) as engine:
        for _ in range(3):
            answered = steps_with_aborts(engine, asked, dice)
            assert len(answered) > 10
            for index, answer in answered.items():
                assert answer.tokens == expected[tuple(asked[index])]
        assert engine.ledger.leases.rows == 0
        assert not engine.ledger.primary.filling
        assert tokens(engine.answer(asked)) == list(expected.values())


def steps_with_aborts(engine, asked, dice):
    """Run all prompts at once; abort some at random moments; return what the others answered."""
    llm_engine = engine.llm.llm_engine
    for index, prompt in enumerate(asked):
        llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, sampling())
    open_requests, answered = set(range(len(asked))), {}
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            if output.finished:
                index = int(output.request_id)
                open_requests.discard(index)
                answered[index] = Answer(tuple(output.outputs[0].token_ids), output.num_cached_tokens)
        if open_requests and dice.random() < 0.3:
            gone = dice.choice(sorted(open_requests))
            open_requests.discard(gone)
            llm_engine.abort_request([str(gone)])
    engine.settle()
    return answered


def test_preempted_requests_come_back_right(llama, disk):
    asked, new_tokens = prompts(6, tokens=300), 96
    expected = right(llama, asked, new_tokens)
    with Engine(llama, kvtier(disk, offload_prompt_only=False), gpu_blocks=44) as engine:  # Four begin, three end.
        preempted = count_preemptions(engine)
        for _ in range(2):
            assert tokens(engine.answer(asked, new_tokens)) == expected
        assert preempted


def count_preemptions(engine):
    """Collect the ids of requests that are preempted from now on, as the scheduler tells the manager."""
    seen: list[str] = []
    end_of_step = engine.manager.on_schedule_end

    def noted(context):
        seen.extend(context.preempted_req_ids)
        end_of_step(context)

    engine.manager.on_schedule_end = noted
    return seen


def test_an_engine_that_slept_has_forgotten_its_memory_and_keeps_the_disk(llama, disk):
    """Workers of the CPU build keep what they have when they are to sleep; the scheduler sleeps as everywhere."""
    asked = prompts(4)
    expected = right(llama, asked)
    with Engine(llama, kvtier(disk)) as engine:
        for level in (0, 1, 2):
            engine.answer(asked)
            engine.settle()
            engine.core.sleep(level)
            assert bool(engine.ledger.primary.ready) is (level == 0)
            engine.core.wake_up()
            assert (tokens(again := engine.answer(asked)), hits(again)) == (expected, [PROMPT_HITS] * 4)


def test_a_reset_in_the_middle_of_everything(llama, disk):
    turns = [families(20, seed=seed) for seed in (3, 4)]
    expected = [right(llama, asked) for asked in turns]
    with Engine(llama, kvtier(disk, cpu_bytes_to_use=16 * MIB), gpu_blocks=96) as engine:
        llm_engine = engine.llm.llm_engine
        for turn, asked in enumerate(turns):
            for index, prompt in enumerate(asked):
                llm_engine.add_request(f"{turn}-{index}", {"prompt_token_ids": prompt}, sampling())
            answered, resets = {}, 0
            while llm_engine.has_unfinished_requests():
                for output in llm_engine.step():
                    if output.finished:
                        answered[int(output.request_id.partition("-")[2])] = tuple(output.outputs[0].token_ids)
                if resets < 2 and stores_are_under_way(engine):
                    resets += 1
                    assert engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
                    assert not engine.ledger.promoting
            assert (resets, [answered[index] for index in range(len(asked))]) == (2, expected[turn])
        engine.settle()
        assert engine.ledger.promoting


def stores_are_under_way(engine):
    """Say whether workers have stores and no loads: with loads, vLLM refuses to reset running requests."""
    requests = engine.core.scheduler.requests.values()
    loading = any(request.status is RequestStatus.WAITING_FOR_REMOTE_KVS for request in requests)
    return engine.connector.has_pending_push_work() and not loading and bool(engine.ledger.primary.filling)
