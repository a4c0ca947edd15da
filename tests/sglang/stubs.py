"""Packages that SGLang imports for media, notebooks and weights, as empty modules that are never under test."""

import importlib.abc
import importlib.machinery
import sys
from unittest.mock import MagicMock

NAMES = frozenset({"IPython", "compressed_tensors", "gguf", "sentencepiece", "torchvision"})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        known = name.partition(".")[0] in NAMES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec):
        return MagicMock(name=spec.name)

    def exec_module(self, module):
        module.__version__ = "0.0.0"


def install():
    sys.meta_path.append(_Finder())  # Comes last: a package that is installed is the real one.
