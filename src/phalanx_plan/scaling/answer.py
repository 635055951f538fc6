"""Solve a budget for the size and tokens to train, with their cost on the fleet and the range of the published laws.

A budget of FLOP needs no fleet. For dollars, days and accelerator-hours, the planner searches the layouts of a model on a cluster,
with failures, spares and prices. A few sizes are planned, and the cost of a token is interpolated between them. The size is chosen
whose optimal tokens use up the budget. That size is planned in turn, until it no longer changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.hardware.cluster import Cluster
from phalanx.run.read import override
from phalanx.run.spec import RunSpec, TrainSpec
from phalanx_plan.scaling.laws import (
    CHINCHILLA,
    CHINCHILLA_ERRORS,
    DENSE_LAWS,
    KAPLAN,
    LossSurface,
    PublishedLaw,
    RepeatedData,
    Source,
    joint_law,
    mixture_laws,
    routed_law,
)
from phalanx_plan.scaling.optimum import (
    EXPANSION,
    MODEL_KINDS,
    BudgetError,
    CostPerToken,
    ModelKind,
    ModelShape,
    Optimum,
    OverTrained,
    TrainingBudget,
    flops_per_token,
    optimum,
    over_trained,
    shape_of,
    size_band,
    step_tokens,
    straight,
    tokens_for,
)
from phalanx_plan.search.plan import Plan, make_plan
from phalanx_plan.search.query import Aim, PlanRequestError

SMALLER = (2.0, 4.0, 10.0)
"""Factors by which the compared over-trained models are smaller."""
_ASSUMED_MFU = 0.35
"""Utilization for the guess of the first size to plan; no answer depends on it."""
_APART = 3.0
_MOST_PLANS = 5
_SETTLED = 0.05
"""Relative change of the size below which it is not planned again: shapes have whole layers, and losses so near are the same."""
_NORMAL_95 = 1.645
_LEAST_SIZE, _MOST_SIZE = 3e6, 2e13
"""Active parameters beyond which a budget is a wrong unit: a thousandth, and twenty times, of today's models."""


@dataclass(frozen=True)
class Question:
    """A budget, its cluster, and the user's constraints."""

    budget: TrainingBudget
    cluster: Cluster | None
    aim: Aim
    seq_len: int = 8192
    batch: int | None = None
    """Sequences of a step; ``None`` derives them from the size and tokens."""
    overrides: tuple[str, ...] = ()
    kinds: tuple[ModelKind, ...] = MODEL_KINDS
    unique_tokens: float = math.inf
    inference_tokens: float = 0.0


@dataclass(frozen=True)
class LawRow:
    """The size and tokens that one law predicts as optimal for the budget."""

    law: str
    kind: ModelKind
    parameters: float
    """Active parameters."""
    tokens: float
    loss: float | None
    """Loss on the law's own text; ``None`` if the law is of the allocation only."""
    beyond: float
    """6ND over that of the largest run that the law was fitted to."""
    source: Source


@dataclass(frozen=True)
class Recommended:
    """The recommended model of one kind."""

    shape: ModelShape
    tokens: float
    loss: float
    loss_band: tuple[float, float]
    """P5 and P95 by the standard errors of the dense law; the gain of experts is assumed to be exact."""
    size_band: tuple[float, float] | None
    """P5 and P95 of the optimal parameters of a dense model."""
    new_text_loss: float
    """The loss if all tokens were new: ``loss`` if the text does not run out."""
    joint_loss: float
    """The loss by the joint law of dense models and mixtures: a second opinion on which of the two is better."""
    spec: RunSpec
    stated: frozenset[str]
    plan: Plan | None
    """``None`` for FLOP without a cluster."""
    laws: tuple[LawRow, ...]
    smaller: tuple[OverTrained, ...]
    halved: Optimum
    """The optimum for half the budget."""
    doubled: Optimum
    """The optimum for twice the budget."""
    planned: tuple[tuple[float, float], ...]
    """Planned sizes, each with the cost of a token in the budget's unit."""


@dataclass(frozen=True)
class BudgetAnswer:
    """The recommended models for a budget, the better kind first."""

    question: Question
    recommendations: tuple[Recommended, ...]
    left_out: tuple[str, ...] = ()
    """Kinds of models that the cluster cannot hold at the budget's size, with the cause."""

    @property
    def best(self) -> Recommended:
        """The kind of model with the lowest loss for the budget, by the laws that sized them."""
        return self.recommendations[0]


def answer(question: Question, on_progress: Callable[[str], None] = lambda _: None) -> BudgetAnswer:
    """Find the best model of each kind for a budget; ``on_progress`` is called with a line before each search of layouts.

    Raises ``BudgetError`` for a budget that buys nothing or needs a cluster, for dollars where an hour has no price and none is
    assumed, and for an implausible best size. A kind of model for which no layout fits, or a token's cost is 0 or not finite, is
    left out with the reason. If that is every kind, raises ``PlanRequestError``. Best first, by predicted loss.
    """
    if question.cluster is None and question.budget.unit != "flop":
        raise BudgetError(
            f"budget {question.budget}: its value depends on the cluster: give --cluster NAME:COUNT, "
            "or a budget of FLOP"
        )
    priced = any(text.startswith("usd_per_accelerator_hour=") for text in question.aim.assume)
    cluster = question.cluster
    if question.budget.unit == "usd" and cluster and not (priced or cluster.accelerator.price_per_hour.value):
        raise BudgetError(
            f"budget {question.budget}: an hour of {cluster.key} has a price of 0: give a budget of days"
        )
    recommendations: list[Recommended] = []
    left_out: list[str] = []
    for kind in question.kinds:
        try:
            recommendations.append(_recommended(question, kind, on_progress))
        except PlanRequestError as error:
            if kind == question.kinds[-1] and not recommendations:
                raise
            left_out.append(f"no {kind} model: {error}")
    return BudgetAnswer(
        question,
        tuple(sorted(recommendations, key=lambda recommendation: recommendation.loss)),
        tuple(left_out),
    )


def _on_data(surface: LossSurface, question: Question) -> LossSurface:
    """Return the loss on limited data, which is repeated, if the question limits it."""
    if math.isinf(question.unique_tokens):
        return surface
    return RepeatedData(surface, question.unique_tokens)


def _solved(question: Question, surface: LossSurface, cost: CostPerToken, times: float = 1.0) -> Optimum:
    """Return the optimum of ``times`` the question's budget by ``surface``, with its inference tokens paid for.

    Tokens above the question's own are repetitions of them.
    """
    return optimum(
        _on_data(surface, question),
        times * question.budget.amount,
        cost,
        inference_tokens=question.inference_tokens,
    )


def _recommended(question: Question, kind: ModelKind, on_progress: Callable[[str], None]) -> Recommended:
    """Find the best model of one kind, plan its run if there is a cluster, and compare laws, smaller models and other
    budgets.

    Raises ``BudgetError`` if inference leaves no tokens to train on, ``PlanRequestError`` if no layout fits.
    """
    law: PublishedLaw[LossSurface] = CHINCHILLA if kind == "dense" else routed_law(EXPANSION)
    cost, planned, shape = _cost_of(question, kind, law, on_progress)
    budget = question.budget.amount
    tokens = tokens_for(shape.active, budget, cost, question.inference_tokens)
    if tokens <= 0:
        raise BudgetError(f"budget {question.budget}: the inference tokens use it up")
    best = _solved(question, law, cost)
    surface = _on_data(law, question)
    spec, plan = _planned(question, shape, tokens, planned.get(shape))
    loss = surface.loss(shape.active, tokens)
    # Both default laws rest on the refit.
    effective = (
        shape.active if kind == "dense" else routed_law(EXPANSION).law.effective_parameters(shape.active)
    )
    spread = _NORMAL_95 * CHINCHILLA_ERRORS.of_loss(CHINCHILLA.law, effective, tokens)
    joint = joint_law(1 if kind == "dense" else EXPANSION)
    return Recommended(
        shape=shape,
        tokens=tokens,
        loss=loss,
        loss_band=(loss - spread, loss + spread),
        size_band=_size_band(question, cost) if kind == "dense" else None,
        new_text_loss=law.loss(shape.active, tokens),
        joint_loss=_on_data(joint, question).loss(shape.active, tokens),
        spec=spec,
        stated=_stated(question),
        plan=plan,
        laws=tuple(_law_rows(question, kind, cost)),
        smaller=tuple(
            over_trained(surface, best, budget, cost, times, question.inference_tokens) for times in SMALLER
        ),
        halved=_solved(question, law, cost, 0.5),
        doubled=_solved(question, law, cost, 2.0),
        planned=tuple(sorted((shape.active, _unit_cost(question, plan)) for shape, plan in planned.items())),
    )


def _size_band(question: Question, cost: CostPerToken) -> tuple[float, float]:
    """Return P5 and P95 of the optimal dense size by the standard errors of the refit."""
    return size_band(CHINCHILLA.law, CHINCHILLA_ERRORS, lambda law: _solved(question, law, cost))


def _law_rows(question: Question, kind: ModelKind, cost: CostPerToken) -> list[LawRow]:
    """Return each law's optimum for the budget, and its compute (6ND) over that of the law's largest run. The default
    law is first.

    Dense models also have the joint law, and without inference tokens Kaplan's.
    """
    laws: Sequence[PublishedLaw[LossSurface]] = DENSE_LAWS if kind == "dense" else mixture_laws(EXPANSION)
    rows = []
    for law in (*laws, *((joint_law(1),) if kind == "dense" else ())):
        best = _solved(question, law, cost)
        beyond = 6 * best.parameters * best.tokens / law.source.largest_flops
        rows.append(LawRow(law.key, kind, best.parameters, best.tokens, best.loss, beyond, law.source))
    if kind == "dense" and not question.inference_tokens:
        rows.append(_kaplan(question, cost))
    return rows


def _kaplan(question: Question, cost: CostPerToken) -> LawRow:
    """Return Kaplan et al.'s optimum, without a loss.

    Their size depends on the compute, which depends on the size here: solved by fixed-point iteration.
    """
    size = 1e9
    for _ in range(200):
        flops = 6 * size * question.budget.amount / cost(size)
        size = math.sqrt(size * KAPLAN.optimum(flops)[0])
    tokens = question.budget.amount / cost(size)
    beyond = 6 * size * tokens / KAPLAN.source.largest_flops
    return LawRow(KAPLAN.key, "dense", size, tokens, None, beyond, KAPLAN.source)


def _best_size(question: Question, law: LossSurface, cost: CostPerToken) -> float:
    """Return the best size in active parameters. Raises ``BudgetError`` for a size outside the plausible range."""
    size = _solved(question, law, cost).parameters
    if not _LEAST_SIZE <= size <= _MOST_SIZE:
        raise BudgetError(
            f"budget {question.budget}: the best size is {size:.2g} parameters; plausible are {_LEAST_SIZE:.0e} to {_MOST_SIZE:.0e}"
        )
    return size


def _cost_of(
    question: Question, kind: ModelKind, law: LossSurface, on_progress: Callable[[str], None]
) -> tuple[CostPerToken, dict[ModelShape, Plan], ModelShape]:
    """Return the cost of a token by size, the plans that it is from, and the best shape for the budget.

    A FLOP budget needs no plan, and has one only with a cluster. For others, layouts are searched for two sizes, then
    at the best size by their costs, until it is near a planned one or there are ``_MOST_PLANS``. Raises
    ``PlanRequestError`` if none fits.
    """
    if question.budget.unit == "flop":
        shape = shape_of(kind, _best_size(question, law, flops_per_token))
        planned = {}
        if question.cluster is not None:
            tokens = question.budget.amount / flops_per_token(shape.active)
            planned[shape] = _search(question, shape, tokens, on_progress)
        return flops_per_token, planned, shape
    guess = _best_size(question, law, _guessed(question))
    plans: dict[ModelShape, Plan] = {}
    failed: PlanRequestError | None = None
    for size in (guess / _APART, guess * _APART):
        try:
            _add_plan(question, kind, size, plans, on_progress)
        except PlanRequestError as error:  # a size that fits nowhere: the others decide
            failed = error
    if failed is not None and not plans:
        raise failed
    pivot = guess
    while True:
        costs = [_unit_cost(question, plan) for plan in plans.values()]
        sizes = [shape.active for shape in plans]
        best_size = _best_size(question, law, straight(sizes, costs, pivot))
        nearest = min(plans, key=lambda shape: abs(math.log(shape.active / best_size)))
        settled = abs(math.log(nearest.active / best_size)) < _SETTLED
        # Small models come in coarse steps: the nearest shape may be further off and already planned.
        if settled or shape_of(kind, best_size) in plans or len(plans) >= _MOST_PLANS:
            # The cost of the chosen size is that of its own plan.
            return straight(sizes, costs, nearest.active), plans, nearest
        _add_plan(question, kind, best_size, plans, on_progress)
        pivot = best_size


def _guessed(question: Question) -> CostPerToken:
    """Return the cost of a token in the budget's unit at an assumed MFU, to choose the first sizes to plan.

    The MFU is of the bf16 peak, else of the first format's. A price of 0 counts as 1 dollar.
    """
    assert question.cluster is not None, "only FLOP need no cluster"
    chip, many = question.cluster.accelerator, question.cluster.accelerators
    peak = chip.flops.get("bf16") or next(iter(chip.flops.values()))
    hour_flops = peak.value * _ASSUMED_MFU * 3600
    unit = {
        "usd": chip.price_per_hour.value or 1.0,
        "gpu-hours": 1.0,
        "days": 1 / (24 * many),
    }[question.budget.unit]
    return lambda parameters: flops_per_token(parameters) / hour_flops * unit


def _add_plan(
    question: Question,
    kind: ModelKind,
    size: float,
    plans: dict[ModelShape, Plan],
    on_progress: Callable[[str], None],
) -> None:
    """Search layouts of the shape nearest ``size``, and add the plan to ``plans``. Raises ``PlanRequestError``.

    Its tokens are those that the budget buys at the guessed cost.
    """
    shape = shape_of(kind, size)
    tokens = question.budget.amount / _guessed(question)(shape.active)
    plans[shape] = _search(question, shape, tokens, on_progress)


def _search(question: Question, shape: ModelShape, tokens: float, on_progress: Callable[[str], None]) -> Plan:
    """Search the layouts of a shape on the question's cluster for these tokens. Calls ``on_progress`` first."""
    assert question.cluster is not None, "a search is on a cluster"
    on_progress(f"{shape.name} on {question.cluster.key}: searching layouts")
    spec = run_of_shape(shape, tokens, question.seq_len, question.batch, question.overrides)
    aim = replace(question.aim, tokens=f"{max(tokens, 1.0):.0f}")
    return make_plan(spec, question.cluster, aim, stated=_stated(question))


def _planned(
    question: Question, shape: ModelShape, tokens: float, searched: Plan | None
) -> tuple[RunSpec, Plan | None]:
    """Return the run of the answer, in complete steps, and its plan for exactly these tokens in the best layout of
    ``searched``.

    Without ``searched`` or a cluster, the plan is None.
    """
    if searched is None or question.cluster is None:
        return run_of_shape(shape, tokens, question.seq_len, question.batch, question.overrides), None
    # Keep the batch of the search, since it determined the layout.
    batch = searched.job.workload.batch
    spec = run_of_shape(shape, tokens, question.seq_len, batch, question.overrides)
    aim = replace(question.aim, tokens=f"{tokens:.0f}", require=(), layout=str(searched.chosen.layout))
    return spec, make_plan(spec, question.cluster, aim, stated=_stated(question), searching=False)


def _stated(question: Question) -> frozenset[str]:
    """Return the fields that the user's overrides set."""
    return frozenset(text.partition("=")[0].strip() for text in question.overrides)


def _unit_cost(question: Question, plan: Plan) -> float:
    """Return the cost of one token in the budget's unit. Raises ``PlanRequestError`` if it is 0 or not finite."""
    run, tokens = plan.run, plan.inputs.tokens
    days = run.days / tokens
    by_unit = {
        "flop": flops_per_token(plan.job.workload.counts.active_parameters),
        "usd": run.cost.total_usd / tokens,
        "days": days,
        "gpu-hours": 24 * days * (plan.inputs.accelerators + run.spare_accelerators),
    }
    cost = by_unit[question.budget.unit]
    free = question.budget.unit == "usd" and run.cost.accelerators_usd <= 0
    if free or not (math.isfinite(cost) and cost > 0):
        raise PlanRequestError(
            f"budget {question.budget}: {plan.name} on {plan.job.cluster.key} costs {cost:g} {question.budget.unit} a token "
            "(failures that no run survives, or a price of 0): give a budget of days or FLOP, or another cluster"
        )
    return cost


def run_of_shape(
    shape: ModelShape, tokens: float, seq_len: int, batch: int | None, overrides: Sequence[str]
) -> RunSpec:
    """Return the run that trains ``shape`` on at least ``tokens`` (at most 1e9 steps), with other fields from
    ``overrides``.

    ``batch`` is in sequences. None means a power of two of sequences near ``step_tokens``. Raises ``RunFileError``
    for invalid overrides.
    """
    sequences = batch or 2 ** max(0, round(math.log2(step_tokens(shape.active, tokens) / seq_len)))
    train = TrainSpec(batch_size=sequences, slots=sequences, seq_len=seq_len)
    spec = RunSpec(name=shape.name, model=shape.model, train=train)
    steps = max(1, min(10**9, math.ceil(tokens / (sequences * seq_len))))
    return override(
        replace(spec, train=replace(train, steps=steps)), tuple(overrides), Path("--budget, by its model")
    )
