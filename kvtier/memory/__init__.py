"""Host memory: the region of rows that processes share; limits and forks of this process."""

from kvtier.memory.prefault import PAGE_BYTES
from kvtier.memory.region import LentRow, Region, RowLayout
from kvtier.memory.rendezvous import Apart, mappings, ranges
from kvtier.memory.this_process import (
    GROUP_SIGNALS,
    file_bytes_max,
    fill_standard_streams,
    is_of_a_limit,
    let_go_in_forks,
    reason,
    require_descriptors,
    require_file_bytes,
    start_thread,
)

__all__ = [
    "GROUP_SIGNALS",
    "PAGE_BYTES",
    "Apart",
    "LentRow",
    "Region",
    "RowLayout",
    "file_bytes_max",
    "fill_standard_streams",
    "is_of_a_limit",
    "let_go_in_forks",
    "mappings",
    "ranges",
    "reason",
    "require_descriptors",
    "require_file_bytes",
    "start_thread",
]
