"""The space of all layouts as axes of arrays.

The geometry is one axis, by far the longest: ranks on each axis, sequences of a micro-batch, the pipeline's schedule. It is enumerated
row by row. Each row is legal by the rules of ``phalanx.run.layout`` and uses their arithmetic (``phalanx.run.pieces``). Rows that a
rule excludes are counted by its name. Each free choice (recomputation, ZeRO stage, offload) has an axis of its own. The space is the
product of the axes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from phalanx.run import pieces
from phalanx.run.kinds.feed_forward import is_mixture
from phalanx.run.kinds.whole_model import cut_by_tensor_ranks, shares_key_heads, tensor_sizes, undivided
from phalanx_plan.search.options import Options, is_required, nothing_left, requirement
from phalanx_plan.step_cost.memory import rounds
from phalanx_plan.step_cost.pipeline import Pipelines, legal
from phalanx_plan.workload.candidates import (
    PRECISIONS,
    SCHEDULES,
    Bools,
    Candidates,
    Ints,
    divisors,
    parts_of,
)
from phalanx_plan.workload.holdings import most_stages
from phalanx_plan.workload.stacks import TrainingJob

# Geometries.


STAGES = {name: (least,) for name, (least, most) in pieces.STAGES_PER_RANK.items() if least == most}
"""Stages on each rank, for schedules that fix their number."""

Table = dict[str, Ints]
"""Columns of equal length by name; a geometry is a row."""


def geometries(job: TrainingJob, options: Options, counts: tuple[int, ...]) -> tuple[Table, dict[str, int]]:
    """Return the rows of all legal geometries, and the number of rows that each rule removed.

    Axes are crossed in one after the other and filtered at once. Rows of ``Table`` are columns by name; ``counts``
    are the numbers of accelerators allowed, of which a layout uses at least the share ``least_use``.
    """
    workload, model = job.workload, job.workload.model
    most = max(counts)
    excluded: dict[str, int] = {}
    divided = int(np.gcd.reduce([size for _, size in tensor_sizes(model)]))
    table: Table = {"tensor": np.array(list(divisors(divided, most)), dtype=np.int64)}
    table = _keep_whole(job, "tensor", table, excluded)
    shared = [shares_key_heads(model, degree) for degree in table["tensor"].tolist()]
    table = _keep(table, np.array(shared), "the key heads do not divide", excluded)
    table = _keep(table, _whole_blocks(job, table["tensor"]), _CUT_BLOCKS, excluded)
    if model.lanes:
        cut = divided % model.lanes == 0 and shares_key_heads(model, model.lanes)
        table = _keep(table, (model.lanes % table["tensor"] == 0) & cut, "the lanes do not divide", excluded)
    elif model.context_tiles:
        table = _keep(table, table["tensor"] == 1, "context tiles are not divided", excluded)
    lanes_only = model.lanes and not model.context_tiles
    table = crossed(table, "context", [1] if lanes_only else [2**power for power in range(7)])
    table = _keep_whole(job, "context", table, excluded)
    if model.context_tiles:
        divides = model.context_tiles % table["context"] == 0
        divides &= (table["context"] == 1) | (job.stack.attention.exchange == "gather")
        table = _keep(table, divides, "the context tiles do not divide", excluded)
    divides = workload.seq_len % pieces.rank_pieces(table["context"], table["tensor"]) == 0
    divides &= workload.seq_len % pieces.fixed_pieces(model.lanes, model.context_tiles) == 0
    table = _keep(table, divides, "the sequence does not divide", excluded)
    table = crossed(table, "pipeline", list(range(1, model.layers + 1)))
    if job.stack.name == "phalanx":  # other software can share one matrix between two stages
        table = _keep_whole(job, "pipeline", table, excluded)
    model_ranks = table["tensor"] * table["context"] * table["pipeline"]
    table = _keep(table, model_ranks <= most, "more ranks than accelerators", excluded)
    table = crossed(table, "data", list(divisors(workload.slots or workload.batch, most)))
    ranks = table["tensor"] * table["context"] * table["pipeline"] * table["data"]
    used = np.zeros(len(ranks), dtype=bool)
    for count in counts:
        used |= (ranks <= count) & (ranks >= options.least_use * count)
    table = _keep(table, used, "too many or too few ranks", excluded)
    table = _micro_batches(job, options, table, excluded)
    table = _schedules(job, options, table, excluded)
    table = _experts(job, table, excluded)
    return _shards(job, table), excluded


_CUT_BLOCKS = "a block of the optimizer's int8 state is cut"


def _whole_blocks(job: TrainingJob, degrees: Ints, *, stacked: bool = False) -> Bools:
    """Return the mask of tensor degrees that keep the optimizer's blocks undivided (``phalanx.run.kinds.whole_model``).

    All are True without an optimizer.
    """
    optimizer, model = job.stack.states.optimizer, job.workload.model
    if optimizer is None:  # other software has formats of its own
        return np.ones(degrees.shape, dtype=bool)
    cut = {
        degree
        for degree in {*degrees.tolist()}
        if cut_by_tensor_ranks(model, optimizer, degree, stacked=stacked) is not None
    }
    return ~np.isin(degrees, list(cut))


def _keep_whole(job: TrainingJob, axis: str, table: Table, excluded: dict[str, int]) -> Table:
    """Drop degrees above 1 of an axis that cannot divide the model, by the field that forbids it and with the remedy.

    Adds the number of dropped rows to ``excluded``.
    """
    for name, problem in undivided(job.workload.model):
        if name == axis:
            table = _keep(table, table[axis] == 1, str(problem), excluded)
    return table


_FIRST_SIZES = (1, 2, 3, 4, 6, 8, 16)
_FIRST_STAGES = (2, 3, 4, 5, 6, 8, 10, 12)
"""Sequences of a micro-batch, and stages on each rank, to try with every geometry; the best geometries are tried with all others too."""


@lru_cache(maxsize=1024)
def _first_sizes(share: int) -> tuple[int, ...]:
    """Return 1 and some larger divisors of a slot's ``share`` of sequences, ascending: those in ``_FIRST_SIZES``.

    Another divisor is taken if it is at least twice the one before, or four times if it is above the last of
    ``_FIRST_SIZES``.
    """
    kept = [1]
    for size in divisors(share):
        if size in _FIRST_SIZES[1:] or size >= (4 if size > _FIRST_SIZES[-1] else 2) * kept[-1]:
            kept.append(size)
    return tuple(kept)


def _micro_batches(job: TrainingJob, options: Options, table: Table, excluded: dict[str, int]) -> Table:
    """Cross with the sequences of a micro-batch: those of the options or of conditions, or a first choice.

    Adds the rows whose batch does not divide to ``excluded``.
    """
    batch = job.workload.batch
    slots = np.broadcast_to(job.workload.slots or table["data"], table["data"].shape)
    table = _keep(table | {"slots": slots}, batch % slots == 0, "the batch does not divide", excluded)
    share = batch // table.pop("slots")
    every = {each: sizes_tried(options, each) for each in {*share.tolist()}}
    sizes = sorted({size for some in every.values() for size in some})
    table = crossed(table | {"share": share}, "micro_batch", sizes)
    tried = np.zeros(len(table["share"]), dtype=bool)
    for each, some in every.items():
        tried |= (table["share"] == each) & np.isin(table["micro_batch"], some)
    table = {name: column[tried] for name, column in table.items()}
    divides = table.pop("share") % table["micro_batch"] == 0
    return _keep(table, divides, "the batch does not divide", excluded)


def sizes_tried(options: Options, share: int) -> tuple[int, ...]:
    """Return the sequences of a micro-batch that ``geometries`` tries, for a slot of ``share`` sequences."""
    if options.micro_batches:
        return options.micro_batches
    return tuple(divisors(share)) if is_required(options, "micro_batch") else _first_sizes(share)


def stages_tried(job: TrainingJob, options: Options) -> tuple[int, ...]:
    """Return the stages on each rank that ``geometries`` tries with interleaved schedules."""
    if options.stages_per_rank:
        return options.stages_per_rank
    every = tuple(range(2, job.workload.model.layers + 1))
    return every if is_required(options, "stages_per_rank") else _FIRST_STAGES


def rows_where(table: Table, mask: Bools) -> Table:
    """Return the rows of a table that a mask selects."""
    return {name: column[mask] for name, column in table.items()}


def _schedules(job: TrainingJob, options: Options, table: Table, excluded: dict[str, int]) -> Table:
    """Cross with the stack's schedules (without gpipe) and their stages on each rank; keep the rows that can run."""
    choices = [
        (SCHEDULES.index(name), per_rank)
        for name in job.stack.schedules
        # GPipe waits as long as 1F1B and needs more memory.
        if name != "gpipe"
        for per_rank in STAGES.get(name, stages_tried(job, options))
    ]
    table = crossed(table, "choice", list(range(len(choices))))
    schedule, per_rank = np.array(choices, dtype=np.int64)[table.pop("choice")].T
    table |= {"schedule": schedule, "stages_per_rank": per_rank}
    return runnable(job, table, excluded)


def runnable(job: TrainingJob, table: Table, excluded: dict[str, int]) -> Table:
    """Drop rows with more stages than layers, or with micro-batches that their schedule cannot run.

    Adds the number of dropped rows to ``excluded``.
    """
    few = table["pipeline"] * table["stages_per_rank"] <= most_stages(job.workload, job.stack)
    table = _keep(table, few, "more stages than layers", excluded)
    batches = job.workload.batch // (table["data"] * table["micro_batch"])
    pipes = Pipelines(table["schedule"], table["pipeline"], table["stages_per_rank"], batches)
    suits = legal(pipes, with_gaps=job.stack.any_micro_batches)
    return _keep(table, suits, "the micro-batches do not suit the schedule", excluded)


def _experts(job: TrainingJob, table: Table, excluded: dict[str, int]) -> Table:
    """Cross with the ways to divide experts: over expert ranks, and over tensor ranks or not; 1 and 1 for dense
    models.

    Adds the rows whose experts do not divide, or cannot be folded (``phalanx.run.layout``), to ``excluded``.
    """
    moe = job.workload.model.moe
    if moe is None:
        ones = np.ones_like(table["tensor"])
        return table | {"expert": ones, "expert_tensor": ones}
    table = crossed(table, "expert", list(divisors(moe.experts)))
    table = crossed(table, "divided", [0, 1])
    possible = (table["divided"] == 0) | (table["tensor"] > 1)
    table = _keep(table, possible, "an expert is whole without tensor ranks", excluded)
    table["expert_tensor"] = np.where(table.pop("divided") > 0, table["tensor"], 1)
    inner = moe.ffn_dim % pieces.width_multiple(table["expert_tensor"]) == 0
    table = _keep(table, inner, "an expert's width does not divide", excluded)
    table = _keep(table, _whole_blocks(job, table["expert_tensor"], stacked=True), _CUT_BLOCKS, excluded)
    group, ranks = table["expert"] * table["expert_tensor"], table["tensor"] * table["context"]
    team = pieces.team_size(group, ranks)
    legal_folds = pieces.folds(group, ranks) & (table["data"] % team == 0)
    if job.workload.slots:
        legal_folds &= job.workload.slots % team == 0
    if job.workload.model.lanes:
        legal_folds &= table["expert_tensor"] == 1
    if job.workload.model.lanes or job.workload.model.context_tiles:
        legal_folds &= group == ranks
    return _keep(table, legal_folds, "experts cannot be folded", excluded)


def _shards(job: TrainingJob, table: Table) -> Table:
    """Cross with the number of data-parallel ranks that share one copy.

    These are all, or so many that a copy ends with the scale-up domain or a level of the fabric.
    """
    reaches = [job.cluster.domain.size, *(level.reach for level in job.cluster.fabric.levels)]
    inner = table["tensor"] * table["context"]
    experts = pieces.team_size(table["expert"] * table["expert_tensor"], inner)
    tables = [table | {"shard": table["data"]}]
    shards_before = [table["data"]]
    for reach in sorted(set(reaches)):
        shard = np.gcd(np.maximum(1, reach // inner), table["data"])
        new = (shard % experts == 0) & np.logical_and.reduce([shard != other for other in shards_before])
        tables.append({name: column[new] for name, column in (table | {"shard": shard}).items()})
        shards_before.append(np.where(new, shard, table["data"]))
    return {name: np.concatenate([each[name] for each in tables]) for name in tables[0]}


def crossed(table: Table, name: str, values: list[int]) -> Table:
    """Cross every row with every value."""
    length = len(next(iter(table.values())))
    repeated = {key: np.repeat(column, len(values)) for key, column in table.items()}
    return repeated | {name: np.tile(np.array(values, dtype=np.int64), length)}


def _keep(table: Table, mask: Bools, rule: str, excluded: dict[str, int]) -> Table:
    """Return the rows where ``mask`` is True; add the number of the others to ``excluded[rule]``."""
    excluded[rule] = excluded.get(rule, 0) + int((~mask).sum())
    return rows_where(table, mask)


# Axes.


AXES = 5
"""Number of axes of a space: four free choices and the geometry."""


@dataclass(frozen=True)
class Space:
    """All layouts, as axes: recomputation, ZeRO stage, offloaded optimizer, offloaded activations, geometry.

    Geometry, by far the longest, is the axis along which arrays are contiguous.
    """

    candidates: Candidates
    excluded: dict[str, int] = field(default_factory=dict)
    """Layouts that each rule or condition on the geometry excludes; counted before the later axes of the enumeration multiply them."""

    @property
    def rows(self) -> int:
        """Number of geometries."""
        return self.candidates.shape[-1]


def space(job: TrainingJob, options: Options) -> Space:
    """Return all layouts for every number of accelerators that meet the conditions on geometries, with counts of the
    excluded.

    Raises ``ValueError`` if no geometry is legal, or a condition leaves none.
    """
    needs = [requirement(text, job) for text in options.require]
    free = _free_axes(job, options)
    counts = options.gpus or (job.cluster.accelerators,)
    table, excluded = geometries(job, options, counts)
    if not len(table["tensor"]):
        worst = max(excluded, key=lambda rule: excluded[rule])
        raise ValueError(
            f"no layout of {job.workload.model.layers} layers and {job.workload.batch} sequences uses "
            f"{options.least_use:.0%} of {', '.join(map(str, counts))} accelerators; most fail because "
            f"{worst!r}: change the batch, or the number of accelerators"
            + "".join(f"; {problem}" for _, problem in undivided(job.workload.model) if str(problem) != worst)
        )
    candidates = _with_axes(table, free, options.precision)
    for number, need in enumerate(needs):
        met = need.holds(candidates)
        if not met.any():
            raise ValueError(nothing_left(need, needs[:number], candidates, job))
        if met.shape[-1] == met.size == candidates.shape[-1]:
            excluded[need.text] = int((~met).sum())
            candidates = candidates.rows(met.ravel())
    each = int(np.prod(candidates.shape[:-1]))
    return Space(candidates, {name: number * each for name, number in excluded.items() if number})


def exclusions(job: TrainingJob, candidates: Candidates, options: Options) -> dict[str, Bools]:
    """Return masks by reason: free-axis choices with nothing to shard or add, and those that fail the user's
    conditions.

    Masks broadcast to the shape of ``candidates``.
    """
    first = np.asarray(job.stack.zero_stages[0])
    reasons = {
        "nothing to shard": (candidates.dense_shard == 1) & (candidates.zero != first),
        "sharded over some, with nothing sharded": (candidates.zero == 0) & (candidates.replicate > 1),
    }
    if job.stack.states.slot_tree:
        one_slot = (candidates.context > 1) | (rounds(job, candidates) == 1)
        reasons["a rank has one slot to add"] = (candidates.zero == 1) & one_slot
    needs = [requirement(text, job) for text in options.require]
    return reasons | {need.text: ~need.holds(candidates) for need in needs}


def _free_axes(job: TrainingJob, options: Options) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the values to try of recompute, zero, offloaded optimizer, and offloaded activations, in this order.

    Leaves out recomputation that the model has no parts for, and ZeRO-1 if every rank has a single slot.
    """
    model = job.workload.model
    mixed = any(is_mixture(model, layer) for layer in range(model.layers))
    has = parts_of(model)
    recompute = [code for code, mode in enumerate(job.modes) if mixed or not mode.parts or mode.parts & has]
    offload = np.array([0, 1] if options.offload else [0])
    one_slot = (
        job.stack.states.slot_tree and not job.workload.slots
    )  # on each rank: nothing for ZeRO-1 to add
    stages = [stage for stage in job.stack.zero_stages if stage != 1 or not one_slot]
    return np.array(recompute), np.array(stages), offload, offload


def finer_space(job: TrainingJob, options: Options, geometries: Candidates) -> Candidates | None:
    """Return the micro-batches and stages on each rank that ``space`` leaves out for ``geometries``; ``None`` if none
    is left.

    ``geometries`` are best first; beyond ``_MOST_FINER`` rows the last are left out. Sizes or stages that the options
    set stay as they are.
    """
    columns = [column.ravel() for column in (getattr(geometries, name) for name in _OF_GEOMETRY)]
    stacked = np.stack([np.broadcast_to(column, geometries.shape[-1]) for column in columns])
    _, first = np.unique(stacked, axis=1, return_index=True)
    table: Table = dict(zip(_OF_GEOMETRY, stacked[:, np.sort(first)], strict=True))
    data = table["shard"] * table.pop("replicate")
    share = job.workload.batch // (job.workload.slots or data)
    table = table | {"data": data, "share": np.broadcast_to(share, data.shape)}
    tried_sizes = {each: sizes_tried(options, each) for each in {*table["share"].tolist()}}
    sizes = sorted(
        {
            size
            for each, some in tried_sizes.items()
            for size in (some if options.micro_batches else divisors(each))
        }
    )
    table = crossed(table, "micro_batch", sizes)
    table = rows_where(table, table["share"] % table["micro_batch"] == 0)
    interleaved = table["schedule"] == SCHEDULES.index("interleaved")
    fixed = np.array([STAGES.get(name, (0,))[0] for name in SCHEDULES])[table["schedule"]]
    coarse = stages_tried(job, options)
    stages = coarse if options.stages_per_rank else tuple(range(2, job.workload.model.layers + 1))
    parts = [rows_where(table, ~interleaved) | {"stages_per_rank": fixed[~interleaved]}]
    parts.append(crossed(rows_where(table, interleaved), "stages_per_rank", list(stages)))
    table = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    is_tried_size = np.zeros(len(table["share"]), dtype=bool)
    for each, some in tried_sizes.items():
        is_tried_size |= (table["share"] == each) & np.isin(table["micro_batch"], some)
    is_tried_stages = (table["schedule"] != SCHEDULES.index("interleaved")) | np.isin(
        table["stages_per_rank"], coarse
    )
    table = rows_where(table, ~(is_tried_size & is_tried_stages))
    table.pop("share")
    table = runnable(job, table, {})
    table = {name: column[:_MOST_FINER] for name, column in table.items()}
    return _with_axes(table, _free_axes(job, options), options.precision) if len(table["data"]) else None


_OF_GEOMETRY = ("tensor", "context", "pipeline", "replicate", "shard", "expert", "expert_tensor", "schedule")
_MOST_FINER = 40_000


def _with_axes(table: Table, free: tuple[Ints, Ints, Ints, Ints], precision: str) -> Candidates:
    """Return the candidates of a table's rows (last axis) with every combination of the values of the free axes."""
    recompute, zero, offload_optimizer, offload_activations = free

    def along(values: Ints, axis: int) -> Ints:
        """Reshape values to vary along ``axis`` only."""
        return values.reshape([-1 if place == axis % AXES else 1 for place in range(AXES)])

    codes = {each.name: code for code, each in enumerate(PRECISIONS)}
    row = {name: along(column, -1) for name, column in table.items() if name != "data"}
    return Candidates(
        **row,
        replicate=along(table["data"] // table["shard"], -1),
        recompute=along(recompute, 0),
        zero=along(zero, 1),
        offload_optimizer=along(offload_optimizer, 2),
        offload_activations=along(offload_activations, 3),
        precision=np.full((1,) * AXES, codes[precision], dtype=np.int64),
        sequence_parallel=np.ones((1,) * AXES, dtype=np.int64),
    )
