"""``torch.distributed.checkpoint`` folders: imported as a run directory to start from, and exported for other tools.

An imported folder does not describe its model, so the caller names it. Tensor names are this project's (written by ``phalanx export --to
dcp``) or those of torchtitan's Llama 3, whose queries and keys are rotated in pairs of neighbors and are reordered into halves here.
Some writers repeat a tied embedding under the output projection's name. Equal numbers there are left out; others are refused, because no
tied model has them. Only weights are imported. The optimizer's state depends on the order and names of its software; it is left out, with
a note. Pickled names are restricted (``dcp_metadata.py``), and pieces are read by ``torch.load(weights_only=True)``, one tensor at a time.
Source of the names: torchtitan/models/llama3/model/state_dict_adapter.py.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from phalanx.checkpoint.committed.digest import WEIGHTS
from phalanx.checkpoint.committed.restore import Shard, dtype_name, restore, torch_dtype
from phalanx.checkpoint.format.boxes import SAFETENSORS_NAME, full_box
from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.interop.dcp_metadata import (
    METADATA,
    DcpError,
    FolderIndex,
    SavedPiece,
    StoredShape,
    read_index,
)
from phalanx.checkpoint.interop.huggingface.config import Storage
from phalanx.checkpoint.interop.huggingface.convert import (
    IMAGE_BYTES,
    Imported,
    copy_weights,
    run_file_text,
)
from phalanx.checkpoint.interop.huggingface.folders import new_folder
from phalanx.checkpoint.interop.huggingface.names import Published, RotaryRows
from phalanx.checkpoint.interop.huggingface.stored_weights import Weights
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import Tier
from phalanx.model.facts.shape import buffers, parameters
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.kinds.operations import Parameter
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec

_TITAN_ENDS = {
    "embedding.weight": "tok_embeddings.weight",
    "norm.weight": "norm.weight",
    "head.weight": "output.weight",
}
_TITAN_LAYER = {
    "attention_norm": "attention_norm",
    "attention.query": "attention.wq",
    "attention.key": "attention.wk",
    "attention.value": "attention.wv",
    "attention.output": "attention.wo",
    "ffn_norm": "ffn_norm",
    "ffn.gate": "feed_forward.w1",
    "ffn.up": "feed_forward.w3",
    "ffn.down": "feed_forward.w2",
}
# The names of the embedding and of the output projection.
_OURS = (f"{WEIGHTS}embedding.weight", f"{WEIGHTS}head.weight")
_TITANS = tuple((f"{prefix}tok_embeddings.weight", f"{prefix}output.weight") for prefix in ("", "model."))
_OPTIMIZER = ("optimizer/", "optimizer.", "optim.")
_BESIDE = ("lr_scheduler", "train_state", "dataloader", "extra", "freqs_cis", "model.freqs_cis")
_NO_HEAD = (
    " (where the embedding is the output projection too, name a model with model.tie_embeddings = true)"
)
_TOKENS = "a folder in PyTorch's distributed format has none"


def import_dcp(directory: Path, out: Path, model: ModelSpec, *, image_bytes: int = IMAGE_BYTES) -> Imported:
    """Import the weights in ``directory`` into a new run directory ``out`` of ``model``, with a checkpoint at step 0.

    A vocabulary size of 0 is taken from the embedding. Memory: ``image_bytes`` and the largest tensor; two embeddings if the folder repeats
    a tied one. Raises DcpError, or HuggingFaceError if ``out`` exists; no files remain then.
    """
    index = read_index(directory)
    # The vocabulary is the rows of the embedding; 0 if it is not there.
    shapes = [index.tensors[name].shape for name, _ in (_OURS, *_TITANS) if name in index.tensors]
    spec = resolve(model, shapes[0][0] if shapes and shapes[0] else 0)
    needed = list(_published_tensors(directory, index, spec))
    copied = _tied_copy(index, spec)
    notes = _require(directory, index, needed, copied)
    source = _Folder(directory)
    if copied:
        notes += (_same_as_embedding(source, index, *copied),)
    tensors = {name: _FolderTensor(source, name, stored) for name, stored in index.tensors.items()}
    with new_folder(out) as folder:
        run = RunDirectory(folder)
        extra: dict[str, object] = {"step": 0, "imported_from": str(directory.absolute())}
        digest = copy_weights(
            DiskTier(run.checkpoints), Weights({**tensors}, Storage()), needed, extra, image_bytes
        )
        run.run_file.write_text(run_file_text(out.name, spec))
    return Imported(spec, digest, _TOKENS, notes)


def _published_tensors(directory: Path, index: FolderIndex, spec: ModelSpec) -> Iterator[Published]:
    """Yield every tensor of the model by its name in the folder.

    The embedding's name decides between this project's names and torchtitan's; raises DcpError if it has neither.
    Whether the folder has the other tensors is not checked here.
    """
    table = (*parameters(spec), *buffers(spec))
    if f"{WEIGHTS}embedding.weight" in index.tensors:
        yield from (Published(WEIGHTS + part.name, part) for part in table)
        return
    prefix = "model." if "model.tok_embeddings.weight" in index.tensors else ""
    if f"{prefix}tok_embeddings.weight" not in index.tensors:
        some = ", ".join(sorted(index.tensors)[:4]) or "no tensor"
        raise DcpError(
            f"{directory}: has {some}: neither this project's names (model/embedding.weight) nor those of torchtitan's Llama 3 "
            "(tok_embeddings.weight); convert it to a Hugging Face folder with the software that wrote it"
        )
    for part in table:
        yield Published(prefix + _titan_name(directory, part), part, rotary=_in_pairs(part, spec))


def _titan_name(directory: Path, part: Parameter) -> str:
    """Return the parameter's name in torchtitan's Llama 3; raises DcpError if it has none."""
    if part.name in _TITAN_ENDS:
        return _TITAN_ENDS[part.name]
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", part.name)
    if match is None or match[2] not in _TITAN_LAYER:
        raise DcpError(
            f"{directory}: torchtitan's names are those of its Llama 3, which has no {part.name}; name the model that was "
            "trained, or convert the folder to Hugging Face's format with torchtitan"
        )
    return f"layers.{match[1]}.{_TITAN_LAYER[match[2]]}.{match[3]}"


def _in_pairs(part: Parameter, spec: ModelSpec) -> RotaryRows | None:
    """Return the order of rows of a query or key, which torchtitan stores in pairs; ``None`` for others."""
    if ".attention.query." in part.name or ".attention.key." in part.name:
        return RotaryRows(spec.head_dim, spec.head_dim)
    return None


def _tied_copy(index: FolderIndex, spec: ModelSpec) -> tuple[str, str] | None:
    """Return the embedding and its copy, if the folder has an output projection and the model ties it."""
    if not spec.tie_embeddings:
        return None
    return next((names for names in (_OURS, *_TITANS) if {*names} <= index.tensors.keys()), None)


def _same_as_embedding(folder: _Folder, index: FolderIndex, embedding: str, copy: str) -> str:
    """Return the note that the copy is left out. Reads both; raises DcpError if they differ."""
    first, second = (folder.full_tensor(name, index.tensors[name]).float() for name in (embedding, copy))
    if not torch.equal(first, second):
        raise DcpError(
            f"{folder.directory}: {copy} differs from {embedding}, and model.tie_embeddings = true makes them one; name the "
            "model that was trained, with model.tie_embeddings = false"
        )
    return f"left out: {copy}, which repeats {embedding} because model.tie_embeddings = true"


def _require(
    directory: Path, index: FolderIndex, needed: list[Published], copied: tuple[str, str] | None
) -> tuple[str, ...]:
    """Raise DcpError, with the first eight problems, if tensors are missing, unknown or of another shape or dtype.
    Return notes on what is left out: optimizer state and entries beside the model.
    """
    shapes = {tensor.name: tensor.shape for tensor in needed}
    problems = [
        f"{name} has shape {index.tensors[name].shape}, and the model's is {shape}"
        for name, shape in shapes.items()
        if name in index.tensors and index.tensors[name].shape != shape
    ]
    unmatched = [name for name in (*index.tensors, *index.others) if name not in shapes]
    optimizer = [name for name in unmatched if name.startswith(_OPTIMIZER)]
    beside = sorted({name.split(".")[0] for name in unmatched if name.startswith(_BESIDE)} - {"model"})
    ignored = {*optimizer, *(name for name in unmatched if name.startswith(_BESIDE)), *(copied or ())}
    problems += [f"{name} is not a part of the model" for name in unmatched if name not in ignored]
    missing = [name for name in shapes if name not in index.tensors]
    problems += [
        f"{name} is no tensor of float32, bfloat16 or float16" for name in missing if name in index.others
    ]
    heads = {head for _, head in (_OURS, *_TITANS)}
    problems += [
        f"{name} is missing{_NO_HEAD if name in heads else ''}"
        for name in missing
        if name not in index.others
    ]
    if problems:
        more = f" ... and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise DcpError(f"{directory}: {'; '.join(problems[:8])}{more}; name the model that was trained")
    notes = []
    if optimizer:
        notes.append(
            f"left out: the optimizer's state ({len(optimizer)} entries); a run that starts from here begins with none"
        )
    if beside:
        notes.append(f"left out: {', '.join(beside)}")
    return tuple(notes)


class _Folder:
    """The folder's tensors; the last one that was read is cached."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._last: tuple[str, torch.Tensor] | None = None

    def full_tensor(self, name: str, stored: StoredShape) -> torch.Tensor:
        """Return a tensor in its stored dtype, joined from its pieces; elements without a piece are NaN. The last
        tensor is cached. Raises DcpError.
        """
        if self._last is None or self._last[0] != name:
            # Elements without a piece stay NaN, which is refused later.
            tensor = torch.full(stored.shape, torch.nan, dtype=torch_dtype(stored.dtype))
            for piece in stored.pieces:
                index = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.shape, strict=True))
                tensor[index] = self._read(name, stored, piece)
            self._last = name, tensor
        return self._last[1]

    def _read(self, name: str, stored: StoredShape, piece: SavedPiece) -> torch.Tensor:
        """Read a piece without running code from the file; raises DcpError unless it has the shape and dtype of its entry."""
        path = self.directory / piece.file
        try:
            with path.open("rb") as stream:
                stream.seek(piece.start)
                data = stream.read(piece.length)
            values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file may raise any error
            raise DcpError(f"{path}: {name} cannot be read ({error}); copy the folder again") from error
        if (
            not isinstance(values, torch.Tensor)
            or tuple(values.shape) != piece.shape
            or values.layout != torch.strided
        ):
            raise DcpError(f"{path}: {name}: differs from its entry in {METADATA}; copy the folder again")
        if dtype_name(values.dtype) != stored.dtype:
            raise DcpError(
                f"{path}: {name} is {values.dtype}, and {stored.dtype} in {METADATA}; copy the folder again"
            )
        return values


class _FolderTensor:
    """A tensor of the folder, read in parts by the importer."""

    def __init__(self, folder: _Folder, name: str, stored: StoredShape) -> None:
        self._folder, self._name, self._stored = folder, name, stored

    def get_dtype(self) -> str:
        return SAFETENSORS_NAME[self._stored.dtype]

    def get_shape(self) -> list[int]:
        return list(self._stored.shape)

    def __getitem__(self, part: slice | tuple[slice, ...]) -> torch.Tensor:
        return self._folder.full_tensor(self._name, self._stored)[part]


# Export checkpoints as ``torch.distributed.checkpoint`` folders, for tools that read that format.
#
# One process has the full tensors in memory; runs do not save themselves this way. Names stay unchanged (``model/<parameter>``,
# ``optimizer/<state>/<parameter>``); ``extra`` is stored under the key "extra".

EXTRA = "extra"


def export_dcp(tier: Tier, step: int, out_dir: Path | str) -> None:
    """Write committed ``step`` to the new folder ``out_dir`` in PyTorch's distributed-checkpoint format.

    Needs host memory for all tensors. ``extra`` is stored as JSON text. Raises CheckpointError if ``out_dir`` exists and is not empty, and
    the errors of ``restore``.
    """
    out = Path(out_dir)
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out}: is not empty; name a new folder")
    shards = empty_shards(tier, step)
    extra = restore(tier, step, shards)
    state: dict[str, object] = {shard.box.name: shard.tensor for shard in shards}
    state[EXTRA] = json.dumps(extra)
    save(state, checkpoint_id=out, no_dist=True)


def empty_shards(tier: Tier, step: int) -> list[Shard]:
    """Return full, uninitialized CPU tensors for every tensor of committed ``step``, sorted by name."""
    boxes = {stored.box.name: stored.box for stored in tier.boxes(step)}
    return [
        Shard(
            full_box(name, box.dtype, box.global_shape),
            torch.empty(box.global_shape, dtype=torch_dtype(box.dtype)),
        )
        for name, box in sorted(boxes.items())
    ]
