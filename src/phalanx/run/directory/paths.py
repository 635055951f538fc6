"""Names of the files in a run directory and of the committed checkpoints in it, in one place.

    runs/quickstart-1f3a9c04/
        run.toml          the resolved run file, with all defaults written out
        record.json       the run's identity and its data's fingerprint
        events.jsonl      the event stream, from which the display and the curve are drawn
        steps.bin         a cache of the numbers of logged steps, for fast curves (observe/event_log.py)
        ranks.bin         measurements of each rank by window (observe/rank_stream.py)
        checkpoints/      committed steps: step-00000100/checkpoint.json and so on
        forks/            checkpoints of the children of a fork at a loss spike, while it lasts
        tasks/            copies of the files of evaluation.tasks
        tokenizer/        a copy of the tokenizer, so that the folder is enough to generate text
        published/        the publisher's files of an imported model, without the weights
        logs/             output and log of each process as lines of JSON, with failures
        code/             changes of the code against its commit, and the packages that were installed
        machines/         hardware, driver and libraries of every node
        serving/          status files of servers of its weights
        packs/            weights of single steps in the order of their layers, for serving (checkpoint/pack/)
        labels.json       tags and a note by users
        loss.svg, result.json

A step is committed if and only if its folder has an index, ``checkpoint.json``. A save renames the folder as its last operation
(``checkpoint/tiers/disk.py``), so steps can be listed without opening files.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from phalanx.run.directory.files import plain_json, read_small, write_atomically
from phalanx.run.fields import JsonObject, listing
from phalanx.run.read import RUN_FILE, spec_from_table
from phalanx.run.spec import RunSpec

CHECKPOINT_INDEX = "checkpoint.json"
"""The file that makes a step's folder a committed checkpoint."""
FLEET_NAMES = frozenset(
    ("targets", "fleet", "fleet.json", "fleet.token", "fleet.operator-token", "faults", "launch")
)
"""Names of the files of a fleet and its engine in a run directory, in addition to ``RunDirectory.names``."""
_STEP = re.compile(r"step-(\d{8,})")
_JOURNAL = re.compile(r"journal-(\d+)\.jsonl")


class RunDirectoryError(RuntimeError):
    """The run directory cannot be used; the message has the reason and a remedy."""


class DamagedRecordError(RunDirectoryError):
    """``record.json`` is damaged."""


def step_folder(root: Path, step: int) -> Path:
    """Return the folder of a committed step in the folder of checkpoints ``root``: ``root/step-00000100``."""
    return root / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder; ``None`` if it has no such name."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def is_committed(folder: Path) -> bool:
    """Return True if ``folder`` is a committed checkpoint."""
    return step_of(folder) is not None and (folder / CHECKPOINT_INDEX).exists()


def committed_steps(root: Path) -> list[int]:
    """Return the committed steps in the folder of checkpoints ``root``, oldest first. Other folders and files are
    ignored. Raises ``OSError``.
    """
    folders = [root / name for name in os.listdir(root)]
    return sorted(
        step for folder in folders if (step := step_of(folder)) is not None and is_committed(folder)
    )


def newest_in_words(step: int) -> str:
    """Return the words for a run whose newest checkpoint is that of ``step``; with 0 it has none."""
    return f"the newest checkpoint is of step {step:,}" if step else "there is no checkpoint yet"


def locate_checkpoints(path: Path, step: int | None = None) -> tuple[Path, int | None]:
    """Return the folder of checkpoints for ``path``, and the step: that of ``path``, or ``step``.

    ``path`` is a run directory, a folder of checkpoints, or one committed checkpoint. Any other path, even a missing one, is returned as the
    folder: the caller checks that it holds checkpoints.

    Raises ``RunDirectoryError`` if ``path`` is a checkpoint of another step than ``step``.
    """
    if is_committed(path):
        own_step = step_of(path)
        if step is not None and step != own_step:
            raise RunDirectoryError(
                f"{path} is the checkpoint of step {own_step}, not {step}; leave the step out"
            )
        return path.parent, own_step
    inside = RunDirectory(path).checkpoints
    return (inside if inside.is_dir() else path), step


def is_published(folder: Path) -> bool:
    """Return True if ``folder`` has a Hugging Face model and is not a run directory."""
    return (folder / "config.json").is_file() and not (folder / RUN_FILE).exists()


def import_first(folder: Path) -> str:
    """Return the end of a message about ``folder``, which is not a run directory: the command to import its Hugging Face model, or ""."""
    if not (folder / "config.json").exists():
        return ""
    return f"; a model of Hugging Face has to be made one first: phalanx import {shlex.quote(str(folder))} --out RUN_DIR"


class _Inside:
    """The path of a file or folder in a run directory, by its name there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, directory: RunDirectory, _owner: type[RunDirectory]) -> Path:
        return directory.path / self._name


@dataclass(frozen=True)
class RunDirectory:
    """The paths in a run directory, and its small records."""

    path: Path

    run_file = _Inside(RUN_FILE)
    """The resolved run file."""
    record = _Inside("record.json")
    """Identity and data fingerprint."""
    events = _Inside("events.jsonl")
    """The event stream."""
    steps = _Inside("steps.bin")
    """The index of the logged steps in the event stream."""
    ranks = _Inside("ranks.bin")
    """The stream of the ranks' own numbers."""
    checkpoints = _Inside("checkpoints")
    """The root of the disk tier."""
    weights_elsewhere = _Inside("weights.json")
    """The file that replaces ``checkpoints`` if the weights are in a published model's own files."""
    tokenizer = _Inside("tokenizer")
    """The copy of the tokenizer."""
    published = _Inside("published")
    """The publisher's files of the imported model that the run is or started from; exists only for such a run."""
    logs = _Inside("logs")
    """The folder of logs: the output of each rank and node."""
    fleet = _Inside("fleet")
    """The folder of a fleet's journals, one for each attempt; it exists once a coordinator has run."""
    targets = _Inside("targets")
    """The folder of files with the addresses at which a fleet's processes serve their metrics (``observe/metrics/endpoint.py``)."""
    curve = _Inside("loss.svg")
    """The loss curve."""
    result = _Inside("result.json")
    """The final result; it exists once the run is complete."""
    code = _Inside("code")
    """The folder of patches against the code's commit, and of lists of installed packages."""
    machines = _Inside("machines")
    """The folder of descriptions of each node's machine."""
    labels = _Inside("labels.json")
    """Tags and a note by users."""
    profiles = _Inside("profiles")
    """The folder of profiles of a few steps, each in its own folder; exists once a profile was requested."""
    packs = _Inside("packs")
    """The folder of packs, weights in the order in which they are read for serving; it exists once a step was packed."""
    serving = _Inside("serving")
    """The folder of status files of servers of the run's weights; exists once one has served (``observe/record/notes.py``)."""
    lock = _Inside("lock")
    """The file that a running start of the run keeps locked."""
    forks = _Inside("forks")
    """Checkpoints of the children of a fork at a loss spike, until one of them is taken."""
    tasks = _Inside("tasks")
    """Copies of the files of the run's tasks."""

    def names(self) -> set[str]:
        """Return the names of all files and folders that a run without a fleet may have in its directory."""
        own = (
            *(self.lock, self.run_file, self.record, self.events, self.steps, self.ranks, self.checkpoints),
            *(self.tokenizer, self.published, self.logs, self.curve, self.result, self.profiles),
            *(self.labels, self.code, self.machines, self.packs, self.serving, self.tasks, self.forks),
        )
        return {path.name for path in own}

    def task(self, name: str) -> Path:
        """Return the copy of the file of the task ``name``."""
        return self.tasks / f"{name}.jsonl"

    def log(self, attempt: int, rank: int) -> Path:
        """Return the log of one rank in one attempt."""
        return self.named_log(attempt, f"rank-{rank:05d}")

    def named_log(self, attempt: int, name: str) -> Path:
        """Return the log of the process ``name`` in one attempt, written by ``phalanx.observe.logs``."""
        return self.logs / f"attempt-{attempt:03d}-{name}.jsonl"

    def committed_steps(self) -> list[int]:
        """Return the steps with a committed checkpoint, oldest first. Raises ``OSError``."""
        return committed_steps(self.checkpoints) if self.checkpoints.is_dir() else []

    def newest_checkpoint(self) -> str:
        """Return the words for the newest committed checkpoint, or for none. Raises ``OSError``."""
        return newest_in_words(max(self.committed_steps(), default=0))

    def read_record(self) -> JsonObject:
        """Return the content of ``record.json``; empty if there is none.

        Raises ``DamagedRecordError`` if it is damaged: the run's data and its number of starts are then unknown.
        """
        try:
            record = plain_json(read_small(self.record))
            if isinstance(record, dict) and isinstance(record.get("attempts"), int):
                return record
            reason = "it lacks the number of starts of the run"
        except (FileNotFoundError, NotADirectoryError):  # the path of the run may be a file
            return {}
        except (OSError, ValueError, RecursionError) as error:
            reason = str(error)
        raise DamagedRecordError(
            f"{self.record} is damaged ({reason}): put a copy back, or remove it, if you are sure that the data are those that the run was "
            "trained on"
        )

    def journal(self, attempt: int) -> Path:
        """Return the journal of a fleet's coordinator in one attempt."""
        return self.fleet / f"journal-{attempt:03d}.jsonl"

    def next_journal(self) -> int:
        """Return the lowest attempt above all attempts with a journal: a new attempt must not replay an old one."""
        names = os.listdir(self.fleet) if self.fleet.is_dir() else []
        attempts = [int(match[1]) for name in names if (match := _JOURNAL.fullmatch(name))]
        return max(attempts, default=-1) + 1

    def newest_attempt(self) -> int:
        """Return the number, from 0, of the newest start in this directory's record. Raises ``RunDirectoryError`` if
        there was none, or the record is damaged.
        """
        started = self.read_record().get("attempts", 0)
        if not started:
            raise RunDirectoryError(f"{self.path} is no run directory: nobody has started a run there yet")
        return int(started) - 1

    def finished_result(self) -> RunResult | None:
        """Return the result of a complete run, or ``None``."""
        return read_result(read_small_json(self.result))

    def complete_result(self, spec: RunSpec) -> RunResult | None:
        """Return the result of a finished run, or ``None`` if there is none or a start with ``spec`` continues the
        run.

        A run that ended early is continued if ``evaluation.stop_after`` or ``evaluation.keep_best`` is another one
        now.
        """
        result = self.finished_result()
        if result is None or result.early_stop is None or result.early_stop.is_of(spec):
            return result
        return None

    def write_result(self, result: RunResult) -> None:
        """Mark the run as complete."""
        write_atomically(self.result, (json.dumps(result.to_json(), indent=1) + "\n").encode())


def read_small_json(path: Path) -> JsonObject:
    """Return a small JSON object; empty if the file is missing or damaged, for files that can be created again."""
    try:
        table = plain_json(read_small(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def read_resolved(directory: RunDirectory) -> RunSpec:
    """Return the resolved run of a run directory, without its preset's name.

    Raises ``RunDirectoryError`` if there is none, or if its run file is damaged or from a version with other field
    names. Runs of versions without a choice of numerics are native.
    """
    try:
        table = tomllib.loads(read_small(directory.run_file).decode())
        if not table:  # it would be a run with every default
            raise ValueError("it is empty")
    except (OSError, ValueError, RecursionError) as error:
        reason = f"there is no {directory.run_file}" if isinstance(error, FileNotFoundError) else str(error)
        kind = "is not a run directory" if not directory.record.exists() else f"has a damaged {RUN_FILE}"
        remedy = ""
        if directory.record.exists():
            remedy = "; put a copy back, or write the fields that the run had"
        else:
            remedy = import_first(directory.path)
        raise RunDirectoryError(f"{directory.path} {kind}: {reason}{remedy}") from error
    # Runs of versions without a choice of numerics are native.
    if isinstance(runtime := table.get("runtime", {}), dict):
        table["runtime"] = {"numerics": "native", **runtime}
    spec, problems = spec_from_table({**table, "model": {**table.get("model", {}), "preset": ""}}, {})
    if spec is None:
        raise RunDirectoryError(
            listing(
                f"{directory.run_file} is damaged or was written by another version of Phalanx; correct it",
                problems,
            )
        )
    return spec


# The result of a finished run, for comparison, output and ``result.json``.


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """The decision of a run to end before ``train.steps`` (``evaluation.stop_after``)."""

    figure: str
    """The compared figure, as ``evaluation.keep_best`` names it."""
    stop_after: int
    """Number of evaluations without a better value."""
    best_step: int
    """Step with the best value; 0 if no value was finite."""
    best_value: float | None = None
    """The best value."""

    def is_of(self, spec: RunSpec) -> bool:
        """Return True if ``spec`` has the rule that ended the run."""
        return (self.figure, self.stop_after) == (spec.evaluation.keep_best, spec.evaluation.stop_after)

    def __str__(self) -> str:
        """Return the rule and the best value that nothing later improved on, as a phrase for a user."""
        best = (
            "a finite one"
            if self.best_value is None
            else f"that of step {self.best_step:,}, {self.best_value:.6g}"
        )
        return f"evaluation.stop_after = {self.stop_after} and no later {self.figure} was better than {best}"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a finished run. Fields with a default may be missing from a file of an older version."""

    run_dir: str = ""
    """Path of the run directory."""
    step: int
    """The last step."""
    loss: float | None = None
    """Training loss of the last step with a finite loss, in nats per token."""
    tokens: int = 0
    """Training tokens over the whole run."""
    tokens_per_s: float | None = None
    """Tokens per second in the median step."""
    mfu: float | None = None
    """Model FLOPs utilization of the median step, 0 to 1."""
    peak_flops_per_s: float = 0.0
    """Total rate of all ranks that counts as 100% MFU."""
    peak_source: str = ""
    """Source of that rate: a data sheet, or a measurement."""
    held_out_loss: float | None = None
    """Nats per token in the last evaluation; ``None`` without held-out text."""
    bits_per_byte: float | None = None
    """Bits needed for a byte of the held-out text."""
    xz_bits_per_byte: float | None = None
    """The same for ``xz -9`` on that text."""
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)
    """The figures of each task in the last evaluation, by its name."""
    ranks: int = 0
    """Ranks of the last attempt."""
    memory_bytes: dict[str, int] = field(default_factory=dict)
    """Measured device memory by kind, on the rank that holds most of it."""
    layout: dict[str, int] = field(default_factory=dict)
    """The degree of each parallel axis."""
    weights_sha256: str
    """SHA-256 (hex) over all weights."""
    early_stop: EarlyStop | None = None
    """The reason for which the run ended before ``train.steps``; ``None`` if it did all of them."""

    def to_json(self) -> dict[str, object]:
        """Return the fields as a JSON object."""
        return asdict(self)


def read_result(table: Mapping[str, object]) -> RunResult | None:
    """Return the result in a JSON object; ``None`` if it is not that of a finished run."""
    try:
        return msgspec.convert(table, RunResult)
    except msgspec.ValidationError:
        return None


# Repair of a run directory's small files while a fleet runs: ``record.json`` and the resolved run file.
#
# A run does not start with a damaged file, because its data or identity would be unknown. A running fleet can repair it: its
# coordinator, and its launcher before it restarts a process, keep the last valid content, report the damage, and write the file
# again before a new process reads it. A file with equivalent content is not changed.


class DirectoryKeeper:
    """Keeper of the content of a run directory's small files, which repairs them."""

    def __init__(self, directory: RunDirectory) -> None:
        """Watch record and run file of ``directory``; nothing is read yet."""
        self._checks: dict[Path, Callable[[], object]] = {
            directory.record: directory.read_record,
            directory.run_file: self._require_same_run,
        }
        self._directory = directory
        self._valid_content: dict[Path, bytes] = {}
        self._spec: RunSpec | None = None

    def look(self) -> list[str]:
        """Check record and run file, and note valid new content. A file that was removed or damaged, or a run file that
        describes another run, is restored from its last valid content. Returns a message for each restored one.

        A file that was damaged when this process first read it is not changed. Raises ``OSError`` if one cannot be read
        or written.
        """
        return [message for path, check in self._checks.items() if (message := self._look_at(path, check))]

    def _require_same_run(self) -> None:
        """Raise ``RunDirectoryError`` if the run file cannot be read, or describes another run than at the first
        call: an empty one has every default.
        """
        spec = read_resolved(self._directory)
        if self._spec not in (None, spec):
            raise RunDirectoryError("another run")
        self._spec = spec

    def _look_at(self, path: Path, check: Callable[[], object]) -> str:
        """Check a file against its last valid content, and keep valid new content. If it was removed or damaged,
        write the last valid content back and return a sentence; else, or if there is none, return "".

        Raises ``OSError`` if the file cannot be read or written back.
        """
        valid = self._valid_content.get(path)
        try:
            content = read_small(path)
            if content == valid:
                return ""
            check()
        except FileNotFoundError:
            event = f"{path} was removed"
        except RunDirectoryError:
            event = f"{path} was damaged or changed"
        else:
            self._valid_content[path] = content
            return ""
        if valid is None:
            return ""
        write_atomically(path, valid)
        return f"{event}; it was written again with its earlier content"
