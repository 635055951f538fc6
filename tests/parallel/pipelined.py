"""A small model on a pipeline of the test's ranks, and the same model on one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.initialized import initialized
from phalanx.model.transformer import Transformer
from phalanx.parallel.pipeline import Forward, Pipeline
from phalanx.parallel.pipeline_schedules import Schedule, ScheduleName
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec
from phalanx.train.step.loss import summed_cross_entropy

BATCH, SEQ, VOCABULARY, DIM = 2, 8, 48, 16
SCALE = 1 / 64
DENSE = ModelSpec(layers=8, dim=DIM, heads=2, vocab_size=VOCABULARY)
BIASED = ModelSpec(
    layers=8, dim=DIM, heads=2, vocab_size=VOCABULARY, ffn="gelu", ffn_bias=True, attention_bias=True
)
MIXTURE = ModelSpec(
    layers=8,
    dim=DIM,
    heads=2,
    vocab_size=VOCABULARY,
    mla=MlaSpec(query_rank=8, kv_rank=8, nope_head_dim=8, rope_head_dim=4, value_head_dim=8),
    moe=MoeSpec(experts=4, per_token=2, ffn_dim=16, shared=1, first_dense=1),
)


class Nothing:
    """Parameters that add up their gradients themselves."""

    def computing(self, part: int, slot: int, *, last: bool, postponed: bool) -> AbstractContextManager[None]:
        """Encloses nothing."""
        del part, slot, last, postponed
        return nullcontext()


class Slots:
    """Takes each slot's gradients when they are complete, stage by stage."""

    def __init__(self, parts: Sequence[nn.Module], slots: int) -> None:
        self.parts = parts
        self.gradients: list[dict[str, Tensor]] = [{} for _ in range(slots)]

    @contextmanager
    def computing(self, part: int, slot: int, *, last: bool, postponed: bool) -> Iterator[None]:
        """Takes them after the last time."""
        del postponed
        yield
        if last:
            self.gradients[slot] |= gradients_of([self.parts[part]])
            self.parts[part].zero_grad(set_to_none=True)


def batches(micro_batches: int) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens and targets ``(b, s)`` of each micro-batch."""
    generator = torch.Generator().manual_seed(micro_batches)
    drawn = torch.randint(VOCABULARY, (micro_batches, BATCH, SEQ + 1), generator=generator)
    return [sample[:, :-1] for sample in drawn], [sample[:, 1:] for sample in drawn]


def losses_of(targets: Sequence[Tensor]) -> Forward:
    """Calls a stage as training does."""

    def forward(part: nn.Module, x: Tensor, micro_batch: int) -> Tensor:
        readout = partial(summed_cross_entropy, targets=targets[micro_batch], chunk=8)
        return part(x, readout)  # type: ignore[no-any-return]

    return forward


def whole_model(spec: ModelSpec) -> Transformer:
    """The undivided model."""
    return initialized(spec).requires_grad_(True)


def in_one_piece(spec: ModelSpec, micro_batches: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of the undivided model, micro-batch after micro-batch."""
    model, (tokens, targets) = whole_model(spec), batches(micro_batches)
    forward, losses = losses_of(targets), []
    for number, x in enumerate(tokens):
        loss = forward(model, x, number)
        (loss * SCALE).backward()
        losses.append(loss.item())
    return losses, gradients_of([model])


def stages_here(spec: ModelSpec, schedule: Schedule, rank: int) -> list[Transformer]:
    """The stages of one rank, each with as many layers."""
    layers = spec.layers // schedule.stages
    parts = []
    for stage in schedule.stages_of(rank):
        part = whole_model(spec)
        kept = range(stage * layers, (stage + 1) * layers)
        part.keep(kept, first=stage == 0, last=stage == schedule.stages - 1)
        parts.append(part)
    return parts


def pipeline_of(parts: Sequence[nn.Module], schedule: Schedule, group: dist.ProcessGroup) -> Pipeline:
    """The engine of one rank."""
    return Pipeline(parts, schedule, (group, group), (SEQ, DIM), torch.float32, torch.device("cpu"))


def gradients_of(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """All gradients by name."""
    named = ((name, parameter.grad) for part in parts for name, parameter in part.named_parameters())
    return {name: gradient for name, gradient in named if gradient is not None}


def everybody() -> dist.ProcessGroup:
    """All ranks of the test."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def in_a_pipeline(
    name: ScheduleName, per_rank: int, spec: ModelSpec, micro_batches: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of this rank's stages."""
    schedule = Schedule(name, dist.get_world_size(), per_rank)
    parts = stages_here(spec, schedule, dist.get_rank())
    tokens, targets = batches(micro_batches)
    pipeline = pipeline_of(parts, schedule, everybody())
    losses = pipeline.run(tokens, losses_of(targets), [SCALE], Nothing())
    return losses.tolist(), gradients_of(parts)


def slots_in_a_pipeline(
    name: ScheduleName, per_rank: int, spec: ModelSpec, micro_batches: int, slots: int
) -> list[dict[str, Tensor]]:
    """Gradients of this rank's stages for each of ``slots`` slots, which share the micro-batches and flow without a pause."""
    schedule = Schedule(name, dist.get_world_size(), per_rank)
    parts = stages_here(spec, schedule, dist.get_rank())
    tokens, targets = batches(micro_batches)
    accumulation = Slots(parts, slots)
    pipeline_of(parts, schedule, everybody()).run(tokens, losses_of(targets), [SCALE] * slots, accumulation)
    return accumulation.gradients


def slots_in_one_piece(spec: ModelSpec, micro_batches: int, slots: int) -> list[dict[str, Tensor]]:
    """Gradients of the undivided model for each of ``slots`` slots."""
    model, (tokens, targets) = whole_model(spec), batches(micro_batches)
    forward, gradients = losses_of(targets), []
    for number, x in enumerate(tokens):
        (forward(model, x, number) * SCALE).backward()
        if (number + 1) % (micro_batches // slots) == 0:
            gradients.append(gradients_of([model]))
            model.zero_grad(set_to_none=True)
    return gradients


def recomputed_in_a_pipeline(
    name: ScheduleName, per_rank: int, spec: ModelSpec, micro_batches: int
) -> tuple[list[float], dict[str, Tensor]]:
    """The same with the activations of every layer computed again."""
    schedule = Schedule(name, dist.get_world_size(), per_rank)
    parts = stages_here(spec, schedule, dist.get_rank())
    for part in parts:
        for block in part.blocks.values():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    tokens, targets = batches(micro_batches)
    pipeline = pipeline_of(parts, schedule, everybody())
    losses = pipeline.run(tokens, losses_of(targets), [SCALE], Nothing())
    return losses.tolist(), gradients_of(parts)


def evaluated_in_a_pipeline(
    name: ScheduleName, per_rank: int, spec: ModelSpec, micro_batches: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of this rank's stages without gradients."""
    schedule = Schedule(name, dist.get_world_size(), per_rank)
    parts = stages_here(spec, schedule, dist.get_rank())
    tokens, targets = batches(micro_batches)
    losses = pipeline_of(parts, schedule, everybody()).evaluate(tokens, losses_of(targets))
    return losses.tolist(), gradients_of(parts)


def waiting_ns() -> int:
    """How long this rank stood still in a slot."""
    schedule = Schedule("1f1b", dist.get_world_size(), 1)
    parts = stages_here(DENSE, schedule, dist.get_rank())
    tokens, targets = batches(4)
    pipeline = pipeline_of(parts, schedule, everybody())
    pipeline.clock.take_ns()
    pipeline.run(tokens, losses_of(targets), [SCALE], Nothing())
    return pipeline.clock.take_ns()
