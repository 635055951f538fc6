"""Export: the weights of a checkpoint as a Hugging Face model folder.

The folder of ``config.json`` and safetensors can be opened by ``transformers``, vLLM and others. No number changes: tensors are renamed,
stacks of experts split, rotated rows reordered as published (``names.py``), and copied in pieces of bounded size. The folder gets its name
only when it is complete. Format of the weights: https://github.com/huggingface/safetensors.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch

from phalanx.checkpoint.committed.digest import WEIGHTS, gather
from phalanx.checkpoint.format.boxes import Box, full_box
from phalanx.checkpoint.format.image import spans
from phalanx.checkpoint.format.restore_plan import StoredBox
from phalanx.checkpoint.format.shards import torch_dtype
from phalanx.checkpoint.interop.huggingface.config import Dtype, HuggingFaceError, export_notes, hf_config_of
from phalanx.checkpoint.interop.huggingface.families.known import family_for
from phalanx.checkpoint.interop.huggingface.folders import (
    CONFIG,
    GENERATION_CONFIG,
    PIECE_BYTES,
    SAFETENSORS_DTYPE,
    copy_kept,
    kept_by_export,
    new_folder,
    note_lost_fields,
    published_type,
    read_json,
    write_json,
)
from phalanx.checkpoint.interop.huggingface.names import Published, published, shared_copies
from phalanx.checkpoint.tiers.tier import Tier
from phalanx.data.chat.encode import save_template, saved_template, turn_ends
from phalanx.data.tokenizers.tokenizer import load_tokenizer
from phalanx.run.fields import JsonObject
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec

FILE_BYTES = 5_000_000_000  # of one safetensors file, as the Hub recommends


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file to write: its name, its header, and its tensors, in order."""

    name: str
    header: bytes
    tensors: tuple[Published, ...]


def export_hf(
    tier: Tier,
    step: int,
    spec: ModelSpec,
    out_dir: Path | str,
    dtype: Dtype = "bfloat16",
    tokenizer_dir: Path | None = None,
    *,
    published_dir: Path | None = None,
    max_seq_len: int = 0,
    trained_seq_len: int = 0,
    file_bytes: int = FILE_BYTES,
) -> tuple[str, ...]:
    """Write the weights of committed ``step`` as a Hugging Face model into the new folder ``out_dir``.

    ``spec`` is the run's resolved model. ``tokenizer_dir`` has its tokenizer, and ``published_dir`` the publisher's
    small files, which are written again as far as they still apply. ``max_seq_len`` is the context length for readers;
    0 means the published one, else ``trained_seq_len``. Returns notes on what was left out. Memory: some pieces of 64
    MiB. Raises UnsupportedModelError, HuggingFaceError if ``out_dir`` exists or a number does not fit ``dtype``, and
    the errors of the tier; no files remain then. The weights are safetensors files in ``dtype``, of at most
    ``file_bytes`` of data each.
    """
    out, spec = Path(out_dir), resolve(spec)
    tokenizer = load_tokenizer(tokenizer_dir) if tokenizer_dir is not None else None
    if tokenizer is not None and tokenizer.vocab_size > spec.vocab_size:
        raise HuggingFaceError(
            f"{tokenizer_dir}: {tokenizer.vocab_size} tokens, but the model embeds {spec.vocab_size}; "
            "give the tokenizer that the model was trained with"
        )
    end_token = tokenizer.end_of_document if tokenizer is not None else None
    template = saved_template(tokenizer_dir) if tokenizer_dir is not None else None
    carried_over = kept_by_export(published_dir, spec, tokenizer, max_seq_len, trained_seq_len)
    published_model_type = published_type(published_dir)
    context = carried_over.config.get("max_position_embeddings")
    context_length = context if isinstance(context, int) else 0
    own = hf_config_of(
        spec, max_seq_len=context_length, dtype=dtype, end_token=end_token, model_type=published_model_type
    )
    config = {**own, **carried_over.config}
    source = ExportSource(tier, step, spec)
    with new_folder(out) as folder:
        files = weight_files(tensors_of(spec, published_model_type), dtype, file_bytes)
        for file in files:
            with open(folder / file.name, "wb") as stream:
                stream.write(file.header)
                for tensors in _by_name(file.tensors):
                    for piece in _pieces(source, tensors, dtype):
                        stream.write(piece)
        if len(files) > 1:
            write_json(folder / "model.safetensors.index.json", _index_of(files, dtype))
        write_json(folder / CONFIG, config)
        if not carried_over.tokenizer:
            write_json(folder / GENERATION_CONFIG, {"eos_token_id": end_token, "pad_token_id": end_token})
            if tokenizer is not None:
                tokenizer.save(folder)
        if published_dir is not None:
            copy_kept(carried_over, published_dir, folder)
        if template is not None:
            save_template(folder, template)
            if tokenizer is not None:
                _stop_at(folder, turn_ends(template, tokenizer), config)
    return carried_over.notes + note_lost_fields(published_dir, config) + export_notes(spec)


def _stop_at(folder: Path, turns: frozenset[int], config: JsonObject) -> None:
    """Add the tokens that end a turn to the end tokens in the folder's generation config; keep its other fields.

    Writes nothing if they are all there.
    """
    file = folder / GENERATION_CONFIG
    generation = read_json(file) if file.exists() else {"pad_token_id": config.get("pad_token_id")}
    named = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = [token for token in (named if isinstance(named, list) else [named]) if token is not None]
    if not turns <= {*ends}:
        write_json(file, generation | {"eos_token_id": [*ends, *sorted(turns - {*ends})]})


def tensors_of(spec: ModelSpec, model_type: str = "") -> list[Published]:
    """Return all tensors of a resolved model's folder, in the order in which they are written.

    ``model_type`` is the preferred family, used if it can express the model.
    """
    family = family_for(spec, model_type)
    if spec.moe is not None and "moe.balance_bias" in family.handled:
        # Readers of this family require a bias for every router; it is zero if none was trained.
        spec = replace(spec, moe=replace(spec.moe, balance_bias=True))
    return [*published(spec, family), *shared_copies(spec)]


def weight_files(tensors: Sequence[Published], dtype: Dtype, file_bytes: int) -> list[WeightFile]:
    """Distribute tensors over files of at most ``file_bytes`` bytes of data (or one tensor, if larger), in order, with
    headers.

    A single file is ``model.safetensors``; several are numbered. Nothing is written.
    """
    groups: list[list[Published]] = [[]]
    room = file_bytes
    for parts in _by_name(tensors):
        nbytes = _nbytes(parts[0], dtype)
        if groups[-1] and nbytes > room:
            groups.append([])
            room = file_bytes
        groups[-1] += parts
        room -= nbytes
    names = ["model.safetensors"]
    if len(groups) > 1:
        names = [f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" for number in range(len(groups))]
    return [
        WeightFile(name, _header(group, dtype), tuple(group))
        for name, group in zip(names, groups, strict=True)
    ]


def _by_name(tensors: Sequence[Published]) -> Iterator[tuple[Published, ...]]:
    """Yield for each written tensor its parts: one for each parameter in it."""
    for _, parts in groupby(tensors, key=lambda tensor: tensor.name):
        yield tuple(parts)


def _dtype_of(tensor: Published, dtype: Dtype) -> Dtype:
    # The bias moves in steps below the resolution of half precision; it is published, and loaded, as fp32.
    return "float32" if tensor.name.endswith(".e_score_correction_bias") else dtype


def _nbytes(tensor: Published, dtype: Dtype) -> int:
    return math.prod(tensor.shape) * torch_dtype(_dtype_of(tensor, dtype)).itemsize


def _header(tensors: Sequence[Published], dtype: Dtype) -> bytes:
    """Return the safetensors header of the tensors, padded to 8 bytes."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor, *_ in _by_name(tensors):
        stop = start + _nbytes(tensor, dtype)
        fields[tensor.name] = {
            "dtype": SAFETENSORS_DTYPE[_dtype_of(tensor, dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(fields, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def _index_of(files: Sequence[WeightFile], dtype: Dtype) -> dict[str, object]:
    """Return the content of the index: total bytes, and the file of each tensor."""
    total = sum(_nbytes(tensor, dtype) for file in files for tensor, *_ in _by_name(file.tensors))
    places = {tensor.name: file.name for file in files for tensor in file.tensors}
    return {"metadata": {"total_size": total}, "weight_map": places}


class ExportSource:
    """The model's tensors in a committed step."""

    def __init__(self, tier: Tier, step: int, spec: ModelSpec) -> None:
        self._tier, self._step = tier, step
        self._trained_bias = spec.moe is not None and spec.moe.balance_bias
        self._stored: dict[str, list[StoredBox]] = defaultdict(list)
        for entry in tier.boxes(step):
            self._stored[entry.box.name].append(entry)
        self._last: tuple[Box, torch.Tensor] | None = None

    def published(self, tensor: Published, box: Box) -> torch.Tensor:
        """Return the elements of a box of a tensor's parameter, with its rows in the published order; fp32.

        A router's balance bias is zero if the run has not trained one.
        """
        if tensor.parameter.kind == "balance" and not self._trained_bias:
            return torch.zeros(box.shape)
        if tensor.rotary is None:
            return self._read(box)
        first, rows = box.offset[0], box.shape[0]
        start, stop = tensor.rotary.around(first, first + rows)
        groups = self._read(box.part((start, *box.offset[1:]), (stop - start, *box.shape[1:])))
        ordered: torch.Tensor = tensor.rotary.reordered(groups, tensor.rotary.kept_at)
        return ordered[first - start : first - start + rows]

    def _read(self, box: Box) -> torch.Tensor:
        """Return the elements of a box. The elements after it are cached for the next call, which reads the next expert."""
        if self._last is None or not self._last[0].contains(box):
            wide = _with_what_follows(box)
            (raw,) = gather(self._tier, self._step, [wide], self._stored[box.name])
            self._last = wide, torch.from_numpy(raw).view(torch.float32)
        cached_box, values = self._last
        return values[box.slices_in(cached_box)]


def _with_what_follows(box: Box) -> Box:
    """Extend a box of full rows by as many following rows as fit into a piece; return any other box unchanged."""
    if box.shape[1:] != box.global_shape[1:]:
        return box
    rows = max(box.shape[0], PIECE_BYTES // (box.nbytes // box.shape[0]))
    return box.part(box.offset, (min(rows, box.global_shape[0] - box.offset[0]), *box.shape[1:]))


def _pieces(source: ExportSource, tensors: Sequence[Published], dtype: Dtype) -> Iterator[memoryview]:
    """Yield the bytes of a tensor with the parameters ``tensors``, in its dtype and in C order."""
    if any(tensor.place is not None and tensor.place.axis > 0 for tensor in tensors):
        yield from _interwoven_pieces(source, tensors, dtype)
        return
    for tensor in tensors:
        box = full_box(WEIGHTS + tensor.parameter.name, "float32", tensor.parameter.shape)
        if tensor.expert is not None:
            box = box.rows(tensor.expert, tensor.expert + 1)
        for span in spans(box, box, PIECE_BYTES):
            values = source.published(tensor, span.part)
            yield _converted(values, span.part, _dtype_of(tensor, dtype))


def _interwoven_pieces(
    source: ExportSource, tensors: Sequence[Published], dtype: Dtype
) -> Iterator[memoryview]:
    """Yield the bytes of a tensor of stacks that are joined within each expert, some experts at a time."""
    boxes = [full_box(WEIGHTS + part.parameter.name, "float32", part.parameter.shape) for part in tensors]
    experts, *matrix_shape = tensors[0].shape
    at_once = max(1, PIECE_BYTES * experts // max(box.nbytes for box in boxes))
    for start in range(0, experts, at_once):
        stop = min(start + at_once, experts)
        joined = torch.empty((stop - start, *matrix_shape))
        for tensor, box in zip(tensors, boxes, strict=True):
            assert tensor.place is not None, "a tensor of several parameters"
            tensor.place.put(source.published(tensor, box.rows(start, stop)), joined)
        yield _converted(joined, boxes[0].rows(start, stop), _dtype_of(tensors[0], dtype))


def _converted(values: torch.Tensor, box: Box, dtype: Dtype) -> memoryview:
    """Return the values' bytes in ``dtype``; raises HuggingFaceError if a finite value is beyond its range."""
    converted = values.to(torch_dtype(dtype))
    if torch.stack(converted.aminmax()).isinf().any() and (largest := values.abs().max()).isfinite():
        raise HuggingFaceError(f"{box}: {largest:g} is beyond the range of {dtype}; export as float32")
    return converted.reshape(-1).view(torch.uint8).numpy().data
