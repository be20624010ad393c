"""How a plan tells what it will do: totals, tables, JSON, differences."""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .._keys import dotted, short
from .._typing import NestedKey, Path
from ..device.kinds import MoveKind
from ..errors import FileFormatError
from .hidden import HiddenTensor
from .names import FORMATS, dtype_name, format_name, parse_dtype, reading, size_text
from .routes import Move, Route, route_text

_HEADINGS = ("kind", "move", "leaves", "before", "after", "can lose")


class PlanReport:
    """What a plan can say about itself; `MovePlan` adds how it is made and run."""

    __slots__ = ()

    paths: list[Path]
    shapes: list[torch.Size]
    routes: list[Route]
    ties: dict[int, int]
    non_blocking: bool | None
    target_device: torch.device | None
    hidden: tuple[HiddenTensor, ...]
    numels: Sequence[int] | None

    def numel(self, index: int) -> int:
        """The number of elements of the leaf at a position."""
        return self.shapes[index].numel() if self.numels is None else self.numels[index]

    # --- totals --------------------------------------------------------------------

    @property
    def bytes_by_kind(self) -> dict[MoveKind, int]:
        """Bytes made by each kind of move; a tie is counted once."""
        out: dict[MoveKind, int] = {}
        for index, route in enumerate(self.routes):
            if index not in self.ties:
                nbytes = self.numel(index) * route.dtype.itemsize
                out[route.kind] = out.get(route.kind, 0) + nbytes
        return dict(sorted(out.items(), key=lambda item: item[0]))

    @property
    def bytes_by_link(self) -> dict[tuple[torch.device, torch.device], int]:
        """Bytes that cross from one device to another."""
        out: dict[tuple[torch.device, torch.device], int] = {}
        for move in self._moves():
            nbytes = self._wire_nbytes(move)
            if nbytes:
                link = (move.route.src_device, move.route.device)
                out[link] = out.get(link, 0) + nbytes
        return out

    def _wire_nbytes(self, move: Move) -> int:
        # The host casts after the wait; where the caller waits, the device has to cast before.
        late = move.kind is not MoveKind.D2H or self.non_blocking is not True
        return move.wire_nbytes if late or not move.wire_nbytes else move.dst_nbytes

    @property
    def n_copies(self) -> int:
        """Leaves that are copied or cast; ties count once."""
        return sum(
            route.kind is not MoveKind.ALIAS and index not in self.ties
            for index, route in enumerate(self.routes)
        )

    def nbytes(self, *, after: bool) -> int:
        """Bytes of all leaves before or after the moves, ties once."""
        return sum(
            self.numel(index) * (route.dtype if after else route.src_dtype).itemsize
            for index, route in enumerate(self.routes)
            if index not in self.ties
        )

    def peak_bytes(self, device: Any) -> int:
        """Bytes of new tensors on one device at the highest point, sources still alive.

        >>> from tensordict import TensorDict
        >>> from tensordict.placement import plan_moves
        >>> plan_moves(TensorDict({"a": torch.zeros(8)}), torch.float16).peak_bytes("cpu")
        16
        """
        where = torch.device(device)
        total = 0
        for index, route in enumerate(self.routes):
            if route.moves and index not in self.ties and _same(route.device, where):
                total += self.numel(index) * route.dtype.itemsize
        return total

    def _moves(self) -> Iterable[Move]:
        return (
            Move(
                self.paths[index],
                route,
                self.shapes[index],
                self.paths[self.ties[index]] if index in self.ties else None,
            )
            for index, route in enumerate(self.routes)
        )

    # --- texts ---------------------------------------------------------------------

    def summary(self) -> str:
        """One line.

        >>> from tensordict import TensorDict
        >>> from tensordict.placement import plan_moves
        >>> print(plan_moves(TensorDict({"a": torch.zeros(8)}), torch.float16).summary())
        1 of 1 leaves move: 1 cast; 32 B -> 16 B
        """
        counts: dict[MoveKind, int] = {}
        for index, route in enumerate(self.routes):
            if route.moves and index not in self.ties:
                counts[route.kind] = counts.get(route.kind, 0) + 1
        parts = [f"{n} {kind.value}" for kind, n in sorted(counts.items(), key=lambda kv: kv[0])]
        moving = sum(route.moves for route in self.routes)
        tied = sum(self.routes[index].moves for index in self.ties)
        if tied:
            parts.append(f"{tied} tied")
        what = f": {', '.join(parts)}" if parts else ""
        if self.hidden:
            stay = sum(item.route is None for item in self.hidden)
            note = f"{stay} stay" if stay else "moved too"
            what += f"; {len(self.hidden)} tensors inside of non-tensor values ({note})"
        before, after = size_text(self.nbytes(after=False)), size_text(self.nbytes(after=True))
        return f"{moving} of {len(self.routes)} leaves move{what}; {before} -> {after}"

    def rows(self) -> list[tuple[str, str, int, int, int, str]]:
        """Kind, move, leaves, bytes before, bytes after and possible loss, by distinct route."""
        totals: dict[Route, list[int]] = {}
        for index, route in enumerate(self.routes):
            row = totals.setdefault(route, [0, 0, 0])
            row[0] += 1
            if index not in self.ties:
                numel = self.numel(index)
                row[1] += numel * route.src_dtype.itemsize
                row[2] += numel * route.dtype.itemsize
        ordered = sorted(totals.items(), key=lambda item: (item[0].kind, route_text(item[0])))
        return [
            (route.kind.value, route_text(route), *counts, _loss_text(route))  # type: ignore[misc]
            for route, counts in ordered
        ]

    def table(self, style: str = "text") -> Any:
        """Leaves and bytes by kind, with totals before and after.

        Args:
            style: ``"text"``, ``"html"``, or ``"rich"`` for a ``rich.table.Table``.

        Raises:
            ValueError: for another style.
            ImportError: for ``"rich"`` without that package.

        >>> from tensordict import TensorDict
        >>> from tensordict.placement import plan_moves
        >>> td = TensorDict({"a": torch.zeros(8), "b": torch.zeros(2, dtype=torch.float16)})
        >>> print(plan_moves(td, torch.float16).table())
        kind   move                leaves  before  after  can lose
        alias  float16 cpu              1     4 B    4 B
        cast   float32 -> float16       1    32 B   16 B  rounding+range
        total                           2    36 B   20 B
        """
        body = [
            (kind, text, str(n), size_text(before), size_text(after), loss)
            for kind, text, n, before, after, loss in self.rows()
        ]
        before, after = size_text(self.nbytes(after=False)), size_text(self.nbytes(after=True))
        total = ("total", "", str(len(self.routes)), before, after, "")
        if style == "text":
            return _text_table([_HEADINGS, *body, total])
        if style == "html":
            return _html_table(_HEADINGS, [*body, total])
        if style == "rich":
            return _rich_table(_HEADINGS, [*body, total])
        raise ValueError(f"Cannot print a plan as {style!r}: expected 'text', 'html' or 'rich'.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.summary()})"

    def _repr_html_(self) -> str:
        return str(self.table("html"))

    def explain(self, key: NestedKey) -> str:
        """What happens to one leaf, and why, as lines of text.

        Raises:
            MissingKeyError: (a ``KeyError``) when the plan has no such leaf.

        >>> from tensordict import TensorDict
        >>> from tensordict.placement import plan_moves
        >>> print(plan_moves(TensorDict({"a": torch.zeros(8)}), torch.float16).explain("a"))
        a: cast, float32 -> float16
          32 B -> 16 B
          the cast happens at the source; it can lose rounding+range
        """
        move: Move = self[key]  # type: ignore[index]
        route = move.route
        lines = [f"{dotted(move.path)}: {route.kind.value}, {route_text(route)}"]
        if not route.moves:
            lines.append("  the result holds the same tensor")
            return "\n".join(lines)
        lines.append(f"  {size_text(move.src_nbytes)} -> {size_text(move.dst_nbytes)}")
        if move.tied_to is not None:
            lines.append(f"  shares memory with {dotted(move.tied_to)}, which is moved for both")
        elif self._wire_nbytes(move):
            link = f"{route.src_device} -> {route.device}"
            lines.append(f"  {size_text(self._wire_nbytes(move))} cross {link}")
        if route.casts:
            early = route.kind is MoveKind.D2H and self.non_blocking is True
            side = "source" if early else route.cast_side
            loss = f"can lose {route.loss}" if route.loss else "is exact"
            lines.append(f"  the cast happens at the {side}; it {loss}")
        if route.kind is MoveKind.D2H:
            waits = route.src_device in self.sync_devices  # type: ignore[attr-defined]
            lines.append("  run() waits for the source once" if waits else "  the caller waits")
        return "\n".join(lines)

    # --- JSON, hash, differences ------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The whole plan as a JSON value; `MovePlan.from_json` reads it back."""
        number = {route: index for index, route in enumerate(dict.fromkeys(self.routes))}
        return {
            "format": "tensordict.plan",
            "version": 1,
            "routes": [_route_json(route) for route in number],
            "leaves": [
                [list(path), list(shape), number[route]]
                for path, shape, route in zip(self.paths, self.shapes, self.routes)
            ],
            "ties": sorted(self.ties.items()),
            "non_blocking": self.non_blocking,
            "target_device": _device_json(self.target_device),
            "nbytes": {"before": self.nbytes(after=False), "after": self.nbytes(after=True)},
        }

    @property
    def hash(self) -> str:
        """32 hex digits, equal for equal plans whatever the process."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlanReport):
            return NotImplemented
        return self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    def diff(self, other: PlanReport) -> list[tuple[NestedKey, str]]:
        """Every leaf that the two plans treat differently, with a text for each.

        >>> from tensordict import TensorDict
        >>> from tensordict.placement import plan_moves
        >>> td = TensorDict({"a": torch.zeros(8), "b": torch.zeros(2, dtype=torch.float16)})
        >>> plan_moves(td, torch.float16).diff(plan_moves(td, torch.float32))
        [('a', 'cast float32 -> float16, here; alias float32 cpu, there'), ('b', 'alias float16 cpu, here; cast float16 -> float32, there')]
        """
        mine = {move.path: _move_text(move) for move in self._moves()}
        theirs = {move.path: _move_text(move) for move in other._moves()}
        out: list[tuple[NestedKey, str]] = []
        for path, text in mine.items():
            there = theirs.get(path)
            if there is None:
                out.append((short(path), f"{text}, here; no such leaf there"))
            elif there != text:
                out.append((short(path), f"{text}, here; {there}, there"))
        out += [
            (short(path), f"no such leaf here; {text}, there")
            for path, text in theirs.items()
            if path not in mine
        ]
        return out


def read_plan(data: Any) -> dict[str, Any]:
    """The arguments of a plan from its JSON value.

    Raises:
        FileFormatError: when the value is no plan, or of a later version.
    """
    if not isinstance(data, dict) or data.get("format") != "tensordict.plan":
        raise FileFormatError("Cannot read a plan: expected format 'tensordict.plan'.")
    if data.get("version") != 1:
        raise FileFormatError(f"Cannot read a plan of version {data.get('version')!r}: expected 1.")
    with reading("a plan"):
        return _plan_parts(data)


def _plan_parts(data: dict[str, Any]) -> dict[str, Any]:
    routes = [_read_route(item) for item in data["routes"]]
    leaves = data["leaves"]
    device = data["target_device"]
    ties = {int(index): int(first) for index, first in data["ties"]}
    if any(not 0 <= first < index < len(leaves) for index, first in ties.items()):
        raise FileFormatError("Cannot read a plan: a tie points to a later leaf.")
    return {
        "paths": [tuple(map(str, path)) for path, _, _ in leaves],
        "shapes": [torch.Size(shape) for _, shape, _ in leaves],
        "routes": [routes[_index(number)] for _, _, number in leaves],
        "ties": ties,
        "non_blocking": data["non_blocking"],
        "target_device": None if device is None else torch.device(device),
    }


def _index(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise FileFormatError(f"Cannot read a plan: {number!r} is no number of a route.")
    return number


def _move_text(move: Move) -> str:
    tied = f" tied to {dotted(move.tied_to)}" if move.tied_to is not None else ""
    return (
        f"{move.kind.value} {route_text(move.route)} {list(move.shape) if not move.shape else ''}".strip()
        + tied
    )


def _device_json(device: torch.device | None) -> str | None:
    return None if device is None else str(device)


def _route_json(route: Route) -> dict[str, Any]:
    form = route.memory_format
    return {
        "kind": route.kind.value,
        "src": [str(route.src_device), dtype_name(route.src_dtype)],
        "dst": [str(route.device), dtype_name(route.dtype)],
        "memory_format": None if form is None else format_name(form),
        "pin": route.pin,
        "pinned": route.pinned,
    }


def _read_route(data: Any) -> Route:
    form = data["memory_format"]
    if form is not None and form not in FORMATS:
        raise FileFormatError(f"Cannot read a plan: unknown memory format {form!r}.")
    return Route(
        MoveKind(data["kind"]),
        torch.device(data["src"][0]),
        parse_dtype(data["src"][1]),
        torch.device(data["dst"][0]),
        parse_dtype(data["dst"][1]),
        None if form is None else FORMATS[form],
        bool(data["pin"]),
        bool(data["pinned"]),
    )


def _same(device: torch.device, asked: torch.device) -> bool:
    return device.type == asked.type and (asked.index is None or device.index == asked.index)


def _loss_text(route: Route) -> str:
    return str(route.loss) if route.loss else ""


def _text_table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if 2 <= column <= 4 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _html_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells('th', headings)}</tr></thead><tbody>{body}</tbody></table>"


def _rich_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    try:
        from rich.table import Table
    except ImportError as error:
        raise ImportError(
            "table('rich') needs the package rich: pip install 'tensordict[rich]'."
        ) from error
    table = Table()
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="right" if 2 <= column <= 4 else "left")
    for row in rows[:-1]:
        table.add_row(*row)
    table.add_section()
    table.add_row(*rows[-1], style="bold")
    return table
