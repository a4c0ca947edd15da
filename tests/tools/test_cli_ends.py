import os
import subprocess
import sys

import pytest
import typer

from kvtier.errors import BackendUnavailable
from kvtier.tools.cli import main
from kvtier.tools.commands import COMMANDS, command_line
from kvtier.tools.options import JSON
from tests.tools.command import KVTIER, run
from tests.tools.replay.written import write_prompts

PROGRAM = KVTIER[2]
DIRECTORY_COMMANDS = ("verify", "du", "ls", "prune")
LONG = "9" * 5_000
NOT_TEXT = "\udcff"  # As Python has a byte on the command line that is no UTF-8.

NUMBERS = ("", "x", "-1", "0", "²", "1.5", "99999999999999999999", LONG, NOT_TEXT)
LISTS = ("", "x", "-1", "1,,2", LONG, NOT_TEXT, "1\n2x")
OUTPUTS = ("", ".", "absent/out.png", "/proc/absent/out.png", "n" * 300, "trace.jsonl/out.png")
NAMES = ("", "x", "[bold]", "a\nb", NOT_TEXT)
PLACES = ("", "absent", "trace.jsonl", "photos", "n" * 300, "n" * 5_000, NOT_TEXT, "a\nb", "/proc/self/mem")
SIZES = 'cpu_bytes_to_use = "1MiB"\nchunk_bytes = "4KiB"\n'
CONFIGS = {
    "broken.toml": "= 1",
    "empty.toml": "",
    "list.json": "[]",
    "deep.json": "[" * 100_000,
    "binary.toml": "\xff\x00",
    "string.toml": 'cpu_bytes_to_use = "lots"\nchunk_bytes = "4KiB"',
    "huge.json": '{"cpu_bytes_to_use": 1' + "0" * 400 + ', "chunk_bytes": 4096}',
    "long.json": '{"cpu_bytes_to_use": ' + LONG + ', "chunk_bytes": 4096}',
    "negative.toml": 'cpu_bytes_to_use = -1\nchunk_bytes = "4KiB"',
    "nan.toml": 'cpu_bytes_to_use = nan\nchunk_bytes = "4KiB"',
    "unknown.toml": 'cpu_bytes_to_use = "1MiB"\nchunk_bytes = "4KiB"\nwhat = 1',
    "type.toml": 'cpu_bytes_to_use = "1MiB"\nchunk_bytes = "4KiB"\n[[secondary_tiers]]\ntype = "absent"',
    "module.toml": 'cpu_bytes_to_use = "1MiB"\nchunk_bytes = "4KiB"\n[[secondary_tiers]]\ntype = "absent:Class"',
    "root.toml": 'cpu_bytes_to_use = "1MiB"\nchunk_bytes = "4KiB"\n[[secondary_tiers]]\ntype = "fs"\nroot = "no/no"',
    "nul.toml": 'cpu_bytes_to_use = "1MiB"\nchunk_bytes = "4KiB"\n[[secondary_tiers]]\ntype = "fs"\nroot = "a\\u0000b"',
    "limit.toml": 'cpu_bytes_to_use = "1MiB"\nchunk_bytes = "4KiB"\n[limits]\naction_chunks = 1000000000000',
}
ADDRESSES = ("", " ", "x", "/", "99999", LONG, "ftp://host/", "http://", "http://[::1", "host:x", "http://a b:1/")
TRACES = ("", "absent", ".", "photos", "broken.toml", "empty.toml", "binary.toml", "deep.json", NOT_TEXT, "/dev/null")


WRONG_CONFIGS = [name for name in CONFIGS if name != "root.toml"]  # Where nobody looks at a root.
DIRECTORIES = [place for place in PLACES if place not in ("photos", "absent", "a\nb", NOT_TEXT)]  # Not to be made.
SHARES = ("0", "0%", "101%", "1.5", "nan", "inf", "-1%", "150%")
TAKE_LISTS = "--chunk-sizes --disk --disk-speed --memory --older-than --policies --size --sizes"
TAKE_NUMBERS = "--concurrency --kv-bytes-per-token --limit --rounds --slots"
BAD = {
    **dict.fromkeys(("--cascade", "--device", "--namespace"), NAMES),
    **dict.fromkeys(TAKE_LISTS.split(), LISTS),
    **dict.fromkeys(TAKE_NUMBERS.split(), NUMBERS),
    **dict.fromkeys((JSON, "--plot"), OUTPUTS),
    "--config": (*WRONG_CONFIGS, "absent.toml", ".", "", "trace.jsonl", NOT_TEXT),
    "--fs": (*DIRECTORIES, "absent/deeper"),
    "--gpu-cache-tokens": ("x", "-1"),
    "--host": (),  # Any name may be one.
    "--interval": (*NUMBERS, "10ms", "2h", "2d", "1m"),
    "--model": ("absent/model", *PLACES),
    "--port": ("x", "-1", "65536"),
    "--prefill-tokens-per-s": ("x", "0", "nan"),
    "--sample": (*LISTS, *SHARES),
    "--seed": ("x", "-1"),
    "--to-size": (*LISTS, "0%", "101%", "-5%", "%", "nan%", "10", "10g"),
}
"""Values that each option rejects, whichever command has it."""
FIRST = {
    **dict.fromkeys(DIRECTORY_COMMANDS, PLACES),
    "bench": [each for each in (*PLACES, *CONFIGS, "absent.toml", "", NOT_TEXT) if each != "photos"],
    "config check": (*WRONG_CONFIGS, "absent.toml", ""),
    "policies": TRACES,
    "replay": TRACES,
    "serve": ("good.toml", *WRONG_CONFIGS, "absent.toml", ""),
    "top": ADDRESSES,
}
"""Values that a command rejects as its first argument."""


def whole(name, *first):
    """Return a valid call of a command, to which a wrong option is added, or a wrong argument is given."""
    own = {"bench": ["."], "selftest": [], "top": ["1"], "vllm-config": []}
    own |= {each: ["good.toml"] for each in ("config check", "serve")}
    argument = own.get(name, ["root" if name in DIRECTORY_COMMANDS else "trace.jsonl"])
    options = {"prune": ["--leftovers"], "selftest": ["--device", "cpu"], "top": ["--once"]}
    more = options.get(name, ["--memory", "1MiB"] if name == "vllm-config" else [])
    return [*name.split(), *(first or argument), *more]


def options(name):
    command = typer.main.get_command(command_line(name.split()))
    for word in name.split():
        command = command.commands[word]
    yield from (param for param in command.params if param.opts[0].startswith("--"))


def calls():
    """Yield for each option and argument of each command calls that are wrong by it alone."""
    yield from (["absent"], ["--absent"], [NOT_TEXT], ["a\nb"], ["verify"], ["top", "1"], ["top", "1", JSON])
    for name in COMMANDS:
        yield [*whole(name), "--nonsense"]
        yield [*whole(name), "more", "than", "it", "takes"]
        yield [*whole(name), "--quiet", "--verbose"]
        for bad in FIRST.get(name, ()):
            yield whole(name, bad)
        for option in options(name):
            if option.is_flag or option.count:
                yield [*whole(name), f"{option.opts[0]}=value"]
                continue
            if JSON not in option.opts:  # Alone, it has a meaning.
                yield [*whole(name), option.opts[0]]
            yield from ([*whole(name), option.opts[0], bad] for bad in BAD[option.opts[0]])


CALLS = list(calls())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    (folder / "root").mkdir()
    (folder / "photos" / "summer").mkdir(parents=True)
    (folder / "good.toml").write_text(SIZES + '[[secondary_tiers]]\ntype = "dummy"')
    for name, text in CONFIGS.items():
        (folder / name).write_text(text, encoding="latin-1")
    write_prompts(folder / "trace.jsonl", map(range, range(1, 6)), every_ms=1_000)
    return folder


def shown(call):
    return " ".join(arg if len(arg) <= 30 else f"{arg[:9]}…" for arg in call).encode("unicode_escape").decode()


def refused(call, capsys):
    """Make a call; return what was wrong with its end, or nothing if it was rejected in one line."""
    before = sorted(os.listdir())
    with pytest.raises(SystemExit) as end:
        main(call)
    out, err = capsys.readouterr()
    in_one_line = err.startswith("kvtier: ") and err.count("\n") == 1 and "Traceback" not in err
    if end.value.code == 2 and out == "" and in_one_line and sorted(os.listdir()) == before:
        return ""
    return f"ended with {end.value.code}, wrote {out!r} and {err!r}, and left {sorted(os.listdir())}"


@pytest.mark.parametrize("first", sorted({call[0] for call in CALLS}), ids=lambda first: shown([first]))
def test_a_bad_call_is_rejected_in_one_line_with_2(place, first, monkeypatch, capsys):
    monkeypatch.chdir(place)
    calls = [call for call in CALLS if call[0] == first]
    assert {shown(call): wrong for call in calls if (wrong := refused(call, capsys))} == {}


SIZE = ["size", "trace.jsonl", "--kv-bytes-per-token"]
NAMED = [
    (["bench", ".", "--chunk-sizes", "5000"], "--chunk-sizes '5000': expected multiples of 4,096 bytes"),
    (["bench", "absent"], "PLACE 'absent': no such directory; one that is there accepted"),
    (["bench", ".", "--size", "lots"], "--size 'lots': expected a size such as 2MiB"),
    (["bench", "absent.toml", "--chunk-sizes", "8KiB"], "--chunk-sizes: accepted with a directory only"),
    (
        ["policies", "absent", "--sizes", "0"],
        "--sizes '0': expected shares of the unique blocks, above 0 and at most 1",
    ),
    (["policies", "absent", "--sizes", "0.1,,0.2"], "--sizes '0.1,,0.2': expected names or numbers with commas"),
    (["policies", "absent", "--policies", "lru,lrru"], "'lrru' is no policy; did you mean 'lru'?"),
    (["policies", "absent", "--policies", "no_such_module:Own"], "policy 'no_such_module:Own': there is no module"),
    (["policies", "absent", JSON, "absent/out.json"], "--json absent/out.json: No such file or directory"),
    (["size", "trace.jsonl"], "--kv-bytes-per-token or --model: one of both"),
    ([*SIZE, "2", "--model", "Qwen3-8B"], "--kv-bytes-per-token or --model: one of both"),
    (["size", "trace.jsonl", "--model", "absent"], "--model absent: cannot be read"),
    ([*SIZE, "2", "--memory", "64"], "--memory '64': expected sizes with units"),
    ([*SIZE, "8", "--memory", "1KiB"], "--memory 1.0 KiB: a chunk of this trace has 4.0 KiB"),
    ([*SIZE, "2", "--disk", "1025PiB"], "--disk '1025PiB': expected sizes with units"),
    ([*SIZE, "2", "--disk", "1KiB,10B"], "--disk 10 B: a chunk of this trace has"),
    ([*SIZE, "2", "--cascade", "never"], "'never' is not one of 'store', 'evict', 'second_use'"),
]


@pytest.mark.parametrize(("call", "complaint"), NAMED)
def test_a_wrong_value_is_named_with_what_is_accepted(place, call, complaint, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert run(*call) == 2
    assert complaint in capsys.readouterr().err


def ended(*args, program=PROGRAM, stdout=subprocess.PIPE, **environment):
    command = [sys.executable, "-c", program, *args]
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "", **environment}
    ran = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=surroundings, check=False)
    return ran.returncode, (ran.stdout or b"").decode(), ran.stderr.decode()


WRITES = {
    "policies": ["policies", "{place}/trace.jsonl", "--policies", "lru"],
    "du": ["du", "{place}/root"],
    "ls as JSON": ["ls", "{place}/root", "--json"],
    "help": ["--help"],
}


@pytest.mark.parametrize("name", WRITES)
def test_output_that_does_not_fit_on_the_disk_ends_with_3(outside, place, name):
    with open("/dev/full", "wb") as full:
        status, _, err = ended(*(arg.format(place=place) for arg in WRITES[name]), stdout=full.fileno())
    assert (status, err) == (3, "kvtier: stdout: No space left on device\n")


@pytest.mark.parametrize("name", WRITES)
def test_output_that_is_not_read_ends_with_141_and_no_message(outside, place, name):
    ours, theirs = os.pipe()
    os.close(ours)
    status, _, err = ended(*(arg.format(place=place) for arg in WRITES[name]), stdout=theirs)
    os.close(theirs)
    assert (status, err) == (141, "")


def test_a_report_that_does_not_fit_on_the_disk_ends_with_3_and_its_name(outside, place):
    status, _, err = ended("policies", f"{place}/trace.jsonl", "--json", "/dev/full")
    assert (status, err) == (3, "kvtier: /dev/full: No space left on device\n")


@pytest.mark.parametrize(
    ("name", "encoding", "shown"),
    [("日本.jsonl", "ascii", "\\u65e5"), ("trace\udcff.jsonl", "utf-8", "trace\\udcff.jsonl")],
)
def test_a_file_whose_name_the_terminal_cannot_show_is_named_escaped(outside, place, tmp_path, name, encoding, shown):
    (tmp_path / name).write_bytes((place / "trace.jsonl").read_bytes())
    status, out, err = ended("policies", str(tmp_path / name), "--policies", "lru", PYTHONIOENCODING=encoding)
    assert (status, err) == (0, "")
    assert shown in out


def test_an_error_is_one_line_also_where_the_terminal_cannot_show_a_name(outside, tmp_path):
    status, out, err = ended("policies", str(tmp_path / "本"), LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    assert (status, out) == (2, "")
    assert err.startswith("kvtier: ")
    assert err.count("\n") == 1


AT = "kvtier.tools.commands typing typer kvtier.tools.directory rich.table kvtier_backends.fs.directory"
INTERRUPTED_AT = """
import signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from kvtier.tools.cli import main
main()
"""


@pytest.mark.parametrize("name", AT.split())
def test_ctrl_c_during_any_import_ends_with_130_and_no_message(outside, place, name):
    status, out, err = ended("du", str(place / "root"), program=INTERRUPTED_AT.format(name=name))
    assert (status, out, err) == (130, "", "")


def test_a_command_runs_with_closed_outputs(outside, place):
    closed = "import os, sys; os.close(1); os.close(2); os.execv(sys.executable, [sys.executable, '-c', *sys.argv[1:]])"
    assert ended(PROGRAM, "du", str(place / "root"), program=closed) == (0, "", "")


def test_a_bug_of_kvtier_ends_with_70(monkeypatch, capsys):
    """Python would end with 1, which means bad data."""

    def faulty(_):
        raise AssertionError("impossible")

    monkeypatch.setattr("kvtier.tools.commands.run", faulty)
    assert run("du") == 70
    assert "AssertionError: impossible" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (BackendUnavailable("0:fs: cannot be reached"), "kvtier: 0:fs: cannot be reached\n"),
        (OSError(5, "Input/output error", "some\nfile"), "kvtier: some\\nfile: Input/output error\n"),
        (MemoryError(), "kvtier: there is not enough memory for this\n"),
    ],
)
def test_a_failure_of_the_machine_ends_with_3(monkeypatch, capsys, error, told):
    def refused(_):
        raise error

    monkeypatch.setattr("kvtier.tools.commands.command_line", refused)
    assert (run("du"), capsys.readouterr().err) == (3, told)
