"""What is kept beside the chunks on behalf of all who use the directory: the shared ledger, and the write budget."""

import hashlib
import time
from typing import NamedTuple

from kvtier.backend import TierContext
from kvtier.errors import ConfigError
from kvtier_backends.fs.disk.below import ForeignError, refused
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.disk.shared_page import SharedPage
from kvtier_backends.fs.disk.write_budget import WriteBudget
from kvtier_backends.fs.options import LayoutOptions


class Books(NamedTuple):
    """As far as the options want them."""

    ledger: SharedPage | None
    write_budget: WriteBudget | None

    def close(self) -> None:
        """Let go of them; idempotent. No thread may be using them."""
        for book in (self.ledger, self.write_budget):
            if book is not None:
                book.close()


def open_books(folder: Folder, context: TierContext, options: LayoutOptions) -> Books:
    """Open the folder, and what is kept beside its chunks. Blocks. Raises what `Folder.open` does."""
    folder.open()
    beside = f"{context.mapper.folder}/{{}}{folder.chunks.removeprefix(context.mapper.folder)}"
    ledger = write_budget = None
    try:
        if options.shared:
            boot = hashlib.sha256(folder.writer.boot.encode()).digest()[:8]
            ledger = SharedPage(folder.root_fd, beside.format("ledger"), boot)
        if options.write_budget_bytes_per_day is not None:
            write_budget = WriteBudget(
                folder.root_fd,
                beside.format("write-budget"),
                options.write_budget_bytes_per_day,
                context.row_bytes + FOOTER_BYTES,
                time.time_ns,
            )
    except ForeignError as error:
        Books(ledger, write_budget).close()
        raise refused(options.root, error) from error
    except OSError as error:
        Books(ledger, write_budget).close()
        raise ConfigError(
            f"root: {options.root!r} given, a file system with locks on files accepted for shared = true or a write "
            f"budget: {error.strerror}"
        ) from error
    return Books(ledger, write_budget)
