"""Each problem, planted in the events or the files that it leaves, is named with its evidence and a next command."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.fleet.control.fleet_file import Member
from phalanx.fleet.core.state import FleetPhase
from phalanx.observe.events import (
    CheckpointCopied,
    CheckpointFailed,
    CheckpointSaved,
    EndedEarly,
    Evaluated,
    Evaluating,
    IncidentKind,
    LossSpike,
    MachineUsed,
    Message,
    NonFinite,
    RunStarted,
    Step,
    Stopped,
)
from phalanx.observe.metrics.endpoint import Target, announce
from phalanx.observe.record.notes import Throttling
from phalanx.run.directory.paths import CHECKPOINT_INDEX, step_folder
from phalanx.run.spec import CheckpointSpec, EvalSpec, FleetSpec, MoeSpec, ObserveSpec, RunSpec
from phalanx.train.lifecycle.ending import RunFailedError, report_failure
from phalanx.train.step.machines import MACHINE_FIGURES, machines_used
from phalanx_watch.why.observed import (
    DiskSeen,
    FirstFailureSeen,
    LoadSeen,
    MemorySeen,
    ProcessSeen,
    Reason,
    SlowRankSeen,
)
from watch.why.watched import STEP_S, T0, Watched, fleet_file, happening, member, step, steps

NOTHING_DUE = RunSpec(checkpoint=CheckpointSpec(every_steps=1000), evaluation=EvalSpec(every_steps=0))
FLEET = dataclasses.replace(NOTHING_DUE, fleet=FleetSpec(nodes=2, spares=1))


@pytest.fixture
def run(tmp_path: Path) -> Watched:
    """A run of 30 healthy steps."""
    watched = Watched(tmp_path / "run", NOTHING_DUE)
    watched.write(steps(1, 30))
    return watched


def only(reasons: list[Reason]) -> Reason:
    """Return the only reason, once it has evidence, an account of what the run does, and a next command."""
    (reason,) = reasons
    assert reason.evidence
    assert reason.doing
    assert reason.next
    return reason


# --- standing still and ending -----------------------------------------------------------------------


def test_a_run_without_a_step_for_ten_usual_steps_is_stalled(run: Watched) -> None:
    assert run.codes(29) == []
    reason = only(run.reasons(120))
    assert (reason.code, reason.severity) == ("stalled", "critical")
    assert "computing a step" in reason.title
    assert reason.since == run.t


def test_a_slow_run_is_given_ten_of_its_own_steps(tmp_path: Path) -> None:
    slow = Watched(tmp_path / "run", NOTHING_DUE)
    slow.write(steps(1, 12, lambda _: {"step_s": 40.0, "logged_s": 40.0}), every_s=40)
    assert slow.codes(399) == []
    assert slow.codes(401) == ["stalled"]


def test_a_run_that_logs_every_tenth_step_is_given_ten_of_those(tmp_path: Path) -> None:
    run = Watched(tmp_path / "run", NOTHING_DUE)
    run.write([step(10 * n, logged_s=20.0) for n in range(1, 13)], every_s=20)
    assert run.codes(199) == []
    assert run.codes(201) == ["stalled"]


def test_a_run_that_ends_early_may_save_and_evaluate_as_long_as_one_that_did_all_steps(run: Watched) -> None:
    run.write([EndedEarly(30, "loss", 3, 10, 2.0)])
    assert "stalled" not in run.codes(201)


def test_an_evaluation_is_no_stall_and_one_that_never_ends_is(run: Watched) -> None:
    run.spec = dataclasses.replace(run.spec, evaluation=EvalSpec(every_steps=10))
    run.write([Evaluated(30, 2.0, seconds=60.0), *steps(31, 40)])
    assert run.codes(300) == [], "it usually takes a minute"
    assert "evaluating" in only(run.reasons(400)).title
    run.write([Evaluating(40, 10, 4096)], every_s=400)
    assert run.codes(300) == []


def test_a_save_is_no_stall_until_it_takes_far_longer_than_usual(run: Watched) -> None:
    run.spec = dataclasses.replace(run.spec, checkpoint=CheckpointSpec(every_steps=10))
    run.write([CheckpointSaved(30, "c", 10, seconds=20.0), *steps(31, 40)])
    assert run.codes(120) == []
    assert "saving a checkpoint" in run.reasons(200)[0].title


@pytest.mark.parametrize(
    ("phase", "patient_s", "code"),
    [
        (FleetPhase.PARKING, 80, "stalled"),
        (FleetPhase.WAITING, 55, "waiting-for-nodes"),
        (FleetPhase.SAVING, 590, "stalled"),
    ],
)
def test_a_fleet_that_does_something_else_is_given_time_for_it(
    run: Watched, phase: FleetPhase, patient_s: float, code: str
) -> None:
    def seen(after_s: float) -> list[Reason]:
        return run.reasons(
            after_s, fleet=fleet_file(run.t + after_s, phase=phase, reason="too few nodes"), spec=FLEET
        )

    assert seen(patient_s) == []
    assert seen(patient_s + 60)[0].code == code


def test_a_run_that_waits_for_an_object_store_is_waiting_for_data(run: Watched) -> None:
    text = "rank 2 has waited 60 s for samples from s3://b/words; the run waits"
    run.write([Message("warning", text, IncidentKind.DATA_WAIT)])
    reason = only(run.reasons(120))
    assert reason.code == "waiting-for-data"
    assert "s3://b/words" in reason.title


def test_a_start_has_time_and_one_that_never_comes_to_a_step_is_named(tmp_path: Path) -> None:
    run = Watched(tmp_path / "run", NOTHING_DUE)
    assert run.codes(600) == []
    assert "starting" in only(run.reasons(1000)).title


def test_processes_that_are_gone_without_a_word_are_missed_at_once(run: Watched) -> None:
    reason = only(run.reasons(1, is_held=False))
    assert (reason.code, reason.severity, reason.since) == ("gone", "critical", run.t)
    assert f"phalanx train {run.directory.path}" in reason.next


def test_a_run_whose_starts_all_end_before_a_checkpoint_is_due_has_to_save_sooner(run: Watched) -> None:
    run.write(steps(1, 40), attempt=1)
    lost = only(run.reasons(is_held=False, starts=2))
    assert "no checkpoint was ever saved in 2 starts" in lost.evidence[-1]
    assert "--set checkpoint.every_steps=20" in lost.next
    saved = only(run.reasons(is_held=False, starts=2, checkpoints=((20, T0),)))
    assert not any("no checkpoint" in line for line in saved.evidence)
    assert "--set" not in saved.next


def ended(run: Watched, attempt: int, last: int) -> None:
    run.write([RunStarted("r", 100_000, ranks=4), *steps(21, last)], attempt)


def test_starts_that_all_end_after_the_same_step_lead_to_the_batch_of_the_next(run: Watched) -> None:
    ended(run, 1, 37)
    ended(run, 2, 37)
    twice = only(run.reasons(is_held=False))
    assert "data show" not in twice.next
    ended(run, 3, 37)
    thrice = only(run.reasons(is_held=False))
    assert "the newest 3 starts all ended after step 37" in thrice.evidence[-2]
    assert thrice.next.startswith(f"phalanx data show {run.directory.path} --step 38 ")
    failure = FirstFailureSeen("rank 0", "Segmentation fault", run.t)
    failed = only(run.reasons(is_held=False, first_failure=failure))
    assert failed.code == "failed"
    assert failed.next.startswith(f"phalanx data show {run.directory.path} --step 38 ")


def test_starts_that_all_end_at_a_save_do_not_lead_to_a_batch(run: Watched) -> None:
    for attempt in (1, 2, 3):
        ended(run, attempt, 40)
    run.spec = dataclasses.replace(run.spec, checkpoint=CheckpointSpec(every_steps=40))
    reason = only(run.reasons(is_held=False))
    assert "after step 40, while saving a checkpoint" in reason.evidence[2]
    assert "data show" not in reason.next


def test_starts_that_were_stopped_on_request_or_end_at_other_steps_do_not_count(run: Watched) -> None:
    ended(run, 1, 37)
    ended(run, 2, 37)
    run.write([Stopped(37, "stopped")], attempt=2)
    ended(run, 3, 37)
    ended(run, 4, 37)
    assert "data show" not in only(run.reasons(is_held=False)).next
    ended(run, 5, 38)
    ended(run, 6, 37)
    assert "data show" not in only(run.reasons(is_held=False)).next


def test_a_run_on_another_machine_is_silent_not_gone(run: Watched) -> None:
    assert run.codes(200, is_held=None) == ["stalled"]
    assert "silent" in run.codes(400, is_held=None)


def test_a_run_that_was_stopped_on_request_is_only_information_with_the_command_that_continues_it(
    run: Watched,
) -> None:
    run.write([Stopped(30, "stopped on request; step 30 is saved")])
    reason = only(run.reasons(1e6, is_held=False))
    assert (reason.code, reason.severity) == ("stopped", "info")
    assert "step 30 of 100,000" in reason.title
    assert reason.next == f"phalanx train {run.directory.path}"


def test_a_failure_is_reported_with_its_own_words_and_remedy(run: Watched) -> None:
    log = run.directory.log(0, 3)
    log.parent.mkdir(exist_ok=True)
    report_failure(
        RunFailedError("no memory for layer 7; lower train.micro_batch_size", "lower train.micro_batch_size"),
        log,
        0,
        3,
    )
    reason = only(run.reasons(1, is_held=False))
    assert (reason.code, reason.where) == ("failed", "rank-00003")
    assert "no memory for layer 7" in reason.evidence[0]
    assert reason.next.startswith("lower train.micro_batch_size; then phalanx train")


def test_a_failure_that_the_run_has_outlived_is_over(run: Watched) -> None:
    log = run.directory.log(0, 3)
    log.parent.mkdir(exist_ok=True)
    report_failure(RunFailedError("x", "y"), log, 0, 3)
    assert run.codes(1, is_held=True) == []


# --- pace ----------------------------------------------------------------------------------------------


def test_waiting_for_samples_is_named_with_its_share(run: Watched) -> None:
    run.write(steps(31, 60, lambda _: {"data_wait_s": 0.6}))
    reason = only(run.reasons())
    assert (reason.code, reason.severity) == ("slow-data", "warning")
    assert "30%" in reason.title


@pytest.mark.parametrize(("waited_s", "codes_then"), [(1.8, ["slow-data"]), (0.1, [])])
def test_a_finished_run_is_judged_by_the_waits_of_all_its_steps(
    run: Watched, waited_s: float, codes_then: list[str]
) -> None:
    run.write(steps(31, 60, lambda _: {"data_wait_s": waited_s}))
    run.write(steps(61, 90))
    assert run.codes() == []
    assert run.codes(is_held=False, finished=True) == codes_then


def test_steps_that_are_over_in_a_moment_are_judged_over_some_seconds(run: Watched) -> None:
    run.write(steps(31, 160, lambda _: {"logged_s": 0.02}), every_s=0.02)
    run.write(steps(161, 180, lambda _: {"logged_s": 0.02, "data_wait_s": 0.01}), every_s=0.02)
    assert run.codes() == []
    run.write(steps(181, 600, lambda _: {"logged_s": 0.02, "data_wait_s": 0.01}), every_s=0.02)
    assert run.codes() == ["slow-data"]


def test_a_fall_of_throughput_is_named_with_what_has_grown(run: Watched) -> None:
    run.write(steps(31, 140))
    slow = {"tokens_per_s": 300.0, "step_s": 3.3, "logged_s": 3.3}
    base = 280.0

    def slower(number: int) -> dict[str, Any]:
        return {
            **slow,
            "ledger": {
                "step.compute": base + 2 * (number - 140),
                "step.comm_exposed.dp": 1.3 * (number - 140),
            },
        }

    assert run.codes() == []
    run.write(steps(141, 165, slower), every_s=3.3)
    reason = only(run.reasons())
    assert reason.code == "slower"
    assert "40%" in reason.title
    assert "step.comm_exposed.dp" in reason.evidence[1]


@pytest.mark.parametrize(
    ("before", "varies", "falls_to", "codes"),
    [
        (14, (1.0,), 0.2, []),  # four steps are settled
        (16, (1.0,), 0.2, ["slower"]),
        (90, (0.5, 1.0, 1.5), 0.5, []),
        (140, (0.5, 1.0, 1.5), 0.8, []),
        (140, (0.5, 1.0, 1.5), 0.3, ["slower"]),
    ],
)
def test_a_fall_to_half_needs_few_steps_before_and_one_that_stays_is_named_though_throughput_varies(
    tmp_path: Path, before: int, varies: tuple[float, ...], falls_to: float, codes: list[str]
) -> None:
    run = Watched(tmp_path, NOTHING_DUE)

    def speed(number: int) -> dict[str, Any]:
        usual = 500.0 if number <= before else 500.0 * falls_to
        return {"tokens_per_s": usual * varies[number // 40 % len(varies)]}

    run.write(steps(1, before + 170, speed))
    reasons = run.reasons()
    assert [reason.code for reason in reasons] == codes
    assert all(f"step {before + 1}" in reason.title for reason in reasons)


def test_a_fall_of_throughput_beside_other_processes_names_the_load(run: Watched) -> None:
    run.write([*steps(31, 140), *steps(141, 165, lambda _: {"tokens_per_s": 300.0})])
    ranks = tuple(ProcessSeen(number, "R", number) for number in range(4))
    assert (
        "9 threads want the 4 cores" in only(run.reasons(load=LoadSeen(9.0, 4), processes=ranks)).evidence[-1]
    )
    assert not any(
        "cores" in line for line in only(run.reasons(load=LoadSeen(5.0, 4), processes=ranks)).evidence
    )


def test_little_training_in_long_time_is_named_with_its_largest_cause(run: Watched) -> None:
    ledger = {"step.compute": 3000.0, "ckpt.blocking": 2500.0, "eval": 100.0}
    run.write([step(31, goodput=0.54, ledger=ledger)])
    reason = only(run.reasons())
    assert (reason.code, reason.where) == ("low-goodput", "ckpt.blocking")


@pytest.mark.parametrize("cause", ["eval", "step.host_gap"])
def test_little_training_since_a_short_start_is_named_also_of_a_run_that_has_ended(
    run: Watched, cause: str
) -> None:
    run.write([step(31, ledger={"start.warmup": 500.0, "step.compute": 40.0, cause: 20.0})])
    assert run.codes() == []  # a third of a minute: an evaluation and a save
    run.write([step(32, ledger={"start.warmup": 500.0, "step.compute": 40.0, cause: 40.0})])
    reason = only(run.reasons())
    assert (reason.code, reason.where) == ("low-goodput", cause)
    assert "50.0% of 1:20" in reason.evidence[0]
    run.write([Stopped(32, "stopped on request")])
    assert run.codes(is_held=False) == ["low-goodput", "stopped"]


def test_a_run_whose_every_step_is_slower_than_the_one_before_is_slower_than_at_its_begin(
    tmp_path: Path,
) -> None:
    run = Watched(tmp_path / "run", NOTHING_DUE)
    run.write(steps(1, 100, lambda n: {"tokens_per_s": 20_000.0 / (10 + n)}))
    assert only(run.reasons()).code == "slower"


# --- numbers -------------------------------------------------------------------------------------------


def test_a_held_out_loss_that_is_not_a_number_is_critical_also_at_the_end(run: Watched) -> None:
    run.write([Evaluated(20, 2.0), Evaluated(30, float("nan")), Stopped(30, "stopped on request")])
    reasons = run.reasons(is_held=False)
    assert [(reason.code, reason.severity) for reason in reasons] == [
        ("not-finite", "critical"),
        ("stopped", "info"),
    ]
    assert reasons[0].where == "the weights of step 30"


def spike(number: int, action: Any = "continue") -> LossSpike:
    return LossSpike(number, 7.5, 30.0, 2.0, 40.0, action, 16 * (number - 1), 16, 0.5, "loss", 3, 9.1)


def test_a_spike_is_named_with_its_batch_and_slot_until_a_window_and_ten_minutes_have_passed(
    run: Watched,
) -> None:
    run.write([spike(31), *steps(31, 60)])
    reason = only(run.reasons())
    assert (reason.code, reason.severity, reason.where) == ("loss-spike", "warning", "step 31, slot 3")
    assert "samples 480 to 495" in reason.evidence[1]
    assert "the loss is back" in reason.evidence[2]
    assert reason.next == f"phalanx spike {run.directory.path} 31"
    run.write(steps(61, 31 + 128))
    assert run.codes() == ["loss-spike"]
    run.write(steps(32 + 128, 31 + 300))
    assert run.codes() == []


def test_a_loss_that_does_not_come_back_is_critical_and_named_with_the_way_back(run: Watched) -> None:
    run.write([spike(31), *steps(31, 60, lambda _: {"loss": 6.0})])
    reason = only(run.reasons(checkpoints=((20, T0), (40, T0 + 80))))
    assert reason.severity == "critical"
    assert "--from 20 --set train.on_spike=skip" in reason.next


def test_a_step_that_is_not_finite_is_named_with_slot_parameter_and_rank(run: Watched) -> None:
    description = "loss nan, gradient norm inf: not finite are loss of slot 5, gradient of blocks.3.ffn.w1 (9 of 64 elements)"
    where = {"slots": [5], "parameters": ["blocks.3.ffn.w1"], "ranks": [2]}
    run.write([NonFinite(31, description, skipped=False, first_sample=480, samples=16, **where)])
    reason = next(reason for reason in run.reasons() if reason.code == "not-finite")
    assert reason.severity == "critical"
    assert reason.where == "step 31, slot 5, gradient of blocks.3.ffn.w1, rank 2"
    assert "samples 480 to 495" in reason.evidence[1]
    assert "--step 31 --slot 5" in reason.next


def skipped(number: int, rank: int) -> NonFinite:
    return NonFinite(number, "loss nan", skipped=True, samples=16, ranks=[rank], slots=[number % 4])


@pytest.mark.parametrize(("apart", "codes_then"), [(51, []), (50, ["skipped-steps"])])
def test_steps_that_are_thrown_away_are_named_from_a_fiftieth_on_also_once_the_run_has_finished(
    tmp_path: Path, apart: int, codes_then: list[str]
) -> None:
    run = Watched(tmp_path / "run", NOTHING_DUE)
    for number in range(apart, 12 * apart + 1, apart):
        run.write([*steps(number - apart + 1, number - 1), spike(number, "skip"), step(number)])
    assert [code for code in run.codes() if code != "loss-spike"] == codes_then
    assert run.codes(finished=True, is_held=False) == codes_then


def test_thrown_away_spikes_are_named_with_their_share_the_newest_and_a_limit_that_is_too_low(
    tmp_path: Path,
) -> None:
    run = Watched(tmp_path / "run", NOTHING_DUE)
    for number in range(10, 201, 10):
        run.write([*steps(number - 9, number - 1), spike(number, "skip"), step(number)])
    strict = dataclasses.replace(run.spec.train, spike_deviations=2.5)
    reason = only(run.reasons(finished=True, spec=dataclasses.replace(run.spec, train=strict)))
    assert reason.title == "20 of 200 steps were thrown away (10.0%)"
    assert "train.spike_deviations = 2.5" in reason.evidence[0]
    assert "the newest is step 200" in reason.evidence[0]
    assert reason.next.endswith("--set train.spike_deviations=8")
    usual = only(run.reasons(finished=True))
    assert "optimizer.lr" in usual.next


def nonfinite_run(path: Path, layout: dict[str, int], ranks: int, rank_of: Callable[[int], int]) -> Watched:
    """A run that has skipped every tenth of 200 steps."""
    run = Watched(path, NOTHING_DUE)
    run.write([RunStarted("r", 100_000, ranks=ranks, layout=layout)])
    for number in range(10, 201, 10):
        run.write([*steps(number - 9, number - 1), skipped(number, rank_of(number)), step(number)])
    return run


def test_a_rank_that_alone_has_all_steps_that_are_not_finite_is_the_suspect(tmp_path: Path) -> None:
    run = nonfinite_run(tmp_path / "run", {"replicate": 4}, 4, lambda _: 3)
    for reason in run.reasons(nodes={3: "node-1"}):
        assert reason.code in ("not-finite", "skipped-steps")
        assert "rank 3" in reason.where
        assert reason.next.startswith("check the machine of rank 3 on node-1 (there: phalanx health)")
    assert run.codes(finished=True) == ["skipped-steps"]


@pytest.mark.parametrize(
    ("layout", "rank_of"),
    [
        ({"replicate": 4}, lambda number: number % 4),
        ({"replicate": 4}, lambda number: 2 if number == 150 else 3),
        ({"pipeline": 4}, lambda _: 3),
    ],
    ids=["several ranks", "another rank once", "the only rank with losses"],
)
def test_no_rank_is_the_suspect_if_others_have_such_steps_or_none_could_have(
    tmp_path: Path, layout: dict[str, int], rank_of: Callable[[int], int]
) -> None:
    run = nonfinite_run(tmp_path / "run", layout, 4, rank_of)
    reason = only(run.reasons(finished=True))
    assert reason.code == "skipped-steps"
    assert "health" not in reason.next
    assert "phalanx data show" in reason.next


def test_warnings_of_a_models_own_gradients_are_a_reason_also_once_the_run_is_finished(run: Watched) -> None:
    run.write([Message("warning", "any words", IncidentKind.MODEL), *steps(31, 40)])
    for is_finished in (False, True):
        reason = only(run.reasons(finished=is_finished))
        assert (reason.code, reason.severity, reason.evidence) == (
            "wrong-gradients",
            "warning",
            ("any words",),
        )
    run.write([RunStarted("r", 100_000, ranks=4), *steps(41, 60)], attempt=1)
    assert run.codes() == []


def test_experts_that_are_not_used_are_named_once_the_router_has_had_time(run: Watched) -> None:
    model = dataclasses.replace(run.spec.model, moe=MoeSpec(experts=16, per_token=2))
    run.spec = dataclasses.replace(run.spec, model=model)
    run.write(steps(31, 60, lambda _: {"balance": 7.5}))
    assert run.codes() == []
    run.write(steps(61, 220, lambda _: {"balance": 7.5}))
    assert only(run.reasons()).code == "expert-imbalance"


# --- saving --------------------------------------------------------------------------------------------


def test_a_disk_that_fails_is_named_with_its_error_and_what_is_still_good(run: Watched) -> None:
    run.write([CheckpointSaved(30, "c", 1000, 1.0), *steps(31, 40)])
    run.write(
        [
            CheckpointFailed(40, "/runs/x/checkpoints", "Input/output error"),
            CheckpointFailed(50, "/runs/x/checkpoints", "Input/output error"),
        ]
    )
    reason = only(run.reasons())
    assert (reason.code, reason.severity, reason.where) == (
        "checkpoint-failed",
        "critical",
        "/runs/x/checkpoints",
    )
    assert "Input/output error" in reason.evidence[0]
    assert "step 30" in reason.evidence[1]
    run.write([CheckpointSaved(60, "c", 1000, 1.0)])
    assert run.codes() == []


@pytest.mark.parametrize(
    ("saved", "words"), [(0, "there is no checkpoint yet"), (30, "the newest checkpoint is of step 30")]
)
def test_reasons_about_the_disk_name_the_newest_checkpoint_only_where_there_is_one(
    run: Watched, saved: int, words: str
) -> None:
    run.write([*([CheckpointSaved(saved, "c", 2 * 10**9, 1.0)] if saved else []), *steps(31, 40)])
    full, no_files = DiskSeen(10, 10**12), DiskSeen(10**12, 10**12, free_files=0)
    for disk in (full, no_files):
        assert words in only(run.reasons(disk=disk, checkpoint_files=4)).doing
    run.write([CheckpointFailed(70, "/runs/x/checkpoints", "Input/output error")])
    reason = only(run.reasons())
    assert (reason.code, reason.evidence[1]) == ("checkpoint-failed", words)
    assert "older" not in reason.doing


@pytest.mark.parametrize("name", ["/store/x", "/store/x/"])
def test_copies_that_fail_are_counted_since_the_newest_copy_also_once_the_run_has_finished(
    tmp_path: Path, name: str
) -> None:
    store = dataclasses.replace(NOTHING_DUE.checkpoint, store=name)
    run = Watched(tmp_path / "run", dataclasses.replace(NOTHING_DUE, checkpoint=store))
    run.write([*steps(1, 30), CheckpointSaved(30, "c", 1000, 1.0), CheckpointCopied(30, "/store/x")])
    for number in (40, 50):
        run.write(
            [CheckpointSaved(number, "c", 1000, 1.0), CheckpointFailed(number, "/store/x", "read-only")]
        )
    for finished in (False, True):
        reason = only(run.reasons(finished=finished))
        assert (reason.code, reason.severity) == ("checkpoint-failed", "warning")
        assert reason.title == "Copies of checkpoints fail: 2 since the last good one"
        assert reason.evidence[1] == "the newest copy is step 30; the newest checkpoint on disk is step 50"


def test_saves_that_fail_in_a_run_directory_below_the_folder_of_copies_are_no_copies(tmp_path: Path) -> None:
    store = dataclasses.replace(NOTHING_DUE.checkpoint, store=str(tmp_path))
    run = Watched(tmp_path / "run", dataclasses.replace(NOTHING_DUE, checkpoint=store))
    failure = CheckpointFailed(20, str(run.directory.checkpoints), "read-only")
    run.write([*steps(1, 20), failure, *steps(21, 10)])
    reason = only(run.reasons())
    assert (reason.severity, reason.title) == ("critical", "Checkpoints fail: 1 since the last good one")


def test_a_save_that_waits_for_a_coordinator_is_no_matter_of_the_disk(run: Watched) -> None:
    run.write([CheckpointSaved(30, "c", 1000, 1.0), *steps(31, 40)])
    run.write([CheckpointFailed(40, "/runs/x/checkpoints", "this node has no coordinator", is_held=True)])
    reason = only(run.reasons())
    assert reason.code == "checkpoint-failed"
    assert "phalanx status" in reason.next
    assert "df" not in reason.next


def saves_that_delay(run: Watched, stall_s: float) -> None:
    for number in range(40, 100, 10):
        run.write(steps(number - 9, number))
        run.write([CheckpointSaved(number, "/runs/x/checkpoints", 10**9, 21.0, stall_s)], every_s=stall_s)


def test_saves_that_delay_training_for_much_of_its_time_are_named(run: Watched) -> None:
    saves_that_delay(run, stall_s=20.0)
    reason = only(run.reasons())
    assert (reason.code, reason.severity, reason.where) == (
        "slow-checkpoints",
        "warning",
        "/runs/x/checkpoints",
    )
    assert "50%" in reason.title
    assert "47.6 MB/s" in reason.evidence[1]


def test_saves_that_take_long_and_delay_nothing_are_no_reason(run: Watched) -> None:
    saves_that_delay(run, stall_s=0.5)
    assert run.codes() == []


def test_a_checkpoint_older_than_three_of_its_intervals_is_named(run: Watched) -> None:
    run.spec = dataclasses.replace(run.spec, checkpoint=CheckpointSpec(every_steps=20))
    run.write([CheckpointSaved(20, "c", 10, seconds=1.0)])
    run.write(steps(31, 70))
    assert run.codes(checkpoints=((20, run.t - 100),)) == []
    run.write(steps(71, 100))
    assert only(run.reasons(checkpoints=((20, run.t - 160),))).code == "checkpoint-old"


def test_starts_that_ended_before_the_first_checkpoint_are_named_while_the_next_one_trains(
    run: Watched,
) -> None:
    run.write(steps(1, 40), attempt=1)
    assert run.codes() == []
    run.write(steps(1, 25), attempt=2)
    reason = only(run.reasons())
    assert (reason.code, reason.severity) == ("checkpoint-old", "warning")
    assert "ended after steps 30, 40" in reason.evidence[1]
    assert "--set checkpoint.every_steps=15" in reason.next
    assert run.codes(checkpoints=((20, run.t),)) == []


def test_a_fleet_that_regroups_without_a_checkpoint_has_lost_no_start(run: Watched) -> None:
    run.write(steps(31, 60), attempt=1)
    run.write(steps(61, 90), attempt=2)
    assert run.codes() == []


@pytest.mark.parametrize(
    ("free", "code"), [(10**9, ["disk-full"]), (40 * 10**9, []), (5 * 10**9, ["disk-filling"])]
)
def test_a_disk_without_room_for_the_next_checkpoint_is_named(
    run: Watched, free: int, code: list[str]
) -> None:
    run.write([CheckpointSaved(30, "c", 2 * 10**9, 1.0)])
    assert run.codes(disk=DiskSeen(free, 10**12)) == code


def test_a_disk_without_inodes_for_the_next_checkpoint_is_named_though_it_has_bytes(run: Watched) -> None:
    disk = DiskSeen(10**12, 10**12, free_files=9)
    assert run.codes(disk=disk, checkpoint_files=4) == []
    reason = only(run.reasons(disk=disk, checkpoint_files=20))
    assert (reason.code, reason.severity) == ("disk-full", "critical")
    assert "inodes" in reason.title
    assert "df -i" in reason.next


# --- the fleet -------------------------------------------------------------------------------------------


def codes(run: Watched, **changes: Any) -> list[str]:
    return run.codes(spec=FLEET, fleet=fleet_file(run.t, **changes))


def test_a_whole_fleet_has_nothing_wrong(run: Watched) -> None:
    assert codes(run) == []


def test_a_lost_node_is_named_and_so_are_spares_that_are_used_up(run: Watched) -> None:
    lost = Member("node-1", "lost", "host-1", reason="no heartbeat for 15 s", fault=IncidentKind.LOST)
    members = (member("node-0", 0), member("node-2", 1), lost)
    incidents = (happening(run.t - 5, "node-1", lost.reason, held_ranks=True),)
    reasons = run.reasons(
        spec=FLEET, fleet=fleet_file(run.t, members=members, happenings=incidents, recoveries=1)
    )
    assert [reason.code for reason in reasons] == ["lost-node", "no-spares"]
    assert reasons[0].where == "node node-1 (host-1)"
    assert reasons[0].since == run.t - 5
    assert any("no heartbeat for 15 s" in line for line in reasons[0].evidence)
    assert "a spare has taken its place" in reasons[0].doing


@pytest.mark.parametrize("cause", ["its connection and a collective broke", "worker 0 exited with code -9"])
def test_a_node_that_was_lost_and_is_back_is_reported_for_some_minutes_as_nothing_to_act_on(
    run: Watched, cause: str
) -> None:
    incidents = (happening(run.t - 5, "node-1", cause),)
    reason = only(run.reasons(spec=FLEET, fleet=fleet_file(run.t, happenings=incidents)))
    assert (reason.code, reason.severity, reason.since) == ("lost-node", "info", run.t - 5)
    long_ago = (happening(run.t - 400, "node-1", cause),)
    assert run.codes(spec=FLEET, fleet=fleet_file(run.t, happenings=long_ago)) == []


@pytest.mark.parametrize("role", ["leaving", "drained", "given back"])
def test_a_node_that_was_lost_and_is_sent_away_by_its_operator_is_not_called_back(
    run: Watched, role: str
) -> None:
    incidents = (happening(run.t - 5, "node-2", "worker 0 exited with code -9"),)
    members = (member("node-0", 0), member("node-1", 1), Member("node-2", role, "host-2"))
    reasons = run.reasons(spec=FLEET, fleet=fleet_file(run.t, happenings=incidents, members=members))
    assert not any("is back" in reason.title for reason in reasons)


@pytest.mark.parametrize(
    ("kind", "severity"),
    [(IncidentKind.STRAGGLER, "info"), (IncidentKind.SLOW_WITHOUT_SPARE, "warning")],
)
def test_a_node_that_the_fleet_found_slow_is_named_with_the_command_that_puts_it_back_or_away(
    run: Watched, kind: IncidentKind, severity: str
) -> None:
    incidents = (happening(run.t - 9, "node-1", "any words: 31 %", kind),)
    reason = only(run.reasons(spec=FLEET, fleet=fleet_file(run.t, happenings=incidents)))
    assert (reason.code, reason.severity, reason.where) == ("straggler", severity, "node node-1")
    command = "add" if kind is IncidentKind.STRAGGLER else "drain"
    assert f"phalanx fleet {command} {run.directory.path} node-1" in reason.next


def test_a_rank_that_computes_longer_than_its_peers_is_named(run: Watched) -> None:
    slow = SlowRankSeen(3, 0.5, 1.5, 20, 19, run.t - 60, "node-1")
    reason = only(run.reasons(slow_ranks=(slow,)))
    assert (reason.code, reason.where) == ("straggler", "rank 3 on node-1")
    finished = only(run.reasons(1e5, slow_ranks=(slow,), is_held=False, finished=True))
    assert (finished.code, finished.doing) == ("straggler", "nothing: it has finished")


GIB = float(1 << 30)


def links(after_step: int, *rates: float) -> MachineUsed:
    """The event of the rates of so many machines' links."""
    names, figure = tuple(f"node-{place}" for place in range(len(rates))), "link_bytes_per_s"
    rows = np.full((len(rates), len(MACHINE_FIGURES)), np.nan)
    rows[:, MACHINE_FIGURES.index(figure)] = rates
    used = machines_used(after_step, names, rows)
    assert used is not None
    return used


def waiting(share: float) -> list[Step]:
    """Forty steps that wait for communication for this share of their time."""
    return steps(
        31,
        70,
        lambda n: {
            "ledger": {"step.compute": (1 - share) * STEP_S * n, "step.comm_exposed.dp": share * STEP_S * n}
        },
    )


def test_the_machine_whose_link_is_slow_is_named_while_steps_wait_for_communication(run: Watched) -> None:
    run.write([*waiting(0.3), links(60, 3e8, 4e6, 2e8), links(70, 3e8, 4e6, 2e8)])
    reason = only(run.reasons())
    assert (reason.code, reason.where) == ("slow-link", "machine node-1")
    assert "3.81 MiB/s where the median of 3 machines is 191 MiB/s" in reason.title


@pytest.mark.parametrize(
    ("share", "readings"),
    [
        (0.3, [(3e8, 1.5e8, 2e8), (3e8, 1.5e8, 2e8)]),  # as links differ by the load of their machines
        (0.3, [(3e8, 4e6, 2e8), (4e6, 3e8, 2e8)]),  # now one, now another
        (0.3, [(3e8, 4e6, 2e8)]),
        (0.3, [(3e8, 4e6), (3e8, 4e6)]),  # either of the two may be the slow one
        (0.02, [(3e8, 4e6, 2e8), (3e8, 4e6, 2e8)]),  # nobody waits for it
    ],
)
def test_links_that_differ_without_one_for_which_all_wait_are_no_trouble(
    run: Watched, share: float, readings: list[tuple[float, ...]]
) -> None:
    run.write([*waiting(share), *(links(60 + place, *rates) for place, rates in enumerate(readings))])
    assert run.codes() == []


def memory(*sizes: float) -> MemorySeen:
    """Memory of rank 1 of 4 ranks of the same size, every 100 steps of two seconds."""
    ends = range(len(sizes))
    return MemorySeen(
        1, "", tuple(100 + 100 * end for end in ends), tuple(T0 + 200.0 * end for end in ends), sizes, 4, 4
    )


def test_memory_that_grows_in_every_part_of_a_run_is_named_with_the_step_at_which_it_is_used_up(
    run: Watched,
) -> None:
    run.write(
        [RunStarted("r", 9000, ranks=4, device="cpu", environment={"host": {"memory_bytes": 64 << 30}})]
    )
    run.write([*steps(31, 40), MachineUsed(40, "a", {"memory_bytes": 24 * GIB})])
    reason = only(run.reasons(memory=memory(*(size * GIB for size in (2, 3, 4.1, 5, 6, 7)))))
    assert (reason.code, reason.where) == ("growing-memory", "4 of 4 ranks")
    # Four ranks add 0.01 GiB a step each, and 40 GiB are free.
    assert any("step 1,600; the run has 9,000" in line for line in reason.evidence)


@pytest.mark.parametrize(
    "sizes",
    [
        (4, 4.2, 4.3, 4.4, 4.5, 4.6),  # arenas
        (4, 6, 7, 7.3, 7.4, 7.4),  # a cache that is full
        (4, 4, 4, 8, 8, 8),  # another stage of the data
        (float("nan"),) * 6,
    ],
)
def test_memory_that_grows_little_or_once_is_no_reason(run: Watched, sizes: tuple[float, ...]) -> None:
    assert run.codes(memory=memory(*(size * GIB for size in sizes))) == []


def test_hardware_that_reports_errors_is_not_reported_as_a_lost_node(run: Watched) -> None:
    error = "GPU 3 has fallen off the bus"
    sick = Member("node-1", "quarantined", "host-1", reason=error, fault=IncidentKind.HARDWARE)
    members = (member("node-0", 0), member("node-2", 1), sick, Member("node-3", "spare", "h"))
    assert codes(run, members=members) == ["hardware"]


@pytest.mark.parametrize(
    "verdict",
    [
        "step 12 is not finite: not finite are loss of slot 1; the others compute it again",
        "step 12 is finite where other nodes compute it: this one was at fault",
    ],
)
def test_a_node_that_was_put_aside_for_a_nan_is_reported_by_its_nan_and_not_as_lost(
    run: Watched, verdict: str
) -> None:
    first = "step 12 is not finite: not finite are loss of slot 1; the others compute it again"
    sick = Member("node-1", "quarantined", "host-1", reason=verdict, fault=IncidentKind.NOT_FINITE)
    members = (member("node-0", 0), member("node-2", 1), sick, Member("node-3", "spare", "h"))
    incidents = tuple(
        happening(run.t - age_s, "node-1", text, IncidentKind.NOT_FINITE, 12)
        for age_s, text in ((5, first), (2, verdict))
    )
    reason = only(run.reasons(spec=FLEET, fleet=fleet_file(run.t, members=members, happenings=incidents)))
    assert (reason.code, reason.where, reason.since) == ("not-finite", "node node-1 (host-1)", run.t - 5)
    assert {first, verdict} == set(reason.evidence)


def test_a_coordinator_that_writes_no_more_is_missed(run: Watched) -> None:
    assert "no-coordinator" in run.codes(20, spec=FLEET, fleet=fleet_file(run.t))


def test_a_fleet_that_has_ended_has_nothing_wrong_though_a_node_was_lost(run: Watched) -> None:
    lost = Member("node-1", "lost", "host-1")
    assert (
        run.codes(
            1e5,
            is_held=False,
            finished=True,
            fleet=fleet_file(run.t, phase=FleetPhase.FINISHED, members=(lost,)),
        )
        == []
    )


def test_metrics_at_another_port_than_the_run_files_are_named(run: Watched) -> None:
    spec = dataclasses.replace(FLEET, observe=ObserveSpec(metrics_port=9400))
    for address, codes_there in (("10.0.0.1:9400", []), ("10.0.0.1:31900", ["metrics-elsewhere"])):
        announce(run.directory, Target(address, "r", "", 0))
        assert run.codes(spec=spec, fleet=fleet_file(run.t)) == codes_there
    reason = only(run.reasons(spec=spec, fleet=fleet_file(run.t)))
    assert "10.0.0.1:31900" in reason.evidence[0]
    assert "9400" in reason.title


# --- surroundings ----------------------------------------------------------------------------------------


def test_a_run_file_that_was_changed_is_named_with_its_fields_also_once_the_run_has_ended(
    run: Watched,
) -> None:
    change = "model.rope_theta: 10000.0 -> 3.0"
    reason = only(run.reasons(changed_fields=(change,), finished=True, is_held=False))
    assert (reason.code, reason.evidence) == ("changed-run-file", (change,))


def test_other_data_than_at_the_start_are_named(run: Watched) -> None:
    reason = only(run.reasons(data_fingerprint="a" * 64, data_now="b" * 64))
    assert (reason.code, reason.severity) == ("other-data", "critical")


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        ({"data_fingerprint": "a" * 64, "data_now": "b" * 64}, "other-data"),
        ({"data_fingerprint": "a" * 64, "data_error": "no such folder"}, "data-gone"),
        ({"changed_fields": ("model.rope_theta: 10000.0 -> 3.0",)}, "changed-run-file"),
    ],
)
def test_the_reason_that_refuses_a_start_comes_first_in_a_run_that_has_ended(
    run: Watched, refusal: dict[str, Any], code: str
) -> None:
    first, second = run.reasons(is_held=False, **refusal)
    assert (first.code, first.severity, second.code) == (code, "critical", "gone")
    assert second.next.startswith("put ")
    assert "; then phalanx train" in second.next


def test_sources_that_are_one_dataset_are_named_also_once_the_run_has_finished(tmp_path: Path) -> None:
    run = Watched(tmp_path / "run", NOTHING_DUE)
    sources = {"web": "a" * 64, "code": "b" * 64, "prose": "a" * 64}
    data = {name: {"address": f"data/{name}", "fingerprint": same} for name, same in sources.items()}
    run.write([RunStarted("r", 100_000, environment={"data": data}), *steps(1, 30)])
    reason = only(run.reasons(finished=True))
    assert (reason.code, reason.severity) == ("twin-sources", "warning")
    assert reason.where == "source web, source prose"
    data["prose"]["fingerprint"] = "c" * 64
    run.write([RunStarted("r", 100_000, environment={"data": data}), *steps(1, 30)])
    assert run.codes(finished=True) == []


@pytest.mark.parametrize(("bits", "codes_then"), [(0.43, ["repeated-text"]), (0.8, []), (None, [])])
def test_text_that_is_mostly_repeated_is_named(
    tmp_path: Path, bits: float | None, codes_then: list[str]
) -> None:
    run = Watched(tmp_path / "run", NOTHING_DUE)
    run.write([RunStarted("r", 100_000, xz_bits_per_byte=bits), *steps(1, 30)])
    assert run.codes() == codes_then


@pytest.mark.parametrize(("copies", "codes_then"), [(0, []), (9, []), (10, ["held-out-leak"])])
def test_held_out_documents_that_are_trained_on_are_named_also_once_the_run_has_finished(
    tmp_path: Path, copies: int, codes_then: list[str]
) -> None:
    run = Watched(tmp_path / "run", NOTHING_DUE)
    facts = {"held_out_documents": 100, "held_out_in_training": copies} if copies else {}
    run.write([RunStarted("r", 100_000, environment={"data": {"": {"address": "words", **facts}}})])
    run.write(steps(1, 30))
    assert run.codes() == codes_then
    assert run.codes(finished=True, is_held=False) == codes_then


def test_a_record_of_the_data_in_another_form_is_no_reason(tmp_path: Path) -> None:
    run = Watched(tmp_path / "run", NOTHING_DUE)
    run.write([RunStarted("r", 100_000, environment={"data": {"": "words"}}), *steps(1, 30)])
    assert run.codes() == []


def test_other_libraries_than_at_the_start_are_named(tmp_path: Path) -> None:
    run = Watched(tmp_path / "run", NOTHING_DUE)
    for attempt, version in enumerate(("2.13.0", "2.14.1")):
        run.write(
            [RunStarted("r", 100_000, environment={"packages": {"torch": version, "numpy": "2"}})], attempt
        )
        run.write(steps(1, 5), attempt)
    # The first start, which the fixture's stream begins with, recorded no libraries.
    run.directory.events.write_bytes(run.directory.events.read_bytes().split(b"\n", 1)[1])
    reason = only(run.reasons())
    assert (reason.code, reason.where) == ("changed-libraries", "torch")
    assert reason.evidence == ("torch: 2.13.0 before, 2.14.1 now",)


def test_nodes_that_differ_are_named(run: Watched) -> None:
    reason = only(run.reasons(machines=("torch: node-1 with 2.12.0; the others with 2.13.0",)))
    assert (reason.code, reason.where) == ("mixed-machines", "torch")


def test_a_node_that_is_slowed_down_while_it_trains_is_named_with_its_slow_rank(run: Watched) -> None:
    note = Throttling("node-1", 900.0, 990.0, 9, ("GPU 3 at b: power brake, 600 MHz",))
    slow = SlowRankSeen(1, 0.31, 0.2, 20, 18, None, "node-1", late_share=0.3)
    reason = only(run.reasons(throttled=(note,), slow_ranks=(slow,)))
    assert reason.code == "throttled"
    assert (reason.severity, reason.where, reason.since) == ("warning", "node node-1", 900.0)
    assert reason.evidence[0] == note.reasons[0]
    assert (
        reason.evidence[-1]
        == "its rank 1 computes 31% longer than its peers, which waited 30% of their time for it"
    )
    assert run.codes(throttled=(note,)) == ["throttled"]
    assert "throttled" not in run.codes(throttled=(note,), finished=True)


def test_a_start_that_has_warned_of_more_threads_than_cores_is_named(run: Watched) -> None:
    run.write([Message("warning", "any words", IncidentKind.THREADS), *steps(31, 40)])
    reason = only(run.reasons())
    assert (reason.code, reason.evidence) == ("too-many-threads", ("any words",))
    run.write(steps(41, 60), attempt=1)  # started again, and without the warning
    assert run.codes() == []


def test_a_clock_that_differs_is_named(run: Watched) -> None:
    run.t -= 60
    run.write(steps(31, 31))
    assert only(run.reasons(61)).code == "clock-skew"


def test_a_standstill_is_named_also_after_the_clock_was_set_back(run: Watched) -> None:
    run.t -= 3600
    run.write(steps(31, 60))
    assert run.codes(1) == ["clock-skew"]
    assert run.codes(120) == ["stalled", "clock-skew"]


def test_the_worst_reason_comes_first(run: Watched) -> None:
    run.write([*steps(31, 60, lambda _: {"data_wait_s": 0.6})])
    reasons = run.reasons(data_fingerprint="a" * 64, data_now="b" * 64)
    assert [reason.severity for reason in reasons] == ["critical", "warning"]


def test_steps_that_the_fleet_does_and_nobody_writes_down_are_no_standstill(
    run: Watched,
) -> None:
    run.fleet(118, step=90, unsaved_steps=60)
    reason = only(run.reasons(120, spec=FLEET))
    assert (reason.code, reason.severity) == ("events-unwritten", "critical")
    assert "step 90" in reason.evidence[0]
    run.fleet(118, step=30)
    assert run.codes(120, spec=FLEET) == ["stalled"]


# --- the machine, the disk and the clock -------------------------------------------------------------------


def bound(*cores: int) -> list[ProcessSeen]:
    return [ProcessSeen(100 + rank, "R", rank, cores=frozenset(cores)) for rank in range(2)]


@pytest.mark.parametrize(
    ("device", "cores", "codes"),
    [("cpu", (0,), ["too-many-threads"]), ("cpu", (0, 1), []), ("cpu", (), []), ("cuda", (0,), [])],
    ids=["one core", "a core each", "unknown", "on a GPU"],
)
def test_ranks_that_are_bound_to_fewer_cores_than_they_need_are_named_with_the_way_out(
    run: Watched, device: str, cores: tuple[int, ...], codes: list[str]
) -> None:
    run.write([RunStarted("r", 100_000, ranks=2, device=device), *steps(31, 40)], attempt=1)
    reasons = run.reasons(processes=tuple(bound(*cores)), load=LoadSeen(1.0, 4))
    assert [reason.code for reason in reasons] == codes
    for reason in reasons:
        assert "2 threads of 2 ranks are bound to 1 of the 4 cores" in reason.title
        assert "taskset -acp 0-3 PID for each of 100, 101" in reason.next


def test_a_clock_that_was_set_forward_between_two_steps_is_noted_and_a_long_evaluation_is_not(
    run: Watched,
) -> None:
    def evaluated(number: int) -> dict[str, Any]:
        return {"ledger": {**step(number).ledger, "eval": 600.0}}

    run.write([step(31, **evaluated(31))], every_s=600)
    run.write(steps(32, 40, evaluated))
    assert "clock-skew" not in run.codes()
    run.t += 3600
    run.write(steps(41, 50, evaluated))
    reason = next(reason for reason in run.reasons() if reason.code == "clock-skew")
    assert reason.severity == "info"
    assert "after step 40" in reason.title


def test_a_checkpoint_that_the_run_itself_has_set_aside_was_not_removed_by_another_process(
    run: Watched,
) -> None:
    place = run.directory.checkpoints
    for saved in (10, 20):
        folder = step_folder(place, saved)
        folder.mkdir(parents=True)
        (folder / CHECKPOINT_INDEX).write_text("{}")
    run.write([CheckpointSaved(20, str(place), 10), *steps(31, 32)])
    DiskTier(place).set_aside(20)
    assert run.codes(damaged_checkpoints=()) == []


def test_a_saved_checkpoint_that_another_process_removed_is_missed_before_it_is_needed(run: Watched) -> None:
    place = run.directory.checkpoints
    for number in (10, 20):
        folder = step_folder(place, number)
        folder.mkdir(parents=True)
        (folder / CHECKPOINT_INDEX).write_text("{}")
    run.write([CheckpointSaved(20, str(place), 10), *steps(31, 32)])
    assert run.codes(damaged_checkpoints=()) == []
    shutil.rmtree(step_folder(place, 20))
    reason = only(run.reasons(damaged_checkpoints=()))
    assert (reason.code, reason.severity) == ("checkpoint-damaged", "warning")
    assert "the newest that is left is step 10" in reason.evidence
    shutil.rmtree(step_folder(place, 10))
    assert only(run.reasons()).severity == "critical"


def test_copies_to_a_store_that_fall_behind_are_named_before_the_disk_is_lost(run: Watched) -> None:
    store = CheckpointSpec(every_steps=10, store="file:///store", store_mib_s=0.5)
    run.spec = dataclasses.replace(run.spec, checkpoint=store)
    run.write([CheckpointSaved(10, "c", 10), CheckpointCopied(10, "file:///store/r", 30.0)])
    run.write([CheckpointSaved(20, "c", 10), CheckpointSaved(30, "c", 10)])
    assert run.codes() == []
    run.write([*steps(31, 40), CheckpointSaved(40, "c", 10)])
    reason = only(run.reasons())
    assert (reason.code, reason.title) == ("checkpoint-old", "Copies to the store are 3 checkpoints behind")
    assert "at most 0.5 MiB/s" in reason.evidence[1]
    run.write([CheckpointCopied(20, "file:///store/r", 30.0)])
    assert run.codes() == []


def test_code_of_the_users_own_that_changed_between_two_starts_is_named(tmp_path: Path) -> None:
    run = Watched(tmp_path / "run", NOTHING_DUE)
    for attempt, digest in enumerate(("ab", "cd")):
        environment = {"packages": {"torch": "2"}, "modules": {"helper": digest, "model": "ef"}}
        run.write([RunStarted("r", 100_000, environment=environment), *steps(1, 5)], attempt)
    run.directory.events.write_bytes(run.directory.events.read_bytes().split(b"\n", 1)[1])
    reason = only(run.reasons())
    assert (reason.code, reason.where) == ("changed-libraries", "helper")
    assert reason.evidence == ("helper: ab before, cd now",)


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "OMP_NUM_THREADS": "1"}, "TORCH_DISTRIBUTED_DEBUG"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING"),
        ({"CUDA_LAUNCH_BLOCKING": "0", "NCCL_DEBUG": "WARN", "TORCH_DISTRIBUTED_DEBUG": "OFF"}, ""),
    ],
)
def test_a_variable_that_slows_each_operation_for_debugging_is_named(
    run: Watched, variables: dict[str, str], names: str
) -> None:
    environment = {"variables": variables}
    run.write([RunStarted("r", 100_000, ranks=4, environment=environment), *steps(31, 40)], attempt=1)
    reasons = run.reasons()
    assert [(reason.code, reason.severity) for reason in reasons] == [("debugging-on", "warning")] * bool(
        names
    )
    assert all(names in reason.title for reason in reasons)
