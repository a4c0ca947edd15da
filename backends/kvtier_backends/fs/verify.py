"""Whether what was read is the chunk that was asked for. Pure: bytes in, verdict out."""

from enum import Enum

from kvtier.keys import OffloadKey
from kvtier_backends.fs.faults import Fault
from kvtier_backends.fs.footer import FOOTER_BYTES, payload_checksum, read_footer


class Whole(Enum):
    """A file of a right length."""

    FOOTED = "footed"  # A row and a footer, which is still to be compared.
    BARE = "bare"  # A row and nothing else, as vLLM writes it: nothing says whether it is right.


def judge_length(file_bytes: int, row_bytes: int) -> Whole | Fault:
    """Say what a file of this length can be."""
    if file_bytes == row_bytes + FOOTER_BYTES:
        return Whole.FOOTED
    if file_bytes == row_bytes:
        return Whole.BARE
    return Fault.TRUNCATED if file_bytes < row_bytes + FOOTER_BYTES else Fault.OVERLONG


def judge_chunk(payload: memoryview, page: memoryview, key: OffloadKey, fingerprint: bytes) -> Fault | None:
    """Compare a row and its footer with what was asked for; None: they are that, bit for bit."""
    footer = read_footer(page)
    if isinstance(footer, Fault):
        return footer
    if footer.key != key:
        return Fault.SWAPPED
    if footer.fingerprint != fingerprint or footer.payload_bytes != len(payload):
        return Fault.NAMESPACE
    if footer.payload_checksum != payload_checksum(payload):
        return Fault.PAYLOAD
    return None
