"""The hook that makes the reference's tables while pages are built, as a module."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("hooks", DOCS / ".hooks.py")
hooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hooks)


def built(page):
    return hooks.on_page_markdown((DOCS / "reference" / page).read_text())
