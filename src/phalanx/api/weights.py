"""Weights from Python: as a state dict, as a hash, and as text that they generate."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint.committed.digest import WEIGHTS, digest_checkpoint
from phalanx.checkpoint.committed.restore import restore
from phalanx.checkpoint.format.boxes import whole
from phalanx.checkpoint.format.shards import Shard, torch_dtype
from phalanx.checkpoint.interop.huggingface.stored.folder_tier import FolderTier
from phalanx.checkpoint.interop.huggingface.stored.stand_in import run_or_stand_in
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import ReadableTier
from phalanx.run.directory.paths import RunDirectoryError, committed_steps, is_published, locate_checkpoints
from phalanx.serve.generate import continued


def load_weights(place: Path | str, step: int | None = None) -> dict[str, Tensor]:
    """The weights of a checkpoint as a state dict: whole tensors on the CPU, in the format of the master weights (fp32).

    The names are those of the module: of a model of your own, ``model.load_state_dict(load_weights(...))`` takes them.

    Args:
        place: A run directory, its folder of checkpoints, one checkpoint, or a folder of Hugging Face.
        step: ``None``: the newest, or that of the one checkpoint.

    Raises:
        RunDirectoryError: There is no such checkpoint, or ``place`` is that of another step.
        CheckpointError: It is damaged.
    """
    tier, step = _checkpoint(place, step)
    boxes = {held.box.name: held.box for held in tier.boxes(step) if held.box.name.startswith(WEIGHTS)}
    shards = [
        Shard(
            whole(name, box.dtype, box.global_shape),
            torch.empty(box.global_shape, dtype=torch_dtype(box.dtype)),
        )
        for name, box in sorted(boxes.items())
    ]
    restore(tier, step, shards)
    return {shard.box.name.removeprefix(WEIGHTS): shard.tensor for shard in shards}


def weights_sha256(place: Path | str, step: int | None = None) -> str:
    """SHA-256 (hex) over all weights of a checkpoint, from the bytes on disk: the hash that training reports.

    ``place`` and ``step`` are as for ``load_weights``.
    """
    tier, step = _checkpoint(place, step)
    return digest_checkpoint(tier, step)


def generate_text(
    run_dir: Path | str,
    prompt: str = "",
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    step: int | None = None,
    chat: bool = False,
    device: str = "auto",
) -> str:
    """Returns text that continues ``prompt``, at most ``tokens`` tokens, without the prompt.

    ``run_dir`` is a run directory, or a folder of Hugging Face.

    What the tokenizer puts before each text comes before the prompt; any of the model's end tokens ends the text. With ``chat`` the
    prompt is a user's message, which the chat template of an imported model frames. The same seed gives the same text. ``temperature`` 0
    takes the likeliest token; ``top_k`` 0 and ``top_p`` 1 leave all in. ``device`` computes: "cpu", "cuda", "cuda:1", or "auto", which is a GPU
    if there is one; another kind may round to another text. Raises ``RunDirectoryError`` where the run has saved nothing,
    ``CheckpointError``, ``DataError`` where it has no tokenizer or no chat template, and ``ValueError`` for numbers out of range.
    """
    with run_or_stand_in(Path(run_dir)) as read:
        return "".join(
            continued(
                read,
                prompt,
                tokens=tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                step=step,
                chat=chat,
                device=device,
            )
        )


def _checkpoint(place: Path | str, step: int | None) -> tuple[ReadableTier, int]:
    if is_published(Path(place)):
        return FolderTier(Path(place)), step or 0
    root, wanted = locate_checkpoints(Path(place), step)
    steps = committed_steps(root) if root.is_dir() else []
    if not steps:
        raise RunDirectoryError(f"there is no committed checkpoint in {place}")
    if wanted is not None and wanted not in steps:
        raise RunDirectoryError(f"there is no step {wanted} in {place}; there are {steps}")
    return DiskTier(root), steps[-1] if wanted is None else wanted
