"""Divides layers into pipeline stages.

A pipeline is as slow as its slowest stage. Layers differ (a mixture of experts costs another amount than a dense layer), and
the output projection comes on top of the last layer; so the division is found exactly, by dynamic programming over the
costs of the layers, rather than by giving each stage as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from phalanx.model.facts.counts import block_flops
from phalanx.run.kinds.grouped_attention import window_of
from phalanx.run.kinds.mixture import is_mixture
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.layout import stages_per_rank
from phalanx.run.spec import ModelSpec, RunSpec


def balance(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """The number of consecutive layers of each stage, at least one, such that the costliest stage costs least.

    Args:
        costs: Cost of each layer, in any unit; embedding and output projection count with the first and last layer.
        stages: At most as many as layers.

    Raises ``ValueError`` when there are more stages than layers.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be divided into {stages} stages of at least one layer")
    before = [0.0, *accumulate(costs)]
    # For the first `end` layers in so many stages: the dearest stage, squares that prefer even stages, the last boundary.
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
    """Training FLOP per token of each layer of a resolved model, the output projection's in the last one's."""

    kinds = [(is_mixture(spec, layer), window_of(spec, layer)) for layer in range(spec.layers)]
    by_kind = {
        (mixture, window): block_flops(spec, seq_len, mixture=mixture, window=window)
        for mixture, window in {*kinds}
    }
    costs = [by_kind[kind] for kind in kinds]
    costs[-1] += 6.0 * spec.vocab_size * spec.dim
    return costs


def stage_layers(spec: RunSpec, costs: Sequence[float] = ()) -> list[range]:
    """The layers of each stage of a run, first stage first: as the run file says, or else balanced by FLOP.

    ``costs`` are those of a user's own model's layers, in any unit; empty means that they follow from ``spec.model``.
    """
    parallel = spec.parallel
    stages = parallel.pipeline * stages_per_rank(parallel) if parallel.pipeline > 1 else 1
    sizes = parallel.pipeline_split or balance(
        costs or layer_costs(resolve(spec.model), spec.train.seq_len), stages
    )
    boundaries = [0, *accumulate(sizes)]
    return [range(begin, end) for begin, end in pairwise(boundaries)]
