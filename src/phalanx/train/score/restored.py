"""Builds a run's whole model with the weights of a step, for those who compute with it and do not train it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from phalanx.checkpoint.committed.restore_weights import Rows, restore_weights
from phalanx.checkpoint.interop.huggingface.stored.stand_in import weights_tier
from phalanx.model.custom import Chain
from phalanx.model.layers.experts.router import routers
from phalanx.model.transformer import Transformer
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.kinds import prediction_ahead
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec
from phalanx.train.assembly.model_facts import whole_model


def restored_model(
    run_dir: Path,
    step: int | None,
    *,
    seq_len: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    ahead: bool = False,
    cut: Callable[[Transformer], Mapping[str, Rows]] | None = None,
) -> tuple[Transformer | Chain, ModelSpec, int]:
    """The model with the weights of ``step``, or of the newest step that can be read; its resolved description; and the step.

    Reads ``run.toml`` and ``checkpoints/``; of a checkpoint, nothing but the weights (fp32 there, ``dtype`` here). What predicts further
    ahead is left out, unless ``ahead`` asks for it. ``seq_len`` is the length of the sequences that each call has a part of; 0 if a call has them from their
    beginning. ``cut`` takes away what is not wanted of the model before anything is read, and tells of what tensors it has left some rows. Raises RunDirectoryError where the run has no checkpoint, NoSuchStepError, and what ``restore`` raises.
    """
    # The checkpoint's names are the same without what predicts further ahead.
    directory = RunDirectory(run_dir)
    recorded = read_resolved(directory)
    spec = resolve(recorded.model if ahead else prediction_ahead.without(recorded.model))
    if not spec.vocab_size:
        raise RunDirectoryError(
            f"{directory.run_file}: model.vocab_size is 0; give a run directory, whose run.toml has it filled in"
        )
    tier = weights_tier(directory)
    parts: Mapping[str, Rows] = {}
    with torch.device("meta"):
        model = whole_model(spec, seq_len)
        if cut is not None:
            if not isinstance(model, Transformer):
                raise RunDirectoryError(
                    f"{directory.run_file}: model.factory makes a model that cannot be cut"
                )
            parts = cut(model)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False).eval()
    for _, router in routers(model):
        # fp32 like all of the choice of experts, whatever the rest computes in.
        router.bias = None if router.bias is None else router.bias.float()
    return model, spec, restore_weights(tier, run_dir, model, step, parts)
