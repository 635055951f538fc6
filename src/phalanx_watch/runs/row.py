"""A run in a list: its files' facts, and the state that follows from these, the hour, and whether a process holds its directory.

Only small files are read in full, and of the event stream its ends (``probe``). A file that is missing or damaged leaves its facts out and is
named in ``problems``: a list shows all runs, the broken ones too.

Labels, which are tags and a note, are in ``labels.json`` in the run's directory, so they are copied, moved and removed with the run. Two
people may write at once: the file is replaced as a unit, and the later one wins.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal

from phalanx.launch.engines.order import FOLDER, LEAD_EXIT
from phalanx.observe.events import Finished, Stopped
from phalanx.run.directory.files import plain_json, read_small, write_atomically
from phalanx.run.directory.lineage import Origin, read_lineage
from phalanx.run.directory.paths import DamagedRecordError, RunDirectory, read_result
from phalanx_watch.runs.probe import Tail, read_tail

# Labels.


_MOST_TAGS, _LONGEST_TAG, _LONGEST_NOTE = 64, 64, 10_000
_TAG = re.compile(r"[^\s,\x00-\x1f\x7f]+")


class LabelError(ValueError):
    """A tag or a note cannot be kept; the message says why."""


@dataclass(frozen=True)
class Labels:
    """What people say of a run."""

    tags: tuple[str, ...] = ()
    """Sorted, each once."""
    note: str = ""

    def tagged(self, *tags: str) -> Labels:
        """These labels with further tags. Raises ``LabelError``."""
        return _checked(Labels((*self.tags, *tags), self.note))

    def untagged(self, *tags: str) -> Labels:
        """These labels without some tags; those that are not there do not matter."""
        return Labels(tuple(tag for tag in self.tags if tag not in tags), self.note)

    def noted(self, note: str) -> Labels:
        """These labels with another note. Raises ``LabelError``."""
        return _checked(Labels(self.tags, note))


def read_labels(run_dir: Path) -> Labels:
    """The labels of the run in ``run_dir``: none if the file is missing; of a damaged one what can be read."""
    try:
        found = plain_json(read_small(RunDirectory(run_dir).labels))
    except (OSError, ValueError, RecursionError):
        return Labels()
    if not isinstance(found, dict):
        return Labels()
    tags, note = found.get("tags"), found.get("note")
    kept = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    return Labels(
        tuple(sorted(set(kept)))[:_MOST_TAGS], note[:_LONGEST_NOTE] if isinstance(note, str) else ""
    )


def write_labels(run_dir: Path, labels: Labels) -> None:
    """Replaces the labels of the run in ``run_dir``. Raises ``LabelError``, ``OSError``."""
    kept = _checked(labels)
    content = json.dumps({"tags": list(kept.tags), "note": kept.note}, indent=1, ensure_ascii=False) + "\n"
    write_atomically(RunDirectory(run_dir).labels, content.encode(errors="backslashreplace"))


def _checked(labels: Labels) -> Labels:
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
    return Labels(tags, labels.note)


# The row.


SUBMITTED = f"{FOLDER}/run.toml"
"""The frozen run file of a submitted run, below its directory."""
ENDED = f"{FOLDER}/{LEAD_EXIT}"
"""The exit code of its leading node, once that has ended."""
State = Literal["running", "finished", "stopped", "failed", "silent", "waiting"]
_PATIENCE_S = 120.0
_LED_S = 20.0
"""A coordinator writes its status more often: a fleet that was begun on this machine may be led from another one."""
_MOST_WHOLE = 2**53
_STEPS_OF_PATIENCE = 20
"""A run that should go on is silent after so many usual steps without an event, or after ``_PATIENCE_S``, whichever is longer."""


@dataclass(frozen=True)
class RunRow:
    """A run, as lists show it. Numbers are ``None``, and texts empty, where the run's files do not say."""

    id: str
    """A name for URLs, the same as long as the directory stays where it is."""
    path: str
    name: str
    state: State
    step: int
    """The newest logged step."""
    steps: int
    """The step after which the run is complete."""
    saved_step: int
    """The newest step with a checkpoint on disk."""
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
    """The Git commit of the code that the newest attempt ran; ``+`` after it says that files differed from it."""
    attempts: int
    tags: tuple[str, ...]
    note: str
    weights_sha256: str
    """Hash of the final weights; empty while the run is not complete."""
    data_fingerprint: str
    lineage: tuple[Origin, ...]
    """The checkpoints that the run descends from, the oldest first."""
    problems: tuple[str, ...]


@dataclass(frozen=True)
class RunFacts:
    """All of a row that follows from files alone."""

    row: RunRow
    """Its ``state`` means nothing yet."""
    has_begun: bool
    """True if a start has written an event, or has taken the directory or a node, and ended."""
    ended: Literal["", "finished", "stopped", "failed"]
    """How the newest attempt ended, as far as it said so."""
    waits: bool
    """True if its fleet waits for nodes, or an engine has it in its queue."""
    pace_s: float
    """Seconds between the newest events of steps."""
    led_s: float = 0.0
    """The time of the newest status of a fleet's coordinator (unix seconds)."""


def row_of(facts: RunFacts, held: bool | None, now: float) -> RunRow:
    """The row at the time ``now``; ``held`` says whether a process holds the run directory, ``None`` that nobody here can tell."""
    return replace(facts.row, state=_state(facts, held, now))


def _state(facts: RunFacts, held: bool | None, now: float) -> State:
    if facts.ended == "finished":
        return "finished"
    if held is False and now - facts.led_s > _LED_S:
        return facts.ended or ("failed" if facts.has_begun else "waiting")
    patience_s = max(_PATIENCE_S, _STEPS_OF_PATIENCE * facts.pace_s)
    fresh = now - (facts.row.updated or 0.0) < patience_s
    if not held and facts.ended:
        return facts.ended
    if facts.waits or (not facts.has_begun and (held or fresh)):
        return "waiting"
    return "running" if fresh else "silent"


def run_id(path: Path) -> str:
    """A name for URLs of the run in a directory: the folder's name and 8 digits of its place."""
    place = os.path.abspath(path)
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', os.path.basename(place))[:48]}-{sha256(os.fsencode(place)).hexdigest()[:8]}"


def read_facts(path: Path) -> RunFacts:
    """Reads what the files of a run directory say. Raises nothing but what a defect raises: what cannot be read is a problem of the row."""
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
    steps = train.get("steps") if isinstance(train, dict) else None
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
    return RunFacts(row, has_begun, ended, waits, pace_s, led_s)


def _has_ended_job(path: Path) -> bool:
    """Return True if the job of a run's newest submission has ended."""
    try:
        return (path / ENDED).stat().st_mtime >= (path / SUBMITTED).stat().st_mtime
    except OSError:
        return False


def _ended(tail: Tail, fleet: Mapping[str, object]) -> Literal["", "finished", "stopped", "failed"]:
    if isinstance(tail.ended, Finished) or fleet.get("phase") == "finished":
        return "finished" if isinstance(tail.ended, Finished) else "stopped"
    if fleet.get("phase") == "failed":
        return "failed"
    return "stopped" if isinstance(tail.ended, Stopped) else ""


def _commit(code: object) -> str:
    if not isinstance(code, dict) or not isinstance(commit := code.get("git_commit"), str):
        return ""
    return commit + ("+" if code.get("git_dirty") else "")


def _run_file(directory: RunDirectory, problems: list[str]) -> Mapping[str, object]:
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
    try:
        return directory.read_record()
    except (DamagedRecordError, RecursionError) as error:
        problems.append(
            str(error) if isinstance(error, DamagedRecordError) else f"{directory.record} is damaged: {error}"
        )
        return {}


def _json(path: Path, problems: list[str]) -> Mapping[str, object]:
    """A JSON object that need not be there."""
    try:
        found = plain_json(read_small(path))
        if isinstance(found, dict):
            return found
        problems.append(f"{path} is damaged: it is no JSON object")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path} is damaged: {error}")
    return {}
