"""Accounts of time: counted, not measured."""

from __future__ import annotations

import logging

import pytest

from tensordict.utils import timeit


@pytest.fixture(autouse=True)
def fresh():
    timeit.erase()
    yield
    timeit.erase()


def test_blocks_functions_and_recursion(caplog):
    @timeit("fn")
    def fn(n):
        return fn(n - 1) if n else "done"

    assert fn(2) == "done" and fn.__name__ == "fn"
    with timeit("block"):
        pass
    with pytest.raises(ValueError), timeit("block"):
        raise ValueError
    assert set(timeit.todict()) == {"fn", "block"} and all(t >= 0 for t in timeit.todict().values())
    with caplog.at_level(logging.INFO, "tensordict"):
        timeit.print()
    assert "fn took" in caplog.text and "calls = 3" in caplog.text and "calls = 2" in caplog.text
    timeit.erase()
    assert timeit.todict() == {}
