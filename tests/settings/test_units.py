import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.settings.units import parse_duration, parse_path, parse_size, shown_age, shown_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0B", 0),
        ("1 B", 1),
        ("1KB", 1_000),
        ("512 KiB", 524_288),
        ("1.5GB", 1_500_000_000),
        ("10GiB", 10_737_418_240),
        ("10Gi", 10_737_418_240),
        ("2TiB", 2_199_023_255_552),
        ("1PB", 10**15),
        ("10G", 10_737_418_240),
        ("1_024MiB", 1 << 30),
        ("  64 MiB ", 64 << 20),
        ("0.1GiB", 107_374_182),  # 107,374,182.4, rounded down.
    ],
)
def test_a_size_is_read_as_bytes(text, size_bytes):
    assert parse_size(text) == size_bytes


UNITLESS = ["", "10", "GiB", "10g", "10gI", "10gib", "10GIB", "10Gb", "10s"]
NUMBERLESS = ["-1GiB", "1e9B", "1,024B", ".5GiB", "1.GiB", "inf B", "0x10B", "\u0661GiB", "1" * 30 + "B"]
SPACED_OUT = ["1GiB2", "1 GiB 1", "1\nGiB", "1  GiB"]


@pytest.mark.parametrize("text", [*UNITLESS, *NUMBERLESS, *SPACED_OUT])
def test_a_size_without_a_number_and_a_known_unit_is_refused(text):
    with pytest.raises(ValueError, match="not a number and one of B, kB, "):
        parse_size(text)


@given(
    count=st.integers(0, 1 << 30), unit=st.sampled_from([("B", 1), ("KiB", 1 << 10), ("GiB", 1 << 30), ("TB", 10**12)])
)
def test_a_whole_number_of_units_is_read_exactly(count, unit):
    assert parse_size(f"{count}{unit[0]}") == parse_size(f"{count:_} {unit[0]}") == count * unit[1]


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("30s", 30.0), ("500ms", 0.5), ("250 us", 0.00025), ("1.5h", 5_400.0), ("5min", 300.0), ("2 d", 172_800.0)],
)
def test_a_duration_is_read_as_seconds(text, duration_s):
    assert parse_duration(text) == duration_s


@pytest.mark.parametrize("text", ["", "30", "s", "30 seconds", "-1s", "1m", "1GiB", "1h30min", "inf s"])
def test_a_duration_without_a_number_and_a_known_unit_is_refused(text):
    with pytest.raises(ValueError, match=re.escape("not a number and one of us, ms, s, min, h, d")):
        parse_duration(text)


def test_a_path_is_absolute_from_where_it_was_first_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_path("tier") == f"{tmp_path}/tier"
    assert parse_path("a/../tier") == f"{tmp_path}/a/../tier"  # A link may make these two.
    assert (parse_path("/mnt/tier"), parse_path("~/tier")) == ("/mnt/tier", "/home/me/tier")


@pytest.mark.parametrize("text", ["", "a\0b"])
def test_what_is_no_path_is_refused(text):
    with pytest.raises(ValueError, match="no path"):
        parse_path(text)


SHOWN = {0: "0 B", 1_023: "1023 B", 4_096: "4.0 KiB", 1 << 27: "128.0 MiB", 3 << 29: "1.5 GiB", 1 << 50: "1.0 PiB"}


@pytest.mark.parametrize(("size_bytes", "shown"), SHOWN.items())
def test_a_size_is_written_in_its_largest_unit(size_bytes, shown):
    assert shown_bytes(size_bytes) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(9.0, "9 s"), (600_000.0, "6.9 d"), (7.4 * 365 * 86_400, "7.4 y")])
def test_a_time_is_written_in_its_largest_unit(seconds, shown):
    assert shown_age(seconds) == shown
