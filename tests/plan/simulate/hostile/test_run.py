"""Small hostile worlds hold for a sample of seeds, are functions of their seed, and would notice a broken core."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from msgspec.structs import replace

from phalanx.fleet.core import commands as c
from phalanx.fleet.core import decide as core
from phalanx.fleet.core import messages as m
from phalanx.fleet.core import succession
from phalanx.fleet.core.epochs import epoch_plan
from phalanx.fleet.core.epochs.epoch_plan import Order
from phalanx.fleet.core.epochs.seating import deal
from phalanx.fleet.core.invariants import BrokenInvariant
from phalanx.fleet.core.state import FleetPhase, FleetState, NonFiniteDoubt, RestorePoint
from phalanx.fleet.core.succession import Claim
from phalanx_plan.simulate.hostile.run import run_seed

Answer = tuple[FleetState, list[Order]]


@pytest.mark.parametrize("seed", range(12))
def test_a_world_survives_its_faults(seed: int) -> None:
    assert run_seed(seed).steps > 0


def test_from_memory_at_most_two_steps_are_lost_where_copies_are_quick() -> None:
    assert max(run_seed(seed).worst_lost_steps for seed in range(12, 20)) <= 2


def test_heads_are_lost_and_succeeded_in_the_sampled_worlds() -> None:
    outcomes = [run_seed(seed) for seed in range(12)]
    assert sum(outcome.faults.get("head lost", 0) for outcome in outcomes) > 3
    assert sum(outcome.successions for outcome in outcomes) > 3


def test_checkpoints_of_members_that_train_on_while_the_head_is_away_are_not_given_up() -> None:
    # The head falls between its decision and its claim, and the epoch before saves three more checkpoints until it is back.
    assert run_seed(20335).steps > 70
    # Here it falls after its claim: no step may be saved twice.
    assert run_seed(64528).steps > 14


def test_a_node_whose_last_messages_of_an_epoch_were_lost_is_queried_for_its_snapshots() -> None:
    assert run_seed(44073).steps > 5


def test_nobody_is_found_at_fault_for_a_step_that_was_not_computed_again() -> None:
    assert run_seed(51253).steps > 17


def test_a_node_that_was_blamed_for_a_step_comes_back_though_older_state_was_restored_meanwhile() -> None:
    assert run_seed(72899).steps > 4


def test_a_world_is_a_function_of_its_seed() -> None:
    assert run_seed(3) == run_seed(3) != run_seed(4)


def run_seeds(seeds: range, step: Callable[[FleetState, m.CoreEvent, float], Answer]) -> None:
    for seed in seeds:
        run_seed(seed, step)


def has_no_sense_of_time(state: FleetState, event: m.CoreEvent, now_s: float) -> Answer:
    """No lease and no deadline ever runs out."""
    return (state, []) if isinstance(event, m.Tick) else core.step(state, event, now_s)


def does_not_wait_for_all(state: FleetState, event: m.CoreEvent, now_s: float) -> Answer:
    """A new epoch begins though one member may still train in the old one."""
    if state.phase is FleetPhase.PARKING and len(state.awaiting) == 1:
        state.awaiting.clear()
    return core.step(state, event, now_s)


def prefers_old_state(state: FleetState, event: m.CoreEvent, now_s: float) -> Answer:
    """The disk, though memory has newer steps."""
    before = state.epoch
    state, orders = core.step(state, event, now_s)
    if state.epoch > before and isinstance(state.source, RestorePoint):
        state.source = c.Fresh()
    return state, orders


def trusts_corrupt_state(state: FleetState, event: m.CoreEvent, now_s: float) -> Answer:
    """After a silent corruption, the newest snapshot is restored all the same."""
    if isinstance(event, m.Suspect) and event.trusted_step is not None:
        event = replace(event, trusted_step=2**40)
    return core.step(state, event, now_s)


def believes_the_first_report_of_a_step(state: FleetState, event: m.CoreEvent, now_s: float) -> Answer:
    """A step that one epoch found not finite is called the run's own."""
    if isinstance(event, m.Suspect) and event.step is not None and state.doubt is None:
        state.doubt = NonFiniteDoubt(event.step, -1)
    return core.step(state, event, now_s)


def believes_one_node(state: FleetState, event: m.CoreEvent, now_s: float) -> Answer:
    """The run ends because one node reports that it cannot continue."""
    event = replace(event, unanimous=True) if isinstance(event, m.Fatal) else event
    return core.step(state, event, now_s)


def convicts_without_a_second_computation(state: FleetState, event: m.CoreEvent, now_s: float) -> Answer:
    """A node that is blamed for a step is at fault, though the step is not finite elsewhere either."""
    doubt = state.doubt
    state, orders = core.step(state, event, now_s)
    if doubt is not None and doubt.nodes and state.doubt is not None and state.doubt.confirmed:
        state.doubt = None
    return state, orders


@pytest.mark.parametrize(
    ("broken", "seeds"),
    [
        (has_no_sense_of_time, range(22, 29)),
        (does_not_wait_for_all, range(5)),
        (prefers_old_state, range(5)),
        (trusts_corrupt_state, range(101, 106)),
        (believes_the_first_report_of_a_step, range(4, 9)),
        (believes_one_node, range(12, 19)),
        (convicts_without_a_second_computation, range(5, 12)),
    ],
)
def test_a_broken_core_is_found_within_a_few_seeds(
    broken: Callable[[FleetState, m.CoreEvent, float], Answer], seeds: range
) -> None:
    with pytest.raises(BrokenInvariant, match="phalanx simulate fleet --small --seeds"):
        run_seeds(seeds, broken)


def begins_epochs_without_a_claim(claim: Claim, state: FleetState) -> bool:  # noqa: ARG001
    """A head that has been superseded, and does not know it, begins epochs beside its successor."""
    return False


def finds_no_majority(claim: Claim, nodes: Iterable[str]) -> bool:  # noqa: ARG001
    """Nobody succeeds a lost head."""
    return False


def believes_any_journal(state: FleetState, claim: Claim) -> bool:  # noqa: ARG001
    """A journal that has lost its end counts as whole, and epochs are begun twice."""
    return False


@pytest.mark.parametrize(
    ("name", "broken", "seeds"),
    [
        ("is_due", begins_epochs_without_a_claim, range(4, 8)),
        ("has_majority", finds_no_majority, range(7, 10)),
        ("is_behind", believes_any_journal, range(128, 132)),
    ],
)
def test_a_broken_succession_is_found_within_a_few_seeds(
    name: str, broken: Callable[..., bool], seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, name, broken)
    with pytest.raises(BrokenInvariant, match="phalanx simulate fleet --small --seeds"):
        run_seeds(seeds, core.step)


def test_a_core_that_keeps_its_seats_in_a_fleet_of_another_size_is_found_within_a_few_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(epoch_plan, "deal", lambda state, ranks, keep: deal(state, ranks, keep=True))  # noqa: ARG005
    with pytest.raises(BrokenInvariant, match="phalanx simulate fleet --small --seeds"):
        run_seeds(range(12), core.step)
