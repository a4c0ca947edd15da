"""Each layout has its own options, and what is given says which of the layouts is meant."""

import pytest

from kvtier.backend import FileMapper, Namespace, TierContext
from kvtier.errors import ConfigError
from kvtier_backends.fs import FsBackend, FsOptions
from tests.fs.conftest import SLOT_BYTES

FILES_ALONE = {"naming": "vllm", "unverified": "refuse"}
LACKS = {"naming": "chunks in segments have no names", "unverified": "every slot has a footer"}


def test_a_tier_has_segments_if_nothing_says_otherwise():
    options = FsOptions(root="/x", fsync=True, capacity_bytes="1GiB")
    assert options.layout == "segments"


@pytest.mark.parametrize("name", FILES_ALONE)
def test_an_option_that_only_files_have_chooses_files_and_is_refused_with_segments(name):
    options = FsOptions(root="/x", **{name: FILES_ALONE[name]})
    assert options.layout == "files"
    assert getattr(options, name) == FILES_ALONE[name]
    assert getattr(FsOptions(root="/x", layout="files"), name) == FILES_ALONE[name]
    refused = rf"^{name}: no such field with layout = 'segments': {LACKS[name]}.*; layout = 'files' has"
    with pytest.raises(ConfigError, match=refused):
        FsOptions(root="/x", layout="segments", **{name: FILES_ALONE[name]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"root": ""}, r"^root: "),
        ({"load_lanes": 0}, r"^load_lanes: "),
        ({"store_lanes": 65}, r"^store_lanes: "),
        ({"io": "fast"}, r"^io: "),
        ({"fsync": "no"}, r"^fsync: "),
        *(({"ttl_s": each}, r"^ttl_s: .+ given, seconds as a number") for each in ("1us", "3651d")),
    ],
)
def test_a_bad_option_is_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        FsOptions(**{"root": "/x", **options})


@pytest.mark.parametrize("name", ["capacity_bytes", "write_budget_bytes_per_day"])
async def test_a_bound_that_no_chunk_fits_is_refused_before_anything_is_made(open_tier, root, layout, name):
    message = rf"^{name}: {SLOT_BYTES - 1:,} bytes given, .* {SLOT_BYTES:,} .*accepted"
    with pytest.raises(ConfigError, match=message):
        await open_tier(layout=layout, **{name: SLOT_BYTES - 1})
    assert not list(root.glob("*"))


async def test_a_chunk_that_is_longer_than_any_segment_is_refused(root):
    context = TierContext("0:fs", FileMapper(Namespace(model_name="org/model")), 8 << 30)
    with pytest.raises(ConfigError, match=r"^chunk_bytes: .* at most 8,589,934,592 accepted with layout"):
        await FsBackend.open(FsOptions(root=str(root), layout="segments"), context)


async def test_a_capacity_above_the_disks_size_is_said_and_the_tier_opens(open_tier, caplog):
    for capacity_bytes, said in ((1 << 60, True), (1 << 20, False)):
        caplog.clear()
        await (await open_tier(layout="segments", capacity_bytes=capacity_bytes)).aclose(10)
        assert ("but the disk of" in caplog.text) is said
