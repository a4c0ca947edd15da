"""kvtier's fs tier next to the raw limit: plain threads that read and write one file.

python -m tests.benchmarks.peers.raw [DIR] --lanes 4
"""

from kvtier.tools.bench import RawFile
from tests.benchmarks.peers.side_by_side import arguments, compare_disks, give_out

THREADS = 4


class RawThreads:
    """Threads that read and write the rows of a region, without names or checksums."""

    def __init__(self, folder, region, _):
        self._file = RawFile(f"{folder}/raw", [region.row(index) for index in range(region.rows)], direct=True)
        self.close = self._file.close

    def store(self, keys, rows):
        self._file.write(THREADS, sync=False)

    def load(self, keys, rows):
        self._file.read(THREADS)


if __name__ == "__main__":
    given = arguments(__doc__)
    give_out("peers raw", given, lambda folder: compare_disks(folder, given, {"the raw limit": RawThreads}))
