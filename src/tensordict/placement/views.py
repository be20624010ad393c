"""How the tensors of one side are made of those of the other: fused, split, padded, transposed.

A `View` is an expression over names of source tensors.  It is resolved into `Block` records: which
box of the result is which box of which source.  Nothing is copied to build one; the planner sends
each slice from where it lies to where it belongs.

>>> fused = concat(["gate", "up"]).resolve({"gate": (4, 8), "up": (4, 8)})
>>> fused.shape, [(block.source, block.start) for block in fused.blocks]
((8, 8), [('gate', (0, 0)), ('up', (4, 0))])
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ..errors import LayoutError

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A box of a result, and what fills it.

    Attributes:
        start: Where the box begins in the result.
        stop: Where it ends.
        source: The source tensor, ``None`` for a constant.
        offset: Where the box begins in the source.
        dims: For each dimension of the source the dimension of the result that runs along it, or
            -1 where the box has a single index of the source.
        fill: The constant.
    """

    start: Shape
    stop: Shape
    source: str | None
    offset: Shape = ()
    dims: Shape = ()
    fill: float = 0.0

    def shifted(self, dim: int, by: int) -> Block:
        """The same block at another place of the result."""
        start, stop = list(self.start), list(self.stop)
        start[dim] += by
        stop[dim] += by
        return replace(self, start=tuple(start), stop=tuple(stop))

    def clipped(self, dim: int, low: int, high: int) -> Block | None:
        """The part within ``low`` to ``high`` of a dimension of the result."""
        new_low, new_high = max(self.start[dim], low), min(self.stop[dim], high)
        if new_low >= new_high:
            return None
        start, stop, offset = list(self.start), list(self.stop), list(self.offset)
        for i, at in enumerate(self.dims):
            if at == dim:
                offset[i] += new_low - start[dim]
        start[dim], stop[dim] = new_low, new_high
        return replace(self, start=tuple(start), stop=tuple(stop), offset=tuple(offset))

    def moved(self, to: Sequence[int], start: Shape, stop: Shape) -> Block:
        """The block after its result dimensions ``i`` became ``to[i]``."""
        dims = tuple(-1 if at < 0 else to[at] for at in self.dims)
        return replace(self, start=start, stop=stop, dims=dims)

    def to_json(self) -> list[Any]:
        """All fields, in order."""
        return [
            list(self.start),
            list(self.stop),
            self.source,
            list(self.offset),
            list(self.dims),
            self.fill,
        ]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A view on tensors of known shapes: its own shape and its blocks."""

    shape: Shape
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, source: str, shape: Shape) -> Resolved:
        """A whole tensor."""
        dims = tuple(range(len(shape)))
        return cls(shape, (Block((0,) * len(shape), shape, source, (0,) * len(shape), dims),))

    def narrow(self, dim: int, start: int, length: int) -> Resolved:
        """A stretch of one dimension."""
        if start < 0 or length < 0 or start + length > self.shape[dim]:
            raise LayoutError(
                f"Cannot take {length} from {start} on in dimension {dim} of {self.shape}."
            )
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        cut = (block.clipped(dim, start, start + length) for block in self.blocks)
        return Resolved(shape, tuple(block.shifted(dim, -start) for block in cut if block))

    def permute(self, order: Sequence[int]) -> Resolved:
        """Dimension ``order[i]`` becomes dimension ``i``."""
        to = [0] * len(order)
        for new, old in enumerate(order):
            to[old] = new

        def turned(values: Shape) -> Shape:
            return tuple(values[old] for old in order)

        blocks = [b.moved(to, turned(b.start), turned(b.stop)) for b in self.blocks]
        return Resolved(turned(self.shape), tuple(blocks))

    def unsqueeze(self, dim: int) -> Resolved:
        """A new dimension of one element."""
        to = [at + (at >= dim) for at in range(len(self.shape))]

        def longer(values: Shape, extra: int) -> Shape:
            return (*values[:dim], extra, *values[dim:])

        blocks = [b.moved(to, longer(b.start, 0), longer(b.stop, 1)) for b in self.blocks]
        return Resolved(longer(self.shape, 1), tuple(blocks))

    def squeeze(self, dim: int) -> Resolved:
        """Without a dimension of one element."""
        to = [-1 if at == dim else at - (at > dim) for at in range(len(self.shape))]

        def shorter(values: Shape) -> Shape:
            return (*values[:dim], *values[dim + 1 :])

        blocks = [b.moved(to, shorter(b.start), shorter(b.stop)) for b in self.blocks]
        return Resolved(shorter(self.shape), tuple(blocks))


def _joined(parts: Sequence[Resolved], dim: int) -> Resolved:
    """Concatenated along a dimension."""
    others = {(*p.shape[:dim], 0, *p.shape[dim + 1 :]) for p in parts}
    if len(others) > 1:
        shapes = [p.shape for p in parts]
        raise LayoutError(f"Cannot concatenate shapes {shapes} along dimension {dim}.")
    blocks: list[Block] = []
    offset = 0
    for part in parts:
        blocks += [block.shifted(dim, offset) for block in part.blocks]
        offset += part.shape[dim]
    first = parts[0].shape
    return Resolved((*first[:dim], offset, *first[dim + 1 :]), tuple(blocks))


@dataclass(frozen=True, slots=True)
class View:
    """An expression over source tensors, made by the functions of this module.

    Names may hold fields in braces, as in ``"layers.{i}.q.weight"``: they stand for one part of a
    dotted name and are filled in from the name of the result.

    Attributes:
        op: The operation.
        parts: What it acts on.
        args: Its numbers.
        name: The name of the tensor, for a leaf.
    """

    op: str
    parts: tuple[View, ...] = ()
    args: tuple[Any, ...] = ()
    name: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The source tensors, each once."""
        if self.op == "leaf":
            return (self.name,)
        return tuple(dict.fromkeys(name for part in self.parts for name in part.names))

    def bind(self, fields: Mapping[str, str]) -> View:
        """The view with the fields in its names filled in."""
        if self.op == "leaf":
            return replace(self, name=filled(self.name, fields))
        return replace(self, parts=tuple(part.bind(fields) for part in self.parts))

    def resolve(self, shapes: Mapping[str, Sequence[int]]) -> Resolved:
        """Blocks for tensors of these shapes.

        Raises:
            LayoutError: when a tensor is missing or the shapes do not fit.
        """
        if self.op == "leaf":
            if self.name not in shapes:
                raise LayoutError(f"Cannot make a view of {self.name!r}: it is not at the source.")
            return Resolved.of(self.name, tuple(map(int, shapes[self.name])))
        return _RESOLVE[self.op](*(part.resolve(shapes) for part in self.parts), args=self.args)

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads."""
        if self.op == "leaf":
            return {"leaf": self.name}
        return {
            "op": self.op,
            "parts": [part.to_json() for part in self.parts],
            "args": [list(arg) if isinstance(arg, tuple) else arg for arg in self.args],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> View:
        """The view of a `to_json` value.

        >>> view = pad(concat(["a", "b"]), size=8)
        >>> View.from_json(view.to_json()) == view
        True
        """
        if "leaf" in data:
            return cls("leaf", name=str(data["leaf"]))
        if data["op"] not in _RESOLVE:
            raise LayoutError(f"Cannot read a view: unknown operation {data['op']!r}.")
        args = tuple(tuple(arg) if isinstance(arg, list) else arg for arg in data["args"])
        return cls(str(data["op"]), tuple(cls.from_json(part) for part in data["parts"]), args)


ViewLike: TypeAlias = View | str


def leaf(name: ViewLike) -> View:
    """A whole source tensor; a view is returned as it is."""
    return name if isinstance(name, View) else View("leaf", name=name)


def _node(op: str, parts: Sequence[ViewLike], *args: Any) -> View:
    if not parts:
        raise LayoutError(f"Cannot {op} nothing: expected one tensor or more.")
    return View(op, tuple(leaf(part) for part in parts), args)


def concat(parts: Sequence[ViewLike], dim: int = 0) -> View:
    """Tensors one after the other: ``gate_up`` of ``gate`` and ``up``."""
    return _node("concat", parts, dim)


def narrow(part: ViewLike, start: int, length: int, dim: int = 0) -> View:
    """A stretch of one dimension."""
    return _node("narrow", [part], start, length, dim)


def piece(part: ViewLike, index: int, count: int, dim: int = 0) -> View:
    """Piece ``index`` of ``count`` equal ones: ``gate`` of ``gate_up``.

    >>> piece("gate_up", 1, 2).resolve({"gate_up": (8, 3)}).blocks[0].offset
    (4, 0)
    """
    return _node("piece", [part], index, count, dim)


def transpose(part: ViewLike, dim0: int = 0, dim1: int = 1) -> View:
    """Two dimensions exchanged."""
    return _node("transpose", [part], dim0, dim1)


def stack(parts: Sequence[ViewLike], dim: int = 0) -> View:
    """Tensors along a new dimension: stacked experts of one tensor each."""
    return _node("stack", parts, dim)


def select(part: ViewLike, index: int, dim: int = 0) -> View:
    """One index of a dimension, without it: an expert of stacked ones."""
    return _node("select", [part], index, dim)


def pad(part: ViewLike, size: int, dim: int = 0, fill: float = 0.0) -> View:
    """Filled up to ``size`` with a constant: a vocabulary padded to a round number."""
    return _node("pad", [part], size, dim, float(fill))


def interleave(parts: Sequence[ViewLike], groups: int, dim: int = 0) -> View:
    """Each tensor cut in ``groups``, and for each group the pieces of all of them in turn.

    The fused ``qkv`` of grouped attention, whose heads are stored as ``q q k v`` for each group.

    >>> shapes = {"q": (8,), "k": (4,), "v": (4,)}
    >>> [block.source for block in interleave(["q", "k", "v"], 2).resolve(shapes).blocks]
    ['q', 'k', 'v', 'q', 'k', 'v']
    """
    return _node("interleave", parts, groups, dim)


def deinterleave(
    part: ViewLike, index: int, sizes: Sequence[int], groups: int, dim: int = 0
) -> View:
    """Tensor ``index`` of those that `interleave` joined; ``sizes`` are their whole lengths.

    >>> view = deinterleave("qkv", 1, [8, 4, 4], 2).resolve({"qkv": (16,)})
    >>> [(block.start, block.offset) for block in view.blocks]
    [((0,), (4,)), ((2,), (12,))]
    """
    return _node("deinterleave", [part], index, tuple(sizes), groups, dim)


def repeat(part: ViewLike, groups: int, times: int, dim: int = 0) -> View:
    """Each of ``groups`` equal pieces ``times`` over: key and value heads held more than once.

    >>> [b.offset for b in repeat("k", 2, 2).resolve({"k": (4,)}).blocks]
    [(0,), (0,), (2,), (2,)]
    """
    return _node("repeat", [part], groups, times, dim)


def _dim(dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise LayoutError(f"Cannot make a view: there is no dimension {dim} of {ndim}.")
    return dim % ndim


def _pieces(part: Resolved, count: int, dim: int) -> list[Resolved]:
    size = part.shape[dim]
    if count < 1 or size % count:
        raise LayoutError(f"Cannot cut {size} indices of dimension {dim} into {count} pieces.")
    each = size // count
    return [part.narrow(dim, i * each, each) for i in range(count)]


def _concat(*parts: Resolved, args: Any) -> Resolved:
    return _joined(parts, _dim(args[0], len(parts[0].shape)))


def _narrow(part: Resolved, args: Any) -> Resolved:
    start, length, dim = args
    return part.narrow(_dim(dim, len(part.shape)), start, length)


def _piece(part: Resolved, args: Any) -> Resolved:
    index, count, dim = args
    if not 0 <= index < count:
        raise LayoutError(f"Cannot take piece {index} of {count}.")
    return _pieces(part, count, _dim(dim, len(part.shape)))[index]


def _transpose(part: Resolved, args: Any) -> Resolved:
    ndim = len(part.shape)
    a, b = (_dim(dim, ndim) for dim in args)
    order = list(range(ndim))
    order[a], order[b] = b, a
    return part.permute(order)


def _stack(*parts: Resolved, args: Any) -> Resolved:
    dim = _dim(args[0], len(parts[0].shape) + 1)
    return _joined([part.unsqueeze(dim) for part in parts], dim)


def _select(part: Resolved, args: Any) -> Resolved:
    index, dim = args
    dim = _dim(dim, len(part.shape))
    return part.narrow(dim, index, 1).squeeze(dim)


def _pad(part: Resolved, args: Any) -> Resolved:
    size, dim, fill = args
    dim = _dim(dim, len(part.shape))
    extra = size - part.shape[dim]
    if extra < 0:
        raise LayoutError(f"Cannot pad {part.shape[dim]} indices of dimension {dim} to {size}.")
    if not extra:
        return part
    shape = (*part.shape[:dim], extra, *part.shape[dim + 1 :])
    constant = Block((0,) * len(shape), shape, None, fill=fill)
    return _joined([part, Resolved(shape, (constant,))], dim)


def _interleave(*parts: Resolved, args: Any) -> Resolved:
    groups, dim = args
    dim = _dim(dim, len(parts[0].shape))
    cut = [_pieces(part, groups, dim) for part in parts]
    return _joined([pieces[g] for g in range(groups) for pieces in cut], dim)


def _deinterleave(part: Resolved, args: Any) -> Resolved:
    index, sizes, groups, dim = args
    dim = _dim(dim, len(part.shape))
    fits = part.shape[dim] == sum(sizes) and not any(size % groups for size in sizes)
    if not fits or not 0 <= index < len(sizes):
        raise LayoutError(
            f"Cannot take a tensor out of {part.shape[dim]} indices of dimension {dim}: expected "
            f"sizes that sum to that and divide by {groups} groups, got {list(sizes)}."
        )
    before = sum(sizes[:index]) // groups
    each = sizes[index] // groups
    return _joined([group.narrow(dim, before, each) for group in _pieces(part, groups, dim)], dim)


def _repeat(part: Resolved, args: Any) -> Resolved:
    groups, times, dim = args
    dim = _dim(dim, len(part.shape))
    return _joined([p for p in _pieces(part, groups, dim) for _ in range(times)], dim)


_RESOLVE: dict[str, Any] = {
    "concat": _concat,
    "narrow": _narrow,
    "piece": _piece,
    "transpose": _transpose,
    "stack": _stack,
    "select": _select,
    "pad": _pad,
    "interleave": _interleave,
    "deinterleave": _deinterleave,
    "repeat": _repeat,
}


def filled(name: str, fields: Mapping[str, str]) -> str:
    """A name with its fields filled in.

    >>> filled("layers.{i}.q", {"i": "12"})
    'layers.12.q'
    """
    try:
        return name.format(**fields)
    except (LookupError, ValueError) as error:
        raise LayoutError(
            f"Cannot fill in {name!r}: {error} is none of the fields {sorted(fields)}."
        ) from None


def template(name: str) -> re.Pattern[str]:
    """A pattern that matches the names a text with fields in braces stands for.

    >>> template("layers.{i}.q").fullmatch("layers.12.q").groupdict()
    {'i': '12'}
    """
    out: list[str] = []
    seen: set[str] = set()
    for part in re.split(r"(\{\w+\})", name):
        if not re.fullmatch(r"\{\w+\}", part):
            out.append(re.escape(part))
        elif part in seen:
            out.append(f"(?P={part[1:-1]})")
        else:
            seen.add(part)
            out.append(f"(?P<{part[1:-1]}>[^.]+)")
    return re.compile("".join(out))
