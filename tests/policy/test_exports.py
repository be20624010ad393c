"""The public names of the package: a checked list, each resolves, none is shadowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tensordict

from ._project import PACKAGE, copy_of_package, python

NAMES = (Path(__file__).parent / "public_names.txt").read_text().split()

CODE = """
import importlib, json, pkgutil, sys
first = sys.argv[1:]
for name in first:
    importlib.import_module(name)
import tensordict
bad = [n for n in tensordict.__all__ if not hasattr(tensordict, n)]
kept = {n: getattr(tensordict, n) for n in tensordict.__all__ if n not in bad}
for info in pkgutil.iter_modules(tensordict.__path__, "tensordict."):
    if not info.name.endswith("__main__"):
        importlib.import_module(info.name)
module = type(sys)
shadowed = [
    n for n, x in kept.items()
    if getattr(tensordict, n) is not x
    or isinstance(x, module) and x.__name__ != f"tensordict.{n}"
    or callable(getattr(sys.modules.get(f"tensordict.{n}"), n, None)) and not callable(x)
]
print(json.dumps([sorted(tensordict.__all__), bad, shadowed]))
"""


def facts(*first, path=None):
    out = python(CODE, *first, path=path)
    assert out.returncode == 0, out.stderr[-3000:]
    return json.loads(out.stdout)


def same_named():
    """Submodules that carry the name of an exported object."""
    stems = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or p.is_dir()}
    return sorted(stems & set(tensordict.__all__))


def test_the_list_is_current():
    assert NAMES == sorted(NAMES), "keep tests/policy/public_names.txt sorted"
    assert sorted(tensordict.__all__) == NAMES, (
        "a public name came or went: write it into tests/policy/public_names.txt too"
    )
    assert len(set(tensordict.__all__)) == len(tensordict.__all__)


def test_every_name_resolves_and_keeps_its_meaning():
    _, bad, shadowed = facts()
    assert (bad, shadowed) == ([], [])


@pytest.mark.parametrize("name", same_named())
def test_a_module_named_like_a_function_may_come_first(name):
    _, bad, shadowed = facts(f"tensordict.{name}")
    assert (bad, shadowed) == ([], [])


def test_a_missing_and_a_shadowed_name_are_found(tmp_path):
    path = copy_of_package(tmp_path)
    (path / "tensordict/stolen.py").write_text("def stolen(): ...\n")
    with open(path / "tensordict/__init__.py", "a") as file:
        file.write("\ndef stolen(): ...\n")
        file.write("__all__ = ['stolen', 'nothing']\n")
    _, bad, shadowed = facts(path=path)
    assert (bad, shadowed) == (["nothing"], ["stolen"])
