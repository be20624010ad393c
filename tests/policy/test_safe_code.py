"""No pickle from disk or wire, and nothing is imported by a name that came from outside."""

from __future__ import annotations

import ast

from ._project import PACKAGE

# A call by one of these names needs a reason here: file below the package -> why it is safe.
ALLOWED: dict[str, str] = {}
CALLS = {
    "loads": {"pickle", "cloudpickle", "marshal", "dill"},
    "load": {"pickle", "cloudpickle", "marshal", "dill"},
    "Unpickler": {"pickle"},
    "import_module": {"importlib"},
}
BARE = {"__import__", "eval", "exec", "import_module"}


def offences(source: str) -> list[str]:
    """The calls in a source text that could run what came from outside."""
    out = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "marshal"):
            out += [f"from {node.module} import {a.name}" for a in node.names if a.name in CALLS]
        if not isinstance(node, ast.Call):
            continue
        fn = node.func
        if isinstance(fn, ast.Name) and fn.id in BARE:
            out.append(fn.id)
        if isinstance(fn, ast.Attribute) and isinstance(fn.value, ast.Name):
            if fn.value.id in CALLS.get(fn.attr, ()):
                out.append(f"{fn.value.id}.{fn.attr}")
    return out


def test_the_package_runs_nothing_from_outside():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        bad = offences(path.read_text())
        if bad and name not in ALLOWED:
            found[name] = bad
    assert found == {}


def test_each_offence_is_found():
    assert offences("import pickle\nx = pickle.loads(b)") == ["pickle.loads"]
    assert offences("from pickle import loads") == ["from pickle import loads"]
    assert offences("import importlib\nimportlib.import_module(n)") == ["importlib.import_module"]
    assert offences("eval('1'); __import__(n)") == ["eval", "__import__"]
    assert offences("import json\njson.loads(b); pickle.dumps(x); re.compile(p)") == []
