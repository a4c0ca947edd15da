"""A bucket as commands see it: every namespace under a prefix, known only by its objects.

An engine may be using it. There is no telling when an object was used, only when it was stored.
"""

import errno
from collections.abc import Iterator
from typing import Any, Self

import obstore
from xxhash import xxh3_64_intdigest

from kvtier.backend import (
    MISPLACED,
    NAMINGS,
    SEAL_BYTES,
    BackendUnavailable,
    ConfigError,
    Finding,
    Kind,
    OffloadKey,
    Place,
    Seal,
    SealFault,
    State,
    StoredFile,
    XXH3Seal,
    read_folder,
    told_by,
)
from kvtier_backends.object.bucket import PAGE_KEYS, STORE_ERRORS, Trouble, footer_of, make_store, trouble_of
from kvtier_backends.object.options import ObjectOptions

REQUESTS = 16
RETRIES = 3  # obstore's own: people wait for these commands, not rows.


class ObjectContents:
    """A prefix and the namespaces below it."""

    lanes = REQUESTS

    @classmethod
    def open(cls, root: str) -> Self:
        return cls(ObjectOptions(url=root))

    @classmethod
    def configured(cls, options: ObjectOptions) -> Self:
        return cls(options)

    def __init__(self, options: ObjectOptions) -> None:
        self._options = options
        self._prefix = options.target().prefix
        self._store = make_store(options, RETRIES)
        try:
            below = obstore.list_with_delimiter(self._store, self._prefix or None)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        except STORE_ERRORS as error:
            raise self._refused(trouble_of(error)) from error
        names = [str(path).removeprefix(self._prefix) for path in below["common_prefixes"]]
        folders = ((name, read_folder(name)) for name in sorted(names))
        self._names = [name for name, found in folders if found is not None and found.kind == "vllm"]
        if not self._names and (names or below["objects"]):
            raise ConfigError(f"{options.url}: holds no chunks; the URL that a tier has accepted")

    def _refused(self, trouble: Trouble) -> Exception:
        kind = ConfigError if trouble.mistake else BackendUnavailable
        return kind(f"{self._options.url}: {trouble.why}")

    def places(self) -> list[Place]:
        return [Place(name, "") for name in self._names]

    def parts(self, place: Place) -> list[str]:
        return [place.name]

    def files(self, place: Place, part: str) -> Iterator[StoredFile]:  # noqa: ARG002
        folder = f"{self._prefix}{part}"
        try:
            for page in obstore.list(self._store, folder, chunk_size=PAGE_KEYS):  # pyright: ignore[reportUnknownMemberType]
                for about in page:
                    yield self._file(NAMINGS["vllm"].key(about["path"][len(folder) + 1 :]), about)
        except STORE_ERRORS as error:
            yield StoredFile(Kind.UNREADABLE, part, None, 0, 0, 0, 0, trouble_of(error).why)

    def _file(self, key: OffloadKey | None, about: Any) -> StoredFile:
        is_chunk = key is not None or about["path"].endswith(".bin")
        kind, fault = (Kind.CHUNK if is_chunk else Kind.BESIDE), (MISPLACED if is_chunk and key is None else "")
        name, size_bytes = about["path"].removeprefix(self._prefix), about["size"]
        stored_at_ns = int(about["last_modified"].timestamp() * 1e9)
        return StoredFile(kind, name, key, size_bytes, size_bytes, stored_at_ns, _identity(about), fault)

    def check(self, place: Place, file: StoredFile) -> Finding:  # noqa: ARG002
        try:
            result = obstore.get(self._store, self._prefix + file.name)
            if _identity(result.meta) != file.identity:
                return Finding(State.GONE)
            body, footer = memoryview(result.bytes()), footer_of(result.attributes)
        except FileNotFoundError:
            return Finding(State.GONE)
        except STORE_ERRORS as error:
            return Finding(State.UNREADABLE, trouble_of(error).why)
        if footer is None:
            return Finding(State.UNVERIFIED)
        assert file.key is not None, file
        fault = footer if isinstance(footer, SealFault) else self._fault(file.key, body, footer)
        if fault is None:
            return Finding(State.WHOLE)
        return Finding(State.CORRUPT, fault) if fault.corrupt else Finding(State.UNVERIFIED)

    def _fault(self, key: OffloadKey, body: memoryview, footer: bytes) -> SealFault | None:
        """Compare a body with its seal of either kind. The namespace is taken from the seal."""
        told = told_by(footer)
        fault = _opened(XXH3Seal(told.fingerprint, told.row_bytes), key, body, footer)
        if fault is not SealFault.KIND or self._options.seal == "xxh3":
            return fault
        return _opened(self._options.make_seal(told.fingerprint, told.row_bytes), key, body, footer)

    def remove(self, file: StoredFile) -> int | None:
        """An object that is stored anew between the look and the removal goes, too: stores cannot compare for us."""
        name = self._prefix + file.name
        try:
            if _identity(obstore.head(self._store, name)) != file.identity:
                return None
            obstore.delete(self._store, name)
        except FileNotFoundError:
            return None
        except STORE_ERRORS as error:
            raise OSError(errno.EIO, trouble_of(error).why) from error
        return file.allocated_bytes

    def clear(self, place: Place) -> bool:  # noqa: ARG002
        """Do nothing: a bucket has no folders and no books."""
        return False

    def close(self) -> None:
        """Do nothing: connections close by themselves."""


def _opened(seal: Seal, key: OffloadKey, body: memoryview, footer: bytes) -> SealFault | None:
    if len(body) != seal.row_bytes:
        fault = seal.read(key, memoryview(footer))
        return fault if isinstance(fault, SealFault) else SealFault.LENGTH
    row, beside = memoryview(bytearray(seal.row_bytes)), memoryview(bytearray(seal.beside_bytes))
    seal.places(row, beside)[0][: seal.row_bytes] = body
    beside[-SEAL_BYTES:] = footer
    return seal.open(key, row, beside)


def _identity(about: Any) -> int:
    # Some servers tell parts of a second in a list alone: Ceph's gateway does.
    return xxh3_64_intdigest(f"{about['e_tag']} {int(about['last_modified'].timestamp())}".encode())
