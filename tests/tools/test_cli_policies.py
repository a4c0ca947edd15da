"""`kvtier policies`, and the frame that all commands share."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

import kvtier
from kvtier.hints import Hint
from kvtier.policies import LRU
from kvtier.tools.cli import main
from kvtier.tools.commands import COMMANDS, GROUPS
from kvtier.tools.replay.policies_command import _refine
from kvtier.tools.replay.study import measure, simulation
from kvtier.tools.replay.tiered import tiered_hits
from kvtier.tools.replay.traces import Request, Trace, write_trace

KVTIER = [sys.executable, "-c", "from kvtier.tools.cli import main; main()"]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Return a trace's path: three prompts over ten blocks, again and again."""
    prompts = [(0, 1, 2, 3), (0, 1, 4, 5, 6), (7, 8, 9)]
    path = tmp_path / "trace.jsonl.gz"
    write_trace(path, [Request(number, 512 * len(ids), 1, ids) for number, ids in enumerate(prompts * 10)])
    return str(path)


def run(*args: str) -> int:
    """Run a command in this process; return its exit status."""
    with pytest.raises(SystemExit) as end:
        main(args)
    assert isinstance(end.value.code, int)
    return end.value.code


def test_the_table_shows_each_policy_at_each_size(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("policies", trace, "--policies", "lru,opt", "--sizes", "0.5,1") == 0
    shown = capsys.readouterr()
    assert "trace.jsonl.gz" in shown.out
    assert "\nlru  " in shown.out
    assert "\nopt  " in shown.out
    assert "30 requests, 120 block references, 10 unique blocks; best possible hit ratio 0.9167" in shown.out
    assert shown.err == ""


def test_a_cache_that_is_shorter_than_a_request_is_said(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("policies", trace, "--policies", "lru", "--sizes", "0.4,1") == 0
    line = "--sizes 0.4: a cache of 4 chunks is shorter than 10 requests of 30, the longest of 5 chunks"
    assert line in capsys.readouterr().out


def test_a_heading_is_one_line_in_a_pipe_however_narrow_its_table(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    long = str(Path(trace).rename(Path(trace).with_name(f"{'a long name ' * 6}.jsonl.gz")))
    assert run("policies", long, "--policies", "lru", "--sizes", "0.5", "--tier", "0.5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Hit ratios, {os.path.basename(long)}"
    assert lines[4:6] == ["", "Blocks written to the tier, for each block asked for"]


def test_ratios_for_standard_output_go_there_alone(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir(tmp_path))
    assert run("policies", trace, "--policies", "lru", "--sizes", "0.5", "--json", "-") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out).keys() == {"lru"}
    assert shown.err == ""
    assert sorted(os.listdir(tmp_path)) == before


def test_the_json_has_the_studys_ratios_under_the_names_that_were_given(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert run("policies", trace, "--policies", "lru, arc,opt,lru", "--sizes", "0.30,0.5,.5", "--json", str(out)) == 0
    extent = measure(Trace(trace))
    expected = {
        name: {
            size: extent.hit_ratio(sum(simulation(name)(Trace(trace), extent.capacity(float(size)))))
            for size in ("0.30", "0.5", ".5")
        }
        for name in ("lru", "arc", "opt")
    }
    assert json.loads(out.read_text()) == expected
    assert 0 < expected["lru"]["0.5"] < 1


def test_by_default_all_policies_are_compared_at_five_sizes(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert run("policies", trace, "--json", str(out)) == 0
    ratios = json.loads(out.read_text())
    assert list(ratios) == ["fifo", "lru", "lfu", "arc", "s3fifo", "density", "opt"]
    assert all(list(row) == ["0.01", "0.05", "0.10", "0.25", "0.50"] for row in ratios.values())


def test_a_policy_of_ones_own_is_compared_by_module_and_class(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    own = "kvtier.policies:LRU"
    assert run("policies", trace, "--policies", f"lru,{own}", "--sizes", "0.5", "--json", str(out)) == 0
    ratios = json.loads(out.read_text())
    assert ratios["lru"] == ratios[own]


def test_a_limit_leaves_the_rest_of_the_trace_out(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("policies", trace, "--policies", "lru", "--limit", "2") == 0
    assert "2 requests, 9 block references, 7 unique" in capsys.readouterr().out


def test_a_workload_is_generated_where_there_is_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("policies", "generated", "--policies", "lru", "--sizes", "0.05", "--limit", "300") == 0
    assert "300 requests" in capsys.readouterr().out


def test_a_trace_without_any_block_has_a_hit_ratio_of_zero(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", [Request(0, 5, 1, ())])
    out = tmp_path / "out.json"
    assert run("policies", str(tmp_path / "trace.jsonl"), "--sizes", "0.5", "--json", str(out)) == 0
    assert set(json.loads(out.read_text())["lru"].values()) == {0.0}


@pytest.mark.parametrize(("suffix", "begin"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_miss_ratio_curve_is_drawn_as_the_name_says(trace: str, tmp_path: Path, suffix: str, begin: bytes) -> None:
    picture = tmp_path / f"curve{suffix}"
    assert run("policies", trace, "--policies", "lru,opt", "--plot", str(picture)) == 0
    assert picture.read_bytes().startswith(begin)
    assert len(picture.read_bytes()) > 1_000


def test_a_drawn_curve_gets_further_sizes_where_it_bends_and_none_where_it_is_a_line() -> None:
    def straight(share: float) -> float:
        return 0.1 * math.log10(1_000 * share)

    def bent(share: float) -> float:
        return min(0.15, straight(share))

    sizes = (0.01, 0.1, 1.0)
    line, knee = ({share: ratio(share) for share in sizes} for ratio in (straight, bent))
    _refine(line, straight, 8)
    assert set(line) == set(sizes)
    _refine(knee, bent, 8)
    assert len(sizes) < len(knee) <= len(sizes) + 8
    assert all(ratio == bent(share) for share, ratio in knee.items())
    assert min(abs(math.log10(share) + 1.5) for share in knee) < 0.3  # The bend is at 10^-1.5.


def test_a_trace_with_an_odd_name_is_drawn_too(trace: str, tmp_path: Path) -> None:
    odd = tmp_path / "a $trace$ \\frac [bold].gz"
    os.rename(trace, odd)
    assert run("policies", str(odd), "--policies", "lru", "--plot", str(tmp_path / "curve.png")) == 0


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--sizes", "0"], "--sizes '0': expected shares of the unique blocks, above 0 and at most 1"),
        (["--sizes", "0.1,2"], "--sizes '2': expected shares"),
        (["--sizes", "abc"], "--sizes 'abc': expected shares"),
        (["--sizes", "nan"], "--sizes 'nan': expected shares"),
        (["--sizes", "0.1,,0.2"], "--sizes '0.1,,0.2': expected names or numbers with commas between them"),
        (["--policies", "lru,lrru"], "'lrru' is no policy; did you mean 'lru'?"),
        (["--policies", ""], "--policies '': expected names"),
        (["--policies", "no_such_module:Own"], "policy 'no_such_module:Own': there is no module"),
        (["--json", "{tmp}/absent/out.json"], "--json {tmp}/absent/out.json: No such file or directory"),
        (["--plot", "{tmp}/absent/out.png"], "--plot {tmp}/absent/out.png: No such file or directory"),
        (["--plot", "{tmp}/out.txt"], "--plot {tmp}/out.txt: expected a name that ends in one of"),
        (["--plot", "{tmp}"], "--plot {tmp}: it is a directory"),
    ],
)
def test_a_bad_call_is_refused_in_one_line_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], complaint: str
) -> None:
    """There is no trace either: whoever looked for it first would complain of that."""
    given = [arg.format(tmp=tmp_path) for arg in args]
    assert run("policies", str(tmp_path / "absent.jsonl"), *given) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"kvtier: {complaint.format(tmp=tmp_path)}")
    assert shown.err.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_a_bad_trace_is_refused_in_one_line_and_nothing_is_written(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    write_trace(bad, Trace(trace))
    bad.write_bytes(bad.read_bytes()[:-10])
    os.unlink(trace)
    assert run("policies", str(bad), "--json", f"{tmp_path}/out.json", "--plot", f"{tmp_path}/out.png") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"kvtier: {bad}, line 30: Input data was truncated")
    assert shown.err.count("\n") == 1
    assert os.listdir(tmp_path) == ["bad.jsonl"]


def test_without_matplotlib_a_picture_is_refused_with_the_remedy(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "kvtier.tools.pictures", raising=False)
    assert run("policies", trace, "--plot", str(tmp_path / "curve.png")) == 2
    assert "pip install 'kvtier[report]'" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["policies"], ["policies", "generated", "--limit", "0"], ["polices"], ["--bad"]])
def test_a_call_that_is_no_command_is_refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*args) == 2
    assert "kvtier" in capsys.readouterr().err


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command.split(), "--help") == 0
    assert f"Usage: kvtier {command}" in capsys.readouterr().out


@pytest.mark.usefixtures("outside")
def test_the_help_lists_the_commands_and_imports_none_of_them() -> None:
    script = (
        "import sys; from kvtier.tools.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print([m for m in ('torch', 'numpy', 'matplotlib', 'kvtier.tools.replay') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.endswith("[]\n")
    summaries = [command.summary for name, command in COMMANDS.items() if " " not in name]
    assert all(summary in answer.stdout for summary in (*summaries, *GROUPS.values()))


@pytest.mark.usefixtures("outside")
def test_an_interrupt_ends_the_command_with_130_and_nothing_half_made(tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    write_trace(long, (Request(number, 1, 1, tuple(range(number, number + 300))) for number in range(20_000)))
    command = [*KVTIER, "policies", str(long), "--json", str(tmp_path / "out.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until_open(process.pid, long)
        process.send_signal(signal.SIGINT)
        shown = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in shown[1]
    assert sorted(os.listdir(tmp_path)) == ["long.jsonl"]


def test_an_interrupt_before_the_command_has_begun_ends_it_with_130_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvtier.tools.commands.import_module", interrupted)
    assert run("policies") == 130


def wait_until_open(pid: int, path: Path) -> None:
    """Return once a process has a file open."""
    while True:
        try:
            if any(os.path.realpath(f"/proc/{pid}/fd/{fd}") == str(path) for fd in os.listdir(f"/proc/{pid}/fd")):
                return
        except FileNotFoundError:
            continue


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"kvtier {kvtier.__version__}\n"


@pytest.mark.usefixtures("outside")
def test_python_runs_the_package_as_the_command() -> None:
    command = [sys.executable, "-m", "kvtier", "--version"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"kvtier {kvtier.__version__}\n", "")


@pytest.mark.parametrize("command", ["", "bench", *COMMANDS])
def test_h_is_short_for_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command.split(), "--help") == 0
    told = capsys.readouterr().out
    assert run(*command.split(), "-h") == 0
    assert capsys.readouterr().out == told


def test_a_tier_under_the_caches_has_the_tiered_studys_hits_and_writes(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "tiered.json"
    options = ("--sizes", "0.5", "--tier", "0.7", "--cascades", "store,evict,second_use", "--json", str(out))
    assert run("policies", trace, *options) == 0
    report = json.loads(out.read_bytes())
    extent = measure(Trace(trace))
    for cascade in ("store", "evict", "second_use"):
        served = list(tiered_hits(Trace(trace), LRU(5), 5, 7, cascade))
        assert report["hit_ratio"][f"lru, {cascade}"]["0.5"] == extent.hit_ratio(sum(each.hits for each in served))
        assert report["written"][f"lru, {cascade}"]["0.5"] == extent.hit_ratio(sum(each.written for each in served))


def test_a_tier_under_the_caches_is_written_nothing_that_hints_keep_out_of_it(trace: str, tmp_path: Path) -> None:
    hinted, out = tmp_path / "hinted.jsonl", tmp_path / "tiered.json"
    write_trace(hinted, (structs.replace(each, hint=Hint(no_store=("disk",))) for each in Trace(trace)))

    def written(*options: str) -> float:
        command = ("policies", str(hinted), "--policies", "lru", "--sizes", "0.5", "--tier", "0.7", *options)
        assert run(*command, "--json", str(out)) == 0
        return json.loads(out.read_bytes())["written"]["lru, store"]["0.5"]

    assert written("--tier-name", "disk") == 0
    assert written("--tier-name", "ssd") == written() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tier", "1.5"), "--tier '1.5': expected shares of the unique blocks"),
        (("--cascades", "evict"), "--cascades evict: accepted with --tier only"),
        (("--tier-name", "disk"), "--tier-name disk: accepted with --tier only"),
        (("--tier", "0.5", "--cascades", "write"), "--cascades 'write': store, evict, second_use accepted"),
        (("--tier", "0.5", "--policies", "opt"), "policy 'opt' given with a tier"),
    ],
)
def test_a_tier_that_cannot_be_studied_is_refused(
    trace: str, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("policies", trace, *options) != 0
    assert message in " ".join(capsys.readouterr().err.split())
