from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensordict.errors import EntryTypeError
from tensordict.storage.buffer import (
    ACCELERATOR_ALIGNMENT,
    BufferLayout,
    fill,
    layout_from,
    layout_of,
    new_buffer,
    pack,
    views,
    why_not_bytes,
)

from ._counting import CountCopies

DTYPES = sorted(
    {
        d
        for d in vars(torch).values()
        if isinstance(d, torch.dtype) and "quint" not in str(d) and "qint" not in str(d)
    },
    key=str,
)


def random_bytes(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    n = int(torch.Size(shape).numel()) * dtype.itemsize
    g = torch.Generator().manual_seed(seed)
    # Only 0 and 1 are bools.
    top = 2 if dtype is torch.bool else 256
    return torch.randint(0, top, (n,), dtype=torch.uint8, generator=g).view(dtype).view(shape)


def raw(x: torch.Tensor) -> bytes:
    """The bytes of a tensor in row-major order, made without any buffer code."""
    shell = x.contiguous() if not x.is_contiguous() else x
    return shell.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(dtype):
    leaves = [random_bytes(dtype, (3, 5), 1), torch.ones(3), random_bytes(dtype, (), 2)]
    layout = layout_of(leaves)
    back = views(pack(leaves, layout), layout)
    assert [raw(x) for x in back] == [raw(x) for x in leaves]
    assert [(x.dtype, x.shape) for x in back] == [(x.dtype, x.shape) for x in leaves]


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=12),
    st.sampled_from([1, 2, 8, 64, 256]),
    st.integers(0, 300),
)
def test_leaves_never_overlap_and_round_trip(columns, alignment, slack):
    leaves = [random_bytes(d, s, i) for i, (d, s) in enumerate(columns)]
    layout = layout_of(leaves, alignment)
    at = 0
    for x, offset, size in zip(leaves, layout.offsets, layout.nbytes):
        assert offset >= at and offset % alignment == 0 and offset % x.dtype.itemsize == 0
        assert size == x.numel() * x.dtype.itemsize
        at = offset + size
    assert at <= layout.total_nbytes and layout.total_nbytes % alignment == 0
    assert layout.padding_nbytes == sum(stop - start for start, stop in layout.gaps())
    buf = torch.full((layout.total_nbytes + slack,), 7, dtype=torch.uint8)
    assert pack(leaves, layout, buf) is buf
    assert [raw(x) for x in views(buf, layout)] == [raw(x) for x in leaves]
    for start, stop in layout.gaps():
        assert (buf[start:stop] == 7).all()
    assert (buf[layout.total_nbytes :] == 7).all()


def test_layout_is_a_function_of_its_columns():
    columns = [torch.float32, torch.int8, torch.complex128], [(3,), (7,), (2,)]
    one, two = layout_from(*columns), layout_from(*columns)
    assert one == two and hash(one) == hash(two) and isinstance(one, BufferLayout)
    assert one.offsets == (0, 64, 128) and one.total_nbytes == 192
    assert layout_from(*columns, ACCELERATOR_ALIGNMENT).offsets == (0, 256, 512)
    # A complex number needs its 16 bytes whatever the alignment asked for.
    assert layout_from(*columns, 1).offsets == (0, 12, 32)


def test_views_share_the_buffer_also_inside_a_larger_storage():
    layout = layout_from([torch.int32, torch.float64], [(2, 3), (0, 2)])
    storage = torch.zeros(64 + layout.total_nbytes, dtype=torch.uint8)
    a, _ = views(storage[64:], layout)
    a.fill_(-1)
    assert (storage[:64] == 0).all() and (storage[64:88] == 255).all()
    assert a.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "leaf",
    [
        torch.arange(24.0).view(4, 6).t(),
        torch.arange(24.0).view(4, 6)[:, ::2],
        torch.ones(1).expand(5),
        torch.randn(3, dtype=torch.cfloat).conj(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(3, requires_grad=True),
    ],
    ids=["transposed", "strided", "expanded", "conjugated", "channels_last", "requires_grad"],
)
def test_any_strides_pack_to_the_same_values(leaf):
    layout = layout_of([leaf])
    back = views(pack([leaf], layout), layout)[0]
    assert torch.equal(back, leaf) and back.is_contiguous() and not back.requires_grad


@pytest.mark.parametrize("size", [3, 200_001], ids=["small", "large"])
def test_bytes_between_leaves_are_zero(size):
    # What torch.empty would hand out here is memory full of 0xFF.
    for _ in range(3):
        del_me = torch.full((size * 2 + 128,), 255, dtype=torch.uint8)
        del del_me
        layout = layout_from([torch.int8, torch.int8], [(size,), (size,)])
        buf = new_buffer(layout)
        assert layout.padding_nbytes > 0
        assert all((buf[start:stop] == 0).all() for start, stop in layout.gaps())


def test_packing_is_one_call_into_torch():
    leaves = [torch.ones(3) for _ in range(50)] + [torch.ones(3, dtype=torch.int8)] * 50
    layout = layout_of(leaves)
    with CountCopies() as seen:
        pack(leaves, layout)
    assert seen.calls == ["aten::_foreach_copy_"]


def test_no_leaves():
    layout = layout_of([])
    buf = pack([], layout)
    assert layout.total_nbytes == 0 and buf.numel() == 0 and views(buf, layout) == []
    fill([], [])


def test_meta_buffers_have_no_data():
    layout = layout_from([torch.float32] * 2, [(1 << 40,), (3,)])
    buf = new_buffer(layout, "meta")
    assert buf.is_meta and views(buf, layout)[0].shape == (1 << 40,)


@pytest.mark.parametrize("alignment", [0, -8, 3, 48])
def test_bad_alignments_are_refused(alignment):
    with pytest.raises(ValueError, match="power of two"):
        layout_from([torch.int8], [(1,)], alignment)


def test_bad_columns_and_buffers_are_refused():
    with pytest.raises(ValueError, match="negative"):
        layout_from([torch.int8], [(3, -1)])
    with pytest.raises(ValueError, match="1 dtypes and 2 shapes"):
        layout_from([torch.int8], [(), ()])
    with pytest.raises(EntryTypeError, match="Dequantize"):
        layout_from([torch.qint8], [(3,)])
    layout = layout_from([torch.float32], [(3,)])
    with pytest.raises(ValueError, match="at least 64"):
        views(torch.zeros(63, dtype=torch.uint8), layout)
    with pytest.raises(ValueError, match="contiguous one-dimensional uint8"):
        views(torch.zeros(64), layout)
    with pytest.raises(ValueError, match="contiguous one-dimensional uint8"):
        views(torch.zeros(128, dtype=torch.uint8)[::2], layout)
    with pytest.raises(ValueError, match="2 leaves into a layout of 1"):
        pack([torch.zeros(3)] * 2, layout)


def test_why_not_bytes_names_the_kind():
    quantized = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)
    assert why_not_bytes(torch.zeros(2)) == ""
    assert "sparse_coo" in why_not_bytes(torch.zeros(2).to_sparse())
    assert "qint8" in why_not_bytes(quantized)
    assert "nested" in why_not_bytes(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]))
    assert "jagged" in why_not_bytes(
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    )
