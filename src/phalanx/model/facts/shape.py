"""Shape of a model: a table of its parameters, its counts and FLOP, its pipeline stages, and constants of rotary scaling.

The rows come from the files of the kinds of layers (``phalanx.run.kinds``); a test compares the table with the module in
``phalanx.model.transformer``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from phalanx.hardware.portable.correctly_rounded import log
from phalanx.model.facts.optimizer_state import state_bytes_by_name
from phalanx.run.factory import FactoryError
from phalanx.run.kinds import block
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.kinds.feed_forward import is_mixture
from phalanx.run.kinds.grouped_attention import window_of
from phalanx.run.kinds.operations import AttentionCore, Parameter, square_keys
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.layout import stages_per_rank
from phalanx.run.spec import ModelSpec, OptimizerSpec, RopeScalingSpec, RunSpec


def parameters(spec: ModelSpec) -> Iterator[Parameter]:
    """Yield every parameter of a resolved model, in the order in which the module registers them.

    Raise ``FactoryError`` for a user's model, whose parameters exist only after it is built.
    """
    _refuse_custom(spec)
    embedding, *after_blocks = outside_blocks(spec)
    yield embedding
    # Layers of a kind differ only in their names: each kind is derived once.
    kinds = {mixed: block.parts(spec, mixed=mixed) for mixed in {*_mixtures(spec)}}
    for layer, mixed in enumerate(_mixtures(spec)):
        yield from block.placed(f"blocks.{layer}", layer, kinds[mixed])
    yield from after_blocks


def numbered_parameters(spec: ModelSpec) -> Iterator[tuple[Parameter, int]]:
    """Yield each parameter with its number of occurrences.

    Parameters of blocks of one kind are listed once. Raises ``FactoryError`` for a user's model.
    """
    _refuse_custom(spec)
    yield from ((part, 1) for part in outside_blocks(spec))
    for mixed, blocks in Counter(_mixtures(spec)).items():
        parts = block.placed("blocks", 0, block.parts(spec, mixed=mixed))
        yield from ((part, blocks) for part in parts)


def _mixtures(spec: ModelSpec) -> list[bool]:
    """For each layer, True if it is a mixture of experts."""
    return [is_mixture(spec, layer) for layer in range(spec.layers)]


def _refuse_custom(spec: ModelSpec) -> None:
    """Raise ``FactoryError`` for a model of the user's own."""
    if spec.factory:
        raise FactoryError(
            f"{spec.factory} is a model of your own: only training builds it, so its parameters and operations are not available "
            "here; plans, `phalanx show` and exports to other software work for the transformer that [model] describes"
        )


def outside_blocks(spec: ModelSpec) -> Iterator[Parameter]:
    """Yield the parameters outside of blocks: embedding, final norm, output projection, predictions ahead."""
    depths = block.prediction_depths(spec)
    yield from block.embedding_parts(spec, predictions=1 + depths)
    yield from block.head_parts(spec, predictions=1 + depths)
    for depth in range(depths):
        yield from block.prediction_parts(spec, depth)


def buffers(spec: ModelSpec) -> Iterator[Parameter]:
    """Yield the buffers in the state of a resolved model: the balance bias of each router, fp32, in their order."""
    if spec.moe is not None and spec.moe.balance_bias:
        for part in parameters(spec):
            if part.kind == "router":
                name = part.name.removesuffix("weight") + "bias"
                yield Parameter(name, (spec.moe.experts,), "balance")


# Parameters, FLOP per token and bytes of a run's state, counted from the shape.
#
# FLOP conventions, since published figures differ:
#
# - ``matmul``: 2 FLOP per multiply-add, forward once and backward twice: 6 per weight that a token is multiplied with. The embedding
#   lookup has no product; the output projection has one, and one more for each prediction ahead. ``per_token`` routed experts count.
# - ``attention``: scores and weighted values. ``causal`` counts the half of the square that a causal mask needs,
#   ``3 * heads * (query width + value width) * seq`` per token and layer. ``full`` counts the full square, twice that, as PaLM
#   (arXiv 2204.02311, appendix B) and most published MFU figures do. In layers with a sliding window both count the band of its mask,
#   ``full`` twice. Both widths are ``head_dim``, except in latent attention. Its expansion of keys and values is counted once per
#   token, as in training. If it is absorbed, queries are as wide as a token's cache entry, and values as its latent.
#
# *Active* parameters are those that a token uses in the main model, including embedding and output projection, as papers count them:
# ``per_token`` of the routed experts, and no predictions ahead.
#
# ``mfu`` uses ``full``, so that it compares with published figures; the throughput benchmark reports FLOP/s by the smaller ``causal``.


@dataclass(frozen=True)
class ModelCounts:
    """Sizes of one resolved model at one sequence length."""

    parameters: int
    embedding_parameters: int
    active_parameters: int
    """Parameters of the main model that one token uses."""
    matmul_parameters: int
    """Weights in products with a token (a tied embedding counts once, for the projection)."""
    attention_flops_per_token_full: int
    attention_flops_per_token_causal: int

    @property
    def flops_per_token(self) -> int:
        """Training FLOP per token, with full attention (PaLM's convention, used for MFU)."""
        return 6 * self.matmul_parameters + self.attention_flops_per_token_full

    @property
    def flops_per_token_causal(self) -> int:
        """Training FLOP per token that a causal mask needs."""
        return 6 * self.matmul_parameters + self.attention_flops_per_token_causal


def fleet_state_bytes(spec: ModelSpec, optimizer: OptimizerSpec, compute_bytes: int) -> dict[str, int]:
    """Return the bytes of a run's state over the fleet, by kind: "weights", "gradients", each kind of the optimizer's
    state by its name (``state_bytes_by_name``), and "compute copy". ``compute_bytes`` is 2 for bf16, 4 for fp32.

    Master weights and gradients are fp32. The compute copy exists only if its dtype differs from the master weights'.
    """
    elements = sum(parameter.numel for parameter in parameters(spec))
    sizes = {"weights": 4 * elements, **state_bytes_by_name(optimizer, parameters(spec))}
    sizes["gradients"] = 4 * elements
    if compute_bytes != 4:
        sizes["compute copy"] = compute_bytes * elements
    return sizes


def count(spec: ModelSpec, seq_len: int) -> ModelCounts:
    """Return the numbers of parameters and the attention FLOP of a resolved model at ``seq_len`` tokens, predictions
    ahead included, but not in the active parameters. Raises ``FactoryError`` for a user's model.
    """
    total = embedding = active = matmul = 0
    for parameter, number in numbered_parameters(spec):
        total += number * parameter.numel
        active += 0 if parameter.section == "ahead" else number * parameter.met
        embedding += parameter.numel if parameter.kind == "embedding" else 0
        matmul += number * parameter.met * parameter.products
    core = attention_kind(spec).core(spec)
    full = round((spec.layers + block.prediction_depths(spec)) * _attention_flops(core, core.keys(seq_len)))
    return ModelCounts(
        parameters=total,
        embedding_parameters=embedding,
        active_parameters=active,
        matmul_parameters=matmul,
        attention_flops_per_token_full=full,
        attention_flops_per_token_causal=full // 2,
    )


def block_flops(spec: ModelSpec, seq_len: int, *, mixture: bool, window: int = 0) -> float:
    """Return the training FLOP per token of one block, with the attention that its mask needs; ``window`` 0 means none."""
    matmul = sum(part.met * part.products for part in block.parts(spec, mixed=mixture))
    core = attention_kind(spec).core(spec)
    return 6 * matmul + _attention_flops(core, square_keys(seq_len, window)) / 2


def _attention_flops(core: AttentionCore, keys: float) -> float:
    """Return the training FLOP of one token in the attention of one layer, with the full square of scores."""
    # Forward: QK^T and PV, 2 FLOP x heads x width x keys seen; backward twice that.
    return 6 * core.heads * core.widths * keys


# Pipeline stages: the layers that each of them has.
#
# A pipeline is as slow as its slowest stage. Layers differ in cost (a mixture of experts from a dense layer), and the output
# projection adds to the last layer. So dynamic programming over the costs of the layers computes the optimal division.


def balance(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the number of consecutive layers of each stage, at least one, that minimizes the cost of the most
    expensive stage, then the sum of squares.

    Args:
        costs: Cost of each layer, in any unit; embedding and output projection count with the first and last layer.
        stages: At most the number of layers.

    Raises ``ValueError`` if there are more stages than layers, or less than one stage.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be divided into {stages} stages of at least one layer")
    before = [0.0, *accumulate(costs)]
    # tables[k][end], for the first `end` layers in k stages: cost of the most expensive stage, sum of squares (a tie-breaker that
    # prefers even stages), and the last boundary.
    tables: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]
    for stage in range(1, stages + 1):
        shorter = tables[-1]
        table = {}
        for end in range(stage, layers - (stages - stage) + 1):
            ways = ((shorter[begin], before[end] - before[begin], begin) for begin in shorter if begin < end)
            table[end] = min((max(way[0], cost), way[1] + cost * cost, begin) for way, cost, begin in ways)
        tables.append(table)
    sizes, end = [], layers
    for table in reversed(tables[1:]):
        begin = table[end][2]
        sizes.append(end - begin)
        end = begin
    return tuple(reversed(sizes))


def layer_costs(spec: ModelSpec, seq_len: int) -> list[float]:
    """Return the training FLOP per token of each layer of a resolved model at ``seq_len`` tokens; the last one
    includes the output projection. The embedding costs nothing.
    """

    kinds = [(is_mixture(spec, layer), window_of(spec, layer)) for layer in range(spec.layers)]
    by_kind = {
        (mixture, window): block_flops(spec, seq_len, mixture=mixture, window=window)
        for mixture, window in {*kinds}
    }
    costs = [by_kind[kind] for kind in kinds]
    costs[-1] += 6.0 * spec.vocab_size * spec.dim
    return costs


def stage_layers(spec: RunSpec, costs: Sequence[float] = ()) -> list[range]:
    """Return the layers of each stage of a run, first stage first: as many as ``parallel.pipeline_split`` has, or
    else balanced by FLOP.

    ``costs`` are the costs of a custom model's layers, in any unit; if empty, they follow from ``spec.model``.
    """
    parallel = spec.parallel
    stages = parallel.pipeline * stages_per_rank(parallel) if parallel.pipeline > 1 else 1
    sizes = parallel.pipeline_split or balance(
        costs or layer_costs(resolve(spec.model), spec.train.seq_len), stages
    )
    boundaries = [0, *accumulate(sizes)]
    return [range(begin, end) for begin, end in pairwise(boundaries)]


# Constants of rotary scaling: temperatures of attention, and LongRoPE's switch from short to long factors.


def _temperature(factor: float, strength: float) -> float:
    """Return the attention temperature for a context ``factor`` times as long (arXiv 2309.00071, equation 22)."""
    return 0.1 * strength * log(factor) + 1.0


def rotary_temperature(scaling: RopeScalingSpec | None) -> float:
    """Return the factor of the rotary tables: the stated temperature, or that which YaRN or LongRoPE derives from its
    factor (arXiv 2402.13753, as in Phi-3: arXiv 2404.14219). 1 for other kinds.
    """
    if scaling is not None and scaling.kind == "longrope":
        return scaling.temperature or math.sqrt(1 + log(scaling.factor) / log(scaling.original_max_seq_len))
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.temperature:
        return scaling.temperature
    above, below = scaling.mscale or 1.0, scaling.mscale_all_dim
    return _temperature(scaling.factor, above) / _temperature(scaling.factor, below)


def softmax_temperature(scaling: RopeScalingSpec | None) -> float:
    """Return the factor of latent attention's scores: 1, except for DeepSeek's YaRN with ``mscale_all_dim``."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    temperature = _temperature(scaling.factor, scaling.mscale_all_dim)
    return temperature * temperature


def longest_short(spec: ModelSpec) -> int:
    """Return the maximum number of tokens for LongRoPE's short factors; 0 if the factors do not depend on the length."""
    scaling = spec.rope_scaling
    return scaling.original_max_seq_len if scaling is not None and scaling.kind == "longrope" else 0
