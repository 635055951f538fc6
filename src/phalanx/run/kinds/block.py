"""A block: attention and feed-forward, each normalized before and added to the residual stream (``phalanx.model.block``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from phalanx.run.kinds import feed_forward, mixture
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.kinds.operations import Dropout, KeptTensor, Norm, Operation, Pointwise
from phalanx.run.kinds.parts import Parameter, norm, under
from phalanx.run.spec import ModelSpec


def parts(model: ModelSpec, *, mixed: bool) -> tuple[Parameter, ...]:
    """The parameters of a block, named within it, with a mixture of experts or a dense feed-forward layer."""
    return (
        *under("attention_norm", norm(model.dim)),
        *under("attention", attention_kind(model).parts(model)),
        *under("ffn_norm", norm(model.dim)),
        *under(
            "ffn",
            mixture.parts(model, model.moe)
            if mixed and model.moe
            else feed_forward.parts(model, model.ffn_dim),
        ),
    )


def placed(name: str, layer: int, rows: Iterable[Parameter]) -> Iterator[Parameter]:
    """The ``parts`` of a block as those of block ``name``, which is layer ``layer``."""
    for part in rows:
        path = f"{name}.{part.name}"
        # FSDP gathers experts apart from the rest of their block.
        unit = path.rpartition(".")[0] if part.stacked else name
        yield dataclasses.replace(part, name=path, layer=layer, unit=unit)


def operations(model: ModelSpec, *, mixed: bool) -> tuple[Operation, ...]:
    """The operations of a block with a mixture of experts or a dense feed-forward layer."""
    return (
        KeptTensor("input", "local", model.dim),
        Norm("norm", tuple(norm(model.dim))),
        *attention_kind(model).operations(model),
        # The residual sum, and in backward that of its gradients, reads two and writes one; twice in a layer.
        Pointwise("out", "local", 6 * model.dim, 6 * model.dim, kernels=2),
        KeptTensor("residual", "local", model.dim),
        Norm("norm", tuple(norm(model.dim))),
        *(
            mixture.operations(model, model.moe)
            if mixed and model.moe
            else feed_forward.operations(model, model.ffn_dim)
        ),
        Dropout(model.dim),
    )
