"""A run directory that stands in for a Hugging Face folder, so that whatever reads a run reads a published model where it lies.

It has what an import writes but for the weights: ``run.toml``, ``tokenizer/`` and ``published/``. In the place of ``checkpoints/`` a file names the
folder, and ``weights_tier`` reads them there. It lies among the temporary files, and goes with the process that uses it.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.format.errors import StorageError
from phalanx.checkpoint.interop.huggingface.folders import read_json
from phalanx.checkpoint.interop.huggingface.import_folder import write_small_files
from phalanx.checkpoint.interop.huggingface.stored.folder_tier import FolderTier
from phalanx.checkpoint.interop.huggingface.stored.weights import open_folder
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.run.directory.files import held_folder
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, is_published

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
