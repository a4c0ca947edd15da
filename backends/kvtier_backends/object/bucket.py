"""A bucket: obstore's store, the names in it, its requests, and the meaning of its errors.

obstore's errors have too few types: a missing bucket has that of a missing object. So the server's code is read from
the message. Requests are coroutines on obstore's own threads. One that takes too long is cancelled, and obstore gives
up the memory that it was lent: a row is free when its memoryview can be released. Every request is idempotent.
obstore's own retries leave out a connection that ends before the answer. So they are off, and `Turns` retries.
"""

import asyncio
import base64
import binascii
import configparser
import errno
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from obstore.exceptions import BaseError, InvalidPathError, PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from kvtier.backend import SEAL_BYTES, FileMapper, OffloadKey, SealFault, in_task, of_another_version
from kvtier.errors import ConfigError
from kvtier.settings import check_secret, open_secret
from kvtier_backends.object.options import ObjectOptions

SEAL_NAME = "kvtier"  # Metadata with the seal: `x-amz-meta-kvtier` on S3.
PAGE_KEYS = 1_000  # A store lists no more at once.
CONNECT_S = 2.0  # Limit of making a connection.
NAME_BYTES_MAX = 1_024  # S3's; Azure's is the same, in characters.
FOLDERS_BYTES = len("/hhh/hh_g4294967295/")
WORDS_MAX = 300  # Characters of a server's message.

A = TypeVar("A")
C = TypeVar("C")

STORE_ERRORS = (BaseError, OSError, ValueError)
"""Every error that obstore raises; some are Python's own."""

_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "InvalidBucketName"})
_FULL = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "QuotaExceededException"})
_SLOW = frozenset({"SlowDown", "ServerBusy", "TooManyRequests", "RequestLimitExceeded", "Throttling"})
_DENIED = frozenset({
    "AccessDenied", "AuthorizationHeaderMalformed", "AuthenticationFailed", "ExpiredToken", "InvalidAccessKeyId",
    "InvalidToken", "RequestTimeTooSkewed", "SignatureDoesNotMatch", "TokenRefreshRequired",
})  # fmt: skip
_ELSEWHERE = frozenset({"PermanentRedirect", "TemporaryRedirect", "IllegalLocationConstraintException"})


class TroubleKind(Enum):
    """A kind of trouble with a bucket; its value is the name of its counter."""

    MISSING = "missing"  # There is no such object.
    NO_BUCKET = "no_bucket"
    DENIED = "denied"  # Credentials, their rights, or a clock.
    ELSEWHERE = "elsewhere"  # The bucket is in another region.
    FULL = "no_room"
    SLOW = "slowed_down"  # The store asks for fewer requests.
    NAME = "name"  # obstore rejects a name of ours.
    LISTED = "listed"  # obstore rejects a name in the bucket, and lists nothing behind it.
    AWAY = "unreachable"  # Anything else: refused, reset, cut off, too late, a server's own error.


OF_ONE_CHUNK = frozenset({TroubleKind.MISSING, TroubleKind.FULL, TroubleKind.NAME})
"""Trouble with one chunk, not with the whole bucket."""

MISTAKES = frozenset({TroubleKind.NO_BUCKET, TroubleKind.DENIED, TroubleKind.ELSEWHERE, TroubleKind.NAME})
"""Trouble that, at the start, is a mistake of the configuration."""

AGAIN = frozenset({TroubleKind.AWAY, TroubleKind.SLOW})
"""Trouble that may pass before the next try."""


class Trouble(NamedTuple):
    kind: TroubleKind
    why: str
    number: int = 0  # The system's error number, where there is one.


def trouble_of(error: BaseException) -> Trouble:
    """Return the meaning of an error of obstore's, without anything that was sent, such as a signature."""
    words = str(error).partition("\n\nDebug source")[0]
    if "/latest/api/token " in words:  # The first request for credentials to a machine of Amazon's.
        return Trouble(TroubleKind.DENIED, "no credentials: the environment has none, and the machine gives none")
    code, status = _first(r"<Code>(\w+)</Code>", words), _first(r"status code: (\d{3})", words)
    told = " ".join(part for part in (status, code, _first(r"<Message>([^<]+)</Message>", words)) if part)
    why = told if code else re.sub(r"\?[^\s)]+", "?...", " ".join(words.split()))[:WORDS_MAX]
    kind = _kind_of(error, code, status, words)
    return Trouble(kind, why or type(error).__name__, _number_of(kind, str(error)))


def _kind_of(error: BaseException, code: str, status: str, words: str) -> TroubleKind:
    if code in _NO_BUCKET:
        return TroubleKind.NO_BUCKET
    if code in _FULL or status == "507":
        return TroubleKind.FULL
    if code in _SLOW or status in ("429", "503"):
        return TroubleKind.SLOW
    if code in _ELSEWHERE or status in ("301", "307") or "Received redirect" in words:
        return TroubleKind.ELSEWHERE
    if code in _DENIED or isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return TroubleKind.DENIED
    if isinstance(error, FileNotFoundError):
        return TroubleKind.MISSING
    if isinstance(error, InvalidPathError):
        return TroubleKind.LISTED
    return TroubleKind.NAME if isinstance(error, ValueError) else TroubleKind.AWAY


def _number_of(kind: TroubleKind, words: str) -> int:
    if kind is TroubleKind.DENIED:
        return errno.EACCES
    return errno.ETIMEDOUT if "TimedOut" in words else int(_first(r"Os \{\s*code: (\d{1,9})\b", words) or 0)


def _first(pattern: str, words: str) -> str:
    return match[1] if (match := re.search(pattern, words)) else ""


class ObjectNames:
    """The names of chunks in a bucket: those of vLLM's own `obj` tier (vLLM 0.33, NIXL 1.5.1).

    vLLM writes two slashes behind its prefix, and its client sends one; so does this. The empty hash has no folder.
    """

    def __init__(self, prefix: str, mapper: FileMapper) -> None:
        """Name the chunks of one namespace; `prefix` is empty or ends with a slash."""
        self._prefix = prefix
        self._mapper = mapper
        self.folder = prefix + mapper.chunks_folder
        self.key_bytes_max = mapper.key_bytes_max(NAME_BYTES_MAX - len(self.folder.encode()) - FOLDERS_BYTES)

    def name(self, key: OffloadKey) -> str:
        return (self._prefix + self._mapper.name(key)).replace("//", "/")

    def key(self, name: str) -> OffloadKey | None:
        return self._mapper.key(name[len(self._prefix) :]) if name.startswith(self._prefix) else None


def attributes_of(footer: bytes) -> dict[str, str]:
    return {SEAL_NAME: base64.b64encode(footer).decode()}


def footer_of(attributes: Mapping[str, Any]) -> bytes | SealFault | None:
    """Return the seal in an object's attributes; None if there is none."""
    if (given := attributes.get(SEAL_NAME)) is None:
        return None
    try:
        footer = base64.b64decode(given, validate=True)
    except (ValueError, binascii.Error):
        return SealFault.FOREIGN
    if of_another_version(footer):  # Its length may differ, too.
        return SealFault.VERSION
    return footer if len(footer) == SEAL_BYTES else SealFault.FOREIGN


def make_store(options: ObjectOptions) -> ObjectStore:
    """Return obstore's store for a bucket: not for the loop, it reads files. Raises `ConfigError`.

    obstore takes from the environment what the options do not set. One try of a request has half of `timeout_s`.
    """
    target = options.target()
    plain = (options.endpoint or "").startswith("http:") or os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"
    common: dict[str, Any] = {
        "client_options": {
            "allow_http": plain,
            "connect_timeout": timedelta(seconds=min(CONNECT_S, options.timeout_s)),
            "timeout": timedelta(seconds=options.timeout_s / 2),
        },
        "retry_config": {"max_retries": 0},  # `Turns` retries.
    }
    try:
        match target.scheme:
            case "s3":
                return _s3(options, target.bucket, common)
            case "gs":
                return _gcs(options, target.bucket, common)
            case "az":
                return AzureStore(target.bucket, **common)
    except STORE_ERRORS as error:
        if target.scheme == "gs" and options.credentials_file is not None:  # Its message may show what is in the file.
            raise ConfigError("credentials_file: the file is no service account's") from None
        raise ConfigError(f"url: {options.url!r} cannot be used: {trouble_of(error).why}") from error


def _s3(options: ObjectOptions, bucket: str, common: dict[str, Any]) -> ObjectStore:
    # Not every server's S3 can delete many at once. A SHA-256 of each body would take as long as sending it, and proves
    # nothing that the seal does not prove.
    fields: dict[str, Any] = {"disable_bulk_delete": True, "unsigned_payload": True}
    if options.endpoint is not None:
        fields["endpoint"] = options.endpoint.rstrip("/")
    if options.region is not None:
        fields["region"] = options.region
    if options.credentials_file is not None:
        fields["credential_provider"] = _s3_credentials(options.credentials_file)
    return S3Store(bucket, **common, **fields)


def _gcs(options: ObjectOptions, bucket: str, common: dict[str, Any]) -> ObjectStore:
    if options.credentials_file is not None:
        check_secret("credentials_file", options.credentials_file)
        common = {**common, "service_account": options.credentials_file}
    return GCSStore(bucket, **common)


def _s3_credentials(path: str) -> Callable[[], dict[str, Any]]:
    """Return a function that reads a credentials file, first now and then whenever the credentials have expired."""

    def read() -> dict[str, Any]:
        found = configparser.RawConfigParser(default_section="")
        try:
            with open_secret("credentials_file", path) as file:
                found.read_string(file.read().decode())
        except (configparser.Error, UnicodeDecodeError):  # Their messages show the file's text.
            raise ConfigError("credentials_file: the file is no credentials file of S3's") from None
        section = dict(found["default"]) if found.has_section("default") else {}
        if not (section.get("aws_access_key_id") and section.get("aws_secret_access_key")):
            raise ConfigError("credentials_file: no part [default] with aws_access_key_id and aws_secret_access_key")
        return {
            "access_key_id": section["aws_access_key_id"],
            "secret_access_key": section["aws_secret_access_key"],
            "token": section.get("aws_session_token"),
            "expires_at": datetime.now(UTC) + timedelta(seconds=300.0),
        }

    read()
    return read


class Turns:
    """A limit to the requests in flight, of all calls together; first come, first served."""

    def __init__(self, count: int, timeout_s: float) -> None:
        self._count = count
        self._timeout_s = timeout_s
        self._free = asyncio.Semaphore(count)
        self._deadlines: set[asyncio.Timeout] = set()

    def end(self) -> None:
        """End all calls now, as their deadlines do."""
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(0.0)

    async def each(self, chunks: Sequence[C], ask: Callable[[C], Awaitable[A]]) -> list[A | Trouble]:
        """Ask for each chunk; return all answers at the last one, the deadline or `end`. No request stays in flight."""
        late = Trouble(TroubleKind.AWAY, f"not answered within {self._timeout_s:g} s", errno.ETIMEDOUT)
        answers: list[A | Trouble] = [late] * len(chunks)
        left = iter(range(len(chunks)))

        async def serve() -> None:
            for index in left:
                async with self._free:
                    answers[index] = await _answer(ask, chunks[index])

        deadline = asyncio.timeout(self._timeout_s)
        self._deadlines.add(deadline)
        try:
            async with deadline, asyncio.TaskGroup() as group:
                for _ in range(min(self._count, len(chunks))):
                    group.create_task(serve())
        except TimeoutError:
            pass
        finally:
            self._deadlines.discard(deadline)
        return answers


async def _answer(ask: Callable[[C], Awaitable[A]], chunk: C) -> A | Trouble:
    waits = iter((0.05, 0.2))  # Before the second and the third try. More tries only add to a store's load.
    while True:
        try:
            return await ask(chunk)
        except STORE_ERRORS as error:
            trouble = trouble_of(error)
        wait_s = next(waits, None)
        if wait_s is None or trouble.kind not in AGAIN:
            return trouble
        await asyncio.sleep(wait_s)


async def released(view: memoryview) -> None:
    """Wait until a view of a buffer is out of use, however often the call is cancelled."""
    try:
        view.release()
    except BufferError:
        await in_task(_released(view))


async def _released(view: memoryview) -> None:
    while True:
        await asyncio.sleep(0.0005)  # Interval of checks that a row is free: obstore does not report it.
        with suppress(BufferError):
            return view.release()
