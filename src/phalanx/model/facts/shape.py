"""Lists every parameter of a model: its table of parts.

The rows come from the files of the kinds of layers (``phalanx.run.kinds``); a test holds the table against the module in
``phalanx.model.transformer``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from phalanx.run.factory import FactoryError
from phalanx.run.kinds import block, ends, prediction_ahead
from phalanx.run.kinds.mixture import is_mixture
from phalanx.run.kinds.operations import Parameter
from phalanx.run.spec import ModelSpec


def parameters(spec: ModelSpec) -> Iterator[Parameter]:
    """Every parameter of a resolved model, in the order in which the module registers them.

    Raises ``FactoryError`` for a user's own model, whose parameters are known only once it is built.
    """
    _refuse_custom(spec)
    head, *rest = outside_blocks(spec)
    yield head
    # Layers of a kind differ by name alone: each kind is derived once.
    kinds = {mixed: block.parts(spec, mixed=mixed) for mixed in {*_mixtures(spec)}}
    for layer, mixed in enumerate(_mixtures(spec)):
        yield from block.placed(f"blocks.{layer}", layer, kinds[mixed])
    yield from rest


def numbered_parameters(spec: ModelSpec) -> Iterator[tuple[Parameter, int]]:
    """The parameters of ``parameters``, those of blocks of one kind listed once; and how many there are of each."""
    _refuse_custom(spec)
    yield from ((part, 1) for part in outside_blocks(spec))
    for mixed, blocks in Counter(_mixtures(spec)).items():
        parts = block.placed("blocks", 0, block.parts(spec, mixed=mixed))
        yield from ((part, blocks) for part in parts)


def _mixtures(spec: ModelSpec) -> list[bool]:
    """For each layer, True if it is a mixture of experts."""
    return [is_mixture(spec, layer) for layer in range(spec.layers)]


def _refuse_custom(spec: ModelSpec) -> None:
    if spec.factory:
        raise FactoryError(
            f"{spec.factory} is a model of your own: its parameters and operations are known only to training, which builds "
            "it; plans, `phalanx show` and exports to other software are for the transformer that [model] describes"
        )


def outside_blocks(spec: ModelSpec) -> Iterator[Parameter]:
    """The parameters of both ends of the model: embedding, final norm, output projection, predictions ahead."""
    depths = prediction_ahead.depths(spec)
    yield from ends.embedding_parts(spec, predictions=1 + depths)
    yield from ends.head_parts(spec, predictions=1 + depths)
    for depth in range(depths):
        yield from prediction_ahead.parts(spec, depth)


def buffers(spec: ModelSpec) -> Iterator[Parameter]:
    """Buffers that belong to the state of a resolved model: the balance bias of each router, fp32, in their order."""
    if spec.moe is not None and spec.moe.balance_bias:
        for part in parameters(spec):
            if part.kind == "router":
                name = part.name.removesuffix("weight") + "bias"
                yield Parameter(name, (spec.moe.experts,), "balance")
