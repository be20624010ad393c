"""Trees of modules: the same objects out, swapped values in, everything back at the end."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tensordict import TensorDict
from tensordict.modules.state import nested


def plain(module):
    """A copy of the values of a module, without grad."""
    return TensorDict.from_module(module)._map(lambda x: x.detach().clone())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.head
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_parameter("absent", None)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.again(self.embed(x)) * self.scale


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def objects(module):
    return {
        id(v)
        for m in module.modules()
        for store in (m._parameters, m._buffers)
        for v in store.values()
    }


def test_from_module_holds_the_same_objects_under_nested_names():
    module = mlp()
    td = TensorDict.from_module(module)
    flat = td.flatten_keys(".")
    expected = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert set(flat.keys()) == set(expected)
    assert all(flat[name] is value for name, value in expected.items())
    assert list(td["1"].keys()) == [
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "num_batches_tracked",
    ]
    assert not td.is_locked and "2" not in td


def test_tied_modules_appear_under_each_name():
    module = Tied()
    td = TensorDict.from_module(module)
    assert td["embed", "weight"] is td["head", "weight"] is td["again", "weight"]
    assert "absent" not in td and td["scale"] is module.scale


def test_options_of_from_module():
    module = Tied()
    kept = TensorDict.from_module(module, filter_empty=False)
    assert list(kept["act"].keys()) == [] and "act" not in TensorDict.from_module(module)
    assert TensorDict.from_module(module, lock=True).is_locked
    state = TensorDict.from_module(module, use_state_dict=True)
    assert set(state.keys(True, True)) == {
        ("embed", "weight"),
        ("head", "weight"),
        ("again", "weight"),
    }
    assert not state["embed", "weight"].requires_grad


def test_a_block_runs_the_module_on_the_tree_and_restores_it():
    module = mlp().eval()
    before = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    params = plain(module)._map(lambda x: x + 1)
    x = torch.randn(5, 3)
    flat = dict(params.flatten_keys(".").items())
    expected = functional_call(module, flat, (x,))
    with params.to_module(module) as former:
        assert module[0].weight is params["0", "weight"]
        assert torch.equal(module(x), expected)
        assert former["0", "weight"] is before["0.weight"]
        assert [n for n, _ in module.named_parameters()] == [
            n for n in before if "running" not in n and "num" not in n
        ]
    after = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert all(after[name] is value for name, value in before.items())


def test_gradients_reach_the_tree():
    module = nn.Linear(3, 2)
    params = plain(module)._map(lambda x: x.requires_grad_())
    doubled = params._map(lambda x: x * 2)
    with doubled.to_module(module):
        module(torch.ones(3)).sum().backward()
    assert torch.equal(params["weight"].grad, torch.full((2, 3), 2.0))
    assert module.weight.grad is None


def test_a_block_that_raises_restores_the_module():
    module = mlp()
    before = objects(module)
    with pytest.raises(ValueError, match="inside"):
        with plain(module).to_module(module):
            assert objects(module).isdisjoint(before)
            raise ValueError("inside")
    assert objects(module) == before


def test_tied_weights_come_back_tied():
    module = Tied()
    weight = module.embed.weight
    params = plain(module)
    with params.to_module(module):
        assert module.embed.weight is params["embed", "weight"]
        assert module.head.weight is params["again", "weight"], "the last name wins"
    assert module.embed.weight is module.head.weight is module.again.weight is weight


def test_outside_a_block_plain_tensors_become_parameters():
    module = Tied()
    names, keys = [n for n, _ in module.named_parameters()], list(module.state_dict())
    data = TensorDict.from_module(module)._map(lambda x: x.data)
    data["head", "weight"] = data["again", "weight"] = data["embed", "weight"]
    former = data.to_module(module)
    assert isinstance(module.embed.weight, nn.Parameter) and module.embed.weight.requires_grad
    assert module.embed.weight.data_ptr() == data["embed", "weight"].data_ptr()
    assert module.embed.weight is module.head.weight, "a tie stays a tie"
    assert isinstance(former["embed", "weight"], nn.Parameter)
    assert [n for n, _ in module.named_parameters()] == names and list(module.state_dict()) == keys
    torch.optim.SGD(module.parameters(), lr=1.0)


def test_a_frozen_parameter_stays_frozen():
    module = nn.Linear(2, 2).requires_grad_(False)
    plain(module).to_module(module)
    assert isinstance(module.weight, nn.Parameter) and not module.weight.requires_grad


def test_missing_entries_leave_the_module_alone():
    module = nn.Linear(2, 2)
    bias = module.bias
    with TensorDict(weight=torch.zeros(2, 2)).to_module(module):
        assert module.bias is bias
        assert torch.equal(module(torch.ones(2)), bias)


def test_extra_entries_are_named_and_nothing_changes():
    module = mlp()
    before = objects(module)
    td = plain(module)
    td["0", "extra"] = torch.zeros(1)
    td["nowhere", "x"] = torch.zeros(1)
    with pytest.raises(KeyError) as err:
        td.to_module(module)
    assert "('0', 'extra')" in str(err.value) and "'nowhere'" in str(err.value)
    assert objects(module) == before


def test_inplace_copies_into_the_parameters():
    module = mlp()
    before = objects(module)
    ones = plain(module)._map(torch.ones_like)
    with ones.to_module(module, inplace=True) as former:
        assert objects(module) == before and bool((module[0].weight == 1).all())
        assert not bool((former["0", "weight"] == 1).all())
    assert torch.equal(module[0].weight, former["0", "weight"]), "the values come back"
    ones.to_module(module, inplace=True, return_swap=False)
    assert bool((module[3].bias == 1).all()) and objects(module) == before


def test_inplace_with_other_shapes_changes_nothing():
    module = mlp()
    bad = plain(module)._map(torch.ones_like)
    bad["3", "bias"] = torch.ones(7)
    weight = module[0].weight.clone()
    with pytest.raises(RuntimeError, match=r"\[2\] in the module, \[7\] given"):
        bad.to_module(module, inplace=True)
    assert torch.equal(module[0].weight, weight)


def test_swap_dest_and_no_swap():
    module = nn.Linear(2, 2)
    weight = module.weight
    dest = TensorDict(mine=1)
    out = TensorDict(weight=torch.zeros(2, 2)).to_module(module, swap_dest=dest)
    assert out is dest and dest["weight"] is weight and "mine" in dest
    assert TensorDict(weight=torch.ones(2, 2)).to_module(module, return_swap=False) is None


@pytest.mark.parametrize("inplace", [False, True])
def test_through_the_state_dict(inplace):
    module = mlp()
    weight = module[0].weight.detach().clone()
    zero = plain(module)._map(torch.zeros_like)
    seen = []
    module.register_load_state_dict_post_hook(lambda *_: seen.append(1))
    with zero.to_module(module, use_state_dict=True, inplace=inplace):
        assert bool((module[0].weight == 0).all())
    assert torch.equal(module[0].weight, weight) and len(seen) == 2
    with pytest.raises(KeyError, match="zzz"):
        TensorDict(zzz=1).to_module(module, use_state_dict=True)


def test_classes_that_cache_their_weights():
    rnn = nn.LSTM(2, 3)
    names = list(rnn.state_dict())
    zero = plain(rnn)._map(torch.zeros_like)
    x = torch.ones(1, 1, 2)
    before = rnn(x)[0]
    with zero.to_module(rnn):
        assert bool((rnn(x)[0] == 0).all())
    assert torch.equal(rnn(x)[0], before) and list(rnn.state_dict()) == names
    assert all(a is b for a, b in zip(rnn._flat_weights, rnn.parameters()))


def test_a_buffer_of_a_class_with_its_own_setattr():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.zeros(2))
            self.w = nn.Parameter(torch.zeros(2))
            self.log = []

        def __setattr__(self, name, value):
            if name in ("b", "w") and "log" in self.__dict__:
                self.log.append(name)
            super().__setattr__(name, value)

    module = Noisy()
    with TensorDict(b=torch.ones(2), w=torch.ones(2)).to_module(module):
        assert bool((module.b == 1).all()) and set(module._buffers) == {"b"}
        assert "b" not in module.__dict__ and "w" not in module.__dict__
    assert {"b", "w"} <= set(module.log) and bool((module.b == 0).all())
    assert isinstance(module.w, nn.Parameter) and list(module._parameters) == ["w"]


def test_from_modules_stacks():
    modules = [nn.Linear(2, 3) for _ in range(4)]
    td = TensorDict.from_modules(*modules)
    assert td.batch_size == (4,) and td.is_locked
    for i, module in enumerate(modules):
        assert torch.equal(td["weight"][i], module.weight)
    assert isinstance(td["weight"], nn.Parameter) and td["weight"].is_leaf
    frozen = [nn.Linear(2, 3).requires_grad_(False) for _ in range(2)]
    assert not TensorDict.from_modules(*frozen, lock=False)["weight"].requires_grad
    buffers = TensorDict.from_modules(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    assert not isinstance(buffers["running_mean"], nn.Parameter)
    assert buffers["num_batches_tracked"].shape == (2,)


def test_from_modules_expands_what_all_share():
    shared = nn.Parameter(torch.randn(3, 2))
    modules = [nn.Linear(2, 3) for _ in range(3)]
    for module in modules:
        module.weight = shared
    td = TensorDict.from_modules(*modules, expand_identical=True)
    assert td["weight"].shape == (3, 3, 2) and td["weight"].stride()[0] == 0
    assert td["weight"].data_ptr() == shared.data_ptr()
    with pytest.raises(RuntimeError, match="no module"):
        TensorDict.from_modules()


def test_vmap_over_stacked_parameters():
    modules = [mlp().eval() for _ in range(3)]
    params = TensorDict.from_modules(*modules)
    skeleton = mlp().eval()
    before = objects(skeleton)
    x = torch.randn(5, 3)

    def call(x, params):
        with params.to_module(skeleton):
            return skeleton(x)

    got = torch.vmap(call, (None, 0))(x, params)
    torch.testing.assert_close(got, torch.stack([m(x) for m in modules]))
    assert objects(skeleton) == before


def test_compiled_functional_call():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before = objects(module)

    def call(x, params):
        with params.to_module(module):
            return module(x)

    params = plain(module)._map(torch.zeros_like)
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3), params), torch.zeros(2))
    assert objects(module) == before
    two = params._map(lambda x: x + 1)
    assert torch.equal(compiled(torch.ones(3), two), call(torch.ones(3), two))

    def own(x):
        with TensorDict.from_module(module)._map(lambda p: p * 2).to_module(module):
            return module(x)

    assert torch.equal(
        torch.compile(own, backend="eager", fullgraph=True)(torch.ones(3)), own(torch.ones(3))
    )


def test_nested_names_of_a_flat_mapping():
    assert nested({"a.b.c": 1, "a.d": 2, "e": 3}) == {"a": {"b": {"c": 1}, "d": 2}, "e": 3}
