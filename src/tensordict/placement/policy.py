"""Which dtype each leaf should have: mixed precision by patterns.

A policy decides dtypes alone; a `Spec` decides devices too and is stronger where both speak.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .._typing import Path
from ..errors import EntryTypeError
from .casts import Loss
from .names import dtype_name, parse_dtype, reading
from .rules import Rule, RuleSet, Target, Unmatched

OnLossy = Literal["error", "warn", "allow"]
Check = Literal["none", "sample", "full"]

MIXED_FP32 = ("*norm*", "*.ln_*", "*.bn*", "*embed*", "*wte*", "*wpe*", "*.bias")
_KEEP = Target()


@dataclass(frozen=True)
class CastPolicy:
    """Dtypes by path pattern.

    Args:
        rules: A mapping of patterns to dtypes, pairs, or rules; a dtype of ``None`` keeps the
            leaf as it is.  The last match wins.
        default: The dtype of every leaf that no rule matches; ``None`` keeps it.
        floating_only: Leave integer, boolean and complex leaves alone.
        on_lossy: What to do when a cast loses range or kind (see `Loss`); rounding is
            never refused.
        check: Whether conversion looks at no value, at a sample of each leaf, or at all.
        scale: ``"tensor"`` stores fp8 leaves divided by one factor, kept in a leaf beside them
            that has the same name with ``_scale`` added.

    Raises:
        EntryTypeError: for a rule or option that means nothing.

    >>> policy = CastPolicy({"*norm*": torch.float32}, default=torch.bfloat16)
    >>> policy.dtype_for(("layer", "w"), torch.float32)
    torch.bfloat16
    >>> policy.dtype_for(("layer", "norm", "w"), torch.float32) is torch.float32
    True
    """

    rules: tuple[Rule, ...] = ()
    default: torch.dtype | None = None
    floating_only: bool = True
    on_lossy: OnLossy = "warn"
    check: Check = "none"
    scale: Literal["tensor"] | None = None

    def __init__(
        self,
        rules: Any = (),
        *,
        default: torch.dtype | str | None = None,
        floating_only: bool = True,
        on_lossy: OnLossy = "warn",
        check: Check = "none",
        scale: Literal["tensor"] | None = None,
    ) -> None:
        store = object.__setattr__
        store(self, "rules", _cast_rules(rules))
        store(self, "default", None if default is None else parse_dtype(default))
        store(self, "floating_only", floating_only)
        store(self, "on_lossy", _one_of("on_lossy", on_lossy, ("error", "warn", "allow")))
        store(self, "check", _one_of("check", check, ("none", "sample", "full")))
        store(self, "scale", _one_of("scale", scale, (None, "tensor")))

    @classmethod
    def mixed(
        cls,
        param: torch.dtype | str = torch.bfloat16,
        keep_fp32: Iterable[str | Path] = MIXED_FP32,
        **options: Any,
    ) -> CastPolicy:
        """The usual mixed precision: ``param`` everywhere but in what trains badly in it.

        Args:
            param: The dtype of most leaves.
            keep_fp32: Patterns of leaves in float32: norms, embeddings and biases by default.
            **options: As of the constructor.

        >>> policy = CastPolicy.mixed()
        >>> policy.dtype_for(("h", "0", "attn", "bias"), torch.float32)
        torch.float32
        """
        standard = keep_fp32 is MIXED_FP32
        fp32 = Target(dtype=torch.float32)
        rules = [Rule(pattern, fp32, optional=standard) for pattern in keep_fp32]
        return cls(rules, default=param, **options)

    def keeping(self, rules: Any) -> CastPolicy:
        """This policy with stronger rules added.

        >>> policy = CastPolicy.mixed().keeping({"*.router.*": "fp32", "*.scale": None})
        >>> policy.dtype_for(("moe", "router", "w"), torch.float32)
        torch.float32
        """
        return self._with(rules=self.rules + _cast_rules(rules))

    def _with(self, **changes: Any) -> CastPolicy:
        names = ("rules", "default", "floating_only", "on_lossy", "check", "scale")
        return CastPolicy(**{name: getattr(self, name) for name in names} | changes)

    def dtype_for(self, path: Path, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype for one leaf, ``None`` to leave it alone."""
        return PolicyMatcher(self).dtype_for(path, dtype)

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads back."""
        return {
            "rules": [
                [
                    list(rule.pattern) if isinstance(rule.pattern, tuple) else rule.pattern,
                    None if rule.target.dtype is None else dtype_name(rule.target.dtype),
                    rule.optional,
                ]
                for rule in self.rules
            ],
            "default": None if self.default is None else dtype_name(self.default),
            "floating_only": self.floating_only,
            "on_lossy": self.on_lossy,
            "check": self.check,
            "scale": self.scale,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CastPolicy:
        """The policy of a `to_json` value.

        Raises:
            FileFormatError: when the value is no policy.

        >>> policy = CastPolicy.mixed(on_lossy="error")
        >>> CastPolicy.from_json(policy.to_json()) == policy
        True
        """
        with reading("a cast policy"):
            rules = [
                Rule(
                    tuple(pattern) if isinstance(pattern, list) else pattern,
                    Target(dtype=None if name is None else parse_dtype(name)),
                    bool(optional),
                )
                for pattern, name, optional in data["rules"]
            ]
            options = {key: value for key, value in data.items() if key != "rules"}
            return cls(rules, **options)

    @classmethod
    def of(cls, value: Any) -> CastPolicy:
        """A policy as it is, or one that casts everything to a dtype.

        Raises:
            EntryTypeError: for anything else.

        >>> CastPolicy.of("bf16").default
        torch.bfloat16
        """
        if isinstance(value, CastPolicy):
            return value
        if isinstance(value, (str, torch.dtype)):
            return cls(default=value)
        raise EntryTypeError(
            f"Cannot use {value!r} as a cast policy: expected a CastPolicy or a dtype, "
            f"got {type(value).__name__}."
        )


class PolicyMatcher:
    """A policy at work on one tree: matches fast, and knows which rules met nothing."""

    __slots__ = ("_rules", "policy")

    def __init__(self, policy: CastPolicy) -> None:
        self.policy = policy
        self._rules = RuleSet(policy.rules)

    def dtype_for(self, path: Path, dtype: torch.dtype) -> torch.dtype | None:
        """As `CastPolicy.dtype_for`; a rule that matches counts as met even for an integer."""
        found = self._rules.matching(path)
        if self.policy.floating_only and not dtype.is_floating_point:
            return None
        return found[0].target.dtype if found else self.policy.default

    def unmatched(self, paths: list[Path]) -> list[Unmatched]:
        """Rules that met no leaf."""
        return self._rules.unmatched(paths)


def acts_on(policy: CastPolicy, lost: Loss) -> bool:
    """Whether a loss is one that ``on_lossy`` speaks about.

    >>> acts_on(CastPolicy(), Loss.ROUNDING), acts_on(CastPolicy(), Loss.RANGE)
    (False, True)
    """
    return policy.on_lossy != "allow" and bool(lost & (Loss.RANGE | Loss.KIND))


def _cast_rules(rules: Any) -> tuple[Rule, ...]:
    if isinstance(rules, Mapping):
        rules = rules.items()
    out = []
    for item in rules:
        if isinstance(item, Rule):
            out.append(item)
            continue
        pattern, dtype = item
        out.append(Rule(pattern, _KEEP if dtype is None else Target(dtype=parse_dtype(dtype))))
    return tuple(out)


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise EntryTypeError(f"Cannot use {name}={value!r}: expected one of {allowed}.")
    return value
