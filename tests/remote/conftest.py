"""Tests of all remote tiers, with their servers; run by `tests/remote/run`."""

from importlib.util import find_spec

WITHOUT_MOTO = find_spec("moto") is None
LEFT_OUT = find_spec("mooncake") is None and WITHOUT_MOTO
collect_ignore_glob = ["test_*.py"] if LEFT_OUT else ["test_object.py"] if WITHOUT_MOTO else []


def pytest_report_header() -> list[str]:
    return (
        ["tests/remote is left out: its servers are not installed here (tests/remote/run has them)"] if LEFT_OUT else []
    )
