"""What the README promises."""

from __future__ import annotations

import re

from ._project import ROOT, python


def readme_tour():
    text = (ROOT / "README.md").read_text()
    found = re.search(r"<!-- tour -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found, "README.md has no python block after the mark <!-- tour -->"
    return found[1]


def test_the_tour_of_the_readme_runs():
    tour = readme_tour()
    assert len(tour.splitlines()) <= 30
    assert "assert" in tour, "the tour shows results, and has to check them"
    out = python(tour)
    assert out.returncode == 0, out.stderr


def test_a_broken_tour_is_found():
    assert python(readme_tour() + "\nassert 1 == 2\n").returncode != 0
