"""Every function that a step or a chunk pays for, as work that can be repeated.

A case makes its work once; each call of the work does the same again, so that counts of instructions agree to a
thousandth. `operations` is how many keys, chunks or messages one call handles. The calibration is plain Python: what a
case costs beside it says something on any machine.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvtier.backend import Advice, FileMapper, Namespace, chunk_hash, group_index, make_offload_key
from kvtier.memory.region import Region
from kvtier.policies import policy_class
from kvtier.runner.messages import (
    LENGTH_BYTES,
    Cascade,
    Finished,
    actions_of,
    frame,
    messages_of,
    pack_keys,
    pack_rows,
    unpack_keys,
    unpack_rows,
)
from kvtier_backends.fs.disk.footer import FOOTER_BYTES, Footer, payload_checksum, read_footer, write_footer
from kvtier_backends.fs.files.index import FileEntry, FileIndex
from kvtier_backends.fs.segments.table import SlotTable
from tests.benchmarks.protocol import KEYS_A_REQUEST, Steps

KEYS = 1_024
ROWS = 2_048
CALIBRATION = "calibration"

Work = Callable[[], object]


class Case(NamedTuple):
    make: Callable[[], Work]
    operations: int = KEYS


def keys_of(count=KEYS, seed=1):
    dice = random.Random(seed)
    return [make_offload_key(dice.randbytes(32)) for _ in range(count)]


def calibration():
    """Return work that any interpreter does, and that nothing here changes: dictionaries, calls, bytes."""
    names = [key.hex() for key in keys_of()]

    def work():
        table = {}
        for number, name in enumerate(names):
            table[name] = table.get(name[::-1], number)
        return sum(table.values())

    return work


def each(call):
    keys = keys_of()

    def work():
        for key in keys:
            call(key)

    return work


def make_keys():
    hashes = [chunk_hash(key) for key in keys_of()]
    return lambda: [make_offload_key(each) for each in hashes]


class OwnSteps(Steps):
    def __del__(self):
        self.manager.close(0.0)


def steps(call, *, tiers=0, ready=True):
    """Return requests of 32 keys through the step protocol, over and over the same ones."""
    engine = OwnSteps(ROWS, tiers=tiers)
    engine.hold(0)
    batches = engine.new_keys(KEYS)
    if ready:
        engine.each(batches, engine.store)
    return partial(engine.each, batches, getattr(engine, call))


def store_and_evict(tiers):
    """Return stores of keys that are always new, each evicting another, cascaded to some tiers."""
    engine = OwnSteps(ROWS, tiers=tiers)
    engine.hold(0)
    sets = [engine.new_keys(KEYS) for _ in range(2 + ROWS // KEYS)]  # By the time one comes again, it has gone.

    def store(batches):
        engine.each(batches, engine.store)
        for tier in engine.manager.ledger.tiers:  # Or the next round would find them there, and store nothing.
            engine.manager.ledger.locations.remove(tier, [key for keys in batches for key in keys])

    def work():
        batches = sets.pop(0)
        sets.append(batches)
        store(batches)

    for batches in sets:
        store(batches)
    return work


def cascades():
    parts = [keys_of(KEYS_A_REQUEST, seed) for seed in range(KEYS // KEYS_A_REQUEST)]
    return [Cascade(number, 0, pack_keys(keys), pack_rows(range(len(keys)))) for number, keys in enumerate(parts)]


def encode_actions():
    parts = [keys_of(KEYS_A_REQUEST, seed) for seed in range(KEYS // KEYS_A_REQUEST)]
    rows = range(KEYS_A_REQUEST)
    return lambda: frame([Cascade(1, 0, pack_keys(keys), pack_rows(rows)) for keys in parts])


def decode_actions():
    body = frame(cascades())[LENGTH_BYTES:]
    return lambda: [
        (unpack_keys(action.keys), unpack_rows(action.rows))
        for action in actions_of(body)
        if isinstance(action, Cascade)
    ]


def decode_outcomes():
    body = frame([Finished(number, b"", b"", 0.001) for number in range(KEYS)])[LENGTH_BYTES:]
    return lambda: messages_of(body)


def policy(name, call):
    kept, keys = policy_class(name)(ROWS), keys_of(ROWS)
    for start in range(0, ROWS, KEYS_A_REQUEST):
        kept.insert(keys[start : start + KEYS_A_REQUEST])

    def work():
        for start in range(0, KEYS, KEYS_A_REQUEST):
            call(kept, keys[start : start + KEYS_A_REQUEST])

    return work


def touch(kept, keys):
    kept.touch(keys)


def evict_and_insert(kept, keys):
    kept.insert(kept.evict(len(keys), lambda key: False))


def parts_of(keys):
    return [keys[start : start + KEYS_A_REQUEST] for start in range(0, KEYS, KEYS_A_REQUEST)]


def index_of(keys):
    index = FileIndex()
    for key in keys:
        index.stored(FileEntry(key, 1 << 20, 1))
    return index


def index_stores():
    keys = keys_of()
    index, held = index_of(keys), [FileEntry(key, 1 << 20, 1) for key in keys]
    return lambda: [index.stored(chunk) for chunk in held]


def index_uses():
    keys = keys_of()
    index, parts = index_of(keys), parts_of(keys)
    return lambda: [index.used(part) for part in parts]


def index_probes():
    index = index_of(keys_of())
    return each(lambda key: key in index)


def catalog_of(keys):
    catalog = SlotTable(None)
    catalog.add(len(keys))
    for slot, key in enumerate(keys):
        catalog.stored(key, slot, slot + 1, 1)
    catalog.scan_ended(complete=True)
    return catalog


def catalog_uses():
    keys = keys_of()
    catalog, parts = catalog_of(keys), parts_of(keys)
    return lambda: [catalog.index.use(part, 10_000) for part in parts]


def catalog_ranks():
    keys = keys_of(ROWS)
    catalog, parts = catalog_of(keys), parts_of(keys)
    return lambda: [catalog.index.advise(Advice("rank", part), 10_000, 0) for part in parts]


def catalog_evictions():
    catalog = catalog_of(keys_of(ROWS))
    sets = [keys_of(KEYS, seed) for seed in range(2, 5 + ROWS // KEYS)]

    def work():
        keys = sets.pop(0)
        sets.append(keys)
        for part in parts_of(keys):
            first = catalog.next_sequences(len(part), 1)
            with catalog.in_use(part):
                for place, slot in enumerate(catalog.evict(len(part), part)):
                    catalog.stored(part[place], slot, first + place, 1)

    return work


def footers_written():
    page = memoryview(bytearray(FOOTER_BYTES))
    return each(lambda key: write_footer(page, Footer(key, 1 << 20, 7, bytes(32))))


def footers_read():
    page = memoryview(bytearray(FOOTER_BYTES))
    write_footer(page, Footer(keys_of(1)[0], 1 << 20, 7, bytes(32)))
    return each(lambda _: read_footer(page))


def checksums(chunk_bytes):
    payload = memoryview(random.Random(5).randbytes(chunk_bytes))
    return lambda: payload_checksum(payload)


def row_views():
    region = Region.private(KEYS, 4_096)
    return lambda: [region.row(index) for index in range(KEYS)]


def name(naming):
    return each(FileMapper(Namespace(model_name="bench"), naming).name)


CASES = {
    CALIBRATION: Case(calibration),
    "make_offload_key": Case(make_keys),
    "group_index": Case(lambda: each(group_index)),
    "FileMapper.name, vllm": Case(lambda: name("vllm")),
    "FileMapper.name, flat": Case(lambda: name("flat")),
    "look up, hit": Case(lambda: steps("look_up")),
    "look up, miss": Case(lambda: steps("look_up", tiers=1, ready=False)),
    "store what is there": Case(lambda: steps("store")),
    "store and evict": Case(lambda: store_and_evict(0)),
    "store, evict and cascade": Case(lambda: store_and_evict(1)),
    "touch, prepare and complete a load": Case(lambda: steps("load")),
    "encode actions": Case(encode_actions),
    "decode actions": Case(decode_actions),
    "decode outcomes": Case(decode_outcomes),
    **{
        f"{kind}: {action}": Case(partial(policy, kind, call))
        for kind in ("fifo", "lru", "arc", "s3fifo")
        for action, call in (("touch", touch), ("evict and insert", evict_and_insert))
    },
    "fs index: stored": Case(index_stores),
    "fs index: used": Case(index_uses),
    "fs index: probe": Case(index_probes),
    "fs catalog: used": Case(catalog_uses),
    "fs catalog: rank": Case(catalog_ranks),
    "fs catalog: evict and store": Case(catalog_evictions),
    "fs footer: write": Case(footers_written),
    "fs footer: read": Case(footers_read),
    "fs checksum, 64 KiB": Case(lambda: checksums(64 << 10), 1),
    "fs checksum, 2 MiB": Case(lambda: checksums(2 << 20), 1),
    "region: row views": Case(row_views),
}
