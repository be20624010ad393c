"""Calling a function on every leaf; copies and fills."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Size, Tensor

from .._keys import path_of, short
from .._typing import NO_DEFAULT, NestedKey, Path
from ..core import lock as locking
from ..core import write
from ..core._torch import foreach_clone
from ..core.devices import as_device
from ..core.leaf import Leaf
from ..core.node import KEEP, Entry, Node
from ..core.sizes import as_size
from ..core.traverse import (
    DESCEND,
    copied,
    keyed_leaves,
    leaves,
    leaves_like,
    put_together,
    snapshot,
    taken_apart,
    zip_map,
)
from ..errors import EntryTypeError, StructureError, table_of
from . import update
from .inplace import write_each
from .metadata import check_names
from .operands import at_hand, groups, run_grouped

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

IsLeaf = Callable[[type], bool]


class Options(TypedDict, total=False):
    """The keyword arguments of `apply` that say what to call and what to make."""

    default: Any
    call_on_nested: bool
    is_leaf: IsLeaf | None
    num_threads: int
    batch_size: Any
    device: Any
    names: Any
    filter_empty: bool | None


@dataclass(frozen=True)
class Request:
    """The options of one call of `apply`; each is what its argument of that name says.

    ``keys`` says whether the function gets the key: None no, False the name, True all of it.
    """

    default: Any
    call_on_nested: bool
    is_leaf: IsLeaf | None
    num_threads: int
    batch_size: Size | None
    device: Any
    names: Any
    filter_empty: bool | None
    keys: bool | None

    @property
    def only_tensors(self) -> bool:
        """Whether the function is called on the tensors of both sides, and on nothing else."""
        return not self.call_on_nested and self.is_leaf is None and self.default is NO_DEFAULT

    @property
    def plain(self) -> bool:
        """Whether results that are like the leaves take their place, and nothing else changes."""
        return (
            not self.call_on_nested
            and self.is_leaf is None
            and self.batch_size is None
            and self.device is KEEP
            and self.names is KEEP
            and self.filter_empty is not True
        )

    def picks(self, entry: Entry) -> bool:
        """Whether the function is called on an entry."""
        if self.call_on_nested:
            return True
        if self.is_leaf is None:
            return isinstance(entry, Tensor)
        return bool(self.is_leaf(type(entry)))


class ApplyMethods(Node):
    """`apply` and its kin, copies and fills."""

    __slots__ = ()

    def apply(
        self,
        fn: Callable[..., Any],
        *others: Any,
        inplace: bool = False,
        out: Any = None,
        propagate_lock: bool = False,
        **options: Unpack[Options],
    ) -> Any:
        """A tensordict of what ``fn`` makes of every leaf.

        Args:
            fn: ``fn(leaf, *namesakes)``; None drops the leaf.
            *others: tensordicts with the same keys, whose leaves are passed along.
            inplace: write the results into the leaves; None leaves the leaf alone.
            out: a tensordict to update with the results, and to return.
            propagate_lock: lock the result if self is locked.
            **options: ``batch_size=``, ``device=`` and ``names=`` of the result, here and
                below (a batch size is needed when the leaves no longer start with the
                present one);
                ``default=``, what ``fn`` gets for a leaf that one of ``others`` lacks;
                ``filter_empty=``: True drops every empty nested tensordict, False keeps
                them all; by default those that lost all their leaves are dropped, and a
                result that would be dropped itself is None;
                ``call_on_nested=``: call ``fn`` on the entries of this level, whatever
                they are; ``is_leaf=``, a test on the class of an entry: what to call
                ``fn`` on; ``num_threads=``: call ``fn`` from this many threads.

        Raises:
            RuntimeError: a result does not start with the batch size.
            KeyError: the keys of ``others`` differ and there is no ``default``.

        >>> from tensordict import TensorDict
        >>> td = TensorDict(a=1, b=2.0)
        >>> td.apply(lambda x: x + 1 if x.is_floating_point() else None)["b"]
        tensor(3.)
        """
        if not options and out is None and not propagate_lock:
            frame, xs = taken_apart(self)
            columns = _columns(self, frame, others) if others else []
            if columns is not None:
                return _finished(self, frame, xs, list(map(fn, xs, *columns)), inplace)
        request = _request(**options) if options else _DEFAULT
        return _run(self, fn, others, request, inplace, out, propagate_lock)

    def named_apply(
        self,
        fn: Callable[..., Any],
        *others: Any,
        nested_keys: bool = False,
        inplace: bool = False,
        out: Any = None,
        propagate_lock: bool = False,
        **options: Unpack[Options],
    ) -> Any:
        """`apply` of a function that gets the key too: ``fn(key, leaf, *namesakes)``.

        Args:
            fn, others, inplace, out, propagate_lock, options: as in `apply`.
            nested_keys: pass the whole key (a tuple for nested leaves), not the last name.

        >>> from tensordict import TensorDict
        >>> td = TensorDict(a=1, n={"b": 2})
        >>> td.named_apply(lambda key, x: print(key), nested_keys=True)
        a
        ('n', 'b')
        """
        if not options and out is None and not propagate_lock:
            frame, xs = taken_apart(self)
            columns = _columns(self, frame, others)
            if columns is not None:
                return _finished(self, frame, xs, list(map(fn, frame, xs, *columns)), inplace)
        request = _request(keys=nested_keys, **options)
        return _run(self, fn, others, request, inplace, out, propagate_lock)

    def apply_(self, fn: Callable[..., Any], *others: Any, **options: Unpack[Options]) -> Self:
        """`apply` with the results written into the leaves; allowed when locked.

        >>> from tensordict import TensorDict
        >>> TensorDict(a=1.0).apply_(lambda x: x + 1)["a"]
        tensor(2.)
        """
        out: Self = self.apply(fn, *others, inplace=True, **options)
        return out

    # --- copies and fills ------------------------------------------------------------

    def clone(self, recurse: bool = True, *, memory_format: Any = torch.preserve_format) -> Self:
        """A copy: new leaves, or (``recurse=False``) new containers over the same leaves."""
        if not recurse:
            return copied(self)
        if memory_format is not torch.preserve_format:
            return self._map(lambda x: x.clone(memory_format=memory_format))
        frame, xs = taken_apart(self)
        if groups(frame, xs):
            return put_together(self, frame, run_grouped(foreach_clone, torch.clone, xs))
        return put_together(self, frame, map(torch.clone, xs))

    def copy(self) -> Self:
        """New containers over the same leaves."""
        return copied(self)

    def __copy__(self) -> Self:
        return copied(self)

    def copy_(self, tensordict: Any, non_blocking: bool = False) -> Self:
        """Write another tensordict into the leaves: broadcast and cast, allowed when locked.

        Raises:
            KeyError: a key of ``tensordict`` is not here; nothing has changed then.
        """
        update.write_all(self, tensordict, non_blocking=non_blocking)
        return self

    def fill_(self, key: NestedKey, value: Any) -> Self:
        """Write one value into an entry: every element of a tensor, or every leaf of a tensordict."""
        path = path_of(key)
        holder, rest = write.resolve(self, path)
        stack = holder._members()
        if stack is not None and len(rest) == 1:
            for member in stack:
                member.fill_(rest, value)  # type: ignore[attr-defined]
            return self
        entry = write.require(self, path)
        if isinstance(entry, Tensor):
            entry.fill_(value)
        elif isinstance(entry, Node):
            write_each(entry, leaves(entry), Tensor.fill_, None, (value,))
        else:
            update.write_all(self, {key: value})
        return self

    def zero_(self) -> Self:
        """Write 0 into every leaf; allowed when locked."""
        write_each(self, leaves(self), Tensor.zero_, torch._foreach_zero_)
        return self


# --- apply ---------------------------------------------------------------------------


def _request(
    default: Any = NO_DEFAULT,
    call_on_nested: bool = False,
    is_leaf: IsLeaf | None = None,
    num_threads: int = 0,
    batch_size: Any = None,
    device: Any = NO_DEFAULT,
    names: Any = NO_DEFAULT,
    filter_empty: bool | None = None,
    keys: bool | None = None,
) -> Request:
    if device is NO_DEFAULT:
        device = KEEP
    elif device is not None:
        device = as_device(device)
    return Request(
        default,
        call_on_nested,
        is_leaf,
        num_threads,
        None if batch_size is None else as_size(batch_size),
        device,
        KEEP if names is NO_DEFAULT else names,
        filter_empty,
        keys,
    )


_DEFAULT = _request()


def _columns(node: Node, frame: Any, others: Sequence[Any]) -> list[list[Tensor]] | None:
    """The leaves of other trees in the order of a flat one, where that takes no search; else None."""
    if type(frame) is not dict:
        return None
    out = [at_hand(node, frame, other) for other in others]
    return out if all(type(column) is list for column in out) else None


def _finished(node: Any, frame: Any, xs: Sequence[Tensor], ys: list[Any], inplace: bool) -> Any:
    """The tree of the results of one call for each leaf, or self with the results written."""
    # Without a device it does not matter where a tensor is.
    flat = type(frame) is dict and node._device is None
    if not inplace and (_like_shapes(xs, ys) if flat else _alike(xs, ys)):
        return put_together(node, frame, ys)
    source = node._like(frame) if type(frame) is dict else frame
    if not inplace:
        return _assembled(source, ys, _DEFAULT)
    if not all(map(is_, xs, ys)):
        _write(source, ys, _DEFAULT)
    return node


def _run(
    node: Any,
    fn: Callable[..., Any],
    others: Sequence[Any],
    request: Request,
    inplace: bool,
    out: Any,
    propagate_lock: bool,
) -> Any:
    for other in others:
        if not isinstance(other, Node):
            raise EntryTypeError(
                f"Cannot apply a function to a tensordict and a {type(other).__name__}: expected "
                f"tensordicts after the function, got {other!r}."
            )
    # A function that sees nodes gets those of the tree itself.
    own = request.call_on_nested or request.is_leaf is not None
    source = node if own else snapshot(node)
    results = _called(fn, list(_calls(source, others, request)), request.num_threads)
    if inplace:
        _write(source, results, request)
        return node
    xs = leaves(source)
    if request.plain and _alike(xs, results):
        result = source._rebuild(iter(results))
    else:
        result = _assembled(source, results, request)
    if out is not None:
        return out if result is None else out.update(result)
    if propagate_lock and node._lock is not None and result is not None:
        locking.lock(result)
    return result


def _calls(node: Node, others: Sequence[Node], request: Request) -> Iterator[tuple[Any, ...]]:
    """The arguments of every call, in the order of the tree."""
    if request.only_tensors:
        try:
            columns = [leaves_like(node, other) for other in others]
        except StructureError:
            pass  # keys that only the others have are ignored; what is missing is found below
        else:
            if request.keys is None:
                return zip(leaves(node), *columns)
            keyed = keyed_leaves(node)
            names = [short(path) if request.keys else path[-1] for path, _ in keyed]
            return zip(names, [x for _, x in keyed], *columns)
    calls: list[tuple[Any, ...]] = []
    missing: list[Path] = []

    def visit(path: Path, entry: Entry, theirs: list[Entry | None]) -> Any:
        if not request.picks(entry):
            return DESCEND if isinstance(entry, Node) else None
        if None in [x if x is None else True for x in theirs]:
            if request.default is NO_DEFAULT:
                missing.append(path)
            theirs = [request.default if x is None else x for x in theirs]
        if request.keys is None:
            calls.append((entry, *theirs))
        else:
            calls.append((short(path) if request.keys else path[-1], entry, *theirs))
        return None

    zip_map(node, others, visit, lambda path, part, entries: None)
    if missing:
        raise StructureError(
            table_of(
                f"keys in tensordicts mismatch: {len(missing)} are missing in another tensordict. "
                f"Pass default= to go on without them.",
                [(short(path), "missing") for path in missing],
            )
        )
    return iter(calls)


def _called(fn: Callable[..., Any], calls: list[tuple[Any, ...]], num_threads: int) -> list[Any]:
    if not num_threads:
        return [fn(*args) for args in calls]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(lambda args: fn(*args), calls))


def _like_shapes(xs: Sequence[Tensor], ys: Sequence[Any]) -> bool:
    """`_alike` for plain tensors, whatever their devices."""
    return set(map(type, ys)) == _ONLY_TENSORS and [x.shape for x in xs] == [y.shape for y in ys]


_ONLY_TENSORS = {Tensor}


def _alike(xs: Sequence[Tensor], ys: Sequence[Any]) -> bool:
    """Whether results can take the place of the leaves as they are."""
    if len(xs) != len(ys):
        return False
    for x, y in zip(xs, ys):
        if not isinstance(y, Tensor) or y.shape != x.shape:
            return False
        if not (x.is_cpu and y.is_cpu) and y.device != x.device:  # comparing devices costs more
            return False
    return True


def _assembled(node: Any, results: Iterable[Any], request: Request) -> Any:
    """The tree of the results, or None when it is dropped itself."""
    todo = iter(results)
    members = node._members()
    if members is not None and (request.batch_size is not None or request.names is not KEEP):
        inner = _of_members(node, request)
        made = [_assembled(member, todo, inner) for member in members]
        if all(x is None for x in made):
            return None
        return node._regroup([m._like({}) if x is None else x for m, x in zip(members, made)])
    size, device = request.batch_size, request.device

    def visit(path: Path, entry: Entry, theirs: list[Entry | None]) -> Any:
        if request.picks(entry):
            return next(todo)
        if isinstance(entry, Node):
            return DESCEND if entry._members() is None else _assembled(entry, todo, request)
        if not isinstance(entry, Leaf):
            return entry
        new_size = entry._batch_size if size is None else size
        return entry._with(new_size, entry._device if device is KEEP else device)

    def build(path: Path, part: Node, entries: dict[str, Any]) -> Node | None:
        lost = request.filter_empty or (request.filter_empty is None and len(part._names()))
        if lost and not entries:
            return None
        blank = part._like({}, KEEP if size is None else size, _names(part, request), device)
        checked = {k: write.entry_of(blank, v, (*path, k)) for k, v in entries.items()}
        return blank._like(checked)

    return zip_map(node, (), visit, build)


def _of_members(stack: Any, request: Request) -> Request:
    """The request for each member of a stack: the sizes and names without its dimension."""
    dim, n, size = stack.stack_dim, len(stack._members()), request.batch_size
    if size is not None and (len(size) <= dim or size[dim] != n):
        raise EntryTypeError(
            f"Cannot apply to a lazy stack of {n} along dimension {dim} with batch_size={list(size)}: "
            f"expected size {n} there."
        )
    names = request.names
    if names is not KEEP and names is not None:
        names = [*names[:dim], *names[dim + 1 :]]
    inner = None if size is None else size[:dim] + size[dim + 1 :]
    return replace(request, batch_size=inner, names=names)


def _names(part: Node, request: Request) -> Any:
    if request.names is KEEP:
        return KEEP if request.batch_size is None else None
    if request.names is None:
        return None
    n = len(part._batch_size if request.batch_size is None else request.batch_size)
    names = list(request.names)
    size = part._batch_size if request.batch_size is None else request.batch_size
    return check_names(names + [None] * (n - len(names)), size)


def _write(node: Node, results: Sequence[Any], request: Request) -> None:
    """Write results into the entries they were made of; nothing when one does not fit."""
    todo = iter(results)
    writes = update.Writes()

    def visit(path: Path, entry: Entry, theirs: list[Entry | None]) -> Any:
        if request.picks(entry):
            new = next(todo)
            return None if new is entry else new
        return DESCEND if isinstance(entry, Node) else None

    def build(path: Path, part: Node, entries: dict[str, Any]) -> None:
        for name, value in entries.items():
            writes.into(part, (name,), write.entry_of(part, value, (*path, name)))

    zip_map(node, (), visit, build)
    writes.run()
