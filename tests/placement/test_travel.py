"""Records of leaves travel: pickled, loaded with weights only, and between ranks."""

import io
import pickle

import pytest
import torch

from tensordict import TensorDict
from tensordict.distributed import recv, send
from tensordict.distributed.testing import run_ranks
from tensordict.placement import Layout, Placement, TensorAttrs

LAYOUT = Layout.from_placements([4], [2], [Placement("shard", 0)])


def records():
    td = TensorDict(
        {
            "a": torch.ones(2, 3, dtype=torch.bfloat16),
            "n": {"b": torch.ones(1, device="meta")},
            "s": "text",
        }
    )
    spec = td.attrs()
    spec["far"] = TensorAttrs("cuda:1", torch.float8_e5m2, [7])
    spec["open"] = TensorAttrs(tgt_dtype=torch.int8)
    spec["sharded"] = TensorAttrs(None, None, [4], LAYOUT)
    return spec


def same(a, b):
    assert list(a.keys(True)) == list(b.keys(True))
    for key in ("a", ("n", "b"), "far", "open", "sharded"):
        assert a[key] == b[key], key
    assert a["s"] == b["s"] == "text" and b.batch_size == ()
    return True


def test_pickle_and_weights_only_loading():
    spec = records()
    assert same(spec, pickle.loads(pickle.dumps(spec)))
    spec = spec.exclude("sharded")
    buffer = io.BytesIO()
    torch.save(spec, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert all(loaded[key] == spec[key] for key in ("a", ("n", "b"), "far", "open"))
    td = TensorDict({"a": torch.zeros(2, 3)})
    assert td.to(loaded.select("a"))["a"].dtype is torch.bfloat16


def _exchange(rank, size):
    spec = records()
    if rank == 0:
        send(spec, 1)
    else:
        got = recv(0)
        assert same(spec, got)
        td = TensorDict({"a": torch.zeros(2, 3), "open": torch.ones(2)})
        assert td.to(got.select("a", "open"))["open"].dtype is torch.int8


@pytest.mark.ranks
def test_records_travel_between_ranks():
    run_ranks(_exchange, 2)


@pytest.mark.parametrize(
    "data",
    [
        {"device": "cpu", "dtype": "os.system", "shape": [1], "layout": None},
        {"device": "cpu", "dtype": None, "shape": [1]},
        {"device": "nowhere", "dtype": None, "shape": None, "layout": None},
        3,
    ],
)
def test_records_from_elsewhere_are_checked(data):
    with pytest.raises((ValueError, KeyError, TypeError, RuntimeError)):
        TensorAttrs._from_encoded(data)
