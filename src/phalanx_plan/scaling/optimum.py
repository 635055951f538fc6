"""Budgets (``40M$``, ``1e25 FLOP``, ``30d``, ``1M gpu-hours``), the compute-optimal size and tokens for one, and shapes of that size.

A function gives the cost of a token by size. Hoffmann et al. (arXiv:2203.15556) minimize the loss along 6ND = C. Here a
token costs its real price: model FLOP, or the dollars, days or accelerator-hours of a plan for a model of that size on
a fleet. Tokens that are served later can be part of the budget (Sardana et al., arXiv:2401.00448). Each costs a third
of a training token (2N FLOP against 6N), at the same utilization as training; real generation, one token at a time,
costs more.

Shapes have the proportions of published models, so that they can be planned and trained.
Dense models follow Llama 3 (arXiv:2407.21783, table 3): heads of 128, eight key/value heads, a feed-forward layer 3.5 times as wide as
the model, and a width about 120 times the number of layers (102 to 130 there). Mixtures follow DeepSeek-V3 (arXiv:2412.19437, section
4.2): latent attention, 8 of 256 experts and a shared one for each token, each expert two sevenths as wide as the model, the first
layers dense. Widths are multiples of 512 (128 in small models, 1,024 in large ones), so that tensor ranks divide them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.model.facts.shape import count
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec
from phalanx_plan.scaling.laws import LossSurface, PowerLaw, StandardErrors

CostPerToken = Callable[[float], float]
"""Cost of training on one token, by the (active) parameters; in the budget's unit."""

_SMALLEST, _LARGEST = 1e5, 1e14
"""Bounds of the parameters in the search for an optimum."""
_GRID = 160
_GOLDEN = (math.sqrt(5) - 1) / 2
INFERENCE_SHARE = 1 / 3
"""FLOP of a served token over those of a trained one: forward only, 2N of 6N (Sardana et al., equation 2)."""


class BudgetError(ValueError):
    """A budget that cannot be read, or that buys nothing."""


@dataclass(frozen=True)
class Optimum:
    """The best size for a budget."""

    parameters: float
    tokens: float
    loss: float


def tokens_for(parameters: float, budget: float, cost: CostPerToken, inference_tokens: float = 0.0) -> float:
    """Return the tokens that a model can be trained on after ``inference_tokens`` are paid for; not positive if nothing remains."""
    each = cost(parameters)
    return budget / each - inference_tokens * INFERENCE_SHARE


def optimum(
    surface: LossSurface, budget: float, cost: CostPerToken, *, inference_tokens: float = 0.0
) -> Optimum:
    """Return the size of least loss that ``budget`` pays for, with its tokens.

    A grid in the logarithm of the size, then golden sections between the neighbors of its best point: the surface need not be a power
    law (repeated data). Raises ``BudgetError`` if no size can be trained on a token.
    """

    def loss_at(log_size: float) -> float:
        size = math.exp(log_size)
        return surface.loss(size, tokens_for(size, budget, cost, inference_tokens))

    low, high = math.log(_SMALLEST), math.log(_LARGEST)
    points = [low + (high - low) * step / _GRID for step in range(_GRID + 1)]
    losses = [loss_at(point) for point in points]
    best = losses.index(min(losses))
    if not math.isfinite(losses[best]):
        raise BudgetError("the budget pays for no training at all once the inference tokens are served")
    log_size = _golden(loss_at, points[max(0, best - 1)], points[min(_GRID, best + 1)])
    size = math.exp(log_size)
    return Optimum(size, tokens_for(size, budget, cost, inference_tokens), loss_at(log_size))


def _golden(value: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimizer of a function with one minimum between ``low`` and ``high``, to 1e-7, by golden-section search."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = value(left), value(right)
    while high - low > 1e-7:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = value(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = value(right)
    return (low + high) / 2


def flops_per_token(parameters: float) -> float:
    """Return 6N: the FLOP of training on a token by the convention of all laws here."""
    return 6 * parameters


def straight(sizes: Sequence[float], costs: Sequence[float], through: float) -> CostPerToken:
    """Interpolate the cost of a token by size: a power of the size through the known point nearest ``through``.

    The power is the least-squares slope of all known points. Costs of single shapes scatter, since some layouts divide well and others do
    not. Lines from point to point would put the optimum at a corner. One size alone makes the cost proportional to the size.
    """
    logs = [(math.log(size), math.log(cost)) for size, cost in zip(sizes, costs, strict=True)]
    middle, mean = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    spread = sum((size - middle) ** 2 for size, _ in logs)
    slope = sum((size - middle) * (cost - mean) for size, cost in logs) / spread if spread else 1.0
    at, price = min(logs, key=lambda point: abs(point[0] - math.log(through)))
    return lambda parameters: math.exp(price + slope * (math.log(parameters) - at))


@dataclass(frozen=True)
class OverTrained:
    """A model that is ``smaller`` times smaller than the optimum, for the same training budget."""

    smaller: float
    parameters: float
    tokens: float
    loss: float
    penalty: float
    """Loss over the optimum's, in nats a token."""
    same_loss_cost: float
    """Cost, serving included, of the optimum's loss at this size, over the budget; infinite if no number of tokens reaches it."""


def over_trained(
    surface: LossSurface,
    best: Optimum,
    budget: float,
    cost: CostPerToken,
    smaller: float,
    inference_tokens: float = 0.0,
) -> OverTrained:
    """Compare a model that is ``smaller`` times smaller than ``best``.

    Returns its loss for the same budget, the difference, and the share of the budget with which it reaches the best
    model's loss; infinite if it never does.
    """
    parameters = best.parameters / smaller
    tokens = tokens_for(parameters, budget, cost, inference_tokens)
    loss = surface.loss(parameters, tokens)
    needed = _tokens_to(surface, parameters, best.loss) + inference_tokens * INFERENCE_SHARE
    return OverTrained(
        smaller, parameters, tokens, loss, loss - best.loss, needed * cost(parameters) / budget
    )


def _tokens_to(surface: LossSurface, parameters: float, loss: float) -> float:
    """Return the tokens (1e3 to 1e30) after which a model of this size has this loss, by bisection of their
    logarithm.

    Infinite if it never has.
    """
    low, high = math.log(1e3), math.log(1e30)
    if surface.loss(parameters, math.exp(high)) > loss:
        return math.inf
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if surface.loss(parameters, math.exp(middle)) > loss else (low, middle)
    return math.exp(high)


def size_band(
    law: PowerLaw, errors: StandardErrors, solve: Callable[[PowerLaw], Optimum]
) -> tuple[float, float]:
    """Return P5 and P95 of the optimal size from ``solve``.

    Its logarithm moves by each exponent's standard error; both moves are combined as independent.
    """
    middle = math.log(solve(law).parameters)
    moved = (errors.turned(law, *step) for step in ((1, 0), (0, 1)))
    spread = math.hypot(*(math.log(solve(moved_law).parameters) - middle for moved_law in moved))
    return math.exp(middle - 1.645 * spread), math.exp(middle + 1.645 * spread)


# Budgets as users write them.


BudgetUnit = Literal["usd", "flop", "days", "gpu-hours"]

_SIZES = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "Z": 1e21}
_NAMES: dict[str, tuple[BudgetUnit, float]] = {
    "$": ("usd", 1),
    "usd": ("usd", 1),
    "dollars": ("usd", 1),
    "flop": ("flop", 1),
    "flops": ("flop", 1),
    "d": ("days", 1),
    "day": ("days", 1),
    "days": ("days", 1),
    "h": ("days", 1 / 24),
    "hours": ("days", 1 / 24),
    "weeks": ("days", 7),
    "gpu-hours": ("gpu-hours", 1),
    "gpu-hour": ("gpu-hours", 1),
    "gpuh": ("gpu-hours", 1),
    "accelerator-hours": ("gpu-hours", 1),
    "gpu-days": ("gpu-hours", 24),
}
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|[\d._]+)(?:[eE][+-]?\d+)?"
_HOW = "write a number above 0 with its unit, as in 40M$, 1e25FLOP, 30d or 1M gpu-hours (k, M, B, T before the unit are thousands)"
_MOST = {"usd": 1e15, "flop": 1e35, "days": 36_525.0, "gpu-hours": 1e13}
"""Limits above which a budget is a wrong unit: a hundred years, more dollars than exist."""


@dataclass(frozen=True)
class TrainingBudget:
    """The amount that a training run may cost, with its unit."""

    amount: float
    unit: BudgetUnit

    def __str__(self) -> str:
        """The amount with its unit, as in ``1e+24 FLOP``, ``30 days`` or ``2 M$``."""
        if self.unit == "flop":
            return f"{self.amount:.3g} FLOP"
        if self.unit == "days":
            return f"{self.amount:,.4g} days"
        units = (("B", 1e9), ("M", 1e6), ("k", 1e3))
        letter, size = next((unit for unit in units if self.amount >= unit[1]), ("", 1.0))
        return f"{self.amount / size:,.4g} {letter}{'$' if self.unit == 'usd' else ' gpu-hours'}"


def read_budget(text: str) -> TrainingBudget:
    """Parse a budget such as 1e24FLOP, $2M, 30 days or 10k gpu-hours.

    Commas may only separate thousands. Raises ``BudgetError``, with the valid forms, for another text, no unit or two,
    or an amount that is not positive or is implausibly large.
    """
    match = re.fullmatch(rf"\s*(\$?)\s*({_NUMBER})\s*([kMBGTPEZ]?)\s*([A-Za-z$-]*)\s*", text)
    if match is None:
        raise BudgetError(f"budget {text}: {_HOW}")
    sign, number, size, unit = match.groups()
    unit = unit or sign
    if not unit:
        raise BudgetError(f"budget {text}: of what? {_HOW}")
    # The first letter of "GPU-hours" is no prefix G.
    readings = ((prefix, name.lower()) for prefix, name in ((size, unit), ("", size + unit)))
    reading = next((reading for reading in readings if reading[1] in _NAMES), None)
    if reading is None:
        raise BudgetError(f"budget {text}: {unit!r} is not a unit: {_HOW}")
    kind, factor = _NAMES[reading[1]]
    if sign and kind != "usd":
        raise BudgetError(f"budget {text}: '$' and {unit!r} are two units: {_HOW}")
    try:
        amount = float(number.replace("_", "").replace(",", "")) * _SIZES[reading[0]] * factor
    except ValueError:
        amount = 0.0
    if not (math.isfinite(amount) and amount > 0):
        raise BudgetError(f"budget {text}: {_HOW}")
    if amount > _MOST[kind]:
        raise BudgetError(f"budget {text}: plausible is up to {_MOST[kind]:.3g} {kind}")
    return TrainingBudget(amount, kind)


# Shapes of models of a given size.


ModelKind = Literal["dense", "mixture"]
MODEL_KINDS: tuple[ModelKind, ...] = ("dense", "mixture")

EXPERTS, PER_TOKEN = 256, 8
EXPANSION = (EXPERTS + 1) / (PER_TOKEN + 1)
"""Feed-forward parameters of a mixture over a token's, shared experts counted: "experts" in the laws of mixtures."""

_ASPECT = {"dense": 120.0, "mixture": 117.5}
_OFF_ASPECT = 0.1
"""Weight of an unusual aspect ratio relative to an equally large error of the size."""
_WIDTHS = (
    *range(128, 1024, 128),
    *range(1024, 4096, 512),
    *range(4096, 65_537, 1024),
)
_LARGEST_STEP_TOKENS = 2**24


@dataclass(frozen=True)
class ModelShape:
    """A model and its counts."""

    kind: ModelKind
    model: ModelSpec
    parameters: int
    active: int
    """Active parameters of a token, the size that laws use."""

    @property
    def name(self) -> str:
        """A short name with the size."""
        total = _short(self.parameters)
        return f"dense-{total}" if self.kind == "dense" else f"moe-{total}-a{_short(self.active)}"


def shape_of(kind: ModelKind, active: float) -> ModelShape:
    """Return the shape whose active parameters are nearest ``active`` in ratio, with a penalty for an unusual aspect ratio."""

    def distance(shape: ModelShape) -> float:
        """Return the logarithmic distance from ``active``, plus the penalty for the aspect ratio."""
        off = abs(math.log(shape.active / active))
        return off + _OFF_ASPECT * abs(math.log(shape.model.dim / shape.model.layers / _ASPECT[kind]))

    return min(_candidates(kind, active), key=distance)


def _candidates(kind: ModelKind, active: float) -> Iterator[ModelShape]:
    """Yield a shape for each of the five widths nearest the usual one, with the even number of layers (2 to 4,096) nearest the size."""
    # A layer has about 12.5 squares of the width in active parameters, in dense models and mixtures.
    usual = (active * _ASPECT[kind] / 12.5) ** (1 / 3)
    nearest = sorted(_WIDTHS, key=lambda width: abs(math.log(width / usual)))[:5]
    for width in nearest:
        ten, eleven = (_counted(kind, width, layers, active) for layers in (10, 12))
        each = (eleven.active - ten.active) / 2
        layers = 10 + 2 * round((active - ten.active) / each / 2)
        yield _counted(kind, width, min(4096, max(2, layers)), active)


def _counted(kind: ModelKind, width: int, layers: int, active: float) -> ModelShape:
    """Return a shape with its counts of parameters."""
    model = resolve((_dense if kind == "dense" else _mixture)(width, layers, active))
    counts = count(model, 8192)
    return ModelShape(kind, model, counts.parameters, counts.active_parameters)


def _vocabulary(active: float) -> int:
    """Return 131,072 tokens from 3e9 active parameters on, else 32,768."""
    return 131_072 if active >= 3e9 else 32_768


def _dense(width: int, layers: int, active: float) -> ModelSpec:
    """Return a dense model of this width and depth: heads of 128, up to 8 KV heads, ``ffn_dim`` 3.5 times the width.

    ``active`` decides its vocabulary; below 1e9 its embeddings are tied.
    """
    heads = width // 128
    return ModelSpec(
        layers=layers,
        dim=width,
        heads=heads,
        kv_heads=math.gcd(heads, 8),
        ffn_dim=_rounded(3.5 * width, 256),
        vocab_size=_vocabulary(active),
        tie_embeddings=active < 1e9,
        rope_theta=500_000.0,
    )


def _mixture(width: int, layers: int, active: float) -> ModelSpec:
    """Return a mixture of experts of this width and depth with latent attention, in DeepSeek-V3's proportions.

    ``active`` decides its vocabulary; below 1e9 its embeddings are tied.
    """
    return ModelSpec(
        layers=layers,
        dim=width,
        heads=max(2, width // 64),
        ffn_dim=_rounded(18 / 7 * width, 256),
        vocab_size=_vocabulary(active),
        tie_embeddings=active < 1e9,
        mla=MlaSpec(
            query_rank=max(128, _rounded(1.5 / 7 * width, 128)),
            kv_rank=512 if width >= 2048 else 128,
            nope_head_dim=128,
            rope_head_dim=64,
            value_head_dim=128,
        ),
        moe=MoeSpec(
            experts=EXPERTS,
            per_token=PER_TOKEN,
            ffn_dim=_rounded(2 / 7 * width, 128),
            shared=1,
            first_dense=3 if layers >= 30 else 1,
            score="sigmoid",
            scale=2.5,
            groups=8,
            groups_per_token=4,
            balance_bias=True,
        ),
    )


def _rounded(value: float, to: int) -> int:
    """Return the multiple of ``to`` nearest ``value``, at least ``to``."""
    return max(to, to * round(value / to))


def step_tokens(active: float, tokens: float) -> float:
    """Return the tokens of an optimizer step: 0.292 C^0.3271 (DeepSeek LLM, arXiv:2401.02954, recalled), at most 16.8 M as in the largest runs."""
    return float(min(_LARGEST_STEP_TOKENS, 0.292 * (6 * active * tokens) ** 0.3271))


def _short(number: float) -> str:
    """Format a number of parameters as in a model's name, "1.3b"; below a million in full."""
    for letter, size in (("t", 1e12), ("b", 1e9), ("m", 1e6)):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"
