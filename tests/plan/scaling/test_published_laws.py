"""Laws have the figures of their papers, and the optimum is the optimum."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phalanx_plan.scaling.laws import (
    CHINCHILLA,
    CHINCHILLA_ERRORS,
    DENSE_LAWS,
    KAPLAN,
    REPEATS,
    LossSurface,
    PowerLaw,
    PublishedLaw,
    RepeatedData,
    RoutedLaw,
    effective,
    joint_power_law,
)
from phalanx_plan.scaling.optimum import (
    BudgetError,
    flops_per_token,
    optimum,
    over_trained,
    size_band,
    straight,
    tokens_for,
)

LAW = CHINCHILLA.law
FLOPS = st.floats(1e18, 1e28)


@pytest.mark.parametrize(
    ("flops", "experts", "parameters", "tokens"),
    [(1e20, 1, 1.7e9, 9.7e9), (1e21, 4, 4.4e9, 38e9), (1e20, 8, 990e6, 17e9), (1e22, 32, 12.2e9, 136.9e9)],
)
def test_the_joint_law_gives_the_optima_of_its_papers_first_table(
    flops: float, experts: float, parameters: float, tokens: float
) -> None:
    assert joint_power_law(experts).optimum(flops) == pytest.approx((parameters, tokens), rel=0.02)


def test_the_joint_law_at_one_number_of_experts_is_the_papers_power_law() -> None:
    assert joint_power_law(16) == PowerLaw(
        floor=1.3637,
        a=pytest.approx(19.0159, rel=1e-3),
        alpha=pytest.approx(0.1617, abs=1e-4),
        b=pytest.approx(167.5073, rel=1e-3),
        beta=pytest.approx(0.2494, abs=2e-4),
    )


def test_the_routed_laws_example_and_cutoff_are_the_papers() -> None:
    # 5 M with 128 experts is as good as 55 M dense; beyond 937 B routing stops helping (section 5).
    assert RoutedLaw(128).effective_parameters(5e6) == pytest.approx(55e6, rel=0.1)
    assert RoutedLaw(128).effective_parameters(5e11) > 5e11
    assert RoutedLaw(128).effective_parameters(2e12) == pytest.approx(2e12)


def test_the_refit_calls_chinchilla_optimal_and_the_first_fit_calls_it_too_large() -> None:
    chinchilla_flops = 6 * 70e9 * 1.4e12
    optimal = {published.key: published.law.optimum(chinchilla_flops)[0] for published in DENSE_LAWS}
    assert optimal["chinchilla-refit"] == pytest.approx(70e9, rel=0.1)
    assert optimal["chinchilla-printed"] < 50e9
    assert KAPLAN.optimum(chinchilla_flops)[0] > 5 * optimal["chinchilla-refit"]
    low, high = size_band(LAW, CHINCHILLA_ERRORS, lambda law: optimum(law, chinchilla_flops, flops_per_token))
    assert low < optimal["chinchilla-refit"] < high


@given(FLOPS, st.sampled_from(DENSE_LAWS))
@settings(max_examples=8, deadline=None)
def test_the_search_finds_the_closed_form(flops: float, law: PublishedLaw[PowerLaw]) -> None:
    best = optimum(law.law, flops, flops_per_token)
    assert (best.parameters, best.tokens) == pytest.approx(law.law.optimum(flops), rel=1e-4)


@given(FLOPS, st.floats(-0.3, 0.3), st.floats(0, 1e13))
@settings(max_examples=8, deadline=None)
def test_no_size_beats_the_optimum_at_any_cost_of_tokens(flops: float, bend: float, served: float) -> None:
    def cost(parameters: float) -> float:
        return 6 * parameters * (parameters / 1e9) ** bend

    try:
        best = optimum(LAW, flops, cost, inference_tokens=served)
    except BudgetError:
        assume(False)  # serving takes all of it
    for step in range(200):
        size = 10 ** (5 + 9 * step / 199)
        assert LAW.loss(size, tokens_for(size, flops, cost, served)) >= best.loss * (1 - 1e-9)


@given(FLOPS, st.floats(1.5, 100), st.sampled_from([LAW, RepeatedData(LAW, 1e11)]))
@settings(max_examples=6, deadline=None)
def test_more_money_never_learns_less(flops: float, more: float, surface: LossSurface) -> None:
    poor, rich = (optimum(surface, budget, flops_per_token) for budget in (flops, flops * more))
    assert rich.loss <= poor.loss
    if surface is LAW:  # on limited text both may have learned all there is
        assert rich.loss < poor.loss
        assert rich.tokens > poor.tokens


def test_exponents_of_the_optimum_are_the_closed_forms() -> None:
    (first, _), (second, _) = LAW.optimum(1e22), LAW.optimum(1e24)
    assert math.log(second / first) / math.log(100) == pytest.approx(
        0.5126, abs=1e-3
    )  # a of arXiv:2404.10102


def test_tokens_to_serve_make_the_best_model_smaller() -> None:
    alone = optimum(LAW, 1e24, flops_per_token)
    served = optimum(LAW, 1e24, flops_per_token, inference_tokens=alone.tokens)
    assert served.parameters < alone.parameters
    assert 6 * served.parameters * served.tokens + 2 * served.parameters * alone.tokens == pytest.approx(1e24)
    assert served.loss > alone.loss


@given(st.floats(1e8, 1e15), st.floats(1.001, 1e4))
def test_repeated_text_is_worth_less_than_new_and_more_than_none(unique: float, epochs: float) -> None:
    worth = effective(unique, epochs * unique, REPEATS)
    assert unique < worth <= min(epochs, 1 + REPEATS) * unique
    assert effective(unique, 0.9 * unique, REPEATS) == 0.9 * unique


def test_one_reading_of_enough_text_is_the_law_itself() -> None:
    parameters, tokens = LAW.optimum(1e23)
    assert RepeatedData(LAW, tokens).loss(parameters, tokens) == pytest.approx(LAW.loss(parameters, tokens))
    assert RepeatedData(LAW, tokens / 4).loss(parameters, tokens) > LAW.loss(parameters, tokens)


def test_four_readings_cost_little_and_forty_cost_much() -> None:
    """Abstract of arXiv:2305.16264: up to four epochs are nearly as good as new text."""
    parameters, tokens = LAW.optimum(1e22)
    lost = [
        RepeatedData(LAW, tokens / n).loss(parameters / 4, tokens) - LAW.loss(parameters / 4, tokens)
        for n in (4, 40)
    ]
    assert 0 < lost[0] < 0.02
    assert lost[1] > 5 * lost[0]


def test_a_smaller_model_loses_little_and_pays_for_it_in_training() -> None:
    best = optimum(LAW, 1e24, flops_per_token)
    half, tenth = (over_trained(LAW, best, 1e24, flops_per_token, smaller) for smaller in (2.0, 10.0))
    assert 0 < half.penalty < 0.02 < tenth.penalty
    assert 1 < half.same_loss_cost < tenth.same_loss_cost
    assert LAW.loss(half.parameters, half.same_loss_cost * half.tokens) == pytest.approx(best.loss)


@given(st.floats(1e20, 1e26), st.floats(0, 10))
@settings(max_examples=8, deadline=None)
def test_no_other_size_has_the_loss_for_less_than_the_budget_serving_included(
    flops: float, share: float
) -> None:
    """Sardana et al. (arXiv:2401.00448) minimize the cost of a loss, which is the least loss of a cost."""
    served = share * LAW.optimum(flops)[1]
    best = optimum(LAW, flops, flops_per_token, inference_tokens=served)
    for smaller in (0.25, 0.5, 0.9, 1.1, 2.0, 4.0):
        other = over_trained(LAW, best, flops, flops_per_token, smaller, served)
        assert other.same_loss_cost >= 1 - 1e-9
        assert other.penalty >= -1e-12


def test_a_size_too_small_never_reaches_the_loss() -> None:
    best = optimum(LAW, 1e24, flops_per_token)
    assert math.isinf(over_trained(LAW, best, 1e24, flops_per_token, 1000.0).same_loss_cost)


def test_a_budget_that_serving_uses_up_is_refused() -> None:
    with pytest.raises(BudgetError, match="no training at all"):
        optimum(LAW, 1e20, flops_per_token, inference_tokens=1e18)


def test_the_cost_between_known_sizes_is_a_power_through_the_nearest() -> None:
    cost = straight([1e9, 1e10, 1e11], [6e9, 6e10, 6e11], through=2e10)
    assert [cost(size) for size in (1e8, 1e10, 1e12)] == pytest.approx([6e8, 6e10, 6e12])
    scattered = straight([1e9, 1e10, 1e11], [6e9, 9e10, 6e11], through=2e10)
    assert scattered(1e10) == pytest.approx(9e10)
    assert scattered(1e11) == pytest.approx(9e11)
    assert straight([2e9], [4.0], through=1e9)(1e9) == pytest.approx(2.0)
