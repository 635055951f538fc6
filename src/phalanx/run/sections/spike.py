"""The table ``[spike]`` of the run file: what ``train.on_spike = "fork"`` tries, and how it chooses.

All fields belong to the run: which state a fork goes back to, and which child it takes, reaches the bits of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.run.fields import LATER, POSITIVE, Problem, ValueRange
from phalanx.run.sections.training import FleetSpec, OptimizerSpec, PrecisionSpec, RuntimeSpec, TrainSpec

Candidate = Literal["skip", "rate", "clip", "wide", "continue"]
Preference = Literal["loss", "first"]


@dataclass(frozen=True)
class SpikeSpec:
    """Forks at loss spikes, with train.on_spike = "fork": several cures are trained from one state, and the run goes on as one of them."""

    candidates: Annotated[tuple[Literal["skip", "rate", "clip", "wide", "continue"], ...], LATER] = (
        "skip",
        "rate",
    )
    """Cures, each of which trains a child: "skip" leaves the batch of the spike out, "rate" lowers the learning rate for the rest of the run, "clip"
    lowers the largest gradient norm for the rest of the run, "wide" computes products in precision.compute instead of precision.matmul for the rest of
    the run, "continue" changes nothing. Of children with equal losses the first is taken."""
    fork_steps: Annotated[int, LATER, ValueRange(at_least=2, at_most=10**6)] = 32
    """Steps that each child trains from the spike on."""
    prefer: Annotated[Literal["loss", "first"], LATER] = "loss"
    """Rule by which a child is taken: "loss" takes the one with the lowest mean loss over the second half of fork_steps. "first" takes the first, in
    the order of candidates, with which no step after that of the spike is a spike again or not finite, and trains none after it. If all spike
    again, "first" takes the one that "loss" takes."""
    base_every_steps: Annotated[int, LATER, ValueRange(at_least=1, at_most=10**6)] = 64
    """Steps between the states that a fork may go back to. Each is saved, and kept until two newer ones are."""
    rate_factor: Annotated[float, LATER, ValueRange(above=0, below=1)] = 0.5
    """Factor of the learning rate of "rate"."""
    clip_factor: Annotated[float, LATER, ValueRange(above=0, below=1)] = 0.5
    """Factor of optimizer.clip_norm of "clip"."""
    most_forks: Annotated[int, LATER, POSITIVE] = 8
    """Forks of a run; one spike more stops it, as train.on_spike = "stop" does."""


def fork_problems(
    spike: SpikeSpec,
    train: TrainSpec,
    optimizer: OptimizerSpec,
    precision: PrecisionSpec,
    runtime: RuntimeSpec,
    fleet: FleetSpec,
) -> Iterator[Problem]:
    """Yield the reasons for which a run cannot fork at its spikes; none if it does not."""
    if train.on_spike != "fork":
        return
    if not spike.candidates or len(set(spike.candidates)) < len(spike.candidates):
        yield Problem(
            "spike.candidates",
            "has a candidate twice" if spike.candidates else "is empty, so that a fork has nothing to try",
            'name each once, as in ["skip", "rate"]',
        )
    if "clip" in spike.candidates and not optimizer.clip_norm:
        yield Problem(
            "spike.candidates",
            '"clip" lowers optimizer.clip_norm, and 0 is no clipping',
            'set optimizer.clip_norm, or leave "clip" out',
            ("optimizer.clip_norm",),
        )
    if "wide" in spike.candidates and precision.matmul == "compute":
        yield Problem(
            "spike.candidates",
            '"wide" computes products in precision.compute, as they are already; a run cannot change precision.compute, for which its model is built',
            'leave "wide" out; phalanx spike repeats a spike in fp32, and phalanx train RUN_DIR --from STEP --set precision.compute=fp32 goes on in it',
            ("precision.matmul",),
        )
    if "wide" in spike.candidates and runtime.compile:
        yield Problem(
            "spike.candidates",
            '"wide" changes products that runtime.compile = true has compiled into the blocks',
            'set runtime.compile = false, or leave "wide" out',
            ("runtime.compile",),
        )
    if fleet.audit_every_steps:
        yield Problem(
            "train.on_spike",
            f"the steps of a fork are not audited, and fleet.audit_every_steps = {fleet.audit_every_steps} asks for all steps to be",
            'set fleet.audit_every_steps = 0, or train.on_spike = "skip"',
            ("fleet.audit_every_steps",),
        )
