"""Convert a Hugging Face model folder into a run directory to start from, and the weights of a checkpoint into such a folder.

After an import the published model can be trained, and can generate text. No number changes: tensors are renamed and put into this project's order
(``stored_weights.py``), in pieces of bounded size. Only float64 is rounded, with a note. The directory gets its name only when it is
complete.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import tomli_w
import torch

from phalanx.checkpoint.committed.digest import WEIGHTS, TensorDigest, combine, gather
from phalanx.checkpoint.committed.restore import torch_dtype
from phalanx.checkpoint.format.blocks import grouped, page_aligned
from phalanx.checkpoint.format.boxes import Box, Extent, StoredBox, full_box
from phalanx.checkpoint.format.image import Image, image_layout, spans
from phalanx.checkpoint.interop.huggingface import folders
from phalanx.checkpoint.interop.huggingface.config import Dtype, HuggingFaceError, export_notes, hf_config_of
from phalanx.checkpoint.interop.huggingface.families.known import family_for
from phalanx.checkpoint.interop.huggingface.names import Published, published, shared_copies
from phalanx.checkpoint.interop.huggingface.stored_weights import Weights, open_folder, values
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import Draft, StepRecord, Tier
from phalanx.data.chat.encode import save_template, saved_template, turn_ends
from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.published import TOKENIZER_FILE
from phalanx.data.tokenizers.tokenizer import SENTENCEPIECE_FILE, load_tokenizer, tokenizer_from_file
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.fields import JsonObject
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.read import to_table
from phalanx.run.spec import ModelSpec

IMAGE_BYTES = 1 << 30
_SEQUENCE = 2048
"""Maximum number of tokens in a text that an imported model scores, if its publisher allows as many."""


@dataclass(frozen=True)
class Imported:
    """The result of an import: the resolved model and its digest (see ``digest.py``)."""

    spec: ModelSpec
    weights_sha256: str
    no_tokenizer_because: str = ""
    """Reason for the absence of a tokenizer; empty if there is one."""
    notes: tuple[str, ...] = ()
    """Sentences about parts of the folder that were left out or are read in another way."""


def import_hf(directory: Path, out: Path, *, image_bytes: int = IMAGE_BYTES) -> Imported:
    """Import the Hugging Face model in ``directory`` into a new run directory ``out``, with a checkpoint at step 0.

    ``out`` gets ``run.toml`` (the model), ``checkpoints/`` (fp32 weights only), ``published/`` (all other files unchanged) and, if the model
    has a supported tokenizer, ``tokenizer/``. Memory: ``image_bytes``, and two pieces of 64 MiB. Raises UnsupportedModelError, or
    HuggingFaceError if ``out`` exists or the model's files are incomplete or damaged; no files remain then.
    """
    with folders.new_folder(out) as folder, ExitStack() as stack:
        opened = open_folder(directory, stack)
        run = RunDirectory(folder)
        extra = {"step": 0, "imported_from": str(directory.absolute())}
        digest = copy_weights(DiskTier(run.checkpoints), opened.weights, opened.tensors, extra, image_bytes)
        without_tokenizer, notes = write_small_files(directory, run, out.name, opened.spec)
        return Imported(opened.spec, digest, without_tokenizer, opened.notes + notes)


def write_small_files(
    directory: Path, run: RunDirectory, name: str, spec: ModelSpec
) -> tuple[str, tuple[str, ...]]:
    """Write all of an imported run but its weights: ``run.toml``, ``published/``, ``tokenizer/``.

    Return the reason for the absence of a tokenizer (empty if there is one), and notes. Raises HuggingFaceError and
    ``OSError``.
    """
    context = folders.published_context(folders.read_json(directory / folders.CONFIG))
    folders.require_token_ids(directory, spec.vocab_size)
    run.run_file.write_text(run_file_text(name, spec, context))
    without_tokenizer = _copy_tokenizer(directory, run.tokenizer)
    return without_tokenizer, folders.copy_publisher_files(directory, run.published)


def run_file_text(name: str, spec: ModelSpec, context: int = 0) -> str:
    """Return the ``run.toml`` of an imported model, whose publisher allows ``context`` tokens (0: unknown).

    Scored texts are limited to a sequence. The model was not trained here, so a usual length within the context is written.
    """
    # One text at a time: the default number of texts of this length would take gigabytes.
    lengths = {"seq_len": min(context or _SEQUENCE, _SEQUENCE), "micro_batch_size": 1}
    return tomli_w.dumps({"name": name, "model": to_table(spec), "train": lengths})


def copy_weights(
    tier: DiskTier,
    weights: Weights,
    needed: Sequence[Published],
    extra: dict[str, object],
    image_bytes: int,
) -> str:
    """Commit the tensors as step 0 of ``tier``, in images of ``image_bytes`` that each count as one rank's share.

    ``extra`` is the step's. Return the weights' digest as 64 hexadecimal digits.
    """
    draft = Draft(0, 0)
    sources: dict[str, list[Published]] = defaultdict(list)
    for tensor in needed:
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
            elements = values(entry.box, sources[name], weights)
            data[entry.start : entry.stop] = elements.contiguous().reshape(-1).view(torch.uint8).numpy()
            hashes[name].update(data[entry.start : entry.stop].data)
        tier.write(draft, rank, Image(layout, data))
    for rank in range(len(shares)):
        tier.collect(draft, rank, len(shares), timeout_s=0)
    digest = combine({name: TensorDigest("float32", shapes[name], hashes[name].digest()) for name in sources})
    tier.commit(draft, StepRecord(0, len(shares), extra, digest), timeout_s=0)
    return digest


def _shares(shapes: Mapping[str, Extent], image_bytes: int) -> Iterator[list[Box]]:
    """Return lists of parts of the fp32 tensors ``shapes``, in order; each list has at most ``image_bytes``."""
    tensors = (full_box(WEIGHTS + name, "float32", shape) for name, shape in shapes.items())
    parts = (span.part for box in tensors for span in spans(box, box, min(image_bytes, folders.PIECE_BYTES)))
    return grouped(parts, lambda part: part.nbytes, image_bytes)


def _copy_tokenizer(directory: Path, folder: Path) -> str:
    """Write the model's tokenizer to the new folder ``folder``. Return an empty text, or the reason why there is no
    usable one; then nothing is written.
    """
    if not any((directory / name).exists() for name in (TOKENIZER_FILE, SENTENCEPIECE_FILE)):
        return f"{directory} has neither {TOKENIZER_FILE} nor {SENTENCEPIECE_FILE}"
    try:
        tokenizer = tokenizer_from_file(directory)
    except TokenizerError as error:
        return str(error)
    folder.mkdir()
    tokenizer.save(folder)
    return ""


# Export: the weights of a checkpoint as a Hugging Face model folder.
#
# The folder of ``config.json`` and safetensors can be opened by ``transformers``, vLLM and others. No number changes: tensors
# are renamed, stacks of experts split, rotated rows reordered as published (``names.py``), and copied in pieces of bounded
# size. The folder gets its name only when it is complete. Format of the weights: https://github.com/huggingface/safetensors.

FILE_BYTES = 5_000_000_000  # most of one safetensors file, as the Hub recommends


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
    MiB. Raises UnsupportedModelError and the errors of the tier. Raises HuggingFaceError if ``out_dir`` exists, the
    tokenizer has more tokens than the model, or a number does not fit ``dtype``. No files remain then. The weights are safetensors files in ``dtype``, of at most
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
    carried_over = folders.kept_by_export(published_dir, spec, tokenizer, max_seq_len, trained_seq_len)
    published_model_type = folders.published_type(published_dir)
    context = carried_over.config.get("max_position_embeddings")
    context_length = context if isinstance(context, int) else 0
    own = hf_config_of(
        spec, max_seq_len=context_length, dtype=dtype, end_token=end_token, model_type=published_model_type
    )
    config = {**own, **carried_over.config}
    source = ExportSource(tier, step, spec)
    with folders.new_folder(out) as folder:
        files = weight_files(tensors_of(spec, published_model_type), dtype, file_bytes)
        for file in files:
            with open(folder / file.name, "wb") as stream:
                stream.write(file.header)
                for tensors in _by_name(file.tensors):
                    for piece in _pieces(source, tensors, dtype):
                        stream.write(piece)
        if len(files) > 1:
            folders.write_json(folder / "model.safetensors.index.json", _index_of(files, dtype))
        folders.write_json(folder / folders.CONFIG, config)
        if not carried_over.tokenizer:
            folders.write_json(
                folder / folders.GENERATION_CONFIG, {"eos_token_id": end_token, "pad_token_id": end_token}
            )
            if tokenizer is not None:
                tokenizer.save(folder)
        if published_dir is not None:
            folders.copy_kept(carried_over, published_dir, folder)
        if template is not None:
            save_template(folder, template)
            if tokenizer is not None:
                _stop_at(folder, turn_ends(template, tokenizer), config)
    return carried_over.notes + folders.note_lost_fields(published_dir, config) + export_notes(spec)


def _stop_at(folder: Path, turns: frozenset[int], config: JsonObject) -> None:
    """Add the tokens that end a turn to the end tokens in the folder's generation config; keep its other fields.

    Writes nothing if they are all there.
    """
    file = folder / folders.GENERATION_CONFIG
    generation = folders.read_json(file) if file.exists() else {"pad_token_id": config.get("pad_token_id")}
    named = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = [token for token in (named if isinstance(named, list) else [named]) if token is not None]
    if not turns <= {*ends}:
        folders.write_json(file, generation | {"eos_token_id": [*ends, *sorted(turns - {*ends})]})


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
    files = grouped(_by_name(tensors), lambda parts: _nbytes(parts[0], dtype), file_bytes)
    groups = [[tensor for parts in file for tensor in parts] for file in files]
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
    """Return a safetensors header, padded to 8 bytes, with its length before it. Data offsets follow the order of ``tensors``."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor, *_ in _by_name(tensors):
        stop = start + _nbytes(tensor, dtype)
        fields[tensor.name] = {
            "dtype": folders.SAFETENSORS_DTYPE[_dtype_of(tensor, dtype)],
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
        """List the stored boxes of ``step`` by tensor; no data are read."""
        self._tier, self._step = tier, step
        self._trained_bias = spec.moe is not None and spec.moe.balance_bias
        self._stored: dict[str, list[StoredBox]] = defaultdict(list)
        for entry in tier.boxes(step):
            self._stored[entry.box.name].append(entry)
        self._last: tuple[Box, torch.Tensor] | None = None

    def published(self, tensor: Published, box: Box) -> torch.Tensor:
        """Return the elements of ``box``, fp32. Its coordinates are those of the tensor's parameter, with rows in the published order.

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
        """Return the elements of a box, fp32. The rows after it are read and cached too, for the next call, which reads the next expert."""
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
    rows = max(box.shape[0], folders.PIECE_BYTES // (box.nbytes // box.shape[0]))
    return box.part(box.offset, (min(rows, box.global_shape[0] - box.offset[0]), *box.shape[1:]))


def _pieces(source: ExportSource, tensors: Sequence[Published], dtype: Dtype) -> Iterator[memoryview]:
    """Yield the bytes of one published tensor in its dtype and in C order. ``tensors`` are the parameters that it
    consists of. Raises HuggingFaceError for numbers beyond the dtype.
    """
    if any(tensor.place is not None and tensor.place.axis > 0 for tensor in tensors):
        yield from _interwoven_pieces(source, tensors, dtype)
        return
    for tensor in tensors:
        box = full_box(WEIGHTS + tensor.parameter.name, "float32", tensor.parameter.shape)
        if tensor.expert is not None:
            box = box.rows(tensor.expert, tensor.expert + 1)
        for span in spans(box, box, folders.PIECE_BYTES):
            values = source.published(tensor, span.part)
            yield _converted(values, span.part, _dtype_of(tensor, dtype))


def _interwoven_pieces(
    source: ExportSource, tensors: Sequence[Published], dtype: Dtype
) -> Iterator[memoryview]:
    """Yield the bytes of a tensor of stacks that are joined within each expert, some experts at a time."""
    boxes = [full_box(WEIGHTS + part.parameter.name, "float32", part.parameter.shape) for part in tensors]
    experts, *matrix_shape = tensors[0].shape
    at_once = max(1, folders.PIECE_BYTES * experts // max(box.nbytes for box in boxes))
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
