"""A loss that stays at another level after a change of data or fields, or while weights vanish, is named with what changed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.format.manifest import Index, encode_index
from phalanx.observe.events import Evaluated, LayerStatistics, RunStarted, TaskEvaluated
from phalanx.run.directory.paths import CHECKPOINT_INDEX, RunDirectory, step_folder
from phalanx.run.identity import Origin, lineage_table
from phalanx.run.spec import CheckpointSpec, DataSpec, EvalSpec, ModelSpec, RunSpec, SourceSpec, TrainSpec
from phalanx.train.lifecycle.progress import TrainProgress
from phalanx_watch.why.observed import OriginSeen, Reason
from watch.why.test_rules import only, spike
from watch.why.watched import T0, Watched, step, steps

SPEC = RunSpec(
    checkpoint=CheckpointSpec(every_steps=1000),
    evaluation=EvalSpec(every_steps=0),
    model=ModelSpec(vocab_size=4096),
    train=TrainSpec(steps=100_000),
)
SOURCES = (SourceSpec("code", "c", (1.0, 0.3)), SourceSpec("crawl", "w", (0.0, 0.7)))
STAGED = dataclasses.replace(SPEC, data=DataSpec(stages=(0, 300), sources=SOURCES))
RATE = "optimizer.lr: 0.002 -> 0.1"


def wavering(level: float, width: float = 0.1) -> Any:
    """Changes of steps whose loss wavers around a level."""
    return lambda number: {"loss": level + width * (number % 2 - 0.5)}


def continued(changed_fields: Sequence[str], level: float = 2.0) -> OriginSeen:
    """Step 300 of a parent whose loss had a level."""
    losses = tuple(body.loss for body in steps(200, 300, wavering(level)))
    return OriginSeen("parent", 300, losses, tuple(changed_fields))


def staged(path: Path, level: float) -> Watched:
    """A run whose loss has a level since the second stage of its data, for less than a window of steps."""
    run = Watched(path, STAGED)
    run.write(steps(1, 300, wavering(2.0)))
    run.write(steps(301, 400, wavering(level)))
    return run


# --- stages of the data ----------------------------------------------------------------------------------


def test_a_loss_that_stays_higher_in_a_stage_of_the_data_is_noted_with_its_sources_also_once_the_run_is_finished(
    tmp_path: Path,
) -> None:
    run = staged(tmp_path, 3.5)
    assert run.codes() == []
    run.write([*steps(401, 480, wavering(3.5)), Evaluated(480, 3.0, sources={"code": 2.0, "crawl": 4.1})])
    for is_finished in (False, True):
        reason = only(run.reasons(finished=is_finished))
        assert (reason.code, reason.severity, reason.where) == ("raised-loss", "info", "step 301 and after")
        assert reason.evidence[2:] == (
            "the data change after step 300 (data.stages): weights code 1 -> 0.3, crawl 0 -> 0.7",
            "held out at step 480: crawl 4.1, code 2",
        )
        assert "--step 301" in reason.next


def test_a_loss_that_jumps_where_a_stage_begins_and_falls_again_has_no_reason(tmp_path: Path) -> None:
    run = staged(tmp_path, 2.6)
    run.write(steps(401, 700, wavering(2.1)))
    assert run.codes() == []


def test_a_planned_spike_names_the_sources_and_is_the_only_reason_while_it_is_new(tmp_path: Path) -> None:
    run = staged(tmp_path, 3.5)
    run.write([spike(301), *steps(401, 480, wavering(3.5))])
    reason = only(run.reasons())
    assert reason.code == "loss-spike"
    assert any("crawl 0 -> 0.7" in line for line in reason.evidence)


# --- child runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "width", "fields", "code"),
    [
        (2.8, 0.1, [RATE], "raised-loss"),
        (2.0, 0.4, ["train.batch_size: 64 -> 4"], "raised-loss"),
        (2.15, 0.1, [RATE], None),
        (2.0, 0.14, ["train.batch_size: 64 -> 32"], None),
        (2.0, 0.07, ["train.batch_size: 64 -> 128"], None),
        (2.8, 0.4, ["train.steps: 300 -> 9000"], None),
        (2.0, 0.4, [], None),
    ],
    ids=["higher", "noisier", "a little higher", "half a batch", "twice the batch", "more steps", "the same"],
)
def test_a_child_whose_loss_stays_higher_or_noisier_than_its_parents_is_named_with_the_changed_fields(
    tmp_path: Path, level: float, width: float, fields: list[str], code: str | None
) -> None:
    run = Watched(tmp_path, SPEC)
    run.write(steps(301, 480, wavering(level, width)))
    reasons = run.reasons(origin=continued(fields))
    assert [reason.code for reason in reasons] == ([code] if code else [])
    for reason in reasons:
        assert reason.severity == "warning"
        assert reason.evidence[-1] == f"the run continues step 300 of parent with {fields[0]}"
        assert "phalanx train parent --from 300" in reason.next


def test_a_child_that_logs_fewer_steps_while_its_loss_falls_fast_is_not_noisier(tmp_path: Path) -> None:
    run = Watched(tmp_path, SPEC)
    run.write(
        [step(number, loss=6 - number / 100 + 0.01 * (number // 10 % 2)) for number in range(310, 560, 10)]
    )
    losses = tuple(2.0 + 0.01 * (number % 2) for number in range(200, 300))
    assert run.codes(origin=OriginSeen("parent", 300, losses, (RATE,))) == []


def test_a_child_with_other_data_has_a_note(tmp_path: Path) -> None:
    run = Watched(tmp_path, SPEC)
    run.write(steps(301, 480, wavering(2.8)))
    assert only(run.reasons(origin=continued([RATE, "data.stages: [] -> [0, 300]"]))).severity == "info"


def test_a_spike_and_a_divergence_soon_after_a_change_of_fields_name_them(tmp_path: Path) -> None:
    run = Watched(tmp_path, SPEC)
    run.write([*steps(301, 310), spike(310), *steps(311, 340, wavering(6.0))])
    reason = only(run.reasons(origin=continued([RATE])))
    assert (reason.code, reason.severity) == ("loss-spike", "critical")
    assert any(RATE in line for line in reason.evidence)
    assert "phalanx train parent --from 300" in reason.next
    run.write(steps(341, 380, wavering(30.0)))
    reason = only(run.reasons(origin=continued([RATE]), finished=True))
    assert reason.code == "diverged"
    assert RATE in reason.evidence[-1]


def test_the_level_and_the_fields_of_the_parent_are_read_from_the_checkpoint_that_a_child_continues(
    tmp_path: Path,
) -> None:
    parent, run = RunDirectory(tmp_path / "parent"), Watched(tmp_path / "child", SPEC)
    folder = step_folder(parent.checkpoints, 300)
    folder.mkdir(parents=True)
    parent.run_file.write_text('[data]\npath = "words"\n')
    run.directory.run_file.write_text('[data]\npath = "words"\n[optimizer]\nlr = 0.5\n')
    progress = dataclasses.asdict(
        TrainProgress(300, loss=2.0, next_sample=9600, recent=[[2.1, 0.5], [2.0, 0.6]])
    )
    (folder / CHECKPOINT_INDEX).write_bytes(encode_index(Index(300, 0, 1, progress, None, ())))
    lineage = lineage_table([Origin(str(parent.path), "", 300, "", "training")])
    run.directory.record.write_text(json.dumps({"lineage": lineage}))
    before = RunSpec().optimizer.lr
    run.directory.record.write_text(json.dumps({"lineage": lineage, "data_fingerprint": "ab"}))
    parent.record.write_text(json.dumps({"data_fingerprint": "ab"}))
    assert run.seen().origin == OriginSeen(
        run=str(parent.path),
        step=300,
        losses=(2.1, 2.0),
        changed_fields=(f"optimizer.lr: {before} -> 0.5",),
        rate=before * 0.1,
        samples=9600,
        same_data=True,
        same_order=True,
    )
    (folder / CHECKPOINT_INDEX).unlink()
    assert run.seen().origin is None


# --- the loss of a child at its beginning --------------------------------------------------------------------


def begun(path: Path, losses: Sequence[float], origin: OriginSeen, rate: float = 1e-3) -> list[Reason]:
    """The reasons of a child run whose first steps have these losses, and later ones its parent's."""
    run = Watched(path, SPEC)
    run.write([step(number, loss=loss, lr=rate) for number, loss in enumerate(losses, 1)])
    run.write(steps(len(losses) + 1, 60, lambda number: {**wavering(2.0)(number), "lr": rate}))
    return run.reasons(origin=origin)


def taken_over(*fields: str, **changes: Any) -> OriginSeen:
    """Weights of a parent whose loss was 2."""
    taken = dataclasses.replace(continued(fields), init_with="weights", rate=1e-4, same_data=True)
    return dataclasses.replace(taken, **changes)


BUMP = [2.0, 2.0, 2.3, 2.6, 2.8, 2.8, 2.7, 2.6, 2.5, 2.3]


def test_a_child_that_begins_with_a_higher_loss_before_any_update_is_named_with_the_fields_that_differ(
    tmp_path: Path,
) -> None:
    theta = "model.rope_theta: 10000.0 -> 500000.0"
    reason = only(begun(tmp_path, [2.9, 2.8, 2.6, 2.4, 2.2], taken_over(theta)))
    assert (reason.code, reason.severity) == ("worse-than-parent", "info")
    assert "begins at 2.9, before any update" in reason.title
    assert reason.evidence[-2:] == (f"fields that differ: {theta}", "the loss is back where it was")
    assert "began empty" not in str(reason.evidence)


def test_first_updates_that_raise_the_loss_are_named_with_the_empty_optimizer_and_both_rates(
    tmp_path: Path,
) -> None:
    reason = only(begun(tmp_path / "weights", BUMP, taken_over()))
    assert reason.title == "The first updates raise the loss: from 2 to 2.7"
    assert "up to 0.001 in these steps, and was 0.0001" in reason.evidence[1]
    assert "the optimizer began empty" in reason.evidence[2]
    other = only(begun(tmp_path / "optimizer", BUMP, taken_over(init_with="optimizer")))
    assert not any("began empty" in line for line in other.evidence)


def test_a_held_out_loss_above_the_parents_shows_what_the_losses_of_small_batches_hide(
    tmp_path: Path,
) -> None:
    noisy = tuple(2.0 + number % 7 for number in range(40))
    run = Watched(tmp_path, SPEC)
    run.write([*steps(1, 20), Evaluated(20, 3.3), *steps(21, 40), Evaluated(40, 3.2)])
    worse = only(run.reasons(origin=taken_over(losses=noisy, held_out=3.1)))
    assert (worse.code, worse.severity) == ("worse-than-parent", "warning")
    assert "held-out loss is 3.3 at step 20, and the parent's was 3.1" in worse.title
    assert any("the optimizer began empty" in line for line in worse.evidence)
    assert run.reasons(origin=taken_over(losses=noisy, held_out=3.25)) == []
    run.write([*steps(41, 60), Evaluated(60, 3.0)])
    assert only(run.reasons(origin=taken_over(losses=noisy, held_out=3.1))).severity == "info"


@pytest.mark.parametrize(("sequences", "held_out"), [(64, 2.6), (8, None)])
def test_the_held_out_loss_of_the_parent_is_compared_only_if_it_is_of_as_many_sequences(
    tmp_path: Path, sequences: int, held_out: float | None
) -> None:
    spec = dataclasses.replace(SPEC, evaluation=EvalSpec(every_steps=0, sequences=sequences))
    parent, run = Watched(tmp_path / "parent", SPEC), Watched(tmp_path / "child", spec)
    parent.write([Evaluated(200, 2.8), Evaluated(300, 2.6), Evaluated(400, 2.4)])
    folder = step_folder(parent.directory.checkpoints, 300)
    folder.mkdir(parents=True)
    parent.directory.run_file.write_text("[train]\nsteps = 1000\n")
    run.directory.run_file.write_text(f"[evaluation]\nsequences = {sequences}\n")
    progress = dataclasses.asdict(TrainProgress(300, loss=2.0))
    (folder / CHECKPOINT_INDEX).write_bytes(encode_index(Index(300, 0, 1, progress, None, ())))
    lineage = lineage_table([Origin(str(parent.directory.path), "", 300, "", "weights")])
    run.directory.record.write_text(json.dumps({"lineage": lineage}))
    origin = run.seen().origin
    assert origin is not None
    assert (origin.init_with, origin.held_out) == ("weights", held_out)


def test_a_child_that_stays_worse_than_its_parent_is_a_warning(tmp_path: Path) -> None:
    reason = only(begun(tmp_path, [2.9] * 60, taken_over()))
    assert (reason.code, reason.severity) == ("worse-than-parent", "warning")


@pytest.mark.parametrize(
    ("losses", "origin"),
    [
        ([2.0, 2.1, 1.9, 2.3, 2.0], taken_over()),
        (BUMP, taken_over(same_data=False)),
        (BUMP, taken_over(losses=())),
        ([2.9] * 60, taken_over("train.seq_len: 2048 -> 512")),
        (BUMP, taken_over("data.stages: [] -> [0, 300]")),
    ],
    ids=["one hard batch", "other data", "an imported model", "less context", "another mixture"],
)
def test_a_child_that_begins_as_its_parent_ended_or_cannot_be_compared_has_no_reason(
    tmp_path: Path, losses: list[float], origin: OriginSeen
) -> None:
    assert begun(tmp_path, losses, origin) == []


@pytest.mark.parametrize(
    ("rate", "fields", "code"),
    [
        (1e-3, ["train.steps: 300 -> 900"], "rate-jumps"),
        (2e-4, ["train.steps: 300 -> 900"], None),
        (1e-3, ["optimizer.lr: 0.0001 -> 0.001"], None),
    ],
    ids=["longer", "a little higher", "as the run file says"],
)
def test_a_longer_run_that_begins_again_at_a_high_rate_is_noted(
    tmp_path: Path, rate: float, fields: list[str], code: str | None
) -> None:
    run = Watched(tmp_path, SPEC)
    run.write(steps(301, 330, lambda _: {"lr": rate}))
    reasons = run.reasons(origin=dataclasses.replace(continued(fields), rate=1e-4))
    assert [reason.code for reason in reasons] == ([code] if code else [])
    for reason in reasons:
        assert reason.severity == "info"
        assert "10.0 times" in reason.title
        assert "--set optimizer.lr=0.0001" in reason.next


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({"same_order": True, "samples": 2400}, ["read-again"]),
        ({"same_order": False, "samples": 2400}, []),
        ({"same_order": True, "samples": 2400, "init_with": "training"}, []),
    ],
    ids=["same order", "another seed", "the place is taken over"],
)
def test_a_child_that_reads_the_samples_of_its_parent_from_the_first_on_is_noted(
    tmp_path: Path, changes: dict[str, Any], codes: list[str]
) -> None:
    reasons = begun(tmp_path, [2.0], taken_over(**changes))
    assert [reason.code for reason in reasons] == codes


# --- weights that vanish ---------------------------------------------------------------------------------


def weights(number: int, norm: float) -> LayerStatistics:
    return LayerStatistics(number, ["0", "1"], {"feed_forward.weight_norm": [norm, 9.0]})


@pytest.mark.parametrize(
    ("norm", "loss", "codes"), [(0.1, 2.5, ["diverged"]), (2.0, 2.5, []), (0.1, 2.0, [])]
)
def test_a_loss_that_rises_while_the_weights_of_a_layer_vanish_is_a_divergence_by_weight_decay(
    tmp_path: Path, norm: float, loss: float, codes: list[str]
) -> None:
    run = Watched(tmp_path, SPEC)
    run.write([*steps(1, 100), weights(100, 8.0), *steps(101, 300, wavering(loss)), weights(300, norm)])
    reasons = run.reasons(finished=True, checkpoints=((90, T0),))
    assert [reason.code for reason in reasons] == codes
    for reason in reasons:
        assert "feed_forward.weight_norm of layer 0 was 8 at its most and is 0.1 now" in reason.evidence[-1]
        assert "--from 90 --set optimizer.weight_decay=" in reason.next


# --- held-out text ---------------------------------------------------------------------------------------


def evaluated(path: Path, losses: Sequence[dict[str, float]], spec: RunSpec = STAGED) -> Watched:
    """A run of 600 steps with evaluations, each of sources and of all text."""
    run = Watched(path, dataclasses.replace(spec, evaluation=EvalSpec(every_steps=100)))
    datasets = {"data": {"code": {"train_tokens": 40_960}, "crawl": {"train_tokens": 10**9}}}
    run.write([RunStarted("r", 100_000, ranks=4, environment=datasets)])
    for number, sources in enumerate(losses):
        run.write(steps(100 * number + 1, 100 * number + 100))
        run.write([Evaluated(100 * number + 100, sum(sources.values()) / len(sources), sources=sources)])
    return run


def test_a_source_whose_held_out_loss_rises_is_named_with_how_often_it_was_read_and_its_weight(
    tmp_path: Path,
) -> None:
    curve = [(3.0, 3.0), (2.5, 2.8), (2.6, 2.6), (2.8, 2.4), (2.9, 2.2), (3.0, 2.0)]
    run = evaluated(tmp_path, [{"code": code, "crawl": crawl} for code, crawl in curve])
    reason = next(reason for reason in run.reasons(finished=True) if reason.code == "held-out-rises")
    assert (reason.severity, reason.where) == ("warning", "source code")
    assert "since step 200" in reason.title
    assert "code: 2.5 at step 200, 3 at step 600" in reason.evidence
    assert any("source code has been read 78 times: it is memorized" in line for line in reason.evidence)
    assert any(
        "source code is 0.3 since step 301, and was 1: it is forgotten" in line for line in reason.evidence
    )
    assert "crawl" not in "".join(reason.evidence)


@pytest.mark.parametrize(
    "curve",
    [(3.0, 2.5, 2.4, 2.45, 2.4), (3.0, 2.5, 2.4, 2.4, 2.7), (2.4, 2.6, 2.6)],
    ids=["wavers", "one of other sequences", "few evaluations"],
)
def test_a_held_out_loss_that_wavers_has_no_reason(tmp_path: Path, curve: Sequence[float]) -> None:
    run = evaluated(tmp_path, [{"crawl": loss} for loss in curve], SPEC)
    assert run.codes(finished=True) == []


def test_a_source_that_is_read_many_times_is_noted_before_its_held_out_loss_rises(tmp_path: Path) -> None:
    reason = only(evaluated(tmp_path, [{"code": 3.0}, {"code": 2.9}]).reasons())
    assert (reason.code, reason.severity) == ("repeated-text", "info")
    assert "code 40" in reason.title
    assert "crawl 0" not in reason.title


def test_another_number_of_sequences_or_another_file_of_a_task_is_noted(tmp_path: Path) -> None:
    run = Watched(tmp_path, SPEC)

    def start(attempt: int, count: int, task: TaskEvaluated) -> None:
        begin = RunStarted("r", 100_000, ranks=4, environment={"held_out_sequences": count})
        run.write([begin, *steps(20 * attempt + 1, 20 * attempt + 20), task], attempt)

    start(1, 64, TaskEvaluated(20, "quiz", "choice", 12, sha256="ab"))
    start(2, 64, TaskEvaluated(40, "quiz", "choice", 12, sha256="ab"))
    assert run.codes() == []
    start(3, 8, TaskEvaluated(60, "quiz", "choice", 12, sha256="cd"))
    reason = only(run.reasons())
    assert (reason.code, reason.severity) == ("other-ruler", "info")
    assert reason.evidence[0].startswith("held-out loss: of 64 sequences before, of 8 now")
    assert reason.evidence[1].startswith("task quiz: 12 items of file cd since step 60")


@pytest.mark.parametrize(
    ("kind", "sha256"), [("choice", "ab"), ("observer", "")], ids=["before files were named", "an observer"]
)
def test_figures_whose_file_is_not_recorded_are_not_compared(tmp_path: Path, kind: str, sha256: str) -> None:
    run = Watched(tmp_path, SPEC)
    run.write([*steps(1, 20), TaskEvaluated(20, "quiz", kind, 12)])
    run.write([*steps(21, 40), TaskEvaluated(40, "quiz", kind, 13, sha256=sha256)])
    assert run.codes() == []
