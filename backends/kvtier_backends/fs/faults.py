"""How a file can be something else than the chunk that its name promises."""

from enum import StrEnum


class Fault(StrEnum):
    """Kinds of corruption, as they are counted and shown."""

    TRUNCATED = "truncated"  # Shorter than a row, or than a row and its footer.
    OVERLONG = "overlong"
    ZEROED = "zeroed"  # No footer but zeros: a power cut between a file's length and its bytes.
    FOREIGN = "foreign"  # No footer of ours.
    FOOTER = "footer"  # A footer of ours, damaged.
    VERSION = "version"  # A footer of a format that this version does not know.
    SWAPPED = "swapped"  # Another key's chunk.
    NAMESPACE = "namespace"  # The key's chunk of another model, layout or row length.
    PAYLOAD = "payload"  # The bytes are not those that were stored.
