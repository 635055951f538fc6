"""A block: attention and feed-forward, each normalized before or after and added to the residual stream (``phalanx.model.transformer``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from phalanx.run.kinds import feed_forward, mixture
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.kinds.operations import (
    Dropout,
    KeptTensor,
    Norm,
    Operation,
    Parameter,
    Pointwise,
    norm,
    under,
)
from phalanx.run.spec import ModelSpec


def parts(model: ModelSpec, *, mixed: bool) -> tuple[Parameter, ...]:
    """The parameters of a block, named within it, with a mixture of experts or a dense feed-forward layer."""
    before = norm_before(model)
    after = norm_after(model)
    return (
        *under("attention_norm", before),
        *under("attention", attention_kind(model).parts(model)),
        *under("attention_post_norm", after),
        *under("ffn_norm", before),
        *under(
            "ffn",
            mixture.parts(model, model.moe)
            if mixed and model.moe
            else feed_forward.parts(model, model.ffn_dim),
        ),
        *under("ffn_post_norm", after),
    )


def norm_before(model: ModelSpec) -> tuple[Parameter, ...]:
    """The norm before attention, and before the feed-forward layer; empty if there is none."""
    return tuple(norm(model.dim)) if model.norm_placement != "after" else ()


def norm_after(model: ModelSpec) -> tuple[Parameter, ...]:
    """The norm of attention's result, and of the feed-forward layer's; empty if there is none."""
    return tuple(norm(model.dim)) if model.norm_placement != "before" else ()


def placed(name: str, layer: int, rows: Iterable[Parameter]) -> Iterator[Parameter]:
    """Yield the parameters ``rows`` with names below block ``name``, which is layer ``layer``."""
    for part in rows:
        path = f"{name}.{part.name}"
        # FSDP gathers experts apart from the rest of their block.
        unit = path.rpartition(".")[0] if part.stacked else name
        yield dataclasses.replace(part, name=path, layer=layer, unit=unit)


def operations(model: ModelSpec, *, mixed: bool) -> tuple[Operation, ...]:
    """The operations of a block with a mixture of experts or a dense feed-forward layer."""
    before = (Norm("norm", norm_before(model)),) if norm_before(model) else ()
    after = (Norm("residual", norm_after(model)),) if norm_after(model) else ()
    return (
        KeptTensor("input", "local", model.dim),
        *before,
        *attention_kind(model).operations(model),
        *after,
        # The residual sum, and in backward that of its gradients, reads two and writes one; twice in a layer.
        Pointwise("out", "local", 6 * model.dim, 6 * model.dim, kernels=2),
        KeptTensor("residual", "local", model.dim),
        *before,
        *(
            mixture.operations(model, model.moe)
            if mixed and model.moe
            else feed_forward.operations(model, model.ffn_dim)
        ),
        *after,
        Dropout(model.dim),
    )
