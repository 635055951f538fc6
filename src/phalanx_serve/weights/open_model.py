"""A model opened for serving or scoring: from a run or a pack, resident or streamed, within the memory that it may use.

Scoring goes through the model once for each micro-batch, so streamed weights are read once for as many texts as share one.
"""

from __future__ import annotations

import logging
import resource
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from phalanx.checkpoint.committed.restore import dtype_name
from phalanx.checkpoint.format.errors import MismatchError
from phalanx.checkpoint.interop.huggingface.stored_folder import published_folder
from phalanx.checkpoint.pack.layout import PackFormat, PackIndex
from phalanx.checkpoint.pack.reader import PackFile, is_pack, open_pack
from phalanx.checkpoint.pack.writer import default_path, pack
from phalanx.checkpoint.snapshot.segments import free_memory_bytes
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.hardware.portable.operations import begin as begin_portable
from phalanx.model.custom import Chain
from phalanx.model.transformer import Transformer
from phalanx.run.directory.files import held_folder
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.identity import read_unchanged
from phalanx.run.kinds.block import without_predictions
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec, RunSpec
from phalanx.train.compose import compute_dtype, whole_model
from phalanx.train.score import DTYPES, Compute, Scorer, begin_scoring
from phalanx_serve.weights import budget
from phalanx_serve.weights.streamed import StreamedWeights, load_resident, load_stack

_FORMATS: dict[torch.dtype, PackFormat] = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_log = logging.getLogger(__name__)


def open_model(
    place: Path,
    *,
    stream: bool = False,
    memory_bytes: int | None = None,
    dtype: torch.dtype = torch.float32,
    step: int | None = None,
) -> tuple[Transformer | Chain, ModelSpec]:
    """Open the model of a run directory or a pack, computing in ``dtype`` (fp32 or bf16) on the CPU.

    With ``stream`` the weights are read during computation, and take at most ``memory_bytes`` (by default four fifths
    of the free memory), besides the KV cache and the process. One thread at a time may use a streamed model. Without
    ``stream``, all weights are read at once, and must fit into ``memory_bytes``.

    With or without ``stream``, the step of a run is first written into its directory as a pack in ``dtype``, if missing.

    For a run with portable numerics, this process computes with portable kernels from then on. Raises TooLargeError
    with the size that would fit, MismatchError for a pack of another step or run, RunDirectoryError, and reading
    errors.
    """
    file = packed(place, step, dtype)
    if recorded_run(file.index).runtime.numerics == "portable":
        begin_portable()
    free = memory_bytes if memory_bytes is not None else free_to_use() * 4 // 5
    model, spec = empty_model(file.index, dtype)
    if stream:
        stream_weights(model, file, free, dtype)
    else:
        read_weights(model, file, free, dtype)
    return model, spec


def packed(place: Path, step: int | None, dtype: torch.dtype) -> PackFile:
    """Return the pack at ``place``, or of a run's ``step`` in ``dtype``, which is made if missing, as an open file.

    ``step`` None takes any pack, or the newest step. Raises the errors of ``open_model``.
    """
    file = open_pack(place if is_pack(place) else _pack_of(place, step, dtype))
    if step is not None and file.index.step != step:
        raise MismatchError(
            f"{file.path}: is a pack of step {file.index.step}, not {step}; leave the step out, or pack that one",
            [],
        )
    return file


def stream_weights(
    model: nn.Module, file: PackFile, memory_bytes: int, dtype: torch.dtype
) -> StreamedWeights:
    """Stream the weights of an empty model from ``file`` during computation, within ``memory_bytes``.

    Raises TooLargeError. Logs the division.
    """
    residency = budget.divide_memory(file.index, dtype_name(dtype), memory_bytes)
    # Kept alive by the hooks that it has set.
    weights = StreamedWeights(model, file, residency, dtype)
    _log.info("streaming %s: %s", file.path, weights.residency)
    return weights


def read_weights(model: nn.Module, file: PackFile, memory_bytes: int, dtype: torch.dtype) -> None:
    """Read all weights of an empty model, then close ``file``.

    Raises TooLargeError if they exceed ``memory_bytes``; nothing was read then, and ``file`` is still open.
    """
    needed = budget.resident_bytes(file.index, dtype_name(dtype))
    if needed > memory_bytes:
        raise budget.TooLargeError(
            f"{file.path}: its weights take {needed:,} bytes in {dtype_name(dtype)}, and {memory_bytes:,} may be used: stream them "
            "(--stream), or give them more memory (--memory)"
        )
    _fill(model, file, dtype)
    file.close()


def free_to_use() -> int:
    """Return the bytes that this process can still allocate: the least of machine, control groups and address
    limit.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    free = free_memory_bytes()
    if limit == resource.RLIM_INFINITY:
        return free
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return min(free, max(0, limit - used))


def resident_memory() -> int:
    """Return this process's resident bytes, shared libraries included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _pack_of(run_dir: Path, step: int | None, dtype: torch.dtype) -> Path:
    """Return the pack of a run's step in the format of ``dtype``; if missing, log a warning and write it into the run
    directory.

    Without ``step``, of the newest. Raises MismatchError if it has other weights, and RunDirectoryError for a
    published model, or if no run with checkpoints is there.
    """
    run = RunDirectory(run_dir)
    if (folder := published_folder(run)) is not None:
        raise RunDirectoryError(
            f"{folder}: is a published model, and what is streamed is a pack: phalanx pack {shlex.quote(str(folder))} --out NEW.pack, and give that"
        )
    if not run.checkpoints.is_dir():
        raise RunDirectoryError(
            f"{run_dir}: has no folder checkpoints; give a pack, or the directory of a run that saved"
        )
    tier = DiskTier(run.checkpoints)
    steps = tier.steps()
    chosen = step if step is not None else max(steps, default=0)
    path = default_path(run, chosen, _FORMATS[dtype])
    if not path.exists():
        _log.warning("%s: packing step %d as %s, once", run_dir, chosen, _FORMATS[dtype])
        return pack(run_dir, step, path, _FORMATS[dtype])[0]
    recorded = tier.index(chosen).weights_sha256 if chosen in steps else None
    file = open_pack(path)
    file.close()
    if wrong := _not_of(file.index, run, chosen, recorded):
        packed_steps = ", ".join(map(str, sorted(steps))) or "none"
        again = (
            "and it is packed again"
            if chosen in steps
            else f"and give a step that is there ({packed_steps}): without the checkpoint of step {chosen} it cannot be packed again"
        )
        raise MismatchError(f"{path}: {wrong}; remove it, {again}", [])
    return path


def _not_of(index: PackIndex, run: RunDirectory, step: int, weights_sha256: str | None) -> str:
    """Return why a pack is not of this ``step`` of the run, by its run file and weights hash; empty if it may be.
    Few steps have a recorded hash.
    """
    if index.step != step:
        return f"is a pack of step {index.step}, under the name of step {step}"
    if weights_sha256 is not None and index.weights_sha256 != weights_sha256:
        return f"holds other weights than step {step} of this run"
    if resolve(recorded_run(index).model) != resolve(read_unchanged(run).model):
        return "holds another model than this run's"
    return ""


def empty_model(
    index: PackIndex, dtype: torch.dtype, seq_len: int = 0
) -> tuple[Transformer | Chain, ModelSpec]:
    """Return the pack's model without weights and its spec, both without multi-token prediction.

    Parameters are NaN, which takes no memory; buffers are 0. ``seq_len`` is the length of the sequences that each
    call gets a part of; 0 if a call gets full sequences.
    """
    recorded = recorded_run(index)
    spec = resolve(without_predictions(recorded.model))
    with torch.device("meta"):
        model = whole_model(spec, seq_len)
    nothing = torch.full((1,), torch.nan, dtype=dtype)
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):
            module._parameters[name] = nn.Parameter(nothing.expand(value.shape), requires_grad=False)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    return model.requires_grad_(False).eval(), spec


def _fill(model: nn.Module, file: PackFile, dtype: torch.dtype) -> None:
    """Read all sections of a pack into the model, except those of multi-token prediction; experts of a layer are stacked."""
    layers = set()
    for number, section in enumerate(file.index.sections):
        if section.kind == "expert":
            layers.add(section.layer)
        elif section.kind != "ahead":
            load_resident(model, file, number, dtype)
    for layer in sorted(layers):
        load_stack(model, file, layer, dtype)


def recorded_run(index: PackIndex) -> RunSpec:
    """Return the resolved run file of the pack's run."""
    with run_folder(index) as folder:
        return read_resolved(RunDirectory(folder))


@contextmanager
def run_folder(index: PackIndex) -> Iterator[Path]:
    """Yield a temporary folder with the small files of the pack's run.

    It is removed after the block. Raises MismatchError for a file outside it.
    """
    with held_folder("phalanx-pack-") as folder:
        for relative, data in index.files.items():
            target = (folder / relative).resolve()
            if not target.is_relative_to(folder.resolve()):
                raise MismatchError(
                    f"the pack names a file outside its folder: {relative}; it was not made by Phalanx", []
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        yield folder


# A scorer of a pack: the trainer's arithmetic over its weights.


def scorer_of(
    place: Path,
    step: int | None,
    compute: Compute | None,
    *,
    stream: bool,
    memory_bytes: int | None,
) -> Scorer:
    """Return the scorer of a pack, or of a run that is packed for streaming, computing in ``compute``; None for the
    run's own format.

    With ``stream`` the process takes at most ``memory_bytes``, by default what it has and four fifths of the free
    memory. Without it, the weights must fit into ``memory_bytes``, by default four fifths of the free memory. Weights
    rounded to 8 bits are noted. Raises the errors of ``open_model``.
    """
    dtype = DTYPES[compute] if compute else None
    if dtype is None and not is_pack(place):
        dtype = compute_dtype(read_resolved(RunDirectory(place)))
    file = packed(place, step, dtype or torch.float32)
    spec = recorded_run(file.index)
    dtype = dtype or compute_dtype(spec)
    model, resolved = empty_model(file.index, dtype, spec.train.seq_len)
    if isinstance(model, Transformer):
        begin_scoring()  # before memory is divided
    if stream:
        stream_weights(model, file, _weights_bytes(file.index, spec, resolved, dtype, memory_bytes), dtype)
    else:
        read_weights(model, file, free_to_use() * 4 // 5 if memory_bytes is None else memory_bytes, dtype)
    scorer = Scorer(spec, model, file.index.step)
    if file.index.format in ("fp8", "int8"):
        rounded = f"the weights are rounded to {file.index.format}, in {file.path}"
        scorer.note = f"{scorer.note}; {rounded}" if scorer.note else rounded
    return scorer


def _weights_bytes(
    index: PackIndex, spec: RunSpec, model: ModelSpec, dtype: torch.dtype, memory_bytes: int | None
) -> int:
    """Return the bytes of ``memory_bytes`` that remain for weights while a micro-batch is scored.

    None means what the process has plus four fifths of what is free. Raises TooLargeError.
    """
    train, name = spec.train, dtype_name(dtype)
    rows = (train.micro_batch_size or train.batch_size // train.slots) * train.seq_len
    computing = budget.Computing(rows, min(rows, train.loss_chunk or rows), train.seq_len).nbytes(model, name)
    return budget.divide_budget(
        index,
        name,
        resident_memory() + free_to_use() * 4 // 5 if memory_bytes is None else memory_bytes,
        process=resident_memory() + budget.LIBRARIES,
        computing=computing,
        of_text=0,
        most_texts=0,
        fewer="",  # a micro-batch has the run's own shape
    ).weights
