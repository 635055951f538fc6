"""A tier on a file system: one safetensors file per rank, committed by one rename.

    <root>/step-00000100/checkpoint.json               the index: step, extra, catalogs and their checksums
    <root>/step-00000100/ranks-00000.catalog           manifests of up to 256 ranks: boxes, offsets, a checksum for each 8 MiB
    <root>/step-00000100/rank-00000.safetensors        the bytes of a rank
    <root>/step-00000100/ranks-00256/...               those of ranks 256 to 511, whose catalog is ranks-00256.catalog; and so on
    <root>/step-00000100/extents.catalog               if there are several catalogs: the extents of each
    <root>/.partial-step-00000100-3/                   a draft of attempt 3
    <root>/.partial-step-00000100-3/manifests-00000/   the ranks' manifests, until they are in a catalog
    <root>/.deleting-.../                              being removed

Ranks meet only here. Each writes its file and manifest durably into the draft. The first of every 256 joins the manifests of its group.
Rank 0 waits for all groups (``catalogued.py``), writes the index and renames the folder. So a folder named ``step-...`` with an index is
complete after any crash, and its files are never rewritten. A folder is renamed before it is removed, so that it disappears at once.
"""

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint.format.blocks import (
    BLOCK_BYTES,
    BlockFile,
    require_room,
    storage_errors,
    write_blocks,
)
from phalanx.checkpoint.format.boxes import DISK, Box
from phalanx.checkpoint.format.errors import CheckpointError, NoSuchStepError, StorageError
from phalanx.checkpoint.format.image import ByteArray, Image, ImageEntry, encode_table, table_of
from phalanx.checkpoint.format.manifest import Index, Manifest, catalog_of, encode_index
from phalanx.checkpoint.tiers.catalogued import (
    CATALOG_RANKS,
    DELETING,
    CataloguedTier,
    Collector,
    WaitLimit,
    leave_failure,
    leave_manifest,
    require_size,
    write_record,
)
from phalanx.checkpoint.tiers.tier import Draft, StepRecord, always, never
from phalanx.run.directory.files import files_below, sync
from phalanx.run.directory.paths import CHECKPOINT_INDEX, committed_steps, is_committed, step_folder

_log = logging.getLogger(__name__)
_PARTIAL = re.compile(r"\.partial-step-(\d{8,})-(\d+)")


class DiskTier(CataloguedTier):
    """Checkpoints in the folder ``root``, which is created if it is missing.

    Images are written and verified in blocks of ``block_bytes``. One rank joins ``catalog_ranks`` manifests in a catalog, so that number must
    be the same on all of them. A commit first checks that the ranks' boxes cover every tensor that they name.
    """

    def __init__(
        self, root: Path | str, *, block_bytes: int = BLOCK_BYTES, catalog_ranks: int = CATALOG_RANKS
    ) -> None:
        """Open the tier in the folder ``root``, which is created if missing. Images have blocks of ``block_bytes``,
        and catalogs up to ``catalog_ranks`` ranks. Raises ``StorageError``.
        """
        super().__init__("disk", DISK)
        self.root = Path(root)
        self._block_bytes = block_bytes
        self._collector = Collector(catalog_ranks)
        self._packed: tuple[tuple[ImageEntry, ...], int, bytes] | None = None
        with storage_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)

    def folder(self, step: int) -> Path:
        """Return the folder of a committed step, which may not exist yet."""
        return step_folder(self.root, step)

    def draft_folder(self, draft: Draft) -> Path:
        """Return the folder in which a draft is written."""
        return self.root / f".partial-step-{draft.step:08d}-{draft.attempt}"

    # Saving

    def write(self, draft: Draft, rank: int, image: Image, *, cancelled: Callable[[], bool] = never) -> None:
        """Write a rank's image to the draft's folder, durably, then its manifest.

        Raises StorageFullError, StorageError, or AbandonedError if ``cancelled()`` becomes true.
        """
        folder = self.draft_folder(draft)
        # The image is written first, durably; the manifest last and by a rename, so it implies that all of the rank's bytes exist.
        data = image.data[: image.layout.nbytes]
        place = self._collector.image_folder(rank)
        file = f"{place}/rank-{rank:05d}.safetensors".lstrip("/")
        with storage_errors(folder, data.nbytes):
            self._make(folder / place)
        require_room(folder, data.nbytes)
        written = write_blocks(
            folder / file,
            data,
            block_bytes=self._block_bytes,
            cancelled=cancelled,
        )
        manifest = Manifest(
            rank, file, data.nbytes, self._block_bytes, written.checksums, image.layout.entries
        )
        place = self._collector.manifest_folder(rank)
        leave_manifest(folder / place, catalog_of(manifest, self._packed_table(manifest.entries, rank)))

    def _packed_table(self, entries: tuple[ImageEntry, ...], rank: int) -> bytes:
        """Return the table of a rank's boxes; cached, because it is the same at every save."""
        cached = self._packed
        if cached is None or cached[0] is not entries or cached[1] != rank:
            cached = self._packed = entries, rank, encode_table(table_of(entries, rank))
        return cached[2]

    def _make(self, folder: Path) -> None:
        """Create a draft's folder, and the root again if it was removed, so that later saves do not fail.

        Raises StorageError if the folder of the root is gone too.
        """
        if not self.root.parent.is_dir():
            raise StorageError(
                f"{self.root.parent}: is gone, renamed or removed, so nothing can be saved. Move it back; the next save tries again."
            )
        self.root.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True, parents=True)

    def fail(self, draft: Draft, rank: int, reason: str) -> None:
        """Record in the draft that a rank could not write; the ranks that wait for it then give up."""
        folder = self.draft_folder(draft)
        with storage_errors(folder, len(reason)):
            self._make(folder)
            leave_failure(folder, rank, reason)

    def collect(
        self,
        draft: Draft,
        rank: int,
        world_size: int,
        *,
        timeout_s: float,
        cancelled: Callable[[], bool] = never,
    ) -> None:
        """Write the catalog of the group that ``rank`` leads, after all its members have written; other ranks do
        nothing.

        A failure is recorded in the draft and raised. Rank 0's group is collected by ``commit``.
        """
        if rank == 0 or not self._collector.leads(rank):
            return
        folder = self.draft_folder(draft)
        try:
            summary = self._collector.collect(folder, rank, world_size, WaitLimit(timeout_s, cancelled))
            self._collector.summarize(folder, summary)
            self._collector.clear_away()
        except CheckpointError as error:
            if folder.is_dir():  # else the draft was abandoned, and no rank waits
                with suppress(CheckpointError):
                    self.fail(draft, rank, str(error))
            raise

    def commit(
        self,
        draft: Draft,
        record: StepRecord,
        *,
        timeout_s: float,
        required: Sequence[Box] = (),
        authorize: Callable[[], None] = always,
        cancelled: Callable[[], bool] = never,
    ) -> int:
        """Wait for all ranks, write the index, and rename the draft to the step's folder. Return the bytes of data.

        Raises NotCoveredError if elements are missing, AbandonedError after ``timeout_s``; any error removes the draft.
        Success removes this attempt's drafts of earlier steps. ``authorize`` is called before the rename and may raise.
        """
        folder = self.draft_folder(draft)
        try:
            # 1. Every rank's manifest exists, so every rank's bytes do, in files of the right size.
            # 2. Together they cover every tensor.
            catalogs, extents = self._collector.gather(
                folder, record.world_size, required, WaitLimit(timeout_s, cancelled)
            )
            index = Index(
                step=record.step,
                attempt=draft.attempt,
                world_size=record.world_size,
                extra=record.extra,
                weights_sha256=record.weights_sha256,
                catalogs=catalogs,
                extents_checksum=extents,
            )
            # 3. Write the index, durably, into the draft, which readers ignore.
            write_record(folder / CHECKPOINT_INDEX, encode_index(index))
            authorize()
            # 4. One rename makes the step visible: before it there is a draft, after it a complete checkpoint.
            self._publish(folder, draft.step)
            self._drop_earlier(draft)
            self._collector.clear_away()
        except BaseException:
            self._discard(folder)
            raise
        return sum(ref.data_bytes for ref in catalogs)

    def _publish(self, folder: Path, step: int) -> None:
        """Rename the draft to the step's folder.

        Drop it if the step is committed; set an incomplete folder of that name aside, with a warning. Raises
        StorageError.
        """
        with storage_errors(folder, 1):
            try:
                os.rename(folder, self.folder(step))
            except OSError:
                # A non-empty folder of that name: if an earlier attempt has committed the step, that one stays.
                if self.has(step):
                    self._discard(folder)
                elif self.folder(step).exists():
                    _log.warning("%s is not a complete checkpoint: it is set aside", self.folder(step))
                    self.set_aside(step)
                    os.rename(folder, self.folder(step))
                else:
                    raise
            sync(self.root)

    def _drop_earlier(self, draft: Draft) -> None:
        """Remove this attempt's drafts of earlier steps: every rank has written this step, so no rank still writes an earlier one."""
        with storage_errors(self.root):
            names = os.listdir(self.root)
        for match in filter(None, map(_PARTIAL.fullmatch, names)):
            if int(match[1]) < draft.step and int(match[2]) == draft.attempt:
                self._discard(self.root / match[0])

    # Listing

    def steps(self) -> list[int]:
        with storage_errors(self.root):
            return committed_steps(self.root)

    def has(self, step: int) -> bool:
        return is_committed(self.folder(step))

    def index_bytes(self, step: int) -> bytes:
        """Return the step's encoded index; raises NoSuchStepError if the step is not committed."""
        path = self.folder(step) / CHECKPOINT_INDEX
        if not path.exists():
            steps = self.steps()
            raise NoSuchStepError(f"{self.root}: step {step} is not committed; committed: {steps or 'none'}")
        with storage_errors(path):
            return path.read_bytes()

    def data_bytes(self, step: int) -> int:
        """Return the bytes of all files of a step."""
        folder = self.folder(step)
        with storage_errors(folder):
            return sum(file.stat().st_size for file in files_below(folder) if file.is_file())

    def require_files(self, step: int) -> None:
        """Raise a CheckpointError unless every file of a committed step exists in its size; reads no tensor."""
        for ref in self.index(step).catalogs:
            for image in self.catalog(step, ref).images:
                require_size(self.folder(step) / image.file, image.nbytes)

    def place(self, step: int, file: str) -> str:
        return str(self.folder(step) / (file or CHECKPOINT_INDEX))

    def read_file(self, step: int, file: str) -> bytes:
        path = self.folder(step) / file
        with storage_errors(path):
            return path.read_bytes()

    # Reading

    def blocks(self, step: int, manifest: Manifest, numbers: Sequence[int]) -> Iterator[ByteArray]:
        return BlockFile(self.folder(step) / manifest.file, manifest).blocks(numbers)

    def image_bytes(self, step: int, file: str) -> int:
        """Return the size of a file, and drop it from the page cache, so that ``blocks`` reads the disk."""
        path = self.folder(step) / file
        with storage_errors(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                return os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)

    # Removing

    def delete(self, step: int) -> None:
        if not self.has(step):
            raise NoSuchStepError(f"{self.root}: step {step} is not committed, so it cannot be deleted")
        self._discard(self.folder(step))

    def set_aside(self, step: int) -> None:
        """Rename the step's folder to ``.damaged-...``, so that it can be inspected."""
        folder = self.folder(step)
        with storage_errors(folder):
            os.rename(folder, self.root / f".damaged-{folder.name}-{time.time_ns()}")
            sync(self.root)

    def sweep(self, attempt: int) -> list[str]:
        """Remove drafts of attempts other than ``attempt``, and leftovers of deletions; return the drafts' names,
        sorted.

        Raises ``StorageError`` if the folder cannot be listed, or a draft cannot be renamed for its removal.
        """
        with storage_errors(self.root):
            names = sorted(os.listdir(self.root))
        partial = ((name, _PARTIAL.fullmatch(name)) for name in names)
        stale = [name for name, match in partial if match and int(match[2]) != attempt]
        for name in stale:
            self._discard(self.root / name)
        for name in names:
            if name.startswith(DELETING):
                shutil.rmtree(self.root / name, ignore_errors=True)
        return stale

    def _discard(self, folder: Path) -> None:
        """Rename the folder, so that readers no longer see it, then delete it; ``sweep`` removes leftovers. Does nothing if it is gone.

        Raises StorageError if the rename fails.
        """
        doomed = self.root / f"{DELETING}{folder.name.lstrip('.')}-{time.monotonic_ns()}"
        with storage_errors(folder):
            try:
                os.rename(folder, doomed)
            except FileNotFoundError:
                return
            sync(self.root)
        # The next sweep removes leftovers of a slow file system.
        shutil.rmtree(doomed, ignore_errors=True)
