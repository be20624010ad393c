"""The one traversal family: collect, rebuild, map, zip; with and without paths.

Order everywhere: insertion order, depth first.  Only this module and the node
primitives recurse.  A path goes through the *parts* of a node: its entries, or the
members of a stack under "0", "1", ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor

from .._keys import short
from .._typing import Path
from ..errors import StructureError, table_of
from .leaf import Leaf
from .node import Entry, Node

N = TypeVar("N", bound=Node)

# A tree without its tensors (`taken_apart`): the names of a flat one, or a snapshot.
Frame = Any

# What `zip_map` is told to do with a node: visit its entries.
DESCEND: Any = object()


def leaves(node: Node) -> list[Tensor]:
    """The tensors of a tree; a locked tree caches the list (do not change it)."""
    lock = node._lock
    if lock is not None:
        if lock.leaves is None:
            out: list[Tensor] = []
            node._collect(out)
            lock.leaves = out
        return lock.leaves
    out = []
    node._collect(out)
    return out


def rebuild(node: N, tensors: Iterable[Tensor]) -> N:
    """The same tree, unlocked, over other tensors in the order of `leaves`."""
    return node._rebuild(iter(tensors))


def snapshot(node: N) -> N:
    """The same containers over the same leaves, which no other thread can change.

    What is done in several steps (collect, compute, rebuild) starts here, so that each
    step sees the same keys. A locked tree is its own snapshot.
    """
    return node if node._lock is not None else copied(node)


def copied(node: N) -> N:
    """The same tree, unlocked: new containers over the same leaves."""
    entries = node._flat_tensors()
    return node._map(_same) if entries is None else node._like(entries)  # type: ignore[arg-type]


def _same(x: Tensor) -> Tensor:
    return x


def taken_apart(node: Node) -> tuple[Frame, list[Tensor]]:
    """The frame of a tree and its tensors, for `put_together` to make a tree of other tensors.

    The frame is a dict when the node holds nothing but tensors of the class `Tensor`: the
    common tree, which needs no walk.
    """
    entries = node._flat_tensors()
    if entries is not None:
        return entries, list(entries.values())
    frame = node if node._lock is not None else node._map(_same)
    return frame, leaves(frame)


def put_together(node: N, frame: Frame, tensors: Iterable[Tensor]) -> N:
    """The tree that was taken apart to ``frame``, unlocked, over other tensors.

    Args:
        node: the tree, or another with the batch size, names and device of the result.
        frame: of `taken_apart`.
        tensors: one for each that was taken out, in their order.
    """
    if type(frame) is dict:
        return node._like(dict(zip(frame, tensors)))
    out: N = frame._rebuild(iter(tensors))
    return out


def map_leaves(node: N, fn: Callable[[Tensor], Tensor]) -> N:
    """The same tree, unlocked, over ``fn(tensor)``."""
    return node._map(fn)


def parts(node: Node) -> Iterable[tuple[str, Entry]]:
    """What a node is made of: its entries by name, or its members by number."""
    members = node._members()
    if members is None:
        return node._items()
    return [(str(i), member) for i, member in enumerate(members)]


def has_stack(node: Node) -> bool:
    """Whether a tree has a stack in it, whose leaves are rows of what is read by key."""
    return any(part._members() is not None for part in nodes(node))


def holders(node: Node) -> list[Node]:
    """The nodes that hold the entries of a node: itself, or those of the members of a stack."""
    members = node._members()
    if members is None:
        return [node._bare()]
    return [holder for member in members for holder in holders(member)]


def rekey(node: N, fn: Callable[[Node], dict[str, Entry]]) -> N:
    """The same tree, unlocked, with ``fn(holder)`` as the entries of each holder of the node."""
    members = node._members()
    if members is None:
        return node._like(fn(node._bare()))
    out: N = node._regroup([rekey(member, fn) for member in members])
    return out


def entries_with_path(node: Node, prefix: Path = ()) -> Iterator[tuple[Path, Tensor | Leaf]]:
    """Every entry that is not a node, with its path."""
    for name, entry in parts(node):
        path = (*prefix, name)
        if isinstance(entry, Node):
            yield from entries_with_path(entry, path)
        else:
            yield path, entry


def leaves_with_path(node: Node) -> list[tuple[Path, Tensor]]:
    """The tensors of a tree with their paths, in the order of `leaves`."""
    return [(path, x) for path, x in entries_with_path(node) if isinstance(x, Tensor)]


def slots(node: Node, prefix: Path = ()) -> Iterator[tuple[Path, Node, str]]:
    """Where each tensor is kept: its path, the node that holds it, and its name there.

    In the order of `leaves`.  ``holder._fetch(name)`` reads and ``holder._store(name, x)``
    replaces the tensor, in stacks and typed views too.
    """
    members = node._members()
    if members is not None:
        for i, member in enumerate(members):
            yield from slots(member, (*prefix, str(i)))
        return
    holder = node._bare()
    for name, entry in holder._items():
        path = (*prefix, name)
        if isinstance(entry, Node):
            yield from slots(entry, path)
        elif isinstance(entry, Tensor):
            yield path, holder, name


def keyed_leaves(node: Node, prefix: Path = ()) -> list[tuple[Path, Tensor]]:
    """The tensors of a tree with their keys; members of a stack have the keys of the stack."""
    out: list[tuple[Path, Tensor]] = []
    for member in node._members() or ():
        out += keyed_leaves(member, prefix)
    if out or node._members() is not None:
        return out
    for name, entry in node._items():
        if isinstance(entry, Tensor):
            out.append(((*prefix, name), entry))
        elif isinstance(entry, Node):
            out += keyed_leaves(entry, (*prefix, name))
    return out


def nodes_with_path(node: Node, prefix: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Every node of a tree, parents before children, the root first with path ``()``."""
    yield prefix, node
    for name, entry in parts(node):
        if isinstance(entry, Node):
            yield from nodes_with_path(entry, (*prefix, name))


def nodes(node: Node) -> list[Node]:
    """Every node of a tree, parents before children, the root first."""
    out = [node]
    for part in out:  # the list grows while it is walked: breadth first without recursion
        out.extend(part._children())
    return out


# Of each node, parents first: the names and classes of its entries, or the number of members.
Outline = list[Any]


def outline_of(node: Node) -> Outline:
    """Names and classes of every entry, node by node: equal outlines have the same paths.

    Costs little, since no path is made for a leaf; `paths_in` makes them when they are needed.
    """
    out: Outline = []
    for part in nodes(node):
        members = part._members()
        if members is None:
            out.append((list(part._names()), list(map(type, part._contents()))))
        else:
            out.append(len(members))
    return out


def paths_in(outline: Outline) -> list[Path]:
    """The paths of the tensors of a tree with this outline, in the order of `leaves`."""
    first_child: list[int] = []
    following = 1
    for part in outline:
        first_child.append(following)
        if isinstance(part, int):
            following += part
        else:
            following += sum(issubclass(kind, Node) for kind in part[1])
    out: list[Path] = []

    def visit(index: int, prefix: Path) -> None:
        part, child = outline[index], first_child[index]
        if isinstance(part, int):
            for i in range(part):
                visit(child + i, (*prefix, str(i)))
            return
        for name, kind in zip(*part):
            if issubclass(kind, Tensor):
                out.append((*prefix, name))
            elif issubclass(kind, Node):
                visit(child, (*prefix, name))
                child += 1

    visit(0, ())
    return out


def entries_beside(node: Node, other: Node) -> list[Entry | None]:
    """For each tensor of ``leaves(node)``, what ``other`` has under the same key, else None."""
    out: list[Entry | None] = []
    _beside(node, other, out)
    return out


def _beside(node: Node, other: Node | None, out: list[Entry | None]) -> None:
    members = node._members()
    if members is not None:
        rows = None if other is None else other._members()
        for i, member in enumerate(members):
            # A tree that is no such stack says the same to every member.
            same = rows is None or len(rows) != len(members)
            _beside(member, other if same else rows[i], out)  # type: ignore[index]
        return
    if other is not None and list(node._names()) == list(other._names()) and _flat(node):
        # Equal names and nothing below: the two stand beside each other as they are.
        out.extend(other._contents())
        return
    fetch = _nothing if other is None else other._fetch
    for name, entry in node._items():
        if isinstance(entry, Tensor):
            out.append(fetch(name))
        elif isinstance(entry, Node):
            theirs = fetch(name)
            _beside(entry, theirs if isinstance(theirs, Node) else None, out)


def _flat(node: Node) -> bool:
    """Whether a node holds tensors alone."""
    return all(issubclass(kind, Tensor) for kind in set(map(type, node._contents())))


def _nothing(name: str) -> None:
    return None


def map_leaves_with_path(node: N, fn: Callable[[Path, Tensor], Tensor], prefix: Path = ()) -> N:
    """The same tree, unlocked, over ``fn(path, tensor)``."""
    return node._rebuild(iter([fn((*prefix, *path), x) for path, x in leaves_with_path(node)]))


def map_entries(node: N, fn: Callable[[Path, Tensor | Leaf], Entry | None], prefix: Path = ()) -> N:
    """The same tree, unlocked, over ``fn(key path, entry)``; an entry mapped to None is dropped.

    The results must fit the node's batch size: nothing is checked.  In a stack, ``fn``
    is called for each member with the same key path.
    """

    def mapped(holder: Node) -> dict[str, Entry]:
        out: dict[str, Entry] = {}
        for name, entry in holder._items():
            path = (*prefix, name)
            if isinstance(entry, Node):
                out[name] = map_entries(entry, fn, path)
            else:
                new = fn(path, entry)
                if new is not None:
                    out[name] = new
        return out

    return rekey(node, mapped)


def only_tensors(node: Node) -> bool:
    """Whether a tree holds tensors and nodes only, no other leaves."""
    for _, entry in parts(node):
        if not isinstance(entry, Tensor) and not (isinstance(entry, Node) and only_tensors(entry)):
            return False
    return True


def zip_map(
    node: Node,
    others: Sequence[Node | None],
    visit: Callable[[Path, Entry, list[Entry | None]], Any],
    build: Callable[[Path, Node, dict[str, Entry]], Any],
    prefix: Path = (),
) -> Any:
    """A tree made of what ``visit`` makes of each entry and its namesakes in other trees.

    Args:
        node: the tree to walk.
        others: trees walked along; a part that is missing there comes as None.
        visit: ``visit(path, entry, theirs)`` returns the new entry, None to drop it, or
            `DESCEND` to go into a node.
        build: ``build(path, node, entries)`` makes the new node, or None to drop it.

    Of a stack, each member is walked along the rows of the other trees; a member that is
    dropped is empty in the result, which is None when all are dropped.
    """
    members = node._members()
    if members is not None:
        rows = [
            node._shares(x, len(x._batch_size)) if isinstance(x, Node) else [None] * len(members)
            for x in others
        ]
        made = [zip_map(m, row, visit, build, prefix) for m, *row in zip(members, *rows)]
        if all(new is None for new in made):
            return None
        return node._regroup([m._like({}) if x is None else x for m, x in zip(members, made)])
    out: dict[str, Entry] = {}
    for name, entry in node._items():
        path = (*prefix, name)
        theirs = [x._fetch(name) if isinstance(x, Node) else None for x in others]
        new = visit(path, entry, theirs)
        if new is DESCEND:
            new = zip_map(entry, theirs, visit, build, path)  # type: ignore[arg-type]
        if new is not None:
            out[name] = new
    return build(prefix, node, out)


def changed_entries(source: Node, other: Node, prefix: Path = ()) -> list[tuple[Path, Entry]]:
    """The entries of ``other`` that ``source`` does not have, or has over other memory."""
    out: list[tuple[Path, Entry]] = []
    for name, entry in other._items():
        present = source._fetch(name)
        if isinstance(entry, Node) and isinstance(present, Node):
            out += changed_entries(present, entry, (*prefix, name))
        elif present is None or not _same_memory(present, entry):
            out.append(((*prefix, name), entry))
    return out


def _same_memory(a: Entry, b: Entry) -> bool:
    if a is b:
        return True
    if not isinstance(a, Tensor) or type(a) is not type(b) or a.shape != b.shape:
        return False
    assert isinstance(b, Tensor)
    if a.dtype is not b.dtype or a.requires_grad is not b.requires_grad or a.is_nested:
        return False
    strides = zip(a.shape, a.stride(), b.stride())
    if any(n > 1 and mine != theirs for n, mine, theirs in strides):
        return False
    try:
        return a.data_ptr() == b.data_ptr() and a.device == b.device
    except RuntimeError:  # no memory (fake, functional): identity is all there is
        return False


def nested_dict(node: Node, on_leaf: Callable[[Any], Any]) -> dict[str, Any]:
    """The tensors of a tree as nested dicts, with ``on_leaf(leaf)`` for other leaves.

    Fields of a typed node that hold nothing are None.

    Raises:
        StructureError: a stack in the tree has keys that only some of its members hold.

    >>> from tensordict import TensorDict
    >>> nested_dict(TensorDict(n={"a": 1, "s": "x"}), lambda leaf: leaf.data)
    {'n': {'a': tensor(1), 's': 'x'}}
    """
    if node._members() is not None:
        refuse_exclusive(node)
    out: dict[str, Any] = {
        name: entry
        if type(entry) is Tensor or isinstance(entry, Tensor)
        else (nested_dict(entry, on_leaf) if isinstance(entry, Node) else on_leaf(entry))
        for name, entry in node._items()
    }
    if node._may_lack:
        out.update(dict.fromkeys(node._absent()))
    return out


def fold(
    node: Node,
    on_entry: Callable[[Tensor | Leaf], Any],
    on_node: Callable[[Any, dict[str, Any]], Any],
) -> Any:
    """A value made from the bottom up.

    Args:
        node: the tree.
        on_entry: the value of an entry that is not a node.
        on_node: the value of a node, from the node and the values of its entries by name.

    Raises:
        StructureError: a stack in the tree has keys that only some of its members hold.

    >>> from tensordict import TensorDict
    >>> fold(TensorDict(a=1, n={"b": 2}), int, lambda node, values: values)
    {'a': 1, 'n': {'b': 2}}
    """
    refuse_exclusive(node)
    values = {
        name: fold(entry, on_entry, on_node) if isinstance(entry, Node) else on_entry(entry)
        for name, entry in node._items()
    }
    return on_node(node, values)


def refuse_exclusive(node: Node) -> None:
    """Refuse to read a stack as one dict of entries when that would leave keys out.

    Raises:
        StructureError: (a ``KeyError``) only some members hold some keys; names them.
    """
    members = node._members()
    if members is None:
        return
    held = [set(member._names()) for member in members]
    some = set().union(*held) - set(held[0]).intersection(*held)
    if some:
        raise StructureError(
            f"Cannot read a stack as one tensordict: not every member holds the keys {sorted(some)}. "
            f"Select the common keys first, or take the members with unbind()."
        )


def spread(node: Node, value: Tensor) -> list[Tensor]:
    """A tensor that broadcasts to the batch of a node, as each of its leaves meets it.

    Args:
        node: any tree.
        value: shape ``[*B']``, which broadcasts to the leading dimensions of the batch.

    Returns:
        For each of ``leaves(node)`` a view with one dimension of size 1 for each of its
        feature dimensions; for leaves in a stack, the row of ``value`` that is theirs.
    """
    out: list[Tensor] = []
    _spread(node, value, out)
    return out


def _spread(node: Any, value: Tensor, out: list[Tensor]) -> None:
    members = node._members()
    if members is not None:
        dim = node.stack_dim
        for i, member in enumerate(members):
            if value.ndim <= dim:
                _spread(member, value, out)
            else:
                _spread(member, value.select(dim, i if value.shape[dim] > 1 else 0), out)
        return
    views: dict[int, Tensor] = {}  # one for each rank among the leaves, not one for each leaf
    for _, entry in node._items():
        if isinstance(entry, Tensor):
            view = views.get(entry.ndim)
            if view is None:
                view = value.reshape(value.shape + (1,) * (entry.ndim - value.ndim))
                views[entry.ndim] = view
            out.append(view)
        elif isinstance(entry, Node):
            _spread(entry, value, out)


def leaves_like(node: Node, other: Node) -> list[Tensor]:
    """The tensors of ``other`` in the order of ``leaves(node)``, matched by key.

    Raises:
        StructureError: (a ``KeyError``) when the two do not hold tensors under the
            same keys; lists every key that differs.
    """
    return pairs_like(node, other)[1]


def pairs_like(node: Node, other: Node) -> tuple[list[Tensor], list[Tensor], bool]:
    """The tensors of two trees, matched by key, in the order of ``leaves(node)``.

    Returns:
        Both lists, and whether it is certain that the trees hold no other leaves.

    Raises:
        StructureError: as `leaves_like`.
    """
    mine: list[Tensor] = []
    theirs: list[Tensor] = []
    odd: list[None] = []
    if not _zip(node, other, mine, theirs, odd):
        raise StructureError(_difference(node, other))
    return mine, theirs, not odd


def _zip(
    node: Node, other: Node, mine: list[Tensor], theirs: list[Tensor], odd: list[None]
) -> bool:
    members = node._members()
    if members is not None:
        shares = _rows_of(node, other, len(members))
        return shares is not None and all(
            _zip(member, share, mine, theirs, odd) for member, share in zip(members, shares)
        )
    items = node._items()
    # Non-tensor entries may be on one side only: they take no part.
    if len(other._names()) != len(items):
        if _count(other) != _count(node):
            return False
        odd.append(None)
    for name, entry in items:
        if isinstance(entry, Tensor):
            y = other._fetch(name)
            if not isinstance(y, Tensor):
                return False
            mine.append(entry)
            theirs.append(y)
        elif isinstance(entry, Node):
            y = other._fetch(name)
            if not isinstance(y, Node) or not _zip(entry, y, mine, theirs, odd):
                return False
        else:
            odd.append(None)
    return True


def _rows_of(node: Node, other: Node, n: int) -> list[Any] | None:
    shares = node._shares(other, len(node._batch_size))
    return shares if len(shares) == n and all(isinstance(s, Node) for s in shares) else None


def _count(node: Node) -> int:
    return sum(not isinstance(entry, Leaf) for _, entry in node._items())


def _difference(node: Node, other: Node) -> str:
    mine = {path for path, _ in leaves_with_path(node)}
    theirs = {path for path, _ in leaves_with_path(other)}
    rows: list[tuple[Any, str]] = [(short(p), "only in the first") for p in sorted(mine - theirs)]
    rows += [(short(p), "only in the second") for p in sorted(theirs - mine)]
    if not rows:
        rows = [((), "empty nested tensordicts differ")]
    return table_of(f"keys in tensordicts mismatch: {len(rows)} differ.", rows)
