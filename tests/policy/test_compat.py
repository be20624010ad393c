"""The compatibility page: current, and true of the package as it is."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from ._project import ROOT


def tool():
    spec = importlib.util.spec_from_file_location("gen_compat", ROOT / "tools" / "gen_compat.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gen_compat"] = module
    spec.loader.exec_module(module)
    return module


compat = tool()
NAMES = list(compat.read_names())
PAGE = (ROOT / "docs" / "compat.md").read_text()


def listed():
    """(group, name text) -> status, read from the page."""
    out, group = {}, ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            group = line[3:]
        elif line.startswith("| `"):
            text, status, note = line.removeprefix("| `").removesuffix(" |").rsplit(" | ", 2)
            out[group, text.removesuffix("`")] = status, note
    return out


LISTED = listed()


def test_every_name_is_listed_once():
    assert len(NAMES) == len(LISTED) > 650
    assert {(n.group, n.text) for n in NAMES} == set(LISTED)


@pytest.mark.parametrize("name", NAMES, ids=lambda n: f"{n.owner}.{n.name}")
def test_the_page_tells_the_truth(name):
    status, note = LISTED[name.group, name.text]
    found = compat.resolve(name)
    if status == "done":
        assert found is not None
        assert not compat.arguments_missing(name, found) or note
    elif status == "refused":
        assert note and found is None
    else:
        assert status == "planned"
        assert found is None or compat.arguments_missing(name, found), (
            "it is here now: run python tools/gen_compat.py"
        )


def test_missing_arguments_are_found():
    Name = compat.Name

    def have(a, b=1, *, c=2):
        pass

    def ask(text):
        return compat.arguments_missing(Name("g", "tensordict", "callable", text), have)

    assert ask("f(x, b=1, *, c=2)") == [], "a required argument is given by position"
    assert ask("f(a, b=1, d=3)") == ["d"] and ask("f(a, *, e=1)") == ["e"]
    assert ask("f(a, c=1, b=2)") == [], "by keyword both work"
    assert compat.resolve(Name("g", "tensordict", "callable", "no_such_name()")) is None
    assert compat.resolve(Name("g", "tensordict.no_such", "callable", "x")) is None
    assert compat.resolve(Name("g", "tensordict", "module", "no_such")) is None
