"""Schemas: bytes and back, differences, and everything that a peer may not say."""

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensordict import TensorDict
from tensordict.distributed import schema as schemas
from tensordict.distributed.describe import build, describe, equal
from tensordict.distributed.endpoint import learn
from tensordict.distributed.wire import Limits, schema_digest
from tensordict.errors import WireError

short = settings(max_examples=60, deadline=None)

names = st.text(min_size=0, max_size=6).filter(lambda s: "\ud800" not in s)
shapes = st.lists(st.integers(0, 3), max_size=3)
dtypes = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2]
)
leaves = st.builds(lambda s, d: torch.zeros(s, dtype=d), shapes, dtypes)
trees = st.recursive(
    st.dictionaries(names, leaves, max_size=4),
    lambda inner: st.dictionaries(names, leaves | inner, max_size=4),
    max_leaves=12,
)


@short
@given(trees)
def test_a_schema_survives_the_round_trip(tree):
    td = TensorDict(tree, [])
    described = describe(td)
    again = schemas.decode(schemas.encode(described.schema))
    assert equal(described.schema, again)
    assert schemas.differences(described.schema, again) == []
    rebuilt = build(again, described.parts, [], None)
    assert list(rebuilt.keys(True, True)) == list(td.keys(True, True))
    assert all(a is b for a, b in zip(rebuilt.values(True, True), td.values(True, True)))


@short
@given(trees, trees)
def test_differences_are_those_of_the_trees(a, b):
    def flat(tree, prefix=()):
        for key, value in tree.items():
            if isinstance(value, dict):
                yield (*prefix, key), "node"
                yield from flat(value, (*prefix, key))
            else:
                yield (*prefix, key), (value.dtype, value.shape)

    mine, theirs = dict(flat(a)), dict(flat(b))
    want = {p for p in mine.keys() | theirs.keys() if mine.get(p) != theirs.get(p)}
    x, y = describe(TensorDict(a, [])).schema, describe(TensorDict(b, [])).schema
    got = {p if isinstance(p, tuple) else (p,) for p, _ in schemas.differences(x, y)}
    assert got == want


def document():
    td = TensorDict(
        {
            "a": torch.zeros(2, 3),
            "n": TensorDict({"b": torch.ones(2, requires_grad=True), "s": "x"}, [2]),
            "img": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
            "j": torch.eye(2).to_sparse(),
        },
        [2],
        names=["t"],
    )
    td["tie"] = td["a"]
    td["n"].lock_()
    return json.loads(schemas.encode(describe(td).schema))


def test_the_document_reads_like_the_format_says():
    doc = document()
    assert doc["keys"] == [["a", "n", "img", "j", "tie"], ["b", "s"]]
    assert doc["entries"] == ["tntct", "tv"] and doc["locked"] == "01"
    assert doc["ties"] == [[4, 0]] and doc["formats"] == [[1, "channels_last"]]
    assert doc["grad"] == [5] and doc["values"] == ["non_tensor"]
    assert [c[0] for c in doc["composites"]] == ["sparse_coo"]


HOSTILE = [
    None,
    True,
    -1,
    2**63,
    10**30,
    1.5,
    "",
    "x" * 50,
    "__import__('os').system('true')",
    [],
    [[]],
    {},
    [-1],
    [2**62, 2**62],
    {"batch_size": [2**62, 4]},
    "os:system",
]


def spots(value, path=()):
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from spots(value[key], (*path, key))
    elif isinstance(value, list):
        for key in range(len(value)):
            yield from spots(value[key], (*path, key))


def replaced(doc, path, value):
    doc = copy.deepcopy(doc)
    if not path:
        return value
    inner = doc
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return doc


def test_every_place_of_the_document_changed_in_every_way():
    doc, limits = document(), Limits(max_payload_nbytes=1 << 20)
    refused = 0
    for path in spots(doc):
        for value in HOSTILE:
            try:
                data = json.dumps(replaced(doc, path, value)).encode()
                entry = learn(data, schema_digest(data), limits)
            except WireError:
                refused += 1
                continue
            # What is let through describes a tree within the limits.
            assert entry.packing.nbytes <= limits.max_payload_nbytes
            list(schemas.places(entry.schema))
    assert refused > 500


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[" * 200_000,
        b"[" * 900 + b"]" * 900,
        b'{"keys":' + b"9" * 10_000 + b"}",
        b"null",
        b"{}",
    ],
)
def test_json_bombs_are_refused(data):
    with pytest.raises(WireError):
        schemas.decode(data)


def test_depth_and_size_are_limited():
    td = TensorDict({"a": torch.zeros(1)}, [])
    for _ in range(20):
        td = TensorDict({"n": td}, [])
    data = schemas.encode(describe(td).schema)
    assert schemas.decode(data, Limits(max_depth=21)).n_leaves == 1
    with pytest.raises(WireError, match="deeper than 20"):
        schemas.decode(data, Limits(max_depth=20))
    with pytest.raises(WireError, match="above 100"):
        schemas.decode(data, Limits(max_schema_nbytes=100))
    big = schemas.encode(describe(TensorDict({"a": torch.zeros(1).expand(10**6)}, [])).schema)
    with pytest.raises(WireError, match="above the limit"):
        learn(big, schema_digest(big), Limits(max_payload_nbytes=1000))
    with pytest.raises(WireError, match="digest"):
        learn(big, bytes(16), Limits())


def test_keys_may_be_any_string():
    keys = ["", "a.b", "\0", "ключ", "\ud800", '"', "a" * 1000]
    td = TensorDict({key: torch.zeros(1) for key in keys}, [])
    again = schemas.decode(schemas.encode(describe(td).schema))
    assert again.keys == [keys]


@pytest.mark.parametrize("n", [1, 2, 64, 65, 200])
def test_columns_have_letters_while_there_are_enough(n):
    td = TensorDict({f"{k}": torch.zeros(k % n) for k in range(300)}, [])
    schema = describe(td).schema
    data = schemas.encode(schema)
    doc = json.loads(data)
    shapes = [doc["shapes"][i] for i in indices(doc["shape"])]
    assert shapes == [[k % n] for k in range(300)] and len(doc["shapes"]) == n
    assert doc["dtype"] == "A" * 300 and isinstance(doc["shape"], str) == (n <= 64)
    assert equal(schemas.decode(data), schema)


def indices(column):
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    return [letters.index(c) if isinstance(c, str) else c for c in column]


@pytest.mark.parametrize(
    "column", ["ABC", "AB=", "AB\u0100", "ab", "A", "ABAB", [0, 1, 0], 3, None]
)
def test_columns_that_do_not_fit_their_table_are_refused(column):
    doc = json.loads(
        schemas.encode(describe(TensorDict(a=torch.zeros(1), b=torch.zeros(2))).schema)
    )
    assert doc["shape"] == "AB"
    with pytest.raises(WireError, match="malformed"):
        schemas.decode(json.dumps({**doc, "shape": column}).encode())


def test_a_long_table_takes_integers_only():
    td = TensorDict({f"{k}": torch.zeros(k) for k in range(65)}, [])
    doc = json.loads(schemas.encode(describe(td).schema))
    for column in ("A" * 65, [*range(64), 65], [*range(64), -1], [*range(64), "A"]):
        with pytest.raises(WireError, match="malformed"):
            schemas.decode(json.dumps({**doc, "shape": column}).encode())
