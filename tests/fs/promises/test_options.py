"""Each layout has its own options, and what is given says which of the layouts is meant."""

from pathlib import Path
from typing import Any

import pytest

from kvtier.backend.contract import TierContext
from kvtier.backend.namespace import FileMapper, Namespace
from kvtier.errors import ConfigError
from kvtier_backends.fs import FsBackend, FsOptions
from kvtier_backends.fs.disk.footer import FOOTER_BYTES

FILES_ALONE: dict[str, Any] = {"naming": "vllm", "shared": False, "unverified": "refuse"}


def test_a_tier_has_segments_if_nothing_says_otherwise() -> None:
    options = FsOptions(root="/x", fsync=True, capacity_bytes="1GiB")  # type: ignore[arg-type]
    assert options.layout == "segments"


@pytest.mark.parametrize("name", FILES_ALONE)
def test_an_option_that_only_files_have_chooses_files(name: str) -> None:
    options = FsOptions(root="/x", **{name: FILES_ALONE[name]})
    assert options.layout == "files"
    assert getattr(options, name) == FILES_ALONE[name]


@pytest.mark.parametrize("name", FILES_ALONE)
def test_what_a_layout_lacks_is_no_field_of_it(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{name}: no such field with layout = 'segments': .+; layout = 'files' has"
    ):
        FsOptions(root="/x", layout="segments", **{name: FILES_ALONE[name]})


@pytest.mark.parametrize("given", ["1us", "3651d"])
def test_chunks_have_an_age_that_can_be_told(given: str) -> None:
    with pytest.raises(ConfigError, match=r"^ttl_s: .+ given, seconds as a number"):
        FsOptions(root="/x", ttl_s=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["files", "segments"])
@pytest.mark.parametrize("name", ["capacity_bytes", "write_budget_bytes_per_day"])
async def test_a_bound_that_no_chunk_fits_is_refused_before_anything_is_made(
    open_tier, root: Path, row_bytes: int, layout: str, name: str
) -> None:
    least_bytes = row_bytes + FOOTER_BYTES
    with pytest.raises(ConfigError, match=rf"^{name}: {least_bytes - 1:,} bytes given, .* {least_bytes:,} .*accepted"):
        await open_tier(layout=layout, **{name: least_bytes - 1})
    assert not list(root.glob("*"))


def test_what_is_not_given_has_the_layouts_defaults() -> None:
    files = FsOptions(root="/x", layout="files")
    assert (files.naming, files.shared, files.unverified) == ("vllm", False, "refuse")


async def test_a_capacity_above_the_disks_size_is_said_and_the_tier_opens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = TierContext("fs", FileMapper(Namespace(model_name="m")), 4_096)
    for capacity_bytes, said in ((1 << 60, True), (1 << 20, False)):
        caplog.clear()
        tier = await FsBackend.open(FsOptions(root=str(tmp_path), capacity_bytes=capacity_bytes), context)
        await tier.aclose(10)
        assert ("but the disk of" in caplog.text) is said
