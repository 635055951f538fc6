"""Models with the initial weights that a run would start from."""

from __future__ import annotations

from phalanx.model.facts.shape import parameters
from phalanx.model.init import fill
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec


def initialized(spec: ModelSpec, seed: int = 0) -> Transformer:
    """The module of a spec, filled as a run with this seed fills it."""
    model = Transformer(resolve(spec)).requires_grad_(False)
    by_name = dict(model.named_parameters())
    for parameter in parameters(model.spec):
        fill(by_name[parameter.name], parameter, (0,) * len(parameter.shape), model.spec, seed)
    return model
