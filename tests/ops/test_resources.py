"""Memory that comes back: without the garbage collector, and after many calls. Threads."""

from __future__ import annotations

import contextlib
import gc
import operator
import threading
import weakref

import psutil
import pytest
import torch

from tensordict import TensorDict


def tree():
    td = TensorDict({str(i): torch.rand(3, 4) for i in range(4)}, [3])
    td["n"] = {"b": torch.rand(3), "deep": {"c": torch.rand(3)}}
    td["s"] = "text"
    return td


def locked(td):
    out = td.clone().lock_()
    out.zero_()
    return out


def with_block(td):
    with td.unlock_() as open_:
        open_["k"] = td["0"]
    del td["k"]
    return td.copy()


def inplace(td):
    out = td.clone()
    out += 1
    return out


# Common operations; each returns something new.
OPERATIONS = {
    "construct": lambda td: TensorDict({"a": td["0"], "n": {"b": td["1"]}}, [3]),
    "set": lambda td: td.copy().set(("q", "z"), td["0"]),
    "update": lambda td: td.copy().update({"0": td["1"], "n": {"b": td["2"][:, 0]}}),
    "select": lambda td: td.select("0", ("n", "b")),
    "flatten_keys": lambda td: td.flatten_keys("."),
    "index": operator.itemgetter(0),
    "slice": lambda td: td[1:],
    "mask": lambda td: td[torch.tensor([True, False, True])],
    "view": lambda td: td.view(3, 1),
    "expand": lambda td: td.expand(2, 3),
    "stack": lambda td: torch.stack([td, td]),
    "cat": lambda td: torch.cat([td, td]),
    "unbind": lambda td: td.unbind(0)[0],
    "number": lambda td: td * 2,
    "tree": lambda td: td + td,
    "inplace": inplace,
    "compare": lambda td: td == td,
    "unary": lambda td: td.exp(),
    "sum": lambda td: td.sum(0),
    "max": lambda td: td.max(0).values,
    "apply": lambda td: td.apply(lambda x: x + 1),
    "filter": lambda td: td.apply(lambda x: x if x.ndim > 1 else None),
    "clone": lambda td: td.clone(),
    "copy": lambda td: td.copy(),
    "detach": lambda td: td.detach(),
    "to": lambda td: td.to(torch.float64),
    "lock": locked,
    "unlock_block": with_block,
    "default": lambda td: td.add(td.select("0"), default=0.0),
}


@pytest.fixture
def no_gc():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", OPERATIONS)
def test_freed_without_the_garbage_collector(name, no_gc):
    td = tree()
    out = OPERATIONS[name](td)
    alive = [weakref.ref(out), weakref.ref(next(iter(out.values())))]
    del out
    assert alive[0]() is None
    source = weakref.ref(td)
    leaf = weakref.ref(td["0"])
    del td
    assert source() is None and leaf() is None


def test_a_failed_operation_is_freed_too(no_gc):
    td = tree()
    source = weakref.ref(td)
    for fn in (lambda x: x + x.exclude("0"), lambda x: x.add_("text"), lambda x: x[5]):
        with contextlib.suppress(KeyError, TypeError, IndexError):
            fn(td)
    del td
    assert source() is None


def test_many_calls_keep_no_memory():
    td = tree()
    process = psutil.Process()

    def calls(n):
        for _ in range(n):
            for fn in OPERATIONS.values():
                fn(td)

    calls(50)
    gc.collect()
    before = process.memory_info().rss
    calls(10_000 // len(OPERATIONS))  # 10,000 calls together
    gc.collect()
    assert process.memory_info().rss - before < 5 * 2**20


@pytest.mark.slow
def test_very_many_calls_keep_no_memory():
    td = tree()
    process = psutil.Process()
    for name, fn in OPERATIONS.items():
        for _ in range(500):
            fn(td)
        gc.collect()
        before = process.memory_info().rss
        for _ in range(10_000):
            fn(td)
        gc.collect()
        assert process.memory_info().rss - before < 5 * 2**20, name


def run(*targets):
    """Run functions in threads until each is done; the exceptions that came out."""
    errors = []

    def guarded(fn):
        try:
            fn()
        except BaseException as err:
            errors.append(err)

    threads = [threading.Thread(target=guarded, args=(fn,)) for fn in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return errors


READERS = {
    "arithmetic": lambda td: td + 1,
    "tree": lambda td: td * td,
    "compare": lambda td: (td == td).all(),
    "apply": lambda td: td.apply(lambda x: x),
    "sum": lambda td: td.sum(),
    "keys": lambda td: list(td.keys(True, True)),
    "index": lambda td: td[0],
    "clone": lambda td: td.clone(),
    "flatten": lambda td: td.flatten_keys(),
    "repr": repr,
}


@pytest.mark.parametrize("name", READERS)
def test_reading_while_another_thread_sets_keys(name):
    td = tree()
    done = threading.Event()

    def write():
        for i in range(300):
            td[f"k{i}"] = torch.zeros(3)
            td["n", f"k{i}"] = torch.zeros(3)
            if i % 3 == 0:
                del td[f"k{i}"]
        done.set()

    def read():
        while not done.is_set():
            with contextlib.suppress(RuntimeError):  # the dict changed while it was walked
                READERS[name](td)

    assert run(write, read) == []
    assert len(td.keys()) == 6 + 200 and len(td["n"].keys()) == 2 + 300


def test_writers_lose_nothing():
    td = TensorDict({}, [2])

    def write(k):
        return lambda: [td.set((f"n{k}", f"k{i}"), torch.full((2,), i)) for i in range(200)]

    assert run(*[write(k) for k in range(4)]) == []
    assert all(td[f"n{k}", f"k{i}"][0] == i for k in range(4) for i in range(200))


def test_a_lock_holds_against_threads():
    td = tree().lock_()
    keys = set(td.keys(True))

    def write():
        for i in range(200):
            with pytest.raises(RuntimeError):
                td[f"k{i}"] = torch.zeros(3)
            td.zero_()

    def read():
        for _ in range(50):
            assert set((td + 1).keys(True)) == keys

    assert run(write, read, read) == []
    assert set(td.keys(True)) == keys and td.is_locked


def test_in_place_writes_from_threads_reach_their_own_tree():
    trees = [tree() for _ in range(4)]
    before = [td.clone() for td in trees]

    def write(td):
        return lambda: [td.add_(1) for _ in range(100)]

    assert run(*map(write, trees)) == []
    for td, old in zip(trees, before):
        assert td.select("0", "n").allclose(old.select("0", "n") + 100)
