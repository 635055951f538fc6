"""Build this rank's model and its optimizer: the one place where axes, formats and memory are put together.

The order matters. First the axes that make modules smaller (pipeline, tensor, experts) or let them see more than they hold
(context); then what changes how they compute (formats, compilation, recomputation); FSDP last, which divides whatever
parameters it finds. Which combinations are legal is decided in ``phalanx.run.layout``.

Before a rank builds its own part, it needs facts of the whole model (``ModelFacts``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from phalanx.hardware.local.device import CommClock
from phalanx.model.custom import Chain, blocks_of, custom_facts
from phalanx.model.facts.optimizer_state import takes_matrix
from phalanx.model.facts.shape import buffers, count, parameters, stage_layers
from phalanx.model.layers.moe import make_rows_independent
from phalanx.model.transformer import Transformer
from phalanx.observe.ledger import Bucket
from phalanx.parallel.context.apply import apply_context
from phalanx.parallel.context.fixed_tiles import rank_tiles
from phalanx.parallel.divisions import LocalSlice, rounds_of
from phalanx.parallel.expert import apply_experts
from phalanx.parallel.mesh import Mesh, Partition
from phalanx.parallel.pipeline import Pipeline
from phalanx.parallel.pipeline_schedules import Schedule
from phalanx.parallel.reduction.data_parallel import DataParallel, named_parameters, spread
from phalanx.parallel.tensor.apply import apply_tensor, vocabulary_piece
from phalanx.run.kinds.operations import Parameter
from phalanx.run.spec import ModelSpec, OptimizerSpec, RunSpec
from phalanx.train.activations import SMALLEST_BYTES, apply_activation_offload, apply_recompute
from phalanx.train.optimizers.adamw import AdamW, NarrowAdamW
from phalanx.train.optimizers.matrix_optimizer import MatrixOptimizer
from phalanx.train.optimizers.matrix_rules import MATRIX_RULES
from phalanx.train.optimizers.optimizer import MomentStore, Optimizer, Several
from phalanx.train.precision import apply_precision
from phalanx.train.step.slot import LoopRunner, Losses, PipelineRunner, SlotRunner
from phalanx.train.step.state import Built, Placement

# Facts of the full model: names, shapes, stages, FLOP.
#
# For the transformer they follow from the run file alone (``phalanx.model.facts``). For a user's own model they come from
# building it once on the meta device (``phalanx.model.custom``). Every rank derives the same facts.


@dataclass(frozen=True)
class ModelFacts:
    """The facts of the whole model of a resolved run."""

    parameters: Mapping[str, Parameter]
    """Every parameter and balance bias by name, in the canonical order."""
    stages: tuple[range, ...]
    """The layers of each pipeline stage, first stage first."""
    flops_per_token: int
    """Training FLOP per token, attention counted in full."""


def model_facts(spec: RunSpec) -> ModelFacts:
    """Return parameters, stages and FLOP per token of the model of a resolved run. For a custom model, raises as
    ``phalanx.model.custom.custom_facts`` does.
    """
    if spec.model.factory:
        custom = custom_facts(spec.model, spec.train.seq_len, compute_dtype(spec))
        return ModelFacts(
            {parameter.name: parameter for parameter in custom.parameters},
            tuple(stage_layers(spec, custom.layer_costs)),
            custom.flops_per_token,
        )
    kinds = (*parameters(spec.model), *buffers(spec.model))
    return ModelFacts(
        {kind.name: kind for kind in kinds},
        tuple(stage_layers(spec)),
        count(spec.model, spec.train.seq_len).flops_per_token,
    )


def whole_model(spec: ModelSpec, seq_len: int) -> Transformer | Chain:
    """The module that a resolved description stands for, for sequences of ``seq_len`` tokens, on the current default device."""
    return Chain(spec) if spec.factory else Transformer(spec, seq_len)


def compute_dtype(spec: RunSpec) -> torch.dtype:
    """The format of weights and hidden states in forward and backward of a resolved run."""
    return torch.bfloat16 if spec.precision.compute == "bf16" else torch.float32


_AXES = (Bucket.COMM_EXPOSED_DP, Bucket.COMM_EXPOSED_TP, Bucket.COMM_EXPOSED_CP, Bucket.COMM_EXPOSED_EP)


def build_model(spec: RunSpec, mesh: Mesh, *, smallest_offload_bytes: int = SMALLEST_BYTES) -> Built:
    """Build this rank's parts of the model of a resolved ``spec``, their optimizer, and the runner of their slots. Weights are not
    initialized.

    ``smallest_offload_bytes``: smaller activations are not offloaded.
    """
    waits, facts = clocks(mesh.device), model_facts(spec)
    parts, partitions = divided_parts(spec, mesh, waits, facts.stages, smallest_offload_bytes)
    model = spread(parts, mesh, spec, waits[Bucket.COMM_EXPOSED_DP])
    placement = Placement(mesh, facts.parameters, partitions)
    by_name = named_parameters(parts)
    optimizer = make_optimizer(
        spec.optimizer,
        by_name,
        placement.kinds,
        seed=spec.runtime.seed,
        boxes={name: placement.partition(name).local_slice(parameter) for name, parameter in by_name.items()},
        group=mesh.stage_group,
        store=None if spec.memory.offload_optimizer == "none" else MomentStore(spec.memory, mesh.device),
    )
    rounds = rounds_of(mesh.deal(spec.train.slots), mesh.replica, mesh.shard_rank)
    runner = _runner(spec, mesh, model, waits)
    return Built(spec, model, placement, runner, optimizer, rounds, waits, facts.flops_per_token)


def clocks(device: torch.device) -> dict[Bucket, CommClock]:
    """A stopwatch per communication axis, for the time that forward and backward wait for it."""
    return {axis: CommClock.of(device) for axis in _AXES}


def divided_parts(
    spec: RunSpec,
    mesh: Mesh,
    waits: Mapping[Bucket, CommClock],
    stages: Sequence[range],
    smallest_offload_bytes: int = SMALLEST_BYTES,
) -> tuple[list[Transformer | Chain], dict[str, Partition]]:
    """Build this rank's stages of the model on the meta device, divided by all axes but FSDP's.

    ``stages`` are the layers of each stage of the whole pipeline. Returns this rank's stages, and the partition of each
    parameter that the axes divide.
    """
    parts: list[Transformer | Chain] = []
    partitions: dict[str, Partition] = {}
    for stage in Schedule.of(spec.parallel).stages_of(mesh.pipeline_rank):
        part, divided = _part(spec, mesh, stage, waits, stages)
        apply_activation_offload(part, spec.memory, mesh.device, smallest_offload_bytes)
        parts.append(part)
        partitions |= divided
    return parts, partitions


def _part(
    spec: RunSpec, mesh: Mesh, stage: int, waits: Mapping[Bucket, CommClock], stages: Sequence[range]
) -> tuple[Transformer | Chain, dict[str, Partition]]:
    """Build one stage of the model on the meta device, with its compilation and recomputation, and return the
    partitions of its parameters. Only a ``Transformer`` is divided over the inner axes and gets the run's precision;
    a user's own blocks stay whole.
    """
    with torch.device("meta"):
        part = whole_model(spec.model, spec.train.seq_len)
    if len(stages) > 1:
        part.keep(stages[stage], first=stage == 0, last=stage == len(stages) - 1)
    partitions: dict[str, Partition] = {}
    if isinstance(part, Transformer):  # a user's own blocks have unknown contents, so they are not divided
        tiles = rank_tiles(spec, mesh, waits[Bucket.COMM_EXPOSED_CP])
        partitions |= apply_tensor(part, mesh, spec, waits[Bucket.COMM_EXPOSED_TP], tiles)
        partitions |= apply_experts(part, mesh, spec, waits[Bucket.COMM_EXPOSED_EP])
        apply_context(part, mesh, spec, waits[Bucket.COMM_EXPOSED_CP])
        apply_precision(part, spec)
        if spec.precision.rows == "independent":
            make_rows_independent(part)
    if spec.runtime.compile:
        compile_blocks(part)
    apply_recompute(part, spec)
    return part, partitions


def _runner(spec: RunSpec, mesh: Mesh, model: DataParallel, waits: dict[Bucket, CommClock]) -> SlotRunner:
    """Return the runner of slots: a loop, or with pipeline stages their schedule. The clock of a schedule's bubble is
    added to ``waits``.
    """
    rows = vocabulary_piece(mesh, spec, waits[Bucket.COMM_EXPOSED_TP])
    losses = Losses(spec, mesh, rows, rank_tiles(spec, mesh, waits[Bucket.COMM_EXPOSED_CP]))
    if spec.parallel.pipeline == 1:
        return LoopRunner(model, losses)
    shape = spec.train.seq_len // mesh.layout.model_ranks, spec.model.dim
    schedule = Schedule.of(spec.parallel)
    engine = Pipeline(model.parts, schedule, mesh.pipeline_groups, shape, compute_dtype(spec), mesh.device)
    waits[Bucket.STEP_BUBBLE] = engine.clock
    return PipelineRunner(model, losses, engine)


# Compilation of the transformer's blocks, one program for all of them.
#
# A block's ``forward`` is compiled before recomputation, offload and FSDP's hooks are put around it. Recomputation and offload
# belong to the fleet, so they must not change the program. If the code around the block were compiled too, the bits would
# change: Dynamo makes no graph of a checkpointed block, and eager kernels round at other places than compiled ones.


def compile_blocks(module: nn.Module) -> None:
    """Compile the forward and backward pass of the blocks of ``module``, in place. They are not recomputed, offloaded or sharded yet."""
    for block in blocks_of(module):
        block.forward = torch.compile(block.forward, dynamic=False)  # shapes are the run's, never the fleet's


# The optimizer of a run file: each parameter is assigned to it or to AdamW.


def make_optimizer(
    spec: OptimizerSpec,
    parameters: Mapping[str, nn.Parameter],
    kinds: Mapping[str, Parameter],
    *,
    seed: int = 0,
    boxes: Mapping[str, LocalSlice] | None = None,
    group: dist.ProcessGroup | None = None,
    store: MomentStore | None = None,
) -> Optimizer:
    """Return the optimizer of ``parameters``, made on every rank together. AdamW keeps matrices narrow if
    ``spec.state`` is not "fp32"; other rules take the matrices and leave the rest to AdamW.

    ``kinds`` has each parameter's kind and full shape. ``seed`` seeds stochastic rounding. ``boxes`` is this rank's
    part of each parameter; ``None`` if parameters are whole, or DTensors that know their part.

    ``group`` has the ranks that hold each of ``parameters`` between them (``Mesh.stage_group``); a larger group divides
    the work further, and ``None`` means that this rank holds everything. ``store`` has the fp32 moments of ``spec.name
    = "adamw"``; ``None`` is the device. Other rules do not use it.
    """

    def part(names: list[str]) -> dict[str, nn.Parameter]:
        return {name: parameters[name] for name in names}

    if spec.name == "adamw":
        narrow = [n for n in parameters if spec.state != "fp32" and len(kinds[n].shape) > 1]
        plain = [n for n in parameters if n not in narrow]
        wide = AdamW(spec, part(plain), kinds, boxes, store)
        return Several([NarrowAdamW(spec, part(narrow), kinds, seed, boxes), wide]) if narrow else wide
    rule = MATRIX_RULES[spec.name](spec)
    matrices = [n for n in parameters if takes_matrix(spec, kinds[n])]
    rest = [n for n in parameters if n not in matrices]
    optimizers: list[Optimizer] = [AdamW(dataclasses.replace(spec, name="adamw"), part(rest), kinds, boxes)]
    if matrices:
        optimizers.insert(0, MatrixOptimizer(spec, rule, part(matrices), kinds, boxes, group))
    return Several(optimizers)
