"""Set-up of a published row for the planner: model, workload, stack, machines, and every layout that agrees with the row.

Rows leave things out. The open parts of a model's shape (gated or plain feed-forward layer, tied embedding) follow from its
stated number of parameters. The open parts of a layout (micro-batch, interleaving, recomputation) become a list of choices;
validation takes the fastest that fits, as the people who tuned the run would have. All values that were filled in are listed in
``Setup.assumptions``; a row that leaves out more is excluded with the reason.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from phalanx.model.facts.shape import ModelCounts, count
from phalanx.parallel.pipeline_schedules import ScheduleName
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec
from phalanx_plan.workload.candidates import PlannedLayout, divisors
from phalanx_plan.workload.stacks import TrainingJob, TrainingWorkload
from validation.recompute import recompute_modes
from validation.runs import Excluded, PublishedRun
from validation.software import Habits, RunSoftware, cluster_of_run, profile_of_run, software_of_run

_GPT2_VOCAB = 51_200
_SIZE_TOLERANCE = 0.05
"""Relative difference of stated and counted parameters above which the shape is not what the source trained."""
_ACTIVE_TOLERANCE = 0.15
_MICRO_BATCHES = (1, 2, 4, 8)
_TILE = 128


@dataclass(frozen=True)
class Setup:
    """A row as the planner sees it."""

    run: PublishedRun
    trained: RunSoftware
    job: TrainingJob
    choices: tuple[PlannedLayout, ...]
    """Layouts that agree with everything that the row states."""
    assumptions: tuple[str, ...]
    """Values that the row does not state and that were filled in."""


def setup_of(run: PublishedRun, trained: RunSoftware | None = None) -> Setup:
    """Return the set-up of a row, by its own software unless ``trained`` is another.

    Raises ``Excluded`` with the reason if the row does not state enough.
    """
    assumptions: list[str] = []
    if run.unreadable:
        raise Excluded(run.unreadable)
    if run.outcome == "regression":
        raise Excluded("its source calls it a regression")
    trained = trained or software_of_run(run)
    machines = cluster_of_run(run, trained.habits)
    seq_len = _stated(run.seq_len, "sequence length")
    batch = _stated(run.global_batch_seqs, "global batch")
    model = model_of(run, seq_len, assumptions)
    imbalance = 1.0 if run.balanced_experts else 1.1
    modes, stated_modes = recompute_modes(run, trained, assumptions)
    job = TrainingJob(
        TrainingWorkload(model, seq_len, batch, imbalance=imbalance, attended=_attended(run, seq_len)),
        trained.stack,
        machines,
        profile_of_run(machines.accelerator, trained.software, run),
        modes,
    )
    choices = tuple(_layouts(run, trained, job, stated_modes, assumptions))
    if not choices:
        raise Excluded(
            f"a batch of {batch} cannot be divided over the data-parallel ranks, micro-batches and stages that it states"
        )
    return Setup(run, trained, job, choices, tuple(dict.fromkeys(assumptions)))


def _attended(run: PublishedRun, seq_len: int) -> float:
    """Return the share of the scores of causal attention that sliding windows leave, as the mean of layers."""
    if run.sliding_window is None:
        return 1.0
    # Kernels compute whole tiles: on each side of the window half of one is in vain.
    scores = (run.sliding_window + _TILE) * seq_len / (seq_len**2 / 2)
    return (1 + min(scores, 1.0)) / 2


def _stated(value: int | None, name: str) -> int:
    if not value:
        raise Excluded(f"does not state the {name}")
    return value


def model_of(run: PublishedRun, seq_len: int, assumptions: list[str]) -> ModelSpec:
    """Return the model, resolved; append filled-in values to ``assumptions``. Raises ``Excluded``."""
    if run.architecture == "other":
        raise Excluded("its architecture is not a plain transformer, or not stated")
    layers, dim = _stated(run.layers, "number of layers"), _stated(run.hidden, "width")
    heads = _stated(run.heads, "number of heads")
    vocab = run.vocab
    if not vocab:
        assumptions.append(f"vocabulary of GPT-2, padded to {_GPT2_VOCAB}")
        vocab = _GPT2_VOCAB
    base = ModelSpec(
        layers=layers,
        dim=dim,
        heads=heads,
        kv_heads=run.kv_heads or heads,
        head_dim=run.head_dim or 0,
        ffn_dim=run.ffn or 4 * dim,
        vocab_size=vocab,
        qk_norm=run.model.lower().startswith("qwen3"),
        mla=_mla(run),
        moe=_moe(run),
    )
    if not run.ffn:
        assumptions.append("feed-forward width of four times the model's")
    return _settled(run, resolve(base), seq_len, assumptions)


def _settled(run: PublishedRun, base: ModelSpec, seq_len: int, assumptions: list[str]) -> ModelSpec:
    """Return the variant of ``base`` whose size, and whose FLOP if the row has both rates, are nearest to the stated ones."""
    kinds: tuple[Literal["swiglu", "gelu"], ...] = ("swiglu", "gelu")
    if run.mlp == "gated" or run.mixture:
        kinds = ("swiglu",)
    elif run.mlp == "plain":
        kinds = ("gelu",)
    stated = (run.params_total_b or 0) * 1e9
    if not stated:
        feed_forward = "gated" if kinds[0] == "swiglu" else "plain"
        assumptions.append(
            f"{feed_forward} feed-forward layer and separate output projection, as no size is stated"
        )
        return replace(base, ffn=kinds[0])
    # Experts that every token passes, and layers without experts, are often left out of a table of shapes.
    shapes = [base.moe]
    if base.moe is not None and run.params_active_b:
        shapes += [replace(base.moe, shared=number) for number in range(9) if number != base.moe.shared]
        shapes += [replace(base.moe, every=2)]
    candidates = (
        replace(base, ffn=ffn, tie_embeddings=tied, moe=moe, mtp_depth=depth)
        for moe, ffn, tied, depth in itertools.product(shapes, kinds, (False, True), _depths(run, base))
    )
    off, best = _nearest(run, candidates, seq_len)
    if off > _SIZE_TOLERANCE:
        counted = counts_of(best, seq_len).parameters / 1e9
        raise Excluded(
            f"its shape has {counted:.4g}B parameters, not the {run.params_total_b}B that it states"
        )
    if best.moe is not None and best.moe != base.moe:
        assumptions.append(
            f"by its stated sizes, {best.moe.shared} shared experts and a mixture every {best.moe.every} layers"
        )
    return best


def _nearest(run: PublishedRun, models: Iterable[ModelSpec], seq_len: int) -> tuple[float, ModelSpec]:
    """Return the first model that is nearest to the row's sizes, and then to its FLOP, and its distance."""
    flops = _stated_flops_per_token(run)
    best: tuple[float, float, ModelSpec] | None = None
    for model in models:
        off = _off(run, model, seq_len)
        counts = counts_of(model, seq_len)
        both = (counts.flops_per_token, counts.flops_per_token_causal)
        by_flops = min(abs(count / flops - 1) for count in both) if flops else 0.0
        if best is None or (round(off, 2), by_flops) < (round(best[0], 2), best[1] - 1e-3):
            best = (off, by_flops, model)
    assert best is not None, "there is at least one variant"
    return best[0], best[2]


def _off(run: PublishedRun, model: ModelSpec, seq_len: int) -> float:
    """Return the relative difference of the model's size from the stated one."""
    # Published totals leave out prediction layers; some leave out the embedding, some have learned positions.
    counts = counts_of(replace(model, mtp_depth=0), seq_len)
    positions = seq_len * model.dim if run.learned_positions else 0
    stated = (run.params_total_b or 0) * 1e9
    sizes = (counts.parameters + positions, counts.parameters - counts.embedding_parameters)
    off = min(abs(size / stated - 1) for size in sizes)
    if model.moe is None or not run.params_active_b:
        return off
    active = (counts.active_parameters, counts.active_parameters - counts.embedding_parameters)
    # The figure is often rounded, as in A3B: it only has to be in the right place.
    by_active = min(abs(size / (run.params_active_b * 1e9) - 1) for size in active)
    return max(off, by_active if by_active > _ACTIVE_TOLERANCE else 0.0)


def _depths(run: PublishedRun, base: ModelSpec) -> tuple[int, ...]:
    """Return the possible numbers of prediction layers."""
    if run.mtp_depth is not None:
        return (run.mtp_depth,)
    return (0, 1) if base.mla is not None and "deepseek" in run.model.lower() else (0,)


def _stated_flops_per_token(run: PublishedRun) -> float:
    both = run.tflops_per_gpu and run.tokens_per_s_per_gpu
    return (run.tflops_per_gpu or 0) * 1e12 / (run.tokens_per_s_per_gpu or 1) if both else 0.0


@lru_cache(maxsize=512)
def counts_of(model: ModelSpec, seq_len: int) -> ModelCounts:
    """Return ``count``, cached: many rows are of one model."""
    return count(model, seq_len)


def _mla(run: PublishedRun) -> MlaSpec | None:
    if run.mla_kv_rank is None:
        return None
    rank, nope, rope, value = (
        width or 0 for width in (run.mla_kv_rank, run.mla_nope_dim, run.mla_rope_dim, run.mla_value_dim)
    )
    if 0 in (rank, nope, rope, value):
        raise Excluded("a width of its latent attention is 0")
    return MlaSpec(run.mla_q_rank or 0, rank, nope, rope, value)


def _moe(run: PublishedRun) -> MoeSpec | None:
    if not run.mixture:
        return None
    return MoeSpec(
        experts=run.experts or 0,
        per_token=_stated(run.top_k, "number of experts of a token"),
        ffn_dim=run.moe_ffn or run.ffn or 0,
        shared=run.shared_experts or 0,
        first_dense=run.first_dense or 0,
        every=run.moe_every or 1,
    )


def _layouts(
    run: PublishedRun,
    trained: RunSoftware,
    job: TrainingJob,
    recompute: tuple[int, ...],
    assumptions: list[str],
) -> Iterable[PlannedLayout]:
    """Yield every layout that agrees with the row and divides its batch."""
    fixed = _fixed(run, trained, job, assumptions)
    each, rest = divmod(job.workload.batch, fixed.data)
    if rest:
        return
    sizes = _micro_batches(run, trained, each, assumptions)
    stages = _stage_choices(run, trained.habits, fixed.pipeline, job.workload.model.layers, assumptions)
    for micro_batch, per_rank, mode in itertools.product(sizes, stages, recompute):
        schedule = _schedule(run, per_rank)
        if each % micro_batch == 0 and _runs(schedule, each // micro_batch, fixed.pipeline):
            yield replace(
                fixed,
                micro_batch=micro_batch,
                stages_per_rank=per_rank,
                schedule=schedule,
                recompute=job.modes[mode].name,
            )


def _micro_batches(
    run: PublishedRun, trained: RunSoftware, each: int, assumptions: list[str]
) -> tuple[int, ...]:
    """Return the choices of sequences of a micro-batch of a data-parallel rank that has ``each`` of them in a step."""
    if not trained.habits.accumulates:
        return (each,)
    if run.micro_batch:
        return (run.micro_batch,)
    if trained.habits.micro_batch:
        assumptions.append(
            f"micro-batch of {trained.habits.micro_batch}, as in the recipes of {trained.software.name}"
        )
        return (trained.habits.micro_batch,)
    assumptions.append("micro-batch: the fastest that fits")
    return _MICRO_BATCHES


def _fixed(
    run: PublishedRun, trained: RunSoftware, job: TrainingJob, assumptions: list[str]
) -> PlannedLayout:
    """Return the degrees and switches of the row's layout that have no alternatives."""
    if not run.tp or not run.pp:
        raise Excluded("does not state tensor and pipeline parallelism")
    tensor, pipeline, context = run.tp, run.pp, run.cp or 1
    data, rest = divmod(run.gpus or 0, tensor * pipeline * context)
    if rest or not data or (run.dp and run.dp * tensor * pipeline * context != run.gpus):
        raise Excluded(f"its degrees of parallelism do not multiply to its {run.gpus} accelerators")
    expert, expert_tensor = (run.ep or 1, run.expert_tensor or 1) if run.mixture else (1, 1)
    if tensor * context * data % (expert * expert_tensor):
        raise Excluded(
            f"its {expert} x {expert_tensor} ranks of experts do not divide the {tensor * context * data} ranks of a stage"
        )
    shard = _shard(run, job, data)
    stated = run.seq_parallel.lower()
    sharded = stated in ("1", "true", "yes") if stated else trained.habits.sequence_parallel
    return PlannedLayout(
        tensor=tensor,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        pipeline=pipeline,
        replicate=data // shard,
        shard=shard,
        zero=_zero(run, job, assumptions),
        precision=_precision(run, assumptions),
        offload_activations=(
            run.activation_offload or (trained.recipe is not None and trained.recipe.offload)
        ),
        sequence_parallel=sharded and tensor > 1,
    )


def _shard(run: PublishedRun, job: TrainingJob, data: int) -> int:
    """Return the data-parallel ranks that share one copy of the states."""
    if run.slices and run.slices > 1 and data % run.slices == 0:
        return data // run.slices
    inside = job.cluster.per_node if run.shard_domain == "node" else data
    return inside if data % inside == 0 else data


def _zero(run: PublishedRun, job: TrainingJob, assumptions: list[str]) -> int:
    stages = job.stack.zero_stages
    if run.zero is None:
        assumptions.append(f"ZeRO stage {max(stages)}, as is usual with {job.stack.name}")
        return max(stages)
    if run.zero > 3:
        raise Excluded(f"there is no ZeRO stage {run.zero}")
    return run.zero


def _precision(run: PublishedRun, assumptions: list[str]) -> str:
    text = run.precision.lower()
    for pattern, name in (
        (r"fp4|float4", "fp4"),
        (r"fp8|float8|e4m3|e5m2", "fp8"),
        (r"fp16|(?<!b)float16|half", "fp16"),
        (r"bf16|bfloat16", "bf16"),
        (r"(?<!t)f(p|loat)32", "fp32"),
    ):
        if re.search(pattern, text):
            return name
    if text:
        raise Excluded(f"its precision, {run.precision!r}, is not known to the planner")
    assumptions.append("bf16")
    return "bf16"


def _stage_choices(
    run: PublishedRun, habits: Habits, pipeline: int, layers: int, assumptions: list[str]
) -> tuple[int, ...]:
    if pipeline == 1:
        return (1,)
    if run.vpp or "dualpipe" in run.schedule.lower():
        return (run.vpp or 2,)
    is_interleaved = run.schedule.lower().startswith("interleaved")
    if not is_interleaved and (run.schedule or not habits.interleaves):
        return (1,)
    assumptions.append("interleaving: the fastest that fits")
    possible = tuple(divisors(max(layers // pipeline, 1), 8))
    return possible[1:] if is_interleaved and len(possible) > 1 else possible


def _schedule(run: PublishedRun, per_rank: int) -> ScheduleName:
    if "dualpipe" in run.schedule.lower():
        return "dualpipev"
    return "interleaved" if per_rank > 1 else "1f1b"


def _runs(schedule: str, micro_batches: int, ranks: int) -> bool:
    """Return True if a schedule can run so many micro-batches."""
    if schedule == "interleaved":
        return micro_batches % ranks == 0
    return schedule != "dualpipev" or micro_batches >= 2 * ranks
