"""An object tier's options: its bucket, the chunks that it accepts, and the number of requests at once."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvtier.backend.codec import CodecOptions
from kvtier.backend.remote import Text
from kvtier.errors import ConfigError
from kvtier.settings import Duration, Index, PositiveDuration, PositiveSize, SecretPath, check_secret

REQUESTS_MAX = 512  # Each is a connection: more of them meet the limits of the process before those of a store.
PREFIX_BYTES_MAX = 256  # Of a name's 1,024.

Scheme = Literal["s3", "gs", "az"]
Requests = Annotated[int, msgspec.Meta(ge=1, le=REQUESTS_MAX)]

_SCHEMES: dict[str, Scheme] = {"s3": "s3", "gs": "gs", "az": "az"}


class Bucket(NamedTuple):
    """A place for chunks: a bucket, or a container of Azure's, and the beginning of all names there."""

    scheme: Scheme
    bucket: str
    prefix: str  # Empty, or with a slash at its end.


class ObjectOptions(CodecOptions, frozen=True, kw_only=True):
    """A bucket and how it is used. The bucket's own configuration decides its cost, and when objects expire."""

    meant: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("bucket", "prefix", "path", "container", "root"), "'url', such as 's3://bucket/prefix'"),
        **dict.fromkeys(("access_key", "secret_key", "access_key_id", "secret_access_key"), "'credentials_file'"),
    }

    url: Text
    """`s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`; the prefix may be missing."""

    endpoint: Text | None = None
    """Address of a server that speaks S3, such as `https://minio.example.org:9000`; unset: as
    `AWS_ENDPOINT_URL` says, or AWS."""

    region: Text | None = None
    """Region of an S3 bucket; unset: as `AWS_REGION` says, or `us-east-1`."""

    credentials_file: SecretPath | None = None
    """S3: a shared credentials file, whose part `default` is read again every five minutes. Google: the JSON file of a
    service account. No other user may read it. Unset: the environment's, or the machine's own."""

    unverified: Literal["accept", "refuse"] = "refuse"
    """Accept or refuse objects without a seal, as vLLM writes them: their bytes cannot be verified."""

    index_chunks: Index = 1_000_000
    """Most chunks in the index, some 200 bytes of memory each. They are listed at the start. 0: none; then every
    look-up is a request."""

    absent_ttl_s: Duration = 10.0
    """Time for which a missing chunk is not asked for again, even if another engine stores it."""

    requests: Requests = 16
    """Chunks loaded at once, and as many stored; twice as many look-ups and deletions. Each request is a connection."""

    window_bytes: PositiveSize = 64 << 20
    """Most bytes of chunks loaded at once, and as many stored: each is in memory twice for a moment.

    With large chunks it lowers the number of requests.
    """

    timeout_s: PositiveDuration = 10.0
    """Limit of one call, with its retries. A chunk that misses it fails, and its row is free."""

    def __post_init__(self) -> None:
        super().__post_init__()
        scheme = self.target().scheme
        for name in ("region", "endpoint"):
            if getattr(self, name) is not None and scheme != "s3":
                raise ConfigError(f"{name}: no use with {scheme}://, s3:// has it")
        if self.endpoint is not None:
            _check_endpoint(self.endpoint)
        if self.credentials_file is not None and scheme == "az":
            raise ConfigError("credentials_file: no use with az://, whose credentials are in the environment")
        if self.unverified == "accept" and self.seal != "xxh3":
            raise ConfigError(f"unverified: 'accept' given with seal = {self.seal!r}, which refuses unsealed objects")

    def doubts(self) -> Iterable[str]:
        yield from super().doubts()
        try:
            if self.credentials_file is not None:
                check_secret("credentials_file", self.credentials_file)
        except ConfigError as error:
            yield str(error)

    def target(self) -> Bucket:
        """Return the bucket that the URL names. Raises `ConfigError`, which shows no URL with credentials."""
        try:
            parts = urlsplit(self.url)
        except ValueError:  # It may show a user and a password.
            raise ConfigError("url: no URL given, 's3://bucket/prefix' accepted") from None
        if "@" in parts.netloc:
            raise ConfigError("url: credentials given, none accepted: credentials_file or the environment has them")
        if (scheme := _SCHEMES.get(parts.scheme)) is None:
            raise ConfigError(
                f"url: {self.url!r} given, 's3://bucket/prefix', gs:// or az:// accepted: a server's own address is "
                "the option `endpoint`"
            )
        if parts.query or parts.fragment or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}", parts.netloc):
            raise ConfigError(f"url: {self.url!r} given, '{scheme}://bucket/prefix' accepted")
        return Bucket(scheme, parts.netloc, _prefix(parts.path.strip("/"), self.url))


def _prefix(path: str, url: str) -> str:
    if not path:
        return ""
    refused = any(part in ("", ".", "..") for part in path.split("/"))
    if refused or not path.isprintable() or len(path.encode()) > PREFIX_BYTES_MAX:
        raise ConfigError(
            f"url: {url!r} given, a prefix of parts with single slashes between them accepted, none of them '.' or "
            f"'..', at most {PREFIX_BYTES_MAX} bytes"
        )
    return f"{path}/"


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        raise ConfigError("endpoint: no URL given, 'https://host:port' accepted") from None
    if "@" in parts.netloc:
        raise ConfigError("endpoint: credentials given, none accepted: credentials_file or the environment has them")
    if not usable or parts.query or parts.fragment or parts.path.strip("/"):
        raise ConfigError(f"endpoint: {endpoint!r} given, 'https://host:port' accepted: bucket and prefix are in `url`")
