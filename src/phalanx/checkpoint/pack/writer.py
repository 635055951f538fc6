"""Pack a committed step of a run: one pass over the checkpoint's boxes, one over the new file, bounded memory, narrow formats.

Weights are gathered from any layout in parts of some 64 MiB, hashed (the hash must equal the run's), rounded and appended. The file gets
its name only when it is complete and durable. A failed or killed pack leaves at most a hidden file, which the next one removes.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor

from phalanx.checkpoint.committed.digest import WEIGHTS, TensorDigest, combine, gather
from phalanx.checkpoint.committed.restore import torch_dtype
from phalanx.checkpoint.format.blocks import grouped, write_all
from phalanx.checkpoint.format.boxes import Box, StoredBox, full_box
from phalanx.checkpoint.format.errors import CorruptError, NoSuchStepError, StorageError, StorageFullError
from phalanx.checkpoint.format.image import PAGE_BYTES, RawArray, spans
from phalanx.checkpoint.interop.huggingface.stored_folder import published_folder, weights_tier
from phalanx.checkpoint.pack.layout import (
    CHUNK_BYTES,
    SHARING,
    PackedTensor,
    PackError,
    PackFormat,
    PackIndex,
    Rounding,
    Section,
    encode_header,
    encode_index,
    lay_out,
    padded_bytes,
)
from phalanx.checkpoint.tiers.tier import ReadableTier
from phalanx.data.tokenizers.tokenizer import load_own_tokenizer
from phalanx.model.narrow import quantize
from phalanx.run.directory.files import files_below, read_small, sync
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.run.identity import read_unchanged

# Conversion of fp32 weights to bytes of packed tensors, and back: rounding, scales, and rounding errors.

_EXPONENT_BITS = 23


def narrowed(weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return elements ``(r, k)`` in an 8-bit ``dtype``, and the exponents of their scales ``(r, k / 32 rounded up)``,
    uint8. 32 elements of a row share a scale; the last group may be shorter.
    """
    columns = weights.shape[-1]
    values, scale = quantize(F.pad(weights, (0, -columns % SHARING)), dtype, "block")
    exponents = (scale.view(torch.int32) >> _EXPONENT_BITS).to(torch.uint8)
    return values[:, :columns], exponents


def widened(values: Tensor, exponents: Tensor, out: Tensor) -> None:
    """Write the elements ``(r, k)`` of ``values``, with the scales of ``exponents``, into ``out``, fp32 or bf16, exactly.

    ``exponents`` are those of ``narrowed``: uint8, biased as in fp32, so that 127 is a scale of 1.
    """
    scale = (exponents.to(torch.int32) << _EXPONENT_BITS).view(torch.float32).to(out.dtype)
    out.copy_(values)
    columns = out.shape[-1]
    full_columns = columns // SHARING * SHARING
    if full_columns:
        shared = out.as_strided((len(out), full_columns // SHARING, SHARING), (out.stride(0), SHARING, 1))
        shared.mul_(scale[:, : full_columns // SHARING, None])
    if full_columns < columns:
        out[:, full_columns:].mul_(scale[:, -1:])


def tensor_in(section: Tensor, place: PackedTensor) -> Tensor:
    """Return the elements of a packed tensor as a view of its section's bytes (uint8), without their scales."""
    flat = section[place.start : place.start + place.nbytes].view(torch_dtype(place.dtype))
    return flat.view(place.shape)


def write_wide(section: Tensor, place: PackedTensor, out: Tensor) -> None:
    """Write a packed tensor into ``out``, in ``out``'s dtype and of the tensor's shape."""
    stored = tensor_in(section, place)
    if place.scale_start is None:
        out.copy_(stored)
        return
    count = math.prod(place.scale_shape)
    exponents = section[place.scale_start : place.scale_start + count].view(place.scale_shape)
    widened(stored, exponents, out)


@dataclass(slots=True)
class RoundingMeter:
    """Accumulates the errors of stored weights against the fp32 ones, by tensor."""

    _sums: dict[str, tuple[float, float]] = field(default_factory=dict)

    def stored(self, name: str, weights: Tensor, dtype: torch.dtype) -> list[bytes]:
        """Return the bytes of fp32 ``weights`` in ``dtype``: elements, and the exponents of scales if there are any.

        Raises PackError for numbers that the format cannot represent; fp32 is not checked. The rounding error is counted
        for ``result``.
        """
        if dtype == torch.float32:
            self._add(name, 0.0, 1.0)
            return [_bytes(weights)]
        if not torch.isfinite(weights.sum()) and not torch.isfinite(weights).all():
            raise PackError(
                f"{name}: weights that are not finite (NaN or infinite) cannot be rounded; take an earlier step"
            )
        if dtype.itemsize == 1:
            values, exponents = narrowed(weights, dtype)
            restored = torch.empty_like(weights)
            widened(values, exponents, restored)
            parts = [_bytes(values), _bytes(exponents)]
        else:
            values = weights.to(dtype)
            restored = values.float()
            if torch.isinf(restored).any():
                raise PackError(f"{name}: {float(weights.abs().max()):g} is beyond {dtype}; pack as fp32")
            parts = [_bytes(values)]
        norm = float(torch.linalg.vector_norm(weights, dtype=torch.float64)) ** 2
        error = float(torch.linalg.vector_norm(restored.sub_(weights), dtype=torch.float64)) ** 2
        self._add(name, error, norm)
        return parts

    def _add(self, name: str, error: float, norm: float) -> None:
        """Add squared error and norm to those of a tensor."""
        before = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (before[0] + error, before[1] + norm)

    def result(self) -> Rounding:
        """Return the relative L2 error of all rounded weights together, and of the worst tensor with its name.
        Tensors without an error do not count; 0 and "" if there is no error.
        """
        relative = {name: math.sqrt(error / norm) for name, (error, norm) in self._sums.items() if norm}
        worst = max(relative, key=relative.__getitem__, default="")
        lossy = [sums for sums in self._sums.values() if sums[0]]
        total = math.sqrt(sum(s[0] for s in lossy) / sum(s[1] for s in lossy)) if lossy else 0.0
        return Rounding(total, relative.get(worst, 0.0), worst if lossy else "")


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


_BATCH_BYTES = 64 << 20
_FLUSH_BYTES = 64 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Progress = Callable[[int, int], None]
"""Called with the number of packed bytes, and the total."""


def default_path(run: RunDirectory, step: int, form: PackFormat) -> Path:
    """Return the default path of a step's pack."""
    return run.packs / f"step-{step:08d}-{form}.pack"


def pack(
    run_dir: Path,
    step: int | None = None,
    path: Path | None = None,
    form: PackFormat = "bf16",
    *,
    progress: Progress = lambda packed, total: None,  # noqa: ARG005
) -> tuple[Path, PackIndex]:
    """Pack committed ``step`` (by default the newest) of a run; return the new file and its index.

    Memory: some hundred MiB for any model. By default, the file is in the run's folder of packs, named after step and format.
    ``progress(packed_bytes, total_bytes)`` is called after each batch.

    Raises PackError if that file exists, ``path`` is not given for a published model, the step has no weights, one is
    not fp32, or a number does not fit; RunDirectoryError, NoSuchStepError, CorruptError if the run's weights do not
    match its hash, StorageFullError and the errors of reading the step. No new file remains then.
    """
    run = RunDirectory(run_dir)
    spec = read_unchanged(run)
    if run.tokenizer.is_dir():
        load_own_tokenizer(run)  # refuses another one
    tier, published = weights_tier(run), published_folder(run)
    chosen = _chosen(tier, step, run_dir)
    if path is None and published is not None:
        raise PackError(
            f"{published}: is a published model, and packs are not written into its folder: name the new file (--out)"
        )
    out = path or default_path(run, chosen, form)
    if out.exists():
        raise PackError(f"{out}: exists; name another file (--out), or remove that one first")
    source = _Source(tier, chosen)
    sections = lay_out(
        {name: box.global_shape for name, box in source.boxes.items()}, form, custom=bool(spec.model.factory)
    )
    named = f"{spec.name} ({(published or run_dir).resolve()})"
    with _new_file(out, _end(sections)) as descriptor:
        checksums, meter = _write_sections(descriptor, sections, source, progress)
        index = PackIndex(
            form, named, chosen, source.sha256(), sections, checksums, meter.result(), _small_files(run)
        )
        _require_hash(source, index.weights_sha256, run_dir)
        text = encode_index(index)
        start = _end(sections)
        write_all(descriptor, text.ljust(padded_bytes(len(text)), b"\0"), start)
        write_all(descriptor, encode_header(start, len(text)), 0)
    return out, index


def _chosen(tier: ReadableTier, step: int | None, run_dir: Path) -> int:
    """Return ``step``, or the newest committed one; raises RunDirectoryError if there is none, NoSuchStepError for another step."""
    steps = tier.steps()
    if not steps:
        raise RunDirectoryError(f"{run_dir}: no checkpoint is committed; let the run save one first")
    if step is not None and step not in steps:
        raise NoSuchStepError(f"{run_dir}: there is no step {step}; there are {steps}")
    return max(steps) if step is None else step


def _end(sections: tuple[Section, ...]) -> int:
    return max((section.start + padded_bytes(section.nbytes) for section in sections), default=PAGE_BYTES)


def _small_files(run: RunDirectory) -> dict[str, bytes]:
    """Return the run file, and the files of the tokenizer and the publisher, by their paths in the run directory."""
    files = {run.run_file.name: read_small(run.run_file)}
    for folder in (run.tokenizer, run.published):
        if folder.is_dir():
            for path in sorted(file for file in files_below(folder) if file.is_file()):
                files[str(path.relative_to(run.path))] = read_small(path)
    return files


class _Source:
    """Weights of a committed step, hashed as they are read; each tensor must be read from its start to its end."""

    def __init__(self, tier: ReadableTier, step: int) -> None:
        """List the step's weights; no data are read. Raises PackError if there are none, or one is not fp32."""
        self._tier, self.step = tier, step
        self._stored: dict[str, list[StoredBox]] = defaultdict(list)
        self.boxes: dict[str, Box] = {}
        for stored in tier.boxes(step):
            if stored.box.name.startswith(WEIGHTS):
                name = stored.box.name.removeprefix(WEIGHTS)
                self._stored[name].append(stored)
                self.boxes[name] = full_box(stored.box.name, stored.box.dtype, stored.box.global_shape)
                if stored.box.dtype != "float32":
                    raise PackError(
                        f"{name}: is {stored.box.dtype} in the checkpoint; packs are made of fp32"
                    )
        if not self.boxes:
            raise PackError(f"step {step} of {tier.name} has no weights; take another step")
        self._hashes = {name: hashlib.sha256() for name in self.boxes}

    def take(self, boxes: list[Box]) -> list[RawArray]:
        """Return the elements of these boxes as raw bits, and add them to the tensors' hashes. Raises the errors of ``gather``."""
        names = dict.fromkeys(box.name.removeprefix(WEIGHTS) for box in boxes)
        stored = [entry for name in names for entry in self._stored[name]]
        arrays = gather(self._tier, self.step, boxes, stored)
        for box, array in zip(boxes, arrays, strict=True):
            self._hashes[box.name.removeprefix(WEIGHTS)].update(array.reshape(-1).view(np.uint8).data)
        return arrays

    def sha256(self) -> str:
        """Return the hash of the weights, after all were read."""
        return combine(
            {
                name: TensorDigest(box.dtype, box.global_shape, self._hashes[name].digest())
                for name, box in self.boxes.items()
            }
        )

    def recorded(self) -> str | None:
        """Return the hash that the run recorded with the step, if any."""
        return self._tier.record(self.step).weights_sha256


def _require_hash(source: _Source, computed: str, run_dir: Path) -> None:
    """Raise ``CorruptError`` if the run recorded another hash of the weights."""
    recorded = source.recorded()
    if recorded is not None and recorded != computed:
        raise CorruptError(
            f"{run_dir}: the weights of step {source.step} have the hash {computed}, but the run recorded {recorded}: they are not the "
            "trained weights. Pack another step."
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a tensor (all of a small one) to be written into a section."""

    section: int
    tensor: PackedTensor
    box: Box
    last: bool
    """True for the tensor's last rows, after which its scales are written."""


def _parts(sections: tuple[Section, ...], source: _Source) -> Iterator[_Part]:
    """Yield each section's tensors in order, as boxes of the checkpoint; those above ``_BATCH_BYTES`` in pieces, of
    which the last is marked.
    """
    for number, section in enumerate(sections):
        for tensor in section.tensors:
            box = source.boxes[section.prefix + tensor.name]
            if section.expert >= 0:
                offset = (section.expert, *(0 for _ in tensor.shape))
                box = box.part(offset, (1, *tensor.shape))
            pieces = spans(box, box, _BATCH_BYTES) if box.nbytes > _BATCH_BYTES else None
            if pieces is None:
                yield _Part(number, tensor, box, last=True)
                continue
            for place, piece in enumerate(pieces):
                yield _Part(number, tensor, piece.part, last=place == len(pieces) - 1)


def _write_sections(
    descriptor: int, sections: tuple[Section, ...], source: _Source, progress: Progress
) -> tuple[tuple[tuple[int, ...], ...], RoundingMeter]:
    """Read all weights in batches and write them rounded, each tensor's scales behind it; report progress in fp32
    bytes. Return the checksums of chunks by section, and the meter.
    """
    meter, packed_bytes = RoundingMeter(), 0
    total = sum(box.nbytes for box in source.boxes.values())
    writer = _Writer(descriptor, sections)
    scales: list[bytes] = []
    # Experts of a layer are contiguous in a checkpoint, whose blocks are then read once.
    for batch in grouped(_parts(sections, source), lambda part: part.box.nbytes, _BATCH_BYTES):
        for part, data in zip(batch, source.take([member.box for member in batch]), strict=True):
            weights = torch.from_numpy(data.view(np.float32))
            weights = (
                weights.reshape(-1, weights.shape[-1]) if part.tensor.scale_start is not None else weights
            )
            name = sections[part.section].prefix + part.tensor.name
            elements, *exponents = meter.stored(name, weights, torch_dtype(part.tensor.dtype))
            writer.at(part.section, part.tensor.start if not scales and _first(part) else None)
            writer.append(elements)
            scales += exponents
            if part.last and scales:
                assert part.tensor.scale_start is not None, "only tensors with scales have exponents"
                writer.at(part.section, part.tensor.scale_start)
                writer.append(b"".join(scales))
                scales = []
            packed_bytes += part.box.nbytes
        progress(packed_bytes, total)
    return writer.finish(), meter


def _first(part: _Part) -> bool:
    """Return True for the first part of a tensor, or of each expert in a stack."""
    first = part.box.offset[1:] if len(part.box.shape) > len(part.tensor.shape) else part.box.offset
    return not any(first)


@dataclass(slots=True)
class _Writer:
    """Appends to sections in their order; computes the checksum of each chunk."""

    descriptor: int
    sections: tuple[Section, ...]
    _number: int = 0
    _buffer: bytearray = field(default_factory=bytearray)
    _written: int = 0
    """Bytes of the current section that are in the file."""
    _unflushed: int = 0
    _digests: list[list[int]] = field(default_factory=lambda: [[]])

    def at(self, section: int, offset: int | None) -> None:
        """Advance to ``offset`` of a section (``None``: do not move within it), filling the gap with zeros. Sections
        before it are closed.
        """
        while self._number < section:
            self._close_section()
        if offset is not None:
            gap = offset - self._written - len(self._buffer)
            assert gap >= 0, "sections are written from their beginning to their end"
            self._buffer += bytes(gap)

    def append(self, data: bytes) -> None:
        """Add bytes to the current section; each full chunk is written."""
        view = memoryview(data)
        while len(view):
            room = CHUNK_BYTES - len(self._buffer)
            self._buffer += view[:room]
            view = view[room:]
            if len(self._buffer) == CHUNK_BYTES:
                self._write_chunk()

    def finish(self) -> tuple[tuple[int, ...], ...]:
        """Close the last section; return the checksums of all."""
        while self._number < len(self.sections):
            self._close_section()
        return tuple(map(tuple, self._digests[: len(self.sections)]))

    def _close_section(self) -> None:
        """Write the section's last chunk, and go to the next section."""
        if self._buffer:
            self._write_chunk()
        self._number, self._written = self._number + 1, 0
        self._digests.append([])

    def _write_chunk(self) -> None:
        """Write the buffer and record its checksum; regularly sync the file and drop it from the page cache."""
        self._digests[self._number].append(xxhash.xxh3_64_intdigest(self._buffer))
        start = self.sections[self._number].start + self._written
        write_all(self.descriptor, self._buffer, start)
        self._written += len(self._buffer)
        self._unflushed += len(self._buffer)
        self._buffer.clear()
        if self._unflushed >= _FLUSH_BYTES:
            # Dirty pages are memory too, and would evict other data from the page cache.
            os.fdatasync(self.descriptor)
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            self._unflushed = 0


@contextmanager
def _new_file(out: Path, needed: int) -> Iterator[int]:
    """Yield the descriptor of a file with a hidden name; rename it to ``out`` on success, and remove it on failure.

    Raises PackError if ``out`` exists by then, StorageFullError at once if fewer than ``needed`` bytes are free, or
    if the disk is full later, and StorageError in place of any other OSError. Creates the folder, and removes what
    killed processes have left of ``out``.
    """
    temporary = out.with_name(f".{out.name}.{os.getpid()}.partial")
    descriptor = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Files of killed packs of the same name are removed.
        pattern = re.compile(rf"\.{re.escape(out.name)}\.(\d+)\.partial")
        for name in os.listdir(out.parent):
            match = pattern.fullmatch(name)
            if match and not Path("/proc", match[1]).exists():
                (out.parent / name).unlink(missing_ok=True)
        stat = os.statvfs(out.parent)
        if stat.f_bavail * stat.f_frsize < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out))
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        yield descriptor
        os.fsync(descriptor)
        # A link, unlike a rename, does not replace a file that was created meanwhile.
        os.link(temporary, out)
        sync(out.parent)
    except FileExistsError as error:
        raise PackError(f"{out}: was created meanwhile by another `phalanx pack`") from error
    except OSError as error:
        raise _explained(error, out, needed) from error
    finally:
        if descriptor is not None:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)


def _explained(error: OSError, out: Path, needed: int) -> Exception:
    """Return the error of a failed write of a pack of ``needed`` bytes: ``StorageFullError`` for a full disk, else ``StorageError``."""
    if error.errno in _FULL:
        return StorageFullError(
            f"{out}: no room for a pack of {needed:,} bytes ({error.strerror}). No files remain: free space, name another "
            "file (--out), or a narrower format (--format int8)."
        )
    return StorageError(
        f"{error.filename or out}: {error.strerror}. No files remain; name another file (--out)."
    )
