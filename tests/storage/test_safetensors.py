from __future__ import annotations

import json
import os
import subprocess
import sys

import psutil
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensordict.errors import EntryTypeError, FileFormatError
from tensordict.storage.safetensors import load_tensors, read_header, save_tensors


def write(path, header, data=b"", n=None):
    """A file made byte by byte, without the code under test."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if n is None else n
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    return path


def info(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def some_tensors():
    return {
        "w": torch.randn(3, 4),
        "n.b": torch.randn(4).to(torch.bfloat16),
        "i": torch.arange(3),
        "empty": torch.zeros(0, 7),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "mask": torch.tensor([True, False]),
        "f8": torch.ones(5).to(torch.float8_e4m3fn),
        "f4": torch.arange(8, dtype=torch.uint8).view(2, 4).view(torch.float4_e2m1fn_x2),
        "z": torch.randn(2, dtype=torch.complex64),
    }


def same_bits(a, b):
    return a.dtype is b.dtype and a.shape == b.shape and raw(a) == raw(b)


def raw(x):
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_header_of_a_file_of_the_library(tmp_path):
    tensors = some_tensors()
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt", "who": "ü"})
    header = read_header(path)
    assert header.metadata == {"format": "pt", "who": "ü"}
    assert header.file_nbytes == path.stat().st_size
    assert {e.name for e in header.entries} == set(tensors)
    blob = path.read_bytes()
    for e in header.entries:
        x = tensors[e.name]
        assert (e.dtype, torch.Size(e.shape), e.nbytes) == (x.dtype, x.shape, x.nbytes)
        assert blob[e.start : e.stop] == raw(x)
    meta = header.meta_tensors()
    assert all(m.is_meta and m.shape == tensors[k].shape for k, m in meta.items())
    for name, x in header.stand_ins().items():
        assert (x.dtype, x.shape, x.device.type) == (
            tensors[name].dtype,
            tensors[name].shape,
            "cpu",
        )
        assert x.untyped_storage().nbytes() == x.dtype.itemsize


def test_load_is_lazy_views_of_one_map(tmp_path):
    tensors = some_tensors()
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(tensors, path)
    back = load_tensors(path)
    assert set(back) == set(tensors) and all(same_bits(back[k], tensors[k]) for k in tensors)
    header = read_header(path)
    at = {e.name: e.start for e in header.entries}
    # One map: addresses differ exactly as the offsets in the file do.
    assert back["w"].data_ptr() - back["i"].data_ptr() == at["w"] - at["i"]
    before = path.read_bytes()
    back["w"].zero_()
    assert path.read_bytes() == before


def test_a_large_file_is_not_read_by_loading_it(tmp_path):
    path = tmp_path / "x.safetensors"
    nbytes = 1 << 31
    write(path, {"w": info("U8", (nbytes,), (0, nbytes))})
    os.truncate(path, path.stat().st_size + nbytes)
    before = psutil.Process().memory_info().rss
    w = load_tensors(path)["w"]
    assert w.shape == (nbytes,) and w[nbytes - 1] == 0
    assert psutil.Process().memory_info().rss - before < nbytes // 8


def test_save_is_readable_by_the_library(tmp_path):
    base = torch.randn(4, 6)
    tensors = {
        **some_tensors(),
        "t": base.t(),
        "same": base,
        "tie": base,
        "overlap": base[1:],
        "expanded": torch.ones(1).expand(5),
        "grad": torch.randn(2, requires_grad=True),
    }
    path = tmp_path / "x.safetensors"
    save_tensors(tensors, path, metadata={"a": "b"})
    back = safetensors.torch.load_file(path)
    assert set(back) == set(tensors)
    assert all(same_bits(back[k], tensors[k].detach()) for k in tensors)
    assert read_header(path).metadata == {"a": "b"}
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_saving_views_of_one_buffer_copies_nothing(tmp_path, monkeypatch):
    buf = torch.randn(1000)
    parts = dict(zip("abcd", buf.split(250)))
    seen = {}
    real = safetensors.torch.save_file

    def spy(tensors, *args, **kwargs):
        seen.update({k: v.data_ptr() for k, v in tensors.items()})
        return real(tensors, *args, **kwargs)

    monkeypatch.setattr(safetensors.torch, "save_file", spy)
    save_tensors(parts, tmp_path / "x.safetensors")
    assert seen == {k: v.data_ptr() for k, v in parts.items()}


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(2).to_sparse(), "sparse"),
    ],
    ids=["dtype", "meta", "sparse"],
)
def test_what_the_format_cannot_hold_is_refused_before_writing(tmp_path, x, why):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(EntryTypeError, match=f"'bad'.*{why}"):
        save_tensors({"a": torch.zeros(1), "bad": x}, path)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x.safetensors"]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")

    def fail(tensors, part, metadata):
        part.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_tensors({"a": torch.zeros(1)}, path)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x.safetensors"]


HUGE = 2**62
LIES = {
    "claims more than the file": (
        {"header": {"a": info()}, "data": b"8bytes!!", "n": 1 << 20},
        "claims",
    ),
    "claims more than allowed": ({"header": b"{}", "n": 1 << 60}, "100000000 are allowed"),
    "no brace": ({"header": b" {}"}, "begin with"),
    "not UTF-8": ({"header": b'{"\xff":1}'}, "UTF-8"),
    "not JSON": ({"header": b"{nope}"}, "JSON"),
    "trailing JSON": ({"header": b"{}{}"}, "JSON"),
    "deep": ({"header": b'{"a":' + b"[" * 200_000}, "deeply"),
    "endless number": ({"header": b'{"a":' + b"1" * 5000 + b"}"}, "JSON"),
    "NaN": ({"header": b'{"a":NaN}'}, "NaN"),
    "twice": ({"header": b'{"a":1,"a":2}'}, "'a'.*twice"),
    "twice inside": ({"header": b'{"a":{"dtype":"F32","dtype":"F16"}}'}, "'dtype'.*twice"),
    "metadata list": ({"header": {"__metadata__": []}}, "__metadata__"),
    "metadata number": ({"header": {"__metadata__": {"a": 1}}}, "__metadata__"),
    "entry is a list": ({"header": {"a": []}}, "'a' has no dtype"),
    "no dtype": ({"header": {"a": {"shape": [], "data_offsets": [0, 0]}}}, "dtype 'None'"),
    "bad dtype": ({"header": {"a": info("F33")}, "data": bytes(8)}, "F33"),
    "dtype is a list": ({"header": {"a": info(["F32"])}, "data": bytes(8)}, "dtype"),
    "negative size": ({"header": {"a": info(shape=(-2,))}, "data": bytes(8)}, "shape"),
    "size is true": ({"header": {"a": info(shape=(True, 2))}, "data": bytes(8)}, "shape"),
    "size is a float": ({"header": {"a": info(shape=(2.0,))}, "data": bytes(8)}, "shape"),
    "shape is text": ({"header": {"a": {**info(), "shape": "22"}}, "data": bytes(8)}, "shape"),
    "backwards": ({"header": {"a": info(offsets=(8, 0))}, "data": bytes(8)}, "no range"),
    "negative offset": ({"header": {"a": info(offsets=(-8, 0))}, "data": bytes(8)}, "no range"),
    "three offsets": ({"header": {"a": info(offsets=(0, 4, 8))}, "data": bytes(8)}, "no range"),
    "too few bytes": (
        {"header": {"a": info(offsets=(0, 4))}, "data": bytes(4)},
        "has 4 bytes.*need 8",
    ),
    "overflow": ({"header": {"a": info(shape=(HUGE, HUGE))}, "data": bytes(8)}, "counted"),
    "empty overflow": (
        {"header": {"a": info(shape=(0, HUGE, HUGE), offsets=(0, 0))}},
        "counted",
    ),
    "beyond the file": ({"header": {"a": info()}, "data": bytes(7)}, "cut short"),
    "trailing bytes": ({"header": {"a": info()}, "data": bytes(9)}, "1 of its last bytes"),
    "hole": (
        {"header": {"a": info(), "b": info(offsets=(9, 17))}, "data": bytes(17)},
        "'b' begins at byte 9.*hole",
    ),
    "overlap": (
        {"header": {"a": info(), "b": info(offsets=(4, 12))}, "data": bytes(12)},
        "'b' begins at byte 4.*overlaps",
    ),
    "same bytes twice": (
        {"header": {"a": info(), "b": info()}, "data": bytes(8)},
        "'b' begins at byte 0.*overlaps",
    ),
    "odd f4": ({"header": {"a": info("F4", (3,), (0, 2))}, "data": bytes(2)}, "multiple of 2"),
    "f4 scalar": ({"header": {"a": info("F4", (), (0, 1))}, "data": bytes(1)}, "multiple of 2"),
}


@pytest.mark.parametrize("lie", LIES)
def test_every_lie_of_a_header_is_named(tmp_path, lie):
    made, why = LIES[lie]
    path = write(tmp_path / "x.safetensors", **made)
    with pytest.raises(FileFormatError, match=why) as caught:
        read_header(path)
    text = str(caught.value)
    assert text.startswith(f"Cannot read {path} as a safetensors file: ")
    assert "\n" not in text and len(text) < 500


@pytest.mark.parametrize(
    ("blob", "why"),
    [
        (b"", "0 bytes"),
        (b"1234567", "7 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs"),
        (b"PK\x03\x04" + bytes(100), "zip"),
    ],
)
def test_files_of_another_kind(tmp_path, blob, why):
    path = tmp_path / "x.safetensors"
    path.write_bytes(blob)
    with pytest.raises(FileFormatError, match=why):
        read_header(path)


def test_files_that_are_not_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "none")
    with pytest.raises(FileFormatError, match="regular"):
        read_header(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    # In a process of its own: a wrong answer would be to wait for a writer.
    code = (
        "import sys; from tensordict.storage.safetensors import read_header\n"
        "try: read_header(sys.argv[1])\n"
        "except ValueError as e: assert 'regular' in str(e); print('refused')"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "pipe")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert out.stdout == "refused\n", out.stderr


def test_a_large_hostile_header_is_refused_in_linear_time(tmp_path):
    # 200,000 keys, the last of which stands twice: a quadratic search would take hours.
    keys = [f'"{i}":0' for i in range(200_000)] + ['"199999":0']
    path = write(tmp_path / "x.safetensors", ("{" + ",".join(keys) + "}").encode())
    with pytest.raises(FileFormatError, match="'199999' stands twice"):
        read_header(path)


def test_hostile_names_stay_on_one_short_line(tmp_path):
    name = "x\n\x1b[2J" * 1000
    path = write(tmp_path / "x.safetensors", {name: info("F33")}, bytes(8))
    with pytest.raises(FileFormatError) as caught:
        read_header(path)
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_tensors_need_not_stand_in_the_order_of_their_bytes(tmp_path):
    header = {"b": info(offsets=(8, 16)), "a": info(), "e": info(shape=(0,), offsets=(8, 8))}
    path = write(tmp_path / "x.safetensors", header, bytes(16))
    assert [e.name for e in read_header(path).entries] == ["a", "e", "b"]
    assert list(load_tensors(path)) == ["a", "e", "b"]


def test_no_tensors(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors({}, path)
    assert load_tensors(path) == {} and read_header(path).entries == ()


GOOD = {"a": info(), "b": info("I8", (3,), (8, 11)), "__metadata__": {"k": "v"}}


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_mutated_file_is_refused_or_read_as_the_library_reads_it(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    blob = bytearray(write(path, GOOD, bytes(11)).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(blob) - 1))
        how = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if how == "set":
            blob[at] = data.draw(st.integers(0, 255))
        elif how == "cut":
            del blob[at : at + data.draw(st.integers(1, 4))]
        else:
            blob[at:at] = data.draw(st.binary(min_size=1, max_size=4))
        if not blob:
            break
    path.write_bytes(blob)
    try:
        header = read_header(path)
    except FileFormatError:
        return
    found = safetensors.torch.load(bytes(blob))
    assert {e.name: (e.dtype, torch.Size(e.shape)) for e in header.entries} == {
        k: (v.dtype, v.shape) for k, v in found.items()
    }
