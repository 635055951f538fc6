"""All layouts as axes of arrays.

The geometry (``phalanx.plan.search.space.geometry``) is one axis, by far the longest; what can be chosen freely beside it (recomputation,
ZeRO stage, offload) has an axis of its own. The whole space is the product.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from phalanx.plan.search.space.geometry import (
    STAGES,
    Table,
    crossed,
    geometries,
    rows_where,
    runnable,
    sizes_tried,
    stages_tried,
)
from phalanx.plan.search.space.options import Options, nothing_left, requirement
from phalanx.plan.workload.candidates import PRECISIONS, SCHEDULES, Bools, Candidates, Ints, divisors
from phalanx.plan.workload.recompute_modes import parts_of
from phalanx.plan.workload.stacks import Job
from phalanx.run.kinds.mixture import is_mixture
from phalanx.run.kinds.whole_model import undivided

AXES = 5
"""Number of axes of a space: four free choices and the geometry."""


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
    known = {each: sizes_tried(options, each) for each in {*table["share"].tolist()}}
    sizes = sorted(
        {size for each, some in known.items() for size in (some if options.micro_batches else divisors(each))}
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
    known_size = np.zeros(len(table["share"]), dtype=bool)
    for each, some in known.items():
        known_size |= (table["share"] == each) & np.isin(table["micro_batch"], some)
    known_stages = (table["schedule"] != SCHEDULES.index("interleaved")) | np.isin(
        table["stages_per_rank"], coarse
    )
    table = rows_where(table, ~(known_size & known_stages))
    table.pop("share")
    table = runnable(job, table, {})
    table = {name: column[:_MOST_FINER] for name, column in table.items()}
    return _with_axes(table, _free_axes(job, options), options.precision) if len(table["data"]) else None


_OF_GEOMETRY = ("tensor", "context", "pipeline", "replicate", "shard", "expert", "expert_tensor", "schedule")
_MOST_FINER = 40_000


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
