"""Verification: reads a checkpoint folder back in full, and reports everything that is wrong with it.

Every byte is under a checksum that the index leads to; on top of that the boxes must cover their tensors. Streams
block by block with bounded memory, and needs no torch, so that it runs on a storage node.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.format.blocks import BlockFile, storage_errors, verified_blocks
from phalanx.checkpoint.format.box_table import BoxTable, joined
from phalanx.checkpoint.format.errors import CheckpointError, CorruptError, NoSuchStepError
from phalanx.checkpoint.format.index import CatalogRef
from phalanx.checkpoint.tiers.collect import EXTENTS
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.run.directory.paths import CHECKPOINT_INDEX

VerifyProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with a committed step: where, and what with the remedy."""

    step: int
    path: Path
    error: CheckpointError

    def __str__(self) -> str:
        return f"step {self.step}: {self.error}"


def silent(_done_bytes: int, _total_bytes: int) -> None:
    """A progress callback that does nothing."""


def verify(root: Path | str, step: int | None = None, *, progress: VerifyProgress = silent) -> list[Finding]:
    """Everything wrong with committed ``step`` in folder ``root``, or with all of its steps where ``step`` is None.

    An empty list means that every byte is as it was written. ``progress(done_bytes, total_bytes)`` is called after
    each block. Raises NoSuchStepError where there is nothing to verify.
    """
    if not Path(root).is_dir():
        raise NoSuchStepError(f"{root}: no such folder")
    tier = DiskTier(root)
    steps = tier.steps() if step is None else [step]
    if not steps or not all(map(tier.has, steps)):
        raise NoSuchStepError(
            f"{root}: {f'step {step}' if step is not None else 'nothing'} is committed here"
        )
    findings: list[Finding] = []
    catalogs: list[tuple[int, CatalogRef]] = []
    for one in steps:
        step_catalogs, wrong = _catalogs(tier, one)
        catalogs += [(one, ref) for ref in step_catalogs]
        findings += wrong
    total_bytes = sum(ref.data_bytes for _, ref in catalogs)
    done_bytes = 0
    for one, ref in catalogs:
        catalog = tier.catalog(one, ref)
        for image in catalog.images:
            file = BlockFile(tier.folder(one) / image.file, catalog.manifest(image.rank))
            findings += [
                Finding(one, file.path, error)
                for error in _check_file(file, done_bytes, total_bytes, progress)
            ]
            done_bytes += image.nbytes
    return sorted(findings, key=lambda finding: (finding.step, finding.path))


def _catalogs(tier: DiskTier, step: int) -> tuple[list[CatalogRef], list[Finding]]:
    """The good catalogs of a step, and what is wrong with the others, and with the boxes of all together."""
    folder = tier.folder(step)
    try:
        index = tier.index(step)
    except CheckpointError as error:
        return [], [Finding(step, folder / CHECKPOINT_INDEX, error)]
    good: list[CatalogRef] = []
    extents: list[BoxTable] = []
    findings: list[Finding] = []
    for ref in index.catalogs:
        try:
            extents.append(tier.catalog(step, ref).table.merged(ref.first_rank))
            good.append(ref)
        except CheckpointError as error:
            findings.append(Finding(step, folder / ref.file, error))
    try:
        if index.extents_checksum is not None:
            tier.extents(step, index.extents_checksum)
    except CheckpointError as error:
        findings.append(Finding(step, folder / EXTENTS, error))
    try:
        _require_whole(index.step, step, index.world_size, sum(ref.ranks for ref in index.catalogs))
        if not findings:
            joined(extents).merged(0).require_whole()
    except CheckpointError as error:
        findings.append(Finding(step, folder / CHECKPOINT_INDEX, error))
    return good, findings


def _require_whole(recorded_step: int, step: int, world_size: int, manifests: int) -> None:
    if recorded_step != step:
        raise CorruptError(
            f"the index is of step {recorded_step}: the folder was renamed. Give it its own name back."
        )
    if manifests != world_size:
        raise CorruptError(f"{manifests} manifests for {world_size} ranks. Restore another step.")


def _check_file(
    file: BlockFile, done_bytes: int, total_bytes: int, progress: VerifyProgress
) -> Iterator[CheckpointError]:
    manifest = file.manifest
    try:
        with storage_errors(file.path):
            size = file.path.stat().st_size
            _drop_cached(file.path)
    except CheckpointError as error:
        yield error
        return
    if size != manifest.nbytes:
        yield CorruptError(
            f"{file.path}: {size:,} bytes; its manifest says {manifest.nbytes:,}. Restore another step."
        )
    blocks = len(manifest.checksums) if size >= manifest.nbytes else size // manifest.block_bytes
    # The fast path reads ahead; after a bad block it starts again behind it.
    number = 0
    while number < blocks:
        try:
            for _ in verified_blocks((file, later) for later in range(number, blocks)):
                number += 1
                progress(done_bytes + min(number * manifest.block_bytes, manifest.nbytes), total_bytes)
        except CheckpointError as error:
            yield error
            number += 1
            if not isinstance(error, CorruptError):
                return


def _drop_cached(path: Path) -> None:
    """Drops the file from the page cache, so that the disk itself is read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
