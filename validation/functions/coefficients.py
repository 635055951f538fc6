"""Minimax polynomials and constants of the elementary functions in C.

``python -m validation.functions.coefficients > src/phalanx/hardware/portable/functions/coefficients.h`` writes the header, in a minute.

Polynomials are fitted with the Remez exchange (Muller, "Elementary Functions", chapter 3) in 60 decimal digits, on a grid dense enough
that its maximum is the maximum of the interval. Each coefficient is then rounded to the format in which C evaluates the polynomial. The
comment beside a table is the largest weighted error of the exact polynomial, as a power of two: the rounding of the leading
coefficients adds to it. Coefficients of double-double polynomials are printed as pairs ``{high, low}``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mpmath import mp, mpf

mp.dps = 60
Function = Callable[[mpf], mpf]
GRID = 1500
"""Points on which an error is searched for its maxima."""
ROOT_HALF = mp.sqrt(mpf(1) / 2)
TURN = mpf(15) / 4
"""Center of the map ``t = (z - 15/4) / (z + 15/4)`` (Shepherd and Laframboise, Mathematics of Computation 36, 1981)."""


def fit(function: Function, low: mpf, high: mpf, degree: int, weight: Function) -> tuple[list[mpf], mpf]:
    """Return the polynomial that minimizes the maximum of ``weight * |polynomial - function|``, and that maximum."""
    middle, half = (low + high) / 2, (high - low) / 2
    grid = [middle - half * mp.cos(mp.pi * i / GRID) for i in range(GRID + 1)]
    values, weights = [function(x) for x in grid], [weight(x) for x in grid]
    nodes = [round(i * GRID / (degree + 1)) for i in range(degree + 2)]
    for _ in range(30):
        coefficients, level = _interpolate(nodes, grid, values, weights, degree)
        errors = [
            w * (mp.polyval(coefficients[::-1], x) - y) for x, y, w in zip(grid, values, weights, strict=True)
        ]
        largest = max(abs(error) for error in errors)
        if largest <= abs(level) * mpf("1.01"):
            break
        nodes = _alternation(errors, degree + 2)
    return coefficients, largest


def _interpolate(
    nodes: Sequence[int], grid: Sequence[mpf], values: Sequence[mpf], weights: Sequence[mpf], degree: int
) -> tuple[list[mpf], mpf]:
    """Return the polynomial whose weighted errors at the nodes are equal and alternate in sign, and that error."""
    matrix, right = mp.matrix(degree + 2, degree + 2), mp.matrix(degree + 2, 1)
    for row, node in enumerate(nodes):
        for power in range(degree + 1):
            matrix[row, power] = grid[node] ** power
        matrix[row, degree + 1] = (-1) ** row / weights[node]
        right[row] = values[node]
    solution = mp.lu_solve(matrix, right)
    return [solution[i] for i in range(degree + 1)], solution[degree + 1]


def _alternation(errors: Sequence[mpf], count: int) -> list[int]:
    """Return ``count`` points of large error whose signs alternate."""
    peaks: list[int] = []
    for i, error in enumerate(errors):
        if peaks and (errors[peaks[-1]] > 0) == (error > 0):
            if abs(error) > abs(errors[peaks[-1]]):
                peaks[-1] = i
        else:
            peaks.append(i)
    while len(peaks) > count:
        if abs(errors[peaks[0]]) < abs(errors[peaks[-1]]):
            peaks.pop(0)
        else:
            peaks.pop()
    if len(peaks) < count:
        raise ValueError(
            f"{len(peaks)} of {count} alternations: the grid is too coarse or the degree too high"
        )
    return peaks


def series(function: Function, terms: int) -> list[mpf]:
    """Return the Taylor coefficients at 0."""
    return list(mp.taylor(function, 0, terms - 1))


def fp32(value: mpf) -> str:
    return _hex(float(np.float32(float(value)))) + "f"


def fp64(value: mpf) -> str:
    return _hex(float(value))


def pair(value: mpf) -> str:
    high = float(value)
    return f"{{{_hex(high)}, {_hex(float(value - mpf(high)))}}}"


def _hex(value: float) -> str:
    """Return a hexadecimal literal without trailing zeros."""
    mantissa, exponent = value.hex().split("p")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}p{exponent}"


def table(name: str, kind: str, coefficients: Sequence[mpf], comment: str) -> str:
    """Return a C array, lowest power first."""
    form = {"float": fp32, "double": fp64, "double_double": pair}[kind]
    lines = "".join(f"    {form(value)},\n" for value in coefficients)
    return f"/* {comment} */\nstatic const {kind} {name}[{len(coefficients)}] = {{\n{lines}}};\n"


def minimax(
    name: str, kind: str, function: Function, low: mpf, high: mpf, degree: int, weight: Function, meaning: str
) -> str:
    coefficients, error = fit(function, mpf(low), mpf(high), degree, weight)
    return table(name, kind, coefficients, f"{meaning}, error 2^{float(mp.log(error, 2)):.1f}")


def tanh_table() -> str:
    """Return the table of tanh, whose leading coefficient is rounded first: the others are fitted to what it leaves.

    That fit begins at a hundredth of the interval, below which the other terms have no weight.
    """
    high = mpf("1.001")
    leading = mpf(float(np.float32(-1 / 3)))
    rest, error = fit(lambda z: (tanh_rest(z) - leading) / z, high / 100, high, 6, lambda z: z**2)
    comment = f"(tanh x - x) / x^3 in x^2, |x| <= 1, error 2^{float(mp.log(error, 2)):.1f}"
    return table("TANH_FP32", "float", [leading, *rest], comment)


def exp_rest(terms: int) -> Function:
    """Return ``(e^r - 1 - r - ...) / r^terms``, the exponential series from its term ``terms`` on."""
    return lambda r: mp.nsum(lambda k: r**k / mp.factorial(k + terms), [0, 40])


def log_rest(f: mpf) -> mpf:
    """Return ``(log(1 + f) - f) / f^2``."""
    return (mp.log1p(f) - f) / f**2 if f != 0 else mpf(-1) / 2


def atanh_rest(z: mpf) -> mpf:
    """Return ``(log m - 2 s) / s^3`` for ``s = (m - 1) / (m + 1)``, as a function of ``z = s^2``."""
    s = mp.sqrt(z)
    return 2 * (mp.atanh(s) - s) / s**3 if z != 0 else mpf(2) / 3


def tanh_rest(z: mpf) -> mpf:
    """Return ``(tanh x - x) / x^3`` as a function of ``z = x^2``."""
    x = mp.sqrt(z)
    return (mp.tanh(x) - x) / x**3 if z != 0 else mpf(-1) / 3


def sin_rest(z: mpf) -> mpf:
    """Return ``(sin r - r) / r^3`` as a function of ``z = r^2``."""
    r = mp.sqrt(z)
    return (mp.sin(r) - r) / r**3 if z != 0 else mpf(-1) / 6


def cos_rest(z: mpf) -> mpf:
    """Return ``(cos r - 1 + r^2 / 2) / r^4`` as a function of ``z = r^2``."""
    return (mp.cos(mp.sqrt(z)) - 1 + z / 2) / z**2 if z != 0 else mpf(1) / 24


def erf_ratio(z: mpf) -> mpf:
    """Return ``erf(x) / x`` as a function of ``z = x^2``."""
    x = mp.sqrt(z)
    return mp.erf(x) / x if z != 0 else 2 / mp.sqrt(mp.pi)


def erfcx(t: mpf) -> mpf:
    """Return ``(1 + 2 z) e^(z^2) erfc(z)`` for ``z = 15/4 (1 + t) / (1 - t)``."""
    z = TURN * (1 + t) / (1 - t)
    return (1 + 2 * z) * mp.exp(z**2) * mp.erfc(z)


def image(z: float) -> mpf:
    return (z - TURN) / (z + TURN)


def one(_: mpf) -> mpf:
    return mpf(1)


def polynomials() -> list[str]:
    half = mp.log(2) / 2 * mpf("1.001")
    z_log = ((1 - ROOT_HALF) / (1 + ROOT_HALF)) ** 2 * mpf("1.001")
    z_turn = (mp.pi / 4 * mpf("1.001")) ** 2
    f_low, f_high = (ROOT_HALF - 1) * mpf("1.001"), (mp.sqrt(2) - 1) * mpf("1.001")
    return [
        minimax("EXP_FP32", "float", exp_rest(2), -half, half, 5, lambda r: r**2 + mpf("1e-9"),
                "(e^r - 1 - r) / r^2 for |r| <= ln 2 / 2"),
        minimax("LOG_FP32", "float", log_rest, f_low, f_high, 8, lambda f: abs(f) + mpf("1e-4"),
                "(log(1 + f) - f) / f^2 for sqrt(1/2) <= 1 + f <= sqrt 2"),
        tanh_table(),
        minimax("EXP_WIDE", "double", exp_rest(2), -half, half, 8, lambda r: r**2 + mpf("1e-9"),
                "(e^r - 1 - r) / r^2 for |r| <= ln 2 / 2"),
        minimax("LOG_WIDE", "double", atanh_rest, 0, z_log, 6, lambda z: z + mpf("1e-6"),
                "(log m - 2 s) / s^3 in s^2, s = (m - 1) / (m + 1), sqrt(1/2) <= m <= sqrt 2"),
        minimax("ERF_WIDE", "double", erf_ratio, 0, mpf("1.001"), 9, one, "erf(x) / x in x^2, |x| <= 1"),
        minimax("ERFCX_WIDE", "double", erfcx, -1, image(12), 14, one,
                "(1 + 2 z) e^(z^2) erfc(z) in t = (z - 15/4) / (z + 15/4), 0 <= z <= 12"),
        minimax("SIN_WIDE", "double", sin_rest, 0, z_turn, 4, lambda z: z + mpf("1e-6"), "(sin r - r) / r^3 in r^2, |r| <= pi / 4"),
        minimax("COS_WIDE", "double", cos_rest, 0, z_turn, 4, lambda z: z**2 + mpf("1e-6"),
                "(cos r - 1 + r^2 / 2) / r^4 in r^2, |r| <= pi / 4"),
        minimax("EXP_FP64", "double", exp_rest(3), -half, half, 10, lambda r: abs(r) ** 3 + mpf("1e-9"),
                "(e^r - 1 - r - r^2 / 2) / r^3 for |r| <= ln 2 / 2"),
        minimax("SIN_FP64", "double", sin_rest, 0, z_turn, 7, lambda z: z + mpf("1e-6"), "(sin r - r) / r^3 in r^2, |r| <= pi / 4"),
        minimax("COS_FP64", "double", cos_rest, 0, z_turn, 6, lambda z: z**2 + mpf("1e-6"),
                "(cos r - 1 + r^2 / 2) / r^4 in r^2, |r| <= pi / 4"),
        minimax("ERFCX_FP64", "double_double", erfcx, -1, image(28), 28, one,
                "(1 + 2 z) e^(z^2) erfc(z) in t = (z - 15/4) / (z + 15/4), 0 <= z <= 28"),
        minimax("ERF_FP64", "double_double", erf_ratio, 0, mpf("1.001"), 14, one, "erf(x) / x in x^2, |x| <= 1"),
        table("LOG_FP64", "double_double", [mpf(2) / (2 * k + 3) for k in range(16)],
              "(log m - 2 s) / s^3 in s^2 by its Taylor series, whose terms from the 17th on are below 2^-86"),
    ]  # fmt: skip


def split(value: mpf, bits: Sequence[int]) -> list[mpf]:
    """Split a number into parts of so many bits, the last one of 53."""
    parts = []
    for count in bits:
        unit = mpf(2) ** (mp.floor(mp.log(abs(value), 2)) - count + 1)
        part = mp.floor(value / unit) * unit
        parts.append(part)
        value -= part
    return [*parts, value]


def constants() -> list[str]:
    ln2, root, kappa = mp.log(2), mp.sqrt(2 / mp.pi), mpf("0.044715")
    lines = [f"#define LN2_FP32_{i} {fp32(part)}" for i, part in enumerate(split(ln2, [16]))]
    lines += [f"#define LN2_WIDE_{i} {fp64(part)}" for i, part in enumerate(split(ln2, [40]))]
    lines += [f"#define PI_2_WIDE_{i} {fp64(part)}" for i, part in enumerate(split(mp.pi / 2, [25, 25]))]
    lines += [
        f"#define LN2_FP64_HIGH {fp64(split(ln2, [40])[0])} /* 40 bits: times an exponent it is exact */",
        f"#define LOG2_E_FP32 {fp32(1 / ln2)}",
    ]
    for name, value in (
        ("LN2_FP64_REST", split(ln2, [40])[1]),
        ("LN2", ln2),
        ("LOG2_E", 1 / ln2),
        ("LOG10_E", 1 / mp.log(10)),
        ("LOG10_2", mp.log10(2)),
        ("PI_2", mp.pi / 2),
        ("ROOT_HALF", ROOT_HALF),
        ("ROOT_1_2PI", 1 / mp.sqrt(2 * mp.pi)),
        ("GELU_SCALE", 2 * root),
        ("GELU_CUBE", 2 * root * kappa),
    ):
        high, low = pair(value)[1:-1].split(", ")
        lines += [f"#define {name}_HIGH {high}", f"#define {name}_LOW {low}"]
    high, low = fp32(ln2), fp32(ln2 - mpf(float(np.float32(float(ln2)))))
    lines += [f"#define LN2_PAIR_FP32_HIGH {high}", f"#define LN2_PAIR_FP32_LOW {low}"]
    return lines


def two_over_pi(words: int = 22) -> str:
    """Return the bits of 2 / pi in words of 64, after one word of zeros."""
    with mp.workdps(600):
        bits = int(mp.floor(2 / mp.pi * mpf(2) ** (64 * (words - 1))))
    parts = [0] + [bits >> (64 * (words - 2 - i)) & (2**64 - 1) for i in range(words - 1)]
    lines = "".join(f"    0x{part:016x}u,\n" for part in parts)
    return f"/* Bits of 2 / pi behind the binary point, after 64 zeros. */\nstatic const uint64_t TWO_OVER_PI[{words}] = {{\n{lines}}};\n"


def header() -> str:
    return "\n".join(
        [
            "/* Written by validation/functions/coefficients.py: constants and minimax polynomials, lowest power first. */",
            "#ifndef PORTABLE_COEFFICIENTS_H\n#define PORTABLE_COEFFICIENTS_H",
            "#include <stdint.h>\n",
            "/* The unevaluated sum of two fp64 numbers, |low| <= ulp(high) / 2. */",
            "typedef struct {\n    double high, low;\n} double_double;\n",
            *constants(),
            "",
            *polynomials(),
            two_over_pi(),
            "#endif",
        ]
    )


if __name__ == "__main__":
    print(header())
