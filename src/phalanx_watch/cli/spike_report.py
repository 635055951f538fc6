"""The replay of a spike: which steps are computed again, the documents of the worst slots, and the verdict with its remedy."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.cli.data.order import data_origin, read_data_run
from phalanx.data.origin import DataOrigin, SampleLocation, documents_of_record, readings_of_step
from phalanx.data.portions.planning.plan import PLAN_KEY
from phalanx.data.portions.tasks import Workplace
from phalanx.data.portions.write_portion import TracedDocument, trace
from phalanx.data.reading.dataset import RunData, inputs_of, tokenizer_of
from phalanx.data.reading.sources import DatasetPlace, open_places
from phalanx.data.stored.index import TRAIN
from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx.observe.event_log import newest_event, read_events
from phalanx.observe.events import ChildTaken, LossSpike, NonFinite
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.run.read import RUN_FILE
from phalanx.run.spec import RunSpec
from phalanx.store.store import MissingObjectError
from phalanx.train.compare import runs
from phalanx.train.compare.observation import BatchScores, Replay, reached_file
from phalanx.train.compare.spike import SpikeFindings, judge_spike_replay

_FAR = 50
"""A checkpoint so many steps farther back is not taken only to see steps before the spike as well."""
_STEPS_BEFORE = 8
"""Steps before the spike from whose slots the spread of slots is taken, if a checkpoint is far enough back."""
_DOCUMENTS = 6
_LEAST_TOKENS = 4
"""A shorter piece of a document is not listed: its loss is that of a few tokens."""
_WORDS_TOKENS = 48
_WORDS = 100


@dataclass(frozen=True)
class SpikeDocument:
    """A document, or the part of one, in a sequence of the slots with the largest losses."""

    slot: int
    loss: float
    """Mean loss of its tokens, under the weights before the step."""
    tokens: int
    """Its tokens in the sequence that have a loss."""
    source: str
    """Name of the source; empty for a run of one dataset."""
    record: int
    """Number of the sequence in the dataset."""
    file: str
    """The shard with the sequence."""
    offset_bytes: int
    """Offset of the sequence in the shard."""
    document: int | None
    """Number of the document, from 0 in the order of the shards; ``None`` if that is unknown."""
    name: str
    """Name of the document in its raw file, if the dataset was prepared from a recipe, else empty."""
    url: str
    """Address of that raw file."""
    text: str
    """Its first words."""


@dataclass(frozen=True)
class SpikeReport:
    """The answer of ``phalanx spike``."""

    run: str
    step: int
    from_step: int
    """The step whose state was restored; that before the run's first own step is its beginning."""
    ranks: int
    compared: int
    """Number of recorded losses and gradient norms that the replay computed again."""
    unconfirmed: tuple[runs.Unconfirmed, ...]
    """Recorded numbers whose bits are others; the replay is exact if there are none."""
    findings: SpikeFindings
    documents: tuple[SpikeDocument, ...]
    """Documents in the slots with the largest losses, the largest loss first."""
    sources: Mapping[str, int]
    """Sequences of the step by source."""
    remedy: str


def examine_spike(
    run: Path, step: int | None, ranks: int, *, from_start: bool, progress: Callable[[str], None]
) -> SpikeReport:
    """Replay a spike and return the findings. Neither the run nor its data are written to.

    A run in a narrower format is replayed a second time in fp32, from its newest state.

    Args:
        run: The run directory.
        step: The step; ``None`` for the newest spike or step that was not finite.
        ranks: Ranks of the replay; 0 for as many as the run had.
        from_start: Replay from the run's beginning, however many steps that takes.
        progress: Called with a line for people.

    Raises:
        RunDirectoryError: There is no such step, or no state to replay it from.
        DataError, EventLogError, ReplayError: Data or events cannot be read, or a rank of the replay failed.
    """
    from phalanx.launch.local import replay_run

    directory = RunDirectory(run)
    spec, index = read_data_run(run, ())
    origin = data_origin(spec, run)
    step = newest_spike(directory) if step is None else step
    log = _logged(directory, step)
    _require_computed(directory, spec, log, step)
    states = _states_before(directory, spec, origin, step, from_start=from_start)
    start = replay_start(states, step)

    def replayed(folder: Path, state: int, *, in_fp32: bool) -> Replay:
        """Replay the steps from a saved state, or from the beginning, in ``folder`` with measurements."""
        waits = _Waiting(folder, step, progress)
        steps = state if state > origin.step else 0, step
        return replay_run(
            run, log, steps, ranks, folder, is_measured=True, in_fp32=in_fp32, on_wait=waits.report
        )

    with tempfile.TemporaryDirectory(prefix="phalanx-spike-") as folder:
        progress(f"replaying steps {start + 1:,} to {step:,}")
        replay = replayed(Path(folder) / "replay", start, in_fp32=False)
        wide = None
        if spec.precision.compute != "fp32" or spec.precision.matmul != "compute":
            # From the newest state, the weights of the two formats differ least before the step.
            progress(f"repeating steps {states[-1] + 1:,} to {step:,} in fp32")
            wide = replayed(Path(folder) / "fp32", states[-1], in_fp32=True)
    findings = judge_spike_replay(step, replay, spec.train, spec.model.vocab_size, wide)
    assert replay.scores is not None
    readings = readings_of_step(spec, index, step, origin)
    return SpikeReport(
        str(run),
        step,
        start,
        len(replay.observed),
        sum(name in log.steps.get(number, {}) for number, table in replay.numbers.items() for name in table),
        tuple(runs.unconfirmed_numbers(str(run), replay.numbers, log)),
        findings,
        tuple(_documents(spec, readings, replay.scores)),
        Counter(reading.source for reading in readings),
        _remedy(directory, step, start, spec, origin, findings),
    )


def replay_start(states: Sequence[int], step: int) -> int:
    """Return the one of ``states``, ascending steps, from which ``step`` is replayed.

    The newest that leaves ``_STEPS_BEFORE`` steps between, else the oldest within ``_FAR`` steps, else the newest.
    The steps between give the spread of slots, and the last of them the gradients to compare with.
    """
    near = [number for number in states if step - _FAR <= number < step - 1]
    enough = [number for number in near if step - number > _STEPS_BEFORE]
    return enough[-1] if enough else (near[0] if near else states[-1])


def newest_spike(directory: RunDirectory) -> int:
    """Return the first step of the newest unbroken row of spikes and steps that were not finite.

    Raises ``RunDirectoryError`` if there is none.
    """
    newest = newest_event(directory.events, lambda event: isinstance(event.body, LossSpike | NonFinite))
    if newest is None:
        raise RunDirectoryError(
            f"{directory.path} has recorded no spike and no step that was not finite; name a step: phalanx spike {directory.path} STEP"
        )
    bad = {
        event.body.step
        for event in read_events(directory.events)
        if isinstance(event.body, LossSpike | NonFinite)
    }
    assert isinstance(newest.body, LossSpike | NonFinite)
    step = newest.body.step
    while step - 1 in bad:
        step -= 1
    return step


def _require_computed(directory: RunDirectory, spec: RunSpec, log: runs.Logged, step: int) -> None:
    """Raise ``RunDirectoryError`` for a step after the run's end, or more than ``log_every_steps`` after the newest recorded one."""
    if step > spec.train.steps:
        raise RunDirectoryError(
            f"{directory.path} ends after step {spec.train.steps:,}; give a step up to that"
        )
    newest = max([*log.steps, *directory.committed_steps()], default=0)
    if step > newest + spec.observe.log_every_steps:
        raise RunDirectoryError(
            f"{directory.path} has not computed step {step:,}: the newest that it has recorded is {newest:,}; give a step up to that"
        )


def _states_before(
    directory: RunDirectory, spec: RunSpec, origin: DataOrigin, step: int, *, from_start: bool
) -> list[int]:
    """Return the steps from whose states ``step`` can be replayed, ascending: checkpoints, and the beginning if it is
    near or ``from_start``.

    Raises ``RunDirectoryError`` if there are none, or the step is of a parent run or of a fork's child. States before
    a fork whose child the run took do not count for steps after it.
    """
    if step <= origin.step:
        parent = Path(spec.checkpoint.init_from).parent.parent
        raise RunDirectoryError(
            f"step {step:,} was trained by the run that this one continues: phalanx spike {parent} {step}"
        )
    saved = directory.committed_steps()
    is_near = step - origin.step <= runs.MOST_STEPS_FROM_THE_BEGINNING
    states = [
        *([origin.step] if is_near or from_start else []),
        *(number for number in saved if number < step),
    ]
    if not states:
        those = (
            f"steps after {saved[0]:,} can be replayed from its checkpoints"
            if saved
            else "it has no checkpoint at all"
        )
        raise RunDirectoryError(
            f"{directory.path} has no checkpoint before step {step:,}; {those}; --from-start replays all steps from its beginning, "
            "and checkpoint.keep_every keeps more checkpoints"
        )
    taken = [event.body for event in read_events(directory.events) if isinstance(event.body, ChildTaken)]
    for fork in taken:
        if fork.step < step <= fork.end:
            raise RunDirectoryError(
                f"step {step:,} is of the child {fork.candidate} that the run took at its fork; steps up to {fork.step:,} and after {fork.end:,} "
                "can be replayed"
            )
        if fork.end < step:
            # A replay trains no children, so it begins with the state of the one that was taken.
            states = [number for number in states if number >= fork.end]
            if not states:
                raise RunDirectoryError(
                    f"the run went on as the child {fork.candidate} of its fork at step {fork.step:,}, and the state of step {fork.end:,} is kept no "
                    f"more: steps up to {fork.step:,} can be replayed. checkpoint.keep_every keeps more states"
                )
    return states


def _logged(directory: RunDirectory, step: int) -> runs.Logged:
    """Return the recorded numbers of the run by step.

    ``step``'s loss and norm are replaced by those of its newest spike, if it has one.
    """
    log = runs.read_logged(directory)
    spike = newest_event(
        directory.events, lambda event: isinstance(event.body, LossSpike) and event.body.step == step
    )
    if spike is not None and isinstance(spike.body, LossSpike):
        log.steps.setdefault(step, {}).update(loss=spike.body.loss, grad_norm=spike.body.grad_norm)
    return log


class _Waiting:
    """Reports each step that a replay in ``folder`` begins."""

    def __init__(self, folder: Path, last: int, progress: Callable[[str], None]) -> None:
        self._file, self._last, self._progress = reached_file(folder), last, progress
        self._reached = ""

    def report(self) -> None:
        """Report the step that is being computed, if it is another than before."""
        try:
            reached = self._file.read_text()
        except FileNotFoundError:
            return
        if reached != self._reached:
            self._reached = reached
            self._progress(f"step {int(reached):,} of {self._last:,}")


# The documents of the worst slots.


def _documents(spec: RunSpec, readings: list[SampleLocation], scores: BatchScores) -> list[SpikeDocument]:
    """Return the ``_DOCUMENTS`` documents with the largest mean losses in the scored sequences, the largest first."""
    data, places = RunData.of_run(spec), open_places(spec.data)
    documents = [
        document
        for position, losses in scores.tokens.items()
        for document in _documents_of_sequence(
            spec,
            places[readings[position].source],
            readings[position],
            inputs_of(data.train_samples(scores.first_sample + position, 1))[0],
            np.array([np.nan if loss is None else loss for loss in losses]),
        )
    ]
    return sorted(documents, key=lambda document: -document.loss)[:_DOCUMENTS]


def _documents_of_sequence(
    spec: RunSpec,
    place: DatasetPlace,
    reading: SampleLocation,
    ids: NDArray[np.int64],
    losses: NDArray[np.float64],
) -> Iterator[SpikeDocument]:
    """Yield the documents of a sequence with their mean losses; those with fewer than ``_LEAST_TOKENS`` losses are
    left out.

    ``ids`` ``(seq_len,)`` are its tokens, ``losses`` ``(seq_len,)`` those of the tokens behind the first; NaN means
    not scored.
    """
    tokenizer, end = tokenizer_of(place), place.index.document_end
    end = tokenizer.end_of_document if end is None else end
    numbers = (
        None
        if place.index.packed_seq_len
        else documents_of_record(place, reading.record, spec.train.seq_len, end)
    )
    traced = _traced(place, reading, spec.train.seq_len)
    # A document's end token belongs to the document.
    edges = [0, *(np.flatnonzero(ids[:-1] == end) + 1).tolist(), len(ids)]
    for number, (first, stop) in enumerate(itertools.pairwise(edges)):
        own = losses[max(0, first - 1) : stop - 1]
        own = own[~np.isnan(own)]
        if len(own) < _LEAST_TOKENS:
            continue
        origin = traced[number] if number < len(traced) else None
        yield SpikeDocument(
            reading.slot,
            float(own.mean()),
            len(own),
            reading.source,
            reading.record,
            reading.file,
            reading.offset_bytes,
            None if numbers is None else numbers.start + number,
            "" if origin is None else origin.name,
            "" if origin is None else origin.url,
            _first_words(tokenizer, ids[first:stop]),
        )


def _traced(place: DatasetPlace, reading: SampleLocation, seq_len: int) -> list[TracedDocument]:
    """Return the documents of a sequence with their raw files; none if the dataset was not prepared from a recipe."""
    work = Workplace(place.address)
    try:
        work.store.info(PLAN_KEY)
    except MissingObjectError:
        return []
    return trace(work, place.index, TRAIN, reading.record, seq_len)


def _first_words(tokenizer: Tokenizer, ids: NDArray[np.int64]) -> str:
    """Return the first words of a document, with unprintable characters escaped."""
    text = tokenizer.decode(ids[:_WORDS_TOKENS].tolist())
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return text if len(text) <= _WORDS else f"{text[:_WORDS]} …"


# The remedy.


def _remedy(
    directory: RunDirectory, step: int, start: int, spec: RunSpec, origin: DataOrigin, findings: SpikeFindings
) -> str:
    """Return the remedy for the cause (bad batch, rate, format, layer), with the command that applies it.

    Other causes get a request for a spike's step.
    """
    run, newest = directory.path, max((n for n in directory.committed_steps() if n < step), default=start)
    if findings.cause == "bad batch":
        return (
            f"leave its samples out: {_branch(run, newest, spec, origin)} --set train.on_spike=skip; all of them: "
            f"phalanx data show {run} --step {step}"
        )
    back = _branch(run, start, spec, origin)
    if findings.cause == "rate":
        return (
            f"lower the rate from before it: {back} --set optimizer.lr={spec.optimizer.lr / 2:g}; at the beginning of a run, lengthen "
            "schedule.warmup_steps"
        )
    if findings.cause == "format":
        # A run whose products are not narrow may not have the candidate "wide".
        forks = spec.train.on_spike == "fork" and "wide" in spec.spike.candidates
        fork = " --set train.on_spike=skip" if forks else ""
        return f"compute in a wider format from before it: {back} --set precision.compute=fp32 --set precision.matmul=compute{fork}"
    if findings.cause == "layer":
        limit = (spec.optimizer.clip_norm or findings.grad_norm) / 2
        return f"clip harder or lower the rate from before it: {back} --set optimizer.clip_norm={limit:.3g}"
    return "give the step of a spike"


def _branch(run: Path, start: int, spec: RunSpec, origin: DataOrigin) -> str:
    """Return the command that trains again from the state of step ``start`` of the run.

    At its beginning, it continues the parent's step, or else trains the run file into a new directory.
    """
    if start > origin.step:
        return f"phalanx train {run} --from {start}"
    if origin.step:
        return f"phalanx train {Path(spec.checkpoint.init_from).parent.parent} --from {start}"
    return f"phalanx train {run / RUN_FILE} --run-dir {run}-2"
