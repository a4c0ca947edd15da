"""Never more on a disk that errs than the capacity says, at any moment; and when it is well again, all is as before.

`KVTIER_ERRING_S` sets how long the disk errs, `KVTIER_ERRING_SEED` how.
"""

import logging
import os
import threading
import time

import pytest

from tests.engine.kit import wait_for
from tests.fs.conftest import taken_bytes, temporaries

logger = logging.getLogger(__name__)

ERRING_S = float(os.environ.get("KVTIER_ERRING_S", "1"))
SEED = int(os.environ.get("KVTIER_ERRING_SEED", "1"))
CAPACITY_BYTES = 2 << 20
KEYS = 500  # Three times what there is room for.
SLACK_BYTES = 64 << 10  # Segments count as fragmented, and a checkpoint may be half written.

ENGINES = {"files": ({"layout": "files"}, 1), "segments": ({"layout": "segments"}, 1), "four": ({"shared": True}, 4)}


def all_do(engines, words):
    for engine in engines:
        engine.tell(words)
    return [int(engine.until(words.split()[0])[-1].split()[1]) for engine in engines]


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize(
    ("error", "percent"), [("EIO", 50), ("EBUSY", 20), ("EMFILE", 50), ("ENOENT", 20), ("ENOSPC", 50), ("EAGAIN", 20)]
)
@pytest.mark.parametrize(("options", "count"), ENGINES.values(), ids=ENGINES)
def test_a_disk_that_errs_holds_no_more_than_the_capacity_and_is_as_before_when_it_is_well(
    disk, launch, tmp_path, options, count, error, percent
):
    behind, ended, looks = tmp_path / "behind" / "tier", threading.Event(), list[int]()

    def look_all_the_time():
        while not ended.wait(0.01):
            looks.append(taken_bytes(behind))

    def all_is_counted():
        taken = taken_bytes(behind)
        return all(taken <= used <= taken + SLACK_BYTES for used in all_do(engines, "used"))

    options, root = {"capacity_bytes": CAPACITY_BYTES, **options}, str(disk.path / "tier")
    engines = [launch("obey", root=root, keys=KEYS, options=options) for _ in range(count)]
    for number, engine in enumerate(engines):
        engine.begin(SEED + number)
        engine.until("open")
    looking = threading.Thread(target=look_all_the_time)
    looking.start()
    try:
        all_do(engines, "work")
        wait_for(lambda: taken_bytes(behind) > CAPACITY_BYTES * 0.4)
        disk.tell(f"{error} {percent} {SEED}")
        time.sleep(ERRING_S / 2)  # Not to wait for anything: for so long it errs.
        all_do(engines, "rest")
        all_do(engines, "work")
        time.sleep(ERRING_S / 2)
        disk.tell("well")
        all_do(engines, "rest")
        wait_for(lambda: not temporaries(behind))
        wait_for(all_is_counted)
        wait_for(lambda: all_do(engines, "store 4 90000") == [4] * count)
    finally:
        ended.set()
        looking.join()
    logger.info("%.3f of the capacity at most, in %d looks", max(looks) / CAPACITY_BYTES, len(looks))
    assert max(looks) <= CAPACITY_BYTES
