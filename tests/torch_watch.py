"""A plugin that names the tests' module whose collection imports torch first: `pytest -p tests.torch_watch`."""

import sys

_found = []


def pytest_collectreport(report):
    if "torch" in sys.modules and not _found:
        _found.append(report.nodeid)


def pytest_terminal_summary(terminalreporter):
    for name in _found:
        terminalreporter.write_line(f"torch is imported by {name}")
