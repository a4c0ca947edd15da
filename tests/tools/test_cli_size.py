"""`kvtier size`: what caches of several sizes are worth for a trace."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvtier.errors import ConfigError
from kvtier.hints import Hint
from kvtier.settings import shown_age
from kvtier.tools.replay.models import MODELS, kv_bytes_per_token
from kvtier.tools.replay.study import measure, simulation
from kvtier.tools.replay.traces import Request, Trace, write_trace
from tests.tools.test_cli_policies import KVTIER, run

CHUNK_BYTES = 512 * 8  # Of a model that takes eight bytes a token.


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Return the path of a trace with 40 prompts of ten blocks, which come back in turn, a minute apart."""
    path = str(tmp_path / "trace.jsonl")
    prompts = [tuple(range(10 * number, 10 * number + 10)) for number in range(40)]
    times = range(0, 60_000 * 120, 60_000)
    write_trace(path, [Request(at, 5_120, 1, prompts[number % 40]) for number, at in enumerate(times)])
    return path


def sized(trace: str, tmp_path: Path, *options: str) -> Any:
    out = tmp_path / "size.json"
    given = ("--kv-bytes-per-token", "8", "--gpu-cache", "0", "--json", str(out), *options)
    assert run("size", trace, *given) == 0
    return json.loads(out.read_bytes())


def test_a_memory_without_a_disk_has_the_hits_of_the_study(trace: str, tmp_path: Path) -> None:
    (cell,) = sized(trace, tmp_path, "--memory", "1600KiB", "--disk", "0")["sizes"]
    extent = measure(Trace(trace))
    assert cell["hit_ratio"] == extent.hit_ratio(sum(simulation("lru")(Trace(trace), 400)))
    assert cell["hits"] == {"cpu": cell["hit_ratio"]}
    assert (cell["written_bytes_per_day"], cell["drive_life_years"]) == (0.0, None)
    assert cell["gpu_seconds_saved"] == pytest.approx(800 * 512 / 20_000)


def test_a_memory_that_is_shorter_than_a_request_is_said(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (said,) = sized(trace, tmp_path, "--memory", "1600KiB,36KiB", "--disk", "0")["warnings"]
    assert said.startswith("--memory 36 KiB: a primary of 9 chunks is shorter than ")
    assert said in capsys.readouterr().out


def test_no_more_seconds_are_saved_than_computing_would_take(tmp_path: Path) -> None:
    """A trace's last block may be partly filled: of a hit in it only the prompt's own tokens count."""
    trace = str(tmp_path / "short.jsonl")
    write_trace(trace, [Request(60_000 * number, 700, 1, (0, 1)) for number in range(5)])
    (cell,) = sized(trace, tmp_path, "--memory", "400KiB", "--disk", "0", "--prefill", "100")["sizes"]
    assert cell["hits"] == {"cpu": 0.8}
    assert cell["gpu_seconds_saved"] == pytest.approx(4 * 7.0)


@pytest.mark.usefixtures("outside")
def test_each_combination_of_sizes_is_a_row_and_what_memory_forgets_the_disk_has(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = sized(trace, tmp_path, "--memory", "400KiB,1600KiB", "--disk", "0,4MiB")
    cells = {(cell["memory_bytes"] >> 10, cell["disk_bytes"] >> 10): cell for cell in report["sizes"]}
    assert list(cells) == [(400, 0), (400, 4096), (1600, 0), (1600, 4096)]
    assert [cell["hit_ratio"] for cell in cells.values()] == pytest.approx([0, 2 / 3, 2 / 3, 2 / 3])
    assert cells[400, 4096]["hits"]["disk"] == pytest.approx(2 / 3)
    assert cells[400, 4096]["ttft_s"]["p50"] < report["without_tiering_ttft_s"]["p50"]
    assert report["trace_bytes"] == 400 * CHUNK_BYTES
    assert report["best_hit_ratio"] == pytest.approx(2 / 3)
    shown = capsys.readouterr().out
    assert "What a cache is worth, trace.jsonl" in shown
    assert "--gpu-cache" in shown


def test_drives_live_as_long_as_their_writes_last(trace: str, tmp_path: Path) -> None:
    options = ("--memory", "400KiB", "--disk", "4MiB", "--disk-speed", "1GB/s", "--drive-writes-per-day", "3")
    (cell,) = sized(trace, tmp_path, *options)["sizes"]
    assert cell["written_bytes_per_day"] > 0
    assert cell["drive_life_years"] == pytest.approx(5 * 3 * (4 << 20) / cell["written_bytes_per_day"])


def test_the_figures_of_a_small_trace_are_those_of_pencil_and_paper(tmp_path: Path) -> None:
    """One server computes 1,536 tokens, three blocks, a second. Memory holds six chunks, the disk moves ten a second.

    | at | blocks | found | time to first token |
    |---|---|---|---|
    | 0 s | 1 2 3 | nothing | 1 s to compute |
    | 0.5 s | 4 5 6 | nothing | 1.5 s: half a second until the server is free |
    | 20 s | 7 8 9 | nothing, and memory forgets 1 2 3 | 1 s |
    | 30 s | 1 2 3 | three on the disk | 0.3 s to load them; one token is always computed |
    | 40 s | 1 2 10 | two in memory | a third of a second |

    Ten chunks are written, the last of them a tenth of a second after that prompt.
    """
    prompts = ((1, 2, 3), (4, 5, 6), (7, 8, 9), (1, 2, 3), (1, 2, 10))
    path = str(tmp_path / "paper.jsonl")
    times_ms = (0, 500, 20_000, 30_000, 40_000)
    write_trace(path, [Request(at_ms, 1_536, 1, blocks) for at_ms, blocks in zip(times_ms, prompts, strict=True)])
    servers = ("--prefill", "1536", "--slots", "1", "--load-always")
    disk = ("--memory", "24KiB", "--disk", "1MiB", "--disk-speed", "40960B/s", "--disk-write-speed", "40960B/s")
    report = sized(path, tmp_path, *servers, *disk)
    (cell,) = report["sizes"]
    assert cell["hits"] == pytest.approx({"cpu": 2 / 15, "disk": 3 / 15})
    assert (cell["hit_ratio"], report["best_hit_ratio"]) == (pytest.approx(5 / 15), pytest.approx(5 / 15))
    assert cell["gpu_seconds_saved"] == pytest.approx(5 * 512 / 1_536)
    p99 = 1 + 0.96 * 0.5  # On the line between the fourth and the fifth of five, four hundredths before its end.
    assert report["without_tiering_ttft_s"] == pytest.approx({"p50": 1, "p99": p99, "mean": 5.5 / 5, "samples": 5})
    mean = (1 + 1.5 + 1 + (0.3 + 1 / 1_536) + 1 / 3) / 5
    with_tiers = {"p50": 1, "p99": p99, "mean": mean, "samples": 5}
    assert cell["ttft_s"] == pytest.approx(with_tiers, abs=0.0001)
    written_bytes, seconds = 10 * CHUNK_BYTES, 40 + 1 / 3 + 0.1
    assert cell["written_bytes_per_day"] == pytest.approx(written_bytes / seconds * 86_400, rel=0.0001)
    assert cell["drive_life_years"] == pytest.approx(5 * (1 << 20) / cell["written_bytes_per_day"])
    assert report["trace_bytes"] == written_bytes


def test_every_assumption_stands_under_the_table_whoever_made_it(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--memory", "400KiB", "--disk", "4MiB,0", "--prefill", "9000")
    parts = {
        part["what"]: part
        for part in sized(trace, tmp_path, *sizes, "--disk-speed", "1.4GB/s", "--slots", "2")["model"]
    }
    assert list(parts) == ["prefill", "gpu", "copy to the GPU", "disk", "stores to the disk"]
    assert parts["prefill"] == {
        "what": "prefill",
        "figures": {"tokens_per_s": 9_000, "slots": 2},
        "source": "--prefill, --slots",
    }
    assert parts["disk"]["figures"] == {
        "load_bytes_per_s": 1_400_000_000,
        "store_bytes_per_s": 800_000_000,
        "latency_s": 100e-6,
        "concurrency": 64,
    }
    assert parts["disk"]["source"] == "--disk-speed; the rest assumed: one NVMe SSD"
    assert "load 1.4 GB/s, store 800.0 MB/s, latency 0.1 ms" in capsys.readouterr().out
    both = sized(trace, tmp_path, *sizes, "--disk-speed", "1GB/s", "--disk-write-speed", "2GB/s")["model"][-2]
    assert both["source"] == "--disk-speed, --disk-write-speed; the rest assumed: one NVMe SSD"


@pytest.mark.parametrize(("disk", "told"), [("4MiB", ["second_use"]), ("0", [])])
def test_the_figures_say_when_chunks_were_written_to_the_disk(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], disk: str, told: list[str]
) -> None:
    options = ("--memory", "400KiB", "--disk", disk, "--cascade", "second_use")
    model = sized(trace, tmp_path, *options)["model"]
    assert [part["figures"]["cascade"] for part in model if part["source"] == "--cascade"] == told
    assert ("cascade second_use" in capsys.readouterr().out) == bool(told)


@pytest.mark.parametrize("disks", ["0,4MiB", "4MiB,0"])
def test_the_assumed_disk_is_named_wherever_a_row_has_one(trace: str, tmp_path: Path, disks: str) -> None:
    model = sized(trace, tmp_path, "--memory", "400KiB", "--disk", disks)["model"]
    assert [part["source"] for part in model if part["what"] == "disk"] == ["assumed: one NVMe SSD"]


def test_the_table_names_sizes_as_they_were_given_and_shows_what_little_is_saved(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cell,) = sized(trace, tmp_path, "--memory", "1600KiB", "--disk", "4MB", "--prefill", "1000000")["sizes"]
    assert cell["gpu_seconds_saved"] == pytest.approx(0.4096)
    row = capsys.readouterr().out.splitlines()[4].split()
    assert row[:4] == ["1,600", "KiB", "4", "MB"]
    assert "0.41" in row


def test_a_memory_with_no_room_for_a_chunk_is_named_as_it_was_given(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("size", trace, "--kv-bytes-per-token", "8", "--memory", "1KiB", "--disk", "0") == 2
    assert "--memory 1 KiB: a chunk of this trace has 4 KiB; room for at least one" in capsys.readouterr().err


def test_a_short_life_of_a_drive_is_not_shown_as_none(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--memory", "400KiB", "--disk", "4MiB", "--drive-writes-per-day", "0.01")
    (cell,) = sized(trace, tmp_path, *options)["sizes"]
    assert 0 < cell["drive_life_years"] < 0.05
    assert shown_age(365 * 86_400 * cell["drive_life_years"]) in capsys.readouterr().out


def test_a_slow_disk_is_loaded_from_only_where_that_is_faster_unless_asked_always(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--memory", "400KiB", "--disk", "4MiB", "--disk-speed", "10KB/s", "--disk-write-speed", "1GB/s")
    weighed = sized(trace, tmp_path, *options)
    assert "What is faster computed than loaded is computed" in " ".join(capsys.readouterr().out.split())
    always = sized(trace, tmp_path, *options, "--load-always")
    assert "Whatever a tier has is loaded" in " ".join(capsys.readouterr().out.split())
    assert (weighed["load_always"], always["load_always"]) == (False, True)
    (with_it,), (without_it,) = weighed["sizes"], always["sizes"]
    assert with_it["hit_ratio"] < without_it["hit_ratio"]
    without_tiering_s = weighed["without_tiering_ttft_s"]["p99"]
    assert with_it["ttft_s"]["p99"] <= 1.02 * without_tiering_s < without_it["ttft_s"]["p99"]


@pytest.mark.parametrize(
    ("cascade", "remedy"),
    [
        ("store", "Write less (--cascade second_use), or ask for a faster disk (--disk-speed, --bench)."),
        ("evict", "Write less (--cascade second_use), or ask for a faster disk (--disk-speed, --bench)."),
        ("second_use", "Ask for a faster disk (--disk-speed, --bench)."),
    ],
)
def test_a_disk_that_is_too_slow_is_told_once_with_what_to_do_and_not_by_the_minute(
    trace: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    cascade: str,
    remedy: str,
) -> None:
    options = ("--memory", "400KiB", "--disk", "4MiB", "--disk-speed", "100B/s", "--cascade", cascade)
    (cell,) = sized(trace, tmp_path, *options)["sizes"]
    lost = cell["dropped_chunks"] + cell["failed_chunks"]
    said = " ".join(capsys.readouterr().out.split())
    assert f"The disk was too slow: in the worst row, {lost:,} chunks not written or read in time. {remedy}" in said
    assert cell["failed_chunks"] > 0
    assert caplog.records == []


@pytest.mark.usefixtures("outside")
def test_a_trace_that_cannot_be_true_is_told_once_however_many_sizes_there_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "unchained.jsonl")
    write_trace(path, [Request(0, 1_024, 1, (1, 2)), Request(60_000, 1_024, 1, (3, 2))])
    sized(path, tmp_path, "--memory", "400KiB", "--disk", "0,4MiB")
    assert capfd.readouterr().err.count("must be chained") == 1


def test_the_hints_of_a_trace_are_heard_and_the_disk_is_called_disk(trace: str, tmp_path: Path) -> None:
    hinted = str(tmp_path / "hinted.jsonl")
    write_trace(hinted, [replace(each, hint=Hint(no_store=("disk",))) for each in Trace(trace)])
    (cell,) = sized(hinted, tmp_path, "--memory", "400KiB", "--disk", "4MiB")["sizes"]
    assert (cell["written_bytes_per_day"], cell["drive_life_years"], cell["hits"]["disk"]) == (0, None, 0)


def test_sizes_have_the_ratios_of_the_other_commands(trace: str, tmp_path: Path) -> None:
    """Where no request comes before the one before it has been served, as in this trace."""
    cells = sized(trace, tmp_path, "--memory", "400KiB,1200KiB", "--disk", "0")["sizes"]
    ratios = tmp_path / "ratios.json"
    assert run("policies", trace, "--policies", "lru", "--sizes", "0.25,0.75", "--json", str(ratios)) == 0
    assert [cell["hit_ratio"] for cell in cells] == list(json.loads(ratios.read_text())["lru"].values())
    config, report = tmp_path / "engine.toml", tmp_path / "report.json"
    config.write_text('cpu_bytes_to_use = "1200KiB"\nchunk_bytes = "4KiB"\n')
    options = ("--config", str(config), "--virtual-time", "--gpu-cache-blocks", "0", "--json", str(report))
    assert run("replay", trace, *options) == 0
    assert json.loads(report.read_text())["hit_ratio"] == cells[1]["hit_ratio"]


@pytest.mark.usefixtures("outside")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor replays in one process")
@pytest.mark.parametrize("killed_by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_whoever_ends_the_command_ends_its_processes(tmp_path: Path, killed_by: signal.Signals) -> None:
    path = str(tmp_path / "long.jsonl")
    write_trace(
        path,
        [
            Request(1_000 * number, 51_200, 1, tuple(range(100 * number, 100 * number + 100)))
            for number in range(20_000)
        ],
    )
    sizes = ("--kv-bytes-per-token", "8", "--memory", "8MiB,16MiB", "--disk", "64MiB")
    command = subprocess.Popen([*KVTIER, "size", path, *sizes], stderr=subprocess.PIPE, start_new_session=True)
    with command:
        children = Path(f"/proc/{command.pid}/task/{command.pid}/children")
        replaying: list[Path] = []
        while len(replaying) < 2:  # Besides the one that looks after what they share.
            assert command.poll() is None, command.communicate()
            found = [Path("/proc", pid, "cmdline") for pid in children.read_text().split()]
            replaying = [each for each in found if b"spawn_main" in each.read_bytes()]
            time.sleep(0.01)
        command.send_signal(killed_by)
        assert command.wait() == (130 if killed_by == signal.SIGINT else -killed_by)
        deadline = time.monotonic() + 60
        while any(map(still_runs, replaying)):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def still_runs(cmdline: Path) -> bool:
    """Say whether a process is there; what has ended and was not waited for has no arguments any more."""
    try:
        return bool(cmdline.read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_picture_is_drawn(trace: str, tmp_path: Path) -> None:
    picture = tmp_path / "size.svg"
    sized(trace, tmp_path, "--memory", "400KiB", "--disk", "0", "--plot", str(picture))
    assert "time to first token" in picture.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--kv-bytes-per-token or --model: one of both"),
        (("--kv-bytes-per-token", "2", "--model", "Qwen3-8B"), "--kv-bytes-per-token or --model: one of both"),
        (("--model", "absent"), "--model 'absent': neither a config.json nor a known name"),
        (("--kv-bytes-per-token", "2", "--memory", "64"), "--memory '64': expected sizes with units"),
        (("--kv-bytes-per-token", "2", "--memory", "0"), "--memory '0': expected sizes with units"),
        (("--kv-bytes-per-token", "2", "--memory", "10B"), "--memory 10 bytes: a chunk of this trace has"),
        (("--kv-bytes-per-token", "2", "--disk", "2EiB"), "--disk '2EiB': expected sizes with units"),
        (("--kv-bytes-per-token", "2", "--disk", "1025PiB"), "--disk '1025PiB': expected sizes with units"),
        (("--kv-bytes-per-token", "2", "--disk", "1KiB,10B"), "--disk 10 bytes: a chunk of this trace has"),
        (("--kv-bytes-per-token", "2", "--gpu-cache", "1GiB,2GiB"), "--gpu-cache '1GiB,2GiB': expected one size"),
        (("--kv-bytes-per-token", "2", "--gpu-cache", "40"), "--gpu-cache '40': expected one size with a unit"),
        (("--kv-bytes-per-token", "2", "--disk-speed", "7GB"), "--disk-speed '7GB': expected bytes a second"),
        (("--kv-bytes-per-token", "2", "--disk-speed", "1GB/s", "--bench", "x"), "--bench x: it says how fast"),
    ],
)
def test_a_wrong_call_is_refused_by_name(
    trace: str, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("size", trace, *options) == 2
    assert message in capsys.readouterr().err


def config_file(tmp_path: Path, **fields: Any) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return str(path)


def test_a_models_configuration_says_what_a_token_takes(tmp_path: Path) -> None:
    llama = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    path = config_file(tmp_path, **llama, torch_dtype="bfloat16")
    assert (
        kv_bytes_per_token(path) == kv_bytes_per_token(str(tmp_path)) == kv_bytes_per_token("Llama-3.1-8B") == 131_072
    )


def test_a_model_with_latent_attention_keeps_one_vector_a_layer(tmp_path: Path) -> None:
    path = config_file(tmp_path, num_hidden_layers=61, kv_lora_rank=512, qk_rope_head_dim=64, num_attention_heads=128)
    assert kv_bytes_per_token(path) == kv_bytes_per_token("deepseek-ai/DeepSeek-V3") == 70_272


def test_layers_that_keep_a_state_take_nothing_for_a_token_and_a_model_that_sees_has_a_text_model(
    tmp_path: Path,
) -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    text = {"num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64, "layer_types": kinds}
    assert kv_bytes_per_token(config_file(tmp_path, text_config=text)) == 2 * 2 * 8 * 64


A_LAYER = 2 * 2 * 8 * 128  # Bytes: keys and values, of 16 bits, of eight heads with 128 dimensions each.


def with_layers(tmp_path: Path, layers: int, **fields: Any) -> int:
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    return kv_bytes_per_token(config_file(tmp_path, num_hidden_layers=layers, **(heads | fields)))


@pytest.mark.parametrize(
    ("layers", "fields", "with_attention"),
    [
        (32, {"attn_layer_period": 8, "attn_layer_offset": 4}, 4),  # Jamba.
        (52, {"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"}, 4),  # Nemotron-H.
        (6, {"layers_block_type": ["mamba", "moe", "full_attention", "mlp", "mamba", "attention"]}, 2),
        (48, {"full_attention_interval": 4}, 12),  # Qwen3-Next.
        (80, {"attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10}, 10),  # MiniMax.
        (32, {"attn_layer_indices": [9, 18, 27]}, 3),  # Bamba.
        (16, {"full_attn_idxs": [2, 5, 8, 10, 12, 14]}, 6),  # LFM2.
        (26, {"block_types": ["recurrent", "recurrent", "attention"]}, 8),  # RecurrentGemma: again and again.
        (27, {"linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27]}}, 7),  # Kimi Linear.
        (35, {"num_kv_shared_layers": 15, "layer_types": ["sliding_attention"] * 35}, 20),  # Gemma 3n.
        (4, {"layer_types": None, "num_kv_shared_layers": 0}, 4),
    ],
)
def test_only_layers_with_attention_of_their_own_count_however_a_model_says_which(
    tmp_path: Path, layers: int, fields: dict[str, Any], with_attention: int
) -> None:
    assert with_layers(tmp_path, layers, **fields) == with_attention * A_LAYER


@pytest.mark.parametrize(
    ("fields", "kv_heads"),
    [
        ({"num_key_value_heads": None, "num_kv_heads": 4}, 4),  # Falcon.
        ({"num_key_value_heads": None, "num_kv_heads": 4, "multi_query": True, "new_decoder_architecture": True}, 4),
        ({"num_key_value_heads": None, "multi_query": True}, 1),
        ({"num_key_value_heads": None, "num_attention_groups": 2}, 2),  # Step.
        ({"num_key_value_heads": None}, 32),
    ],
)
def test_kv_heads_have_a_name_of_their_own_in_some_models(
    tmp_path: Path, fields: dict[str, Any], kv_heads: int
) -> None:
    assert with_layers(tmp_path, 1, **fields) == A_LAYER * kv_heads // 8


@pytest.mark.parametrize(
    ("fields", "bits"),
    [
        ({"torch_dtype": "bfloat16"}, 16),
        ({"dtype": "float32"}, 16),  # Engines serve such a model with 16 bits.
        ({"quantization_config": {"quant_method": "awq"}}, 16),
        ({"quantization_config": {"kv_cache_scheme": None}}, 16),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}, 8),
        ({"quantization_config": {"kv_cache_quant_algo": "FP8"}}, 8),
    ],
)
def test_values_have_16_bits_unless_the_model_was_quantized_with_its_kv_cache(
    tmp_path: Path, fields: dict[str, Any], bits: int
) -> None:
    assert with_layers(tmp_path, 2, **fields) == 2 * A_LAYER * bits // 16


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layer_types": ["full_attention", "wavelet"]}, "wavelet"),
        ({"block_configs": [{"attention": {"n_heads_in_group": 8}}]}, "block_configs"),  # Layers that differ.
        ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads"),
        ({"global_head_dim": 512}, "global_head_dim"),
        ({"v_head_dim": 64}, "v_head_dim"),
        ({"index_topk": 2048}, "index_topk"),  # It keeps keys of an index besides.
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"quantization_config": {"kv_cache_quant_algo": "NVFP4"}}, "NVFP4"),
        ({"num_hidden_layers": 10**20, "layer_types": ["full_attention"]}, "10000"),
        ({"head_dim": 10**20}, "1073741824"),
        ({"quantization_config": ["FP8"]}, "list"),
    ],
)
def test_a_model_whose_layers_are_not_understood_is_refused_and_not_counted_wrongly(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    heads = {"num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    with pytest.raises(ConfigError, match=rf"--model .*{named}.*--kv-bytes-per-token accepted instead"):
        kv_bytes_per_token(config_file(tmp_path, **(heads | fields)))


@pytest.mark.parametrize(
    "fields", [{}, {"num_hidden_layers": "many"}, {"num_hidden_layers": 0, "num_attention_heads": 1, "head_dim": 1}]
)
def test_a_configuration_that_does_not_say_it_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--model"):
        kv_bytes_per_token(config_file(tmp_path, **fields))


@pytest.mark.parametrize("name", MODELS)
def test_a_known_model_is_found_without_its_owners_name_too(name: str) -> None:
    assert kv_bytes_per_token(name.partition("/")[2].lower()) == kv_bytes_per_token(name) > 0


def test_a_disk_that_is_written_on_second_use_is_written_less(trace: str, tmp_path: Path) -> None:
    sizes = ("--memory", "400KiB", "--disk", "4MiB")
    (at_once,) = sized(trace, tmp_path, *sizes)["sizes"]
    (later,) = sized(trace, tmp_path, *sizes, "--cascade", "second_use")["sizes"]
    assert 0 < later["written_bytes_per_day"] <= at_once["written_bytes_per_day"]
    assert later["hit_ratio"] < at_once["hit_ratio"]
