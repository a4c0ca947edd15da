from itertools import pairwise
from statistics import fmean

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tools.replay.study import measure
from kvtier.tools.replay.traces import Trace
from kvtier.tools.replay.workload import GeneratedTrace, Workload, generate, open_trace
from tests.tools.replay.written import write_trace

workloads = st.builds(
    Workload,
    requests=st.integers(1, 200),
    seed=st.integers(),
    block_tokens=st.sampled_from([1, 16, 512]),
    context_tokens_max=st.sampled_from([1, 100, 5_000]),
    sessions_per_s=st.sampled_from([0.01, 1.0, 100.0]),
    arrival_cv=st.sampled_from([0.1, 1.0, 5.0]),
    agent_share=st.sampled_from([0.0, 0.5, 1.0]),
)


@given(workload=workloads)
def test_whatever_the_workload_its_requests_are_a_well_made_trace(workload):
    requests = list(generate(workload))
    assert (len(requests), requests[0].timestamp_ms) == (workload.requests, 0)
    assert all(earlier.timestamp_ms <= later.timestamp_ms for earlier, later in pairwise(requests))
    before = {}
    for request in requests:
        assert 1 <= request.input_length <= workload.context_tokens_max
        assert request.output_length >= 1
        assert len(request.hash_ids) == -(-request.input_length // workload.block_tokens)
        for previous, block in pairwise((None, *request.hash_ids)):
            assert before.setdefault(block, previous) == previous


def test_a_later_turn_begins_with_the_prompt_before_it():
    """All whole blocks of a prompt come again; the last one, partly filled, becomes another block."""
    last, later_turns = {}, 0
    for request in generate(Workload(requests=1_000)):
        previous = last.get(request.session_id)
        if previous:
            later_turns += 1
            whole = previous.input_length // 512
            assert request.hash_ids[:whole] == previous.hash_ids[:whole]
            assert request.input_length > previous.input_length + previous.output_length
            assert request.timestamp_ms >= previous.timestamp_ms
            if previous.input_length % 512:
                assert previous.hash_ids[-1] not in request.hash_ids
        last[request.session_id] = request
    assert later_turns > 200


def test_chats_resemble_the_trace_that_they_are_modelled_on(thorough, traces):
    real = list(Trace(traces / "mooncake_conversation.jsonl.gz"))
    made = list(generate(Workload(requests=len(real), agent_share=0.0)))
    for length in ("input_length", "output_length"):
        means = [fmean(getattr(request, length) for request in requests) for requests in (made, real)]
        assert means[0] == pytest.approx(means[1], rel=0.15)
    ratios = [extent.hit_ratio(extent.best_hits) for extent in (measure(made), measure(real))]
    assert ratios[0] == pytest.approx(ratios[1], abs=0.06)
    assert made[-1].timestamp_ms == pytest.approx(real[-1].timestamp_ms, rel=0.1)


def test_a_generated_trace_is_read_like_one_from_a_file(tmp_path):
    generated = GeneratedTrace(Workload(requests=50, block_tokens=16), limit=20)
    write_trace(tmp_path / "trace.jsonl.zst", generated, generated.meta)
    written = open_trace(str(tmp_path / "trace.jsonl.zst"))
    assert list(written) == list(generated) == list(generate(Workload(requests=20, block_tokens=16)))
    assert written.block_tokens == generated.block_tokens == 16
    assert msgspec.convert(written.meta["workload"], Workload) == generated.workload


def test_a_generated_workload_has_as_many_requests_as_are_asked_for():
    default, more = list(open_trace("generated")), open_trace("generated", limit=3_200)
    assert len(default) == Workload().requests < 3_200
    assert list(more)[: len(default)] == default
    assert [len(list(open_trace("generated", limit=limit))) for limit in (1, 3_200)] == [1, 3_200]
    assert more.meta["workload"]["requests"] == 3_200
