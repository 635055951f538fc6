"""The layout: the division of a run's ranks over the axes of the mesh, and the rules for legal layouts.

The planner's search enumerates the legal layouts (``phalanx_plan.search.space``). Both use the arithmetic of ``phalanx.run.pieces``, and a test compares
their results.

The mesh is ``pipeline x replicate x shard x context x tensor``. The tensor axis is the fastest, because it communicates most and its ranks should be
neighbors. Experts are folded over the inner axes, so the ranks that share a layer's experts are neighbors too: first along tensor (unless each
expert's matrices are divided there), then context, then shard. The data-parallel ranks with shared experts form a *team*. A team computes its
slots together, and joins or leaves as one.

``replicate``, ``shard`` and ``pipeline`` belong to the fleet and do not change any bits. The other degrees determine how sums are split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.run.fields import Problem, divisors_near
from phalanx.run.kinds import whole_model
from phalanx.run.pieces import (
    STAGES_PER_RANK,
    context_tile_problems,
    folds,
    lane_problems,
    rank_pieces,
    team_size,
    width_multiple,
)
from phalanx.run.spec import ParallelSpec, RunSpec

SPLIT_BACKWARD = ("zbv", "dualpipev")
"""Schedules that compute the gradients of activations and of weights at different times."""


@dataclass(frozen=True)
class Layout:
    """Degrees of all axes."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.pipeline * self.data_ranks * self.model_ranks

    @property
    def data_ranks(self) -> int:
        """Ranks that compute different slots at the same time."""
        return self.replicate * self.shard

    @property
    def model_ranks(self) -> int:
        """Ranks of one stage that compute one slot together."""
        return self.context * self.tensor

    @property
    def team(self) -> int:
        """Data-parallel ranks whose experts are shared among them: 1 without experts, or with few ranks a layer."""
        return team_size(self.expert * self.expert_tensor, self.model_ranks)

    @property
    def expert_shard(self) -> int:
        """Ranks of one stage and replica that hold the same experts, and divide them like other parameters."""
        return self.shard * self.model_ranks // (self.expert * self.expert_tensor)

    @property
    def dividing(self) -> tuple[int, ...]:
        """The degrees that decide how the computation of a slot is divided, those of the run's layout."""
        return self.context, self.tensor, self.expert, self.expert_tensor

    @property
    def degrees(self) -> dict[str, int]:
        """Return the degrees of the mesh's axes by name, slowest first; experts are not an axis of their own."""
        return {
            "pipeline": self.pipeline,
            "replicate": self.replicate,
            "shard": self.shard,
            "context": self.context,
            "tensor": self.tensor,
        }


def replica_ranks(parallel: ParallelSpec) -> int:
    """The least number of ranks that a run can have: one replica, with its team of experts."""
    model_ranks = parallel.context * parallel.tensor
    return parallel.pipeline * model_ranks * team_size(parallel.expert * parallel.expert_tensor, model_ranks)


def stages_per_rank(parallel: ParallelSpec) -> int:
    """Pipeline stages on each rank."""
    return parallel.pipeline_stages or STAGES_PER_RANK[parallel.pipeline_schedule][0]


def layout_of(parallel: ParallelSpec, ranks: int) -> Layout:
    """Return the layout of a run on ``ranks`` ranks; check it with ``layout_problems`` first. Without sharding each
    rank is a replica; ``shard_ranks`` 0 shards over all data ranks.
    """
    data_ranks = ranks // (parallel.pipeline * parallel.context * parallel.tensor)
    shard = 1 if parallel.sharding == "none" else parallel.shard_ranks or data_ranks
    return Layout(
        pipeline=parallel.pipeline,
        replicate=data_ranks // shard,
        shard=shard,
        context=parallel.context,
        tensor=parallel.tensor,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
    )


def layout_problems(spec: RunSpec, ranks: int) -> list[Problem]:
    """Return all problems of running ``spec`` on ``ranks`` ranks, each with a remedy. Those of the number of ranks,
    and of int8 optimizer state, are looked for only if there are no others.

    With ``ranks`` 0 (unknown), only problems for any number of ranks are returned.
    """
    problems = [
        *lane_problems(spec),
        *context_tile_problems(spec),
        *_tensor(spec),
        *_context(spec),
        *_pipeline(spec),
        *_experts(spec),
        *_formats(spec),
        *_sharding(spec),
    ]
    if problems:
        return problems
    return [*_state_blocks(spec), *(_ranks(spec, ranks) if ranks else ())]


def _tensor(spec: RunSpec) -> Iterator[Problem]:
    """Yield the problems of several tensor ranks: a model or dimensions that they cannot divide, key heads that they
    cannot share, and overlap without a compiled GPU run. With one tensor rank nothing is checked.
    """
    degree = spec.parallel.tensor
    if degree == 1:
        return
    yield from (problem for axis, problem in whole_model.undivided(spec.model) if axis == "tensor")
    for path, size in whole_model.tensor_sizes(spec.model):
        if size % degree:
            yield Problem(
                "parallel.tensor",
                f"{path} = {size} cannot be divided over {degree} tensor ranks",
                f"{divisors_near(size, degree)} divide it",
                (path,),
            )
    if not whole_model.shares_key_heads(spec.model, degree):
        heads = spec.model.kv_heads or spec.model.heads
        yield Problem(
            "parallel.tensor",
            f"model.kv_heads = {heads} cannot be shared by {degree} tensor ranks",
            f"{divisors_near(heads, degree)} divide it; or take a multiple of {heads}, whose ranks hold copies",
            ("model.kv_heads",),
        )
    if spec.parallel.async_tensor and not (spec.runtime.compile and spec.runtime.device != "cpu"):
        yield Problem(
            "parallel.async_tensor",
            "overlapping the tensor axis needs a GPU and compiled blocks",
            'set runtime.compile = true and runtime.device = "cuda", or async_tensor = false',
            ("runtime.compile", "runtime.device"),
        )


def _context(spec: RunSpec) -> Iterator[Problem]:
    """Yield the problems of a sequence that context and tensor ranks cannot divide, and of a model that context ranks cannot."""
    parallel, seq_len = spec.parallel, spec.train.seq_len
    if parallel.context == parallel.tensor == 1:
        return
    pieces = rank_pieces(parallel.context, parallel.tensor)
    if seq_len % pieces:
        yield Problem(
            "train.seq_len",
            f"{seq_len} tokens cannot be divided over context {parallel.context} and tensor {parallel.tensor}",
            f"it must be a multiple of {pieces}",
            ("parallel.context", "parallel.tensor"),
        )
    if parallel.context > 1:
        yield from (problem for axis, problem in whole_model.undivided(spec.model) if axis == "context")


def _pipeline(spec: RunSpec) -> Iterator[Problem]:
    """Yield the problems of pipeline stages: stages without a pipeline; else a model that cannot be divided so, empty
    stages, a split or schedule that does not fit, and compilation of a split backward pass.
    """
    parallel, model = spec.parallel, spec.model
    if parallel.pipeline == 1:
        if parallel.pipeline_split or parallel.pipeline_stages > 1:
            yield Problem(
                "parallel.pipeline", "stages are given, but there is no pipeline", "give its degree"
            )
        return
    name, stages = parallel.pipeline_schedule, parallel.pipeline * stages_per_rank(parallel)
    yield from (problem for axis, problem in whole_model.undivided(model) if axis == "pipeline")
    if stages > model.layers:
        yield Problem(
            "parallel.pipeline",
            f"{stages} stages for {model.layers} layers: some would be empty",
            f"at most {model.layers // stages_per_rank(parallel)} pipeline ranks with this schedule",
            ("model.layers", "parallel.pipeline_stages"),
        )
    yield from _split_problems(parallel, model.layers, stages)
    yield from _schedule_problems(spec)
    if name in SPLIT_BACKWARD and spec.runtime.compile:
        yield Problem(
            "runtime.compile",
            f"{name} splits the backward pass, which compiled blocks do not allow",
            'set runtime.compile = false, or parallel.pipeline_schedule = "interleaved"',
            ("parallel.pipeline_schedule",),
        )


def _split_problems(parallel: ParallelSpec, layers: int, stages: int) -> Iterator[Problem]:
    """Yield a problem if ``pipeline_split`` does not have one number of at least 1 for each of ``stages`` stages, in
    total ``layers``. Empty is allowed.
    """
    split = parallel.pipeline_split
    if split and (len(split) != stages or sum(split) != layers or min(split) < 1):
        yield Problem(
            "parallel.pipeline_split",
            f"{len(split)} stages with {sum(split)} layers, the smallest with {min(split)}",
            f"it must name {stages} stages of at least one layer each, {layers} in all; or leave it empty",
            ("parallel.pipeline", "model.layers"),
        )


def _schedule_problems(spec: RunSpec) -> Iterator[Problem]:
    """Yield a problem if the schedule does not allow that number of stages on a rank."""
    parallel = spec.parallel
    name, per_rank = parallel.pipeline_schedule, stages_per_rank(parallel)
    least, most = STAGES_PER_RANK[name]
    if not least <= per_rank <= most:
        yield Problem(
            "parallel.pipeline_stages",
            f"{per_rank} stages on each rank do not go with {name}",
            "gpipe and 1f1b take 1, interleaved 2 or more, zbv and dualpipev 2; 0 chooses",
            ("parallel.pipeline_schedule",),
        )


def micro_batches_per_slot(spec: RunSpec) -> int:
    """Return the micro-batches of a slot, each one forward pass."""
    per_slot = spec.train.batch_size // spec.train.slots
    return max(1, per_slot // (spec.train.micro_batch_size or per_slot or 1))


def _experts(spec: RunSpec) -> Iterator[Problem]:
    """Yield the problems of dividing experts over ranks. The first of these ends the check: ranks for experts that the
    model lacks, an ``expert_tensor`` that is neither 1 nor ``tensor``, a count that does not divide. Then come widths
    and folding.
    """
    parallel, moe = spec.parallel, spec.model.moe
    if moe is None:
        if parallel.expert > 1 or parallel.expert_tensor > 1:
            yield Problem(
                "parallel.expert", "the model has no experts", "set it to 1, or describe [model.moe]"
            )
        return
    if parallel.expert_tensor not in (1, parallel.tensor):
        yield Problem(
            "parallel.expert_tensor",
            f"{parallel.expert_tensor} is neither 1 nor parallel.tensor = {parallel.tensor}",
            "experts' matrices are whole on a rank, or divided as all others are",
            ("parallel.tensor",),
        )
        return
    if moe.experts % parallel.expert:
        yield Problem(
            "parallel.expert",
            f"{moe.experts} experts cannot be divided over {parallel.expert} ranks",
            f"{divisors_near(moe.experts, parallel.expert)} divide {moe.experts}",
            ("model.moe.experts",),
        )
        return
    inner, pieces = moe.ffn_dim or spec.model.ffn_dim, parallel.expert_tensor
    multiple = width_multiple(pieces)
    if inner % multiple:
        yield Problem(
            "parallel.expert_tensor",
            f"an expert's {inner} inner elements cannot be divided over {pieces} ranks into multiples of 8",
            f"make model.moe.ffn_dim a multiple of {multiple}, or set parallel.expert_tensor = 1",
            ("model.moe.ffn_dim", "model.ffn_dim"),
        )
    if spec.model.ffn_bias and spec.model.dim % pieces:
        yield Problem(
            "parallel.expert_tensor",
            f"biases of experts' results, {spec.model.dim} wide, cannot be divided over {pieces} ranks",
            f"{divisors_near(spec.model.dim, pieces)} divide {spec.model.dim}",
            ("model.dim", "model.ffn_bias"),
        )
    yield from _folding(parallel, spec.train.slots)


def _folding(parallel: ParallelSpec, slots: int) -> Iterator[Problem]:
    """Yield a problem if the ranks of experts cannot be folded over those that share a slot, or slots not dealt to them."""
    model_ranks = parallel.context * parallel.tensor
    group = parallel.expert * parallel.expert_tensor
    team = team_size(group, model_ranks)
    if not folds(group, model_ranks):
        yield Problem(
            "parallel.expert",
            f"experts on {group} ranks cannot be folded over the {model_ranks} ranks that share a slot",
            f"take a divisor of {model_ranks}, or {model_ranks} times a power of two",
            ("parallel.context", "parallel.tensor", "parallel.expert_tensor"),
        )
    elif slots % team:
        yield Problem(
            "train.slots",
            f"{slots} slots cannot be dealt to teams of {team} ranks that share experts",
            f"it must be a multiple of {team}",
            ("parallel.expert",),
        )


def _formats(spec: RunSpec) -> Iterator[Problem]:
    """Yield the problems of recomputation with or without compilation, and of optimizer state or offload that the
    optimizer does not support.
    """
    if spec.memory.recompute == "budget" and not spec.runtime.compile:
        yield Problem(
            "memory.recompute",
            "the compiler is who keeps to a budget, and runtime.compile is off",
            'set runtime.compile = true, or memory.recompute = "selective"',
            ("runtime.compile",),
        )
    if spec.memory.recompute == "selective" and spec.runtime.compile:
        yield Problem(
            "memory.recompute",
            "selective recomputation chooses among a block's operations, which a compiled block does not show",
            'set memory.recompute to "full" or "budget", or runtime.compile = false',
            ("runtime.compile",),
        )
    if spec.optimizer.state != "fp32" and spec.optimizer.name != "adamw":
        yield Problem(
            "optimizer.state",
            f"the state of {spec.optimizer.name} is kept in fp32",
            'set optimizer.state = "fp32", or optimizer.name = "adamw"',
            ("optimizer.name",),
        )
    if spec.memory.offload_optimizer != "none" and (spec.optimizer.name, spec.optimizer.state) != (
        "adamw",
        "fp32",
    ):
        yield Problem(
            "memory.offload_optimizer",
            f"only the fp32 state of adamw can live elsewhere, not the {spec.optimizer.state} state of "
            f"{spec.optimizer.name}",
            'set it to "none", or optimizer.name = "adamw" and optimizer.state = "fp32"',
            ("optimizer.name", "optimizer.state"),
        )


def _state_blocks(spec: RunSpec) -> Iterator[Problem]:
    """Yield a problem for each axis, tensor and expert_tensor, that would cut a block of int8 optimizer state; none for a user's model."""
    parallel, optimizer = spec.parallel, spec.optimizer
    if parallel.tensor == 1 or spec.model.factory:
        return
    model = whole_model.resolve(spec.model)
    for axis, degree, stacked in (
        ("parallel.tensor", parallel.tensor, False),
        ("parallel.expert_tensor", parallel.expert_tensor, True),
    ):
        part = whole_model.cut_by_tensor_ranks(model, optimizer, degree, stacked=stacked)
        if part is None:
            continue
        fewer = (less for less in range(degree - 1, 0, -1) if degree % less == 0)
        full = next(
            less
            for less in fewer
            if not whole_model.cut_by_tensor_ranks(model, optimizer, less, stacked=stacked)
        )
        yield Problem(
            "optimizer.state",
            f"int8 has one scale for {whole_model.INT8_BLOCK} elements of a row, and each of {degree} ranks would hold "
            f"{part.shape[-1] // degree} of a row of {part.name}",
            f'set optimizer.state = "bf16", or {axis} = {1 if stacked else full}',
            (axis,),
        )


def _sharding(spec: RunSpec) -> Iterator[Problem]:
    """Yield the problems of ``shard_ranks`` without sharding, and of "zero1" with integer reduction, context ranks or experts."""
    parallel = spec.parallel
    if parallel.sharding == "none" and parallel.shard_ranks > 1:
        yield Problem(
            "parallel.shard_ranks",
            f'{parallel.shard_ranks} ranks cannot share a model with sharding = "none"',
            'set parallel.sharding to "zero2" or "zero3"',
            ("parallel.sharding",),
        )
    if parallel.sharding != "zero1":
        return
    for field, conflicts, reason in (
        (
            "train.reduction",
            spec.train.reduction == "integer",
            "such sums are exchanged once a step anyway",
        ),
        (
            "parallel.context",
            parallel.context > 1,
            "neighbors in the sum are parts of one slot, on several ranks",
        ),
        ("model.moe", spec.model.moe is not None, "the gradients of experts are exchanged slot by slot"),
    ):
        if conflicts:
            yield Problem(
                "parallel.sharding",
                f'"zero1" adds up a rank\'s own slots before it exchanges them, which {field} does not allow: {reason}',
                'set parallel.sharding = "zero2"',
                (field,),
            )


def _ranks(spec: RunSpec, ranks: int) -> Iterator[Problem]:
    """Yield the problem of ranks that axes, or else shards, do not divide; otherwise those of teams of experts, and
    of more data-parallel ranks than slots.
    """
    parallel, train = spec.parallel, spec.train
    model_ranks = parallel.pipeline * parallel.context * parallel.tensor
    if ranks % model_ranks:
        yield Problem(
            "parallel.ranks",
            f"{ranks} {'rank' if ranks == 1 else 'ranks'} cannot be divided into pipeline {parallel.pipeline} x context {parallel.context} x "
            f"tensor {parallel.tensor}",
            f"it must be a multiple of {model_ranks}",
            ("parallel.pipeline", "parallel.context", "parallel.tensor"),
        )
        return
    data_ranks = ranks // model_ranks
    shard = 1 if parallel.sharding == "none" else parallel.shard_ranks or data_ranks
    if data_ranks % shard:
        yield Problem(
            "parallel.shard_ranks",
            f"{data_ranks} data-parallel ranks cannot be divided into groups of {shard}",
            f"{divisors_near(data_ranks, shard)} divide {data_ranks}; or set it to 0",
            ("parallel.ranks",),
        )
        return
    team = layout_of(parallel, ranks).team
    if shard % team:
        yield Problem(
            "parallel.expert",
            f"{shard} ranks that share a copy of the model cannot be divided into teams of {team} that share experts",
            f"{divisors_near(shard, team)} divide {shard}: change parallel.expert, shard_ranks or ranks",
            ("parallel.ranks", "parallel.shard_ranks", "parallel.sharding"),
        )
    if data_ranks > train.slots:
        yield Problem(
            "parallel.ranks",
            f"{data_ranks} data-parallel ranks for {train.slots} slots: some would never have work",
            f"at most {train.slots * model_ranks} ranks with train.slots = {train.slots}, or more slots",
            ("train.slots",),
        )


# Positions and groups of ranks in the mesh: functions on integers, for users who look for the neighbors of a slow rank.
#
# The mesh with its process groups is ``phalanx.parallel.mesh``; a test compares both.


def rank_place(layout: Layout, rank: int) -> dict[str, int]:
    """Return the index of ``rank`` on each axis of the mesh, slowest first; along "expert" only if experts are divided.

    Raises ``ValueError`` for a rank that the layout does not have.
    """
    if not 0 <= rank < layout.ranks:
        raise ValueError(f"there is no rank {rank} among {layout.ranks}")
    place, remaining = {}, rank
    for axis, degree in reversed(layout.degrees.items()):
        remaining, place[axis] = divmod(remaining, degree)
    place = dict(reversed(place.items()))
    if layout.expert > 1:
        place["expert"] = rank // layout.expert_tensor % layout.expert
    return place


def rank_groups(layout: Layout, rank: int) -> dict[str, list[int]]:
    """Return the ranks that differ from ``rank`` along one axis only, with itself, for each axis of more than one rank.

    Those of "expert" share a layer's experts. Raises ``ValueError`` for a rank that the layout does not have.
    """
    place, groups, stride = rank_place(layout, rank), {}, 1
    for axis, degree in reversed(layout.degrees.items()):
        if degree > 1:
            first = rank - place[axis] * stride
            groups[axis] = list(range(first, first + degree * stride, stride))
        stride *= degree
    groups = dict(reversed(groups.items()))
    if layout.expert > 1:
        stride = layout.expert_tensor
        first = rank - place["expert"] * stride
        groups["expert"] = list(range(first, first + layout.expert * stride, stride))
    return groups
