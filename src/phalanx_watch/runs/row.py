"""A run in a list: the facts in its files, and the state that follows from these, the time, and the holder of its
directory.

Only small files are read in full, and the ends of the event stream (``probe``). A missing or damaged file leaves its
facts out and is named in ``problems``: a list shows all runs, the broken ones too.

Labels (tags and a note) are in ``labels.json`` in the run's directory, so they are copied, moved and removed with the
run. Two people may write at once: the file is replaced atomically, and the later one wins.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal

from phalanx.launch.engines.order import FOLDER, LEAD_EXIT
from phalanx.observe.events import Finished, Stopped
from phalanx.run.directory.files import plain_json, read_small, write_atomically
from phalanx.run.directory.paths import DamagedRecordError, RunDirectory, read_result
from phalanx.run.identity import Origin, read_lineage, recorded_steps
from phalanx_watch.runs.probe import Tail, read_tail

# Labels.


_MOST_TAGS, _LONGEST_TAG, _LONGEST_NOTE = 64, 64, 10_000
_TAG = re.compile(r"[^\s,\x00-\x1f\x7f]+")


class LabelError(ValueError):
    """An invalid tag or note. The message has the reason."""


@dataclass(frozen=True)
class RunLabels:
    """Tags and note of a run."""

    tags: tuple[str, ...] = ()
    """Sorted, without duplicates."""
    note: str = ""
    tagged_s: Mapping[str, float] = field(default_factory=dict)
    """Unix seconds at which each tag was last given; of some tags unknown."""

    def tagged(self, *tags: str, at_s: float) -> RunLabels:
        """Return these labels with tags that are given at ``at_s``, also if they are there. Raises ``LabelError``."""
        tagged_s = {**self.tagged_s, **dict.fromkeys(tags, at_s)}
        return _checked(RunLabels((*self.tags, *tags), self.note, tagged_s))

    def untagged(self, *tags: str) -> RunLabels:
        """Return these labels without some tags; missing tags are ignored."""
        return replace(self, tags=tuple(tag for tag in self.tags if tag not in tags))

    def noted(self, note: str) -> RunLabels:
        """Return these labels with another note. Raises ``LabelError``."""
        return _checked(replace(self, note=note))


def read_labels(run_dir: Path) -> RunLabels:
    """Return the labels of the run in ``run_dir``: none if the file is missing, unreadable or no JSON object.

    Tags, times and a note of another type are left out. Tags are sorted and unique; surplus tags and text are cut.
    """
    try:
        content = plain_json(read_small(RunDirectory(run_dir).labels))
    except (OSError, ValueError, RecursionError):
        return RunLabels()
    if not isinstance(content, dict):
        return RunLabels()
    tags, note, times = content.get("tags"), content.get("note"), content.get("tagged_s")
    kept = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    return RunLabels(
        tuple(sorted(set(kept)))[:_MOST_TAGS],
        note[:_LONGEST_NOTE] if isinstance(note, str) else "",
        {tag: at_s for tag, at_s in times.items() if tag in kept and isinstance(at_s, int | float)}
        if isinstance(times, dict)
        else {},
    )


def write_labels(run_dir: Path, labels: RunLabels) -> None:
    """Replace the labels of the run in ``run_dir``. Raises ``LabelError``, ``OSError``."""
    kept = _checked(labels)
    table = {"tags": kept.tags, "note": kept.note, "tagged_s": kept.tagged_s}
    content = json.dumps(table, indent=1, ensure_ascii=False) + "\n"
    write_atomically(RunDirectory(run_dir).labels, content.encode(errors="backslashreplace"))


def _checked(labels: RunLabels) -> RunLabels:
    """Return labels with tags sorted and unique, and times of these alone. Raises ``LabelError`` for malformed or too many tags, or a long note."""
    tags = tuple(sorted(set(labels.tags)))
    for tag in tags:
        if not _TAG.fullmatch(tag) or len(tag) > _LONGEST_TAG:
            raise LabelError(
                f"{tag!r} is no tag: one has 1 to {_LONGEST_TAG} characters, without spaces and commas"
            )
    if len(tags) > _MOST_TAGS:
        raise LabelError(f"{len(tags)} tags are more than a run may have, which is {_MOST_TAGS}")
    if len(labels.note) > _LONGEST_NOTE:
        raise LabelError(f"a note of {len(labels.note):,} characters is longer than {_LONGEST_NOTE:,}")
    return RunLabels(tags, labels.note, {tag: at_s for tag, at_s in labels.tagged_s.items() if tag in tags})


# The row.


SUBMITTED = f"{FOLDER}/run.toml"
"""Frozen run file of a submitted run, in its directory."""
ENDED = f"{FOLDER}/{LEAD_EXIT}"
"""File with the exit code of the leading node, once it has ended."""
State = Literal["running", "finished", "stopped", "failed", "silent", "waiting"]
_PATIENCE_S = 120.0
_LED_S = 20.0
"""A coordinator writes its status more often. A fleet that was started on this machine may be led from another
one.
"""
_MOST_WHOLE = 2**53
_STEPS_OF_PATIENCE = 20
"""A run counts as silent after this many usual steps without an event, or after ``_PATIENCE_S``, whichever is
longer.
"""


@dataclass(frozen=True)
class RunRow:
    """A run in a list. Numbers are None, and texts empty, if the run's files lack them."""

    id: str
    """URL-safe name, stable while the directory stays in place."""
    path: str
    name: str
    state: State
    step: int
    """Newest logged step."""
    steps: int
    """Last step of the run."""
    saved_step: int
    """Newest step with a checkpoint on disk."""
    loss: float | None
    """Training loss of the last logged step, in nats a token."""
    held_out_loss: float | None
    bits_per_byte: float | None
    """The loss on the held-out text in the newest evaluation, in bits per byte."""
    tokens: int
    """Tokens trained on."""
    tokens_per_s: float | None
    mfu: float | None
    goodput: float | None
    """The goodput of the newest attempt at its last logged step."""
    started: float | None
    """Unix seconds of the run's first start."""
    updated: float | None
    """Unix seconds of its newest event."""
    layout: Mapping[str, int]
    ranks: int
    device: str
    commit: str
    """Git commit of the newest attempt's code; ``+`` after it marks uncommitted changes."""
    attempts: int
    tags: tuple[str, ...]
    note: str
    weights_sha256: str
    """Hash of the final weights; empty while the run is not complete."""
    data_fingerprint: str
    lineage: tuple[Origin, ...]
    """Checkpoints that the run descends from, the oldest first."""
    problems: tuple[str, ...]


@dataclass(frozen=True)
class RowFacts:
    """Everything in a row that follows from files alone."""

    row: RunRow
    """Its ``state`` is not set yet."""
    has_begun: bool
    """True if a start has written an event, or has taken the directory or a node, and ended."""
    ended: Literal["", "finished", "stopped", "failed"]
    """Logged end of the newest attempt."""
    waits: bool
    """True if its fleet waits for nodes, or it is queued in an engine."""
    pace_s: float
    """Seconds between the newest step events."""
    led_s: float = 0.0
    """Time of the newest status of a fleet's coordinator (unix seconds)."""


def row_of(facts: RowFacts, is_locked: bool | None, now: float) -> RunRow:
    """Return the row at the time ``now``. ``is_locked`` is True if a process holds the run directory, None if unknown."""
    return replace(facts.row, state=_state(facts, is_locked, now))


def _state(facts: RowFacts, is_locked: bool | None, now: float) -> State:
    """Return the run's state by its end, its lock (None: unknown), and the age of its newest event.

    "silent" is a run that is not known to have ended, without an event for some minutes or several steps.
    """
    if facts.ended == "finished":
        return "finished"
    if is_locked is False and now - facts.led_s > _LED_S:
        return facts.ended or ("failed" if facts.has_begun else "waiting")
    patience_s = max(_PATIENCE_S, _STEPS_OF_PATIENCE * facts.pace_s)
    fresh = now - (facts.row.updated or 0.0) < patience_s
    if not is_locked and facts.ended:
        return facts.ended
    if facts.waits or (not facts.has_begun and (is_locked or fresh)):
        return "waiting"
    return "running" if fresh else "silent"


def run_id(path: Path) -> str:
    """Return a URL-safe name of the run in a directory: the folder's name and 8 digits of a hash of its path."""
    place = os.path.abspath(path)
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', os.path.basename(place))[:48]}-{sha256(os.fsencode(place)).hexdigest()[:8]}"


def read_facts(path: Path) -> RowFacts:
    """Read the files of a run directory. Raises nothing: most unreadable files are listed as problems of the row.

    Unreadable results and labels count as missing. The state in the row is a placeholder, which ``row_of`` replaces.
    """
    directory = RunDirectory(path)
    problems: list[str] = []
    table = _run_file(directory, problems)
    record = _record(directory, problems)
    try:
        tail = read_tail(directory.events)
    except OSError as error:
        problems.append(f"{directory.events}: {error.strerror}")
        tail = Tail()
    try:
        saved = max(directory.committed_steps(), default=0)
    except OSError as error:
        problems.append(f"{directory.checkpoints}: {error.strerror}")
        saved = 0
    result, step, started = read_result(_json(directory.result, [])), tail.step, tail.started
    fleet = _json(path / "fleet.json", problems)
    labels = read_labels(path)
    environment = started.environment if started else {}
    evaluated = tail.evaluated
    bits = result.bits_per_byte if result else evaluated.bits_per_byte if evaluated else None
    train = table.get("train")
    written = train.get("steps") if isinstance(train, dict) else None
    steps = recorded_steps(record)
    if None not in (steps, written) and steps != written:
        problems.append(
            f"{directory.run_file} was changed after the run was started: train.steps = {written}, and the run has {steps}; put that back"
        )
    steps = written if steps is None else steps
    row = RunRow(
        id=run_id(path),
        path=str(path),
        name=str(table.get("name") or path.name),
        state="waiting",
        step=result.step if result else step.step if step else 0,
        steps=steps
        if isinstance(steps, int) and abs(steps) <= _MOST_WHOLE
        else started.steps
        if started
        else 0,
        saved_step=saved,
        loss=result.loss if result else step.loss if step else None,
        held_out_loss=result.held_out_loss if result else evaluated.loss if evaluated else None,
        bits_per_byte=bits if bits is not None or step is None else step.bits_per_byte,
        tokens=result.tokens if result else step.tokens if step else 0,
        tokens_per_s=result.tokens_per_s if result else step.tokens_per_s if step else None,
        mfu=result.mfu if result else step.mfu if step else None,
        goodput=step.goodput if step else None,
        started=tail.began_s or None,
        updated=tail.last_s or None,
        layout=dict(started.layout) if started else {},
        ranks=started.ranks if started else 0,
        device=started.device if started else "",
        commit=_commit(environment.get("code")),
        attempts=attempts if isinstance(attempts := record.get("attempts"), int) else 0,
        tags=labels.tags,
        note=labels.note,
        weights_sha256=result.weights_sha256 if result else "",
        data_fingerprint=str(record.get("data_fingerprint", "")),
        lineage=tuple(read_lineage(record)),
        problems=tuple(problems),
    )
    ended = "finished" if result is not None else _ended(tail, fleet)
    if not ended and not tail.last_s and any(directory.logs.glob("*.failure.json")):
        ended = "failed"
    waits = fleet.get("phase") == "waiting" or (not tail.last_s and not record)
    pace_s = max(step.logged_s, step.step_s) if step else 0.0
    led = fleet.get("written_unix_s")
    led_s = float(led) if isinstance(led, int | float) and led == led else 0.0
    has_begun = (
        bool(tail.last_s) or _has_ended_job(path) or (row.attempts > 0 and not (path / SUBMITTED).exists())
    )
    return RowFacts(row, has_begun, ended, waits, pace_s, led_s)


def _has_ended_job(path: Path) -> bool:
    """Return True if the job of a run's newest submission has ended; False also if none was submitted."""
    try:
        return (path / ENDED).stat().st_mtime >= (path / SUBMITTED).stat().st_mtime
    except OSError:
        return False


def _ended(tail: Tail, fleet: Mapping[str, object]) -> Literal["", "finished", "stopped", "failed"]:
    """Return how the run ended by its newest events and its fleet; empty if it has not."""
    if isinstance(tail.ended, Finished) or fleet.get("phase") == "finished":
        return "finished" if isinstance(tail.ended, Finished) else "stopped"
    if fleet.get("phase") == "failed":
        return "failed"
    return "stopped" if isinstance(tail.ended, Stopped) else ""


def _commit(code: object) -> str:
    """Return the commit, with "+" if there were changes; empty if unknown."""
    if not isinstance(code, dict) or not isinstance(commit := code.get("git_commit"), str):
        return ""
    return commit + ("+" if code.get("git_dirty") else "")


def _run_file(directory: RunDirectory, problems: list[str]) -> Mapping[str, object]:
    """Return the run file, or the submitted one before the first start. Empty, with a problem added, if it cannot be read."""
    try:
        frozen = directory.path / SUBMITTED  # a run that was submitted and has not begun
        path = frozen if frozen.exists() and not directory.run_file.exists() else directory.run_file
        return tomllib.loads(read_small(path).decode())
    except FileNotFoundError:
        problems.append(f"there is no {directory.run_file}")
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{directory.run_file} is damaged: {error}")
    return {}


def _record(directory: RunDirectory, problems: list[str]) -> Mapping[str, object]:
    """Return the record of the run; empty, with a problem added, if it is damaged."""
    try:
        return directory.read_record()
    except (DamagedRecordError, RecursionError) as error:
        problems.append(
            str(error) if isinstance(error, DamagedRecordError) else f"{directory.record} is damaged: {error}"
        )
        return {}


def _json(path: Path, problems: list[str]) -> Mapping[str, object]:
    """Return the JSON object in an optional file; empty if it is missing, or with a problem added, damaged."""
    try:
        content = plain_json(read_small(path))
        if isinstance(content, dict):
            return content
        problems.append(f"{path} is damaged: it is no JSON object")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path} is damaged: {error}")
    return {}
