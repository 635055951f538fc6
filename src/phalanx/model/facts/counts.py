"""Counts a model's parameters, its FLOP per token, and the bytes of a run's state.

FLOP conventions, since published figures differ:

- ``matmul``: 2 FLOP per multiply-add, forward once and backward twice: 6 per weight that a token is multiplied
  with. The embedding look-up multiplies nothing; the output projection does, once more for each prediction ahead. Of
  routed experts, ``per_token`` count.
- ``attention``: scores and weighted values. ``causal`` counts the half of the square that a causal mask needs,
  ``3 * heads * (query width + value width) * seq`` per token and layer; ``full`` counts the whole square, twice that, as
  PaLM (arXiv 2204.02311, appendix B) and most published MFU figures do. In layers with a sliding window both count the band
  that its mask needs, ``full`` twice. The widths are both ``head_dim``, but for latent
  attention, whose expansion of keys and values is counted once per token, as in training; where it is absorbed, queries are as wide
  as what is kept of a token, and values as its latent.

*Active* parameters are all that a token meets on its way through the main model, embedding and output projection
included, as papers count them: of the routed experts ``per_token``, and no predictions ahead.

``mfu`` in this project uses ``full``, so that it compares with what others publish; the throughput benchmark
states FLOP/s by the smaller, ``causal``, count.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.model.facts.optimizer_state import state_bytes_by_name
from phalanx.model.facts.shape import numbered_parameters, parameters
from phalanx.run.kinds import block, prediction_ahead
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.kinds.operations import AttentionCore, square_keys
from phalanx.run.spec import ModelSpec, OptimizerSpec


@dataclass(frozen=True)
class Counts:
    """Sizes of one resolved model at one sequence length."""

    parameters: int
    embedding_parameters: int
    active_parameters: int
    """Parameters of the main model that one token meets."""
    expert_parameters: int
    """Parameters of all routed experts."""
    matmul_parameters: int
    """Weights that a token is multiplied with (a tied embedding counts once, for the projection)."""
    attention_flops_per_token_full: int
    attention_flops_per_token_causal: int

    @property
    def flops_per_token(self) -> int:
        """Training FLOP per token, attention counted in full (PaLM's convention, used for MFU)."""
        return 6 * self.matmul_parameters + self.attention_flops_per_token_full

    @property
    def flops_per_token_causal(self) -> int:
        """Training FLOP per token that a causal mask needs."""
        return 6 * self.matmul_parameters + self.attention_flops_per_token_causal


def fleet_state_bytes(spec: ModelSpec, optimizer: OptimizerSpec, compute_bytes: int) -> dict[str, int]:
    """Bytes of a run's state over the whole fleet, by kind; ``compute_bytes`` is 2 for bf16, 4 for fp32.

    Master weights and gradients are fp32, the optimizer's state is what ``optimizer_state`` lists; the compute copy
    exists only where its format differs from the master's.
    """
    elements = sum(parameter.numel for parameter in parameters(spec))
    sizes = {"weights": 4 * elements, **state_bytes_by_name(optimizer, parameters(spec))}
    sizes["gradients"] = 4 * elements
    if compute_bytes != 4:
        sizes["compute copy"] = compute_bytes * elements
    return sizes


def count(spec: ModelSpec, seq_len: int) -> Counts:
    """Counts of a resolved model (see ``phalanx.run.kinds.whole_model.resolve``) at ``seq_len`` tokens."""
    total = embedding = active = experts = matmul = 0
    for parameter, number in numbered_parameters(spec):
        total += number * parameter.numel
        active += 0 if parameter.section == "ahead" else number * parameter.met
        embedding += parameter.numel if parameter.kind == "embedding" else 0
        experts += number * parameter.numel if parameter.stacked else 0
        matmul += number * parameter.met * parameter.products
    core = attention_kind(spec).core(spec)
    full = round((spec.layers + prediction_ahead.depths(spec)) * _attention_flops(core, core.keys(seq_len)))
    return Counts(
        parameters=total,
        embedding_parameters=embedding,
        active_parameters=active,
        expert_parameters=experts,
        matmul_parameters=matmul,
        attention_flops_per_token_full=full,
        attention_flops_per_token_causal=full // 2,
    )


def block_flops(spec: ModelSpec, seq_len: int, *, mixture: bool, window: int = 0) -> float:
    """Training FLOP per token of one block, of attention those that its mask needs; ``window`` 0 is none."""
    matmul = sum(part.met * part.products for part in block.parts(spec, mixed=mixture))
    core = attention_kind(spec).core(spec)
    return 6 * matmul + _attention_flops(core, square_keys(seq_len, window)) / 2


def _attention_flops(core: AttentionCore, keys: float) -> float:
    """FLOP of one token in the attention of one layer, the whole square of scores."""
    # Forward: QK^T and PV, 2 FLOP x heads x width x keys seen; backward twice that.
    return 6 * core.heads * core.widths * keys
