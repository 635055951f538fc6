"""Elementary functions of Python numbers with the same bits on every machine: the exact value, rounded once to fp64.

``math.cos``, ``math.log`` and ``**`` call the C library. glibc, musl and macOS differ in the last bit, and so does glibc between processors
with and without fused multiply-adds. What enters weights (learning rates, bias corrections, rotary scaling) is computed here instead, for
native numerics too.

``decimal`` computes 60 digits in integers. The cases of these functions that are known as the hardest to round need less than 40 digits
(Lefèvre and Muller, "Worst cases for correct rounding of the elementary functions in double precision", ARITH 2001). Each call takes
1 to 100 microseconds. ``math.sqrt`` is needed nowhere here: IEEE 754 states its bits.
"""

from __future__ import annotations

import functools
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, DivisionByZero, InvalidOperation

_DIGITS = 60
_EXACT = Context(prec=_DIGITS, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[DivisionByZero, InvalidOperation])
_LEAST_TERM = Decimal(10) ** -_DIGITS
_LARGEST_ANGLE = 4.0
"""Angles up to pi are needed. The terms of the series for larger ones would take digits from the sum."""


def cos(angle: float) -> float:
    """Return the cosine of ``angle`` in radians, by its power series.

    Raises ``ValueError`` for angles beyond 4 in magnitude.
    """
    if not abs(angle) <= _LARGEST_ANGLE:
        raise ValueError(
            f"cos is computed for angles from -4 to 4 alone, not for {angle}: subtract full turns"
        )
    square = _EXACT.multiply(Decimal(angle), Decimal(angle))
    total = term = Decimal(1)
    order = 0
    while abs(term) > _LEAST_TERM:
        order += 2
        # term = (-1)^(order / 2) angle^order / order!
        term = _EXACT.divide(_EXACT.multiply(term, square), Decimal(-order * (order - 1)))
        total = _EXACT.add(total, term)
    return float(total)


@functools.lru_cache(maxsize=64)
def log(x: float) -> float:
    """Return the natural logarithm of ``x``. Raises ``decimal.InvalidOperation`` for negative numbers."""
    return float(_EXACT.ln(Decimal(x)))


@functools.lru_cache(maxsize=64)
def power(base: float, exponent: float) -> float:
    """Return ``base ** exponent``. Raises ``decimal.InvalidOperation`` if it is no real number, or for 0 to the 0."""
    return float(_EXACT.power(Decimal(base), Decimal(exponent)))
