"""A Hugging Face folder read in place: a tier over its tensors at step 0, and a run directory that stands in for it.

Code that restores, packs or digests a checkpoint can so read a published model without a copy on disk. Only the requested parts are read,
and put into this project's order (``stored_weights.py``).
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
from phalanx.checkpoint.format.boxes import DISK, Box, BoxLocation, PlannedRead, StoredBox, full_box
from phalanx.checkpoint.format.errors import NoSuchStepError, StorageError
from phalanx.checkpoint.format.image import RawArray, spans
from phalanx.checkpoint.interop.huggingface.convert import write_small_files
from phalanx.checkpoint.interop.huggingface.folders import PIECE_BYTES, read_json
from phalanx.checkpoint.interop.huggingface.names import Published
from phalanx.checkpoint.interop.huggingface.stored_weights import open_folder, values
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import StepRecord
from phalanx.run.directory.files import held_folder
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, is_published


class FolderTier:
    """The fp32 weights of the model in ``directory`` as step 0; a ``ReadableTier``.

    ``compared`` and the errors are those of ``open_folder``.
    """

    name = "published"

    def __init__(self, directory: Path, *, compared: bool = False) -> None:
        """Open the model's files and list its parameters as stored boxes. The files stay open as long as the tier
        exists; it has no ``close``.

        ``compared``: tensors that are stored twice were compared before. Raises the errors of ``open_folder``.
        """
        self.root = directory
        # Files stay open as long as the tier exists.
        opened = open_folder(directory, ExitStack(), compared=compared)
        self._weights = opened.weights
        self._sources: dict[str, list[Published]] = defaultdict(list)
        for tensor in opened.tensors:
            self._sources[WEIGHTS + tensor.parameter.name].append(tensor)
        location = BoxLocation(self.name, str(directory), DISK)
        self._stored = tuple(
            StoredBox(full_box(name, "float32", tensors[0].parameter.shape), location)
            for name, tensors in sorted(self._sources.items())  # as a checkpoint lists them
        )

    def version(self) -> bytes:
        """Return names, sizes and times of the safetensors files as JSON, which changes when a file is written."""
        files = sorted(self.root.glob("*.safetensors"))
        return json.dumps(
            [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        ).encode()

    def steps(self) -> list[int]:
        return [0]

    def has(self, step: int) -> bool:
        return step == 0

    def record(self, step: int) -> StepRecord:
        self._require(step)
        return StepRecord(0, 1, self.extra(step))

    def extra(self, step: int) -> dict[str, object]:
        self._require(step)
        return {"step": 0, "imported_from": str(self.root.absolute())}

    def boxes(
        self, step: int, rank: int | None = None, needed: Sequence[Box] | None = None
    ) -> tuple[StoredBox, ...]:
        """Return the full box of each parameter, or of each in ``needed``; none for a ``rank`` other than 0. Raises
        NoSuchStepError for steps other than 0.
        """
        self._require(step)
        names = None if needed is None else {box.name for box in needed}
        return tuple(
            entry for entry in self._stored if not rank and (names is None or entry.box.name in names)
        )

    def read(self, step: int, reads: Sequence[PlannedRead]) -> Iterator[tuple[Box, RawArray]]:
        """Yield the requested parts of the parameters, in pieces, as raw fp32 bits; raises the errors of ``values``."""
        self._require(step)
        for read in reads:
            for span in spans(read.part, read.part, PIECE_BYTES):
                elements = values(span.part, self._sources[span.part.name], self._weights)
                yield span.part, elements.contiguous().view(torch.uint32).numpy()

    def _require(self, step: int) -> None:
        """Raise ``NoSuchStepError`` for any step but 0."""
        if step != 0:
            raise NoSuchStepError(
                f"{self.root}: is a published model, which has no step {step}: omit the step"
            )


# A run directory that stands in for a Hugging Face folder, so that every reader of a run can read a published model in place.
#
# It has all files of an import except the weights: ``run.toml``, ``tokenizer/`` and ``published/``. Instead of ``checkpoints/`` a file
# names the folder, from which ``weights_tier`` reads. It is a temporary folder, and is removed with the process that uses it.


_FOLDER = "folder"


@dataclass(frozen=True)
class StandIn:
    """A run directory without weights."""

    path: Path
    notes: tuple[str, ...]
    """Sentences about parts of the folder that are left out or are read in another way."""


@contextmanager
def stand_in(directory: Path) -> Iterator[StandIn]:
    """Yield a run directory of the same name that stands in for the model in ``directory``.

    Raises the errors of ``open_folder``, and StorageError if the small files cannot be copied. The run is a temporary
    folder with the small files and a reference to the weights; it is removed afterwards.
    """
    with ExitStack() as opened:
        folder = open_folder(directory, opened)
    with ExitStack() as stack:
        parent = None
        try:
            parent = stack.enter_context(held_folder("phalanx-published-"))
            # A run's name must not have characters that are not printable.
            name = "".join(
                character if character.isprintable() else "_" for character in directory.resolve().name
            )
            run = RunDirectory(parent / (name[:100] or "model"))
            run.path.mkdir()
            without_tokenizer, notes = write_small_files(directory, run, run.path.name, folder.spec)
            run.weights_elsewhere.write_text(json.dumps({_FOLDER: str(directory.resolve())}))
        except OSError as error:
            raise StorageError(_copy_failure(error, directory, parent)) from error
        tokenizer_note = (f"without a tokenizer: {without_tokenizer}",) if without_tokenizer else ()
        yield StandIn(run.path, (*folder.notes, *notes, *tokenizer_note))


def _copy_failure(error: OSError, directory: Path, parent: Path | None) -> str:
    """Return the message for an error while small files were copied: its path, and how to make room."""
    path = error.filename
    if parent is not None and error.errno in (errno.ENOSPC, errno.EDQUOT):
        path = parent.parent  # if the disk is full, the error names the source of the copy
    reason = f"{path}: {error.strerror}" if path and error.strerror else str(error)
    return (
        f"{reason}. The small files of {directory} are copied to a temporary folder while it is read: make that possible, or set TMPDIR "
        "to another folder"
    )


@contextmanager
def run_or_stand_in(place: Path) -> Iterator[Path]:
    """Yield the run directory ``place``, or a stand-in if it is a published model. Raises the errors of ``stand_in``."""
    if not is_published(place):
        yield place
        return
    with stand_in(place) as stand_in_run:
        yield stand_in_run.path


def published_folder(run: RunDirectory) -> Path | None:
    """Return the Hugging Face folder that ``run`` stands in for; ``None`` if it has its own weights. Raises HuggingFaceError."""
    if not run.weights_elsewhere.exists():
        return None
    return Path(read_json(run.weights_elsewhere)[_FOLDER])


def weights_tier(run: RunDirectory) -> DiskTier | FolderTier:
    """Return the tier with the weights of the published model that ``run`` stands in for, else that of its own
    checkpoints, which may be empty.

    Raises RunDirectoryError if the run has no folder ``checkpoints``, which is not created. Raises HuggingFaceError
    and the errors of ``open_folder`` for a stand-in.
    """
    folder = published_folder(run)
    if folder is not None:
        return FolderTier(folder, compared=True)  # compared when the stand-in was made
    if not run.checkpoints.is_dir():  # a tier would create it
        raise RunDirectoryError(
            f"{run.path}: has no folder checkpoints; give the directory of a run that saved"
        )
    return DiskTier(run.checkpoints)
