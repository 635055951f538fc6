"""Small models and their gradients, for tests of what is applied to blocks from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec

DENSE = ModelSpec(layers=3, dim=64, heads=4, kv_heads=2, ffn_dim=160, vocab_size=97, qk_norm=True)
MIXTURE = ModelSpec(
    layers=3,
    dim=64,
    heads=4,
    ffn_dim=96,
    vocab_size=97,
    mla=MlaSpec(query_rank=32, kv_rank=32, nope_head_dim=16, rope_head_dim=8, value_head_dim=16),
    moe=MoeSpec(
        experts=4, per_token=2, ffn_dim=48, shared=1, first_dense=1, balance_bias=True, aux_loss=0.01
    ),
)
MODELS = {
    "dense": DENSE,
    "mixture": MIXTURE,
    "capped": dataclasses.replace(
        DENSE, score_cap=0.5, sinks=True, attention_pattern=("window", "full"), window=9
    ),
}


def build(spec: ModelSpec, *apply: Callable[[nn.Module], None]) -> Transformer:
    """A model with fixed random weights, to which ``apply`` was applied in order."""
    model = Transformer(resolve(spec))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            is_vector = parameter.ndim == 1
            parameter.copy_(
                torch.ones(parameter.shape, device="cpu")
                if is_vector
                else 0.2 * torch.randn(parameter.shape, generator=generator, device="cpu")
            )
    for change in apply:
        change(model)
    return model


def loss_of(model: nn.Module, seed: int = 1) -> Tensor:
    """A scalar that depends on every weight."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 97, (2, 32), generator=generator, device="cpu")
    loss: Tensor = model(tokens.to(next(model.parameters()).device)).logsumexp(dim=-1).square().mean()
    return loss


def gradients_of(model: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    """The loss and the gradient of every parameter, by name."""
    model.zero_grad()
    loss = loss_of(model, seed)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach()} | {
        name: gradient.clone() for name, gradient in gradients.items() if gradient is not None
    }


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """True if two sets of named tensors are equal to the last bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
