import ast
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys

import pytest

import kvtier

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def modules_after(statements):
    """Return what an interpreter has loaded after running the statements, beyond what it had before."""
    program = f"import sys; before = set(sys.modules)\n{statements}\nprint(*set(sys.modules) - before)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((ROOT, os.path.join(ROOT, "backends")))}
    command = [sys.executable, "-P", "-c", program]
    return set(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split())


def loaded_of(packages, modules):
    return packages & {module.partition(".")[0] for module in modules}


def test_importing_kvtier_loads_nothing_else(outside):
    assert modules_after("import kvtier") == {"kvtier"}


def test_using_every_public_name_loads_neither_torch_nor_a_backend(outside):
    modules = modules_after("import kvtier\nfor name in kvtier.__all__: getattr(kvtier, name)")
    assert "kvtier.engine.manager" in modules
    assert loaded_of({"torch", "kvtier_backends", "rich", "typer", "matplotlib", "pytest"}, modules) == set()


def test_a_runners_process_loads_neither_torch_nor_what_is_for_people(outside):
    modules = modules_after("import kvtier.runner.child")
    assert loaded_of({"torch", "numpy", "rich", "typer", "matplotlib", "pytest", "multiprocessing"}, modules) == set()


@pytest.mark.parametrize("backend", ["dummy", "fs"])
def test_a_backend_loads_no_torch(outside, backend):
    assert loaded_of({"torch"}, modules_after(f"import kvtier_backends.{backend}")) == set()


NEEDS_TORCH = ("kvtier.kvcache", "kvtier.integrations", "kvtier.tools.selftest_checks", "kvtier_backends.cpu")
BLOCK_TORCH = "import sys; sys.modules['torch'] = None\n"
COMMANDS = {
    "replay": "replay generated --limit 5",
    "du": "du {root}",
    "bench": "bench {root} --chunk-sizes 8KiB --size 64KiB --rounds 1",
}


def without_torch(program, *args):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((ROOT, os.path.join(ROOT, "backends")))}
    command = [sys.executable, "-P", "-c", BLOCK_TORCH + program, *args]
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True)


def test_every_module_that_touches_no_tensors_loads_without_torch(outside):
    roots = (os.path.join(ROOT, "kvtier"), os.path.join(ROOT, "backends", "kvtier_backends"))
    names = [
        module.name
        for root in roots
        for module in pkgutil.walk_packages([root], f"{os.path.basename(root)}.")
        if not module.name.startswith(NEEDS_TORCH) and not module.name.endswith("__main__")
    ]
    assert len(names) > 100
    ran = without_torch("import importlib\nfor name in sys.argv[1:]: importlib.import_module(name)", *names)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("module", ["kvtier.kvcache.layout", "kvtier.kvcache.transfer", "kvtier_backends.cpu"])
def test_what_needs_torch_says_how_to_install_it(outside, module):
    ran = without_torch(f"import {module}")
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].endswith("needs torch; install it with: pip install 'kvtier[torch]'")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs_without_torch(outside, name, tmp_path):
    args = COMMANDS[name].format(root=tmp_path).split()
    ran = without_torch("from kvtier.tools.cli import main; main()", *args)
    assert (ran.returncode, ran.stdout != "") == (0, True), ran.stderr


def test_every_public_name_is_what_its_module_says():
    tree = ast.parse(inspect.getsource(kvtier))
    checked = {
        (statement.module, alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module is not None
        for alias in statement.names
    }
    assert sorted(name for _, name in checked) == sorted(kvtier.__all__)
    for module_name, name in checked:
        assert getattr(kvtier, name) is getattr(importlib.import_module(module_name), name), name
    assert set(kvtier.__all__) <= set(dir(kvtier))
    with pytest.raises(AttributeError, match="'kvtier' has no attribute 'nonsense'"):
        kvtier.nonsense  # noqa: B018
