"""Every example in the documentation runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import sys

import pytest

from ._project import PACKAGE, ROOT, python

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules():
    found = pkgutil.walk_packages([str(PACKAGE)], "tensordict.")
    return ["tensordict"] + sorted(m.name for m in found if not m.name.endswith("__main__"))


def run_examples(module):
    """The number of examples of a module, and what failed of them."""
    lines = []
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    for test in doctest.DocTestFinder().find(module):
        runner.run(test, out=lines.append)
    return runner.tries, "".join(lines)


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name):
    _, failures = run_examples(importlib.import_module(name))
    assert not failures


def test_a_wrong_example_is_found(tmp_path, monkeypatch):
    (tmp_path / "wrong_example.py").write_text('def f():\n    """\n    >>> 1 + 1\n    3\n    """\n')
    monkeypatch.syspath_prepend(tmp_path)
    tries, failures = run_examples(importlib.import_module("wrong_example"))
    del sys.modules["wrong_example"]
    assert tries == 1 and "Expected:\n    3" in failures


def test_the_package_has_examples():
    assert run_examples(importlib.import_module("tensordict._keys"))[0] > 3


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: p.name)
def test_docs_examples(path):
    test = doctest.DocTestParser().get_doctest(path.read_text(), {}, path.name, str(path), 0)
    lines = []
    doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=lines.append)
    assert not lines, "".join(lines)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_example_programs(path):
    out = python("import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", str(path))
    assert out.returncode == 0, out.stderr[-3000:]
    assert out.stdout
