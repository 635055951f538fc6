"""The tensors of a Hugging Face folder in place, read in parts as this project's parameters.

``open_folder`` checks every name, shape and format before a number is read, and reports all that is missing, superfluous, damaged or of
another shape. Numbers are then read in pieces on demand. Half precision becomes the same number in fp32. Blockwise fp8, as in
DeepSeek-V3, becomes the product with its block's scale. The experts of a layer are stacked, and rotated rows put into halves
(``names.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from phalanx.checkpoint.format.boxes import Box, Extent, full_box
from phalanx.checkpoint.format.image import spans
from phalanx.checkpoint.interop.huggingface.config import (
    HuggingFaceError,
    Storage,
    family_of,
    import_notes,
    spec_of,
    storage_of,
)
from phalanx.checkpoint.interop.huggingface.families.family import Family
from phalanx.checkpoint.interop.huggingface.folders import (
    CONFIG,
    PIECE_BYTES,
    SAFETENSORS_DTYPE,
    StoredTensor,
    read_json,
)
from phalanx.checkpoint.interop.huggingface.names import Published, hf_name, published, shared_copies
from phalanx.run.directory.files import file_of_download
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec

# Matrices stored in mxfp4, as gpt-oss publishes its experts, read as if they were stored unquantized.
#
# 32 neighboring elements share a scale of 8 bits, a power of two, and have 4 bits each: a sign and one of eight magnitudes (Open
# Compute Project, Microscaling Formats v1.0, section 5). A stack of matrices ``(experts, rows, columns)`` is published as
# ``NAME_blocks`` ``(experts, rows, columns / 32, 16)`` and ``NAME_scales`` ``(experts, rows, columns / 32)``, both of bytes. The low half
# of a byte is the first element. Every value is exact in fp32. An unquantized stack is published with rows and columns exchanged.

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK = 32
_BIAS = 127  # added to the exponent


@dataclass(frozen=True)
class PackedStack:
    """A stack of matrices in mxfp4 blocks, read like a stack of shape ``(experts, columns, rows)``."""

    blocks: StoredTensor
    scales: StoredTensor

    def get_dtype(self) -> str:
        """Return the dtype of the numbers that are read."""
        return "F32"

    def get_shape(self) -> list[int]:
        """Return the shape of the stack as it is published unquantized."""
        experts, rows, blocks, _ = self.blocks.get_shape()
        return [experts, blocks * _BLOCK, rows]

    def __getitem__(self, part: slice | tuple[slice, ...]) -> torch.Tensor:
        """Return a part of the stack ``(experts, columns, rows)``, unpacked to fp32. Only the blocks around it are read.

        ``part`` has three slices; that of the columns has a start and a stop.
        """
        assert isinstance(part, tuple), "a slice for each dimension"
        experts, columns, rows = part
        first = columns.start // _BLOCK
        around = (experts, rows, slice(first, -(-columns.stop // _BLOCK)))
        values = unpack(self.blocks[around], self.scales[around])
        begin = columns.start - first * _BLOCK
        return values[..., begin : begin + columns.stop - columns.start].transpose(1, 2)


def unpack(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Convert ``blocks`` ``(..., n, 16)`` with their ``scales`` ``(..., n)``, both uint8, to fp32 ``(..., 32 n)``."""
    table = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)])
    halves = torch.stack((blocks & 0xF, blocks >> 4), dim=-1)  # (..., n, 16, 2)
    values = table[halves.int()].flatten(-2)  # (..., n, 32)
    return torch.ldexp(values, scales.int().unsqueeze(-1) - _BIAS).flatten(-2)


def unpacked(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a folder by name, with each pair of blocks and scales replaced by its stack.

    Raises HuggingFaceError for blocks without scales, or of other shapes or formats.
    """
    result = {name: tensor for name, tensor in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name, blocks in tensors.items():
        if not name.endswith("_blocks"):
            continue
        stack = name.removesuffix("_blocks")
        scales = tensors.get(f"{stack}_scales")
        if scales is None:
            raise HuggingFaceError(f"{stack}_scales is missing; copy or download the folder again")
        *leading, size = blocks.get_shape()
        formats = {blocks.get_dtype(), scales.get_dtype()}
        if len(leading) != 3 or size != _BLOCK // 2 or scales.get_shape() != leading or formats != {"U8"}:
            raise HuggingFaceError(
                f"{name}: shape {blocks.get_shape()} with scales of shape {scales.get_shape()} is no stack in mxfp4; save "
                "the model unquantized (as bfloat16, say) and import that"
            )
        result[stack] = PackedStack(blocks, scales)
    return result


_FP8 = "F8_E4M3"
_FP64 = "F64"
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class OpenFolder:
    """A folder with all tensors of a model: the resolved model, its weights, and notes."""

    spec: ModelSpec
    weights: Weights
    tensors: tuple[Published, ...]
    """Every tensor of the model, parameter by parameter."""
    notes: tuple[str, ...]
    """Sentences about parts of the folder that are left out or are read in another way."""


def open_folder(directory: Path, stack: ExitStack, *, compared: bool = False) -> OpenFolder:
    """Open the model in ``directory`` until ``stack`` closes, and check that every tensor exists with its shape.

    Tensors that are stored twice are read completely and compared, unless the caller has ``compared`` them before. Raises
    UnsupportedModelError, or HuggingFaceError if files are incomplete or damaged.
    """
    if (directory / ".metadata").exists():
        raise HuggingFaceError(
            f"{directory}: is in PyTorch's distributed format, which does not describe the model; name it (phalanx import "
            "--model), or the run directory that it was exported from in checkpoint.init_from"
        )
    config = read_json(directory / CONFIG)
    spec, storage, family = spec_of(config), storage_of(config), family_of(config)
    tensors = _open_weights(directory, stack)
    weights = Weights(_whole_names(unpacked(tensors) if storage.mxfp4 else tensors, spec), storage)
    spec, notes = _settle_mtp(spec, family, weights.tensors)
    needed = tuple(published(spec, family))
    double = sum(tensor.get_dtype() == _FP64 for tensor in weights.tensors.values())
    notes += _settle_biases(needed, weights.tensors) + (
        (f"{double} tensors are stored in float64, and rounded to float32",) if double else ()
    )
    _require_tensors(directory, spec, needed, weights)
    if not compared:
        for copy, original in _copies(spec).items():
            if copy in weights.tensors:
                _require_same(directory, copy, original, weights)
    return OpenFolder(spec, weights, needed, notes + import_notes(config))


@dataclass(frozen=True)
class Weights:
    """Tensors of a folder by Hugging Face's names, read in parts."""

    tensors: dict[str, StoredTensor]
    storage: Storage

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """Return a part of a tensor, as fp32. Only the part is read.

        FP8 is multiplied by the scales of its blocks, which are all read.
        """
        stored = self.tensors[name]
        values: torch.Tensor = stored[part].to(torch.float32)
        if stored.get_dtype() != _FP8 or self.storage.fp8_block is None:
            return values
        scale: torch.Tensor = self.tensors[scale_name(name)][:]
        for dim, (piece, size) in enumerate(zip(part, self.storage.fp8_block, strict=True)):
            scale = scale.index_select(dim, torch.arange(piece.start, piece.stop) // size)
        return values * scale

    def reordered(self, tensor: Published, part: tuple[slice, ...]) -> torch.Tensor:
        """Return a part of a published tensor with its rows in this project's order, as fp32."""
        if tensor.place is not None:
            placed: torch.Tensor = tensor.place.extract(self.read(tensor.name, tensor.place.around(part)))
            return placed
        if tensor.rotary is None or not self.storage.interleaved:
            return self.read(tensor.name, part)
        rows, *columns = part
        start, stop = tensor.rotary.around(rows.start, rows.stop)
        groups = self.read(tensor.name, (slice(start, stop), *columns))
        ordered: torch.Tensor = tensor.rotary.reordered(groups, tensor.rotary.published_at)
        return ordered[rows.start - start : rows.stop - start]


def scale_name(name: str) -> str:
    """Return the name of the tensor with the scales of an fp8 matrix."""
    return f"{name}_scale_inv"


def _open_weights(directory: Path, stack: ExitStack) -> dict[str, StoredTensor]:
    """Return, for each tensor of the model by Hugging Face's name, the slice object that reads parts of it.

    Files stay open until ``stack`` closes. Raises HuggingFaceError if one is missing or damaged. Tables of rotary
    frequencies and tensors without elements are left out.
    """
    index = directory / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        files = _files_of(index)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        path = directory / file
        if not path.is_file():
            raise HuggingFaceError(
                f"{path}: is missing; copy or download it again (weights in other formats than safetensors must be "
                "saved as safetensors first)"
            )
        try:
            path = file_of_download(directory, file)
            path.open("rb").close()  # safetensors reports an unreadable file as missing
            opened = stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise HuggingFaceError(f"{path}: damaged ({error}); copy or download it again") from error
        except OSError as error:
            raise HuggingFaceError(
                f"{path}: {error.strerror or error}; grant this user read access, or copy it again"
            ) from error
        tensors |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    return {
        name: tensor
        for name, tensor in tensors.items()
        # Buffers of old versions follow from the configuration; zero shared experts are empty matrices.
        if not name.endswith("rotary_emb.inv_freq") and 0 not in tensor.get_shape()
    }


def _whole_names(tensors: dict[str, StoredTensor], spec: ModelSpec) -> dict[str, StoredTensor]:
    """Return the tensors by the names of the full model. A base model, with only a tied output projection missing, lacks the prefix."""
    is_base = spec.tie_embeddings and "embed_tokens.weight" in tensors
    if not is_base or any(name.startswith("model.") for name in tensors):
        return tensors
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def _files_of(index: Path) -> list[str]:
    """Return the files that the index names, sorted; raises HuggingFaceError for a damaged index or a path outside the folder."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise HuggingFaceError(
            f"{index}: damaged (its weight_map names no file for each tensor); copy or download it again"
        )
    for file in places.values():
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise HuggingFaceError(
                f"{index}: its weight_map names {file!r}, a file outside the model's folder; download it again from a source that you trust"
            )
    return sorted(set(places.values()))


class _Zeros:
    """A tensor of zeros that replaces a missing one."""

    def __init__(self, shape: Extent) -> None:
        self._zero = torch.zeros(()).expand(shape)

    def get_dtype(self) -> str:
        return "F32"

    def get_shape(self) -> list[int]:
        return list(self._zero.shape)

    def __getitem__(self, part: slice | tuple[slice, ...]) -> torch.Tensor:
        return self._zero[part]


def _settle_biases(needed: Sequence[Published], tensors: dict[str, StoredTensor]) -> tuple[str, ...]:
    """If the files have no router bias at all, add zeros to ``tensors``, as transformers does, and return a note. If
    they have some, do nothing.
    """
    biases = [tensor for tensor in needed if tensor.parameter.kind == "balance"]
    if not biases or any(bias.name in tensors for bias in biases):
        return ()
    tensors.update({bias.name: _Zeros(bias.shape) for bias in biases})
    return ("the files have no e_score_correction_bias; the routers' biases are zero",)


def _settle_mtp(
    spec: ModelSpec, family: Family, tensors: dict[str, StoredTensor]
) -> tuple[ModelSpec, tuple[str, ...]]:
    """Return the model and notes. If only ``config.json`` has modules of multi-token prediction, the model gets none.
    If only the files have some, these are removed from ``tensors``.

    Numbers that differ otherwise are not noticed here. Families without such modules are left alone.
    """
    if "mtp_depth" not in family.fields:
        return spec, ()
    matches = {name: re.match(r"model\.layers\.(\d+)\.", name) for name in tensors}
    extra_names = [name for name, layer in matches.items() if layer and int(layer[1]) >= spec.layers]
    if spec.mtp_depth and not extra_names:
        note = f"{CONFIG} lists {spec.mtp_depth} modules for multi-token prediction, but the files have none"
        return resolve(replace(spec, mtp_depth=0)), (note,)
    if extra_names and not spec.mtp_depth:
        for name in extra_names:
            del tensors[name]
        return spec, (f"left out: layers after the last one, which {CONFIG} does not list",)
    return spec, ()


def _require_tensors(
    directory: Path, spec: ModelSpec, tensors: Sequence[Published], weights: Weights
) -> None:
    """Raise HuggingFaceError with the first eight tensors, by name, that are missing, unknown, or of an unexpected
    shape or dtype. If all names lack the prefix "model.", that is the only problem.
    """
    needed = {tensor.name: tensor.shape for tensor in tensors}
    copies = _copies(spec)
    stored = weights.tensors.keys()
    scales = {scale_name(name) for name in stored if weights.tensors[name].get_dtype() == _FP8}
    if not needed.keys() & stored and any(f"model.{name}" in needed for name in stored):
        raise HuggingFaceError(
            f"{directory}: the tensors' names lack the prefix 'model.', as of a base model saved without its output projection; "
            "save the full causal language model (AutoModelForCausalLM)"
        )
    problems = [f"{name} is missing" for name in (needed.keys() | scales) - stored - {_HEAD}]
    if _HEAD in needed.keys() - stored:
        problems.append(
            f"{_HEAD} is missing, and {CONFIG} does not tie it to the embedding (where it is tied, set tie_word_embeddings to true there)"
        )
    problems += [
        f"{name} is not a part of the model" for name in stored - needed.keys() - copies.keys() - scales
    ]
    for name in needed.keys() & stored:
        shape = tuple(weights.tensors[name].get_shape())
        if shape != needed[name]:
            problems.append(f"{name} has shape {shape}; by {CONFIG} it must be {needed[name]}")
        problems += _dtype_problems(name, weights)
    if problems:
        more = f" ... and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise HuggingFaceError(f"{directory}: {'; '.join(sorted(problems)[:8])}{more}")


def _copies(spec: ModelSpec) -> dict[str, str]:
    """Return the tensors that a folder may repeat, with the originals."""
    copies = {tensor.name: hf_name(tensor.parameter.name) for tensor in shared_copies(spec)}
    return copies | ({_HEAD: "model.embed_tokens.weight"} if spec.tie_embeddings else {})


def _dtype_problems(name: str, weights: Weights) -> list[str]:
    """Return why a stored tensor's dtype, or the shape of its FP8 scales, cannot be read; empty if they can. Missing
    scales are not reported here.
    """
    dtype = weights.tensors[name].get_dtype()
    read = (*SAFETENSORS_DTYPE.values(), _FP64)
    if dtype in read:
        return []
    if dtype != _FP8:
        return [f"{name} has dtype {dtype}; supported: {', '.join(read)}, {_FP8}"]
    block, scale = weights.storage.fp8_block, weights.tensors.get(scale_name(name))
    if block is None:
        return [f"{name} has dtype {dtype}, and {CONFIG} has no quantization_config with a weight_block_size"]
    blocks = [
        -(-size // block_size)
        for size, block_size in zip(weights.tensors[name].get_shape(), block, strict=False)
    ]
    if scale is not None and list(scale.get_shape()) != blocks:
        return [
            f"{scale_name(name)} has shape {tuple(scale.get_shape())}, and blocks of {block} make {blocks}"
        ]
    return []


def _require_same(directory: Path, copy: str, original: str, weights: Weights) -> None:
    """Raise HuggingFaceError unless two copies are equal, because readers differ in which of them they use. Reads both."""
    first, second = weights.tensors[copy], weights.tensors[original]
    shape = tuple(second.get_shape())
    box = full_box(copy, "float32", shape)
    parts = (span.part.slices_in(box) for span in spans(box, box, PIECE_BYTES))
    if tuple(first.get_shape()) != shape or not all(torch.equal(first[part], second[part]) for part in parts):
        raise HuggingFaceError(
            f"{directory}: {copy} differs from {original}, which it should repeat; where that is the output projection, "
            f"set tie_word_embeddings to false in {CONFIG}"
        )


def values(box: Box, tensors: Sequence[Published], weights: Weights) -> torch.Tensor:
    """Return the elements of a box of a parameter, fp32, in this project's order: from one tensor of the folder, or
    stacked from one for each expert.

    Raises HuggingFaceError for NaN and infinity.
    """
    part = box.slices_in(full_box(box.name, box.dtype, box.global_shape))
    if tensors[0].expert is None:
        elements = weights.reordered(tensors[0], part)
    else:
        elements = torch.stack([weights.reordered(tensor, part[1:]) for tensor in tensors[part[0]]])
    if not torch.stack(elements.aminmax()).isfinite().all():
        raise HuggingFaceError(
            f"{tensors[0].name}: has NaN or infinity, so the model's results are not finite; copy or download it again"
        )
    return elements
