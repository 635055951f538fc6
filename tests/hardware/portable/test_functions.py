"""Elementary functions in C: within 1 ulp of a 200-bit reference, and the same bits in each build and at each place in a vector."""

from __future__ import annotations

import ctypes
import functools
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf

from phalanx.hardware.kernels.compiler import BUILDS, OPTIONS, compiled
from phalanx.hardware.portable import library

FOLDER = Path(library.__file__).with_name("functions")
SOURCE, BESIDE = FOLDER / "functions.c", (FOLDER / "functions_avx512.c", FOLDER / "functions_fp64.c")
NAMES = [
    name.lower()
    for name in re.findall(r"^  FUNCTION_(\w+),", (FOLDER.parent / "kernels.h").read_text(), re.MULTILINE)
]
SLOPES = ("gelu_slope", "gelu_tanh_slope", "silu_slope")
mp.prec = 200


@functools.cache
def load(build: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(compiled(SOURCE, (*OPTIONS, *BUILDS[build]), beside=BESIDE)))


def apply(name: str, x: np.ndarray, build: str = "") -> np.ndarray:
    x = np.ascontiguousarray(x)
    to = np.full_like(x, 7)
    kind = {"float32": "fp32", "float64": "fp64", "uint16": "bf16"}[str(x.dtype)]
    getattr(load(build), f"function_{kind}")(
        NAMES.index(name), _pointer(x), _pointer(to), ctypes.c_int64(x.size)
    )
    return to


def power(base: np.ndarray, exponent: np.ndarray, build: str = "") -> np.ndarray:
    to = np.full_like(base, 7)
    kind = "fp32" if base.dtype == np.float32 else "fp64"
    getattr(load(build), f"power_{kind}")(
        _pointer(base), _pointer(exponent), _pointer(to), ctypes.c_int64(base.size)
    )
    return to


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def normal(x: mpf) -> mpf:
    return mp.erfc(-x / mp.sqrt(2)) / 2


def sigmoid(x: mpf) -> mpf:
    return 1 / (1 + mp.exp(-x))


def gelu_argument(x: mpf) -> mpf:
    return 2 * mp.sqrt(2 / mp.pi) * (x + mpf("0.044715") * x**3)


def gelu_tanh_slope(x: mpf) -> mpf:
    inner = 2 * mp.sqrt(2 / mp.pi) * (1 + 3 * mpf("0.044715") * x**2)
    s = sigmoid(gelu_argument(x))
    return s + x * s * sigmoid(-gelu_argument(x)) * inner


REFERENCES: dict[str, Callable[[mpf], mpf]] = {
    "exp": mp.exp,
    "expm1": mp.expm1,
    "exp2": lambda x: mp.power(2, x),
    "log": mp.log,
    "log1p": mp.log1p,
    "log2": lambda x: mp.log(x) / mp.log(2),
    "log10": lambda x: mp.log(x) / mp.log(10),
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "tanh": mp.tanh,
    "erf": mp.erf,
    "gelu": lambda x: x * normal(x),
    "gelu_tanh": lambda x: x * sigmoid(gelu_argument(x)),
    "sin": mp.sin,
    "cos": mp.cos,
    "sqrt": mp.sqrt,
    "rsqrt": lambda x: 1 / mp.sqrt(x),
    "softplus": lambda x: mp.log1p(mp.exp(x)),
    "logsigmoid": lambda x: -mp.log1p(mp.exp(-x)),
    "gelu_slope": lambda x: normal(x) + x * mp.exp(-(x**2) / 2) / mp.sqrt(2 * mp.pi),
    "gelu_tanh_slope": gelu_tanh_slope,
    "silu_slope": lambda x: sigmoid(x) * (1 + x * sigmoid(-x)),
}
POSITIVE = ("log", "log2", "log10", "sqrt", "rsqrt")
"""Functions that are defined for positive numbers only."""
INF, NAN = math.inf, math.nan
LIMITS = {  # at -infinity, -0, 0, infinity
    "exp": (0.0, 1.0, 1.0, INF),
    "expm1": (-1.0, -0.0, 0.0, INF),
    "exp2": (0.0, 1.0, 1.0, INF),
    "log": (NAN, -INF, -INF, INF),
    "log1p": (NAN, -0.0, 0.0, INF),
    "log2": (NAN, -INF, -INF, INF),
    "log10": (NAN, -INF, -INF, INF),
    "sigmoid": (0.0, 0.5, 0.5, 1.0),
    "silu": (-0.0, -0.0, 0.0, INF),
    "tanh": (-1.0, -0.0, 0.0, 1.0),
    "erf": (-1.0, -0.0, 0.0, 1.0),
    "gelu": (-0.0, -0.0, 0.0, INF),
    "gelu_tanh": (-0.0, -0.0, 0.0, INF),
    "sin": (NAN, -0.0, 0.0, NAN),
    "cos": (NAN, 1.0, 1.0, NAN),
    "sqrt": (NAN, -0.0, 0.0, INF),
    "rsqrt": (NAN, -INF, INF, 0.0),
    "softplus": (0.0, math.log(2), math.log(2), INF),
    "logsigmoid": (-INF, -math.log(2), -math.log(2), -0.0),
    "gelu_slope": (-0.0, 0.5, 0.5, 1.0),
    "gelu_tanh_slope": (-0.0, 0.5, 0.5, 1.0),
    "silu_slope": (-0.0, 0.5, 0.5, 1.0),
}


def samples(dtype: type[np.floating], count: int, seed: int = 0) -> np.ndarray:
    """Finite numbers of all magnitudes, of moderate ones, and neighbors of the boundaries of ranges, of both signs, without 0."""
    random = np.random.default_rng(seed)
    words, width = (np.uint32, 32) if dtype is np.float32 else (np.uint64, 64)
    any_bits = random.integers(0, 2**width, count, dtype=np.uint64).astype(words).view(dtype)
    moderate = random.normal(size=count) * 4
    wide = random.uniform(-1, 1, count) * (110 if dtype is np.float32 else 760)
    small = moderate * 2.0 ** -random.integers(0, 60, count)
    info = np.finfo(dtype)
    edges = [
        info.tiny,
        info.smallest_subnormal,
        info.max,
        info.eps,
        1,
        2,
        3,
        4,
        0.5,
        0.5625,
        6,
        10,
        16,
        20,
        40,
    ]
    edges += [math.sqrt(0.5), math.sqrt(2), 87.33654, 88.72284, 103.97208, 104, 89, 140, 2**28, 2**24, 2**23]
    edges += [
        709.782712893384,
        745.1332191019411,
        708.3964185322641,
        128,
        149,
        126,
        1022,
        1023,
        1024,
        1074,
        1075,
    ]
    edges += [k * math.log(2) / 2 for k in range(1, 12)] + [k * math.pi / 4 for k in range(1, 40)]
    edges += [10.0**k for k in range(-30, 30, 3)] + [2.0**k for k in range(-120, 120, 7)]
    edges += [0.7517916, 1.2784645, 0.75246142, 13.0, 14.2, 38.0, 38.5]
    near = np.array(edges, dtype)
    with np.errstate(over="ignore"):
        around = np.concatenate([near, np.nextafter(near, dtype(0)), np.nextafter(near, dtype(np.inf))])
        parts = [any_bits, *(part.astype(dtype) for part in (moderate, wide, small)), around]
    values = np.concatenate(parts)
    values = values[np.isfinite(values) & (values != 0)]
    return np.concatenate([values, -values])


def domain(name: str, x: np.ndarray) -> np.ndarray:
    if name in POSITIVE:
        return x[x > 0]
    return x[x > -1] if name == "log1p" else x


def errors(result: np.ndarray, exact: list[mpf]) -> list[float]:
    """Errors in units in the last place of the exact values; of infinite results, as if the range had no end."""
    info = np.finfo(result.dtype)
    sizes = []
    for value, reference in zip(result.tolist(), exact, strict=True):
        exponent = max(mp.frexp(reference)[1], info.minexp + 1) if reference != 0 else info.minexp + 1
        unit = mpf(2) ** (exponent - info.nmant - 1)
        top = mpf(2) ** info.maxexp
        number = mpf(value) if math.isfinite(value) else (top if value > 0 else -top)
        if math.isinf(value) and abs(reference) >= top:
            number = reference
        sizes.append(float(abs(number - reference) / unit))
    return sizes


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", NAMES)
def test_error_is_below_one_ulp(name: str, dtype: type[np.floating]) -> None:
    x = domain(name, samples(dtype, 150))
    result = apply(name, x)
    assert not np.isnan(result).any()
    exact = [_exact(name, value) for value in x.tolist()]
    sizes = np.array(errors(result, exact))
    if (
        name in SLOPES
    ):  # near the zero of the derivative, the error is below 1e-10, or 1e-17 in fp64, of its terms
        absolute = np.array([float(abs(mpf(r) - e)) for r, e in zip(result.tolist(), exact, strict=True)])
        sizes[absolute < (1e-11 if dtype is np.float32 else 1e-17)] = 0
    worst = int(sizes.argmax())
    assert sizes[worst] <= 1, f"{name}({x[worst]!r}) is {result[worst]!r}, by {sizes[worst]} ulp"


TINY: dict[str, Callable[[mpf], mpf]] = {
    "log1p": lambda x: x - x**2 / 2,
    "expm1": lambda x: x + x**2 / 2,
    "tanh": lambda x: x,
    "sin": lambda x: x,
    "erf": lambda x: 2 * x / mp.sqrt(mp.pi),
}
"""Series below 2^-80, where 200 bits do not suffice for a difference."""
BEYOND = {"gelu": 60, "gelu_tanh": 60, "gelu_slope": 60, "gelu_tanh_slope": 60, "erf": 60, "tanh": 2000}
BEYOND |= dict.fromkeys(
    ("exp", "expm1", "exp2", "sigmoid", "silu", "silu_slope", "softplus", "logsigmoid"), 2000
)
"""Arguments from which on the function is taken to be its limit; mpmath would need the exponent's digits."""


def _exact(name: str, value: float) -> mpf:
    x = mpf(value)
    if name in TINY and abs(x) < mpf(2) ** -80:
        return TINY[name](x)
    if abs(x) > BEYOND.get(name, math.inf):
        if name in ("silu", "gelu", "gelu_tanh", "softplus") and x > 0:
            return x
        if name == "logsigmoid" and x < 0:
            return x
        x = mp.sign(x) * BEYOND[name]
    with mp.workprec(1400 if name in ("sin", "cos") else 200):
        return REFERENCES[name](x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", NAMES)
def test_special_values(name: str, dtype: type[np.floating]) -> None:
    x = np.array([-INF, -0.0, 0.0, INF], dtype)
    expected = np.array(LIMITS[name], dtype)
    result = apply(name, x)
    np.testing.assert_array_equal(result, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(result)[numbers], np.signbit(expected)[numbers])
    negative_nan = -np.array([NAN], dtype)
    assert apply(name, negative_nan).tobytes() == np.array([NAN], dtype).tobytes()
    if name in POSITIVE or name == "log1p":
        assert np.isnan(apply(name, np.array([-2, -1e30], dtype))).all()
    if name == "log1p":
        assert apply(name, np.array([-1], dtype))[0] == -INF


@pytest.mark.parametrize("build", ["avx2", "plain"])
@pytest.mark.parametrize("name", NAMES)
def test_builds_have_equal_bits(name: str, build: str) -> None:
    for dtype in (np.float32, np.float64):
        x = np.concatenate([samples(dtype, 5000, seed=1), np.array([0.0, -0.0, INF, -INF, NAN], dtype)])
        assert apply(name, x).tobytes() == apply(name, x, build).tobytes()


@pytest.mark.parametrize("name", NAMES)
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=40),
    order=st.randoms(use_true_random=False),
)
def test_place_in_the_vector_does_not_matter(name: str, values: list[float], order: object) -> None:
    x = np.array(values, np.float32)
    together = apply(name, x)
    alone = np.concatenate([apply(name, x[i : i + 1]) for i in range(len(x))])
    assert together.tobytes() == alone.tobytes()
    places = list(range(len(x)))
    order.shuffle(places)  # type: ignore[attr-defined]
    assert apply(name, x[places]).tobytes() == together[places].tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_rare_arguments_in_a_vector_do_not_change_the_others(name: str) -> None:
    x = samples(np.float32, 3000, seed=4)
    x = x[np.abs(x) < 120]
    rare = np.array([INF, -INF, NAN, 0.0, -0.0, 1e-40, 3e38, -100.0], np.float32)
    mixed = np.stack([x, np.resize(rare, x.size)], axis=1)
    assert apply(name, mixed.ravel())[::2].tobytes() == apply(name, x).tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_bf16_is_fp32_rounded_once(name: str) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    wide = apply(name, (bits.astype(np.uint32) << 16).view(np.float32))
    words = wide.view(np.uint32).astype(np.uint64)
    rounded = ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(apply(name, bits), np.where(np.isnan(wide), 0x7FC0, rounded))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_power(dtype: type[np.floating]) -> None:
    random = np.random.default_rng(3)
    base = np.abs(samples(dtype, 300, seed=2))
    largest = 126 if dtype is np.float32 else 1070
    exponent = (random.uniform(-1, 1, base.size) * largest / np.maximum(np.abs(np.log2(base)), 1e-3)).astype(
        dtype
    )
    result = power(base, exponent)
    exact = [mp.power(mpf(b), mpf(e)) for b, e in zip(base.tolist(), exponent.tolist(), strict=True)]
    sizes = errors(result, exact)
    worst = int(np.argmax(sizes))
    assert sizes[worst] <= 1, (base[worst], exponent[worst], result[worst], sizes[worst])
    for build in ("avx2", "plain"):
        assert power(base, exponent, build).tobytes() == result.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_power_of_special_values(dtype: type[np.floating]) -> None:
    values = [0.0, 1.0, 0.5, 2.0, 3.0, 1.5, 1e30, INF, 4503599627370497.0, 1e-30]
    values = [*values, *(-value for value in values), NAN]
    pairs = [(base, exponent) for base in values for exponent in values]
    base, exponent = (np.array(side, dtype) for side in zip(*pairs, strict=True))
    with np.errstate(all="ignore"):
        expected = np.power(base.astype(np.float64), exponent.astype(np.float64)).astype(dtype)
    result = power(base, exponent)
    np.testing.assert_allclose(result, expected, rtol=1e-6 if dtype is np.float32 else 1e-15, atol=0)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(result)[numbers], np.signbit(expected)[numbers])
