"""Write ``src/tensordict/ops/pointwise.pyi`` from the op table, or ``--check`` that it is current.

The methods of the table are made at import; type checkers and editors read them here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tensordict.ops.table import (
    TABLE,
    Binary,
    Comparison,
    Param,
    Reduction,
    Row,
    Scan,
    Ternary,
    Unary,
)

STUB = Path(__file__).parents[1] / "src" / "tensordict" / "ops" / "pointwise.pyi"
WIDTH = 100

HEADER = '''\
# Written by tools/gen_stubs.py from the op table. Do not edit.
from collections.abc import Callable
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Self

from ..core.node import Node
from .operands import Operand
from .reductions import Dims

class PointwiseMethods(Node):  # type: ignore[misc]
    """Arithmetic, comparisons, elementary functions and reductions of every leaf."""

    __hash__: ClassVar[None]  # type: ignore[assignment]
    __array_ufunc__: None
'''

OTHER = "other: Operand"


def method(name: str, params: list[str], result: str, doc: str, comment: str = "") -> str:
    """One method in the layout of the formatter."""
    args = ", ".join(["self", *params])
    line = f"    def {name}({args}) -> {result}:"
    if len(line) > WIDTH:
        inner = f"        {args}"
        if len(inner) > WIDTH:
            inner = "\n".join(f"        {part}," for part in ["self", *params])
            inner = inner.replace("        *,,\n", "        *,\n")
        line = f"    def {name}(\n{inner}\n    ) -> {result}:"
    return f'{line}{comment}\n        """{doc}"""\n'


def declared(params: tuple[Param, ...]) -> list[str]:
    """Extra parameters as they are written in a signature."""
    return [f"{p.name}: {p.type} = {p.default!r}".replace("'", '"') for p in params]


def unary(row: Unary) -> Iterator[str]:
    """The method, its operator, its in-place form."""
    params = declared(row.params)
    yield method(row.name, params, "Self", row.doc)
    if row.dunder:
        yield method(f"__{row.dunder}__", [], "Self", row.doc)
    if row.inplace:
        yield method(f"{row.name}_", params, "Self", f"In place: {row.doc}")


def binary(row: Binary) -> Iterator[str]:
    """The method, its operators, its in-place form."""
    params = declared(row.params)
    default = ["*", "default: Any = None"]
    yield method(row.name, [OTHER, *params, *default], "Self", row.doc)
    if row.inplace:
        yield method(f"{row.name}_", [OTHER, *params], "Self", f"In place: {row.doc}")
    if row.dunder:
        yield method(f"__{row.dunder}__", [OTHER], "Self", row.doc)
        yield method(f"__r{row.dunder}__", [OTHER], "Self", row.doc)
        if row.inplace:
            yield method(f"__i{row.dunder}__", [OTHER], "Self", f"In place: {row.doc}")


def ternary(row: Ternary) -> Iterator[str]:
    """The method and its in-place form."""
    kind = "Operand | None = None" if row.optional else "Operand"
    params = [*(f"{name}: {kind}" for name in row.operands), *declared(row.params)]
    yield method(row.name, [*params, "*", "out: Any = None"], "Self", row.doc)
    if row.inplace:
        yield method(f"{row.name}_", params, "Self", f"In place: {row.doc}")


def comparison(row: Comparison) -> Iterator[str]:
    """The method and the operator."""
    yield method(row.name, [OTHER], "Self", row.doc)
    if row.name in ("eq", "ne"):
        comment = "  # type: ignore[override]"
        yield method(f"__{row.name}__", ["other: object"], "Self", row.doc, comment)
    else:
        yield method(f"__{row.name}__", [OTHER], "Self", row.doc)


def reduction(row: Reduction) -> Iterator[str]:
    """The method, to a tensordict or (``reduce=True``) to a tensor."""
    first = [f"{row.first}: float | Tensor"] if row.first else []
    head = [*first, "dim: Dims = ...", "keepdim: bool = ...", "*"]
    if row.indices:
        tail = ["reduce: bool | None = None", "return_indices: bool = True"]
        yield method(row.name, [*head, *tail], "Any", row.doc)
        return
    tail = ["key_transform: Callable[[str], str] | None = None"]
    tail += ["out: Any = None"] * (not row.first)
    for reduce, result in (
        ("reduce: Literal[False] | None = None", "Self"),
        ("reduce: Literal[True]", "Tensor"),
    ):
        params = [*head, *declared(row.params), reduce, *tail]
        yield "    @overload\n" + method(row.name, params, result, row.doc)


def scan(row: Scan) -> Iterator[str]:
    """The method."""
    if row.indices:
        params = ["*", "reduce: bool | None = None", "return_indices: bool = True"]
        yield method(row.name, ["dim: int", *params], "Any", row.doc)
    else:
        yield method(row.name, ["dim: int", *declared(row.params)], "Self", row.doc)


WRITERS: dict[type, Callable[[Any], Iterator[str]]] = {
    Unary: unary,
    Binary: binary,
    Ternary: ternary,
    Comparison: comparison,
    Reduction: reduction,
    Scan: scan,
}


def lines_of(row: Row) -> Iterator[str]:
    """Everything that the stub says about a row."""
    return WRITERS[type(row)](row)


def stub() -> str:
    """The text of the stub file."""
    return HEADER + "".join(text for row in TABLE for text in lines_of(row))


def main() -> int:
    """Write the stub, or compare it with the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    check = parser.parse_args().check
    text = stub()
    if not check:
        STUB.write_text(text)
        return 0
    if STUB.exists() and STUB.read_text() == text:
        return 0
    print(f"{STUB.name} is not what the op table gives: run python tools/gen_stubs.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
