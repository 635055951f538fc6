"""Figures that articles on very large training runs state, worked out again from the articles' own premises.

Where a figure does not follow from its premises, the claim is marked and holds the right number. The table in
docs/evidence/planner-articles.md is compared with what is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from example_clusters import H100, fact, h100s
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import count
from phalanx.run.kinds.whole_model import resolve
from phalanx_plan.whole_run.assumptions import RunAssumptions, RunInputs
from phalanx_plan.whole_run.estimate import estimate_run
from phalanx_plan.whole_run.failures import FailureClass, failures_per_s, mtti_s
from phalanx_plan.whole_run.goodput import RecoveryPhase, Risk, breakdown
from phalanx_plan.whole_run.recovery import tiers
from phalanx_plan.whole_run.resources import J_PER_KWH, cost, energy

DOC = Path(__file__).parents[3] / "docs" / "evidence" / "planner-articles.md"

HOUR_S, DAY_S, YEAR_S = 3600.0, 86_400.0, 365 * 86_400.0
T = 1e12
B200_BYTES, B300_BYTES, H100_BYTES = 192e9, 288e9, 80e9
PEAK = H100.flops["bf16"].value
FLEET = h100s(100_000)


def state_bytes(parameters: float) -> float:
    """2 weights + 2 gradients + 4 master + 8 moments, as the article counts."""
    return 16 * parameters


def trillion_days(tokens: float = 15 * T, mfu: float = 0.4) -> float:
    """Days of training a dense 1T model on a fleet where nothing fails and nothing is saved."""
    inputs = RunInputs(
        cluster=FLEET,
        step_s=6 * T * 4e6 / (mfu * PEAK * 100_000),
        tokens_per_step=4e6,
        tokens=tokens,
        checkpoint_bytes=0,
        accelerators=100_000,
    )
    return estimate_run(inputs, RunAssumptions(failure_classes=(), planned_pauses_per_day=0, draws=1)).days


def minutes_between_failures(accelerators_or_nodes: int, hours_each: float, device: str) -> float:
    rate = 1000 * 24 / hours_each
    failure_class = FailureClass("all", device, rate, rate, rate, True, "article")  # type: ignore[arg-type]
    per_node = 8 if device == "node" else 1
    return (
        mtti_s(failures_per_s(h100s(10**6), accelerators_or_nodes * per_node, classes=(failure_class,))) / 60
    )


def lost_to_recovery(recovery_minutes: float, mtti_minutes: float) -> float:
    """Percent of wall time, failures memoryless and also during recoveries."""
    risk = Risk(mtti_minutes * 60, 0.0, (RecoveryPhase("start.restore", recovery_minutes * 60),))
    return 100 * breakdown(risk, 1e-6)["start.restore"]


def site_twh(node_power_w: float, pue: float) -> float:
    cluster = replace(FLEET, node_power_w=fact(node_power_w), pue=fact(pue))
    return energy(cluster, 100_000, 0, YEAR_S, 1.0, {"compute": 1.0}).total_kwh / 1e9


def electricity_musd(twh: float) -> float:
    spent = cost(
        accelerators=0,
        spare_accelerators=0,
        wall_s=YEAR_S,
        usd_per_accelerator_hour=0,
        energy_kwh=twh * 1e9,
        usd_per_kwh=0.078,
        electricity_in_price=False,
    )
    return spent.total_usd / 1e6


@dataclass(frozen=True)
class Claim:
    says: str
    """The statement of the article, with its unit."""
    figure: float
    computed: Callable[[], float]
    """The same figure from the article's premises."""
    tolerance: float = 0.03
    """Relative: what the article's own rounding allows."""
    follows: bool = True
    right: str = ""
    """Where it does not follow, why; or on what reading it does."""


CLAIMS = (
    Claim(
        "100T weights at 16 bits: 182 TB",
        182,
        lambda: 2 * 100 * T / 1e12,
        follows=False,
        right="200 TB; 182 is the same in TiB",
    ),
    Claim("100T weights at 16 bits, in TiB: 182", 182, lambda: 2 * 100 * T / 2**40),
    Claim(
        "B200 of 192 GB that hold them: close to 1,000",
        1000,
        lambda: math.ceil(200e12 / B200_BYTES),
        0.05,
        right="1,042; 1,112 of the 180 GB that are usable",
    ),
    Claim("B300 of 288 GB that hold them: ~700", 700, lambda: math.ceil(200e12 / B300_BYTES)),
    Claim(
        "B300 nodes of 8 that hold them: ~86",
        86,
        lambda: math.ceil(200e12 / B300_BYTES / 8),
        0.001,
        follows=False,
        right="87: the last node is needed too",
    ),
    Claim(
        "FLOP of a dense 100T model on 29T tokens: 1.2e29",
        1.2e29,
        lambda: 6 * 100 * T * 29 * T,
        follows=False,
        right="1.74e28; 1.2e29 needs 200T tokens, two for each parameter",
    ),
    Claim("FLOP of a dense 100T model on 200T tokens: 1.2e29", 1.2e29, lambda: 6 * 100 * T * 200 * T),
    Claim("Adam's two moments at 100T: ~200 trillion values", 200, lambda: 2 * 100),
    Claim(
        "Adam's moments roughly triple weight memory",
        3,
        lambda: (2 + 8) / 2,
        follows=False,
        right="5x with fp32 moments beside 16-bit weights, 3x only with 16-bit moments",
    ),
    Claim("training state of 1T at 16 B a parameter: 16 TB", 16, lambda: state_bytes(T) / 1e12),
    Claim("training state of 175B: 2.8 TB", 2.8, lambda: state_bytes(175e9) / 1e12),
    Claim("H100 of 80 GB that hold 16 TB: ~200", 200, lambda: math.ceil(state_bytes(T) / H100_BYTES)),
    Claim(
        "optimizer state of 1T, '4x or 8x the parameter size': 4-8 TB",
        8,
        lambda: 8 * 2 * T / 1e12,
        follows=False,
        right="8x of 2 TB is 16 TB; 4-8 *bytes a parameter* make 4-8 TB, and fp32 moments with masters 12 TB",
    ),
    Claim(
        "tokens a day, dense 1T at 40 % of 100k H100: 576 billion",
        576,
        lambda: 15 * T / trillion_days() / 1e9,
    ),
    Claim("days for 15T tokens of a dense 1T model: ~26", 26, trillion_days),
    Claim(
        "one sequence for each of 781 replicas out of a batch of 512",
        1,
        lambda: 512 / 781,
        follows=False,
        right="0.66: 781 replicas with one sequence of 8k each are 6.4 M tokens a step, not 4 M",
    ),
    Claim(
        "minutes between failures, 5e4 h a node and 1e5 GPUs in nodes of 8: ~30",
        30,
        lambda: minutes_between_failures(12_500, 5e4, "node"),
        follows=False,
        right="240: 100,000 GPUs are 12,500 nodes",
    ),
    Claim(
        "minutes between failures, 5e4 h a GPU: ~30",
        30,
        lambda: minutes_between_failures(100_000, 5e4, "accelerator"),
    ),
    Claim(
        "minutes between failures at Llama 3's rates: ~30",
        30,
        lambda: mtti_s(failures_per_s(FLEET)) / 60,
        right="30.4, and 18 to 49 at the other two published rates",
    ),
    Claim(
        "% lost to 20 min every 2 h: ~17",
        17,
        lambda: 100 * 20 / 120,
        right="if failures come every 2 h of wall time and never during a recovery",
    ),
    Claim(
        "% lost to 20 min at a mean of 2 h between failures: ~17",
        17,
        lambda: lost_to_recovery(20, 120),
        follows=False,
        right="15.4 memoryless; 14.3 if the 2 h do not count the recovery",
    ),
    Claim(
        "a 16 TB checkpoint lands in seconds, at 2 TB/s: 8 s",
        8,
        lambda: tiers(FLEET, 16e12)["storage"].drain_s,
    ),
    Claim(
        "NVLink over InfiniBand (900 GB/s over 400 Gb/s): ~25x",
        25,
        lambda: 900 / 50,
        follows=False,
        right="18x, and 9x with both counted in one direction",
    ),
    Claim(
        "TWh a year of a 150 MW site: 1.59",
        1.59,
        lambda: 150e6 * YEAR_S / J_PER_KWH / 1e9,
        follows=False,
        right="1.31; 1.59 is 181 MW all year, as of 150 MW of machines at a PUE of 1.21",
    ),
    Claim(
        "TWh a year of 100k H100 with 150 MW of machines (800 W beside each) at a PUE of 1.21: 1.59",
        1.59,
        lambda: site_twh(8 * 800, 1.21),
    ),
    Claim("M$ a year for 1.59 TWh at 0.078 $/kWh: 123.9", 123.9, lambda: electricity_musd(1.59)),
    Claim(
        "FLOP in 100 days of 100k H100 at 35 %: 6e26",
        6e26,
        lambda: 0.35 * PEAK * 100_000 * 100 * DAY_S,
        follows=False,
        right="2.99e26 in bf16; 5.98e26 is 35 % of the fp8 peak",
    ),
    Claim("100k H100 over 20k A100 in bf16: 15x", 15, lambda: 100_000 * PEAK / (20_000 * 312e12), 0.06),
)


def row(claim: Claim) -> str:
    verdict = "follows" if claim.follows else "**does not follow**"
    return f"| {claim.says} | {claim.computed():.4g} | {verdict} | {claim.right} |"


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim.follows], ids=lambda claim: claim.says)
def test_a_figure_follows_from_its_premises(claim: Claim) -> None:
    assert claim.computed() == pytest.approx(claim.figure, rel=claim.tolerance)


@pytest.mark.parametrize(
    "claim", [claim for claim in CLAIMS if not claim.follows], ids=lambda claim: claim.says
)
def test_a_figure_that_does_not_follow_is_marked_and_corrected(claim: Claim) -> None:
    assert claim.computed() != pytest.approx(claim.figure, rel=claim.tolerance)
    assert claim.right


def test_the_documented_table_is_what_is_computed() -> None:
    claims, _ = DOC.read_text().split("## What they leave out")
    table = [line for line in claims.splitlines() if line.startswith("| ")]
    assert table[1:] == [row(claim) for claim in CLAIMS]


def test_26_days_become_27_and_a_half_with_spares_and_32_with_restarts_once_things_fail() -> None:
    """The article counts "a healthy fleet": what its own failure rate costs, it leaves out."""
    inputs = RunInputs(
        cluster=FLEET,
        step_s=6 * T * 4e6 / (0.4 * PEAK * 100_000),
        tokens_per_step=4e6,
        tokens=15 * T,
        checkpoint_bytes=14e12,
        accelerators=100_000,
    )
    few = RunAssumptions(draws=1)
    assert estimate_run(inputs, few).days == pytest.approx(27.5, abs=0.5)
    assert estimate_run(inputs, replace(few, recovery="restart")).days == pytest.approx(32.3, abs=0.5)


def test_our_own_preset_of_100t_weighs_as_much_as_in_the_article() -> None:
    parameters = count(resolve(PRESETS["moe-100t"], 0), 8192).parameters
    assert 2 * parameters / 2**40 == pytest.approx(182, rel=0.05)
