"""Tests of all remote tiers, with their servers; run by `tests/remote/run`."""

from importlib.util import find_spec

LEFT_OUT = find_spec("mooncake") is None and find_spec("moto") is None
collect_ignore_glob = ["test_*.py"] if LEFT_OUT else []


def pytest_report_header():
    return ["tests/remote is left out: its servers are not installed here (tests/remote/run)"] if LEFT_OUT else []
