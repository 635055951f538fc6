"""Import: a Hugging Face model folder becomes a run directory to start from.

A published model can be trained on, and text generated from it, once it is a run directory. No number changes: tensors are
renamed, the experts of a layer stacked and rotated rows put into halves (``names.py``), in pieces of bounded
size, whatever the model's. What is stored in half precision becomes the same number in fp32, and what is stored in fp8 by
blocks, as DeepSeek-V3 is, the product with its block's scale. Only float64 is rounded, which a note says. The directory appears under its name only when it is complete.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tomli_w
import torch
from safetensors import SafetensorError, safe_open

from phalanx.checkpoint.committed.digest import WEIGHTS, TensorDigest, combine
from phalanx.checkpoint.format.blocks import page_aligned
from phalanx.checkpoint.format.boxes import Box, Extent, whole
from phalanx.checkpoint.format.image import Image, image_layout, spans
from phalanx.checkpoint.interop.huggingface.config import (
    HuggingFaceError,
    Storage,
    family_of,
    spec_of,
    storage_of,
)
from phalanx.checkpoint.interop.huggingface.families.family import Family
from phalanx.checkpoint.interop.huggingface.folders import (
    CONFIG,
    PIECE_BYTES,
    SAFETENSORS_DTYPE,
    StoredTensor,
    new_folder,
    read_json,
)
from phalanx.checkpoint.interop.huggingface.mxfp4 import unpacked
from phalanx.checkpoint.interop.huggingface.names import Published, hf_name, published, shared_copies
from phalanx.checkpoint.interop.huggingface.notes import import_notes
from phalanx.checkpoint.interop.huggingface.publisher_files import copy_publisher_files
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import Draft, Record
from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.published.files import TOKENIZER_FILE
from phalanx.data.tokenizers.tokenizer import SENTENCEPIECE_FILE, tokenizer_from_file
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.read import to_table
from phalanx.run.spec import ModelSpec

IMAGE_BYTES = 1 << 30
_FP8 = "F8_E4M3"
_FP64 = "F64"
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Imported:
    """The result of an import: the resolved model and its digest (see ``digest.py``)."""

    spec: ModelSpec
    weights_sha256: str
    no_tokenizer_because: str = ""
    """Why there is no tokenizer; empty if there is one."""
    notes: tuple[str, ...] = ()
    """Sentences about parts of the folder that were left out or are read in another way."""


def import_hf(directory: Path, out: Path, *, image_bytes: int = IMAGE_BYTES) -> Imported:
    """Makes the Hugging Face model in ``directory`` a new run directory ``out`` with a checkpoint at step 0.

    ``out`` gets ``run.toml`` (the model), ``checkpoints/`` (fp32 weights, and nothing else), ``published/`` (all other files as they are)
    and, where the model comes with a tokenizer that can be read, ``tokenizer/``. Memory: ``image_bytes``, and two pieces of 64 MiB. Raises
    UnsupportedModelError, or HuggingFaceError where ``out`` exists or the model's files are incomplete or damaged; nothing is left behind
    then.
    """
    if (directory / ".metadata").exists():
        raise HuggingFaceError(
            f"{directory}: is in PyTorch's distributed format, which does not say what the model is; name it (phalanx import "
            "--model), or the run directory that it was exported from in checkpoint.init_from"
        )
    config = read_json(directory / CONFIG)
    spec = spec_of(config)
    with new_folder(out) as folder, ExitStack() as stack:
        storage, tensors = storage_of(config), _open_weights(directory, stack)
        weights = Weights(_whole_names(unpacked(tensors) if storage.mxfp4 else tensors, spec), storage)
        family = family_of(config)
        spec, notes = _settle_mtp(spec, family, weights.tensors)
        wanted = list(published(spec, family))
        notes += _settle_biases(wanted, weights.tensors) + _rounded(weights.tensors)
        _require_tensors(directory, spec, wanted, weights)
        directory_of_run = RunDirectory(folder)
        tier = DiskTier(directory_of_run.checkpoints)
        extra = {"step": 0, "imported_from": str(directory.absolute())}
        digest = copy_weights(tier, weights, wanted, extra, image_bytes)
        directory_of_run.run_file.write_text(tomli_w.dumps({"name": out.name, "model": to_table(spec)}))
        no_tokenizer_because = _copy_tokenizer(directory, directory_of_run.tokenizer)
        notes += copy_publisher_files(directory, directory_of_run.published)
        return Imported(spec, digest, no_tokenizer_because, notes + import_notes(config))


# The folder's tensors


@dataclass(frozen=True)
class Weights:
    """The tensors of a folder by Hugging Face's names, read in parts."""

    tensors: dict[str, StoredTensor]
    storage: Storage

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """A part of a tensor, as fp32."""
        stored = self.tensors[name]
        values: torch.Tensor = stored[part].to(torch.float32)
        if stored.get_dtype() != _FP8 or self.storage.fp8_block is None:
            return values
        scale: torch.Tensor = self.tensors[scale_name(name)][:]
        for dim, (piece, size) in enumerate(zip(part, self.storage.fp8_block, strict=True)):
            scale = scale.index_select(dim, torch.arange(piece.start, piece.stop) // size)
        return values * scale

    def kept(self, tensor: Published, part: tuple[slice, ...]) -> torch.Tensor:
        """A part of a published tensor with its rows in the order in which this project keeps them, as fp32."""
        if tensor.place is not None:
            placed: torch.Tensor = tensor.place.taken(self.read(tensor.name, tensor.place.around(part)))
            return placed
        if tensor.rotary is None or not self.storage.interleaved:
            return self.read(tensor.name, part)
        rows, *rest = part
        start, stop = tensor.rotary.around(rows.start, rows.stop)
        groups = self.read(tensor.name, (slice(start, stop), *rest))
        ordered: torch.Tensor = tensor.rotary.reordered(groups, tensor.rotary.published_at)
        return ordered[rows.start - start : rows.stop - start]


def scale_name(name: str) -> str:
    """The name of the tensor with the scales of an fp8 matrix."""
    return f"{name}_scale_inv"


def _open_weights(directory: Path, stack: ExitStack) -> dict[str, StoredTensor]:
    """For each tensor of the model, by Hugging Face's name, the slice object that reads parts of it."""
    index = directory / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        files = _files_of(index)
    found: dict[str, StoredTensor] = {}
    for file in files:
        path = directory / file
        if not path.is_file():
            raise HuggingFaceError(
                f"{path}: is missing; copy or download it again (weights in other formats than safetensors must be "
                "saved as safetensors first)"
            )
        try:
            opened = stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise HuggingFaceError(f"{path}: damaged ({error}); copy or download it again") from error
        found |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    return {
        name: tensor
        for name, tensor in found.items()
        # Buffers that old versions saved follow from the configuration; zero shared experts are matrices of no elements.
        if not name.endswith("rotary_emb.inv_freq") and 0 not in tensor.get_shape()
    }


def _whole_names(tensors: dict[str, StoredTensor], spec: ModelSpec) -> dict[str, StoredTensor]:
    """The tensors by the names of the whole model, if it is a base model that lacks no more than a tied output projection."""
    is_base = spec.tie_embeddings and "embed_tokens.weight" in tensors
    if not is_base or any(name.startswith("model.") for name in tensors):
        return tensors
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def _rounded(tensors: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    """The note on weights that are rounded."""
    double = sum(tensor.get_dtype() == _FP64 for tensor in tensors.values())
    return (f"{double} tensors are stored in float64, and rounded to float32",) if double else ()


def _files_of(index: Path) -> list[str]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise HuggingFaceError(
            f"{index}: damaged (its weight_map names no file for each tensor); copy or download it again"
        )
    return sorted(set(places.values()))


class _Zeros:
    """A tensor of zeros, in place of one that the files do not hold."""

    def __init__(self, shape: Extent) -> None:
        self._zero = torch.zeros(()).expand(shape)

    def get_dtype(self) -> str:
        return "F32"

    def get_shape(self) -> list[int]:
        return list(self._zero.shape)

    def __getitem__(self, part: slice | tuple[slice, ...]) -> torch.Tensor:
        return self._zero[part]


def _settle_biases(wanted: Sequence[Published], tensors: dict[str, StoredTensor]) -> tuple[str, ...]:
    """Puts zeros where the files hold no bias of a router at all, as transformers does."""
    biases = [tensor for tensor in wanted if tensor.parameter.kind == "balance"]
    if not biases or any(bias.name in tensors for bias in biases):
        return ()
    tensors.update({bias.name: _Zeros(bias.shape) for bias in biases})
    return ("the files hold no e_score_correction_bias; the routers' biases are zero",)


def _settle_mtp(
    spec: ModelSpec, family: Family, tensors: dict[str, StoredTensor]
) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model with as many modules of multi-token prediction as the files hold and ``config.json`` speaks of.

    Tensors of modules that ``config.json`` does not speak of are taken out of ``tensors``.
    """
    if "mtp_depth" not in family.fields:
        return spec, ()
    found = {name: re.match(r"model\.layers\.(\d+)\.", name) for name in tensors}
    behind = [name for name, layer in found.items() if layer and int(layer[1]) >= spec.layers]
    if spec.mtp_depth and not behind:
        note = (
            f"{CONFIG} speaks of {spec.mtp_depth} modules for multi-token prediction, but the files hold none"
        )
        return resolve(replace(spec, mtp_depth=0)), (note,)
    if behind and not spec.mtp_depth:
        for name in behind:
            del tensors[name]
        return spec, (f"left out: layers behind the last, of which {CONFIG} does not speak",)
    return spec, ()


def _require_tensors(
    directory: Path, spec: ModelSpec, tensors: Sequence[Published], weights: Weights
) -> None:
    wanted = {tensor.name: tensor.shape for tensor in tensors}
    copies = {tensor.name: hf_name(tensor.parameter.name) for tensor in shared_copies(spec)}
    if spec.tie_embeddings:
        copies[_HEAD] = "model.embed_tokens.weight"
    held = weights.tensors.keys()
    scales = {scale_name(name) for name in held if weights.tensors[name].get_dtype() == _FP8}
    if not wanted.keys() & held and any(f"model.{name}" in wanted for name in held):
        raise HuggingFaceError(
            f"{directory}: the tensors' names lack the prefix 'model.', as of a base model saved without its output projection; "
            "save the whole causal language model (AutoModelForCausalLM)"
        )
    problems = [f"{name} is missing" for name in (wanted.keys() | scales) - held - {_HEAD}]
    if _HEAD in wanted.keys() - held:
        problems.append(
            f"{_HEAD} is missing, and {CONFIG} does not tie it to the embedding (where it is tied, set tie_word_embeddings to true there)"
        )
    problems += [
        f"{name} is not a part of the model" for name in held - wanted.keys() - copies.keys() - scales
    ]
    for name in wanted.keys() & held:
        shape = tuple(weights.tensors[name].get_shape())
        if shape != wanted[name]:
            problems.append(f"{name} has shape {shape}, and {CONFIG} says {wanted[name]}")
        problems += _dtype_problems(name, weights)
    if problems:
        more = f" ... and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise HuggingFaceError(f"{directory}: {'; '.join(sorted(problems)[:8])}{more}")
    for copy in copies.keys() & held:
        _require_same(directory, copy, copies[copy], weights)


def _dtype_problems(name: str, weights: Weights) -> list[str]:
    dtype = weights.tensors[name].get_dtype()
    read = (*SAFETENSORS_DTYPE.values(), _FP64)
    if dtype in read:
        return []
    if dtype != _FP8:
        return [f"{name} has dtype {dtype}; supported: {', '.join(read)}, {_FP8}"]
    block, scale = weights.storage.fp8_block, weights.tensors.get(scale_name(name))
    if block is None:
        return [f"{name} has dtype {dtype}, and {CONFIG} has no quantization_config with a weight_block_size"]
    blocks = [-(-size // of) for size, of in zip(weights.tensors[name].get_shape(), block, strict=False)]
    if scale is not None and list(scale.get_shape()) != blocks:
        return [
            f"{scale_name(name)} has shape {tuple(scale.get_shape())}, and blocks of {block} make {blocks}"
        ]
    return []


def _require_same(directory: Path, copy: str, original: str, weights: Weights) -> None:
    """Readers differ in which of two copies they take, so they must be the same."""
    first, second = weights.tensors[copy], weights.tensors[original]
    shape = tuple(second.get_shape())
    box = whole(copy, "float32", shape)
    parts = (span.part.slices_in(box) for span in spans(box, box, PIECE_BYTES))
    if tuple(first.get_shape()) != shape or not all(torch.equal(first[part], second[part]) for part in parts):
        raise HuggingFaceError(
            f"{directory}: {copy} differs from {original}, which it should repeat; where that is the output projection, "
            f"set tie_word_embeddings to false in {CONFIG}"
        )


# The checkpoint


def copy_weights(
    tier: DiskTier,
    weights: Weights,
    wanted: Sequence[Published],
    extra: dict[str, object],
    image_bytes: int,
) -> str:
    """Commits the tensors as step 0, an image of ``image_bytes`` at a time as one rank's share; returns their digest."""
    draft = Draft(0, 0)
    sources: dict[str, list[Published]] = defaultdict(list)
    for tensor in wanted:
        sources[tensor.parameter.name].append(tensor)
    hashes = {name: hashlib.sha256() for name in sources}
    shapes = {name: tensors[0].parameter.shape for name, tensors in sources.items()}
    shares = list(_shares(shapes, image_bytes))
    for rank, share in enumerate(shares):
        layout = image_layout(share)
        data = page_aligned(layout.nbytes)
        data[: len(layout.header)] = np.frombuffer(layout.header, dtype=np.uint8)
        for entry in layout.entries:
            name = entry.box.name.removeprefix(WEIGHTS)
            values = _values(entry.box, sources[name], weights)
            if not torch.stack(values.aminmax()).isfinite().all():
                raise HuggingFaceError(
                    f"{sources[name][0].name}: holds NaN or infinity, so the model computes nothing; copy or download it again"
                )
            data[entry.start : entry.stop] = values.contiguous().reshape(-1).view(torch.uint8).numpy()
            hashes[name].update(data[entry.start : entry.stop].data)
        tier.write(draft, rank, Image(layout, data))
    for rank in range(len(shares)):
        tier.collect(draft, rank, len(shares), timeout_s=0)
    digest = combine({name: TensorDigest("float32", shapes[name], hashes[name].digest()) for name in sources})
    tier.commit(draft, Record(0, len(shares), extra, digest), timeout_s=0)
    return digest


def _values(box: Box, tensors: Sequence[Published], weights: Weights) -> torch.Tensor:
    """The elements of a box of a parameter, which is one tensor of the folder or a stack of them; fp32."""
    part = box.slices_in(whole(box.name, box.dtype, box.global_shape))
    if tensors[0].expert is None:
        return weights.kept(tensors[0], part)
    return torch.stack([weights.kept(tensor, part[1:]) for tensor in tensors[part[0]]])


def _shares(shapes: Mapping[str, Extent], image_bytes: int) -> Iterator[list[Box]]:
    """The model's tensors in parts, in order, so that each list of parts fits into an image."""
    tensors = (whole(WEIGHTS + name, "float32", shape) for name, shape in shapes.items())
    parts = (span.part for box in tensors for span in spans(box, box, min(image_bytes, PIECE_BYTES)))
    share: list[Box] = []
    nbytes = 0
    for part in parts:
        if share and nbytes + part.nbytes > image_bytes:
            yield share
            share, nbytes = [], 0
        share.append(part)
        nbytes += part.nbytes
    yield share


def _copy_tokenizer(directory: Path, folder: Path) -> str:
    """Copies the tokenizer; returns the empty string, or why there is none to copy."""
    if not any((directory / name).exists() for name in (TOKENIZER_FILE, SENTENCEPIECE_FILE)):
        return f"{directory} has neither {TOKENIZER_FILE} nor {SENTENCEPIECE_FILE}"
    try:
        tokenizer = tokenizer_from_file(directory)
    except TokenizerError as error:
        return str(error)
    folder.mkdir()
    tokenizer.save(folder)
    return ""
