"""Observers that evaluate: held-out text, tasks and samples, the checkpoint of the best evaluation, and the end of a run that gets no better.

As all observers (``phalanx.train.lifecycle.observers``), they change no bit of the weights.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import Tensor

from phalanx.observe.event_log import EventLogError, newest_event, read_events
from phalanx.observe.events import Evaluated, Evaluating, Message, Sampled, TaskEvaluated
from phalanx.observe.ledger import Bucket
from phalanx.parallel.process_group.typed_gather import broadcast_typed
from phalanx.run.directory.paths import EarlyStop, RunDirectory
from phalanx.train.assemble import Training
from phalanx.train.evaluation.scoring import (
    HeldOutLoss,
    continue_prompts,
    evaluate,
    score_sequences,
)
from phalanx.train.evaluation.tasks import (
    Continuation,
    EncodedTask,
    Prompt,
    ScoredSequence,
    SequenceScore,
    Task,
    encode_task,
    figures,
    generated_answers,
    generation_figures,
    prompt_of,
    read_task,
    scores_by_item,
)
from phalanx.train.lifecycle.observers import Observer, StepEnd
from phalanx.train.lifecycle.progress import TrainProgress, is_due, is_left
from phalanx.train.lifecycle.saving import Saving

# The checkpoint of the best evaluation: which figure decides, and the best step so far.
#
# The best step of earlier starts is read from the event file, since a step's checkpoint is saved before the step is evaluated.

HELD_OUT_LOSS = "loss"
"""The figure of held-out text, as ``evaluation.keep_best`` names it; those of tasks are ``TASK.FIGURE``."""

HIGHER_IS_BETTER = ("accuracy", "exact_match")
"""Beginnings of the names of figures that are better when they are higher; all others are better when they are lower."""


class BestStep(msgspec.Struct, frozen=True):
    """The step with the best value so far."""

    step: int
    value: float


@dataclass(frozen=True)
class BestRule:
    """Comparison of evaluations by one figure."""

    figure: str
    """``HELD_OUT_LOSS`` or ``TASK.FIGURE``."""

    def value(self, loss: float | None, tasks: Mapping[str, Mapping[str, float]]) -> float | None:
        """Return the rule's figure of an evaluation: held-out ``loss``, or "task.figure" of ``tasks``. ``None`` if the evaluation
        has none."""
        if self.figure == HELD_OUT_LOSS:
            return loss
        task, _, name = self.figure.rpartition(".")
        return tasks.get(task, {}).get(name)

    def better(self, step: int, value: float | None, best: BestStep | None) -> BestStep | None:
        """Return the best step, now that ``step`` has ``value``. ``best`` is returned if ``value`` is None, not
        finite, or not strictly better. The figure's name decides whether higher is better.
        """
        if value is None or not math.isfinite(value):
            return best
        rises = self.figure.rpartition(".")[2].startswith(HIGHER_IS_BETTER)
        if best is None or (value > best.value if rises else value < best.value):
            return BestStep(step, value)
        return best

    def best(self, values: Mapping[int, float]) -> BestStep | None:
        """Return the best of the steps with these values; ``None`` if there are none, or none is finite."""
        best = None
        for step in sorted(values):
            best = self.better(step, values[step], best)
        return best

    def recorded(self, events: Path, sha256: str = "") -> dict[int, float]:
        """Return the value of each evaluated step in an event file, the newest of repeated ones. If reading fails,
        those read before are returned: none of a file that does not exist.

        Evaluations of a task count only if its file had the hash ``sha256``.
        """
        values: dict[int, float] = {}  # a repeated evaluation of a step replaces the earlier one
        with suppress(EventLogError):
            for event in read_events(events):
                match event.body:
                    case Evaluated(step=step, loss=loss) if self.figure == HELD_OUT_LOSS:
                        values[step] = loss
                    case TaskEvaluated(step=step, task=task, figures=figures) if event.body.sha256 == sha256:
                        if (value := self.value(None, {task: figures})) is not None:
                            values[step] = value
                    case _:
                        pass
        return values


def without_better(values: Mapping[int, float], best: BestStep | None) -> int:
    """Return the number of evaluations after the best one; of all, if none is the best."""
    return sum(best is None or step > best.step for step in values)


_REPORT_EVALUATION_S = 5.0
"""Time between two events on how far an evaluation is."""


@dataclass(frozen=True)
class Scores:
    """The results of an evaluation."""

    held_out: HeldOutLoss | None
    """``None`` without held-out text."""
    tasks: Mapping[str, Mapping[str, float]]
    """The figures of each task, by its name."""


class Evaluator(Observer):
    """Evaluations on held-out text, on the run's tasks and on its samples, every ``evaluation.every_steps`` steps."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.newest: tuple[int, Scores] | None = None
        """The step of the newest evaluation of this start, and its results."""
        self._tasks: list[EncodedTask] | None = None
        """The run's tasks, from the first evaluation on."""

    def after_save(self, end: StepEnd) -> None:
        spec = self._training.inputs.spec.evaluation
        if not end.last and not end.report.flags.stop and is_due(end.step, spec.every_steps):
            self.run(end.step, spec.sequences)

    def value(self, rule: BestRule, step: int) -> float | None:
        """Return the figure of ``rule`` in the newest evaluation; ``None`` if that was of another step than ``step``,
        or has no such figure.
        """
        if self.newest is None or self.newest[0] != step:
            return None
        held_out, tasks = self.newest[1].held_out, self.newest[1].tasks
        return rule.value(None if held_out is None else held_out.loss, tasks)

    def run(self, step: int, sequences: int) -> Scores:
        """Score ``sequences`` held-out sequences (0: all) and the tasks, write the samples, emit the events, and keep
        the scores as the newest. A collective.

        Raises ``EvaluationStoppedError`` on a request to stop.
        """
        with self._training.inputs.ledger.bucket(Bucket.EVAL):
            held_out = self._held_out(step, sequences)
            scores = Scores(
                held_out, {encoded.task.name: self._task(step, encoded) for encoded in self._read()}
            )
            self._write_samples(step)
            self.newest = step, scores
            return scores

    def _held_out(self, step: int, sequences: int) -> HeldOutLoss | None:
        """Score held-out text and emit its event; ``None``, without an event, if nothing is held out. Raises
        ``EvaluationStoppedError``."""
        training, inputs, built = self._training, self._training.inputs, self._training.built
        begin_s, report = time.perf_counter(), self._progress(step)
        evaluation = evaluate(built, training.data, sequences, report, lambda: inputs.stop.made)
        seconds = self._ended(begin_s)
        if evaluation is not None:
            by_source = dict(evaluation.sources)
            training.reporter.emit(
                Evaluated(step, evaluation.loss, evaluation.bits_per_byte, seconds, by_source)
            )
        return evaluation

    def _read(self) -> list[EncodedTask]:
        """Return the encoded tasks, from their copies in the run directory. The first call reads them, and warns of files that have
        changed."""
        if self._tasks is None:
            inputs, tokenizer = self._training.inputs, self._training.data.tokenizer
            self._tasks = [
                encode_task(task, tokenizer, inputs.spec.train.seq_len)
                for spec in inputs.spec.evaluation.tasks
                for task in [read_task(inputs.directory.task(spec.name), spec.name, spec.kind, spec.items)]
            ]
            for encoded in self._tasks:
                self._compare_file(encoded.task)
        return self._tasks

    def _compare_file(self, task: Task) -> None:
        """Warn if the file of a task has another hash than in the run's newest evaluation of it. Only the rank that reports does so."""
        reporter = self._training.reporter
        if not reporter.speaks:
            return
        before = newest_event(
            self._training.inputs.directory.events,
            lambda event: isinstance(event.body, TaskEvaluated) and event.body.task == task.name,
        )
        body = None if before is None else before.body
        if isinstance(body, TaskEvaluated) and body.sha256 != task.sha256:
            reporter.warn(
                f"task {task.name}: its file is another one than in the evaluation of step {body.step:,}; figures from here on cannot be "
                "compared with those before"
            )

    def _task(self, step: int, encoded: EncodedTask) -> dict[str, float]:
        """Score a task, or continue its prompts and compare the answers, emit its event with the time, and return its
        figures by name. Raises ``EvaluationStoppedError``.
        """
        training, inputs, built = self._training, self._training.inputs, self._training.built
        begin_s, report = time.perf_counter(), self._progress(step)
        task, sequences = encoded.task, encoded.sequences
        if task.kind == "generation":
            texts = self._continue(encoded.prompts, report)
            results = generation_figures(generated_answers(task, texts, training.data.tokenizer))
        else:
            scores = score_sequences(
                *(built.model, built.runner, inputs.spec, sequences, report), lambda: inputs.stop.made
            )
            results = figures(task, scores_by_item(task, sequences, scores))
        training.reporter.emit(
            TaskEvaluated(
                step=step,
                task=task.name,
                scored_as=task.kind,
                items=len(task.items),
                figures=results,
                cut=sum(sequence.cut for sequence in sequences),
                sha256=task.sha256,
                seconds=self._ended(begin_s),
            )
        )
        return results

    def _continue(
        self, prompts: Sequence[Prompt], on_progress: Callable[[int, int], None]
    ) -> list[Continuation]:
        """Return a continuation of each prompt by the present weights. A collective. Raises ``EvaluationStoppedError``."""
        inputs, built, tokenizer = self._training.inputs, self._training.built, self._training.data.tokenizer
        spec = inputs.spec

        def score(sequences: Sequence[ScoredSequence], noise: Tensor | None) -> list[SequenceScore]:
            return score_sequences(
                *(built.model, built.runner, spec, sequences), stops=lambda: inputs.stop.made, noise=noise
            )

        return continue_prompts(
            *(prompts, score, tokenizer, spec.train.seq_len, spec.model.vocab_size), on_progress
        )

    def _write_samples(self, step: int) -> None:
        """Generate the text of each sample of the run file, and emit it as an event. Raises ``EvaluationStoppedError``."""
        training, spec = self._training, self._training.inputs.spec
        samples, tokenizer, begin_s = spec.evaluation.samples, training.data.tokenizer, time.perf_counter()
        prompts = [prompt_of(sample, tokenizer, spec.runtime.seed) for sample in samples]
        texts = self._continue(prompts, self._progress(step))
        for sample, continuation in zip(samples, texts, strict=True):
            tokens = continuation.tokens
            text = tokenizer.decode(tokens, at_start=not sample.prompt)
            training.reporter.emit(
                Sampled(step, sample.name, sample.prompt, text, tokens, sample.temperature)
            )
        self._ended(begin_s)

    def _progress(self, step: int) -> Callable[[int, int], None]:
        """Return a function that emits how far a long evaluation is, at most every ``_REPORT_EVALUATION_S`` seconds."""
        reported_s = time.perf_counter()

        def report(scored: int, total: int) -> None:
            nonlocal reported_s
            if time.perf_counter() - reported_s > _REPORT_EVALUATION_S:
                reported_s = time.perf_counter()
                self._training.reporter.emit(Evaluating(step, scored, total))

        return report

    def _ended(self, begin_s: float) -> float:
        """Return the seconds since ``begin_s``. Report to the guardian, and discard the waits that the clocks measured: they are no
        step's."""
        self._training.inputs.guardian.computed()
        self._training.built.forget_waits()
        return time.perf_counter() - begin_s


class KeepBest(Observer):
    """Saves and keeps the checkpoint of the best evaluation, by ``evaluation.keep_best``."""

    def __init__(
        self, training: Training, saving: Saving, progress: TrainProgress, evaluator: Evaluator
    ) -> None:
        """Read the figures of earlier starts from the events, on rank 0, choose the best saved step, and have its
        checkpoint kept. A collective.
        """
        self._training, self._saving, self._progress, self._evaluator = training, saving, progress, evaluator
        self.rule = BestRule(training.inputs.spec.evaluation.keep_best)
        recorded: dict[int, float] = {}
        if training.mesh.rank == 0:
            with suppress(OSError):
                recorded = _recorded_values(self.rule, training.inputs.directory)
        # The other ranks learn them from rank 0: all must save the same steps, and end at the same one.
        self.values = broadcast_typed(recorded, dict[int, float])
        """The figure of each evaluation of a state that led to the run's own, also of earlier starts."""
        self.choose_again()

    def choose_again(self) -> None:
        """Choose the best of the run's evaluated states whose checkpoint still exists, and have that checkpoint kept.
        A collective, at a start and after a fork.

        Figures of steps that a fork has left, or that come after the present step, are dropped.
        """
        progress = self._progress
        self.values = {
            step: value
            for step, value in self.values.items()
            if step <= progress.step and not is_left(step, progress)
        }
        saved: list[int] = []
        if self._training.mesh.rank == 0:
            with suppress(OSError):
                saved = self._training.inputs.directory.committed_steps()
        saved = broadcast_typed(saved, list[int])
        self._best = self.rule.best({step: value for step, value in self.values.items() if step in saved})
        self._saving.forget_best()
        if self._best is not None:
            self._saving.keep_best(self._best.step, is_durable=True)

    def after_save(self, end: StepEnd) -> None:
        if not end.last:
            self.compare(end.step)

    def compare(self, step: int) -> None:
        """Record the evaluation of ``step``, if there was one. If it is the best so far, save the state, keep its
        checkpoint, and report it.
        """
        value = self._evaluator.value(self.rule, step)
        if value is not None:
            self.values[step] = value
        best = self.rule.better(step, value, self._best)
        if best is None or best == self._best:
            return
        self._best = best
        self._saving.save(self._progress)
        self._saving.keep_best(best.step)
        self._training.reporter.emit(
            Message(
                "info",
                f"step {best.step:,} is the best so far, {self.rule.figure} {best.value:.6g}: its checkpoint is kept",
            )
        )


def _recorded_values(rule: BestRule, directory: RunDirectory) -> dict[int, float]:
    """Return the figure of each recorded evaluation. Raises ``OSError``."""
    task, _, _ = rule.figure.rpartition(".")
    sha256 = hashlib.sha256(directory.task(task).read_bytes()).hexdigest() if task else ""
    return rule.recorded(directory.events, sha256)


class StopEarly(Observer):
    """End of the run after ``evaluation.stop_after`` evaluations without a better one, at the same step on all ranks and in every start."""

    def __init__(
        self, training: Training, progress: TrainProgress, evaluator: Evaluator, keep_best: KeepBest
    ) -> None:
        """Decide at once from the evaluations of earlier starts whether the run has ended."""
        self._training, self._progress = training, progress
        self._evaluator, self._keep_best = evaluator, keep_best
        self._spec = training.inputs.spec.evaluation
        self.ended: EarlyStop | None = None
        """The decision to end the run; ``None`` while it trains on. The same on all ranks."""
        self.decide()

    def evaluate_restored(self) -> None:
        """Evaluate the restored step if its due evaluation is missing, because a stop or fault cut it short; then
        decide again. Raises ``EvaluationStoppedError``.

        So the run ends at the step at which it would have ended without the interruption. A new best step is saved.
        The last step and a state that was taken over are not evaluated.
        """
        step, restored = self._progress.step, self._training.restored
        is_own = restored is not None and not restored.taken_over
        is_last = step == self._training.inputs.spec.train.steps
        is_missing = is_due(step, self._spec.every_steps) and step not in self._keep_best.values
        if is_own and not is_last and is_missing:
            self._evaluator.run(step, self._spec.sequences)
            self._keep_best.compare(step)
            self.decide()

    def after_save(self, end: StepEnd) -> None:
        if end.step in self._keep_best.values:
            self.decide()

    def decide(self) -> None:
        """Set ``ended`` if ``stop_after`` evaluations in a row brought nothing better, by the figures of ``KeepBest``; else clear it."""
        values, rule = self._keep_best.values, self._keep_best.rule
        best = rule.best(values)
        self.ended = None
        if without_better(values, best) >= self._spec.stop_after:
            self.ended = EarlyStop(
                figure=rule.figure,
                stop_after=self._spec.stop_after,
                best_step=best.step if best else 0,
                best_value=best.value if best else None,
            )
