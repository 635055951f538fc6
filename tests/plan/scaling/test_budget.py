"""A budget is an amount with a unit, and nothing else is taken for one."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_plan.scaling.optimum import BudgetError, TrainingBudget, read_budget


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("40M$", TrainingBudget(40e6, "usd")),
        ("$40M", TrainingBudget(40e6, "usd")),
        ("40M USD", TrainingBudget(40e6, "usd")),
        ("1_000 $", TrainingBudget(1000, "usd")),
        ("$1,250,000.50", TrainingBudget(1_250_000.5, "usd")),
        ("$2M USD", TrainingBudget(2e6, "usd")),
        ("1e25FLOP", TrainingBudget(1e25, "flop")),
        ("1e25 FLOPs", TrainingBudget(1e25, "flop")),
        ("10ZFLOP", TrainingBudget(1e22, "flop")),
        ("30d", TrainingBudget(30, "days")),
        ("12 hours", TrainingBudget(0.5, "days")),
        ("2 weeks", TrainingBudget(14, "days")),
        ("1M gpu-hours", TrainingBudget(1e6, "gpu-hours")),
        ("1 GPU-hours", TrainingBudget(1, "gpu-hours")),
        ("10k gpu-days", TrainingBudget(240_000, "gpu-hours")),
    ],
)
def test_an_amount_and_its_unit_are_read(text: str, budget: TrainingBudget) -> None:
    assert read_budget(text).unit == budget.unit
    assert read_budget(text).amount == pytest.approx(budget.amount)


@pytest.mark.parametrize(
    "text", ["", "40", "40M", "1e25", "$", "0$", "-5$", "inf$", "nan FLOP", "1e400FLOP", "40 Mg", "40m$", "1.2.3$", "9e30$", "1e9d", "1e400", "$30 days", "1,5e24FLOP", "1,50$", "1000,000$"]
)  # fmt: skip
def test_what_is_no_budget_is_refused_with_examples_or_what_is_plausible(text: str) -> None:
    with pytest.raises(BudgetError, match=r"as in 40M\$|plausible"):
        read_budget(text)


@given(st.text(max_size=12))
def test_any_words_are_read_or_refused(text: str) -> None:
    with contextlib.suppress(BudgetError):
        assert read_budget(text).amount > 0


@given(st.floats(1e-3, 1e14), st.sampled_from(["usd", "days", "gpu-hours", "flop"]))
def test_a_written_budget_reads_as_itself(amount: float, unit: str) -> None:
    budget = TrainingBudget(min(amount, 36_000.0) if unit == "days" else min(amount, 9e12), unit)  # type: ignore[arg-type]
    assert read_budget(str(budget)).amount == pytest.approx(budget.amount, rel=0.01)
    assert read_budget(str(budget)).unit == unit
