"""A Hugging Face folder read in place: a tier over its tensors at step 0, and a run directory that stands in for it.

Whoever restores, packs or digests a checkpoint reads a published model by it without a copy on disk: only the parts that are asked for are
read, and put into this project's order on the way (``weights.py``).
"""

from __future__ import annotations

import errno
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.checkpoint.committed.digest import WEIGHTS
from phalanx.checkpoint.format.boxes import Box, whole
from phalanx.checkpoint.format.errors import NoSuchStepError, StorageError
from phalanx.checkpoint.format.image import RawArray, spans
from phalanx.checkpoint.format.restore_plan import DISK, BoxLocation, Held, PlannedRead
from phalanx.checkpoint.interop.huggingface.folders import PIECE_BYTES, read_json
from phalanx.checkpoint.interop.huggingface.import_folder import write_small_files
from phalanx.checkpoint.interop.huggingface.names import Published
from phalanx.checkpoint.interop.huggingface.stored_weights import open_folder, values
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import Record
from phalanx.run.directory.files import held_folder
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, is_published


class FolderTier:
    """The fp32 weights of the model in ``directory``, and nothing else, as step 0; a ``ReadableTier``.

    ``compared`` is as for ``open_folder``. Raises as it does.
    """

    name = "published"

    def __init__(self, directory: Path, *, compared: bool = False) -> None:
        self.root = directory
        # Files stay open for as long as somebody may read.
        opened = open_folder(directory, ExitStack(), compared=compared)
        self._weights = opened.weights
        self._sources: dict[str, list[Published]] = defaultdict(list)
        for tensor in opened.wanted:
            self._sources[WEIGHTS + tensor.parameter.name].append(tensor)
        location = BoxLocation(self.name, str(directory), DISK)
        self._held = tuple(
            Held(whole(name, "float32", tensors[0].parameter.shape), location)
            for name, tensors in sorted(self._sources.items())  # as a checkpoint lists them
        )

    def version(self) -> bytes:
        """Names, sizes and times of the folder's files, which are others once somebody has written to them."""
        files = sorted(self.root.glob("*.safetensors"))
        return json.dumps(
            [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        ).encode()

    def steps(self) -> list[int]:
        return [0]

    def has(self, step: int) -> bool:
        return step == 0

    def record(self, step: int) -> Record:
        self._require(step)
        return Record(0, 1, self.extra(step))

    def extra(self, step: int) -> dict[str, object]:
        self._require(step)
        return {"step": 0, "imported_from": str(self.root.absolute())}

    def boxes(
        self, step: int, rank: int | None = None, needed: Sequence[Box] | None = None
    ) -> tuple[Held, ...]:
        self._require(step)
        names = None if needed is None else {box.name for box in needed}
        return tuple(one for one in self._held if not rank and (names is None or one.box.name in names))

    def read(self, step: int, reads: Sequence[PlannedRead]) -> Iterator[tuple[Box, RawArray]]:
        self._require(step)
        for read in reads:
            for span in spans(read.part, read.part, PIECE_BYTES):
                found = values(span.part, self._sources[span.part.name], self._weights)
                yield span.part, found.contiguous().view(torch.uint32).numpy()

    def _require(self, step: int) -> None:
        if step != 0:
            raise NoSuchStepError(
                f"{self.root}: is a published model, which has no step {step}: leave the step out"
            )


# A run directory that stands in for a Hugging Face folder, so that every reader of a run can read a published model in place.
#
# It has what an import writes but for the weights: ``run.toml``, ``tokenizer/`` and ``published/``. In the place of ``checkpoints/`` a file names the
# folder, and ``weights_tier`` reads them there. It lies among the temporary files, and goes with the process that uses it.


_FOLDER = "folder"


@dataclass(frozen=True)
class StandIn:
    """A run directory without weights of its own."""

    path: Path
    notes: tuple[str, ...]
    """Sentences about parts of the folder that are left out or are read in another way."""


@contextmanager
def stand_in(directory: Path) -> Iterator[StandIn]:
    """Yields a run directory of the same name that stands in for the model in ``directory``. Raises as ``open_folder`` does, and StorageError where the small
    files cannot be copied."""
    with ExitStack() as opened:
        folder = open_folder(directory, opened)
    with ExitStack() as held:
        above = None
        try:
            above = held.enter_context(held_folder("phalanx-published-"))
            run = RunDirectory(above / _name(directory))
            run.path.mkdir()
            without_tokenizer, notes = write_small_files(directory, run, run.path.name, folder.spec)
            run.weights_elsewhere.write_text(json.dumps({_FOLDER: str(directory.resolve())}))
        except OSError as error:
            raise StorageError(_why_not_copied(error, directory, above)) from error
        said = (f"without a tokenizer: {without_tokenizer}",) if without_tokenizer else ()
        yield StandIn(run.path, (*folder.notes, *notes, *said))


def _name(directory: Path) -> str:
    """The name of ``directory``, as far as a run may have it."""
    name = "".join(one if one.isprintable() else "_" for one in directory.resolve().name)
    return name[:100] or "model"


def _why_not_copied(error: OSError, directory: Path, above: Path | None) -> str:
    where = error.filename
    if above is not None and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = above.parent  # a copy that finds no room names what it read
    reason = f"{where}: {error.strerror}" if where and error.strerror else str(error)
    return (
        f"{reason}. The small files of {directory} are copied among the temporary ones while it is read: make that possible, or have TMPDIR name another "
        "folder for them"
    )


@contextmanager
def run_or_stand_in(place: Path) -> Iterator[Path]:
    """Yields the run directory ``place``, or what stands in for the published model there."""
    if not is_published(place):
        yield place
        return
    with stand_in(place) as found:
        yield found.path


def published_folder(run: RunDirectory) -> Path | None:
    """The Hugging Face folder that ``run`` stands in for; ``None`` if it has weights of its own. Raises HuggingFaceError."""
    if not run.weights_elsewhere.exists():
        return None
    return Path(read_json(run.weights_elsewhere)[_FOLDER])


def weights_tier(run: RunDirectory) -> DiskTier | FolderTier:
    """The tier with the weights of a run, or of the published model that it stands in for. Raises RunDirectoryError where there are none."""
    folder = published_folder(run)
    if folder is not None:
        return FolderTier(folder, compared=True)  # before anything stood in for it
    if not run.checkpoints.is_dir():  # a tier would make it
        raise RunDirectoryError(
            f"{run.path}: has no folder checkpoints; give the directory of a run that saved"
        )
    return DiskTier(run.checkpoints)
