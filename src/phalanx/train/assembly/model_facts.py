"""The facts of the whole model that a rank needs before it builds its own part: names, shapes, stages, FLOP.

For the transformer they are derived from the run file alone (``phalanx.model.facts``); for a user's own model they are found
by building it once on the meta device (``phalanx.model.custom``). Every rank comes to the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from phalanx.model.custom import Chain, custom_facts
from phalanx.model.facts.shape import buffers, count, parameters, stage_layers
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.operations import Parameter
from phalanx.run.spec import ModelSpec, RunSpec


@dataclass(frozen=True)
class ModelFacts:
    """The facts of the whole model of a resolved run."""

    parameters: Mapping[str, Parameter]
    """Every parameter and balance bias by name, in the canonical order."""
    stages: tuple[range, ...]
    """The layers of each pipeline stage, first stage first."""
    flops_per_token: int
    """Training FLOP per token, attention counted in full."""


def model_facts(spec: RunSpec) -> ModelFacts:
    """The facts of the model of a resolved run. Raises as ``phalanx.model.custom.custom_facts`` does."""
    if spec.model.factory:
        custom = custom_facts(spec.model, spec.train.seq_len, compute_dtype(spec))
        return ModelFacts(
            {parameter.name: parameter for parameter in custom.parameters},
            tuple(stage_layers(spec, custom.layer_costs)),
            custom.flops_per_token,
        )
    kinds = (*parameters(spec.model), *buffers(spec.model))
    return ModelFacts(
        {kind.name: kind for kind in kinds},
        tuple(stage_layers(spec)),
        count(spec.model, spec.train.seq_len).flops_per_token,
    )


def whole_model(spec: ModelSpec, seq_len: int) -> Transformer | Chain:
    """The module that a resolved description stands for, for sequences of ``seq_len`` tokens, on the current default device."""
    return Chain(spec) if spec.factory else Transformer(spec, seq_len)


def compute_dtype(spec: RunSpec) -> torch.dtype:
    """The format of weights and hidden states in forward and backward of a resolved run."""
    return torch.bfloat16 if spec.precision.compute == "bf16" else torch.float32
