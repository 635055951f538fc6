"""Checkpoints as Hugging Face model folders, and Hugging Face models as runs to start from.

A model trained here is useful elsewhere once it is a folder of `config.json` and safetensors that `transformers`, vLLM
and the like open; a published model can be trained on here once it is a run directory. No number changes either way:
tensors are renamed (`huggingface_config.py`) and copied in pieces of bounded size, whatever the model's. A folder
appears under its name only when it is complete. Format of the weights: https://github.com/huggingface/safetensors.
"""

import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from safetensors import SafetensorError, safe_open

from phalanx.checkpoint.blocks import page_aligned, sync_folder
from phalanx.checkpoint.boxes import Box, whole
from phalanx.checkpoint.digest import WEIGHTS, TensorDigest, combine
from phalanx.checkpoint.disk import DiskTier
from phalanx.checkpoint.gather import gather
from phalanx.checkpoint.huggingface_config import (
    Dtype,
    HuggingFaceError,
    UnsupportedModelError,
    hf_config_of,
    hf_name,
    parameter_name,
    spec_of,
)
from phalanx.checkpoint.layout import Image, layout_of, spans
from phalanx.checkpoint.plan import Held
from phalanx.checkpoint.state import torch_dtype
from phalanx.checkpoint.tier import Draft, Record, Tier
from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizer import TOKENIZER_FILE, bpe_from_file, load_tokenizer
from phalanx.model.shape import Parameter, parameters, resolve
from phalanx.run.read import to_table
from phalanx.run.spec import ModelSpec

__all__ = [
    "HuggingFaceError",
    "Imported",
    "UnsupportedModelError",
    "export_hf",
    "hf_config_of",
    "hf_name",
    "import_hf",
    "parameter_name",
    "spec_of",
]

CONFIG = "config.json"
FILE_BYTES = 5_000_000_000  # of one safetensors file, as the Hub recommends
_PIECE_BYTES = 64 << 20
_IMAGE_BYTES = 1 << 30
_SAFETENSORS_DTYPE: Mapping[Dtype, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

# Export


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file to be written: its name, its header, and the parameters in it, in order."""

    name: str
    header: bytes
    parameters: tuple[Parameter, ...]


def export_hf(
    tier: Tier,
    step: int,
    spec: ModelSpec,
    out_dir: Path | str,
    dtype: Dtype = "bfloat16",
    tokenizer_dir: Path | None = None,
    *,
    max_seq_len: int = 0,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the weights of committed `step` as a Hugging Face model into the new folder `out_dir`.

    `spec` is the run's resolved model; `tokenizer_dir` holds the tokenizer to go with it. Memory: some pieces of
    64 MiB. Raises UnsupportedModelError, HuggingFaceError where `out_dir` exists or a number does not fit `dtype`,
    and what reading the tier raises; nothing is left behind then.
    """
    out, spec = Path(out_dir), resolve(spec)
    tokenizer = load_tokenizer(tokenizer_dir) if tokenizer_dir is not None else None
    if tokenizer is not None and tokenizer.vocab_size > spec.vocab_size:
        raise HuggingFaceError(
            f"{tokenizer_dir}: {tokenizer.vocab_size} tokens, but the model embeds {spec.vocab_size}; "
            "give the tokenizer that the model was trained with"
        )
    end_token = tokenizer.end_of_document if tokenizer is not None else None
    config = hf_config_of(spec, max_seq_len=max_seq_len, dtype=dtype, end_token=end_token)
    held: dict[str, list[Held]] = defaultdict(list)
    for entry in tier.boxes(step):
        held[entry.box.name].append(entry)
    with _new_folder(out) as folder:
        files = weight_files(list(parameters(spec)), dtype, file_bytes)
        for file in files:
            with open(folder / file.name, "wb") as stream:
                stream.write(file.header)
                for parameter in file.parameters:
                    box = whole(WEIGHTS + parameter.name, "float32", parameter.shape)
                    for piece in _pieces(tier, step, box, held[box.name], dtype):
                        stream.write(piece)
        if len(files) > 1:
            _write_json(folder / "model.safetensors.index.json", _index_of(files, dtype))
        _write_json(folder / CONFIG, config)
        _write_json(folder / "generation_config.json", {"eos_token_id": end_token, "pad_token_id": end_token})
        if tokenizer is not None:
            tokenizer.save(folder)


def weight_files(tensors: Sequence[Parameter], dtype: Dtype, file_bytes: int) -> list[WeightFile]:
    """How parameters are dealt out over files of at most `file_bytes` bytes of data (or one tensor, if larger)."""
    groups: list[list[Parameter]] = [[]]
    room = file_bytes
    for tensor in tensors:
        nbytes = _nbytes(tensor, dtype)
        if groups[-1] and nbytes > room:
            groups.append([])
            room = file_bytes
        groups[-1].append(tensor)
        room -= nbytes
    names = ["model.safetensors"]
    if len(groups) > 1:
        names = [f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" for number in range(len(groups))]
    return [
        WeightFile(name, _header(group, dtype), tuple(group))
        for name, group in zip(names, groups, strict=True)
    ]


def _nbytes(tensor: Parameter, dtype: Dtype) -> int:
    return tensor.numel * torch_dtype(dtype).itemsize


def _header(tensors: Sequence[Parameter], dtype: Dtype) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        stop = start + _nbytes(tensor, dtype)
        fields[hf_name(tensor.name)] = {
            "dtype": _SAFETENSORS_DTYPE[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(fields, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def _index_of(files: Sequence[WeightFile], dtype: Dtype) -> dict[str, object]:
    total = sum(_nbytes(tensor, dtype) for file in files for tensor in file.parameters)
    places = {hf_name(tensor.name): file.name for file in files for tensor in file.parameters}
    return {"metadata": {"total_size": total}, "weight_map": places}


def _pieces(tier: Tier, step: int, box: Box, held: Sequence[Held], dtype: Dtype) -> Iterator[memoryview]:
    """The bytes of a tensor in `dtype`, in C order."""
    for span in spans(box, box, _PIECE_BYTES):
        (raw,) = gather(tier, step, [span.part], held)
        values = torch.from_numpy(raw).view(torch.float32)
        converted = values.to(torch_dtype(dtype))
        if torch.stack(converted.aminmax()).isinf().any() and (largest := values.abs().max()).isfinite():
            raise HuggingFaceError(
                f"{span.part}: {largest:g} is beyond the range of {dtype}; export as float32"
            )
        yield converted.reshape(-1).view(torch.uint8).numpy().data


# Import


@dataclass(frozen=True)
class Imported:
    """What was imported: the resolved model, its digest (see `digest.py`), and why there is no tokenizer, if so."""

    spec: ModelSpec
    weights_sha256: str
    no_tokenizer_because: str = ""


def import_hf(directory: Path, out: Path, *, image_bytes: int = _IMAGE_BYTES) -> Imported:
    """Make the Hugging Face model in `directory` a new run directory `out` with a checkpoint at step 0.

    `out` gets `run.toml` (the model), `checkpoints/` (fp32 weights, and nothing else) and, where the model comes with
    a byte-level BPE, `tokenizer/`. Memory: `image_bytes`, and a piece of 64 MiB. Raises UnsupportedModelError, or
    HuggingFaceError where `out` exists or the model's files are incomplete or damaged; nothing is left behind then.
    """
    spec = spec_of(_read_json(directory / CONFIG))
    with _new_folder(out) as folder, ExitStack() as stack:
        source = _open_weights(directory, stack)
        _require_tensors(directory, spec, source)
        tier = DiskTier(folder / "checkpoints")
        digest = _copy_weights(
            tier, source, spec, {"step": 0, "imported_from": str(directory.absolute())}, image_bytes
        )
        (folder / "run.toml").write_text(tomli_w.dumps({"name": out.name, "model": to_table(spec)}))
        return Imported(spec, digest, _copy_tokenizer(directory, folder / "tokenizer"))


def _open_weights(directory: Path, stack: ExitStack) -> dict[str, Any]:
    """For each tensor of the model, by Hugging Face's name, the slice object that reads parts of it."""
    index = directory / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        files = sorted(set(_read_json(index).get("weight_map", {}).values()))
    found: dict[str, Any] = {}
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
    # Buffers that old versions saved; they follow from the configuration.
    return {name: tensor for name, tensor in found.items() if not name.endswith("rotary_emb.inv_freq")}


def _require_tensors(directory: Path, spec: ModelSpec, source: dict[str, Any]) -> None:
    wanted = {hf_name(parameter.name): parameter.shape for parameter in parameters(spec)}
    if spec.tie_embeddings and "lm_head.weight" in source:
        _require_tied(directory, source)
    problems = [f"{name} is missing" for name in wanted if name not in source]
    problems += [f"{name} is not a part of the model" for name in source if name not in wanted]
    for name in wanted.keys() & source.keys():
        shape, dtype = tuple(source[name].get_shape()), source[name].get_dtype()
        if shape != wanted[name]:
            problems.append(f"{name} has shape {shape}, and {CONFIG} says {wanted[name]}")
        if dtype not in _SAFETENSORS_DTYPE.values():
            problems.append(f"{name} has dtype {dtype}; supported: {', '.join(_SAFETENSORS_DTYPE.values())}")
    if problems:
        more = f" ... and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise HuggingFaceError(f"{directory}: {'; '.join(sorted(problems)[:8])}{more}")


def _require_tied(directory: Path, source: dict[str, Any]) -> None:
    if not torch.equal(source.pop("lm_head.weight")[:], source["model.embed_tokens.weight"][:]):
        raise HuggingFaceError(
            f"{directory}: tie_word_embeddings is true, but lm_head.weight differs from the embedding; set it to "
            f"false in {CONFIG}"
        )


def _copy_weights(
    tier: DiskTier, source: Mapping[str, Any], spec: ModelSpec, extra: dict[str, Any], image_bytes: int
) -> str:
    """Commit the tensors as step 0, an image of `image_bytes` at a time as one rank's share; returns their digest."""
    draft = Draft(0, 0)
    hashes = {parameter.name: hashlib.sha256() for parameter in parameters(spec)}
    shares = list(_shares(spec, image_bytes))
    for rank, share in enumerate(shares):
        layout = layout_of(share)
        data = page_aligned(layout.nbytes)
        data[: len(layout.header)] = np.frombuffer(layout.header, dtype=np.uint8)
        for entry in layout.entries:
            name = entry.box.name.removeprefix(WEIGHTS)
            part = source[hf_name(name)][entry.box.slices_in(whole(name, "float32", entry.box.global_shape))]
            values = part.to(torch.float32).contiguous().reshape(-1).view(torch.uint8).numpy()
            data[entry.start : entry.stop] = values
            hashes[name].update(values.data)
        tier.write(draft, rank, Image(layout, data))
    digest = combine(
        {
            parameter.name: TensorDigest("float32", parameter.shape, hashes[parameter.name].digest())
            for parameter in parameters(spec)
        }
    )
    tier.commit(draft, Record(0, len(shares), extra, digest), timeout_s=0)
    return digest


def _shares(spec: ModelSpec, image_bytes: int) -> Iterator[list[Box]]:
    """The model's tensors in parts, in order, so that each list of parts fits into an image."""
    tensors = (whole(WEIGHTS + parameter.name, "float32", parameter.shape) for parameter in parameters(spec))
    parts = (span.part for box in tensors for span in spans(box, box, min(image_bytes, _PIECE_BYTES)))
    share: list[Box] = []
    for part in parts:
        if share and sum(box.nbytes for box in share) + part.nbytes > image_bytes:
            yield share
            share = []
        share.append(part)
    yield share


def _copy_tokenizer(directory: Path, folder: Path) -> str:
    """Copies the tokenizer; the empty string, or why there is none to copy."""
    if not (directory / TOKENIZER_FILE).exists():
        return f"{directory} has no {TOKENIZER_FILE}"
    try:
        tokenizer = bpe_from_file(directory)
    except TokenizerError as error:
        return str(error)
    folder.mkdir()
    tokenizer.save(folder)
    return ""


# Files


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder under a temporary name that gets the name `out` when all went well, and vanishes when not."""
    if out.exists():
        raise HuggingFaceError(f"{out}: exists; name a new folder, or remove that one first")
    folder = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
        yield folder
        _sync_all(folder)
        os.rename(folder, out)
        sync_folder(out.parent)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise HuggingFaceError(
            f"{error.filename or out}: {error.strerror}. Nothing was left behind; free space or name another folder."
        ) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _sync_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HuggingFaceError(
            f"{path}: {error.strerror}; give the folder of a Hugging Face model"
        ) from error
    except ValueError as error:
        raise HuggingFaceError(f"{path}: not JSON ({error}); copy or download it again") from error
    if not isinstance(content, dict):
        raise HuggingFaceError(f"{path}: not a JSON object; copy or download it again")
    return content
