"""One row for each leaf-wise operation.

A row gives a method of every tensordict, its in-place form, its operators, the rule for
the torch function, a line in ``pointwise.pyi``, a line in the reference and a test
against torch leaf by leaf.  ``docs/internals/adding-an-op.md`` shows how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Param:
    """A keyword argument that goes to the torch function as it is."""

    name: str
    type: str
    default: Any


@dataclass(frozen=True)
class Unary:
    """An operation on each leaf alone.

    Attributes:
        name: name of the method, and of the function in ``torch``.
        doc: first line of the docstring: what becomes of every leaf.
        inplace: whether there is ``name_``.
        params: more arguments.
        dunder: the operator, without underscores.
        domain: what test values look like: ``real``, ``positive``, ``unit``, ``int``, ``bool``.
    """

    name: str
    doc: str
    inplace: bool = True
    params: tuple[Param, ...] = ()
    dunder: str = ""
    domain: str = "real"


@dataclass(frozen=True)
class Binary:
    """An operation on each leaf and an operand.

    Attributes:
        name, doc, inplace, domain: as in `Unary`.
        params: more arguments.
        dunder: the operator, without underscores; it comes reflected, and in place where
            ``inplace`` says so.
        of: name of the function in ``torch`` when it is not ``name``.
        numbers: whether the torch function takes a Python number as the operand.
    """

    name: str
    doc: str
    inplace: bool = True
    params: tuple[Param, ...] = ()
    dunder: str = ""
    of: str = ""
    numbers: bool = True
    domain: str = "real"


@dataclass(frozen=True)
class Ternary:
    """An operation on each leaf and two operands.

    Attributes:
        name, doc, inplace, domain: as in `Unary`.
        operands: names of the two operands.
        params: more arguments.
        numbers: whether the torch function takes a number as the second operand.
        optional: whether either operand may be left out.
    """

    name: str
    doc: str
    operands: tuple[str, str]
    inplace: bool = True
    params: tuple[Param, ...] = ()
    numbers: bool = False
    optional: bool = False
    domain: str = "real"


@dataclass(frozen=True)
class Comparison:
    """A comparison of each leaf and an operand, with boolean leaves as the result.

    Attributes:
        name: name of the method, of the torch function, and of the operator.
        doc: first line of the docstring.
    """

    name: str
    doc: str


@dataclass(frozen=True)
class Reduction:
    """A reduction of some dimensions of each leaf.

    Attributes:
        name, doc, domain: as in `Unary`.
        params: keyword arguments that go to the torch function as they are.
        dims: whether the torch function takes several dimensions at once.
        indices: whether it also gives indices, as a named pair of values and indices.
        first: name and type of an argument before ``dim``, empty for none.
        batch: whether only batch dimensions are reduced when no ``dim`` is given.
    """

    name: str
    doc: str
    params: tuple[Param, ...] = ()
    dims: bool = True
    indices: bool = False
    first: str = ""
    batch: bool = False
    domain: str = "real"


@dataclass(frozen=True)
class Scan:
    """An operation along one batch dimension that keeps the shape.

    Attributes:
        name, doc, params, domain, indices: as in `Reduction`.
    """

    name: str
    doc: str
    params: tuple[Param, ...] = ()
    indices: bool = False
    domain: str = "real"


Row: TypeAlias = "Unary | Binary | Ternary | Comparison | Reduction | Scan"


# Names and defaults of parameters: closures hold these, which torch.compile can wrap.
Defaults: TypeAlias = "tuple[tuple[str, Any], ...]"


def defaults(params: Sequence[Param]) -> Defaults:
    """The names and defaults of parameters."""
    return tuple((p.name, p.default) for p in params)


def extra(params: Defaults, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Extra arguments by name, without those that have their default."""
    if len(args) > len(params):
        raise TypeError(f"expected at most {len(params)} more arguments, got {len(args)}: {args}")
    given = {name: a for (name, _), a in zip(params, args)}
    given.update(kwargs)
    for name, default in params:
        if name in given and given[name] == default:
            del given[name]
    return given


_ALPHA = (Param("alpha", "float | None", None),)

UNARY: tuple[Unary, ...] = (
    Unary("abs", "Absolute value of every leaf.", dunder="abs"),
    Unary("acos", "Arc cosine of every leaf.", domain="unit"),
    Unary("acosh", "Inverse hyperbolic cosine of every leaf.", domain="positive"),
    Unary("angle", "Angle of every (complex) leaf, in radians.", inplace=False),
    Unary("asin", "Arc sine of every leaf.", domain="unit"),
    Unary("asinh", "Inverse hyperbolic sine of every leaf."),
    Unary("atan", "Arc tangent of every leaf."),
    Unary("atanh", "Inverse hyperbolic tangent of every leaf.", domain="unit"),
    Unary("bitwise_not", "Every bit of every leaf inverted.", dunder="invert", domain="int"),
    Unary("ceil", "Smallest integer not below, for every leaf."),
    Unary("conj", "Complex conjugate of every leaf (a view).", inplace=False),
    Unary("cos", "Cosine of every leaf."),
    Unary("cosh", "Hyperbolic cosine of every leaf."),
    Unary("deg2rad", "Degrees to radians, for every leaf."),
    Unary("digamma", "Logarithmic derivative of the gamma function of every leaf."),
    Unary("erf", "Error function of every leaf."),
    Unary("erfc", "Complementary error function of every leaf."),
    Unary("erfinv", "Inverse error function of every leaf.", domain="unit"),
    Unary("exp", "Exponential of every leaf."),
    Unary("exp2", "2 to the power of every leaf."),
    Unary("expm1", "exp(x) - 1 of every leaf."),
    Unary("floor", "Largest integer not above, for every leaf."),
    Unary("frac", "Fractional part of every leaf."),
    Unary("i0", "Modified Bessel function of order 0 of every leaf."),
    Unary("isfinite", "True where a leaf is finite.", inplace=False),
    Unary("isinf", "True where a leaf is infinite.", inplace=False),
    Unary("isnan", "True where a leaf is NaN.", inplace=False),
    Unary("isneginf", "True where a leaf is minus infinity.", inplace=False),
    Unary("isposinf", "True where a leaf is plus infinity.", inplace=False),
    Unary("isreal", "True where a leaf has no imaginary part.", inplace=False),
    Unary("lgamma", "Logarithm of the gamma function of every leaf."),
    Unary("log", "Natural logarithm of every leaf.", domain="positive"),
    Unary("log10", "Logarithm to base 10 of every leaf.", domain="positive"),
    Unary("log1p", "log(1 + x) of every leaf.", domain="positive"),
    Unary("log2", "Logarithm to base 2 of every leaf.", domain="positive"),
    Unary("logical_not", "True where a leaf is zero."),
    Unary(
        "logit",
        "log(x / (1 - x)) of every leaf.",
        params=(Param("eps", "float | None", None),),
        domain="unit",
    ),
    Unary(
        "nan_to_num",
        "NaN and infinities of every leaf replaced by numbers.",
        params=(
            Param("nan", "float | None", None),
            Param("posinf", "float | None", None),
            Param("neginf", "float | None", None),
        ),
    ),
    Unary("neg", "Negative of every leaf.", dunder="neg"),
    Unary("positive", "Every leaf as it is.", inplace=False, dunder="pos"),
    Unary("rad2deg", "Radians to degrees, for every leaf."),
    Unary("reciprocal", "1 / x of every leaf.", domain="positive"),
    Unary("relu", "Every leaf, with 0 where it is negative."),
    Unary(
        "round",
        "Nearest integer (even in a tie) of every leaf.",
        params=(Param("decimals", "int", 0),),
    ),
    Unary("rsqrt", "1 / sqrt(x) of every leaf.", domain="positive"),
    Unary("sgn", "Sign of every leaf; x / abs(x) for complex ones."),
    Unary("sigmoid", "1 / (1 + exp(-x)) of every leaf."),
    Unary("sign", "Sign of every leaf."),
    Unary("signbit", "True where a leaf has its sign bit set.", inplace=False),
    Unary("sin", "Sine of every leaf."),
    Unary("sinc", "sin(pi x) / (pi x) of every leaf."),
    Unary("sinh", "Hyperbolic sine of every leaf."),
    Unary("sqrt", "Square root of every leaf.", domain="positive"),
    Unary("square", "Square of every leaf."),
    Unary("tan", "Tangent of every leaf."),
    Unary("tanh", "Hyperbolic tangent of every leaf."),
    Unary("trunc", "Integer part of every leaf."),
)


BINARY: tuple[Binary, ...] = (
    Binary(
        "add",
        "Every leaf plus the operand.",
        params=_ALPHA,
        dunder="add",
    ),
    Binary("atan2", "Arc tangent of every leaf over the operand, by quadrant.", numbers=False),
    Binary(
        "bitwise_and",
        "Bitwise AND of every leaf and the operand.",
        dunder="and",
        domain="int",
    ),
    Binary(
        "bitwise_left_shift",
        "Bits of every leaf shifted left by the operand.",
        dunder="lshift",
        domain="shift",
    ),
    Binary(
        "bitwise_or",
        "Bitwise OR of every leaf and the operand.",
        dunder="or",
        domain="int",
    ),
    Binary(
        "bitwise_right_shift",
        "Bits of every leaf shifted right by the operand.",
        dunder="rshift",
        domain="shift",
    ),
    Binary(
        "bitwise_xor",
        "Bitwise XOR of every leaf and the operand.",
        dunder="xor",
        domain="int",
    ),
    Binary("clamp_max", "The smaller of every leaf and the operand."),
    Binary("clamp_min", "The larger of every leaf and the operand."),
    Binary("copysign", "Every leaf with the sign of the operand."),
    Binary(
        "div",
        "Every leaf divided by the operand.",
        params=(Param("rounding_mode", "str | None", None),),
        dunder="truediv",
        domain="positive",
    ),
    Binary("float_power", "Every leaf to the power of the operand, in double precision.", False),
    Binary(
        "floor_divide",
        "Every leaf divided by the operand, rounded down.",
        dunder="floordiv",
        domain="positive",
    ),
    Binary("fmax", "The larger of every leaf and the operand, NaN ignored.", False, numbers=False),
    Binary("fmin", "The smaller of every leaf and the operand, NaN ignored.", False, numbers=False),
    Binary("fmod", "Remainder of every leaf by the operand, sign of the leaf.", domain="positive"),
    Binary(
        "gcd", "Greatest common divisor of every leaf and the operand.", numbers=False, domain="int"
    ),
    Binary(
        "heaviside", "0, the operand, or 1 where a leaf is negative, 0, positive.", numbers=False
    ),
    Binary("hypot", "sqrt(x ** 2 + y ** 2) of every leaf and the operand.", numbers=False),
    Binary(
        "isclose",
        "True where every leaf is close to the operand.",
        inplace=False,
        params=(
            Param("rtol", "float", 1e-5),
            Param("atol", "float", 1e-8),
            Param("equal_nan", "bool", False),
        ),
        numbers=False,
    ),
    Binary(
        "lcm", "Least common multiple of every leaf and the operand.", numbers=False, domain="int"
    ),
    Binary("ldexp", "Every leaf times 2 to the power of the operand.", numbers=False),
    Binary(
        "logaddexp", "log(exp(x) + exp(y)) of every leaf and the operand.", False, numbers=False
    ),
    Binary(
        "logaddexp2", "log2(2 ** x + 2 ** y) of every leaf and the operand.", False, numbers=False
    ),
    Binary("logical_and", "True where every leaf and the operand are not zero.", numbers=False),
    Binary("logical_or", "True where every leaf or the operand is not zero.", numbers=False),
    Binary(
        "logical_xor", "True where one of every leaf and the operand is not zero.", numbers=False
    ),
    Binary("maximum", "The larger of every leaf and the operand.", numbers=False),
    Binary("minimum", "The smaller of every leaf and the operand.", numbers=False),
    Binary(
        "mod",
        "Remainder of every leaf by the operand, sign of the operand (Python's ``%``).",
        dunder="mod",
        of="remainder",
        domain="positive",
    ),
    Binary(
        "mul",
        "Every leaf times the operand.",
        dunder="mul",
    ),
    Binary("nextafter", "The next number after every leaf towards the operand.", numbers=False),
    Binary("pow", "Every leaf to the power of the operand.", dunder="pow", domain="positive"),
    Binary(
        "remainder",
        "Remainder of every leaf by the operand, sign of the operand.",
        domain="positive",
    ),
    Binary("rsub", "The operand minus every leaf.", False, params=_ALPHA),
    Binary(
        "sub",
        "Every leaf minus the operand.",
        params=_ALPHA,
        dunder="sub",
    ),
    Binary("true_divide", "Every leaf divided by the operand.", domain="positive"),
    Binary("xlogy", "Every leaf times the logarithm of the operand.", domain="positive"),
)

TERNARY: tuple[Ternary, ...] = (
    Ternary(
        "addcdiv",
        "Every leaf plus ``value * other1 / other2``.",
        ("other1", "other2"),
        params=(Param("value", "float", 1),),
        domain="positive",
    ),
    Ternary(
        "addcmul",
        "Every leaf plus ``value * other1 * other2``.",
        ("other1", "other2"),
        params=(Param("value", "float", 1),),
    ),
    Ternary(
        "clamp",
        "Every leaf, not below ``min`` and not above ``max``.",
        ("min", "max"),
        optional=True,
    ),
    Ternary(
        "lerp", "Every leaf moved towards ``end`` by ``weight``.", ("end", "weight"), numbers=True
    ),
)

COMPARISONS: tuple[Comparison, ...] = (
    Comparison("eq", "True where every leaf equals the operand."),
    Comparison("ge", "True where every leaf is not below the operand."),
    Comparison("gt", "True where every leaf is above the operand."),
    Comparison("le", "True where every leaf is not above the operand."),
    Comparison("lt", "True where every leaf is below the operand."),
    Comparison("ne", "True where every leaf differs from the operand."),
)

_DTYPE = (Param("dtype", "torch.dtype | None", None),)
_CORRECTION = (Param("correction", "int", 1),)
_INTERPOLATION = (Param("interpolation", "str", "linear"),)

REDUCTIONS: tuple[Reduction, ...] = (
    Reduction("amax", "Maximum of every leaf."),
    Reduction("amin", "Minimum of every leaf."),
    Reduction("argmax", "Position of the maximum of every leaf.", dims=False),
    Reduction("argmin", "Position of the minimum of every leaf.", dims=False),
    Reduction("count_nonzero", "Number of values of every leaf that are not zero."),
    Reduction("logsumexp", "log(sum(exp(x))) of every leaf.", batch=True),
    Reduction("max", "Maximum of every leaf.", dims=False, indices=True),
    Reduction("mean", "Mean of every leaf.", _DTYPE),
    Reduction("median", "Median (the lower one) of every leaf.", dims=False, indices=True),
    Reduction("min", "Minimum of every leaf.", dims=False, indices=True),
    Reduction("nanmean", "Mean of every leaf without its NaNs.", _DTYPE),
    Reduction("nanmedian", "Median of every leaf without its NaNs.", dims=False, indices=True),
    Reduction(
        "nanquantile",
        "Quantile of every leaf without its NaNs.",
        _INTERPOLATION,
        dims=False,
        first="q",
    ),
    Reduction("nansum", "Sum of every leaf without its NaNs.", _DTYPE),
    Reduction("prod", "Product of every leaf.", _DTYPE, dims=False),
    Reduction("quantile", "Quantile of every leaf.", _INTERPOLATION, dims=False, first="q"),
    Reduction("std", "Standard deviation of every leaf.", _CORRECTION),
    Reduction("sum", "Sum of every leaf.", _DTYPE),
    Reduction("var", "Variance of every leaf.", _CORRECTION),
)

SCANS: tuple[Scan, ...] = (
    Scan("cummax", "Running maximum of every leaf.", indices=True),
    Scan("cummin", "Running minimum of every leaf.", indices=True),
    Scan("cumprod", "Running product of every leaf.", _DTYPE),
    Scan("cumsum", "Running sum of every leaf.", _DTYPE),
    Scan("log_softmax", "Logarithm of the softmax of every leaf.", _DTYPE),
    Scan("logcumsumexp", "Logarithm of the running sum of exponentials of every leaf."),
    Scan("softmax", "Softmax of every leaf: exp(x) over its sum.", _DTYPE),
)

TABLE: tuple[Row, ...] = (*UNARY, *BINARY, *TERNARY, *COMPARISONS, *REDUCTIONS, *SCANS)
