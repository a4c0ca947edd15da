"""Tests of all remote tiers, with their servers; run by `make test-remote`."""

from importlib.util import find_spec

LEFT_OUT = find_spec("mooncake") is None and find_spec("moto") is None
if LEFT_OUT:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> list[str]:
    return (
        ["tests/remote is left out: its servers are not installed here (make test-remote has them)"] if LEFT_OUT else []
    )
