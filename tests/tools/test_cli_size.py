import json

import pytest
from msgspec.structs import replace

from kvtier import ConfigError, Hint
from kvtier.tools.replay.size import kv_bytes_per_token
from kvtier.tools.replay.traces import Trace, TraceRequest
from tests.tools.command import reported
from tests.tools.replay.written import write_prompts, write_trace

CHUNK_BYTES = 512 * 8  # Of a model with eight bytes a token.


@pytest.fixture
def trace(tmp_path):
    prompts = [range(10 * number, 10 * number + 10) for number in range(40)]
    return write_prompts(tmp_path / "trace.jsonl", prompts * 3, every_ms=60_000)


def sized(trace, tmp_path, *options):
    return reported(tmp_path, "size", trace, "--kv-bytes-per-token", "8", "--gpu-cache-tokens", "0", *options)


def test_each_combination_of_sizes_is_a_row_and_the_disk_has_what_memory_evicted(trace, tmp_path, capsys):
    report = sized(trace, tmp_path, "--memory", "400KiB,1600KiB", "--disk", "0,4MB")
    cells = {(cell["memory_bytes"] >> 10, cell["disk_bytes"]): cell for cell in report["sizes"]}
    assert list(cells) == [(400, 0), (400, 4_000_000), (1600, 0), (1600, 4_000_000)]
    assert [cell["hit_ratio"] for cell in cells.values()] == pytest.approx([0, 2 / 3, 2 / 3, 2 / 3])
    assert cells[400, 4_000_000]["hits"]["disk"] == pytest.approx(2 / 3)
    assert cells[400, 4_000_000]["ttft_s"]["p50"] < report["without_tiering_ttft_s"]["p50"]
    assert (report["trace_bytes"], report["best_hit_ratio"]) == (400 * CHUNK_BYTES, pytest.approx(2 / 3))
    shown = capsys.readouterr().out
    assert "Sizes of a cache, trace.jsonl" in shown
    assert shown.splitlines()[5].split()[:5] == ["400.0", "KiB", "3.8", "MiB", "0.6667"]


def test_the_figures_of_a_small_trace_are_those_of_pencil_and_paper(tmp_path):
    """One server computes 1,536 tokens, three blocks, a second. Memory holds six chunks, the disk moves ten a second.

    | at | blocks | found | time to first token |
    |---|---|---|---|
    | 0 s | 1 2 3 | nothing | 1 s to compute |
    | 0.5 s | 4 5 6 | nothing | 1.5 s: half a second until the server is free |
    | 20 s | 7 8 9 | nothing, and memory evicts 1 2 3 | 1 s |
    | 30 s | 1 2 3 | three on the disk | 0.3 s to load them; one token is always computed |
    | 40 s | 1 2 10 | two in memory | a third of a second |

    Ten chunks are written, the last of them a tenth of a second after that prompt.
    """
    prompts = ((1, 2, 3), (4, 5, 6), (7, 8, 9), (1, 2, 3), (1, 2, 10))
    path = str(tmp_path / "paper.jsonl")
    times_ms = (0, 500, 20_000, 30_000, 40_000)
    write_trace(path, [TraceRequest(at_ms, 1_536, 1, blocks) for at_ms, blocks in zip(times_ms, prompts, strict=True)])
    servers = ("--prefill-tokens-per-s", "1536", "--slots", "1", "--load-always")
    disk = ("--memory", "24KiB", "--disk", "1MiB", "--disk-speed", "40960B/s,40960B/s")
    report = sized(path, tmp_path, *servers, *disk)
    (cell,) = report["sizes"]
    assert cell["hits"] == pytest.approx({"cpu": 2 / 15, "disk": 3 / 15})
    assert (cell["hit_ratio"], report["best_hit_ratio"]) == (pytest.approx(5 / 15), pytest.approx(5 / 15))
    assert cell["gpu_seconds_saved"] == pytest.approx(5 * 512 / 1_536)
    p99 = 1 + 0.96 * 0.5  # On the line between the fourth and the fifth of five, four hundredths before its end.
    assert report["without_tiering_ttft_s"] == pytest.approx({"p50": 1, "p99": p99, "mean": 5.5 / 5, "samples": 5})
    with_tiers = {"p50": 1, "p99": p99, "mean": (1 + 1.5 + 1 + (0.3 + 1 / 1_536) + 1 / 3) / 5, "samples": 5}
    assert cell["ttft_s"] == pytest.approx(with_tiers, abs=0.0001)
    written_bytes, seconds = 10 * CHUNK_BYTES, 40 + 1 / 3 + 0.1
    assert cell["written_bytes_per_day"] == pytest.approx(written_bytes / seconds * 86_400, rel=0.0001)
    assert report["trace_bytes"] == written_bytes


def test_a_slow_disk_is_loaded_from_only_if_that_is_faster_unless_always_asked_for(trace, tmp_path):
    options = ("--memory", "400KiB", "--disk", "4MiB", "--disk-speed", "10KB/s,1GB/s")
    weighed = sized(trace, tmp_path, *options)
    always = sized(trace, tmp_path, *options, "--load-always")
    assert (weighed["load_always"], always["load_always"]) == (False, True)
    (with_it,), (without_it,) = weighed["sizes"], always["sizes"]
    assert with_it["hit_ratio"] < without_it["hit_ratio"]
    assert with_it["ttft_s"]["p99"] <= 1.02 * weighed["without_tiering_ttft_s"]["p99"] < without_it["ttft_s"]["p99"]


def test_a_disk_that_is_too_slow_is_one_line_with_the_remedy(trace, tmp_path, capsys, caplog):
    options = ("--memory", "400KiB", "--disk", "4MiB", "--disk-speed", "100B/s,57B/s")
    (cell,) = sized(trace, tmp_path, *options)["sizes"]
    lost = cell["dropped_chunks"] + cell["failed_chunks"]
    shown = " ".join(capsys.readouterr().out.split())
    assert f"The disk was too slow: in the worst row, {lost:,} chunks not written or read in time. Write less" in shown
    assert cell["failed_chunks"] > 0
    assert caplog.records == []


def test_a_trace_that_cannot_be_true_is_one_warning_for_all_sizes(tmp_path, capfd):
    path = write_prompts(tmp_path / "unchained.jsonl", [(1, 2), (3, 2)], every_ms=60_000)
    sized(path, tmp_path, "--memory", "400KiB", "--disk", "0,4MiB")
    assert capfd.readouterr().err.count("must be chained") == 1


def test_the_hints_of_a_trace_reach_the_engine_and_the_disk_is_named_disk(trace, tmp_path):
    hinted = str(tmp_path / "hinted.jsonl")
    write_trace(hinted, [replace(each, hint=Hint(no_store=("disk",))) for each in Trace(trace)])
    (cell,) = sized(hinted, tmp_path, "--memory", "400KiB", "--disk", "4MiB")["sizes"]
    assert (cell["written_bytes_per_day"], cell["hits"]["disk"]) == (0, 0)


HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, **HEADS}


def model_file(folder, config):
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_a_plain_models_configuration_gives_the_bytes_of_a_token(tmp_path):
    path = model_file(tmp_path, {**LLAMA, "torch_dtype": "bfloat16"})
    assert kv_bytes_per_token(path) == kv_bytes_per_token(str(tmp_path)) == 131_072
    assert kv_bytes_per_token(model_file(tmp_path, {**LLAMA, "head_dim": 64})) == 65_536


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "model_type 'deepseek_v3'.*--kv-bytes-per-token"),
        ({"quantization_config": {"kv_cache_quant_algo": "FP8"}}, "kv_cache_quant_algo.*--kv-bytes-per-token"),
        ({"quantization_config": ["FP8"]}, "Expected `object"),
        ({"num_hidden_layers": "many"}, "Expected `int`"),
        ({"num_hidden_layers": 0}, "0 bytes a token"),
        ({"num_hidden_layers": -1, "num_key_value_heads": -8}, "bytes a token"),
        ({"head_dim": 10**15}, "at most 1073741824"),
    ],
)
def test_a_model_that_is_not_plain_is_rejected_instead_of_counted_wrongly(tmp_path, fields, named):
    with pytest.raises(ConfigError, match=rf"--model .*{named}"):
        kv_bytes_per_token(model_file(tmp_path, LLAMA | fields))
