"""Writes docs/compat.md: what became of every public name of tensordict 0.15.3.

The names and signatures are facts kept in tools/compat_names.txt.  A name is *done* when it
resolves here and takes the arguments it took there, *refused* when REFUSED says why not, and
*planned* otherwise.  ``--check`` fails when the page is not what would be written.

    python tools/gen_compat.py [--check]
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAMES = Path(__file__).with_name("compat_names.txt")
PAGE = ROOT / "docs" / "compat.md"

_STORES = "key-value stores (redis, dragonfly): other tools do that"
# (group, name), or group alone -> why there will be no such name.
REFUSED: dict[Any, str] = {
    "Stores": _STORES,
    ("Constructors and classes", "TensorDictStore"): _STORES,
    ("Constructors and classes", "LazyStackedTensorDictStore"): _STORES,
    ("Persistence", "to_store"): _STORES,
    ("Modules importable by name", "store"): _STORES,
    ("Conversion", "to_mds"): "MosaicML shards: their own writer does that from td.to_dict()",
}
# (group, name) -> how the arguments differ, where they differ on purpose.
DIFFERS: dict[Any, str] = {
    ("Constructors and classes", "NonTensorData"): "`batch_size` has a default; no private fields",
    ("Constructors and classes", "MetaData"): "`batch_size` has a default; no private fields",
    ("Constructors and classes", "NonTensorDataBase"): "abstract here",
    ("Constructors and classes", "TensorAttrs"): "a leaf: it has no batch size, device or names",
    ("Constructors and classes", "LazyStackedTensorDict"): "sizes and devices are the members'",
    ("Functions of the package", "from_dataclass"): "`inplace=True` raises: others hold the class",
    ("Distributed", "broadcast"): "the class of the result travels with it",
    ("Distributed", "init_remote"): "the class of the result travels with it",
}


_NOT_DISPATCHED = {"is_tensor"}


@dataclass(frozen=True)
class Name:
    """One public name.

    Attributes:
        group: heading that it stands under.
        owner: class of the package or module that has it.
        kind: callable, classmethod, property, attribute, class, value, operator, torch, module.
        text: the name, with its signature where it has one.
    """

    group: str
    owner: str
    kind: str
    text: str

    @property
    def name(self) -> str:
        """The name alone."""
        return self.text.split("(", 1)[0]


@dataclass(frozen=True)
class Verdict:
    """What became of a name: ``done``, ``planned`` or ``refused``, and a remark."""

    status: str
    note: str = ""


def read_names() -> Iterator[Name]:
    """The facts, in their order."""
    group = owner = ""
    for line in NAMES.read_text().splitlines():
        if line.startswith("["):
            group, owner = line[1:].split("] ")
        elif line and not line.startswith("#"):
            kind, text = line.split("\t")
            yield Name(group, owner, kind, text)


def _owner(name: Name) -> Any:
    import tensordict

    if name.owner.split(".")[0] == "tensordict":
        try:
            return importlib.import_module(name.owner)
        except ImportError:
            return None
    return getattr(tensordict, name.owner, None)


def resolve(name: Name) -> Any:
    """The object here, None when there is none."""
    if name.kind == "module":
        try:
            return importlib.import_module(f"{name.owner}.{name.name}")
        except ImportError:
            return None
    if name.kind == "torch":
        return _torch_rule(name.name)
    owner = _owner(name)
    if owner is None:
        return None
    return (
        inspect.getattr_static(owner, name.name, None)
        if isinstance(owner, type)
        else getattr(owner, name.name, None)
    )


def _torch_rule(dotted: str) -> Any:
    """Our rule for a torch function; reading a kind (``is_tensor``) needs none."""
    import torch

    from tensordict.core.torch_function import HANDLERS

    function: Any = torch
    for part in dotted.split("."):
        function = getattr(function, part)
    # What torch does not dispatch needs no rule: it reads the class.
    return HANDLERS.get(function) or (function if dotted in _NOT_DISPATCHED else None)


def arguments_missing(name: Name, found: Any) -> list[str]:
    """The arguments of the signature that the object here does not take."""
    if "(" not in name.text or name.kind in ("property", "attribute", "value", "torch"):
        return []
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        return []
    if parameters and parameters[0].name in ("self", "cls") and not isinstance(found, type):
        parameters = parameters[1:]
    kinds = {p.kind for p in parameters}
    by_name = {p.name for p in parameters}
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    wanted = ast.parse(f"def {name.text.replace('/, ', '')}: ...").body[0].args  # type: ignore[attr-defined]
    given = [a.arg for a in wanted.args if a.arg not in ("self", "cls")]
    missing = []
    for i, arg in enumerate(given):
        in_place = i < len(positional) and positional[i] == arg
        required = i < len(given) - len(wanted.defaults)
        # A required argument is given by position: its name is free.
        taken = in_place or (required and i < len(positional)) or _by_keyword(arg, by_name, kinds)
        if not taken and inspect.Parameter.VAR_POSITIONAL not in kinds:
            missing.append(arg)
    missing += [a.arg for a in wanted.kwonlyargs if not _by_keyword(a.arg, by_name, kinds)]
    return [arg for arg in missing if not arg.startswith("_")]


def _by_keyword(arg: str, names: set[str], kinds: set[Any]) -> bool:
    return arg in names or inspect.Parameter.VAR_KEYWORD in kinds


def judge(name: Name) -> Verdict:
    """What became of one name."""
    reason = REFUSED.get((name.group, name.name)) or REFUSED.get(name.group)
    if reason is not None:
        return Verdict("refused", reason)
    found = resolve(name)
    if found is None:
        return Verdict("planned")
    known = DIFFERS.get((name.group, name.name))
    missing = arguments_missing(name, found)
    if missing and known is None:
        return Verdict("planned", f"there, without {', '.join(missing)}")
    return Verdict("done", known or "")


def page() -> str:
    """The text of docs/compat.md."""
    verdicts = [(name, judge(name)) for name in read_names()]
    counts = Counter(verdict.status for _, verdict in verdicts)
    lines = [
        "# Compatibility",
        "",
        "Every public name of tensordict 0.15.3 and what became of it. *done*: it is here and takes",
        "the arguments it took there. *planned*: not yet. *refused*: it will not come, and why.",
        "Written by `tools/gen_compat.py`.",
        "",
        f"{counts['done']} done, {counts['planned']} planned, {counts['refused']} refused.",
    ]
    group = ""
    for name, verdict in verdicts:
        if name.group != group:
            group = name.group
            lines += ["", f"## {group}", "", "| name | status | remark |", "|---|---|---|"]
        text = name.text.replace("|", "\\|")
        lines.append(f"| `{text}` | {verdict.status} | {verdict.note} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    """Write the page, or compare it."""
    text = page()
    if "--check" in argv:
        if PAGE.read_text() != text:
            print("docs/compat.md is not current: run python tools/gen_compat.py")
            return 1
        return 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
