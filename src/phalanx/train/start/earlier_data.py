"""Notices that a run file which began a run before now begins another one, because its dataset was prepared anew since.

A run's identity is its run file and its data's fingerprint, so other tokens are another run, in a folder of its own, which begins at step 0. That is
right, and whoever only packed a dataset anew should hear it before the hours are spent, with what goes on with the old run.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator

from phalanx.run.data_folders import record_of
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.identity import differences
from phalanx.run.spec import RunSpec
from phalanx.train.start.open_run import OpenRun, holds_steps

_ASKED_FOR_BY_DATASETS = ("train.document_mask", "train.targets_within_documents")
"""Fields whose default is what the dataset says."""


def notes_of_earlier_data(run: OpenRun) -> list[str]:
    """A sentence for each unfinished run of this run file on what lay at the same address before; none once this one has saved."""
    if run.spec.run_dir or holds_steps(run.directory):
        return []
    fingerprint = str(run.directory.read_record()["data_fingerprint"])
    pattern = f"{glob.escape(run.spec.name)}-*"
    others = sorted(path for path in run.directory.path.parent.glob(pattern) if path != run.directory.path)
    return [note for path in others for note in _notes(run.spec, fingerprint, RunDirectory(path))]


def _notes(spec: RunSpec, fingerprint: str, other: RunDirectory) -> Iterator[str]:
    try:
        if not holds_steps(other) or other.result.exists():
            return
        record, before = other.read_record(), read_resolved(other)
        step = max(other.committed_steps(), default=0)
    except (RunDirectoryError, OSError):
        return  # a folder that only has such a name, or is not ours to read
    changed = [line.partition(":")[0] for line in differences(before, spec)]
    same_place = all(record.get(name) == value for name, value in record_of(spec.data).items())
    if not same_place or not set(changed) <= set(_ASKED_FOR_BY_DATASETS):
        return
    recorded = str(record.get("data_fingerprint", fingerprint))
    if recorded != fingerprint:
        place = ", ".join(_addresses(spec))
        yield (
            f"{other.path}, at step {step:,}, is of this run file, on what {place} held before ({recorded[:12]}, now {fingerprint[:12]}): the dataset "
            "was prepared anew since, so that this is another run and begins at step 0; to go on with that one, bring its dataset back there"
        )
    elif changed:
        values = " ".join(f"--set {field}={_value(before, field)}" for field in changed)
        yield (
            f"{other.path}, at step {step:,}, is of this run file on the same tokens, before they were packed anew: datasets ask for "
            f"{' and '.join(changed)} since, so that this is another run and begins at step 0; {values} goes on with that one"
        )


def _addresses(spec: RunSpec) -> list[str]:
    return [source.path for source in spec.data.sources] or [spec.data.path]


def _value(spec: RunSpec, field: str) -> str:
    section, _, name = field.partition(".")
    return str(getattr(getattr(spec, section), name)).lower()
