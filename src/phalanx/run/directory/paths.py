"""Names of the files in a run directory and of the committed checkpoints in it, in one place.

    runs/quickstart-1f3a9c04/
        run.toml          the resolved run file: every field with its value
        record.json       the run's identity and its data's fingerprint
        events.jsonl      all that happened; the display and the curve are drawn from it
        steps.bin         the numbers of logged steps again, for fast curves; only a cache (observe/event_log.py)
        ranks.bin         what each rank measured of itself, window after window (observe/rank_stream.py)
        checkpoints/      committed steps: step-00000100/checkpoint.json and so on
        tokenizer/        a copy of the tokenizer, so that the folder can generate text by itself
        published/        of an imported model: its publisher's files, without the weights
        logs/             what each process printed and logged, as lines of JSON, and why it failed
        code/             changes of the code against its commit, and the packages that were installed
        machines/         hardware, driver and libraries of every node
        serving/          notes of the servers of its weights
        packs/            weights of single steps in the order of their layers, for serving (checkpoint/pack/)
        labels.json       tags and a note that people gave it
        loss.svg, result.json

A step is committed if and only if its folder has an index, ``checkpoint.json``: the folder gets its name by one rename, as
the last thing that a save does (``checkpoint/tiers/disk.py``). So steps can be listed without opening a file.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from phalanx.run.directory.files import plain_json, read_small, write_atomically
from phalanx.run.fields import listing
from phalanx.run.read import RUN_FILE, spec_from_table
from phalanx.run.spec import RunSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx.run.fields import JsonObject


CHECKPOINT_INDEX = "checkpoint.json"
"""The file that makes a step's folder a committed checkpoint."""
FLEET_NAMES = frozenset(
    ("targets", "fleet", "fleet.json", "fleet.token", "fleet.operator-token", "faults", "launch")
)
"""The names of what a fleet and its engine put into a run directory beside ``RunDirectory.names``."""
_STEP = re.compile(r"step-(\d{8,})")
_JOURNAL = re.compile(r"journal-(\d+)\.jsonl")


class RunDirectoryError(RuntimeError):
    """The run directory cannot be used; the message has the reason and the remedy."""


class DamagedRecordError(RunDirectoryError):
    """``record.json`` is damaged."""


def step_folder(root: Path, step: int) -> Path:
    """The folder of a committed step in the folder of checkpoints ``root``: ``root/step-00000100``."""
    return root / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint's folder is named after; ``None`` if it has no such name."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def is_committed(folder: Path) -> bool:
    """True if ``folder`` is a committed checkpoint."""
    return step_of(folder) is not None and (folder / CHECKPOINT_INDEX).exists()


def committed_steps(root: Path) -> list[int]:
    """The steps that are committed in the folder of checkpoints ``root``, oldest first. Raises ``OSError``."""
    folders = [root / name for name in os.listdir(root)]
    return sorted(
        step for folder in folders if (step := step_of(folder)) is not None and is_committed(folder)
    )


def locate_checkpoints(path: Path, step: int | None = None) -> tuple[Path, int | None]:
    """The folder of checkpoints that ``path`` stands for, and the step that is meant: that of ``path``, or ``step``.

    ``path`` is a run directory, a folder of checkpoints, or one committed checkpoint; there need not be any.
    Raises ``RunDirectoryError`` if ``path`` is a checkpoint of another step than ``step``.
    """
    if is_committed(path):
        named = step_of(path)
        if step is not None and step != named:
            raise RunDirectoryError(
                f"{path} is the checkpoint of step {named}, not {step}; leave the step out"
            )
        return path.parent, named
    inside = RunDirectory(path).checkpoints
    return (inside if inside.is_dir() else path), step


def is_published(folder: Path) -> bool:
    """True if ``folder`` holds a model of Hugging Face, and is no run directory."""
    return (folder / "config.json").is_file() and not (folder / RUN_FILE).exists()


def import_first(folder: Path) -> str:
    """The rest of a sentence on ``folder``, which is no run directory, with the command that makes it one; empty unless it holds a model of Hugging Face."""
    if not (folder / "config.json").exists():
        return ""
    return f"; a model of Hugging Face has to be made one first: phalanx import {shlex.quote(str(folder))} --out RUN_DIR"


@dataclass(frozen=True)
class RunDirectory:
    """The names in a run directory, and its small records."""

    path: Path

    @property
    def run_file(self) -> Path:
        """The resolved run file."""
        return self.path / RUN_FILE

    @property
    def record(self) -> Path:
        """Identity and data fingerprint."""
        return self.path / "record.json"

    @property
    def events(self) -> Path:
        """The event stream."""
        return self.path / "events.jsonl"

    @property
    def steps(self) -> Path:
        """The index of the logged steps in the event stream."""
        return self.path / "steps.bin"

    @property
    def ranks(self) -> Path:
        """The stream of the ranks' own numbers."""
        return self.path / "ranks.bin"

    @property
    def checkpoints(self) -> Path:
        """The root of the disk tier."""
        return self.path / "checkpoints"

    @property
    def weights_elsewhere(self) -> Path:
        """The file that is in the place of ``checkpoints`` where a published model's own files hold the weights."""
        return self.path / "weights.json"

    @property
    def tokenizer(self) -> Path:
        """The copy of the tokenizer."""
        return self.path / "tokenizer"

    @property
    def published(self) -> Path:
        """The publisher's own files of the imported model that the run is, or started from; it exists only for such a run."""
        return self.path / "published"

    @property
    def logs(self) -> Path:
        """The folder of logs: the output of each rank and node."""
        return self.path / "logs"

    @property
    def fleet(self) -> Path:
        """The folder of a fleet's journals, one for each attempt; it exists once a coordinator has run."""
        return self.path / "fleet"

    @property
    def targets(self) -> Path:
        """The folder of files with the addresses of metrics of a fleet's processes (``observe/metrics/endpoint.py``)."""
        return self.path / "targets"

    @property
    def curve(self) -> Path:
        """The loss curve."""
        return self.path / "loss.svg"

    @property
    def result(self) -> Path:
        """The final result; it exists once the run is complete."""
        return self.path / "result.json"

    @property
    def code(self) -> Path:
        """The folder of patches against the commit that the code is of, and of lists of installed packages."""
        return self.path / "code"

    @property
    def machines(self) -> Path:
        """The folder of what each node's machine is."""
        return self.path / "machines"

    @property
    def labels(self) -> Path:
        """Tags and a note that people gave the run."""
        return self.path / "labels.json"

    @property
    def profiles(self) -> Path:
        """The folder of profiles: what was recorded of a few steps, each in a folder of its own; it exists once one was requested."""
        return self.path / "profiles"

    @property
    def packs(self) -> Path:
        """The folder of packs, weights in the order in which they are read for serving; it exists once a step was packed."""
        return self.path / "packs"

    @property
    def serving(self) -> Path:
        """The folder of notes of servers of the run's weights; it exists once one has served (``observe/record/notes.py``)."""
        return self.path / "serving"

    @property
    def lock(self) -> Path:
        """The file that a start of the run holds locked."""
        return self.path / "lock"

    def names(self) -> set[str]:
        """The names of all that a run without a fleet puts here."""
        own = (
            *(self.lock, self.run_file, self.record, self.events, self.steps, self.ranks, self.checkpoints),
            *(self.tokenizer, self.published, self.logs, self.curve, self.result, self.profiles),
            *(self.labels, self.code, self.machines, self.packs, self.serving),
        )
        return {path.name for path in own}

    def log(self, attempt: int, rank: int) -> Path:
        """The log of one rank in one attempt."""
        return self.named_log(attempt, f"rank-{rank:05d}")

    def named_log(self, attempt: int, name: str) -> Path:
        """The log of the process ``name`` in one attempt, as ``phalanx.observe.logs`` writes it."""
        return self.logs / f"attempt-{attempt:03d}-{name}.jsonl"

    def committed_steps(self) -> list[int]:
        """The steps with a committed checkpoint, oldest first. Raises ``OSError``."""
        return committed_steps(self.checkpoints) if self.checkpoints.is_dir() else []

    def read_record(self) -> JsonObject:
        """The content of ``record.json``; empty if there is none.

        Raises ``DamagedRecordError`` if it is damaged: without it nobody knows which data the run was trained on, or how often it was
        started.
        """
        try:
            record = plain_json(read_small(self.record))
            if isinstance(record, dict) and isinstance(record.get("attempts"), int):
                return record
            reason = "it does not say how often the run was started"
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            reason = str(error)
        raise DamagedRecordError(
            f"{self.record} is damaged ({reason}): put a copy back, or remove it, if you are sure that the data are those that the run was "
            "trained on"
        )

    def journal(self, attempt: int) -> Path:
        """The journal of a fleet's coordinator in one attempt."""
        return self.fleet / f"journal-{attempt:03d}.jsonl"

    def next_journal(self) -> int:
        """The lowest attempt without a journal, nor one of a later attempt: a new attempt must not replay an old one."""
        names = os.listdir(self.fleet) if self.fleet.is_dir() else []
        numbers = [int(match[1]) for name in names if (match := _JOURNAL.fullmatch(name))]
        return max(numbers, default=-1) + 1

    def newest_attempt(self) -> int:
        """The number of the newest start that took this directory. Raises ``RunDirectoryError`` if nobody ever did."""
        started = self.read_record().get("attempts", 0)
        if not started:
            raise RunDirectoryError(f"{self.path} is no run directory: nobody has started a run there yet")
        return int(started) - 1

    def finished_result(self) -> RunResult | None:
        """The result of a complete run, or ``None``."""
        return read_result(read_small_json(self.result))

    def write_result(self, result: RunResult) -> None:
        """Marks the run complete."""
        write_atomically(self.result, (json.dumps(result.to_json(), indent=1) + "\n").encode())


def read_small_json(path: Path) -> JsonObject:
    """A small JSON object; empty if the file is missing or damaged (it can be made anew)."""
    try:
        value = plain_json(read_small(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_resolved(directory: RunDirectory) -> RunSpec:
    """The resolved run of a run directory.

    Raises ``RunDirectoryError`` if there is none, or if its run file is not one of this version: damaged, or written by a
    version that named a field differently.
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
    # Runs from before there was a choice of numerics are native.
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


# The result of a finished run, as it is compared, printed and written to ``result.json``.


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a finished run. Fields with a default may be missing from a file of an older version."""

    run_dir: str = ""
    step: int
    loss: float | None = None
    """Training loss of the last step whose loss was finite, in nats a token."""
    tokens: int = 0
    """Training tokens over the whole run."""
    tokens_per_s: float | None = None
    """Tokens per second in the median step."""
    mfu: float | None = None
    peak_flops_per_s: float = 0.0
    """The rate of all ranks together that counts as 100% MFU."""
    peak_source: str = ""
    held_out_loss: float | None = None
    """Nats a token, in the last evaluation; ``None`` if the dataset holds no text out."""
    bits_per_byte: float | None = None
    """Bits needed for a byte of the held-out text."""
    xz_bits_per_byte: float | None = None
    """The same for ``xz -9`` on that text."""
    ranks: int = 0
    memory_bytes: dict[str, int] = field(default_factory=dict)
    """Measured device memory by kind, on the rank that holds most of it."""
    layout: dict[str, int] = field(default_factory=dict)
    """The degree of each parallel axis."""
    weights_sha256: str

    def to_json(self) -> dict[str, object]:
        """The fields as a JSON object."""
        return asdict(self)


def read_result(table: Mapping[str, object]) -> RunResult | None:
    """The result in a JSON object; ``None`` if it is not that of a finished run."""
    try:
        return msgspec.convert(table, RunResult)
    except msgspec.ValidationError:
        return None


# The keeper of the small files of a run directory while a fleet runs: ``record.json`` and the resolved run file.
#
# A start of a run on a damaged one is refused, since nobody then knows which data the run was trained on, or which run it is. A fleet that
# runs does know: its coordinator, and its launcher before it starts a process again, remember the last good content, tell of the damage by name,
# and write the file anew, before a process that begins has to read it. A file that says the same in other words is left as it is.


class DirectoryKeeper:
    """Remembers the small files of a run directory, and mends them."""

    def __init__(self, directory: RunDirectory) -> None:
        self._checks: dict[Path, Callable[[], object]] = {
            directory.record: directory.read_record,
            directory.run_file: self._require_same_run,
        }
        self._directory = directory
        self._kept: dict[Path, bytes] = {}
        self._spec: RunSpec | None = None

    def look(self) -> list[str]:
        """Check the files, and write again which of them is damaged or removed; returns lines to log.

        A file that was damaged before this process first saw it stays as it is. Raises ``OSError`` if one cannot be read or written.
        """
        return [line for path, check in self._checks.items() if (line := self._look_at(path, check))]

    def _require_same_run(self) -> None:
        """Raises ``RunDirectoryError`` if the run file cannot be read, or describes another run: an empty one has every default."""
        spec = read_resolved(self._directory)
        if self._spec not in (None, spec):
            raise RunDirectoryError("another run")
        self._spec = spec

    def _look_at(self, path: Path, check: Callable[[], object]) -> str:
        kept = self._kept.get(path)
        try:
            content = read_small(path)
            if content == kept:
                return ""
            check()
        except FileNotFoundError:
            damage = f"{path} was removed"
        except RunDirectoryError:
            damage = f"{path} was damaged or changed"
        else:
            self._kept[path] = content
            return ""
        if kept is None:
            return ""
        write_atomically(path, kept)
        return f"{damage}; it has been written anew as it was"
