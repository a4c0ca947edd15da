"""Secrets: no message, log line, traceback or repr shows them, and files with one are for their owner alone."""

import os
import traceback

import msgspec
import pytest

from kvtier.backend import BUILT_IN_TYPES, SealOptions, backend_class
from kvtier.config import EngineConfig, TierConfig, tier_options
from kvtier.errors import ConfigError
from kvtier.settings import Checked, SecretName, decode, open_secret, struct_fields
from kvtier.settings.fields import is_secret
from kvtier.testing.faults import FaultyOptions

SECRET = "hunter2" * 10
AES = {"seal": "aes-256-gcm"}
NEEDED = {"fs": {"root": "/tmp"}, "object": {"url": "s3://bucket"}}
WITH = {
    "seal_key_env": AES,
    "seal_key_file": AES,
    "tls_cert_file": {"tls": True},
    "tls_key_file": {"tls": True, "tls_cert_file": "/none"},
}


def options_with_secrets():
    for type_name in BUILT_IN_TYPES:
        for name, field in struct_fields(backend_class(type_name).options_type).items():
            if is_secret(field.type):
                yield type_name, name


def shown(raised):
    return "".join(traceback.format_exception(raised))


def use(given):
    tiers = [given]
    config = EngineConfig.from_dict(
        {"cpu_bytes_to_use": 4_096, "chunk_bytes": 1, "runner": "process", "secondary_tiers": tiers}
    )
    options = tier_options(config.secondary_tiers[0], "secondary_tiers[0]")
    assert "hunter2" not in repr(config) + repr(options)
    for doubt in options.doubts():
        raise ConfigError(doubt)
    options.make_seal(b"\0" * 32, 4_096)


SLIPS = [
    SECRET,
    f"{SECRET}\0",
    f"{SECRET}\ud800",
    [SECRET],
    {SECRET: 1},
    int(SECRET[:20].encode().hex(), 16),
    b"hunter2",
]


@pytest.mark.parametrize(("type_name", "name"), list(options_with_secrets()))
@pytest.mark.parametrize("given", SLIPS, ids=range(len(SLIPS)))
def test_a_secret_in_the_place_of_its_name_is_refused_and_never_shown(type_name, name, given):
    with pytest.raises(ConfigError, match=name) as refused:
        use({"type": type_name, **NEEDED.get(type_name, {}), **WITH.get(name, {}), name: given})
    assert "hunter2" not in shown(refused.value)
    assert not isinstance(given, int) or str(given) not in shown(refused.value)


def test_every_option_whose_name_speaks_of_a_secret_hides_its_value():
    for type_name in BUILT_IN_TYPES:
        for name, field in struct_fields(backend_class(type_name).options_type).items():
            speaks = name.endswith("_env") or any(word in name for word in ("key_", "password", "credential", "secret"))
            assert is_secret(field.type) == (speaks or name == "tls_cert_file"), (type_name, name)


@pytest.mark.parametrize(
    ("type_name", "options"),
    [
        ("redis", {"url": f"redis://user:{SECRET}@host:6379"}),
        ("redis", {"url": f"host:6379,password={SECRET}"}),
        ("redis", {"url": [f"redis://user:{SECRET}@host:6379"]}),
        ("redis", {"password": SECRET}),
        ("object", {"url": f"s3://key:{SECRET}@bucket/x"}),
        ("object", {"url": f"s3://key:{SECRET}@[bucket/x"}),
        ("object", {"url": "s3://bucket", "endpoint": f"https://key:{SECRET}@host"}),
        ("object", {"url": "s3://bucket", "secret_access_key": SECRET}),
    ],
)
def test_a_password_in_an_address_or_in_a_made_up_option_is_not_shown(type_name, options):
    with pytest.raises(ConfigError) as refused:
        tier_options(TierConfig(type=type_name, options=options), "secondary_tiers[0]")
    assert "hunter2" not in str(refused.value)
    assert "hunter2" not in repr(TierConfig(type=type_name, options=options))


def test_a_repr_shows_what_is_no_secret():
    options = tier_options(TierConfig(type="redis", options={"password_env": "NAME", "lanes": 3}), "tier")
    assert "lanes=3" in repr(options)
    assert "NAME" not in repr(options)
    assert msgspec.structs.asdict(options)["password_env"] == "NAME"
    inner = {"type": "redis", "url": "redis://host", "password_env": "NAME"}
    assert "NAME" not in repr(decode(FaultyOptions, {"inner": inner}))


class Choosy(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    token: SecretName | int | bool = False


def test_a_secret_among_other_kinds_of_values_is_not_shown_either():
    with pytest.raises(ConfigError, match=r"^token: a number given, the name of an") as refused:
        decode(Choosy, {"token": 271_828.5})
    assert "271" not in str(refused.value)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o640, 0o660, 0o620, 0o444])
def test_a_file_that_others_can_read_or_write_is_refused_with_the_command_that_mends_it(tmp_path, mode, monkeypatch):
    path = tmp_path / "keys"
    path.write_text("ab" * 32)
    path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, 1_000, 1_000)
    with pytest.raises(ConfigError) as refused:
        SealOptions(**AES, seal_key_file=str(path)).make_seal(b"\0" * 32, 4_096)
    assert f"its mode is {mode:04o}; chmod 600 it, or mount the Secret with defaultMode: 0400" in str(refused.value)
    assert str(path) not in shown(refused.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of root's")
@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640])
def test_a_secret_that_kubernetes_mounts_for_a_group_is_read_through_its_links(tmp_path, mode):
    """With an `fsGroup`, the kubelet lets the group read what root owns, whatever `defaultMode` says."""
    folder = tmp_path / "..2026_01_01"
    folder.mkdir()
    (folder / "keys").write_text("ab" * 32)
    (folder / "keys").chmod(mode)
    (tmp_path / "..data").symlink_to(folder.name)
    (tmp_path / "keys").symlink_to("..data/keys")
    with open_secret("seal_key_file", str(tmp_path / "keys")) as file:
        assert file.read() == b"ab" * 32


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of root's")
@pytest.mark.parametrize("mode", [0o644, 0o444, 0o660])
def test_a_secret_of_roots_that_everybody_can_read_or_a_group_can_write_is_refused(tmp_path, mode):
    (tmp_path / "keys").write_text("ab" * 32)
    (tmp_path / "keys").chmod(mode)
    with pytest.raises(ConfigError, match="others can read or change the file"):
        open_secret("seal_key_file", str(tmp_path / "keys"))
