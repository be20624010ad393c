"""Write ``docs/reference/operations.md`` from the op table, or ``--check`` that it is current."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tensordict.ops.table import (
    TABLE,
    Binary,
    Comparison,
    Reduction,
    Row,
    Scan,
    Ternary,
    Unary,
)

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "operations.md"

HEADER = """\
# Operations

<!-- Written by tools/gen_op_docs.py from the op table. Do not edit. -->

Every operation works leaf by leaf as the function of the same name in `torch` works on a tensor,
and returns a tensordict with the same keys, batch size, dimension names and device. Non-tensor
entries are kept as they are. A name with `_` at its end writes into the leaves and returns the
tensordict; it works on a locked one, and writes every leaf or none.

```python
>>> import torch
>>> from tensordict import TensorDict
>>> td = TensorDict({"a": torch.zeros(3, 4), "n": {"b": torch.ones(3)}}, batch_size=[3])
>>> (td + 1)["n", "b"]
tensor([2., 2., 2.])
>>> torch.exp(td)["a"].shape
torch.Size([3, 4])

```

An **operand** is a number, a tensor or a tensordict. A tensor broadcasts against the batch size,
whatever the feature dimensions of a leaf are; without batch dimensions it meets each leaf as
torch would have it. A tensordict is matched by key.

```python
>>> (td + torch.tensor([1.0, 2.0, 3.0]))["a"][:, 0]
tensor([1., 2., 3.])
>>> other = TensorDict({"a": torch.ones(3, 4)}, batch_size=[3])
>>> sorted(td.add(other, default="intersection").keys(True, True))
['a']
>>> td.add(other, default=10.0)["n", "b"]
tensor([11., 11., 11.])

```
"""

DIMS = """\
Without `dim` every leaf is reduced whole; `dim` is a batch dimension, a tuple of them, or
`"feature"` for the dimensions that are not batch dimensions. `reduce=True` also reduces the leaves
with each other, to one tensor. `keepdim=True` keeps reduced batch dimensions, of size 1;
`key_transform` renames the entries of the result.

```python
>>> td.sum(dim="feature")["a"].shape, td.sum(dim=0)["a"].shape, td.sum(reduce=True)
(torch.Size([3]), torch.Size([4]), tensor(3.))
>>> type(td.max(dim=0))
<class 'torch.return_types.max'>

```
"""

SECTIONS: tuple[tuple[type, str, str], ...] = (
    (Unary, "Of each leaf", ""),
    (Binary, "With an operand", ""),
    (
        Ternary,
        "With two operands",
        "`out` is a tensordict with the same keys, batch size and shapes; the results are written "
        "into its\nleaves, cast to their dtypes where torch can cast. When one leaf does not fit, none "
        "is written.\n",
    ),
    (
        Comparison,
        "Comparisons",
        "The result has boolean leaves; `==` and `!=` also compare non-tensor entries.\n",
    ),
    (Reduction, "Reductions", DIMS),
    (Scan, "Along a batch dimension", ""),
)

SIGNS = {
    "abs": "abs()",
    "add": "+",
    "and": "&",
    "eq": "==",
    "floordiv": "//",
    "ge": ">=",
    "gt": ">",
    "invert": "~",
    "le": "<=",
    "lshift": "<<",
    "lt": "<",
    "mod": "%",
    "mul": "*",
    "ne": "!=",
    "neg": "-",
    "or": "\\|",
    "pos": "+",
    "pow": "**",
    "rshift": ">>",
    "sub": "-",
    "truediv": "/",
    "xor": "^",
}


def call(row: Row) -> str:
    """The method as it is called."""
    params = [f"{p.name}={p.default!r}" for p in getattr(row, "params", ())]
    if isinstance(row, (Binary, Comparison)):
        params = ["other", *params]
    elif isinstance(row, Ternary):
        params = [*row.operands, *params, "out=None"]
    elif isinstance(row, Reduction):
        params = [*([row.first] if row.first else []), "dim", "keepdim", *params]
    elif isinstance(row, Scan):
        params = ["dim", *params]
    return f"`{row.name}({', '.join(params)})`"


def line(row: Row) -> str:
    """The row of the reference."""
    sign = row.name if isinstance(row, Comparison) else getattr(row, "dunder", "")
    inplace = f"`{row.name}_`" if getattr(row, "inplace", False) else ""
    return f"| {call(row)} | {inplace} | {f'`{SIGNS[sign]}`' if sign else ''} | {row.doc} |"


def page() -> str:
    """The text of the page."""
    out = [HEADER]
    for kind, title, text in SECTIONS:
        rows = [row for row in TABLE if type(row) is kind]
        head = f"\n## {title}\n\n" + (f"{text}\n" if text else "")
        table = ["| method | in place | operator | |", "|---|---|---|---|", *map(line, rows)]
        out.append(head + "\n".join(table) + "\n")
    return "".join(out)


def main() -> int:
    """Write the page, or compare it with the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    check = parser.parse_args().check
    if not check:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page())
        return 0
    if PAGE.exists() and PAGE.read_text() == page():
        return 0
    print(f"{PAGE.name} is not what the op table gives: run python tools/gen_op_docs.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
