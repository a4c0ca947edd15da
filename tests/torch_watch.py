"""A plugin that names the tests' module whose collection imports torch first: `pytest -p tests.torch_watch`."""

import sys

import pytest

_found: list[str] = []


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if "torch" in sys.modules and not _found:
        _found.append(report.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name in _found:
        terminalreporter.write_line(f"torch is imported by {name}")
