"""The options of a seal: its kind, and where its keys are."""

import base64
import binascii
import importlib
from collections.abc import Iterable
from typing import Literal

from kvtier.backend.contract import Options
from kvtier.backend.seal import SECRET_BYTES, Seal, XXH3Seal
from kvtier.errors import ConfigError
from kvtier.settings import SecretName, SecretPath, open_secret, secret_variable

SECRETS_BYTES_MAX = 64 << 10  # A thousand keys.


class SealOptions(Options, frozen=True, kw_only=True):
    """The seal of rows that leave the host. A configuration holds no key: it is logged and sent to processes."""

    seal: Literal["xxh3", "aes-256-gcm"] = "xxh3"
    """`"xxh3"` finds damage. `"aes-256-gcm"` also encrypts, and refuses chunks written without the key; it needs
    `kvtier[seal]`."""

    seal_key_file: SecretPath | None = None
    """Keys for `"aes-256-gcm"`, one a line, each 32 bytes in hex or base64: the first seals, all of them open.
    No other user may read the file."""

    seal_key_env: SecretName | None = None
    """Name of an environment variable that holds the keys, instead of a file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("seal_key_file", "seal_key_env") if getattr(self, name) is not None]
        if self.seal == "xxh3" and given:
            raise ConfigError(f"{given[0]}: no use with seal = 'xxh3'; seal = 'aes-256-gcm' has keys")
        if self.seal == "aes-256-gcm" and len(given) != 1:
            raise ConfigError(
                "seal: 'aes-256-gcm' given, which needs either seal_key_file or seal_key_env"
                + (", not both" if given else "")
            )

    def doubts(self) -> Iterable[str]:
        try:
            if self.seal != "xxh3":
                self._secrets()
        except ConfigError as error:
            yield str(error)

    def make_seal(self, fingerprint: bytes, row_bytes: int) -> Seal:
        """Return the seal of a tier with these rows. Reads the keys: not for the loop. Raises `ConfigError`."""
        if self.seal == "xxh3":
            return XXH3Seal(fingerprint, row_bytes)
        try:  # `cryptography` need not be installed.
            aes = importlib.import_module("kvtier.backend.aes")
        except ImportError as error:
            raise ConfigError(f"seal: 'aes-256-gcm' needs the extra kvtier[seal]: {error}") from error
        made: Seal = aes.AESSeal(fingerprint, row_bytes, self._secrets())
        return made

    def _secrets(self) -> list[bytes]:
        """Read secrets, one a line, except empty lines and comments (#). Raises `ConfigError`, which shows none."""
        if self.seal_key_file is None:
            where, written = "seal_key_env", secret_variable("seal_key_env", str(self.seal_key_env))
        else:
            where = "seal_key_file"
            with open_secret(where, self.seal_key_file) as file:
                written = file.read(SECRETS_BYTES_MAX + 1)
        if len(written) > SECRETS_BYTES_MAX or not written.isascii():
            raise ConfigError(f"{where}: no list of keys: at most {SECRETS_BYTES_MAX:,} bytes of ASCII accepted")
        lines = [(number, line.strip()) for number, line in enumerate(written.decode("ascii").splitlines(), 1)]
        found = [_secret(line, f"{where}, line {at}") for at, line in lines if line and not line.startswith("#")]
        if not found:
            raise ConfigError(f"{where}: holds no key; one a line accepted, {SECRET_BYTES} bytes in hex or base64")
        return found


def _secret(line: str, where: str) -> bytes:
    try:
        secret = bytes.fromhex(line) if len(line) == 2 * SECRET_BYTES else base64.b64decode(line, validate=True)
    except (ValueError, binascii.Error):
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{where}: no key; {SECRET_BYTES} bytes in hex or base64 accepted")
    return secret
