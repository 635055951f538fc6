"""A tier on a file system: one safetensors file per rank, committed by one rename.

    <root>/step-00000100/checkpoint.json         the index: step, extra, manifests and their checksums
    <root>/step-00000100/rank-00000.json         a manifest: boxes, offsets, a checksum for each 8 MiB
    <root>/step-00000100/rank-00000.safetensors  the bytes
    <root>/.partial-step-00000100-3/             a draft of attempt 3
    <root>/.deleting-.../                        on its way out

Ranks meet only here: each writes its file and manifest durably into the draft, rank 0 waits for all the manifests,
writes the index and renames the folder. A folder named ``step-...`` with an index is therefore complete, whatever
crashed when, and nothing in it is ever rewritten. Whatever is removed is first renamed, so that it stops existing at
once even where removing takes long.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from phalanx.checkpoint.format.blocks import (
    BLOCK_BYTES,
    BlockFile,
    require_room,
    storage_errors,
    write_blocks,
)
from phalanx.checkpoint.format.boxes import Box
from phalanx.checkpoint.format.errors import AbandonedError, CorruptError, NoSuchStepError
from phalanx.checkpoint.format.image import Image, RawArray
from phalanx.checkpoint.format.manifest import (
    Index,
    Manifest,
    ManifestRef,
    checksum,
    decode_index,
    decode_manifest,
    encode_index,
    encode_manifest,
)
from phalanx.checkpoint.format.parts import read_parts
from phalanx.checkpoint.format.restore_plan import DISK, BoxLocation, Held, PlannedRead, require_complete
from phalanx.checkpoint.tiers.tier import Draft, Record, never
from phalanx.run.directory.durable import sync, write_atomically
from phalanx.run.directory.paths import CHECKPOINT_INDEX, committed_steps, is_committed, step_folder

_PARTIAL = re.compile(r"\.partial-step-(\d{8,})-(\d+)")
_DELETING = ".deleting-"
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.01, 0.5


class DiskTier:
    """Checkpoints in the folder ``root``, which is made where it is missing.

    Images are written and checked in blocks of ``block_bytes``. A commit first makes sure that the ranks' boxes cover every
    tensor that they name, which costs rank 0 some microseconds per box.
    """

    name = "disk"

    def __init__(self, root: Path | str, *, block_bytes: int = BLOCK_BYTES) -> None:
        self.root = Path(root)
        self._block_bytes = block_bytes
        # Committed steps never change; a restore reads the same manifests twice (to plan, to read).
        self._manifest = lru_cache(maxsize=4096)(self._load_manifest)
        with storage_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)

    def folder(self, step: int) -> Path:
        """The folder of a committed step, which may not exist yet."""
        return step_folder(self.root, step)

    def draft_folder(self, draft: Draft) -> Path:
        """The folder in which a draft is written."""
        return self.root / f".partial-step-{draft.step:08d}-{draft.attempt}"

    # Saving

    def write(self, draft: Draft, rank: int, image: Image, *, cancelled: Callable[[], bool] = never) -> None:
        folder = self.draft_folder(draft)
        # The image first, durable; the manifest last and by a rename: where it is, all of the rank's bytes are.
        data = image.data[: image.layout.nbytes]
        file = f"rank-{rank:05d}.safetensors"
        with storage_errors(folder, data.nbytes):
            self._make(folder)
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
        _write_record(folder / f"rank-{rank:05d}.json", encode_manifest(manifest))

    def _make(self, folder: Path) -> None:
        """Makes a draft's folder, and the root again if somebody has removed it: later saves must not fail for that."""
        self.root.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)

    def fail(self, draft: Draft, rank: int, reason: str) -> None:
        folder = self.draft_folder(draft)
        with storage_errors(folder, len(reason)):
            self._make(folder)
            (folder / f"rank-{rank:05d}.failed").write_text(reason)

    def commit(
        self,
        draft: Draft,
        record: Record,
        *,
        timeout_s: float,
        required: Sequence[Box] = (),
        cancelled: Callable[[], bool] = never,
    ) -> None:
        folder = self.draft_folder(draft)
        try:
            # 1. Every rank's manifest is there, so every rank's bytes are.
            self._await_ranks(folder, record.world_size, timeout_s, cancelled)
            # 2. The manifests agree with the files' sizes, and together they cover every tensor.
            manifests = self._read_manifests(folder, record.world_size, required)
            index = Index(
                step=record.step,
                attempt=draft.attempt,
                world_size=record.world_size,
                extra=record.extra,
                weights_sha256=record.weights_sha256,
                manifests=manifests,
            )
            # 3. The index, durable in the draft, where nobody looks for it.
            _write_record(folder / CHECKPOINT_INDEX, encode_index(index))
            # 4. One rename makes the step visible: before it there is a draft, after it a whole checkpoint.
            self._publish(folder, draft.step)
            self._drop_earlier(draft)
        except BaseException:
            self._discard(folder)
            raise

    def _await_ranks(
        self, folder: Path, world_size: int, timeout_s: float, cancelled: Callable[[], bool]
    ) -> None:
        deadline = time.monotonic() + timeout_s
        pause_s = _SHORTEST_POLL_S
        while True:
            with storage_errors(folder, 1):
                names = set(os.listdir(folder))
            failed = sorted(name for name in names if name.endswith(".failed"))
            if failed:
                reason = (folder / failed[0]).read_text(errors="replace")
                raise AbandonedError(
                    f"{folder.name}: {Path(failed[0]).stem} could not write its share: {reason}"
                )
            absent = [rank for rank in range(world_size) if f"rank-{rank:05d}.json" not in names]
            if not absent:
                return
            if cancelled():
                raise AbandonedError(f"{folder.name}: the save was cancelled")
            if time.monotonic() > deadline:
                raise AbandonedError(
                    f"{folder.name}: {len(absent)} of {world_size} ranks have not written after {timeout_s} s "
                    f"(first: {absent[:8]}). They died or their storage is slow; the older checkpoints are intact."
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_POLL_S)

    def _read_manifests(
        self, folder: Path, world_size: int, required: Sequence[Box]
    ) -> tuple[ManifestRef, ...]:
        refs: list[ManifestRef] = []
        held: list[Held] = []
        for rank in range(world_size):
            path = folder / f"rank-{rank:05d}.json"
            with storage_errors(path):
                data = path.read_bytes()
            manifest = decode_manifest(data, str(path))
            self._require_size(folder / manifest.file, manifest.nbytes)
            refs.append(ManifestRef(rank, path.name, checksum(data), manifest.nbytes))
            held += self._held(manifest)
        require_complete(held, required)
        return tuple(refs)

    def _require_size(self, path: Path, nbytes: int) -> None:
        with storage_errors(path):
            size = path.stat().st_size
        if size != nbytes:
            raise CorruptError(f"{path}: {size:,} bytes; its manifest says {nbytes:,}. Restore another step.")

    def _publish(self, folder: Path, step: int) -> None:
        with storage_errors(folder, 1):
            try:
                os.rename(folder, self.folder(step))
            except OSError:
                # A folder of that name that is not empty: an earlier attempt has committed the step, which stays.
                if not self.has(step):
                    raise
                self._discard(folder)
            sync(self.root)

    def _drop_earlier(self, draft: Draft) -> None:
        """Removes drafts of earlier steps: every rank has written this one, so none still writes an earlier one."""
        with storage_errors(self.root):
            names = os.listdir(self.root)
        for match in filter(None, map(_PARTIAL.fullmatch, names)):
            if int(match[1]) < draft.step and int(match[2]) == draft.attempt:
                self._discard(self.root / match[0])

    # Looking

    def steps(self) -> list[int]:
        with storage_errors(self.root):
            return committed_steps(self.root)

    def has(self, step: int) -> bool:
        return is_committed(self.folder(step))

    def index(self, step: int) -> Index:
        """The index of a committed step. Raises NoSuchStepError, CorruptError, FormatVersionError."""
        path = self.folder(step) / CHECKPOINT_INDEX
        if not path.exists():
            steps = self.steps()
            raise NoSuchStepError(f"{self.root}: step {step} is not committed; committed: {steps or 'none'}")
        with storage_errors(path):
            return decode_index(path.read_bytes(), str(path))

    def require_files(self, step: int) -> None:
        """Raises a CheckpointError unless every file of a committed step is there in its size; reads no tensor."""
        for ref in self.index(step).manifests:
            manifest = self.manifest(step, ref)
            self._require_size(self.folder(step) / manifest.file, manifest.nbytes)

    def record(self, step: int) -> Record:
        index = self.index(step)
        return Record(index.step, index.world_size, index.extra, index.weights_sha256)

    def extra(self, step: int) -> dict[str, object]:
        return self.index(step).extra

    def manifest(self, step: int, ref: ManifestRef) -> Manifest:
        """A manifest that the step's index names, checked. Raises CorruptError, MissingFileError."""
        return self._manifest(step, ref)

    def _load_manifest(self, step: int, ref: ManifestRef) -> Manifest:
        path = self.folder(step) / ref.file
        with storage_errors(path):
            data = path.read_bytes()
        if checksum(data) != ref.checksum:
            raise CorruptError(
                f"{path}: differs from its checksum in {CHECKPOINT_INDEX}. Restore another step."
            )
        return decode_manifest(data, str(path))

    def boxes(self, step: int, rank: int | None = None) -> tuple[Held, ...]:
        refs = (ref for ref in self.index(step).manifests if rank is None or ref.rank == rank)
        return tuple(held for ref in refs for held in self._held(self.manifest(step, ref)))

    def _held(self, manifest: Manifest) -> list[Held]:
        place = BoxLocation(self.name, str(manifest.rank), DISK)
        return [Held(entry.box, place) for entry in manifest.entries]

    # Reading

    def read(self, step: int, reads: Sequence[PlannedRead]) -> Iterator[tuple[Box, RawArray]]:
        refs = {str(ref.rank): ref for ref in self.index(step).manifests}
        for holder, group in groupby(reads, key=lambda read: read.source.location.holder):
            manifest = self.manifest(step, refs[holder])
            file = BlockFile(self.folder(step) / manifest.file, manifest)
            yield from read_parts(manifest, list(group), file.blocks)

    # Removing

    def delete(self, step: int) -> None:
        if not self.has(step):
            raise NoSuchStepError(f"{self.root}: step {step} is not committed, so it cannot be deleted")
        self._discard(self.folder(step))

    def set_aside(self, step: int) -> None:
        """Renames the folder to ``.damaged-...``, so that it can still be looked at."""
        folder = self.folder(step)
        with storage_errors(folder):
            os.rename(folder, self.root / f".damaged-{folder.name}-{time.time_ns()}")
            sync(self.root)

    def sweep(self, attempt: int) -> list[str]:
        with storage_errors(self.root):
            names = sorted(os.listdir(self.root))
        partial = ((name, _PARTIAL.fullmatch(name)) for name in names)
        stale = [name for name, match in partial if match and int(match[2]) != attempt]
        for name in stale:
            self._discard(self.root / name)
        for name in names:
            if name.startswith(_DELETING):
                shutil.rmtree(self.root / name, ignore_errors=True)
        return stale

    def _discard(self, folder: Path) -> None:
        doomed = self.root / f"{_DELETING}{folder.name.lstrip('.')}-{time.monotonic_ns()}"
        with storage_errors(folder):
            try:
                os.rename(folder, doomed)
            except FileNotFoundError:
                return
            sync(self.root)
        # What a slow file system keeps back, the next sweep takes.
        shutil.rmtree(doomed, ignore_errors=True)


def _write_record(path: Path, content: bytes) -> None:
    with storage_errors(path, len(content)):
        write_atomically(path, content)
