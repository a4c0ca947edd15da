"""An object tier's options, the names of its chunks, and what a store's errors mean: no server is asked."""

import re

import pytest
from obstore.exceptions import GenericError, InvalidPathError, PermissionDeniedError

from kvtier.backend import NAMINGS, FileMapper
from kvtier.errors import ConfigError
from kvtier.testing.conformance import key_of, tier_context
from kvtier_backends.object import ObjectOptions
from kvtier_backends.object.backend import BucketIndex
from kvtier_backends.object.bucket import ObjectNames, TroubleKind, make_store, trouble_of
from kvtier_backends.object.options import Bucket


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("s3://bucket", Bucket("s3", "bucket", "")),
        ("s3://bucket/", Bucket("s3", "bucket", "")),
        ("gs://my.bucket_1/a/b/", Bucket("gs", "my.bucket_1", "a/b/")),
        ("az://container/caché", Bucket("az", "container", "caché/")),
    ],
)
def test_a_url_names_a_bucket_and_a_prefix(url, target):
    assert ObjectOptions(url=url).target() == target


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"url": "bucket"}, "url: 'bucket' given, 's3://bucket/prefix', gs:// or az:// accepted"),
        ({"url": "https://minio:9000/bucket"}, "a server's own address is the option `endpoint`"),
        ({"url": "s3://key:secret@bucket/"}, "url: credentials given, none accepted"),
        ({"url": "s3:///prefix"}, "'s3://bucket/prefix' accepted"),
        ({"url": "s3://bucket/a//b"}, "a prefix of parts with single slashes"),
        ({"url": "s3://bucket/../b"}, "a prefix of parts with single slashes"),
        ({"url": "s3://bucket/a\x7fb"}, "a prefix of parts with single slashes"),
        ({"url": f"s3://bucket/{'a' * 257}"}, "at most 256 bytes"),
        ({"url": "s3://bucket/a?b=c"}, "'s3://bucket/prefix' accepted"),
        ({"url": "s3://[bucket"}, "url: no URL given"),
        ({"endpoint": "minio:9000"}, "endpoint: 'minio:9000' given, 'https://host:port' accepted"),
        ({"endpoint": "https://a:secret@minio"}, "endpoint: credentials given, none accepted"),
        ({"endpoint": "https://minio/bucket"}, "bucket and prefix are in `url`"),
        ({"endpoint": "https://minio:x"}, "endpoint: no URL given"),
        ({"url": "gs://bucket", "endpoint": "https://minio"}, "endpoint: no use with gs://, s3:// has it"),
        ({"url": "gs://bucket", "region": "us-east-1"}, "region: no use with gs://"),
        ({"url": "az://c", "credentials_file": "/a"}, "url: 'az://c' given"),
        ({"url": "az://container", "credentials_file": "/a"}, "credentials_file: no use with az://"),
        ({"unverified": "accept", "seal": "aes-256-gcm", "seal_key_env": "A"}, "unverified: 'accept' given with seal"),
        ({"access_key_id": "secret"}, "access_key_id"),
        ({"requests": 0}, "requests: 0 given"),
    ],
)
def test_options_that_cannot_be_used_are_refused_by_name(options, told):
    with pytest.raises((ConfigError, TypeError), match=re.escape(told)) as refused:
        ObjectOptions(**{"url": "s3://bucket", **options})
    assert "secret" not in str(refused.value)


def test_a_credentials_file_that_cannot_be_used_is_named_and_not_shown(tmp_path):
    path = tmp_path / "credentials"
    for written, told in (
        (None, "the file cannot be read: No such file"),
        ("s3cret", "the file is no credentials file of S3's"),
        (b"[default]\nk = \xff", "the file is no credentials file of S3's"),
        ("[default]\naws_access_key_id = s3cret\n", r"no part \[default\] with aws_access_key_id and"),
        ("[other]\naws_access_key_id = s3cret\naws_secret_access_key = s3cret\n", r"no part \[default\]"),
    ):
        if written is not None:
            path.write_bytes(written if isinstance(written, bytes) else written.encode())
            path.chmod(0o600)
        with pytest.raises(ConfigError, match=f"credentials_file: {told}") as refused:
            make_store(ObjectOptions(url="s3://bucket", credentials_file=str(path)))
        assert "s3cret" not in str(refused.value)


def test_every_kind_of_bucket_has_a_store(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "mine")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    for fields in ({"url": "s3://bucket"}, {"url": "gs://bucket"}, {"url": "az://container"}):
        make_store(ObjectOptions(**fields))


def test_names_are_those_of_vllms_own_object_tier():
    """vLLM 0.33 asks for `kv//<folder>`, and NIXL 1.5.1 sends one slash: seen on a server."""
    mapper = FileMapper(tier_context(4_096).mapper.namespace)
    names, top = ObjectNames("kv/", mapper), ObjectNames("", mapper)
    key = key_of(7)
    assert names.name(key) == f"kv/{mapper.chunks_folder}/{NAMINGS['vllm'].name(key)}"
    assert top.name(key) == f"{mapper.chunks_folder}/{NAMINGS['vllm'].name(key)}"


@pytest.mark.parametrize("length", [4, 5, 6, 7, 36, 100])
def test_every_key_that_fits_has_a_name_that_every_store_takes_and_that_leads_back(length):
    names = ObjectNames("a/b/", tier_context(4_096).mapper)
    for length_now in (length, names.key_bytes_max):
        key = key_of(3)[:1] * (length_now - 4) + b"\xff\xff\xff\xff"
        name = names.name(key)
        assert "//" not in name
        assert len(name.encode()) <= 1_024
        assert names.key(name) == key
    assert names.key("a/b/other/name.bin") is None
    assert names.key(names.name(key_of(1))[1:]) is None


def _xml(status, code):
    return (
        f"Object at location x not found: Error performing GET http://h/b/x?X-Amz-Signature=s3cret in 1ms - Server "
        f"returned non-2xx status code: {status}: <?xml version='1.0'?><Error><Code>{code}</Code><Message>It says so."
        f"</Message></Error>\n\nDebug source:\nGeneric s3cret"
    )


@pytest.mark.parametrize(
    ("error_type", "words", "kind"),
    [
        (FileNotFoundError, _xml("404 Not Found", "NoSuchKey"), "MISSING"),
        (FileNotFoundError, "Object at location x not found: - Server returned status code: 404: ", "MISSING"),
        (FileNotFoundError, _xml("404 Not Found", "NoSuchBucket"), "NO_BUCKET"),
        (GenericError, _xml("404 Not Found", "NoSuchBucket"), "NO_BUCKET"),
        (FileNotFoundError, _xml("404 Not Found", "ContainerNotFound"), "NO_BUCKET"),
        (PermissionDeniedError, _xml("403 Forbidden", "AccessDenied"), "DENIED"),
        (PermissionDeniedError, _xml("403 Forbidden", "QuotaExceeded"), "FULL"),
        (GenericError, _xml("400 Bad Request", "ExpiredToken"), "DENIED"),
        (GenericError, _xml("507 Insufficient Storage", "XMinioStorageFull"), "FULL"),
        (GenericError, _xml("503 Service Unavailable", "SlowDown"), "SLOW"),
        (GenericError, "status code: 429 Too Many Requests", "SLOW"),
        (GenericError, _xml("301 Moved Permanently", "PermanentRedirect"), "ELSEWHERE"),
        (GenericError, _xml("500 Internal Server Error", "InternalError"), "AWAY"),
        (GenericError, "error sending request for url (http://h/b/x?sig=s3cret)", "AWAY"),
        (InvalidPathError, 'Encountered object with invalid path: Path "a//b" contained empty segment', "LISTED"),
        (ValueError, 'Could not parse path: Path "a//b" contained empty path segment', "NAME"),
    ],
)
def test_each_error_of_a_store_has_its_kind_and_shows_no_secret(error_type, words, kind):
    trouble = trouble_of(error_type(words))
    assert trouble.kind is TroubleKind[kind]
    assert trouble.why
    assert "s3cret" not in trouble.why
    assert "\n" not in trouble.why


async def test_the_index_keeps_known_keys_and_forgets_absent_ones():
    now = [0.0]
    index, keys = BucketIndex(2, 5.0, lambda: now[0]), [key_of(number) for number in range(5)]
    index.there(keys[0])
    index.gone(keys[1])
    assert index.knows(keys[:3]) == [True, False, None]
    now[0] = 5.0
    assert index.knows(keys[:3]) == [True, None, None]
    for key in keys[1:3]:
        index.there(key)
    assert index.knows(keys) == [None, True, True, None, None]
    index.unknown(keys[1])
    assert index.knows(keys[1:2]) == [None]


async def test_a_listing_does_not_restore_chunks_deleted_meanwhile():
    index, key = BucketIndex(10, 0.0, lambda: 0.0), key_of(1)
    index.there(key)
    index.deleted(key)
    index.listed(key)
    assert index.knows([key]) == [None]
    index.there(key)
    index.listed(key)
    assert index.knows([key]) == [True]
