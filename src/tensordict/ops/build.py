"""Rows of the op table made into methods, operators and torch functions."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._keys import short
from ..core.node import Node
from ..core.torch_function import implements, implements_operator
from ..core.traverse import (
    leaves,
    leaves_like,
    leaves_with_path,
    put_together,
    snapshot,
    taken_apart,
)
from ..errors import BatchSizeError, EntryTypeError, ShapeError, table_of
from .compare import comparison
from .inplace import write_each
from .operands import (
    accepts,
    at_hand,
    groups,
    inplace_pair,
    joined,
    keeps_batch,
    matched,
    number_list,
    pair,
    run_grouped,
    same_keys,
)
from .reductions import reduction, scan
from .table import (
    Binary,
    Comparison,
    Defaults,
    Reduction,
    Row,
    Scan,
    Ternary,
    Unary,
    defaults,
    extra,
)

Method = Callable[..., Any]
ToList: TypeAlias = Callable[[Any, Sequence[Tensor]], "list[Tensor] | None"]

_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
_OUT = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None)
_DEFAULT = inspect.Parameter("default", inspect.Parameter.KEYWORD_ONLY, default=None)


def install(cls: type, rows: Sequence[Row]) -> None:
    """Give a mixin class the methods of rows, and torch the rules for their functions."""
    for row in rows:
        for name, method in _MAKERS[type(row)](row).items():
            method.__name__ = name
            method.__qualname__ = f"{cls.__name__}.{name}"
            method.__module__ = cls.__module__
            method.__doc__ = method.__doc__ or row.doc
            setattr(cls, name, method)


def _implements_inplace(name: str, method: Method) -> None:
    """The rule for ``torch.name_``, where torch has such a function."""
    function = getattr(torch, f"{name}_", None)
    if function is not None:
        implements(function)(method)


implements(torch.nn.functional.relu)(
    lambda input, inplace=False: input.relu_() if inplace else input.relu()
)


def torch_name(row: Row) -> str:
    """The name of a row's function in ``torch``."""
    return (isinstance(row, Binary) and row.of) or row.name


def foreach(row: Row, inplace: bool = False) -> Callable[..., Any] | None:
    """The foreach function of a row, None when torch has none."""
    return getattr(torch, f"_foreach_{torch_name(row)}{'_' if inplace else ''}", None)


def _documented(method: Method, row: Row, names: Sequence[str], text: str = "") -> Method:
    """Give a method its docstring and the signature that ``*args, **kwargs`` hide."""
    method.__doc__ = text or row.doc
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    empty = None if getattr(row, "optional", False) else inspect.Parameter.empty
    params = [_SELF, *(inspect.Parameter(name, kind, default=empty) for name in names)]
    params += [
        inspect.Parameter(p.name, kind, default=p.default, annotation=p.type)
        for p in getattr(row, "params", ())
    ]
    if isinstance(row, Binary) and not text:
        params.append(_DEFAULT)
    if isinstance(row, Ternary) and not text:
        params.append(_OUT)
    method.__signature__ = inspect.Signature(params)  # type: ignore[attr-defined]
    return method


# --- one operand: the leaf itself -------------------------------------------------------


def _unary(row: Unary) -> dict[str, Method]:
    fn = getattr(torch, row.name)
    each = foreach(row)
    params = defaults(row.params)

    if params:

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if args or kwargs:
                given = extra(params, args, kwargs)
                return self._map(lambda x: fn(x, **given))
            return self._map(fn)

    elif each is None:

        def method(self: Any) -> Any:  # type: ignore[misc]
            return self._map(fn)

    else:

        def method(self: Any) -> Any:  # type: ignore[misc]
            frame, xs = taken_apart(self)
            ys = run_grouped(each, fn, xs) if groups(frame, xs) else map(fn, xs)
            return put_together(self, frame, ys)

    made = {row.name: _documented(method, row, ())}
    if row.dunder:
        made[f"__{row.dunder}__"] = _copy(method)
    implements(fn)(method)
    if row.inplace:
        made[f"{row.name}_"] = _unary_inplace(row)
        _implements_inplace(row.name, made[f"{row.name}_"])
    return made


def _unary_inplace(row: Unary) -> Method:
    fn = getattr(Tensor, f"{row.name}_")
    each = None if row.params else foreach(row, inplace=True)
    params = defaults(row.params)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = extra(params, args, kwargs) if args or kwargs else None
        write_each(self, leaves(self), fn, each, (), given)
        return self

    return _documented(method, row, (), f"In place: {row.doc}")


def _copy(method: Method) -> Method:
    """A method without arguments, to be installed under another name."""

    def same(self: Any) -> Any:
        return method(self)

    same.__doc__ = method.__doc__
    return same


def _alias(method: Method) -> Method:
    """A method of one argument, to be installed under another name."""

    def same(self: Any, other: Any) -> Any:
        return method(self, other)

    return same


# --- two operands -----------------------------------------------------------------------


def _binary(row: Binary) -> dict[str, Method]:
    fn = getattr(torch, torch_name(row))
    each = foreach(row)
    name, params, number = row.name, defaults(row.params), _numbers_of(row)

    def run(self: Any, other: Any, given: dict[str, Any] | None) -> Any:
        node, frame, xs, values = matched(self, other, name)
        if type(values) is not list:
            found = None if number is None or given else number(values, xs)
            if found is not None:
                values = found
            elif each is None or given or not groups(frame, xs):
                values = [values] * len(xs)
        if each is not None and not given and groups(frame, xs):
            out = run_grouped(each, fn, xs, values)
        else:
            kwargs = given or {}
            out = [fn(x, y, **kwargs) for x, y in zip(xs, values)]
        keeps_batch(node, out)
        return put_together(node, frame, out)

    def method(self: Any, other: Any, *args: Any, default: Any = None, **kwargs: Any) -> Any:
        given = extra(params, args, kwargs) if args or kwargs else None
        if default is not None and isinstance(other, Node) and not same_keys(self, other):
            return joined(self, other, lambda x, y: fn(x, y, **(given or {})), default)
        return run(self, other, given)

    def forward(self: Any, other: Any) -> Any:
        return run(self, other, None) if accepts(other) else NotImplemented

    made = {name: _documented(method, row, ("other",))}
    swapped = _swapped(row, fn)
    if row.dunder:
        made[f"__{row.dunder}__"] = forward
        commutes = row.dunder in ("add", "mul", "and", "or", "xor")
        made[f"__r{row.dunder}__"] = _alias(forward) if commutes else swapped
    if row.inplace:
        inplace = made[f"{name}_"] = _binary_inplace(row)
        _implements_inplace(name, inplace)
        if row.dunder:
            made[f"__i{row.dunder}__"] = _inplace_operator(inplace)

    def rule(input: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(input, Node):
            return method(input, other, *args, **kwargs)
        return swapped(other, input, *args, **kwargs)

    def in_place_rule(input: Any, other: Any, **kwargs: Any) -> Any:
        return inplace(input, other, **kwargs) if isinstance(input, Node) else NotImplemented

    implements(fn, getattr(Tensor, torch_name(row), fn))(rule)
    if row.dunder:
        # What ``tensor op td`` and, when traced, ``td op tensor`` are to torch.
        implements_operator(f"__{row.dunder}__", rule)
        implements_operator(f"__r{row.dunder}__", lambda input, other: rule(other, input))
        if row.inplace:
            implements_operator(f"__i{row.dunder}__", in_place_rule)
            implements(getattr(Tensor, f"{torch_name(row)}_"))(in_place_rule)
    return made


def _numbers_of(row: Binary) -> ToList | None:
    """How a number goes to the torch function: as tensors, or (None) as it is."""
    if not row.numbers:
        return _number_tensors
    return None if torch_name(row) in _TAKES_NUMBERS else number_list


# These have kernels of their own for a number.
_TAKES_NUMBERS = frozenset({"pow", "float_power", "clamp_min", "clamp_max"})


def _number_tensors(value: Any, xs: Sequence[Tensor]) -> list[Tensor]:
    return [_number(value, x) for x in xs]


def _number(value: Any, like: Tensor) -> Tensor:
    """A number as the tensor that promotes with ``like`` as the number would."""
    return torch.full((), value, dtype=torch.result_type(like, value), device=like.device)


def _swapped(row: Binary, fn: Callable[..., Tensor]) -> Method:
    """``other op td``, for an ``other`` that is no tensordict."""
    op = getattr(
        operator, row.dunder if row.dunder not in ("and", "or") else f"{row.dunder}_", None
    )
    name, number = row.name, _numbers_of(row) if row.name == "sub" else None
    subtract = torch._foreach_sub if row.name == "sub" else None

    def method(self: Any, other: Any, **kwargs: Any) -> Any:
        if not accepts(other):
            return NotImplemented
        node, frame, xs, values = matched(self, other, name)
        found = values if type(values) is list else None
        if found is None and number is not None and not kwargs:
            found = number(values, xs)
        ys: list[Any] = [values] * len(xs) if found is None else found
        out: Sequence[Tensor]
        if kwargs or op is None:
            if found is None:
                ys = _number_tensors(values, xs)
            out = [fn(y, x, **kwargs) for x, y in zip(xs, ys)]
        elif subtract is not None and found is not None and groups(frame, xs):
            out = run_grouped(subtract, op, found, xs)
        else:
            out = [op(y, x) for x, y in zip(xs, ys)]
        keeps_batch(node, out)
        return put_together(node, frame, out)

    method.__doc__ = row.doc
    return method


def _binary_inplace(row: Binary) -> Method:
    fn = _INPLACE.get(row.name) or getattr(Tensor, f"{torch_name(row)}_")
    each = foreach(row, inplace=True)
    name, number, params = row.name, _numbers_of(row), defaults(row.params)
    divides = torch_name(row) in ("floor_divide", "fmod", "remainder")
    out_of_place = getattr(torch, torch_name(row))

    def method(self: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        given = extra(params, args, kwargs) if args or kwargs else None
        xs, values = inplace_pair(self, other, name)
        if type(values) is not list and number is not None:
            values = number(values, xs) or values
        if divides or (given and "rounding_mode" in given):
            _divisible(xs, values, out_of_place, given)
        write_each(self, xs, fn, None if given else each, (values,), given)
        return self

    return _documented(method, row, ("other",), f"In place: {row.doc}")


def _divisible(xs: Sequence[Tensor], values: Any, fn: Callable[..., Tensor], given: Any) -> None:
    """Divide the integer leaves once for nothing: a zero in a later leaf must not come too late."""
    for i, x in enumerate(xs):
        if not x.is_floating_point():
            fn(x, values[i] if type(values) is list else values, **(given or {}))


# torch has no method of the name, only the foreach form.
_INPLACE: dict[str, Callable[..., Any]] = {
    "maximum": Tensor.clamp_min_,
    "minimum": Tensor.clamp_max_,
}


def _inplace_operator(inplace: Method) -> Method:
    def method(self: Any, other: Any) -> Any:
        return inplace(self, other) if accepts(other) else NotImplemented

    method.__doc__ = inplace.__doc__
    return method


# --- three operands ---------------------------------------------------------------------


def _ternary(row: Ternary) -> dict[str, Method]:
    fn = getattr(torch, row.name)
    each = foreach(row)
    name, operands, params = row.name, row.operands, defaults(row.params)
    numbers, optional = row.numbers, row.optional

    def method(self: Any, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        a, b, given = _two(name, operands, optional, params, args, kwargs)
        if optional and out is None and _no_tensor(a) and _no_tensor(b):
            return self._map(lambda x: fn(x, a, b))
        node, frame, xs, ys, zs = _matched_two(self, a, b, name)
        ys, zs = _lists(xs, ys, zs, numbers, optional)
        if each is not None and groups(frame, xs):
            results = run_grouped(each, fn, xs, ys, zs, **given)
        else:
            results = [fn(x, y, z, **given) for x, y, z in zip(xs, _each(ys, xs), _each(zs, xs))]
        keeps_batch(node, results)
        result = put_together(node, frame, results)
        return result if out is None else _written(out, result, name)

    made = {row.name: _documented(method, row, row.operands)}
    implements(fn)(method)
    if row.inplace:
        made[f"{row.name}_"] = _ternary_inplace(row)
        _implements_inplace(row.name, made[f"{row.name}_"])
    return made


def _matched_two(node: Any, a: Any, b: Any, name: str) -> tuple[Any, Any, list[Tensor], Any, Any]:
    """`matched` for two operands, of which None is left out."""
    frame, xs = taken_apart(node)
    if type(frame) is dict:
        ys = None if a is None else at_hand(node, frame, a)
        zs = None if b is None else at_hand(node, frame, b)
        if (ys is None) is (a is None) and (zs is None) is (b is None):
            return node, frame, xs, ys, zs
        node = node._like(frame)
    else:
        node = frame
    for other in (a, b):  # one after the other: each may expand the batch
        if other is not None:
            node, _ = pair(node, other, name)
    ys = None if a is None else pair(node, a, name)[1]
    zs = None if b is None else pair(node, b, name)[1]
    return node, node, leaves(node), ys, zs


def _written(out: Any, result: Any, name: str) -> Any:
    """``out`` with a result written into its leaves, or as it was when one does not fit.

    Raises:
        EntryTypeError: ``out`` is no tensordict.
        BatchSizeError: another batch size.
        StructureError: (a ``KeyError``) other keys.
        ShapeError: leaves of other shapes, or of dtypes that torch does not cast to.
    """
    if not isinstance(out, Node):
        raise EntryTypeError(
            f"Cannot {name} into out: expected a tensordict, got a {type(out).__name__}."
        )
    if out._batch_size != result._batch_size:
        raise BatchSizeError(
            f"Cannot {name} into out: expected batch size {list(result._batch_size)}, got "
            f"{list(out._batch_size)}."
        )
    rows = [
        (short(path), f"{y.dtype} {list(y.shape)} into {x.dtype} {list(x.shape)}")
        for (path, y), x in zip(leaves_with_path(result), leaves_like(result, out))
        if x.shape != y.shape or not torch.can_cast(y.dtype, x.dtype)
    ]
    if rows:
        raise ShapeError(table_of(f"Cannot {name} into out: {len(rows)} leaves do not fit.", rows))
    return out.copy_(result)  # type: ignore[attr-defined]


def _ternary_inplace(row: Ternary) -> Method:
    fn = getattr(Tensor, f"{row.name}_")
    each = foreach(row, inplace=True)
    name, operands, params = row.name, row.operands, defaults(row.params)
    numbers, optional = row.numbers, row.optional

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        a, b, given = _two(name, operands, optional, params, args, kwargs)
        node = snapshot(self)
        xs = leaves(node)
        ys = None if a is None else inplace_pair(node, a, name)[1]
        zs = None if b is None else inplace_pair(node, b, name)[1]
        write_each(node, xs, fn, each, _lists(xs, ys, zs, numbers, optional), given)
        return self

    return _documented(method, row, row.operands, f"In place: {row.doc}")


def _two(
    name: str,
    operands: tuple[str, str],
    optional: bool,
    params: Defaults,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> tuple[Any, Any, dict[str, Any]]:
    """The two operands, however they were passed, and the other arguments by name."""
    if len(args) == 2 and not kwargs and args[0] is not None and args[1] is not None:
        return args[0], args[1], kwargs
    given = dict(kwargs)
    found = list(args[:2])
    for operand in operands[len(found) :]:
        if operand not in given and not optional:
            raise TypeError(f"{name}() missing required argument: {operand!r}")
        found.append(given.pop(operand, None))
    a, b = found
    if a is None and b is None:
        raise EntryTypeError(
            f"Cannot {name}: expected {operands[0]!r}, {operands[1]!r} or both, got neither."
        )
    return a, b, extra(params, args[2:], given)


def _lists(
    xs: Sequence[Tensor], ys: Any, zs: Any, numbers: bool, optional: bool
) -> tuple[Any, Any]:
    """Numbers made tensors where the torch function takes none."""
    if optional and type(ys) is not list and type(zs) is not list:
        return ys, zs
    if type(ys) is not list and ys is not None:
        ys = [_number(ys, x) for x in xs]
    if type(zs) is not list and zs is not None and not numbers:
        zs = [_number(zs, x) for x in xs]
    return ys, zs


def _no_tensor(value: Any) -> bool:
    return value is None or type(value) is int or type(value) is float


def _each(values: Any, xs: Sequence[Tensor]) -> Sequence[Any]:
    return values if type(values) is list else [values] * len(xs)


_MAKERS: dict[type, Callable[[Any], dict[str, Method]]] = {
    Unary: _unary,
    Binary: _binary,
    Ternary: _ternary,
    Comparison: comparison,
    Reduction: reduction,
    Scan: scan,
}
