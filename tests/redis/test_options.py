"""Options of the redis tier: the URL, what excludes each other, and secrets, which no message shows."""

import os
import re

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from kvtier.backend import ConfigError
from kvtier_backends.redis import RedisOptions
from kvtier_backends.redis.options import Address, Servers


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("redis://10.0.0.1:7000", Servers((Address("10.0.0.1", 7_000),))),
        ("redis://kv@cache/2", Servers((Address("cache", 6_379),), username="kv", db=2)),
        (
            "redis://[::1]:7000,[::1],fe80::1%eth0",
            Servers((Address("::1", 7_000), Address("::1", 6_379), Address("fe80::1%eth0", 6_379))),
        ),
        ("rediss://a", Servers((Address("a", 6_379),), tls=True)),
        ("redis+sentinel://a,b:1/c/2", Servers((Address("a", 26_379), Address("b", 1)), "sentinel", db=2, primary="c")),
        ("rediss+cluster://a,b", Servers((Address("a", 6_379), Address("b", 6_379)), "cluster", tls=True)),
    ],
)
def test_a_url_says_where_servers_are_and_how_they_are_used(url, target):
    assert RedisOptions(url=url, password_env="A").target() == target


SECRETS = """
    h:6379,password=secret  redis://h:6379,password=secret  redis://h,secret=1  redis://user:secret@h
    redis://:secret@h  redis://user:sec@secret@h  redis://user:1/secret@h  redis://h?password=secret
    redis://h/0?password=secret  redis://h:6379:secret  redis://[h:6379:secret]  redis://user%3Asecret%40h
    redis://user%3asecret@h  redis://user%secret@h  redis://h/secret  redis+sentinel://h/cache,password=secret
    redis+sentinel://h/cache/secret  http://user:secret@h  secret
""".split()  # noqa: SIM905


@pytest.mark.parametrize("url", SECRETS)
def test_no_error_repeats_a_url_that_may_hold_a_secret(url):
    with pytest.raises(ConfigError, match=r"^url: ") as refused:
        RedisOptions(url=url, password_env="A")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"url": ""}, "url: '' given, text, of length at least 1"),
        *(
            ({"url": f"redis://{host}"}, "url: server 1 of it is no 'host:port'")
            for host in (":6379", "a..b:1", "a b", "[::1:1", "x" * 70, "a:0", "a:65536")
        ),
        ({"url": "redis://a,b:x"}, "url: server 2 of it is no 'host:port'"),
        ({"url": "redis://a,a:6379"}, "url: the same server is given twice"),
        ({"url": "unix:///run/redis.sock"}, "url: no URL of servers given"),
        ({"url": "redis://kv%40x@a"}, "url: its user is no name without punctuation: nothing is percent-decoded"),
        ({"url": "redis+cluster://a", "prefix": "{a}/"}, "prefix: '{a}/' given, one without braces accepted"),
        ({"url": "redis+cluster://a/1"}, "url: a database given, none accepted with a cluster"),
        ({"url": "redis+sentinel://a"}, "url: no primary named"),
        ({"sentinel_login": True}, "sentinel_login: goes with redis+sentinel://"),
        ({"url": "redis://kv@a"}, "url: a user given without a password"),
        ({"password_env": "A", "password_file": "/a"}, "password_env: given with password_file"),
        ({"password": "secret"}, "password"),
        ({"tls_ca_file": "/a"}, "tls_ca_file: no use without rediss://"),
        ({"url": "rediss://a", "tls_key_file": "/a"}, "tls_key_file: given without tls_cert_file"),
        ({"prefix": "with space/"}, "prefix: 'with space/' given"),
        ({"seal": "aes-256-gcm"}, "seal: 'aes-256-gcm' given, which needs either"),
    ],
)
def test_options_that_cannot_be_used_are_refused_by_name(options, told):
    with pytest.raises((ConfigError, TypeError), match=re.escape(told)) as refused:
        RedisOptions(**options)
    assert "secret" not in str(refused.value)


def test_a_password_is_one_short_line_which_no_error_shows(tmp_path):
    path = tmp_path / "password"
    path.touch(0o600)
    options = RedisOptions(password_file=str(path))
    for written in (b"", b"\nsecret", b"s\xffcret", b"secret" * 10_000):
        path.write_bytes(written)
        with pytest.raises(ConfigError, match=r"password_file: .*password: .* accepted") as refused:
            options.password()
        assert "cret" not in str(refused.value)
    path.write_bytes(b"s3cret\n")
    assert options.password() == "s3cret"


def test_a_password_may_be_in_the_environment(tmp_path, monkeypatch):
    options = RedisOptions(password_env="KVTIER_TEST_PASSWORD")
    assert RedisOptions().password() is None
    with pytest.raises(ConfigError, match="password_env: the environment has no variable of the given name"):
        options.password()
    for given, told in (("", "holds no password: .* accepted"), (os.fsdecode(b"s\xffcret"), "")):
        monkeypatch.setenv("KVTIER_TEST_PASSWORD", given)
        with pytest.raises(ConfigError, match=f"password_env: .*{told}"):
            options.password()
    monkeypatch.setenv("KVTIER_TEST_PASSWORD", "other")
    assert options.password() == "other"
    with pytest.raises(ConfigError, match=r"password_file: .* cannot be read"):
        RedisOptions(password_file=str(tmp_path / "none")).password()


def test_each_of_tlss_files_is_named_when_it_cannot_be_used(tmp_path):
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
            RedisOptions(url="rediss://a", **options).tls_context()
