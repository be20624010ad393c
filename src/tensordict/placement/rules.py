"""Where leaves should go: targets, by key or by pattern.

A pattern is matched with the rules of `fnmatch` over the dotted path, whatever the case, and
``*`` crosses dots.  A leading ``*.`` matches at the top level too.  A tuple is the exact path of
one leaf.  Where several rules match, the last one that says something about a field decides it.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from .._keys import dotted, path_of
from .._typing import DeviceLike, Path
from ..device.kinds import normal_device
from ..errors import EntryTypeError, FileFormatError
from .layout import Layout
from .names import FORMATS, dtype_name, format_name, parse_dtype, reading


@dataclass(frozen=True, slots=True)
class Target:
    """Where one leaf should go; ``None`` leaves that property as it is.

    Attributes:
        device: Device, in normal form (`normal_device`).
        dtype: Element type.
        layout: Sharding.  A move never changes it: another layout is an error there.
        memory_format: Order of the strides.
        pin: Whether host memory should be pinned.

    >>> Target(dtype=torch.float16) | Target(device="cpu", dtype=torch.float32)
    Target(device=device(type='cpu'), dtype=torch.float16)
    """

    device: torch.device | None = None
    dtype: torch.dtype | None = None
    layout: Layout | None = None
    memory_format: torch.memory_format | None = None
    pin: bool | None = None

    def __post_init__(self) -> None:
        device = self.device
        if device is not None:
            object.__setattr__(self, "device", normal_device(device))

    @classmethod
    def of(cls, value: Any) -> Target:
        """A target from a dtype, a device (also as text), a target, or ``None``.

        Raises:
            EntryTypeError: for anything else.
        """
        if isinstance(value, Target):
            return value
        if value is None:
            return _NO_TARGET
        if isinstance(value, torch.dtype):
            return cls(dtype=value)
        if isinstance(value, (torch.device, str, int)):
            return cls(device=torch.device(value))
        raise EntryTypeError(
            f"Cannot use {value!r} as a target: expected a dtype, a device or a Target, "
            f"got {type(value).__name__}."
        )

    def __or__(self, other: Target) -> Target:
        """This target, with what it leaves open taken from ``other``."""
        if self is other or other == _NO_TARGET:
            return self
        if self == _NO_TARGET:
            return other
        mine = {name: getattr(self, name) for name in _TARGET_FIELDS}
        return Target(
            **{k: getattr(other, k) if value is None else value for k, value in mine.items()}
        )

    def __repr__(self) -> str:
        parts = [f"{k}={v!r}" for k in _TARGET_FIELDS if (v := getattr(self, k)) is not None]
        return f"Target({', '.join(parts)})"

    def to_json(self) -> dict[str, Any]:
        """A JSON value with only what is set."""
        out: dict[str, Any] = {}
        if self.device is not None:
            out["device"] = str(self.device)
        if self.dtype is not None:
            out["dtype"] = dtype_name(self.dtype)
        if self.layout is not None:
            out["layout"] = self.layout.to_json()
        if self.memory_format is not None:
            out["memory_format"] = format_name(self.memory_format)
        if self.pin is not None:
            out["pin"] = self.pin
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Target:
        """The target of a `to_json` value.

        >>> target = Target("cuda:1", torch.bfloat16, pin=False)
        >>> Target.from_json(target.to_json()) == target
        True
        """
        unknown = set(data) - set(_TARGET_FIELDS)
        if unknown:
            raise FileFormatError(f"Cannot read a target: unknown fields {sorted(unknown)}.")
        device, dtype, layout = data.get("device"), data.get("dtype"), data.get("layout")
        form = data.get("memory_format")
        if form is not None and form not in FORMATS:
            raise FileFormatError(f"Cannot read a target: unknown memory format {form!r}.")
        return cls(
            None if device is None else torch.device(device),
            None if dtype is None else parse_dtype(dtype),
            None if layout is None else Layout.from_json(layout),
            None if form is None else FORMATS[form],
            data.get("pin"),
        )


_TARGET_FIELDS = ("device", "dtype", "layout", "memory_format", "pin")
_NO_TARGET = Target()
_WILDCARD = re.compile(r"[*?\[]")


@lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern, over dotted paths.

    >>> [bool(compile_pattern("*.Bias").match(path)) for path in ("a.b.bias", "bias", "biases")]
    [True, True, False]
    """
    text = fnmatch.translate(pattern)
    if pattern.startswith("*."):
        text = f"{fnmatch.translate(pattern[2:])}|{text}"
    return re.compile(text, re.IGNORECASE)


def predicate(pattern: str) -> Callable[[str], Any]:
    """What tells whether a lower-case dotted path matches; plain text tests where they serve.

    >>> [predicate(p)("enc.norm.w") for p in ("*norm*", "enc*", "*.W", "x")]
    [True, True, True, False]
    """
    text = pattern.lower()
    core = text.strip("*")
    if _WILDCARD.search(core) or not core:
        return compile_pattern(text).match
    head, tail = text.startswith("*"), text.endswith("*")
    if head and tail:
        # A leading "*." matches at the top level too.
        if text.startswith("*.") and not text.startswith("**"):
            top = core[1:]
            return lambda path: core in path or path.startswith(top)
        return lambda path: core in path
    if head:
        if core.startswith(".") and not text.startswith("**"):
            top = core[1:]
            return lambda path: path.endswith(core) or path == top
        return lambda path: path.endswith(core)
    if tail:
        return lambda path: path.startswith(core)
    return lambda path: path == core


@dataclass(frozen=True, slots=True)
class Rule:
    """A target for every leaf whose path matches.

    Attributes:
        pattern: A pattern over the dotted path, or a tuple: the exact path of one leaf.
        target: Where those leaves go.
        optional: Whether it is fine that nothing matches.

    >>> Rule("enc.*", torch.float16).matches(("enc", "layer0", "w"))
    True
    >>> Rule(("enc", "w"), "meta").matches(("enc", "w2"))
    False
    """

    pattern: str | Path
    target: Target = field(default_factory=Target)
    optional: bool = False
    # Whether a lower-case dotted path matches; of an exact path nothing is asked.
    test: Callable[[str], Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", Target.of(self.target))
        if isinstance(self.pattern, str):
            object.__setattr__(self, "test", predicate(self.pattern))
        else:
            object.__setattr__(self, "pattern", path_of(self.pattern))
            object.__setattr__(self, "test", _never)

    def __reduce__(self) -> Any:
        return Rule, (self.pattern, self.target, self.optional)

    def matches(self, path: Path) -> bool:
        """Whether the leaf at ``path`` is meant."""
        if isinstance(self.pattern, tuple):
            return self.pattern == path
        return bool(self.test(dotted(path).lower()))


def _never(path: str) -> bool:
    return False


def rules_of(rules: Any) -> tuple[Rule, ...]:
    """Rules from a mapping of patterns to targets, from pairs, or from rules.

    >>> rules_of({"*.bias": torch.float32})
    (Rule(pattern='*.bias', target=Target(dtype=torch.float32), optional=False),)
    """
    if isinstance(rules, Rule):
        return (rules,)
    items = rules.items() if isinstance(rules, Mapping) else rules
    return tuple(item if isinstance(item, Rule) else Rule(*item) for item in items)


class RuleSet:
    """Rules in order, matched fast, that remember which of them ever matched."""

    __slots__ = ("_exact", "_tests", "hits", "rules")

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        self.hits = [0] * len(self.rules)
        self._tests: list[tuple[int, Callable[[str], Any]]] = []
        self._exact: dict[Path, list[int]] = {}
        for index, rule in enumerate(self.rules):
            if isinstance(rule.pattern, tuple):
                self._exact.setdefault(rule.pattern, []).append(index)
            else:
                self._tests.append((index, rule.test))

    def matching(self, path: Path) -> list[Rule]:
        """The rules that match a path, the last one (the strongest) first."""
        found = list(self._exact.get(path, ())) if self._exact else []
        if self._tests:
            text = dotted(path).lower()
            found += [index for index, test in self._tests if test(text)]
        if not found:
            return []
        found.sort(reverse=True)
        for index in found:
            self.hits[index] += 1
        return [self.rules[index] for index in found]

    def target(self, path: Path) -> Target:
        """The target of a path by these rules, field by field."""
        out = _NO_TARGET
        for rule in self.matching(path):
            out = out | rule.target
        return out

    def unmatched(self, paths: Sequence[Path]) -> list[Unmatched]:
        """The rules that matched nothing so far and are not optional, with near misses."""
        return [
            Unmatched(rule.pattern, near_misses(rule.pattern, paths))
            for rule, hits in zip(self.rules, self.hits)
            if not hits and not rule.optional
        ]


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A pattern or key that met no leaf.

    Attributes:
        pattern: What was asked for.
        near: Dotted paths of the tree that look alike.
    """

    pattern: str | Path
    near: tuple[str, ...] = ()

    def __str__(self) -> str:
        hint = f" (near: {', '.join(self.near)})" if self.near else ""
        return f"{self.pattern!r} matches no leaf{hint}"


def near_misses(pattern: str | Path, paths: Sequence[Path], limit: int = 3) -> tuple[str, ...]:
    """Dotted paths that a pattern without a match may have meant.

    >>> near_misses("*.wieght", [("a", "weight"), ("a", "bias")])
    ('a.weight',)
    """
    text = pattern if isinstance(pattern, str) else dotted(pattern)
    core = re.sub(r"[*?\[\]]+", "", text).strip(".").lower()
    if not core:
        return ()
    depth = core.count(".") + 1
    # Compare with as many trailing names as the pattern has, so that long prefixes do not count.
    tails: dict[str, str] = {}
    for path in paths[:20_000]:
        tails.setdefault(dotted(path[-depth:]).lower(), dotted(path))
    close = difflib.get_close_matches(core, tails, n=limit, cutoff=0.6)
    close += [tail for tail in tails if core in tail and tail not in close][: limit - len(close)]
    return tuple(tails[tail] for tail in close)


@dataclass(frozen=True)
class Spec:
    """Targets for the leaves of a tree: by exact path, by rules, and a default.

    An entry beats the rules, the rules beat the default, field by field.

    Attributes:
        entries: Targets by path.
        rules: Patterns, the last match wins.
        default: For everything else.
    """

    entries: Mapping[Path, Target] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    default: Target = field(default_factory=Target)

    def with_rules(self, rules: Any) -> Spec:
        """This spec with stronger rules added.

        >>> Spec().with_rules({"*.bias": torch.float32}).target(("a", "bias")).dtype
        torch.float32
        """
        return replace(self, rules=self.rules + rules_of(rules))

    def target(self, path: Path) -> Target:
        """Where the leaf at ``path`` goes."""
        out = self.entries.get(path, _NO_TARGET)
        return out | RuleSet(self.rules).target(path) | self.default

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads back."""
        return {
            "format": "tensordict.spec",
            "version": 1,
            "entries": [[list(path), target.to_json()] for path, target in self.entries.items()],
            "rules": [
                {
                    "pattern": list(rule.pattern)
                    if isinstance(rule.pattern, tuple)
                    else rule.pattern,
                    "target": rule.target.to_json(),
                    "optional": rule.optional,
                }
                for rule in self.rules
            ],
            "default": self.default.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Spec:
        """The spec of a `to_json` value.

        Raises:
            FileFormatError: when the value is no spec, or of a later version.

        >>> spec = Spec({("a",): Target(dtype=torch.int8)}, rules_of({"*b": "meta"}))
        >>> Spec.from_json(spec.to_json()) == spec
        True
        """
        if not isinstance(data, Mapping) or data.get("format") != "tensordict.spec":
            raise FileFormatError("Cannot read a spec: expected format 'tensordict.spec'.")
        if data.get("version") != 1:
            raise FileFormatError(
                f"Cannot read a spec of version {data.get('version')!r}: expected 1."
            )
        with reading("a spec"):
            return cls(
                {tuple(path): Target.from_json(target) for path, target in data["entries"]},
                tuple(_read_rule(item) for item in data["rules"]),
                Target.from_json(data["default"]),
            )


def _read_rule(item: Any) -> Rule:
    pattern = item["pattern"]
    return Rule(
        tuple(pattern) if isinstance(pattern, list) else str(pattern),
        Target.from_json(item["target"]),
        bool(item["optional"]),
    )


def target_at(device: DeviceLike | None, dtype: torch.dtype | None) -> Target:
    """A target of device and dtype alone."""
    return Target(None if device is None else torch.device(device), dtype)
