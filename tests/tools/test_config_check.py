"""`kvtier config check`: kvtier's own files and vLLM's line, with what holds in the end."""

import io
import json
import shlex
import subprocess
import sys

import pytest

from tests.tools.command import run as run_command

TOML = """
cpu_bytes_to_use = "1MiB"
chunk_bytes = "16KiB"
[[secondary_tiers]]
type = "fs"
root = "{folder}/tier"
capacity_bytes = "{capacity}"
[[secondary_tiers]]
type = "redis"
password_env = "KVTIER_TEST_PASSWORD"
"""
MISNAMED = """
cpu_bytes_to_use = "1MiB"
chunk_bytes = "16KiB"
[[secondary_tiers]]
backend = "fs"
root = "/tier"
{}
"""
PACKAGE = "kvtier.integrations.vllm"
SECOND = {"type": "KVTierSecondaryTier", "module_path": PACKAGE, "backend": "fs"}
SHORT = {"kv_connector": "KVTierConnector", "kv_role": "kv_both"}


def line(tier, **extra):
    first = {"spec_name": "KVTierOffloadingSpec", "spec_module_path": PACKAGE, "cpu_bytes_to_use": "1GiB"}
    return json.dumps(
        {
            "kv_connector": "KVTierConnector",
            "kv_connector_module_path": PACKAGE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {**first, "secondary_tiers": [tier], **extra},
        }
    )


@pytest.fixture
def run(capsys, monkeypatch):
    def run(*args, given=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(given))
        return (run_command("config", "check", *args), *capsys.readouterr())

    return run


def test_the_effective_configuration_is_shown_with_defaults_and_without_secrets(run, tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_TEST_PASSWORD", "hunter2")
    path = tmp_path / "kvtier.toml"
    path.write_text(TOML.format(folder=tmp_path, capacity="1MiB"))
    status, out, err = run(path)
    assert (status, err) == (0, "")
    fields = dict(row.split(maxsplit=1) for row in out.splitlines()[1:])
    assert fields["secondary_tiers[0].root"].strip() == f'"{tmp_path}/tier"'
    assert fields["secondary_tiers[0].layout"].strip() == '"segments"'
    assert fields["secondary_tiers[1].limits.deadline_s"].strip() == "30.0"
    assert "PASSWORD" not in out
    _, in_json, _ = run(path, "--json")
    assert json.loads(in_json)["configuration"]["secondary_tiers"][1]["password_env"] == "(not shown)"


def test_a_configuration_that_would_fail_on_this_machine_ends_with_1(run, tmp_path):
    path = tmp_path / "kvtier.toml"
    path.write_text(TOML.format(folder=tmp_path / "absent", capacity="1MiB"))
    status, _, err = run(path)
    assert status == 1
    assert "secondary_tiers[0].root: cannot create" in err
    assert "secondary_tiers[1].password_env: the environment has no variable" in err
    path.write_text(TOML.format(folder=tmp_path, capacity="900PiB"))
    status, _, err = run(path)
    assert status == 1
    assert "secondary_tiers[0].capacity_bytes: 1,013,309,916,158,361,600 given, but the disk of" in err


def test_a_root_of_two_tiers_is_refused_unless_both_share_it(run, tmp_path):
    tier = '[[secondary_tiers]]\ntype = "fs"\nlayout = "files"\n'
    roots = [f'root = "{tmp_path}/tier"\n', f'root = "{tmp_path}/./tier"\n']
    sizes = 'cpu_bytes_to_use = "1MiB"\nchunk_bytes = "16KiB"\n'
    status, _, err = run("-", given=sizes + "".join(tier + root for root in roots))
    assert status == 1
    assert "secondary_tiers[1].root:" in err
    assert "secondary_tiers[0] uses it" in err
    shared = 'shared = true\ncapacity_bytes = "1MiB"\n'
    status, _, err = run("-", given=sizes + "".join(tier + root + shared for root in roots))
    assert "uses it" not in err


def test_vllms_line_is_checked_from_a_file_and_from_stdin(run, tmp_path):
    text, path = line({"type": "fs", "root": str(tmp_path / "tier")}), tmp_path / "line.json"
    path.write_text(text)
    assert run(path)[0] == run("-", given=text)[0] == 0
    _, out, _ = run("-", "--json", given=text)
    assert json.loads(out)["configuration"]["late_margin"] == 1.5


@pytest.mark.parametrize("own", [{}, SECOND, {"type": "kvtier", "backend": "fs"}], ids=["first", "path", "type"])
def test_a_place_in_a_path_of_vllms_line_is_accepted(run, tmp_path, own):
    tier = {"type": "fs", "root": str(tmp_path / "{dp_rank}"), **own}
    spec = "TieringOffloadingSpec" if own else "KVTierOffloadingSpec"
    status, out, err = run("-", given=line(tier, spec_name=spec))
    assert (status, err) == (0, "")
    assert "secondary_tiers[0].root" in out
    assert "secondary_tiers[0].layout" in out
    status, _, err = run("-", given=line({**tier, "rot": 1}, spec_name=spec))
    assert (status, "rot: no such field; did you mean 'root'?" in err) == (2, True)


def test_vllms_line_is_printed_for_memory_and_disks_and_is_right_as_it_stands(run, tmp_path, capsys):
    disks = [f"--disk={tmp_path}/it's one:1G", f"--disk={tmp_path}/two:2G"]
    assert run_command("vllm-config", "--memory", "8G", *disks) == 0
    option, written = shlex.split(capsys.readouterr().out)
    assert option == "--kv-transfer-config"
    status, out, err = run("-", "--json", given=written)
    assert (status, err) == (0, "")
    configuration = json.loads(out)["configuration"]
    assert configuration["cpu_bytes_to_use"] == 8 << 30
    roots = [(tier["root"], tier["capacity_bytes"]) for tier in configuration["secondary_tiers"]]
    assert roots == [(f"{tmp_path}/it's one", 1 << 30), (f"{tmp_path}/two", 2 << 30)]


def test_a_disk_that_this_machine_lacks_is_found_before_vllm_starts(tmp_path, capsys):
    assert run_command("vllm-config", "--memory", "8G", "--disk", f"{tmp_path}/absent/deeper:1G") == 1
    assert "kvtier: vllm-config: secondary_tiers[0].root: cannot create" in capsys.readouterr().err


def test_a_secret_that_looks_like_a_place_is_not_shown(run):
    status, out, err = run("-", given=line({"type": "redis", "password_file": "${hunter2}"}))
    assert status == 2
    assert "hunter2" not in out + err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (line({"type": "fs"}), "kv_connector_extra_config.secondary_tiers[0].root: missing, a path"),
        (line({"type": "dummy"}, deadline_s=3), "did you mean 'kv_connector_extra_config.secondary_tiers[0].limits.d"),
        ('{"kv_connector": "KVTierConnector", "cpu_bytes_to_use": 1}', "did you mean 'kv_connector_extra_config.cpu"),
        (json.dumps({**SHORT, "kv_connector_extra_config": {}}), "kv_connector_extra_config.cpu_bytes_to_use: missing"),
        (line({"type": "dummy"}, spec_module_path="other"), "spec_module_path: 'other' given, 'kvtier.integrations.vl"),
        (line({**SECOND, "module_path": "x"}, spec_name="Other"), "secondary_tiers[].module_path: 'x' given"),
        (line({"type": "fs"}, spec_name="Other"), "spec_name: nothing of kvtier's given"),
        ("{", "is malformed"),
        ("cpu_bytes_to_use = 1", "chunk_bytes: missing"),
        (MISNAMED.format(""), "secondary_tiers[0].type: missing, text, of length at least 1 required (did you mean it"),
    ],
    ids=range(10),
)
def test_a_wrong_field_of_a_line_is_refused_by_its_path(run, given, told):
    status, out, err = run("-", given=given)
    assert (status, out) == (2, "")
    assert told in err


def test_a_class_of_a_module_beside_the_file_is_found_from_anywhere(outside, tmp_path):
    (tmp_path / "own_tier_beside.py").write_text("from kvtier_backends.dummy import DummyBackend as Own\n")
    path = tmp_path / "kvtier.toml"
    path.write_text(
        'cpu_bytes_to_use = "1MiB"\nchunk_bytes = "16KiB"\nrunner = "process"\n'
        '[[secondary_tiers]]\ntype = "own_tier_beside:Own"\n'
    )
    command = [sys.executable, "-I", "-m", "kvtier"]
    for args in (["config", "check", str(path)], ["bench", str(path), "--size", "64KiB", "--rounds", "1"]):
        done = subprocess.run([*command, *args], capture_output=True, text=True, cwd="/", check=False)
        assert done.returncode == 0, done.stderr
