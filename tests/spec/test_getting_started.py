"""The examples of the getting-started guide run and print what the guide says."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

TEXT = (Path(__file__).parent / "getting_started.txt").read_text()
SECTIONS = dict(part.split("\n", 1) for part in TEXT.removeprefix("# ").split("\n# "))


def failures(name, code):
    test = doctest.DocTestParser().get_doctest(code, {}, name, "getting_started.txt", 0)
    assert test.examples
    lines = []
    doctest.DocTestRunner(verbose=False).run(test, out=lines.append)
    return "".join(lines)


@pytest.mark.parametrize("name", SECTIONS)
def test_section(name):
    assert failures(name, SECTIONS[name]) == ""


def test_a_wrong_print_is_found():
    wrong = SECTIONS["Shapes"].replace("torch.Size([12])", "torch.Size([11])", 1)
    assert "Expected:\n    torch.Size([11])" in failures("Shapes", wrong)
