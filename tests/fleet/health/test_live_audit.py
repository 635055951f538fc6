"""Audits on real ranks: bits stay as they are, and a flipped bit is found where it happened."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

import layouts
from phalanx.run.spec import ModelSpec, ParallelSpec, RunSpec
from quick_cases import quick
from ranks import Ranks


@dataclasses.dataclass(frozen=True)
class Flip:
    """A bit that a rank flips in a gradient."""

    step: int
    rank: int
    always: bool
    """In all that it computes from that step on, or once."""
    parameter: bool = False
    """In a parameter, before the step begins, and not in a gradient."""


def audited_steps(
    spec: RunSpec, steps: int, every: int, flips: tuple[Flip, ...] = ()
) -> tuple[list[Any], str]:
    """The verdicts of ``steps`` steps with an audit ``every`` so many, and the weights' hash at the end."""
    import time

    import numpy as np
    import torch
    import torch.distributed as dist

    from phalanx.fleet.health.audit import AuditVerdict
    from phalanx.fleet.health.live_audit import CorruptionFoundError, LiveAudit
    from phalanx.observe.ledger import Ledger
    from phalanx.parallel.mesh import build_mesh
    from phalanx.parallel.reduction.data_parallel import local
    from phalanx.train.assemble import make_deterministic
    from phalanx.train.compose import build_model
    from phalanx.train.step.state import fill_initial, state_tensors, weights_sha256
    from phalanx.train.step.step import Stepper

    device = torch.device("cpu")
    make_deterministic(spec, device)
    mesh = build_mesh(spec, dist.get_world_size(), device)
    built = build_model(spec, mesh)
    fill_initial(built.model.parts, built.placement, spec)
    step = 0

    def samples(slot: int) -> Any:
        draw = np.random.default_rng([step, slot])
        shape = (spec.train.batch_size // spec.train.slots, spec.train.seq_len + 1)
        return draw.integers(0, spec.model.vocab_size, shape)

    def batches() -> Any:
        while True:
            yield from (samples(current.slot) for current in built.rounds)

    def compute(current: Any) -> None:
        stepper.recompute_slot(current, samples(current.slot))

    stepper = Stepper(built, batches(), Ledger(time.monotonic_ns()))
    audit = LiveAudit(built.model, mesh.deal(spec.train.slots), spec.runtime.seed, every, compute)
    verdicts: list[AuditVerdict | None] = []
    for step in range(1, steps + 1):
        flip = next((flip for flip in flips if flip.step == step and flip.rank == mesh.rank), None)
        audit.witness.corrupt = None
        if flip is not None and flip.parameter:
            tensors = [local(tensor) for tensor in state_tensors(built.model.parts).values()]
            target = max(tensors, key=lambda tensor: tensor.numel())
            with torch.no_grad():
                target.view(-1).view(torch.int32)[target.numel() // 2] ^= 1
        elif flip is not None:
            draw = random.Random(repr(flip))

            def damage(gradient: torch.Tensor, flip: Flip = flip, draw: random.Random = draw) -> None:
                if gradient.numel() and (flip.always or draw.random() < 0.3):
                    bits = gradient.view(-1).view(torch.int32)
                    bits[draw.randrange(len(bits))] ^= 1 << draw.randrange(31)
                    if not flip.always:
                        audit.witness.corrupt = None

            audit.witness.corrupt = damage
        try:
            with stepper._auditing():
                audit.begin(step)
        except CorruptionFoundError as error:
            verdicts.append(error.verdict)
            break
        stepper._run_slots(audit)
        with stepper._auditing():
            verdicts.append(audit.verdict(step))
        if verdicts[-1] is None:
            built.optimizer.step(step, 1e-3, 1.0)
        built.model.abandon()
    return verdicts, weights_sha256(built.model.parts, built.placement)


DENSE, MIXTURE = (dataclasses.replace(model, layers=2) for model in (layouts.DENSE, layouts.MIXTURE))


def tiny(model: ModelSpec, parallel: ParallelSpec) -> RunSpec:
    """A run with two micro-batches to a slot."""
    return layouts.tiny(model, parallel, batch_size=8)


PAIR = ParallelSpec(sharding="zero3")
LAYOUTS = {
    "whole x 3": (3, DENSE, ParallelSpec(sharding="none")),
    "sharded over 3": (3, DENSE, PAIR),
    "2 replicas of 2": (4, DENSE, ParallelSpec(sharding="zero2", shard_ranks=2)),
    "tensor 2 x 2": (4, DENSE, ParallelSpec(tensor=2, sharding="zero3")),
    "pipeline 2 x 2": (4, DENSE, ParallelSpec(pipeline=2, sharding="none")),
    "context 2 x 2": (4, DENSE, ParallelSpec(context=2, sharding="zero3")),
    "experts on 2, teams of 2": (4, MIXTURE, ParallelSpec(expert=2, sharding="zero3")),
}


@pytest.mark.servers
@pytest.mark.parametrize("name", quick(LAYOUTS, of_the_suite=["experts on 2, teams of 2"]))
def test_audits_find_nothing_on_healthy_ranks_and_change_no_bit(ranks: Ranks, name: str) -> None:
    count, model, parallel = LAYOUTS[name]
    spec = tiny(model, parallel)
    outcomes = ranks.run(count, audited_steps, spec, 3, 1)
    assert all(verdicts == [None] * 3 for verdicts, _ in outcomes)
    without = ranks.run(count, audited_steps, spec, 3, 0)
    assert outcomes == without


@pytest.mark.parametrize(
    ("name", "reduction"),
    quick(
        [("whole x 3", "integer"), ("sharded over 3", "integer"), ("2 replicas of 2", "reproducible")],
        of_the_suite=[("sharded over 3", "integer"), ("2 replicas of 2", "reproducible")],
    ),
)
def test_a_rank_that_computes_wrongly_is_named_on_every_rank_and_the_good_step_too(
    ranks: Ranks, name: str, reduction: Any
) -> None:
    count, model, parallel = LAYOUTS[name]
    spec = tiny(model, parallel)
    spec = dataclasses.replace(spec, train=dataclasses.replace(spec.train, reduction=reduction))
    outcomes = ranks.run(count, audited_steps, spec, 2, 1, (Flip(2, 1, always=True),))
    for verdicts, _ in outcomes:
        first, verdict = verdicts
        assert first is None
        assert (verdict.ranks, verdict.sure, verdict.roll_back_to) == ((1,), True, 1)


@pytest.mark.parametrize(
    ("every", "flipped_before", "good"),
    quick([(1, 2, 0), (1, 3, 1), (2, 2, 0), (2, 3, 0), (2, 4, 2)], of_the_suite=[(1, 3, 1), (2, 4, 2)]),
    ids=lambda number: str(number),
)
def test_a_bit_flipped_in_one_replicas_parameter_is_found_in_the_next_audit_and_its_rank_named(
    ranks: Ranks, every: int, flipped_before: int, good: int
) -> None:
    # The lowest bit of one number: gradients would hardly show it. An audited step is good once its update is seen to be.
    count, model, parallel = LAYOUTS["whole x 3"]
    flip = Flip(flipped_before, 1, always=False, parameter=True)
    outcomes = ranks.run(count, audited_steps, tiny(model, parallel), 6, every, (flip,))
    for verdicts, _ in outcomes:
        *clean, verdict = verdicts
        assert clean == [None] * (flipped_before - 1)
        assert (verdict.ranks, verdict.sure, verdict.slots, verdict.roll_back_to) == ((1,), True, (), good)


def test_of_two_replicas_whose_parameters_differ_both_holders_are_named_and_nobody_else(ranks: Ranks) -> None:
    count, model, parallel = LAYOUTS["2 replicas of 2"]
    flip = Flip(2, 3, always=False, parameter=True)
    for verdicts, _ in ranks.run(count, audited_steps, tiny(model, parallel), 3, 1, (flip,)):
        assert (verdicts[-1].ranks, verdicts[-1].sure) == ((1, 3), False)


def flips_are_caught(ranks: Ranks, name: str, count: int) -> None:
    world, model, parallel = LAYOUTS[name]
    draw = random.Random(name)
    flips = tuple(Flip(step, draw.randrange(world), always=False) for step in range(1, count + 1))
    outcomes = ranks.run(world, audited_steps, tiny(model, parallel), count, 1, flips)
    assert all(verdicts == outcomes[0][0] for verdicts, _ in outcomes)
    hit = 0
    for flip, verdict in zip(flips, outcomes[0][0], strict=True):
        if verdict is not None:
            hit += 1
            assert (verdict.ranks, verdict.sure) == ((flip.rank,), True)
    # A flip in a round that is not audited is not seen: a rank has up to two rounds of its own and one of another.
    assert hit > count // 3


def test_single_flipped_bits_are_caught_in_the_audited_slots_and_the_right_rank_is_named(
    ranks: Ranks,
) -> None:
    flips_are_caught(ranks, "whole x 3", 6)


@pytest.mark.slow
@pytest.mark.timeout(0)  # ranks that stand still are given up by their pool
@pytest.mark.parametrize("name", ["whole x 3", "sharded over 3", "2 replicas of 2"])
def test_a_hundred_single_flipped_bits_are_caught_in_the_audited_slots(ranks: Ranks, name: str) -> None:
    flips_are_caught(ranks, name, 100)


def test_a_run_that_sums_before_slots_can_be_distinguished_is_refused(ranks: Ranks) -> None:
    spec = tiny(DENSE, ParallelSpec(sharding="none"))
    fast = dataclasses.replace(spec, train=dataclasses.replace(spec.train, reduction="fast"))
    with pytest.raises(AssertionError, match=r"set train\.reduction"):
        ranks.run(1, audited_steps, fast, 1, 1)
