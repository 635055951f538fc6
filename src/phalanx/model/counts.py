"""How many parameters a model has, what a token costs, and what a run's state weighs.

FLOP conventions, since published figures differ:

- ``matmul``: 2 FLOP per multiply-add, forward once and backward twice: 6 per weight that a token is multiplied
  with. The embedding look-up multiplies nothing; the output projection does.
- ``attention``: scores and weighted values. ``causal`` counts the half of the square that a causal mask needs,
  ``6 * layers * heads * head_dim * seq`` per token; ``full`` counts the whole square, twice that, as PaLM
  (arXiv 2204.02311, appendix B) and most published MFU figures do.

``mfu`` in this project uses ``full``, so that it compares with what others publish; the throughput benchmark
states FLOP/s by the smaller, ``causal``, count.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.model.shape import parameters
from phalanx.run.spec import ModelSpec


@dataclass(frozen=True)
class Counts:
    """Sizes of one resolved model at one sequence length."""

    parameters: int
    embedding_parameters: int
    matmul_parameters: int
    """Weights that every token is multiplied with (a tied embedding counts once, for the projection)."""
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

    def state_bytes(self, compute_bytes: int) -> dict[str, int]:
        """Bytes of a run's state over the whole fleet, by kind; ``compute_bytes`` is 2 for bf16, 4 for fp32.

        Master weights, both moments of Adam and gradients are fp32; the compute copy exists only where its
        format differs from the master's.
        """
        sizes = {
            "weights": 4 * self.parameters,
            "exp_avg": 4 * self.parameters,
            "exp_avg_sq": 4 * self.parameters,
            "gradients": 4 * self.parameters,
        }
        if compute_bytes != 4:
            sizes["compute copy"] = compute_bytes * self.parameters
        return sizes


def count(spec: ModelSpec, seq_len: int) -> Counts:
    """Counts of a resolved model (see ``phalanx.model.shape.resolve``) at ``seq_len`` tokens."""
    total = embedding = matmul = 0
    for parameter in parameters(spec):
        total += parameter.numel
        if parameter.kind == "embedding":
            embedding += parameter.numel
        if parameter.kind in ("matrix", "output") or (parameter.kind == "embedding" and spec.tie_embeddings):
            matmul += parameter.numel
    # Forward: QK^T and PV, 2 FLOP x 2 matrices x heads x head_dim x keys seen; backward twice that.
    attention_full = 12 * spec.layers * spec.heads * spec.head_dim * seq_len
    return Counts(total, embedding, matmul, attention_full, attention_full // 2)
