"""`TensorDictParams`: a tensordict to us, a module to torch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from tensordict import NonTensorData, TensorDict, TensorDictBase, TensorDictParams


def source():
    return TensorDict(
        {
            "a": torch.arange(6.0).view(3, 2),
            "i": torch.arange(3),
            "n": {"b": torch.ones(3), "s": "deep"},
            "text": "x",
            "buf": nn.Buffer(torch.ones(3)),
        },
        [3],
        names=["t"],
    )


def params():
    return TensorDictParams(source())


class Host(nn.Module):
    def __init__(self):
        super().__init__()
        self.params = params()
        self.linear = nn.Linear(1, 1)


def kinds(td):
    return {key: type(value).__name__ for key, value in td.items(True, True)}


KINDS = {"a": "Parameter", "i": "Tensor", ("n", "b"): "Parameter", "buf": "Tensor"}


def test_both_a_tensordict_and_a_module():
    p = params()
    assert isinstance(p, TensorDictBase) and isinstance(p, nn.Module)
    assert kinds(p) == KINDS and list(p.keys()) == list(source().keys())
    assert p.batch_size == (3,) and p.names == ["t"] and p["text"] == "x" and p["n", "s"] == "deep"
    assert [n for n, _ in p.named_parameters()] == ["a", "n.b"]
    assert [n for n, _ in p.named_buffers()] == ["i", "buf"]
    assert p["a"].data_ptr() and p["a"].requires_grad and hash(p) == hash(p)


def test_the_memory_is_that_of_the_source():
    td = source()
    p = TensorDictParams(td)
    assert p["a"].data_ptr() == td["a"].data_ptr() and type(td["a"]) is torch.Tensor
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    assert TensorDictParams(w=frozen)["w"] is frozen


def test_without_conversion():
    p = TensorDictParams(source(), no_convert=True)
    assert kinds(p)["a"] == "Tensor" and list(p.parameters()) == []
    p["z"] = torch.zeros(3)
    assert "z" in dict(p.named_buffers())


def test_arguments():
    with pytest.raises(ValueError, match="not both"):
        TensorDictParams(TensorDict(), a=1)
    assert TensorDictParams({"a": torch.zeros(1)}, lock=True).is_locked
    assert len(TensorDictParams().keys()) == 0


def test_writing_registers_and_deleting_forgets():
    p = params()
    p["z"] = torch.zeros(3)
    p["w", "y", "x"] = torch.zeros(3)
    p["n"]["c"] = torch.zeros(3, dtype=torch.int64)
    assert {"z", "w.y.x"} <= {n for n, _ in p.named_parameters()}
    assert "n.c" in dict(p.named_buffers())
    p["a"] = torch.zeros(3, dtype=torch.int64)
    assert "a" not in dict(p.named_parameters()) and "a" in dict(p.named_buffers())
    del p["z"], p["w"]
    assert [n for n, _ in p.named_parameters()] == ["n.b"]
    p.update({"text": torch.zeros(3)})
    assert isinstance(p["text"], nn.Parameter)
    p.lock_()
    with pytest.raises(RuntimeError, match="locked"):
        p["q"] = torch.zeros(3)


@pytest.mark.parametrize("name", ["data", "values", "training", "forward", "a.b", "mean"])
def test_names_that_a_module_would_refuse(name):
    p = TensorDictParams({name: torch.zeros(2), "n": {name: torch.ones(2)}})
    assert len(list(p.parameters())) == 2 and bool((p["n", name] == 1).all())
    assert p.training is True


@pytest.mark.parametrize(
    "make",
    [
        lambda p: p.clone(),
        lambda p: p.copy(),
        lambda p: copy.copy(p),
        lambda p: copy.deepcopy(p),
        lambda p: pickle.loads(pickle.dumps(p)),
        lambda p: p.to("cpu"),
    ],
    ids=["clone", "copy", "copy.copy", "deepcopy", "pickle", "to"],
)
def test_copies_are_modules(make):
    p = params()
    q = make(p)
    assert type(q) is TensorDictParams and type(q["n"]) is TensorDictParams and q is not p
    assert kinds(q) == KINDS and list(q.keys()) == list(p.keys())
    assert q["text"] == "x" and q.names == ["t"] and torch.equal(q["a"], p["a"])
    assert q["a"].is_leaf and q["a"].requires_grad and not q.is_locked


def test_deep_copies_share_nothing_and_keep_ties():
    w = nn.Parameter(torch.zeros(2))
    p = TensorDictParams(a=w, b=w)
    q = copy.deepcopy(p)
    assert q["a"] is q["b"] and q["a"] is not w
    assert copy.deepcopy(Host()).params["a"].requires_grad


def test_casts_and_moves():
    p = params()
    q = p.to(torch.float64)
    assert type(q) is TensorDictParams and q["a"].dtype is torch.float64
    assert isinstance(q["n", "b"], nn.Parameter) and p["a"].dtype is torch.float32
    m = p.to("meta")
    assert m.device.type == "meta" and m["a"].is_meta and isinstance(m["a"], nn.Parameter)


@pytest.mark.parametrize(
    "op",
    [
        lambda p: p * 2,
        lambda p: p.apply(lambda x: x + 1),
        lambda p: p.data,
        lambda p: p.detach(),
        lambda p: p[0],
        lambda p: p.unsqueeze(0),
        lambda p: p.select("a", "n"),
        lambda p: p.exclude("a"),
        lambda p: p.flatten_keys("."),
        lambda p: p.empty(),
        lambda p: p.to_tensordict(),
        lambda p: torch.stack([p, p]),
        lambda p: torch.cat([p, p]),
    ],
)
def test_operations_give_plain_tensordicts_like_those_of_the_source(op):
    out, expected = op(params()), op(source())
    assert type(out) is TensorDict and out.batch_size == expected.batch_size
    assert set(out.keys(True, True)) == set(expected.keys(True, True))
    assert all(torch.equal(v, out[k]) for k, v in expected.items(True, True))


def test_gradients():
    p = params()
    (p["a"].sum() * 2 + p["n", "b"].sum()).backward()
    assert torch.equal(p.grad["a"], torch.full((3, 2), 2.0))
    torch.optim.SGD(p.parameters(), lr=1.0).step()
    assert torch.equal(p["n", "b"], torch.zeros(3))


def test_inside_another_module():
    host = Host()
    assert [n for n, _ in host.named_parameters()] == [
        "params.a",
        "params.n.b",
        "linear.weight",
        "linear.bias",
    ]
    state = host.state_dict()
    assert list(state)[:4] == ["params.a", "params.i", "params.n.b", "params.buf"]
    other = Host()
    with torch.no_grad():
        other.params["a"].zero_()
    other.load_state_dict(state)
    assert torch.equal(other.params["a"], source()["a"])
    host.to(torch.float64)
    assert host.params["a"].dtype is torch.float64 and host.params["i"].dtype is torch.int64
    assert host.eval().params.training is False and host.params["n"].training is False


def test_moving_the_host_updates_the_device_and_cached_lists():
    host = Host()
    host.params = TensorDictParams(
        TensorDict({"a": torch.zeros(2), "b": torch.arange(2)}, [2], device="cpu"), lock=True
    )
    assert (host.params * 2)["b"][1] == 2
    host.to_empty(device="meta")
    assert host.params.device.type == "meta"
    assert all(x.is_meta for x in host.params.values(True, True))
    assert host.params.is_contiguous() and not host.params.is_empty()
    assert all(x.is_meta for x in host.params.detach().values())


def test_functional_calls_reach_inside():
    host = Host()
    tree = TensorDict.from_module(host)
    assert tree["params"].batch_size == (3,) and tree["params", "a"] is host.params["a"]
    host.params.lock_()
    host.params * 2
    weight = host.params["a"]
    zero = tree._map(lambda x: torch.zeros_like(x))
    with zero.to_module(host):
        assert host.params["a"] is zero["params", "a"]
        assert bool(((host.params * 2)["a"] == 0).all()), "no cached leaf is used"
    assert host.params["a"] is weight and torch.equal((host.params * 2)["a"], weight * 2)
    assert not tree["params"].is_locked


def test_from_module_as_module():
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    p = TensorDict.from_module(module, as_module=True)
    assert type(p) is TensorDictParams
    assert {n for n, _ in p.named_parameters()} == {n for n, _ in module.named_parameters()}
    assert {n for n, _ in p.named_buffers()} == {n for n, _ in module.named_buffers()}
    assert p["0", "weight"] is module[0].weight
    stacked = TensorDict.from_modules(module, copy.deepcopy(module), as_module=True)
    assert type(stacked) is TensorDictParams and stacked.batch_size == (2,)


def test_the_module_surface():
    p = TensorDictParams()
    p.register_parameter("w", nn.Parameter(torch.zeros(2)))
    p.register_parameter("none", None)
    p.register_buffer("b", torch.ones(2))
    p.register_buffer("v", torch.ones(2), persistent=False)
    p.register_buffer("none", None)
    p.add_module("n", TensorDictParams(c=torch.zeros(1)))
    p.direct = nn.Parameter(torch.zeros(3))
    assert list(p.keys()) == ["w", "b", "v", "n", "direct"] and p["direct"] is p.direct
    assert list(p.state_dict()) == ["w", "b", "n.c", "direct"]
    assert [n for n, _ in p.named_modules()] == ["", "n"]
    with pytest.raises(TypeError, match="Linear"):
        p.add_module("l", nn.Linear(1, 1))
    p.train(False)
    assert not p["n"].training and "direct" in dir(p)
    p["text"] = NonTensorData("x")
    p["text"] = "y"
    assert p["text"] == "y" and "text" in p


def test_vmap_and_pytree():
    stacked = TensorDict.from_modules(nn.Linear(2, 3), nn.Linear(2, 3), as_module=True)
    module = nn.Linear(2, 3)

    def call(p, x):
        with p.to_module(module):
            return module(x)

    out = torch.vmap(call, (0, None))(stacked, torch.ones(2))
    assert out.shape == (2, 3) and out.requires_grad


def test_printing():
    text = repr(TensorDictParams(TensorDict(a=torch.zeros(3), n={"b": torch.zeros(1)})))
    assert text.startswith(
        "TensorDictParams(params=TensorDict(\n    fields={\n        a: Parameter("
    )
    assert "n: TensorDict(" in text and text.endswith("is_shared=False))")
    assert "(params): TensorDictParams(params=TensorDict(" in repr(Host())
