"""Views of keys and entries on several levels."""

from __future__ import annotations

import pytest
import torch

from tensordict import NonTensorData, TensorDict, is_leaf_nontensor, lazy_stack


def _tree() -> TensorDict:
    x = torch.zeros(3, 2)
    below = {"y": x, "s": "text", "deep": {"z": x, "none": {}}}
    return TensorDict({"b": x, "n": below, "t": "text", "a": x, "empty": {}}, [3])


def _trees():
    dense = _tree()
    stack = lazy_stack([_tree(), _tree()])
    return [dense, dense.clone().lock_(), stack, TensorDict({"q": stack}), TensorDict({})]


_TESTS = [
    None,
    is_leaf_nontensor,
    lambda cls: False,
    lambda cls: True,
    lambda cls: issubclass(cls, NonTensorData),
    lambda cls: issubclass(cls, TensorDict),
]


@pytest.mark.parametrize("is_leaf", _TESTS)
@pytest.mark.parametrize("leaves_only", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("sort", [False, True])
def test_the_three_views_agree(nested, leaves_only, is_leaf, sort):
    for td in _trees():
        how = (nested, leaves_only, is_leaf)
        keys = list(td.keys(*how, sort=sort))
        items = list(td.items(*how, sort=sort))
        values = list(td.values(*how, sort=sort))
        assert [key for key, _ in items] == keys
        assert len(values) == len(keys)
        for view in (td.keys, td.items, td.values):
            assert len(view(*how, sort=sort)) == len(keys)
        for (key, entry), value in zip(items, values):
            assert type(entry) is type(value) is td.entry_class(key)


@pytest.mark.parametrize("nested", [False, True])
def test_leaves_are_what_the_test_accepts(nested):
    td = _tree()
    tensors = ["b", "a"]
    texts = ["t"]
    if nested:
        tensors = ["b", ("n", "y"), ("n", "deep", "z"), "a"]
        texts = [("n", "s"), "t"]
    assert list(td.keys(nested, True)) == tensors
    assert list(td.keys(nested, True, is_leaf=lambda cls: False)) == []
    assert list(td.keys(nested, True, is_leaf=lambda cls: issubclass(cls, NonTensorData))) == texts
    assert list(td.keys(nested, True, is_leaf=lambda cls: issubclass(cls, TensorDict))) == [
        "n",
        "empty",
    ]


def test_children_come_before_their_parent():
    assert list(_tree().keys(True)) == [
        "b",
        ("n", "y"),
        ("n", "s"),
        ("n", "deep", "z"),
        ("n", "deep", "none"),
        ("n", "deep"),
        "n",
        "t",
        "a",
        "empty",
    ]


def test_a_list_of_a_view_walks_for_the_keys_once(monkeypatch):
    calls = []
    td = _tree()
    real = TensorDict._items
    monkeypatch.setattr(TensorDict, "_items", lambda self: calls.append(self) or real(self))
    list(td.items(True, True))
    assert len(calls) == len({id(node) for node in calls})


def test_values_and_items_follow_the_tensordict():
    td = _tree()
    values, items = td.values(), td.items()
    td["new"] = torch.ones(3)
    assert len(values) == len(items) == len(td.keys())
    assert list(values)[-1] is td["new"]
    assert all(a is b for (_, a), b in zip(items, values))


@pytest.mark.parametrize(
    ("key", "there"),
    [
        (("n", "deep", "z"), True),
        (("n", ("deep", "z")), True),
        (("n",), True),
        (("n", "q"), False),
        (("b", "q"), False),
        (("t", "q"), False),
        (("q", "n"), False),
    ],
)
def test_membership_of_nested_keys(key, there):
    td = _tree()
    assert (key in td) is there
    assert (key in td.keys(True)) is there


def test_a_renamed_entry_is_the_same_object_in_the_last_place():
    td = _tree()
    before = td["b"]
    td.rename_key_("b", "z")
    assert td["z"] is before
    assert list(td.keys())[-1] == "z"
    td.rename_key_("z", "a")
    assert td["a"] is before
    with pytest.raises(KeyError):
        td.rename_key_("b", "c")
    with pytest.raises(KeyError, match="already present"):
        td.rename_key_("a", "n", safe=True)
    assert list(td.keys()) == ["n", "t", "a", "empty"]
