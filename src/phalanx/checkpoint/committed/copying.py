"""Verify committed steps, and copy them between tiers, file by file: the copy has the same index and the same bytes.

Several processes can share the work: each copies every n-th file of a draft, and one commits when all files are there. Blocks are
verified while they are copied, so a damaged step is never copied. Files that a draft already has are not copied again.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from phalanx.checkpoint.format.blocks import storage_errors
from phalanx.checkpoint.format.errors import AbandonedError, CheckpointError, NoSuchStepError
from phalanx.checkpoint.format.image import ByteArray
from phalanx.checkpoint.format.manifest import CatalogRef
from phalanx.checkpoint.tiers.catalogued import CataloguedTier, write_record
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier, store_errors
from phalanx.checkpoint.tiers.tier import Draft, never
from phalanx.run.directory.files import files_below, folders_below, sync
from phalanx.run.directory.paths import CHECKPOINT_INDEX

# Verification: committed steps are read back in full, and every problem is reported.
#
# Every byte has a checksum that is reached from the index, and the boxes must cover their tensors. Blocks are streamed with bounded
# memory and without torch, so that verification runs on a storage node.

VerifyProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class StepProblem:
    """A problem of a committed step: the file's path or URL, and the error with its remedy."""

    step: int
    place: str
    error: CheckpointError

    def __str__(self) -> str:
        return f"step {self.step}: {self.error}"


def silent(_done_bytes: int, _total_bytes: int) -> None:
    """Do nothing; a progress callback."""


def verify(
    root: Path | str, step: int | None = None, *, progress: VerifyProgress = silent
) -> list[StepProblem]:
    """Verify ``step`` (``None``: all steps) in the folder ``root`` by ``verify_tier``. Raises NoSuchStepError if
    there is no such folder or step.
    """
    if not Path(root).is_dir():
        raise NoSuchStepError(f"{root}: no such folder")
    return verify_tier(DiskTier(root), str(root), step, progress=progress)


def verify_tier(
    tier: CataloguedTier, name: str, step: int | None = None, *, progress: VerifyProgress = silent
) -> list[StepProblem]:
    """Return all problems of committed ``step`` of ``tier``, or of all of its steps if ``step`` is None.

    An empty list means that every byte is as written. ``progress(done_bytes, total_bytes)`` is called after each
    intact block; ``name`` is the tier's name in messages. Raises NoSuchStepError if there is nothing to verify.
    """
    committed = tier.steps()
    steps = committed if step is None else [step]
    if not steps or not set(steps) <= set(committed):
        raise NoSuchStepError(
            f"{name}: {f'step {step}' if step is not None else 'nothing'} is committed here"
        )
    findings: list[StepProblem] = []
    catalogs: list[tuple[int, CatalogRef]] = []
    for number in steps:
        try:
            good, wrong = tier.wrong_catalogs(number)
        except CheckpointError as error:
            good, wrong = [], [("", error)]
        catalogs += [(number, ref) for ref in good]
        findings += [StepProblem(number, tier.place(number, file), error) for file, error in wrong]
    total_bytes = sum(ref.data_bytes for _, ref in catalogs)
    done_bytes = 0
    for number, ref in catalogs:
        catalog = tier.catalog(number, ref)
        for image in catalog.images:
            place = tier.place(number, image.file)
            for verified_bytes, problem in tier.damage(number, catalog.manifest(image.rank)):
                if problem is None:
                    progress(done_bytes + verified_bytes, total_bytes)
                else:
                    findings.append(StepProblem(number, place, problem))
            done_bytes += image.nbytes
    return sorted(findings, key=lambda finding: (finding.step, finding.place))


_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.2, 5.0


class ObjectDraft:
    """Draft in an object store, by the attempt ``tag``."""

    def __init__(self, tier: ObjectTier, step: int, index: bytes, tag: str) -> None:
        self._tier, self._step, self._index = tier, step, index
        self.folder = tier.draft_folder(step, tag, index)

    def sizes(self) -> dict[str, int]:
        """Return the complete files, with their sizes in bytes."""
        return self._tier.draft_sizes(self.folder)

    def write_image(self, file: str, blocks: Iterator[ByteArray], nbytes: int) -> None:
        """Write a large file from its blocks; each is valid until the next one is taken."""
        # The library takes a block while it still sends the previous one, so each needs separate memory.
        copies = (memoryview(block.tobytes()) for block in blocks)
        with store_errors():
            self._tier.store.put_blocks(f"{self.folder}/{file}", copies, nbytes)

    def write_record(self, file: str, content: bytes) -> None:
        with store_errors():
            self._tier.store.put(f"{self.folder}/{file}", content)

    def commit(self) -> bool:
        """Make the step visible; return False if it exists already, in which case it is unchanged."""
        return self._tier.commit(self._step, self.folder, self._index)


class DiskDraft:
    """Draft in a folder of checkpoints. The next start of a run sweeps away drafts of killed copies."""

    def __init__(self, tier: DiskTier, step: int, index: bytes) -> None:
        self._tier, self._step, self._index = tier, step, index
        self._folder = tier.draft_folder(Draft(step, int.from_bytes(secrets.token_bytes(6))))

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file in the draft, by name."""
        files = files_below(self._folder)
        return {path.relative_to(self._folder).as_posix(): path.stat().st_size for path in files}

    def write_image(self, file: str, blocks: Iterator[ByteArray], nbytes: int) -> None:
        """Write and sync an image of the step in the draft's folder. Raises StorageFullError or StorageError;
        ``nbytes`` is for their messages.
        """
        path = self._path(file)
        with storage_errors(path, nbytes), path.open("wb") as target:
            for block in blocks:
                target.write(block.data)
            target.flush()
            os.fsync(target.fileno())

    def write_record(self, file: str, content: bytes) -> None:
        write_record(self._path(file), content)

    def commit(self) -> bool:
        """Write the index, sync all folders, and rename the draft to the step's folder.

        Return False, and remove the draft, if the step is committed already. Raises StorageError.
        """
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
        """Return the path of a file in the draft, whose folder is made if missing. Raises ``StorageError``."""
        path = self._folder / file
        with storage_errors(path, 1):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path


CopyDraft: TypeAlias = ObjectDraft | DiskDraft
"""A step that is being copied to a tier. Every method raises a CheckpointError if the tier fails."""


class RateLimit:
    """Limit of ``mib_s`` MiB/s on average, by sleeping; 0 means no limit. ``cancelled`` ends a sleep, with AbandonedError.

    ``clock`` returns seconds; ``sleep`` waits for that many.
    """

    def __init__(
        self,
        mib_s: float,
        cancelled: Callable[[], bool] = never,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Limit the copied bytes a second. ``clock`` returns seconds; ``sleep`` waits for them."""
        self._clock, self._sleep = clock, sleep
        self._seconds_per_byte = 1 / (mib_s * (1 << 20)) if mib_s else 0.0
        self._cancelled = cancelled
        self._free_s = 0.0

    def blocks(self, blocks: Iterator[ByteArray]) -> Iterator[ByteArray]:
        """Yield ``blocks``, waiting after each so that the rate is at most the limit. Raises AbandonedError if cancelled."""
        for block in blocks:
            now_s = self._clock()
            self._free_s = max(self._free_s, now_s) + block.nbytes * self._seconds_per_byte
            yield block
            while (wait_s := self._free_s - self._clock()) > 0 and self._seconds_per_byte:
                self._raise_if_cancelled()
                self._sleep(min(wait_s, 0.1))
            self._raise_if_cancelled()

    def _raise_if_cancelled(self) -> None:
        """Raise ``AbandonedError`` if the copy is cancelled."""
        if self._cancelled():
            raise AbandonedError("the copy was cancelled")


def copy_share(
    source: CataloguedTier, step: int, draft: CopyDraft, share: int = 0, shares: int = 1, *, limit: RateLimit
) -> int:
    """Copy this process's share of a step's files into a draft, every ``shares``-th from ``share``, at most as fast
    as ``limit``. Return the number of bytes copied.

    Every block of the source is verified. Images that the draft already has in full size are skipped. Raises
    CorruptError if the source is damaged, AbandonedError if ``limit`` is cancelled, and the errors of source and
    draft.
    """
    draft_sizes = draft.sizes()
    copied_bytes = 0
    for manifest in source.images(step)[share::shares]:
        if draft_sizes.get(manifest.file) == manifest.nbytes:
            continue
        blocks = source.blocks(step, manifest, range(len(manifest.checksums)))
        draft.write_image(manifest.file, limit.blocks(blocks), manifest.nbytes)
        copied_bytes += manifest.nbytes
    for file in source.records(step)[share::shares]:
        content = source.read_file(step, file)
        draft.write_record(file, content)
        copied_bytes += len(content)
    return copied_bytes


def commit_copy(
    source: CataloguedTier,
    step: int,
    draft: CopyDraft,
    *,
    timeout_s: float,
    cancelled: Callable[[], bool] = never,
) -> bool:
    """Wait until all files of a step are in the draft, and commit. Return False if the step was already committed.

    Raises AbandonedError if files are missing after ``timeout_s``, or if ``cancelled()`` becomes true. Polls the
    draft's file sizes.
    """
    expected_sizes: dict[str, int] = {image.file: image.nbytes for image in source.images(step)}
    expected_sizes |= {file: len(source.read_file(step, file)) for file in source.records(step)}
    deadline_s, pause_s = time.monotonic() + timeout_s, _SHORTEST_POLL_S
    while True:
        draft_sizes = draft.sizes()
        absent = [file for file, nbytes in expected_sizes.items() if draft_sizes.get(file) != nbytes]
        if not absent:
            return draft.commit()
        if cancelled():
            raise AbandonedError(f"step {step}: the copy was cancelled")
        if time.monotonic() > deadline_s:
            raise AbandonedError(
                f"step {step}: {len(absent)} of {len(expected_sizes)} files are missing after {timeout_s:g} s (first: {absent[:4]})"
            )
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_POLL_S)


def copy_step(source: CataloguedTier, step: int, target: DiskTier | ObjectTier) -> tuple[bool, int]:
    """Copy a committed step completely.

    Return whether this call committed it, and the number of bytes copied. Does nothing if ``target`` has the step.
    Raises the errors of ``copy_share`` and ``commit_copy``.
    """
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
