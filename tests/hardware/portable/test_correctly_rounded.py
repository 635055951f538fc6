"""Scalar functions: the fp64 number that is nearest to the exact value, by an independent reference of 300 bits."""

from __future__ import annotations

import math
from decimal import InvalidOperation

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf

from phalanx.hardware.portable.correctly_rounded import cos, log, power

BITS = 300
magnitudes = st.floats(1e-300, 1e300)
decays = st.floats(0.1, 1.0, exclude_max=True)


@given(st.floats(-4.0, 4.0))
def test_cosines_are_the_nearest_numbers(angle: float) -> None:
    with mp.workprec(BITS):
        assert cos(angle) == float(mp.cos(mpf(angle)))


@given(magnitudes)
def test_logarithms_are_the_nearest_numbers(x: float) -> None:
    with mp.workprec(BITS):
        assert log(x) == float(mp.log(mpf(x)))


@given(decays, st.integers(1, 6000))
def test_whole_powers_are_the_nearest_numbers(base: float, exponent: int) -> None:
    with mp.workprec(BITS):
        exact = mpf(base) ** exponent
        # Below, numbers have fewer bits, to which the reference rounds twice.
        expected = float(exact) if exact > mpf(2) ** -1022 else pytest.approx(float(exact), rel=0, abs=5e-324)
        assert power(base, exponent) == expected


@given(st.integers(1, 10**7), st.floats(-1.0, 1.0))
def test_roots_of_step_numbers_are_the_nearest_numbers(base: int, exponent: float) -> None:
    with mp.workprec(BITS):
        assert power(base, exponent) == float(mpf(base) ** mpf(exponent))


@pytest.mark.parametrize(
    ("computed", "expected"),
    [
        (cos(0.0), 1.0),
        (cos(math.pi), -1.0),
        (cos(math.pi / 2), 6.123233995736766e-17),
        (log(1.0), 0.0),
        (log(0.0), -math.inf),
        (power(0.0, 3), 0.0),
        (power(0.95, 1), 0.95),
        (power(10.0, -6), 1e-6),
        (power(0.9, 10**9), 0.0),
        # Exactly in the middle between two numbers: the one with an even last bit.
        (power(1 - 2.0**-27, 2), 1 - 2.0**-26),
        # glibc 2.36 rounds these to the other neighbor.
        (power(3.0, 34), float(3**34)),
        (cos(math.pi * ((59873 - 8000) / (930_000 - 8000))), 0.9844202779336396),
        (power(0.9, 3270), 2.3605101195105048e-150),
    ],
)  # fmt: skip
def test_special_values(computed: float, expected: float) -> None:
    assert computed == expected


@pytest.mark.parametrize("angle", [4.5, -100.0, math.nan, math.inf])
def test_angles_beyond_the_series_are_refused(angle: float) -> None:
    with pytest.raises(ValueError, match="subtract full turns"):
        cos(angle)


def test_numbers_without_a_real_result_are_refused() -> None:
    with pytest.raises(InvalidOperation):
        log(-1.0)
    with pytest.raises(InvalidOperation):
        power(-2.0, 0.5)
