"""Chunks of a tier's own model that lie there in another layout: who starts it hears of them, once."""

import logging
import os

import pytest

from kvtier.testing.conformance.lender import key_of
from kvtier_backends.fs.disk.owner import OWNER

FILES = {"layout": "files"}
FLAT = {"layout": "files", "naming": "flat"}
SEGMENTS = {"layout": "segments", "capacity_bytes": "1MiB"}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("before", "now", "remedy"),
    [
        (FILES, SEGMENTS, 'layout = "files"'),
        (FLAT, SEGMENTS, 'layout = "files" and naming = "flat"'),
        (SEGMENTS, FILES, 'layout = "segments"'),
        (FLAT, FILES, 'layout = "files" and naming = "flat"'),
        (FILES, FLAT, 'layout = "files"'),
    ],
)
async def test_who_changes_the_layout_hears_of_what_lies_there_in_the_old_one(
    open_tier, lender, root, mapper, caplog, before, now, remedy
) -> None:
    old = await open_tier(**before)
    await lender.keep(old, [key_of(1)])
    await old.aclose(20)
    (chunks,) = (name for name in os.listdir(root) if name not in (mapper.folder, OWNER))
    caplog.clear()
    await open_tier(**now)
    (said,) = warnings(caplog)
    assert f"{root}/{chunks} " in said
    assert remedy in said
    assert f"--namespace {chunks}" in said


@pytest.mark.parametrize("now", [FILES, FLAT, SEGMENTS])
async def test_other_models_and_empty_folders_are_no_news(open_tier, root, mapper, caplog, now) -> None:
    for options in (FILES, FLAT, SEGMENTS):  # Each leaves a folder without a chunk.
        await (await open_tier(**options)).aclose(20)
    other = root / f"other_{'0' * 12}_r0" / "000"
    other.mkdir(parents=True)
    (root / mapper.chunks_folder.replace("_r0", "_r1") / "000").mkdir(parents=True)
    await open_tier(**now)
    assert warnings(caplog) == []
