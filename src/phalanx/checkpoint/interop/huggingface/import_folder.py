"""Import: a Hugging Face model folder becomes a run directory to start from.

Then the published model can be trained, and can generate text. No number changes: tensors are renamed and put into this project's order
(``stored_weights.py``), in pieces of bounded size. Only float64 is rounded, with a note. The directory gets its name only when it is
complete.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tomli_w
import torch

from phalanx.checkpoint.committed.digest import WEIGHTS, TensorDigest, combine
from phalanx.checkpoint.format.blocks import page_aligned
from phalanx.checkpoint.format.boxes import Box, Extent, full_box
from phalanx.checkpoint.format.image import Image, image_layout, spans
from phalanx.checkpoint.interop.huggingface.folders import (
    CONFIG,
    PIECE_BYTES,
    copy_publisher_files,
    new_folder,
    published_context,
    read_json,
)
from phalanx.checkpoint.interop.huggingface.names import Published
from phalanx.checkpoint.interop.huggingface.stored_weights import Weights, open_folder, values
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import Draft, StepRecord
from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.published.files import TOKENIZER_FILE
from phalanx.data.tokenizers.tokenizer import SENTENCEPIECE_FILE, tokenizer_from_file
from phalanx.run.directory.paths import RunDirectory
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
    with new_folder(out) as folder, ExitStack() as stack:
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
    context = published_context(read_json(directory / CONFIG))
    run.run_file.write_text(run_file_text(name, spec, context))
    without_tokenizer = _copy_tokenizer(directory, run.tokenizer)
    return without_tokenizer, copy_publisher_files(directory, run.published)


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
    """Yield the model's tensors in parts, in order; each list of parts fits into an image."""
    tensors = (full_box(WEIGHTS + name, "float32", shape) for name, shape in shapes.items())
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
    """Write the model's tokenizer to ``folder``. Return an empty text, or the reason why there is none."""
    if not any((directory / name).exists() for name in (TOKENIZER_FILE, SENTENCEPIECE_FILE)):
        return f"{directory} has neither {TOKENIZER_FILE} nor {SENTENCEPIECE_FILE}"
    try:
        tokenizer = tokenizer_from_file(directory)
    except TokenizerError as error:
        return str(error)
    folder.mkdir()
    tokenizer.save(folder)
    return ""
