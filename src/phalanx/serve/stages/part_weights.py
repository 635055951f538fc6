"""The weights of a part of a model: how layers are divided, and only what a part needs is read."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import nn

from phalanx.checkpoint.committed.digest import TensorDigest, tensor_digest
from phalanx.checkpoint.committed.restore_weights import Rows
from phalanx.checkpoint.format.index import encode_index
from phalanx.checkpoint.format.shards import dtype_name
from phalanx.checkpoint.interop.huggingface.stored.folder_tier import FolderTier
from phalanx.checkpoint.interop.huggingface.stored.stand_in import weights_tier
from phalanx.model.facts.shape import parameters
from phalanx.model.facts.stages import balance
from phalanx.model.transformer import Transformer
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import ModelSpec
from phalanx.serve.engine.errors import EngineError
from phalanx.serve.stages.shares import Share, cut, projection_by, settle_projection
from phalanx.train.score.score import restored_model


def divided(spec: ModelSpec, stages: int) -> list[range]:
    """The layers of each of ``stages`` processes, such that the one with most weights has least. Raises EngineError."""
    if stages > spec.layers:
        raise EngineError(
            f"--pipeline {stages}: the model has {spec.layers} layers, so at most so many processes can have a part of it"
        )
    sizes = [0] * spec.layers
    for one in parameters(spec):
        first, last = one.section == "embedding", one.section == "end"
        layer = 0 if first else spec.layers - 1 if last else one.layer
        sizes[layer] += math.prod(one.shape)
        if first and spec.tie_embeddings and stages > 1:
            sizes[-1] += math.prod(one.shape)
    boundaries = [0, *accumulate(balance(sizes, stages))]
    return [range(begin, end) for begin, end in pairwise(boundaries)]


def restored_part(
    run_dir: Path, step: int, layers: range, dtype: torch.dtype
) -> tuple[Transformer, ModelSpec, dict[str, TensorDigest]]:
    """These layers with the weights of ``step``, of the last ones also norm and output projection; the whole model's description; and
    the digest of each tensor by its name in the whole. Raises as ``restored_model`` does."""
    model, spec, _ = restored_model(run_dir, step, dtype=dtype, cut=partial(_cut, layers=layers))
    assert isinstance(model, Transformer), "others are refused where they are cut"
    digests = tensor_digests(model)
    if layers.stop == spec.layers and layers.start > 0:
        _take_projection(model)
    return model, spec, digests


def checkpoint_name(run_dir: Path, step: int) -> str:
    """16 digits that name a step's checkpoint: two places that have it under the same name have the same weights of all layers. A published
    model's name is of its files on this machine."""
    tier = weights_tier(RunDirectory(run_dir))
    named = tier.version() if isinstance(tier, FolderTier) else encode_index(tier.index(step))
    return hashlib.sha256(named).hexdigest()[:16]


def _cut(model: Transformer, layers: range) -> dict[str, Rows]:
    if layers.stop > model.spec.layers:
        raise EngineError(
            f"layer {layers.stop - 1} is asked for, and the model of this run has {model.spec.layers} layers: give every stage the same run"
        )
    first, last = layers.start == 0, layers.stop == model.spec.layers
    # A tied output projection is the embedding, which the last part then reads too.
    model.keep(layers, first=first or (last and model.head is None), last=last)
    return {}


def restored_share(
    run_dir: Path, step: int, share: Share, dtype: torch.dtype
) -> tuple[Transformer, ModelSpec, dict[str, TensorDigest]]:
    """A share of each layer with the weights of ``step``, in the first also the embedding; the whole model's description; and the digests of
    the whole tensors that it is this process's to tell. Raises as ``restored_model`` does."""
    # A share has no whole tensors to hash: each process reads some of them for that alone, before its own.
    names: list[str] = []

    def to_hash(model: Transformer) -> dict[str, Rows]:
        names.extend(sorted(model.state_dict())[share.number :: share.of])
        _keep_tensors(model, names)
        return {}

    hashed, spec, _ = restored_model(run_dir, step, dtype=dtype, cut=to_hash)
    digests = tensor_digests(hashed)
    del hashed
    model, spec, _ = restored_model(run_dir, step, dtype=dtype, cut=partial(cut, share=share))
    assert isinstance(model, Transformer), "others are refused where they are cut"
    settle_projection(model, share)
    return model, spec, digests


def _keep_tensors(model: nn.Module, names: Collection[str]) -> None:
    """Takes all others away: the model computes nothing any more."""
    for prefix, module in list(model.named_modules()):
        for own in [
            *dict(module.named_parameters(recurse=False)),
            *dict(module.named_buffers(recurse=False)),
        ]:
            if (f"{prefix}.{own}" if prefix else own) not in names:
                setattr(module, own, None)


def _take_projection(model: Transformer) -> None:
    """Leaves a tied embedding to the last part as its output projection alone: what it is given is no tokens."""
    if model.embedding is None:
        return
    model.head, model.embedding = projection_by(model.embedding.weight), None


def tensor_digests(model: nn.Module) -> dict[str, TensorDigest]:
    """The digest of every tensor as it is computed with, by name."""
    return {
        # What guesses has no part in the bits of a text, which are the same without it.
        name: tensor_digest(dtype_name(tensor.dtype), tuple(tensor.shape), [_bytes(tensor)])
        for name, tensor in model.state_dict().items()
        if not name.startswith("mtp.")
    }


def _bytes(tensor: torch.Tensor) -> memoryview:
    data: memoryview = tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().data
    return data
