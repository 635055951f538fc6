"""Verify committed steps, and copy them from place to place, file by file: the copy has the same index and the same bytes.

Several processes can share the work: each copies every n-th file of a draft, and one commits when all files are there. Blocks are checked
on the way, so a copy is never made of damage. What is in a draft already is not copied again.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phalanx.checkpoint.format.blocks import storage_errors
from phalanx.checkpoint.format.errors import AbandonedError, CheckpointError, NoSuchStepError
from phalanx.checkpoint.format.image import ByteArray
from phalanx.checkpoint.format.manifest import CatalogRef
from phalanx.checkpoint.tiers.catalogued import CatalogReader, StepFiles, write_record
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier, store_errors
from phalanx.checkpoint.tiers.tier import Draft, never
from phalanx.run.directory.files import files_below, folders_below, sync
from phalanx.run.directory.paths import CHECKPOINT_INDEX

# Verification: committed steps read back in full, with a report of everything that is wrong with them.
#
# Every byte is under a checksum that the index leads to; on top of that the boxes must cover their tensors. Streams
# block by block with bounded memory, and needs no torch, so that it runs on a storage node.

VerifyProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with a committed step: the file's path or URL, and what is wrong with the remedy."""

    step: int
    place: str
    error: CheckpointError

    def __str__(self) -> str:
        return f"step {self.step}: {self.error}"


class VerifiableTier(StepFiles, Protocol):
    """A tier whose committed steps have an index and catalogs."""

    @property
    def reader(self) -> CatalogReader:
        """Looks into the steps."""
        ...

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""
        ...


def silent(_done_bytes: int, _total_bytes: int) -> None:
    """A progress callback that does nothing."""


def verify(root: Path | str, step: int | None = None, *, progress: VerifyProgress = silent) -> list[Finding]:
    """``verify_tier`` of the checkpoints in the folder ``root``."""
    if not Path(root).is_dir():
        raise NoSuchStepError(f"{root}: no such folder")
    return verify_tier(DiskTier(root), str(root), step, progress=progress)


def verify_tier(
    tier: VerifiableTier, name: str, step: int | None = None, *, progress: VerifyProgress = silent
) -> list[Finding]:
    """Everything wrong with committed ``step`` of ``tier``, or with all of its steps where ``step`` is None.

    An empty list means that every byte is as it was written. ``progress(done_bytes, total_bytes)`` is called after
    each block; ``name`` is the tier's in messages. Raises NoSuchStepError where there is nothing to verify.
    """
    there = tier.steps()
    steps = there if step is None else [step]
    if not steps or not set(steps) <= set(there):
        raise NoSuchStepError(
            f"{name}: {f'step {step}' if step is not None else 'nothing'} is committed here"
        )
    findings: list[Finding] = []
    catalogs: list[tuple[int, CatalogRef]] = []
    for one in steps:
        try:
            good, wrong = tier.reader.wrong_catalogs(one)
        except CheckpointError as error:
            good, wrong = [], [("", error)]
        catalogs += [(one, ref) for ref in good]
        findings += [Finding(one, tier.place(one, file), error) for file, error in wrong]
    total_bytes = sum(ref.data_bytes for _, ref in catalogs)
    done_bytes = 0
    for one, ref in catalogs:
        catalog = tier.reader.catalog(one, ref)
        for image in catalog.images:
            place = tier.place(one, image.file)
            for looked_at_bytes, problem in tier.damage(one, catalog.manifest(image.rank)):
                if problem is None:
                    progress(done_bytes + looked_at_bytes, total_bytes)
                else:
                    findings.append(Finding(one, place, problem))
            done_bytes += image.nbytes
    return sorted(findings, key=lambda finding: (finding.step, finding.place))


_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.2, 5.0


class CopyDraft(Protocol):
    """A step that is being copied to its place. Every method raises a CheckpointError where the place fails."""

    def sizes(self) -> dict[str, int]:
        """The files that are there whole, with their sizes in bytes."""
        ...

    def write_image(self, file: str, blocks: Iterator[ByteArray], nbytes: int) -> None:
        """Writes a large file from its blocks; each is valid until the next one is taken."""
        ...

    def write_record(self, file: str, content: bytes) -> None:
        """Writes a small file."""
        ...

    def commit(self) -> bool:
        """Makes the step visible; False if it is there already, which stays."""
        ...


class ObjectDraft:
    """A draft in an object store, of the attempt ``tag``."""

    def __init__(self, tier: ObjectTier, step: int, index: bytes, tag: str) -> None:
        self._tier, self._step, self._index = tier, step, index
        self.folder = tier.draft_folder(step, tag, index)

    def sizes(self) -> dict[str, int]:
        return self._tier.draft_sizes(self.folder)

    def write_image(self, file: str, blocks: Iterator[ByteArray], nbytes: int) -> None:
        # The library takes a block while the one before is still on its way, so each needs memory of its own.
        copies = (memoryview(block.tobytes()) for block in blocks)
        with store_errors():
            self._tier.store.put_blocks(f"{self.folder}/{file}", copies, nbytes)

    def write_record(self, file: str, content: bytes) -> None:
        with store_errors():
            self._tier.store.put(f"{self.folder}/{file}", content)

    def commit(self) -> bool:
        return self._tier.commit(self._step, self.folder, self._index)


class DiskDraft:
    """A draft in a folder of checkpoints; whatever a killed copy leaves there, the next start of a run sweeps away."""

    def __init__(self, tier: DiskTier, step: int, index: bytes) -> None:
        self._tier, self._step, self._index = tier, step, index
        self._folder = tier.draft_folder(Draft(step, int.from_bytes(secrets.token_bytes(6))))

    def sizes(self) -> dict[str, int]:
        files = files_below(self._folder)
        return {path.relative_to(self._folder).as_posix(): path.stat().st_size for path in files}

    def write_image(self, file: str, blocks: Iterator[ByteArray], nbytes: int) -> None:
        path = self._path(file)
        with storage_errors(path, nbytes), path.open("wb") as target:
            for block in blocks:
                target.write(block.data)
            target.flush()
            os.fsync(target.fileno())

    def write_record(self, file: str, content: bytes) -> None:
        write_record(self._path(file), content)

    def commit(self) -> bool:
        self.write_record(CHECKPOINT_INDEX, self._index)
        with storage_errors(self._folder, 1):
            for folder in folders_below(self._folder):
                sync(folder)
            try:
                os.rename(self._folder, self._tier.folder(self._step))
            except OSError:
                if not self._tier.has(self._step):
                    raise
                shutil.rmtree(self._folder, ignore_errors=True)
                return False
            sync(self._tier.root)
        return True

    def _path(self, file: str) -> Path:
        path = self._folder / file
        with storage_errors(path, 1):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path


class RateLimit:
    """At most ``mib_s`` MiB/s on average, by sleeping; 0 is no limit. ``cancelled`` ends a sleep, with AbandonedError.

    ``clock`` returns seconds, which pass while ``sleep`` is called with them.
    """

    def __init__(
        self,
        mib_s: float,
        cancelled: Callable[[], bool] = never,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._seconds_per_byte = 1 / (mib_s * (1 << 20)) if mib_s else 0.0
        self._cancelled = cancelled
        self._free_s = 0.0

    def blocks(self, blocks: Iterator[ByteArray]) -> Iterator[ByteArray]:
        """``blocks``, each when its turn has come."""
        for block in blocks:
            now_s = self._clock()
            self._free_s = max(self._free_s, now_s) + block.nbytes * self._seconds_per_byte
            yield block
            while (wait_s := self._free_s - self._clock()) > 0 and self._seconds_per_byte:
                self._require_wanted()
                self._sleep(min(wait_s, 0.1))
            self._require_wanted()

    def _require_wanted(self) -> None:
        if self._cancelled():
            raise AbandonedError("the copy was cancelled")


def copy_share(
    source: VerifiableTier, step: int, draft: CopyDraft, share: int = 0, shares: int = 1, *, limit: RateLimit
) -> int:
    """Copies this process's part of a step's files into a draft: every ``shares``-th. Returns the bytes that were copied.

    Raises CorruptError where the source is damaged, and whatever source or draft raise.
    """
    there = draft.sizes()
    copied_bytes = 0
    for manifest in source.reader.images(step)[share::shares]:
        if there.get(manifest.file) == manifest.nbytes:
            continue
        blocks = source.blocks(step, manifest, range(len(manifest.checksums)))
        draft.write_image(manifest.file, limit.blocks(blocks), manifest.nbytes)
        copied_bytes += manifest.nbytes
    for file in source.reader.records(step)[share::shares]:
        content = source.read_file(step, file)
        draft.write_record(file, content)
        copied_bytes += len(content)
    return copied_bytes


def commit_copy(
    source: VerifiableTier,
    step: int,
    draft: CopyDraft,
    *,
    timeout_s: float,
    cancelled: Callable[[], bool] = never,
) -> bool:
    """Waits until all files of a step are in the draft, and commits; False if the step was there already.

    Raises AbandonedError where others have not brought theirs after ``timeout_s``, or ``cancelled()`` turns true.
    """
    wanted: dict[str, int] = {image.file: image.nbytes for image in source.reader.images(step)}
    wanted |= {file: len(source.read_file(step, file)) for file in source.reader.records(step)}
    deadline_s, pause_s = time.monotonic() + timeout_s, _SHORTEST_POLL_S
    while True:
        there = draft.sizes()
        absent = [file for file, nbytes in wanted.items() if there.get(file) != nbytes]
        if not absent:
            return draft.commit()
        if cancelled():
            raise AbandonedError(f"step {step}: the copy was cancelled")
        if time.monotonic() > deadline_s:
            raise AbandonedError(
                f"step {step}: {len(absent)} of {len(wanted)} files are not there after {timeout_s:g} s (first: {absent[:4]})"
            )
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_POLL_S)


def copy_step(source: VerifiableTier, step: int, target: DiskTier | ObjectTier) -> tuple[bool, int]:
    """Copies a committed step, whole; True if it was not there yet, and the bytes that were copied."""
    if target.has(step):
        return False, 0
    index = source.index_bytes(step)
    draft: CopyDraft
    if isinstance(target, ObjectTier):
        draft = ObjectDraft(target, step, index, f"copy{secrets.token_hex(6)}")
    else:
        draft = DiskDraft(target, step, index)
    copied_bytes = copy_share(source, step, draft, limit=RateLimit(0))
    return commit_copy(source, step, draft, timeout_s=0), copied_bytes
