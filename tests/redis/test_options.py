"""Options of the redis tier: what does not go together is refused by name, and secrets are never part of them."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from kvtier.backend import ConfigError
from kvtier.config import EngineConfig, settled
from kvtier_backends.redis import RedisOptions
from kvtier_backends.redis.options import Address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:7000", Address("10.0.0.1", 7_000)),
        ("cache", Address("cache", 6_379)),
        ("[::1]:7000", Address("::1", 7_000)),
        ("[::1]", Address("::1", 6_379)),
        ("::1", Address("::1", 6_379)),
        ("unix:/run/redis.sock", Address("/run/redis.sock", 0)),
    ],
)
def test_a_server_is_a_host_and_a_port_or_a_path(text: str, address: Address) -> None:
    (read,) = RedisOptions(servers=(text,)).addresses()
    assert read == address
    assert RedisOptions(servers=(str(read),)).addresses() == (read,)


def test_sentinels_have_a_port_of_their_own() -> None:
    options = RedisOptions(servers=("a", "b:1"), topology="sentinel", sentinel_primary="cache")
    assert options.addresses() == (Address("a", 26_379), Address("b", 1))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"servers": ()}, "servers: a list given, a list, of length at least 1"),
        ({"servers": (":6379",)}, "servers[0]: ':6379' given, 'host:port' or 'unix:/path' accepted"),
        ({"servers": ("a..b:1",)}, "servers[0]: 'a..b:1' given"),
        ({"servers": ("a b",)}, "servers[0]: 'a b' given"),
        ({"servers": ("[::1:1",)}, "servers[0]: '[::1:1' given"),
        ({"servers": ("x" * 70,)}, "servers[0]: 'xx"),
        ({"servers": ("unix:/a",), "tls": True}, "tls: true given with the path 'unix:/a'"),
        ({"servers": ("a:0",)}, "servers[0]: 'a:0' given, 'host:port' or 'unix:/path' accepted"),
        ({"servers": ("a", "b:x")}, "servers[1]: 'b:x' given"),
        ({"servers": ("redis://:secret@a:1",)}, "servers[0]: a URL given, 'host:port' accepted"),
        ({"servers": ("unix:/" + "p" * 107,)}, "servers[0]: a path of 108 bytes given, at most 107 accepted"),
        ({"servers": ("unix:/a\0b",)}, "servers[0]: 'unix:/a"),
        ({"topology": "cluster", "prefix": "{a}/"}, "prefix: '{a}/' given, one without braces accepted with topology"),
        ({"servers": ("a", "a:6379")}, "servers: the same one is given twice"),
        ({"topology": "sentinel"}, "sentinel_primary: goes with topology = 'sentinel'"),
        ({"sentinel_primary": "cache"}, "sentinel_primary: goes with topology = 'sentinel'"),
        ({"sentinel_login": True}, "sentinel_login: goes with topology = 'sentinel'"),
        ({"topology": "cluster", "db": 1}, "db: 1 given, 0 accepted"),
        ({"topology": "cluster", "servers": ("unix:/a",)}, "servers: a path given"),
        ({"username": "kv"}, "username: given without a password"),
        ({"password_env": "A", "password_file": "/a"}, "password_env: given beside password_file"),
        ({"password": "secret"}, "password"),
        ({"tls_ca_file": "/a"}, "tls_ca_file: no use without tls = true"),
        ({"tls": True, "tls_key_file": "/a"}, "tls_key_file: given without tls_cert_file"),
        ({"prefix": "with space/"}, "prefix: 'with space/' given"),
        ({"seal": "aes-256-gcm"}, "seal: 'aes-256-gcm' given, which needs either"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(options: dict[str, Any], told: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=re.escape(told)) as refused:
        RedisOptions(**options)
    assert "secret" not in str(refused.value)


def test_a_password_is_read_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "password").write_text("s3cret\n")
    (tmp_path / "password").chmod(0o600)
    assert RedisOptions(password_file=str(tmp_path / "password")).password() == "s3cret"
    monkeypatch.setenv("KVTIER_TEST_PASSWORD", "other")
    assert RedisOptions(password_env="KVTIER_TEST_PASSWORD").password() == "other"
    assert RedisOptions().password() is None
    with pytest.raises(ConfigError, match="password_env: the environment has no variable of the given name"):
        RedisOptions(password_env="KVTIER_TEST_NONE").password()
    with pytest.raises(ConfigError, match=r"password_file: .* cannot be read"):
        RedisOptions(password_file=str(tmp_path / "none")).password()


def test_a_password_that_is_none_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "password"
    for written in (b"", b"\nsecret", b"s\xffcret", b"secret" * 10_000):
        path.write_bytes(written)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match=r"password_file: .*password: .* accepted") as refused:
            RedisOptions(password_file=str(path)).password()
        assert "cret" not in str(refused.value)
    monkeypatch.setenv("KVTIER_TEST_PASSWORD", "")
    with pytest.raises(ConfigError, match=r"password_env: the variable holds no password: .* accepted"):
        RedisOptions(password_env="KVTIER_TEST_PASSWORD").password()
    monkeypatch.setenv("KVTIER_TEST_PASSWORD", os.fsdecode(b"s\xffcret"))
    with pytest.raises(ConfigError, match="password_env: "):
        RedisOptions(password_env="KVTIER_TEST_PASSWORD").password()


def test_each_of_tlss_files_is_named_when_it_cannot_be_used(tmp_path: Path) -> None:
    """Also a key that wants a passphrase: nobody is there to be asked for it."""
    key = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"passphrase")
    )
    none, cut, locked = (str(tmp_path / name) for name in ("none", "cut", "locked"))
    (tmp_path / "cut").write_text("-----BEGIN CERTIFICATE-----\n")
    (tmp_path / "locked").write_bytes(key)
    (tmp_path / "locked").chmod(0o600)
    for options, told in (
        ({"tls_ca_file": none}, f"tls_ca_file: {none} cannot be used: No such file"),
        ({"tls_ca_file": cut}, f"tls_ca_file: {cut} cannot be used"),
        ({"tls_cert_file": none}, "tls_cert_file: the file cannot be read: No such file"),
        ({"tls_cert_file": cut, "tls_key_file": locked}, "tls_cert_file: cannot be used with tls_key_file"),
    ):
        with pytest.raises(ConfigError, match=re.escape(told)):
            RedisOptions(tls=True, **options).tls_context()


def test_a_remote_backends_tier_is_remote_unless_it_is_said_otherwise() -> None:
    tiers = [{"type": "redis"}, {"type": "redis", "name": "beside", "locality": "LOCAL"}, {"type": "dummy"}]
    config = EngineConfig.from_dict({"cpu_bytes_to_use": "1MiB", "chunk_bytes": 4_096, "secondary_tiers": tiers})
    assert [tier.locality for tier in settled(config).secondary_tiers] == ["REMOTE", "LOCAL", None]
