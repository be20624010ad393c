"""Taking entries out: the last one, and those that only some members of a stack have."""

import pytest
import torch

from tensordict import NonTensorData, TensorClass, TensorDict, lazy_stack


def test_popitem_takes_the_last_pair_without_listing_the_names(monkeypatch):
    class Names:
        """Names that can be counted, and not walked."""

        def __init__(self, td):
            self.n = len(td._entries)

        def __len__(self):
            return self.n

        def __iter__(self):
            raise AssertionError("walked")

    td = TensorDict({"a": torch.zeros(1), "b": "text", "c": {"d": 1}})
    twin = dict(td.items())
    monkeypatch.setattr(TensorDict, "_names", lambda self: Names(self))
    for _ in range(3):
        name, value = td.popitem()
        key, truth = twin.popitem()
        assert name == key
        assert value == "text" if name == "b" else value is truth
    with pytest.raises(KeyError, match="empty"):
        td.popitem()


def test_popitem_of_stacks_and_typed_classes_and_locks():
    class Pair(TensorClass):
        x: torch.Tensor
        y: str = "text"

    pair = Pair(torch.zeros(2))
    assert pair.popitem() == ("y", "text") and pair.y is None
    td = lazy_stack(
        [TensorDict({"a": i, "b": i, "own": i} if i else {"a": i, "b": i}) for i in range(2)]
    )
    name, value = td.popitem()
    assert name == "b" and value.tolist() == [0, 1] and "b" not in td[1]
    with pytest.raises(RuntimeError, match="locked"):
        TensorDict({"a": 1}).lock_().popitem()


def rows():
    first = TensorDict({"a": torch.zeros(2), "n": {"x": torch.zeros(1)}})
    second = TensorDict(
        {"a": torch.zeros(2), "e": torch.ones(1), "n": {"x": torch.zeros(1), "y": torch.ones(1)}}
    )
    return lazy_stack([first, second])


@pytest.mark.parametrize("key", ["e", ("n", "y")])
def test_deleting_takes_an_entry_from_the_members_that_have_it(key):
    for take in (lambda td: td.__delitem__(key), lambda td: td.del_(key)):
        td = rows()
        take(td)
        assert all(key not in member.keys(True) for member in td.tensordicts)
        assert "a" in td.keys() and ("n", "x") in td.keys(True)
    td = rows()
    with pytest.raises(KeyError, match=r"Only the members \[1\] of the lazy stack have it"):
        td.pop(key)
    assert td.pop(key, None) is None and key in td.tensordicts[1].keys(True)
    with pytest.raises(RuntimeError, match="locked"):
        td.lock_().del_(key)


def test_deleting_what_no_member_has():
    for key in ("zz", ("n", "zz"), ("zz", "a")):
        with pytest.raises(KeyError, match="not found"):
            rows().del_(key)


def test_get_at_gives_the_default_wherever_get_does():
    td = TensorDict(
        {"a": torch.arange(3), "n": {"b": torch.arange(3)}, "s": NonTensorData("v")}, [3]
    )
    assert td.get_at("a", 1) == 1 and td.get_at(("n", "b"), 2) == 2
    for key in ("zz", ("a", "q"), ("zz", "q"), ("n", "zz"), ("s", "q")):
        assert td.get_at(key, 0, "default") == td.get(key, "default") == "default"
    assert td.get_at("zz", 0) is None
    with pytest.raises(KeyError, match="is a Tensor, not a tensordict"):
        td.get_at(("a", "q"), 0)
