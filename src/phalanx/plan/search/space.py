"""Every layout that a model, a batch and a number of accelerators allow, as axes of arrays.

The geometry (how many ranks on which axis, sequences of a micro-batch, the pipeline's schedule) is enumerated row by row, each row legal
by the rules of ``phalanx.run.layout``; what can be chosen freely beside it (recomputation, ZeRO stage, offload) has an axis of its own.
The whole space is the product.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from phalanx.plan.step_cost.bubbles import Pipelines, legal
from phalanx.plan.workload.candidates import (
    PRECISIONS,
    SCHEDULES,
    Bools,
    Candidates,
    Ints,
    divisors,
)
from phalanx.plan.workload.planned_layout import LAYOUT_FIELDS, layout_field
from phalanx.plan.workload.recompute_modes import parts_of
from phalanx.plan.workload.stacks import Job
from phalanx.plan.workload.stages import most_stages
from phalanx.run.kinds.mixture import is_mixture
from phalanx.run.kinds.state_blocks import cut_by_tensor_ranks
from phalanx.run.kinds.whole_model import shares_key_heads, tensor_sizes, undivided

AXES = 5
"""Number of axes of a space: four free choices and the geometry."""
_OPERATORS: dict[str, Callable[[Ints, int], Bools]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}


@dataclass(frozen=True)
class Requirement:
    """A condition of the user's on one field: "tp<=8"."""

    text: str
    name: str
    compare: Callable[[Ints, int], Bools]
    value: int

    def holds(self, candidates: Candidates) -> Bools:
        """Returns the mask of the candidates that meet it, in the axes that its field has."""
        return self.compare(getattr(candidates, self.name), self.value)


def requirement(text: str, job: Job) -> Requirement:
    """Reads a condition. Raises ``ValueError`` that names what can be required."""
    match = re.fullmatch(r"\s*(\w+)\s*(<=|>=|!=|==|=|<|>)\s*([\w+-]+)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is no condition: write a field, a comparison and a value, as in tp<=8")
    word, sign, value = match.groups()
    known = layout_field(word)
    if known is not None and known.not_in_require:
        raise ValueError(f"{text!r}: {known.shown} cannot be required: {known.not_in_require}")
    words = {"schedule": SCHEDULES, "recompute": tuple(mode.name for mode in job.modes)}
    if known is not None and known.name in words:
        if value not in words[known.name] or sign not in ("=", "==", "!="):
            raise ValueError(f"{text!r}: {word} is one of {', '.join(words[known.name])}, with = or !=")
        return Requirement(text, known.name, _OPERATORS[sign], words[known.name].index(value))
    if known is None or not value.isdigit():
        names = ", ".join(field.shown for field in LAYOUT_FIELDS if not field.not_in_require)
        raise ValueError(f"{text!r}: a whole number can be required of {names}")
    return Requirement(text, known.name, _OPERATORS[sign], int(value))


@dataclass(frozen=True)
class Options:
    """Limits and objective of a search. Empty tuples mean all that is legal."""

    gpus: tuple[int, ...] = ()
    """Numbers of accelerators to plan for; empty means all of the cluster's."""
    least_use: float = 0.9
    """Fraction of the accelerators that a layout must use; the rest are spares."""
    micro_batches: tuple[int, ...] = ()
    stages_per_rank: tuple[int, ...] = ()
    """Stages on each rank that interleaved schedules are tried with."""
    precision: str = "bf16"
    offload: bool = True
    require: tuple[str, ...] = ()
    objective: str = "time"
    """Rank by seconds of a step ("time"), accelerator-hours of a step ("cost"), or accelerators ("gpus")."""
    top: int = 10
    finalists: int = 16
    """Number of layouts that are timed by the exact schedule, of which the best ``top`` are returned."""


@dataclass(frozen=True)
class Space:
    """All layouts, as axes: recomputation, ZeRO stage, offloaded optimizer, offloaded activations, geometry.

    Geometry, by far the longest, is the axis along which arrays are contiguous.
    """

    candidates: Candidates
    excluded: dict[str, int] = field(default_factory=dict)
    """Layouts that a rule or a requirement on the geometry excludes, by its name; each counted before the axes that come after
    it in the enumeration multiply them."""

    @property
    def rows(self) -> int:
        """Geometries."""
        return self.candidates.shape[-1]


def space(job: Job, options: Options) -> Space:
    """Every layout for every number of accelerators. Raises ``ValueError`` when there is none."""
    needs = [requirement(text, job) for text in options.require]
    free = _free_axes(job, options)
    counts = options.gpus or (job.cluster.accelerators,)
    table, excluded = _geometry(job, options, counts)
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
        if met.shape[-1] == met.size == candidates.shape[-1]:
            if not met.any():
                raise ValueError(_nothing_left(need, needs[:number], candidates, job))
            excluded[need.text] = int((~met).sum())
            candidates = candidates.rows(met.ravel())
    each = int(np.prod(candidates.shape[:-1]))
    return Space(candidates, {name: number * each for name, number in excluded.items() if number})


_MOST_SHOWN = 24


def _nothing_left(need: Requirement, before: list[Requirement], candidates: Candidates, job: Job) -> str:
    """The message that no layout meets a condition, with the values that its field has in those that met the conditions before."""
    values = np.unique(getattr(candidates, need.name)).tolist()
    words = {"schedule": SCHEDULES, "recompute": tuple(mode.name for mode in job.modes)}.get(need.name)
    shown = [str(words[value]) if words else f"{value:,}" for value in values]
    if len(shown) > _MOST_SHOWN:
        shown = [*shown[: _MOST_SHOWN // 2], "...", *shown[-_MOST_SHOWN // 2 :]]
    given = f", together with {', '.join(one.text for one in before)}," if before else ""
    return f"the condition {need.text}{given} leaves no layout: relax it; what is left has {', '.join(shown)}"


def exclusions(job: Job, candidates: Candidates, options: Options) -> dict[str, Bools]:
    """Returns masks by reason: choices on the free axes that the geometry or the user's conditions exclude."""
    first = np.asarray(min(job.stack.zero_stages))
    reasons = {
        "nothing to shard": (candidates.dense_shard == 1) & (candidates.zero != first),
        "sharded over some, with nothing sharded": (candidates.zero == 0) & (candidates.replicate > 1),
    }
    needs = [requirement(text, job) for text in options.require]
    return reasons | {need.text: ~need.holds(candidates) for need in needs}


def _free_axes(job: Job, options: Options) -> tuple[Ints, Ints, Ints, Ints]:
    """Values of recompute, zero, offloaded optimizer, and offloaded activations."""
    model = job.workload.model
    mixed = any(is_mixture(model, layer) for layer in range(model.layers))
    has = parts_of(model)
    recompute = [code for code, mode in enumerate(job.modes) if mixed or not mode.parts or mode.parts & has]
    offload = np.array([0, 1] if options.offload else [0])
    return np.array(recompute), np.array(job.stack.zero_stages), offload, offload


_STAGES = {"1f1b": (1,), "zbv": (2,), "dualpipev": (2,)}

Table = dict[str, Ints]


def _geometry(job: Job, options: Options, counts: tuple[int, ...]) -> tuple[Table, dict[str, int]]:
    """Rows of every legal geometry, and how many rows each rule took before the axes after it were crossed in."""
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
    whole = model.lanes and not model.context_tiles
    table = _cross(table, "context", [1] if whole else [2**power for power in range(7)])
    table = _keep_whole(job, "context", table, excluded)
    if model.context_tiles:
        divides = model.context_tiles % table["context"] == 0
        divides &= (table["context"] == 1) | (job.stack.attention.exchange == "gather")
        table = _keep(table, divides, "the context tiles do not divide", excluded)
    pieces = np.where(table["context"] > 1, 2 * table["context"], 1) * (model.lanes or table["tensor"])
    pieces = np.maximum(pieces, 2 * model.context_tiles * max(1, model.lanes))
    table = _keep(table, workload.seq_len % pieces == 0, "the sequence does not divide", excluded)
    table = _cross(table, "pipeline", list(range(1, model.layers + 1)))
    if job.stack.name == "phalanx":  # other software has ways to share one matrix between two stages
        table = _keep_whole(job, "pipeline", table, excluded)
    model_ranks = table["tensor"] * table["context"] * table["pipeline"]
    table = _keep(table, model_ranks <= most, "more ranks than accelerators", excluded)
    table = _cross(table, "data", list(divisors(workload.slots or workload.batch, most)))
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


def _whole_blocks(job: Job, degrees: Ints, *, stacked: bool = False) -> Bools:
    """The mask of tensor degrees that leave the optimizer's blocks whole (``phalanx.run.kinds.state_blocks``)."""
    optimizer, model = job.stack.states.optimizer, job.workload.model
    if optimizer is None:  # other software, whose formats are its own
        return np.ones(degrees.shape, dtype=bool)
    cut = {
        degree
        for degree in {*degrees.tolist()}
        if cut_by_tensor_ranks(model, optimizer, degree, stacked=stacked) is not None
    }
    return ~np.isin(degrees, list(cut))


def _keep_whole(job: Job, axis: str, table: Table, excluded: dict[str, int]) -> Table:
    """Drops degrees above 1 of an axis that cannot divide the model, by the field that forbids it and with the cure."""
    for name, problem in undivided(job.workload.model):
        if name == axis:
            table = _keep(table, table[axis] == 1, str(problem), excluded)
    return table


_FIRST_SIZES = (1, 2, 3, 4, 6, 8, 16)
_FIRST_STAGES = (2, 3, 4, 5, 6, 8, 10, 12)
"""Sequences of a micro-batch, and stages on each rank, that every geometry is tried with; the best geometries with all others too."""


@lru_cache(maxsize=1024)
def _first_sizes(share: int) -> tuple[int, ...]:
    """Of the sequences that divide a slot's ``share``, some from one to all: each a few times the one before."""
    kept = [1]
    for size in divisors(share):
        if size in _FIRST_SIZES[1:] or size >= (4 if size > _FIRST_SIZES[-1] else 2) * kept[-1]:
            kept.append(size)
    return tuple(kept)


def _micro_batches(job: Job, options: Options, table: Table, excluded: dict[str, int]) -> Table:
    """Crosses with the sequences of a micro-batch: those of the options, those that conditions are on, or a first choice."""
    batch = job.workload.batch
    slots = np.broadcast_to(job.workload.slots or table["data"], table["data"].shape)
    table = _keep(table | {"slots": slots}, batch % slots == 0, "the batch does not divide", excluded)
    share = batch // table.pop("slots")
    every = {each: _sizes(options, each) for each in {*share.tolist()}}
    sizes = sorted({size for some in every.values() for size in some})
    table = _cross(table | {"share": share}, "micro_batch", sizes)
    tried = np.zeros(len(table["share"]), dtype=bool)
    for each, some in every.items():
        tried |= (table["share"] == each) & np.isin(table["micro_batch"], some)
    table = {name: column[tried] for name, column in table.items()}
    divides = table.pop("share") % table["micro_batch"] == 0
    return _keep(table, divides, "the batch does not divide", excluded)


def _sizes(options: Options, share: int) -> tuple[int, ...]:
    if options.micro_batches:
        return options.micro_batches
    return tuple(divisors(share)) if _is_required(options, "micro_batch") else _first_sizes(share)


def _stages(job: Job, options: Options) -> tuple[int, ...]:
    if options.stages_per_rank:
        return options.stages_per_rank
    every = tuple(range(2, job.workload.model.layers + 1))
    return every if _is_required(options, "stages_per_rank") else _FIRST_STAGES


def _is_required(options: Options, name: str) -> bool:
    words = {re.split(r"[<>=!]", text)[0].strip() for text in options.require}
    return any(known is not None and known.name == name for known in map(layout_field, words))


def finer_space(job: Job, options: Options, geometries: Candidates) -> Candidates | None:
    """What ``space`` leaves out beside some of its rows: all other micro-batches and stages on each rank; ``None`` if there are none.

    ``geometries`` come best first; of so many that there would be over ``_MOST_FINER`` rows, the last are left out.
    """
    columns = [column.ravel() for column in (getattr(geometries, name) for name in _OF_GEOMETRY)]
    stacked = np.stack([np.broadcast_to(column, geometries.shape[-1]) for column in columns])
    _, first = np.unique(stacked, axis=1, return_index=True)
    table: Table = dict(zip(_OF_GEOMETRY, stacked[:, np.sort(first)], strict=True))
    data = table["shard"] * table.pop("replicate")
    share = job.workload.batch // (job.workload.slots or data)
    table = table | {"data": data, "share": np.broadcast_to(share, data.shape)}
    known = {each: _sizes(options, each) for each in {*table["share"].tolist()}}
    sizes = sorted(
        {size for each, some in known.items() for size in (some if options.micro_batches else divisors(each))}
    )
    table = _cross(table, "micro_batch", sizes)
    table = _rows(table, table["share"] % table["micro_batch"] == 0)
    interleaved = table["schedule"] == SCHEDULES.index("interleaved")
    fixed = np.array([_STAGES.get(name, (0,))[0] for name in SCHEDULES])[table["schedule"]]
    coarse = _stages(job, options)
    stages = coarse if options.stages_per_rank else tuple(range(2, job.workload.model.layers + 1))
    parts = [_rows(table, ~interleaved) | {"stages_per_rank": fixed[~interleaved]}]
    parts.append(_cross(_rows(table, interleaved), "stages_per_rank", list(stages)))
    table = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    known_size = np.zeros(len(table["share"]), dtype=bool)
    for each, some in known.items():
        known_size |= (table["share"] == each) & np.isin(table["micro_batch"], some)
    known_stages = (table["schedule"] != SCHEDULES.index("interleaved")) | np.isin(
        table["stages_per_rank"], coarse
    )
    table = _rows(table, ~(known_size & known_stages))
    table.pop("share")
    table = _runnable(job, table, {})
    table = {name: column[:_MOST_FINER] for name, column in table.items()}
    return _with_axes(table, _free_axes(job, options), options.precision) if len(table["data"]) else None


_OF_GEOMETRY = ("tensor", "context", "pipeline", "replicate", "shard", "expert", "expert_tensor", "schedule")
_MOST_FINER = 40_000


def _rows(table: Table, mask: Bools) -> Table:
    return {name: column[mask] for name, column in table.items()}


def _schedules(job: Job, options: Options, table: Table, excluded: dict[str, int]) -> Table:
    """Crosses with schedules and how many stages each rank has."""
    choices = [
        (SCHEDULES.index(name), per_rank)
        for name in job.stack.schedules
        # GPipe waits as long as 1F1B and holds more.
        if name != "gpipe"
        for per_rank in _STAGES.get(name, _stages(job, options))
    ]
    table = _cross(table, "choice", list(range(len(choices))))
    schedule, per_rank = np.array(choices, dtype=np.int64)[table.pop("choice")].T
    table |= {"schedule": schedule, "stages_per_rank": per_rank}
    return _runnable(job, table, excluded)


def _runnable(job: Job, table: Table, excluded: dict[str, int]) -> Table:
    """Drops what has more stages than layers, or micro-batches that its schedule cannot run."""
    few = table["pipeline"] * table["stages_per_rank"] <= most_stages(job.workload, job.stack)
    table = _keep(table, few, "more stages than layers", excluded)
    batches = job.workload.batch // (table["data"] * table["micro_batch"])
    pipes = Pipelines(table["schedule"], table["pipeline"], table["stages_per_rank"], batches)
    suits = legal(pipes, with_gaps=job.stack.any_micro_batches)
    return _keep(table, suits, "the micro-batches do not suit the schedule", excluded)


def _experts(job: Job, table: Table, excluded: dict[str, int]) -> Table:
    """Crosses with the ways to fold experts over tensor, context and shard (``phalanx.run.layout``)."""
    moe = job.workload.model.moe
    if moe is None:
        ones = np.ones_like(table["tensor"])
        return table | {"expert": ones, "expert_tensor": ones}
    table = _cross(table, "expert", list(divisors(moe.experts)))
    table = _cross(table, "divided", [0, 1])
    whole = (table["divided"] == 0) | (table["tensor"] > 1)
    table = _keep(table, whole, "an expert is whole without tensor ranks", excluded)
    table["expert_tensor"] = np.where(table.pop("divided") > 0, table["tensor"], 1)
    inner = (table["expert_tensor"] == 1) | (moe.ffn_dim % (8 * table["expert_tensor"]) == 0)
    table = _keep(table, inner, "an expert's width does not divide", excluded)
    table = _keep(table, _whole_blocks(job, table["expert_tensor"], stacked=True), _CUT_BLOCKS, excluded)
    group, ranks = table["expert"] * table["expert_tensor"], table["tensor"] * table["context"]
    team = np.maximum(1, group // ranks)
    folds = np.maximum(group, ranks) % np.minimum(group, ranks) == 0
    folds &= (team & (team - 1)) == 0
    folds &= table["data"] % team == 0
    if job.workload.slots:
        folds &= job.workload.slots % team == 0
    if job.workload.model.lanes:
        folds &= table["expert_tensor"] == 1
    if job.workload.model.lanes or job.workload.model.context_tiles:
        folds &= group == ranks
    return _keep(table, folds, "experts cannot be folded", excluded)


def _shards(job: Job, table: Table) -> Table:
    """Crosses with how many data-parallel ranks share one copy: all, or so many that a copy ends with a domain of the fabric."""
    reaches = [job.cluster.domain.size, *(level.reach for level in job.cluster.fabric.levels)]
    inner = table["tensor"] * table["context"]
    experts = np.maximum(1, table["expert"] * table["expert_tensor"] // inner)
    tables = [table | {"shard": table["data"]}]
    seen = [table["data"]]
    for reach in sorted(set(reaches)):
        shard = np.gcd(np.maximum(1, reach // inner), table["data"])
        new = (shard % experts == 0) & np.logical_and.reduce([shard != other for other in seen])
        tables.append({name: column[new] for name, column in (table | {"shard": shard}).items()})
        seen.append(np.where(new, shard, table["data"]))
    return {name: np.concatenate([each[name] for each in tables]) for name in tables[0]}


def _cross(table: Table, name: str, values: list[int]) -> Table:
    """Every row with every value."""
    length = len(next(iter(table.values())))
    crossed = {key: np.repeat(column, len(values)) for key, column in table.items()}
    return crossed | {name: np.tile(np.array(values, dtype=np.int64), length)}


def _keep(table: Table, mask: Bools, rule: str, excluded: dict[str, int]) -> Table:
    excluded[rule] = excluded.get(rule, 0) + int((~mask).sum())
    return _rows(table, mask)


def _with_axes(table: Table, free: tuple[Ints, Ints, Ints, Ints], precision: str) -> Candidates:
    recompute, zero, offload_optimizer, offload_activations = free

    def along(values: Ints, axis: int) -> Ints:
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
