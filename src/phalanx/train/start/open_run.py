"""Take the run directory for one start of a run: choose it, lock it, check whose it is, and choose the run's arithmetic.

Its files are named in ``run/directory/paths.py``. By default the folder is named after the run and its identity, so that two runs can never
meet in one folder: an unfinished run continues where it was, a finished one is left alone and the next start gets a fresh folder. A folder
that is named explicitly is only ever continued by the run that it belongs to.

The arithmetic is part of the identity, so a run file that leaves it open (``runtime.numerics = "auto"``) is completed by what the
directory of an earlier start recorded.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import tomli_w

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.object_tier import ObjectTier, require_conditional_store
from phalanx.data.tokenizers.tokenizer import saved_fingerprint
from phalanx.hardware.kernels.compiler import NoHostKernelsError
from phalanx.hardware.portable.build import library_file, unfit_processor
from phalanx.observe.event_log import EventLogError, next_attempt
from phalanx.process.lock_file import LockHeldError, lock_file
from phalanx.process.this_process import host_name
from phalanx.run.directory.files import remove_temporaries, write_atomically
from phalanx.run.directory.paths import FLEET_NAMES, RunDirectory, RunDirectoryError, read_resolved, step_of
from phalanx.run.identity import (
    FIRST_ARITHMETIC,
    changes_since,
    differences,
    extending_command,
    identity,
    identity_record,
    layout_changes,
    read_unchanged,
    run_owned,
    shares_past,
)
from phalanx.run.read import record_of, spec_from_table, to_table
from phalanx.run.rules import ARITHMETIC, not_portable
from phalanx.run.spec import RunSpec
from phalanx.store.open_store import open_store
from phalanx.store.store import MissingObjectError, StoreError, UnavailableError
from phalanx.train.evaluation.tasks import task_file

# Check which run the checkpoints in a store belong to, before a rank starts that could restore them or add to them.
#
# A run writes its resolved run file and the fingerprint of its data to ``ROOT/run.json``, an object that is created only if
# absent. A later start compares it with its own. So a run that has lost its disk resumes from the store under the same URL, and
# another run with the same URL by mistake is refused. The store is probed first: it must refuse to create an existing object.

_log = logging.getLogger(__name__)

OWNER = "run.json"


def claim_store(spec: RunSpec, fingerprint: str, *, has_begun: bool = False) -> list[str]:
    """Claim ``checkpoint.store`` for a resolved run on the data of ``fingerprint``, by an object in it, unless it is
    already the run's. Return the changes of layout against the owner's.

    If the run ``has_begun``, it has checkpoints on disk: an unreachable store is then only logged, and an empty list
    returned. Raises ``RunDirectoryError`` if the store is another run's, has checkpoints of no known run, cannot
    commit, or cannot be reached.
    """
    url = spec.checkpoint.store
    try:
        store = open_store(url)
        require_conditional_store(store)
        try:
            owner = store.get(OWNER)
        except MissingObjectError:
            if ObjectTier(store).steps():
                raise RunDirectoryError(
                    f"checkpoint.store = {url} holds checkpoints, but no {OWNER} names their run; give an empty place. To begin from "
                    "one of them: `phalanx checkpoint copy`, and checkpoint.init_from"
                ) from None
            owner = (
                json.dumps({"data_fingerprint": fingerprint, "run": to_table(spec)}, indent=1) + "\n"
            ).encode()
            store.create(OWNER, owner)
    except (StoreError, CheckpointError) as error:
        if has_begun and isinstance(error.__cause__ or error, UnavailableError):
            _log.warning("checkpoint.store: %s; the run continues with its checkpoints on disk", error)
            return []
        raise RunDirectoryError(f"checkpoint.store: {error}") from error
    return _changes(url, owner, spec, fingerprint)


def _changes(url: str, owner: bytes, spec: RunSpec, fingerprint: str) -> list[str]:
    """Return the changes of layout against the run that owns the store. Raises ``RunDirectoryError`` if that is another run, or
    unreadable."""
    try:
        table = json.loads(owner)
        run = table["run"]
        owners, problems = spec_from_table({**run, "model": {**run.get("model", {}), "preset": ""}}, {})
        recorded = str(table["data_fingerprint"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunDirectoryError(f"{url}/{OWNER} is damaged: {error!r}") from error
    if owners is None:
        raise RunDirectoryError(f"{url}/{OWNER} was written by another version: {problems[0]}")
    changes = layout_changes(owners, spec)
    differing = [line for line in differences(owners, spec) if line not in changes]
    if recorded != fingerprint:
        differing.append(f"the data: {recorded[:12]} != {fingerprint[:12]}")
    if differing:
        raise RunDirectoryError(
            f"checkpoint.store = {url} holds the checkpoints of another run; give another URL:\n"
            + "\n".join(f"  {line}" for line in differing)
        )
    return changes


_PATIENCE_S = 3.0
"""The ranks of a launcher that was just killed are still being ended."""


@dataclass(frozen=True)
class OpenRun:
    """A run directory that this start may write to, for as long as the lock is held."""

    directory: RunDirectory
    spec: RunSpec
    attempt: int
    lock_fd: int
    """Held by every process of this start; the lock is gone when the last of them has ended."""
    layout_changes: tuple[str, ...] = ()
    """The changes in how ranks divide the model since the start before; from here on the bits differ."""


def run_key(spec: RunSpec, fingerprint: str) -> str:
    """The identity of a run together with its data: 64 hexadecimal digits."""
    return key_of(identity(spec), fingerprint)


def key_of(identity_sha256: str, fingerprint: str) -> str:
    """The same of a recorded identity."""
    return hashlib.sha256(f"{identity_sha256} {fingerprint}".encode()).hexdigest()


def _candidates(spec: RunSpec, fingerprint: str) -> Iterator[Path]:
    """Yield directories under ``runs/`` without end: by name and key of the run, then with -2, -3 and so on."""
    base = Path("runs") / f"{spec.name}-{run_key(spec, fingerprint)[:8]}"
    yield base
    number = 2
    while True:
        yield base.with_name(f"{base.name}-{number}")
        number += 1


def choose(spec: RunSpec, fingerprint: str) -> RunDirectory:
    """Return the directory of a run: the one it names, or the first by its identity that has no result or only
    stopped early and now continues. Nothing is created.
    """
    if spec.run_dir:
        return RunDirectory(Path(spec.run_dir))
    unfinished = (
        path
        for path in _candidates(spec, fingerprint)
        if not RunDirectory(path).result.exists() or _continues_early_stop(RunDirectory(path), spec)
    )
    return RunDirectory(next(unfinished))


def _continues_early_stop(directory: RunDirectory, spec: RunSpec) -> bool:
    """Return True if the run ended early, by another rule than that of ``spec``."""
    return directory.finished_result() is not None and directory.complete_result(spec) is None


def open_run(
    spec: RunSpec,
    fingerprint: str,
    tokenizer_folder: Path,
    sources: Mapping[str, str] | None = None,
    template_folder: Path | None = None,
) -> OpenRun:
    """Lock the run's directory for this start, making it on the first. Claim the store, write run file, record,
    tokenizer, template and tasks, remove leftovers, and count the attempt. The lock is kept by the returned
    descriptor.

    ``fingerprint`` is that of the data. ``tokenizer_folder`` and ``template_folder`` are copied, the latter if given.
    ``sources`` has the fingerprint of each source by name, if there are several.

    Raises ``RunDirectoryError`` if the directory belongs to another run, is in use, cannot be written, or its events
    cannot be read.
    """
    directory = choose(spec, fingerprint)
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        lock_fd = take_lock(directory.lock)
        try:
            changes = _check_owner(directory, spec, fingerprint)
            if spec.checkpoint.store:
                claimed = claim_store(spec, fingerprint, has_begun=holds_steps(directory))
                changes += [line for line in claimed if line not in changes]
            _remove_temporaries(directory)
            if _continues_early_stop(directory, spec):
                directory.result.unlink()
            before = directory.read_record()
            attempt = max(next_attempt(directory.events), before.get("attempts", 0), directory.next_journal())
            _copy_tokenizer(tokenizer_folder, directory.tokenizer)
            record = {
                **identity_record(spec),
                "data_fingerprint": fingerprint,
                "tokenizer_fingerprint": _fingerprint_in(directory.tokenizer),
                **({"arithmetic": ARITHMETIC} if spec.runtime.numerics == "portable" else {}),
                **record_of(spec.data),
                **({"data_sources": dict(sources)} if sources else {}),
                "attempts": attempt + 1,
                "layout_changes": [*before.get("layout_changes", []), *changes],
                "lineage": before.get("lineage", []) if holds_steps(directory) else [],
            }
            write_atomically(directory.record, (json.dumps(record, indent=1) + "\n").encode())
            write_atomically(directory.run_file, tomli_w.dumps(to_table(spec)).encode())
            directory.logs.mkdir(exist_ok=True)
            _copy_tasks(spec, directory)
            if template_folder is not None:
                _take_over_template(template_folder, directory.tokenizer)
            _take_over_published(spec.checkpoint.init_from, directory)
        except BaseException:
            os.close(lock_fd)
            raise
    except OSError as error:
        raise RunDirectoryError(f"run directory {directory.path}: {_explain(error)}") from error
    except EventLogError as error:
        raise RunDirectoryError(f"{error}; move it away, and the run continues with a new one") from error
    return OpenRun(directory, spec, attempt, lock_fd, tuple(changes))


def _explain(error: OSError) -> str:
    """Return a clause on a failure to write the run directory, with a remedy for full disks, permissions and bad paths."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; free some space and start again: all that was saved before is intact"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error.strerror}; give another run_dir"
    if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.ENOENT):
        return f"{error.strerror}, so no directory can be made there; give another run_dir"
    return str(error)


def take_lock(path: Path) -> int:
    """Lock a run directory by its file ``lock``, write this process into it, and return the descriptor, which keeps the lock while
    it is open.

    Raises ``RunDirectoryError`` if the lock is taken, and names the holder.
    """
    try:
        return lock_file(path, patience_s=_PATIENCE_S)
    except LockHeldError as error:
        raise RunDirectoryError(
            f"run directory {path.parent} is being trained by {error.holder}; wait for it, or give another run_dir"
        ) from None


def _check_owner(directory: RunDirectory, spec: RunSpec, fingerprint: str) -> list[str]:
    """Check that the directory is this run's, and return the changes of layout since the last start.

    Raises ``RunDirectoryError`` for foreign files without a record. If it has a checkpoint, also for another run, other
    data, or another definition of portable numerics; without one, nothing more is checked and nothing is returned. For
    another run that shares its past, the error has the command that continues it.
    """
    strangers = (
        {entry.name for entry in directory.path.iterdir() if not entry.name.startswith(".")}
        - directory.names()
        - FLEET_NAMES
    )
    if strangers and not directory.record.exists():
        raise RunDirectoryError(
            f"{directory.path} is not a run directory but holds {', '.join(sorted(strangers)[:3])}; "
            "give an empty or new one as run_dir"
        )
    if not holds_steps(directory):
        return []  # nothing was saved here yet
    remedy = "give another run_dir, or undo the change"
    # Read back rather than by the recorded identity: a field that is new in this version has its default there.
    last = read_unchanged(directory)
    changes = layout_changes(last, spec)
    differing = [line for line in differences(last, spec) if line not in changes]
    # Degrees that were changed in the run file of the directory itself.
    changes += [
        f"{change.path}: {change.first!r} != {change.second!r}"
        for change in changes_since(directory.read_record(), last)
    ]
    if differing:
        changed = {line.split(":")[0]: None for line in differing}
        saved = [
            step
            for step in directory.committed_steps()
            if step < spec.train.steps and shares_past(last, spec, step)
        ]
        command = saved and extending_command(
            directory.path, saved[-1], {path: run_owned(spec).get(path) for path in changed}
        )
        child = f"\nto continue from a checkpoint of it with these values:\n  {command}"
        raise RunDirectoryError(
            f"run directory {directory.path} belongs to another run; {remedy}:\n"
            + "\n".join(f"  {line}" for line in differing)
            + (child if command else "")
        )
    arithmetic = directory.read_record().get("arithmetic", FIRST_ARITHMETIC)
    if last.runtime.numerics == "portable" and arithmetic != ARITHMETIC:
        raise RunDirectoryError(
            f"run directory {directory.path} was computed with another definition of portable numerics ({arithmetic}, here {ARITHMETIC}): resume with "
            "the release that it was begun with, or begin another run, which takes its weights over with checkpoint.init_from"
        )
    recorded = directory.read_record().get("data_fingerprint", fingerprint)
    if recorded != fingerprint:
        raise RunDirectoryError(
            f"run directory {directory.path} was trained on other data "
            f"({recorded[:12]}, not {fingerprint[:12]}); {remedy}"
        )
    return changes


def holds_steps(directory: RunDirectory) -> bool:
    """True if there is a step's folder, committed or not: one that has lost its index still means that the run was saved."""
    root = directory.checkpoints
    return root.is_dir() and any(step_of(folder) is not None for folder in root.iterdir())


def _remove_temporaries(directory: RunDirectory) -> None:
    for folder in (directory.path, directory.logs, directory.fleet):
        if folder.is_dir():
            remove_temporaries(folder)


def check_data(directory: RunDirectory, fingerprint: str) -> None:
    """Raise ``RunDirectoryError`` if this rank's data are not those that the run was prepared with."""
    recorded = directory.read_record().get("data_fingerprint", fingerprint)
    if recorded != fingerprint:
        raise RunDirectoryError(
            f"this rank ({host_name()}) finds other data at data.path than the run was prepared with "
            f"({fingerprint[:12]}, not {recorded[:12]}): give every machine the same dataset"
        )


def _copy_tokenizer(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for file in source.glob("tokenizer*.json"):
        shutil.copyfile(file, target / file.name)


def _fingerprint_in(folder: Path) -> str:
    """Return the fingerprint of the tokenizer in ``folder``; empty if it has no complete one."""
    return saved_fingerprint({file.name: file.read_bytes() for file in folder.glob("tokenizer*.json")})


def _copy_tasks(spec: RunSpec, directory: RunDirectory) -> None:
    """Copy the files of the run's tasks into the run directory, from which the ranks of all machines read. A copy
    whose source is gone stays.
    """
    for task in spec.evaluation.tasks:
        source = task_file(task, directory)
        if source != directory.task(task.name):
            directory.tasks.mkdir(exist_ok=True)
            write_atomically(directory.task(task.name), source.read_bytes())


def _take_over_published(init_from: str, directory: RunDirectory) -> None:
    """Copy the publisher's notes and the chat template of the run of ``init_from`` into the run directory, replacing
    notes of an earlier run. Do nothing once the run has saved a step.
    """
    if holds_steps(directory):
        return  # taken over at the first start, and the source may be gone
    shutil.rmtree(directory.published, ignore_errors=True)  # another run's, which saved nothing here
    source = RunDirectory(Path(init_from).parent.parent).published
    if init_from and source.is_dir():
        shutil.copytree(source, directory.published)
    if init_from and (tokenizer := RunDirectory(Path(init_from).parent.parent).tokenizer).is_dir():
        _take_over_template(tokenizer, directory.tokenizer)


def _take_over_template(source: Path, folder: Path) -> None:
    """Copy the chat template into ``folder``. The import is local: agents and coordinators, which open no run, would wait for Jinja."""
    from phalanx.data.chat.encode import take_over_template

    take_over_template(source, folder)


# Numerics of a run whose file leaves them open.
#
# A run that has saved keeps its numerics, and a run that continues another one's training takes over its numerics. Otherwise
# they are portable if possible, so that the bits do not depend on the kind of processor.


def with_numerics(spec: RunSpec, fingerprint: str) -> RunSpec:
    """Return ``spec``, resolved but for ``runtime.numerics``, with "auto" replaced: by what the run or its parent
    began with, else by "portable" if possible on CPUs, else by "native".

    ``fingerprint`` is that of its data. Other values stay.
    """
    if spec.runtime.numerics != "auto":
        return spec
    portable, native = (
        replace(spec, runtime=replace(spec.runtime, numerics=name)) for name in ("portable", "native")
    )
    for candidate in _earlier(portable, native, fingerprint):
        return candidate
    return native if spec.runtime.device == "cuda" or reason_for_native(spec) else portable


def _earlier(portable: RunSpec, native: RunSpec, fingerprint: str) -> Iterator[RunSpec]:
    """Yield the run in each arithmetic in which it, or its parent, has begun already.

    With a ``run_dir`` or a parent, only these are looked at, unreadable ones skipped. Otherwise it is looked for in the
    directories that both arithmetics would choose.
    """
    if native.run_dir or native.checkpoint.init_with == "training":
        places = [Path(native.run_dir)] if native.run_dir else []
        if native.checkpoint.init_with == "training":
            places.append(Path(native.checkpoint.init_from).parent.parent)
        for place in places:
            if not holds_steps(RunDirectory(place)):
                continue
            try:
                recorded = read_resolved(RunDirectory(place)).runtime.numerics
            except RunDirectoryError:
                continue  # it has not begun, or opening it will report the error
            yield portable if recorded == "portable" else native
        return
    for candidate in (portable, native):
        if holds_steps(choose(candidate, fingerprint)):
            yield candidate


def reason_for_native(spec: RunSpec) -> str:
    """Return why a run on CPUs cannot be portable here, as a clause; empty if it can. Compiles the kernels if they are not there yet, in seconds."""
    for path, reason in not_portable(spec):
        return f"{path}: {reason}"
    if reason := unfit_processor():
        return f"portable ones need an x86-64 processor with AVX2 and FMA, or a 64-bit Arm one, and {reason}"
    try:
        library_file()
    except NoHostKernelsError as error:
        return f"the kernels of portable ones cannot be compiled (with gcc and g++): {error}"
    return ""


def note_of_fallback(written: RunSpec, resolved: RunSpec) -> str:
    """Return a sentence for a run whose "auto" numerics became native on CPUs, with the reason; empty for any other."""
    if written.runtime.numerics != "auto" or (resolved.runtime.numerics, resolved.runtime.device) != (
        "native",
        "cpu",
    ):
        return ""
    reason = reason_for_native(resolved)
    return reason and f"numerics are native, so the weights' bits belong to this kind of processor; {reason}"
