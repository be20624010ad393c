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
    def abs(self) -> Self:
        """Absolute value of every leaf."""
    def __abs__(self) -> Self:
        """Absolute value of every leaf."""
    def abs_(self) -> Self:
        """In place: Absolute value of every leaf."""
    def acos(self) -> Self:
        """Arc cosine of every leaf."""
    def acos_(self) -> Self:
        """In place: Arc cosine of every leaf."""
    def acosh(self) -> Self:
        """Inverse hyperbolic cosine of every leaf."""
    def acosh_(self) -> Self:
        """In place: Inverse hyperbolic cosine of every leaf."""
    def angle(self) -> Self:
        """Angle of every (complex) leaf, in radians."""
    def asin(self) -> Self:
        """Arc sine of every leaf."""
    def asin_(self) -> Self:
        """In place: Arc sine of every leaf."""
    def asinh(self) -> Self:
        """Inverse hyperbolic sine of every leaf."""
    def asinh_(self) -> Self:
        """In place: Inverse hyperbolic sine of every leaf."""
    def atan(self) -> Self:
        """Arc tangent of every leaf."""
    def atan_(self) -> Self:
        """In place: Arc tangent of every leaf."""
    def atanh(self) -> Self:
        """Inverse hyperbolic tangent of every leaf."""
    def atanh_(self) -> Self:
        """In place: Inverse hyperbolic tangent of every leaf."""
    def bitwise_not(self) -> Self:
        """Every bit of every leaf inverted."""
    def __invert__(self) -> Self:
        """Every bit of every leaf inverted."""
    def bitwise_not_(self) -> Self:
        """In place: Every bit of every leaf inverted."""
    def ceil(self) -> Self:
        """Smallest integer not below, for every leaf."""
    def ceil_(self) -> Self:
        """In place: Smallest integer not below, for every leaf."""
    def conj(self) -> Self:
        """Complex conjugate of every leaf (a view)."""
    def cos(self) -> Self:
        """Cosine of every leaf."""
    def cos_(self) -> Self:
        """In place: Cosine of every leaf."""
    def cosh(self) -> Self:
        """Hyperbolic cosine of every leaf."""
    def cosh_(self) -> Self:
        """In place: Hyperbolic cosine of every leaf."""
    def deg2rad(self) -> Self:
        """Degrees to radians, for every leaf."""
    def deg2rad_(self) -> Self:
        """In place: Degrees to radians, for every leaf."""
    def digamma(self) -> Self:
        """Logarithmic derivative of the gamma function of every leaf."""
    def digamma_(self) -> Self:
        """In place: Logarithmic derivative of the gamma function of every leaf."""
    def erf(self) -> Self:
        """Error function of every leaf."""
    def erf_(self) -> Self:
        """In place: Error function of every leaf."""
    def erfc(self) -> Self:
        """Complementary error function of every leaf."""
    def erfc_(self) -> Self:
        """In place: Complementary error function of every leaf."""
    def erfinv(self) -> Self:
        """Inverse error function of every leaf."""
    def erfinv_(self) -> Self:
        """In place: Inverse error function of every leaf."""
    def exp(self) -> Self:
        """Exponential of every leaf."""
    def exp_(self) -> Self:
        """In place: Exponential of every leaf."""
    def exp2(self) -> Self:
        """2 to the power of every leaf."""
    def exp2_(self) -> Self:
        """In place: 2 to the power of every leaf."""
    def expm1(self) -> Self:
        """exp(x) - 1 of every leaf."""
    def expm1_(self) -> Self:
        """In place: exp(x) - 1 of every leaf."""
    def floor(self) -> Self:
        """Largest integer not above, for every leaf."""
    def floor_(self) -> Self:
        """In place: Largest integer not above, for every leaf."""
    def frac(self) -> Self:
        """Fractional part of every leaf."""
    def frac_(self) -> Self:
        """In place: Fractional part of every leaf."""
    def i0(self) -> Self:
        """Modified Bessel function of order 0 of every leaf."""
    def i0_(self) -> Self:
        """In place: Modified Bessel function of order 0 of every leaf."""
    def isfinite(self) -> Self:
        """True where a leaf is finite."""
    def isinf(self) -> Self:
        """True where a leaf is infinite."""
    def isnan(self) -> Self:
        """True where a leaf is NaN."""
    def isneginf(self) -> Self:
        """True where a leaf is minus infinity."""
    def isposinf(self) -> Self:
        """True where a leaf is plus infinity."""
    def isreal(self) -> Self:
        """True where a leaf has no imaginary part."""
    def lgamma(self) -> Self:
        """Logarithm of the gamma function of every leaf."""
    def lgamma_(self) -> Self:
        """In place: Logarithm of the gamma function of every leaf."""
    def log(self) -> Self:
        """Natural logarithm of every leaf."""
    def log_(self) -> Self:
        """In place: Natural logarithm of every leaf."""
    def log10(self) -> Self:
        """Logarithm to base 10 of every leaf."""
    def log10_(self) -> Self:
        """In place: Logarithm to base 10 of every leaf."""
    def log1p(self) -> Self:
        """log(1 + x) of every leaf."""
    def log1p_(self) -> Self:
        """In place: log(1 + x) of every leaf."""
    def log2(self) -> Self:
        """Logarithm to base 2 of every leaf."""
    def log2_(self) -> Self:
        """In place: Logarithm to base 2 of every leaf."""
    def logical_not(self) -> Self:
        """True where a leaf is zero."""
    def logical_not_(self) -> Self:
        """In place: True where a leaf is zero."""
    def logit(self, eps: float | None = None) -> Self:
        """log(x / (1 - x)) of every leaf."""
    def logit_(self, eps: float | None = None) -> Self:
        """In place: log(x / (1 - x)) of every leaf."""
    def nan_to_num(
        self, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
    ) -> Self:
        """NaN and infinities of every leaf replaced by numbers."""
    def nan_to_num_(
        self, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
    ) -> Self:
        """In place: NaN and infinities of every leaf replaced by numbers."""
    def neg(self) -> Self:
        """Negative of every leaf."""
    def __neg__(self) -> Self:
        """Negative of every leaf."""
    def neg_(self) -> Self:
        """In place: Negative of every leaf."""
    def positive(self) -> Self:
        """Every leaf as it is."""
    def __pos__(self) -> Self:
        """Every leaf as it is."""
    def rad2deg(self) -> Self:
        """Radians to degrees, for every leaf."""
    def rad2deg_(self) -> Self:
        """In place: Radians to degrees, for every leaf."""
    def reciprocal(self) -> Self:
        """1 / x of every leaf."""
    def reciprocal_(self) -> Self:
        """In place: 1 / x of every leaf."""
    def relu(self) -> Self:
        """Every leaf, with 0 where it is negative."""
    def relu_(self) -> Self:
        """In place: Every leaf, with 0 where it is negative."""
    def round(self, decimals: int = 0) -> Self:
        """Nearest integer (even in a tie) of every leaf."""
    def round_(self, decimals: int = 0) -> Self:
        """In place: Nearest integer (even in a tie) of every leaf."""
    def rsqrt(self) -> Self:
        """1 / sqrt(x) of every leaf."""
    def rsqrt_(self) -> Self:
        """In place: 1 / sqrt(x) of every leaf."""
    def sgn(self) -> Self:
        """Sign of every leaf; x / abs(x) for complex ones."""
    def sgn_(self) -> Self:
        """In place: Sign of every leaf; x / abs(x) for complex ones."""
    def sigmoid(self) -> Self:
        """1 / (1 + exp(-x)) of every leaf."""
    def sigmoid_(self) -> Self:
        """In place: 1 / (1 + exp(-x)) of every leaf."""
    def sign(self) -> Self:
        """Sign of every leaf."""
    def sign_(self) -> Self:
        """In place: Sign of every leaf."""
    def signbit(self) -> Self:
        """True where a leaf has its sign bit set."""
    def sin(self) -> Self:
        """Sine of every leaf."""
    def sin_(self) -> Self:
        """In place: Sine of every leaf."""
    def sinc(self) -> Self:
        """sin(pi x) / (pi x) of every leaf."""
    def sinc_(self) -> Self:
        """In place: sin(pi x) / (pi x) of every leaf."""
    def sinh(self) -> Self:
        """Hyperbolic sine of every leaf."""
    def sinh_(self) -> Self:
        """In place: Hyperbolic sine of every leaf."""
    def sqrt(self) -> Self:
        """Square root of every leaf."""
    def sqrt_(self) -> Self:
        """In place: Square root of every leaf."""
    def square(self) -> Self:
        """Square of every leaf."""
    def square_(self) -> Self:
        """In place: Square of every leaf."""
    def tan(self) -> Self:
        """Tangent of every leaf."""
    def tan_(self) -> Self:
        """In place: Tangent of every leaf."""
    def tanh(self) -> Self:
        """Hyperbolic tangent of every leaf."""
    def tanh_(self) -> Self:
        """In place: Hyperbolic tangent of every leaf."""
    def trunc(self) -> Self:
        """Integer part of every leaf."""
    def trunc_(self) -> Self:
        """In place: Integer part of every leaf."""
    def add(self, other: Operand, alpha: float | None = None, *, default: Any = None) -> Self:
        """Every leaf plus the operand."""
    def add_(self, other: Operand, alpha: float | None = None) -> Self:
        """In place: Every leaf plus the operand."""
    def __add__(self, other: Operand) -> Self:
        """Every leaf plus the operand."""
    def __radd__(self, other: Operand) -> Self:
        """Every leaf plus the operand."""
    def __iadd__(self, other: Operand) -> Self:
        """In place: Every leaf plus the operand."""
    def atan2(self, other: Operand, *, default: Any = None) -> Self:
        """Arc tangent of every leaf over the operand, by quadrant."""
    def atan2_(self, other: Operand) -> Self:
        """In place: Arc tangent of every leaf over the operand, by quadrant."""
    def bitwise_and(self, other: Operand, *, default: Any = None) -> Self:
        """Bitwise AND of every leaf and the operand."""
    def bitwise_and_(self, other: Operand) -> Self:
        """In place: Bitwise AND of every leaf and the operand."""
    def __and__(self, other: Operand) -> Self:
        """Bitwise AND of every leaf and the operand."""
    def __rand__(self, other: Operand) -> Self:
        """Bitwise AND of every leaf and the operand."""
    def __iand__(self, other: Operand) -> Self:
        """In place: Bitwise AND of every leaf and the operand."""
    def bitwise_left_shift(self, other: Operand, *, default: Any = None) -> Self:
        """Bits of every leaf shifted left by the operand."""
    def bitwise_left_shift_(self, other: Operand) -> Self:
        """In place: Bits of every leaf shifted left by the operand."""
    def __lshift__(self, other: Operand) -> Self:
        """Bits of every leaf shifted left by the operand."""
    def __rlshift__(self, other: Operand) -> Self:
        """Bits of every leaf shifted left by the operand."""
    def __ilshift__(self, other: Operand) -> Self:
        """In place: Bits of every leaf shifted left by the operand."""
    def bitwise_or(self, other: Operand, *, default: Any = None) -> Self:
        """Bitwise OR of every leaf and the operand."""
    def bitwise_or_(self, other: Operand) -> Self:
        """In place: Bitwise OR of every leaf and the operand."""
    def __or__(self, other: Operand) -> Self:
        """Bitwise OR of every leaf and the operand."""
    def __ror__(self, other: Operand) -> Self:
        """Bitwise OR of every leaf and the operand."""
    def __ior__(self, other: Operand) -> Self:
        """In place: Bitwise OR of every leaf and the operand."""
    def bitwise_right_shift(self, other: Operand, *, default: Any = None) -> Self:
        """Bits of every leaf shifted right by the operand."""
    def bitwise_right_shift_(self, other: Operand) -> Self:
        """In place: Bits of every leaf shifted right by the operand."""
    def __rshift__(self, other: Operand) -> Self:
        """Bits of every leaf shifted right by the operand."""
    def __rrshift__(self, other: Operand) -> Self:
        """Bits of every leaf shifted right by the operand."""
    def __irshift__(self, other: Operand) -> Self:
        """In place: Bits of every leaf shifted right by the operand."""
    def bitwise_xor(self, other: Operand, *, default: Any = None) -> Self:
        """Bitwise XOR of every leaf and the operand."""
    def bitwise_xor_(self, other: Operand) -> Self:
        """In place: Bitwise XOR of every leaf and the operand."""
    def __xor__(self, other: Operand) -> Self:
        """Bitwise XOR of every leaf and the operand."""
    def __rxor__(self, other: Operand) -> Self:
        """Bitwise XOR of every leaf and the operand."""
    def __ixor__(self, other: Operand) -> Self:
        """In place: Bitwise XOR of every leaf and the operand."""
    def clamp_max(self, other: Operand, *, default: Any = None) -> Self:
        """The smaller of every leaf and the operand."""
    def clamp_max_(self, other: Operand) -> Self:
        """In place: The smaller of every leaf and the operand."""
    def clamp_min(self, other: Operand, *, default: Any = None) -> Self:
        """The larger of every leaf and the operand."""
    def clamp_min_(self, other: Operand) -> Self:
        """In place: The larger of every leaf and the operand."""
    def copysign(self, other: Operand, *, default: Any = None) -> Self:
        """Every leaf with the sign of the operand."""
    def copysign_(self, other: Operand) -> Self:
        """In place: Every leaf with the sign of the operand."""
    def div(self, other: Operand, rounding_mode: str | None = None, *, default: Any = None) -> Self:
        """Every leaf divided by the operand."""
    def div_(self, other: Operand, rounding_mode: str | None = None) -> Self:
        """In place: Every leaf divided by the operand."""
    def __truediv__(self, other: Operand) -> Self:
        """Every leaf divided by the operand."""
    def __rtruediv__(self, other: Operand) -> Self:
        """Every leaf divided by the operand."""
    def __itruediv__(self, other: Operand) -> Self:
        """In place: Every leaf divided by the operand."""
    def float_power(self, other: Operand, *, default: Any = None) -> Self:
        """Every leaf to the power of the operand, in double precision."""
    def floor_divide(self, other: Operand, *, default: Any = None) -> Self:
        """Every leaf divided by the operand, rounded down."""
    def floor_divide_(self, other: Operand) -> Self:
        """In place: Every leaf divided by the operand, rounded down."""
    def __floordiv__(self, other: Operand) -> Self:
        """Every leaf divided by the operand, rounded down."""
    def __rfloordiv__(self, other: Operand) -> Self:
        """Every leaf divided by the operand, rounded down."""
    def __ifloordiv__(self, other: Operand) -> Self:
        """In place: Every leaf divided by the operand, rounded down."""
    def fmax(self, other: Operand, *, default: Any = None) -> Self:
        """The larger of every leaf and the operand, NaN ignored."""
    def fmin(self, other: Operand, *, default: Any = None) -> Self:
        """The smaller of every leaf and the operand, NaN ignored."""
    def fmod(self, other: Operand, *, default: Any = None) -> Self:
        """Remainder of every leaf by the operand, sign of the leaf."""
    def fmod_(self, other: Operand) -> Self:
        """In place: Remainder of every leaf by the operand, sign of the leaf."""
    def gcd(self, other: Operand, *, default: Any = None) -> Self:
        """Greatest common divisor of every leaf and the operand."""
    def gcd_(self, other: Operand) -> Self:
        """In place: Greatest common divisor of every leaf and the operand."""
    def heaviside(self, other: Operand, *, default: Any = None) -> Self:
        """0, the operand, or 1 where a leaf is negative, 0, positive."""
    def heaviside_(self, other: Operand) -> Self:
        """In place: 0, the operand, or 1 where a leaf is negative, 0, positive."""
    def hypot(self, other: Operand, *, default: Any = None) -> Self:
        """sqrt(x ** 2 + y ** 2) of every leaf and the operand."""
    def hypot_(self, other: Operand) -> Self:
        """In place: sqrt(x ** 2 + y ** 2) of every leaf and the operand."""
    def isclose(
        self,
        other: Operand,
        rtol: float = 1e-05,
        atol: float = 1e-08,
        equal_nan: bool = False,
        *,
        default: Any = None,
    ) -> Self:
        """True where every leaf is close to the operand."""
    def lcm(self, other: Operand, *, default: Any = None) -> Self:
        """Least common multiple of every leaf and the operand."""
    def lcm_(self, other: Operand) -> Self:
        """In place: Least common multiple of every leaf and the operand."""
    def ldexp(self, other: Operand, *, default: Any = None) -> Self:
        """Every leaf times 2 to the power of the operand."""
    def ldexp_(self, other: Operand) -> Self:
        """In place: Every leaf times 2 to the power of the operand."""
    def logaddexp(self, other: Operand, *, default: Any = None) -> Self:
        """log(exp(x) + exp(y)) of every leaf and the operand."""
    def logaddexp2(self, other: Operand, *, default: Any = None) -> Self:
        """log2(2 ** x + 2 ** y) of every leaf and the operand."""
    def logical_and(self, other: Operand, *, default: Any = None) -> Self:
        """True where every leaf and the operand are not zero."""
    def logical_and_(self, other: Operand) -> Self:
        """In place: True where every leaf and the operand are not zero."""
    def logical_or(self, other: Operand, *, default: Any = None) -> Self:
        """True where every leaf or the operand is not zero."""
    def logical_or_(self, other: Operand) -> Self:
        """In place: True where every leaf or the operand is not zero."""
    def logical_xor(self, other: Operand, *, default: Any = None) -> Self:
        """True where one of every leaf and the operand is not zero."""
    def logical_xor_(self, other: Operand) -> Self:
        """In place: True where one of every leaf and the operand is not zero."""
    def maximum(self, other: Operand, *, default: Any = None) -> Self:
        """The larger of every leaf and the operand."""
    def maximum_(self, other: Operand) -> Self:
        """In place: The larger of every leaf and the operand."""
    def minimum(self, other: Operand, *, default: Any = None) -> Self:
        """The smaller of every leaf and the operand."""
    def minimum_(self, other: Operand) -> Self:
        """In place: The smaller of every leaf and the operand."""
    def mod(self, other: Operand, *, default: Any = None) -> Self:
        """Remainder of every leaf by the operand, sign of the operand (Python's ``%``)."""
    def mod_(self, other: Operand) -> Self:
        """In place: Remainder of every leaf by the operand, sign of the operand (Python's ``%``)."""
    def __mod__(self, other: Operand) -> Self:
        """Remainder of every leaf by the operand, sign of the operand (Python's ``%``)."""
    def __rmod__(self, other: Operand) -> Self:
        """Remainder of every leaf by the operand, sign of the operand (Python's ``%``)."""
    def __imod__(self, other: Operand) -> Self:
        """In place: Remainder of every leaf by the operand, sign of the operand (Python's ``%``)."""
    def mul(self, other: Operand, *, default: Any = None) -> Self:
        """Every leaf times the operand."""
    def mul_(self, other: Operand) -> Self:
        """In place: Every leaf times the operand."""
    def __mul__(self, other: Operand) -> Self:
        """Every leaf times the operand."""
    def __rmul__(self, other: Operand) -> Self:
        """Every leaf times the operand."""
    def __imul__(self, other: Operand) -> Self:
        """In place: Every leaf times the operand."""
    def nextafter(self, other: Operand, *, default: Any = None) -> Self:
        """The next number after every leaf towards the operand."""
    def nextafter_(self, other: Operand) -> Self:
        """In place: The next number after every leaf towards the operand."""
    def pow(self, other: Operand, *, default: Any = None) -> Self:
        """Every leaf to the power of the operand."""
    def pow_(self, other: Operand) -> Self:
        """In place: Every leaf to the power of the operand."""
    def __pow__(self, other: Operand) -> Self:
        """Every leaf to the power of the operand."""
    def __rpow__(self, other: Operand) -> Self:
        """Every leaf to the power of the operand."""
    def __ipow__(self, other: Operand) -> Self:
        """In place: Every leaf to the power of the operand."""
    def remainder(self, other: Operand, *, default: Any = None) -> Self:
        """Remainder of every leaf by the operand, sign of the operand."""
    def remainder_(self, other: Operand) -> Self:
        """In place: Remainder of every leaf by the operand, sign of the operand."""
    def rsub(self, other: Operand, alpha: float | None = None, *, default: Any = None) -> Self:
        """The operand minus every leaf."""
    def sub(self, other: Operand, alpha: float | None = None, *, default: Any = None) -> Self:
        """Every leaf minus the operand."""
    def sub_(self, other: Operand, alpha: float | None = None) -> Self:
        """In place: Every leaf minus the operand."""
    def __sub__(self, other: Operand) -> Self:
        """Every leaf minus the operand."""
    def __rsub__(self, other: Operand) -> Self:
        """Every leaf minus the operand."""
    def __isub__(self, other: Operand) -> Self:
        """In place: Every leaf minus the operand."""
    def true_divide(self, other: Operand, *, default: Any = None) -> Self:
        """Every leaf divided by the operand."""
    def true_divide_(self, other: Operand) -> Self:
        """In place: Every leaf divided by the operand."""
    def xlogy(self, other: Operand, *, default: Any = None) -> Self:
        """Every leaf times the logarithm of the operand."""
    def xlogy_(self, other: Operand) -> Self:
        """In place: Every leaf times the logarithm of the operand."""
    def addcdiv(
        self, other1: Operand, other2: Operand, value: float = 1, *, out: Any = None
    ) -> Self:
        """Every leaf plus ``value * other1 / other2``."""
    def addcdiv_(self, other1: Operand, other2: Operand, value: float = 1) -> Self:
        """In place: Every leaf plus ``value * other1 / other2``."""
    def addcmul(
        self, other1: Operand, other2: Operand, value: float = 1, *, out: Any = None
    ) -> Self:
        """Every leaf plus ``value * other1 * other2``."""
    def addcmul_(self, other1: Operand, other2: Operand, value: float = 1) -> Self:
        """In place: Every leaf plus ``value * other1 * other2``."""
    def clamp(
        self, min: Operand | None = None, max: Operand | None = None, *, out: Any = None
    ) -> Self:
        """Every leaf, not below ``min`` and not above ``max``."""
    def clamp_(self, min: Operand | None = None, max: Operand | None = None) -> Self:
        """In place: Every leaf, not below ``min`` and not above ``max``."""
    def lerp(self, end: Operand, weight: Operand, *, out: Any = None) -> Self:
        """Every leaf moved towards ``end`` by ``weight``."""
    def lerp_(self, end: Operand, weight: Operand) -> Self:
        """In place: Every leaf moved towards ``end`` by ``weight``."""
    def eq(self, other: Operand) -> Self:
        """True where every leaf equals the operand."""
    def __eq__(self, other: object) -> Self:  # type: ignore[override]
        """True where every leaf equals the operand."""
    def ge(self, other: Operand) -> Self:
        """True where every leaf is not below the operand."""
    def __ge__(self, other: Operand) -> Self:
        """True where every leaf is not below the operand."""
    def gt(self, other: Operand) -> Self:
        """True where every leaf is above the operand."""
    def __gt__(self, other: Operand) -> Self:
        """True where every leaf is above the operand."""
    def le(self, other: Operand) -> Self:
        """True where every leaf is not above the operand."""
    def __le__(self, other: Operand) -> Self:
        """True where every leaf is not above the operand."""
    def lt(self, other: Operand) -> Self:
        """True where every leaf is below the operand."""
    def __lt__(self, other: Operand) -> Self:
        """True where every leaf is below the operand."""
    def ne(self, other: Operand) -> Self:
        """True where every leaf differs from the operand."""
    def __ne__(self, other: object) -> Self:  # type: ignore[override]
        """True where every leaf differs from the operand."""
    @overload
    def amax(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        reduce: Literal[False] | None = None,
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Self:
        """Maximum of every leaf."""
    @overload
    def amax(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        reduce: Literal[True],
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Tensor:
        """Maximum of every leaf."""
    @overload
    def amin(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        reduce: Literal[False] | None = None,
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Self:
        """Minimum of every leaf."""
    @overload
    def amin(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        reduce: Literal[True],
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Tensor:
        """Minimum of every leaf."""
    @overload
    def argmax(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        reduce: Literal[False] | None = None,
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Self:
        """Position of the maximum of every leaf."""
    @overload
    def argmax(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        reduce: Literal[True],
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Tensor:
        """Position of the maximum of every leaf."""
    @overload
    def argmin(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        reduce: Literal[False] | None = None,
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Self:
        """Position of the minimum of every leaf."""
    @overload
    def argmin(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        reduce: Literal[True],
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Tensor:
        """Position of the minimum of every leaf."""
    @overload
    def count_nonzero(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        reduce: Literal[False] | None = None,
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Self:
        """Number of values of every leaf that are not zero."""
    @overload
    def count_nonzero(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        reduce: Literal[True],
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Tensor:
        """Number of values of every leaf that are not zero."""
    @overload
    def logsumexp(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        reduce: Literal[False] | None = None,
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Self:
        """log(sum(exp(x))) of every leaf."""
    @overload
    def logsumexp(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        reduce: Literal[True],
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Tensor:
        """log(sum(exp(x))) of every leaf."""
    def max(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        reduce: bool | None = None,
        return_indices: bool = True,
    ) -> Any:
        """Maximum of every leaf."""
    @overload
    def mean(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        dtype: torch.dtype | None = None,
        reduce: Literal[False] | None = None,
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Self:
        """Mean of every leaf."""
    @overload
    def mean(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        dtype: torch.dtype | None = None,
        reduce: Literal[True],
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Tensor:
        """Mean of every leaf."""
    def median(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        reduce: bool | None = None,
        return_indices: bool = True,
    ) -> Any:
        """Median (the lower one) of every leaf."""
    def min(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        reduce: bool | None = None,
        return_indices: bool = True,
    ) -> Any:
        """Minimum of every leaf."""
    @overload
    def nanmean(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        dtype: torch.dtype | None = None,
        reduce: Literal[False] | None = None,
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Self:
        """Mean of every leaf without its NaNs."""
    @overload
    def nanmean(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        dtype: torch.dtype | None = None,
        reduce: Literal[True],
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Tensor:
        """Mean of every leaf without its NaNs."""
    def nanmedian(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        reduce: bool | None = None,
        return_indices: bool = True,
    ) -> Any:
        """Median of every leaf without its NaNs."""
    @overload
    def nanquantile(
        self,
        q: float | Tensor,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        interpolation: str = "linear",
        reduce: Literal[False] | None = None,
        key_transform: Callable[[str], str] | None = None,
    ) -> Self:
        """Quantile of every leaf without its NaNs."""
    @overload
    def nanquantile(
        self,
        q: float | Tensor,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        interpolation: str = "linear",
        reduce: Literal[True],
        key_transform: Callable[[str], str] | None = None,
    ) -> Tensor:
        """Quantile of every leaf without its NaNs."""
    @overload
    def nansum(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        dtype: torch.dtype | None = None,
        reduce: Literal[False] | None = None,
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Self:
        """Sum of every leaf without its NaNs."""
    @overload
    def nansum(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        dtype: torch.dtype | None = None,
        reduce: Literal[True],
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Tensor:
        """Sum of every leaf without its NaNs."""
    @overload
    def prod(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        dtype: torch.dtype | None = None,
        reduce: Literal[False] | None = None,
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Self:
        """Product of every leaf."""
    @overload
    def prod(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        dtype: torch.dtype | None = None,
        reduce: Literal[True],
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Tensor:
        """Product of every leaf."""
    @overload
    def quantile(
        self,
        q: float | Tensor,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        interpolation: str = "linear",
        reduce: Literal[False] | None = None,
        key_transform: Callable[[str], str] | None = None,
    ) -> Self:
        """Quantile of every leaf."""
    @overload
    def quantile(
        self,
        q: float | Tensor,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        interpolation: str = "linear",
        reduce: Literal[True],
        key_transform: Callable[[str], str] | None = None,
    ) -> Tensor:
        """Quantile of every leaf."""
    @overload
    def std(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        correction: int = 1,
        reduce: Literal[False] | None = None,
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Self:
        """Standard deviation of every leaf."""
    @overload
    def std(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        correction: int = 1,
        reduce: Literal[True],
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Tensor:
        """Standard deviation of every leaf."""
    @overload
    def sum(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        dtype: torch.dtype | None = None,
        reduce: Literal[False] | None = None,
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Self:
        """Sum of every leaf."""
    @overload
    def sum(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        dtype: torch.dtype | None = None,
        reduce: Literal[True],
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Tensor:
        """Sum of every leaf."""
    @overload
    def var(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        correction: int = 1,
        reduce: Literal[False] | None = None,
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Self:
        """Variance of every leaf."""
    @overload
    def var(
        self,
        dim: Dims = ...,
        keepdim: bool = ...,
        *,
        correction: int = 1,
        reduce: Literal[True],
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
    ) -> Tensor:
        """Variance of every leaf."""
    def cummax(self, dim: int, *, reduce: bool | None = None, return_indices: bool = True) -> Any:
        """Running maximum of every leaf."""
    def cummin(self, dim: int, *, reduce: bool | None = None, return_indices: bool = True) -> Any:
        """Running minimum of every leaf."""
    def cumprod(self, dim: int, dtype: torch.dtype | None = None) -> Self:
        """Running product of every leaf."""
    def cumsum(self, dim: int, dtype: torch.dtype | None = None) -> Self:
        """Running sum of every leaf."""
    def log_softmax(self, dim: int, dtype: torch.dtype | None = None) -> Self:
        """Logarithm of the softmax of every leaf."""
    def logcumsumexp(self, dim: int) -> Self:
        """Logarithm of the running sum of exponentials of every leaf."""
    def softmax(self, dim: int, dtype: torch.dtype | None = None) -> Self:
        """Softmax of every leaf: exp(x) over its sum."""
