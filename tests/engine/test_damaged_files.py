"""A damaged file costs its chunk's hit, never a wrong byte, is counted by its kind, and its key can be stored again."""

import os
from collections.abc import Callable
from pathlib import Path

from prometheus_client import generate_latest

from kvtier.backend.namespace import FileMapper
from tests.engine.kit import CHUNK_BYTES, at_rest, found, key, put, until


def cut_off(path: Path) -> None:
    os.truncate(path, 100)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def replace_by_another(path: Path) -> None:
    path.write_bytes(path.with_name("another").read_bytes())


def lengthen(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 4_096)


def strip(path: Path) -> None:
    os.truncate(path, CHUNK_BYTES)


def overwrite_footer(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:CHUNK_BYTES] + b"PK\3\4" * 1_024)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (cut_off, "corrupt_truncated"),
    "bit-flipped": (flip, "corrupt_payload"),
    "zero-filled": (zero, "corrupt_zeroed"),
    "swapped": (replace_by_another, "corrupt_swapped"),
    "foreign": (overwrite_footer, "corrupt_foreign"),
    "footer-less": (strip, "unverified_refused"),
    "over-long": (lengthen, "corrupt_overlong"),
}


async def test_damaged_files_are_misses_that_the_metrics_tell_by_their_kind(open_engine: str, tmp_path: Path) -> None:
    root, damaged = tmp_path / "tier", range(len(DAMAGES))
    engine = await open_engine(10, {"type": "fs", "name": "disk", "layout": "files", "root": str(root)})
    for numbers in (damaged, range(20, 21), range(30, 40)):  # The last ones push the others out of the primary.
        assert await put(engine, numbers) == len(numbers)
        assert await engine.drain()
    mapper = FileMapper(engine.config.namespace)
    for number, (damage, _) in enumerate(DAMAGES.values()):
        path = root / mapper.name(key(number))
        path.with_name("another").write_bytes((root / mapper.name(key(20))).read_bytes())
        damage(path)
    for number in damaged:
        assert await found(engine, [number]) == 0
    assert await found(engine, [20]) == 1

    def told() -> bool:
        page = generate_latest(engine.metrics).decode()
        return all(
            f'kvtier_tier_reported_total{{tier="disk",what="{noted}"}} 1.0' in page for _, noted in DAMAGES.values()
        )

    await until(told, engine)
    for numbers in (damaged, range(40, 50)):
        assert await put(engine, numbers) == len(numbers)
        assert await engine.drain()
    for number in damaged:
        assert await found(engine, [number]) == 1
    assert await at_rest(engine)
