"""``/api/run/ID/checkpoints``: what a run could go on from, by the indexes of its checkpoints; no tensor is read on a request."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.format.index import Index, decode_index
from phalanx.checkpoint.tiers.store_standing import store_standing
from phalanx.run.directory.files_below import files_below
from phalanx.run.directory.paths import CHECKPOINT_INDEX, RunDirectory, step_folder
from phalanx.run.directory.regular_file import open_regular
from phalanx.watch.page.answer import Parameters
from phalanx.watch.page.places import Place
from phalanx.watch.page.views.runs import Runs

_MOST = 500
_MOST_INDEX_BYTES = 64 << 20
_MOST_FILES = 4096


def checkpoints_view(runs: Runs, place: Place, _parameters: Parameters) -> dict[str, object]:
    """The newest committed checkpoints, the newest first, with what is known of each without reading it whole.

    ``verified`` is false where something is wrong that shows at once (an index that is damaged, a file that is missing or short), and null
    where every byte would have to be read to know: ``phalanx checkpoint verify`` does.
    """
    directory = RunDirectory(place.path)
    try:
        steps = directory.committed_steps()
    except OSError as error:
        return {
            "checkpoints": [],
            "left_out": 0,
            "store": None,
            "problem": f"{directory.checkpoints}: {error.strerror}",
        }
    spec = runs.spec(place)
    standing = None if spec is None else store_standing(spec, directory)
    copied = standing.newest if standing else None
    shown = steps[::-1][:_MOST]
    return {
        "checkpoints": [
            _described(directory.checkpoints, step, copied, standing.url if standing else "")
            for step in shown
        ],
        "left_out": len(steps) - len(shown),
        "store": None if standing is None else asdict(standing) | {"text": str(standing)},
        "verify": f"phalanx checkpoint verify {place.path}",
        "problem": "",
    }


def _described(root: Path, step: int, copied: int | None, url: str) -> dict[str, object]:
    folder = step_folder(root, step)
    row: dict[str, object] = {
        "step": step,
        "path": str(folder),
        "where": ["disk", *([url] if copied == step else [])],
    }
    try:
        index, saved = _index(folder)
        problem = _shortfall(folder, index)
    except (CheckpointError, OSError) as error:
        return row | {
            "size_bytes": None,
            "saved": None,
            "ranks": None,
            "weights_sha256": None,
            "verified": False,
            "restorable": False,
            "problem": str(error)[:500],
        }
    return row | {
        "size_bytes": sum(ref.data_bytes for ref in index.catalogs),
        "saved": saved,
        "ranks": index.world_size,
        "weights_sha256": index.weights_sha256,
        "verified": False if problem else None,
        "restorable": not problem,
        "problem": problem,
    }


def _index(folder: Path) -> tuple[Index, float]:
    path = folder / CHECKPOINT_INDEX
    with open_regular(path) as file:
        saved = os.fstat(file.fileno()).st_mtime
        return decode_index(file.read(_MOST_INDEX_BYTES), str(path)), saved


def _shortfall(folder: Path, index: Index) -> str:
    """What is missing of a checkpoint, by the names and sizes of its files alone; empty if nothing is, or there are too many to look at."""
    for ref in index.catalogs:
        if not (folder / ref.file).is_file():
            return f"{folder / ref.file} is missing"
    if index.world_size > _MOST_FILES:
        return ""
    found = sum(path.stat().st_size for path in files_below(folder) if path.suffix == ".safetensors")
    wanted = sum(ref.data_bytes for ref in index.catalogs)
    return (
        ""
        if found >= wanted
        else f"its files hold {found:,} bytes of {wanted:,}: some are missing or cut off"
    )
