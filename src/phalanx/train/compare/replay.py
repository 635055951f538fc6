"""Replay of a run's steps on this rank under a witness or a meter, without touching the run.

The state is read from one of the run's checkpoints, or is the initial one; samples, slots, schedule and layout are the run's own. Nothing is
saved and nothing is evaluated.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.checkpoint.committed.restore import restore
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.data.reading.dataset import RunData, inputs_of
from phalanx.observe.ledger import Ledger
from phalanx.parallel.mesh import Mesh, build_mesh, find_machines
from phalanx.parallel.pipeline_schedules import Schedule
from phalanx.parallel.reduction import reproducible_sums
from phalanx.parallel.reduction.checksum import piece_checksum
from phalanx.parallel.reduction.data_parallel import gradients, local
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.layout import SPLIT_BACKWARD
from phalanx.run.spec import RunSpec
from phalanx.train.assemble import take_over
from phalanx.train.compare.observation import (
    BatchScores,
    Moment,
    Observation,
    RankReplay,
    ReplayOrder,
    StepMeasures,
)
from phalanx.train.compose import build_model
from phalanx.train.evaluation.scoring import score_sequences
from phalanx.train.evaluation.tasks import ScoredSequence
from phalanx.train.lifecycle.progress import SampleSupply, TrainProgress
from phalanx.train.start.open_run import check_data
from phalanx.train.step.slot import Losses, MicroBatch, SlotWork
from phalanx.train.step.state import Built, fill_initial, state_shards, state_tensors
from phalanx.train.step.step import StepReport, StepStatistics

# Figures of replayed steps: losses by slot and by token, and gradient norms by layer.
#
# Norms are exact sums (``phalanx.parallel.reduction.reproducible_sums``), and losses come from the step and from a forward
# pass. So all figures have the same bits on every layout that gives the run's hash of the weights.

_LAYER = re.compile(r"(?:[A-Za-z_]\w*\.)*?\d+(?=\.|$)|\w+")
"""The layer of a parameter: "blocks.3" of "blocks.3.ffn.up.weight", "head" of "head.weight"."""
TokenLosses: TypeAlias = "np.ma.MaskedArray[tuple[int], np.dtype[np.float64]]"
"""Losses of the tokens of a sequence behind the first, masked where a token is no target."""
_SLOTS_IN_FULL = 4
"""So many slots, those with the largest losses, are reported token by token."""


def layer_of(parameter: str) -> str:
    """Return the name of the layer that a parameter belongs to."""
    match = _LAYER.match(parameter)
    return match[0] if match else parameter


class StepMeter(StepStatistics):
    """Meter of the steps of a replay up to ``last``. All methods are collectives."""

    def __init__(self, built: Built, data: RunData, last: int) -> None:
        """Meter the model of ``built`` on ``data``; ``last`` is the step whose batches are scored."""
        self._built, self._data, self._last = built, data, last
        self.measures: dict[int, StepMeasures] = {}
        self._layer_norms: dict[str, float] = {}
        self._first_sample = 0
        self._token_losses: list[TokenLosses] = []
        """The losses of each sequence of the last step."""
        self._batch_before: float | None = None
        self._history: list[list[float]] = []

    def before_step(self, step: int, progress: TrainProgress) -> None:
        """Ahead of the last step, score its batch and, if there is one, the batch before it, and note the history of
        losses. Before all other steps, do nothing.
        """
        if step != self._last:
            return
        batch = self._built.spec.train.batch_size
        self._first_sample, self._history = progress.next_sample, progress.recent
        self._token_losses = self._scored(progress.next_sample)
        if progress.next_sample >= batch:
            self._batch_before = _mean(self._scored(progress.next_sample - batch))

    def before_update(self, gradient_scale: float, *, finite: bool) -> bool:  # noqa: ARG002
        """Compute the gradient norm of each layer, times ``gradient_scale``; balance biases are left out. A
        collective. Return False: the update itself is not measured.
        """
        placement = self._built.placement
        own = gradients(self._built.model.parts)
        layers: dict[str, list[Tensor]] = {}
        for name, kind in placement.kinds.items():  # all of the model's, in the same order on every rank
            if kind.kind != "balance":
                of_layer = layers.setdefault(layer_of(name), [])
                if name in own and placement.owns(name):
                    of_layer.append(own[name])
        counts = [placement.parameter_count] * len(layers)
        values = reproducible_sums.norms(list(layers.values()), counts, self._built.model.mesh.device)
        self._layer_norms = {
            layer: value * gradient_scale for layer, value in zip(layers, values, strict=True)
        }
        return False

    def after_update(self) -> None:
        """Do nothing: the update is not measured."""

    def after_step(self, step: int, report: StepReport) -> None:
        """Note the figures of a step."""
        self.measures[step] = StepMeasures(
            report.lr, report.slot_losses, self._layer_norms, is_applied=report.applied
        )

    def scores(self) -> BatchScores:
        """Return the mean loss of each sequence, the losses token by token of the ``_SLOTS_IN_FULL`` slots with the
        largest losses of the last step, and the earlier batch and history. Slots whose loss is NaN count as the
        largest.
        """
        train = self._built.spec.train
        slot_losses = self.measures[self._last].slot_losses
        per_slot = train.batch_size // train.slots
        # A loss that is not a number is the largest of all.
        order = sorted(
            range(len(slot_losses)), key=lambda slot: -np.nan_to_num(slot_losses[slot], nan=np.inf)
        )
        positions = [
            slot * per_slot + row for slot in sorted(order[:_SLOTS_IN_FULL]) for row in range(per_slot)
        ]
        return BatchScores(
            self._first_sample,
            {position: tuple(self._token_losses[position].tolist()) for position in positions},
            tuple(_mean([losses]) for losses in self._token_losses),
            self._batch_before,
            self._history,
        )

    def _scored(self, first_sample: int) -> list[TokenLosses]:
        """Return the losses (nats) of each of ``batch_size`` sequences from ``first_sample`` under the present
        weights: one masked array ``(seq_len,)`` each, masked where there is no target. A collective.
        """
        built, train = self._built, self._built.spec.train
        samples = self._data.train_samples(first_sample, train.batch_size)  # (sequences, seq_len + 1)
        tokens, last = inputs_of(samples), samples[:, -1:]
        tokens = np.concatenate((tokens, np.where(last < 0, 0, last)), axis=1)
        is_target = samples[:, 1:] >= 0
        if train.targets_within_documents:
            is_target &= tokens[:, :-1] != train.end_of_document
        sequences = [
            ScoredSequence(tuple(row), train.seq_len, number, 0) for number, row in enumerate(tokens.tolist())
        ]
        scores = score_sequences(built.model, built.runner, built.spec, sequences)
        return [
            np.ma.array(-np.array(score.log_probabilities), mask=~mask)
            for score, mask in zip(scores, is_target, strict=True)
        ]


def _mean(losses: list[TokenLosses]) -> float:
    """Return the mean over all targets; 0 without any."""
    values = np.concatenate([of_sequence.compressed() for of_sequence in losses])
    return float(values.mean()) if len(values) else 0.0


# The witness of a step: checksums of each module's output, forward and backward, and of weights and their gradients.
#
# Hooks attach it to a built model from outside, and it changes no bit. Tensor and context ranks have pieces of the hidden
# states. Each piece's position in the full tensor is known, so the pieces' checksums add up to that of the full tensor. Tensors
# that are divided inside attention and feed-forward layers are compared only between equal layouts. Compiled blocks are
# observed only from outside: hooks inside would change the compiled program.

_HIDDEN = re.compile(
    r"embedding|norm|blocks\.\d+(\.(attention|attention_norm|attention_post_norm|ffn|ffn_norm|ffn_post_norm))?"
)
"""Modules whose output is the hidden states, or what is added to them: ``(b, s, d)`` on every layout, or a piece along ``s``."""
_IN_BLOCK = re.compile(r"blocks\.\d+\.")
LOSS = "the loss"


@dataclass
class _Now:
    """The micro-batch that is computed."""

    slot: int
    micro_batch: int
    batch: MicroBatch
    stage: int = 0
    calls: Counter[str] = field(default_factory=Counter)


class ModuleWitness:
    """Watches the steps of one model on this rank; ``take`` gives what it saw."""

    def __init__(self, built: Built) -> None:
        """Register forward hooks in the model of ``built``, and replace its runner's losses and gradient function.
        These changes are permanent.

        Of compiled blocks only the block itself is hooked, not the modules in it.
        """
        self.step = 0
        self._built, self._mesh = built, built.model.mesh
        self._now: _Now | None = None
        self._backward = False
        self._micro_batches: dict[int, _Now] = {}
        self._seen: list[tuple[Observation, Tensor]] = []
        self._own_piece = _own_piece(self._mesh)
        self._in_backward: _Now | None = None
        """The micro-batch whose gradient was last seen."""
        self._followed: dict[int, Tensor] = {}
        """Weights whose gradients are seen, by their identity."""
        schedule = Schedule.of(built.spec.parallel)
        self._stages = dict(zip(built.model.parts, schedule.stages_of(self._mesh.pipeline_rank), strict=True))
        for part, stage in self._stages.items():
            for name, module in part.named_modules():
                if (name or stage == schedule.stages - 1) and not (
                    built.spec.runtime.compile and _IN_BLOCK.match(name)
                ):
                    module.register_forward_hook(self._hook(name or LOSS, name))
        runner = built.runner
        losses = runner.losses
        runner.losses = _WitnessedLosses(losses.spec, losses.mesh, losses.rows, losses.tiles, self)
        compute = runner.gradients
        vars(runner)["gradients"] = lambda work: compute(self._witnessed(work))

    def take(self) -> list[Observation]:
        """Return the observations since the last call, with their sums as unsigned 64-bit numbers, and clear them. Waits for the
        device."""
        seen, self._seen = self._seen, []
        if not seen:
            return []
        sums = torch.stack([value for _, value in seen]).tolist()  # (observations,)
        return [
            dataclasses.replace(observation, sum=value & ((1 << 64) - 1))
            for (observation, _), value in zip(seen, sums, strict=True)
        ]

    def see_weights(self, moment: Moment) -> None:
        """Record checksums of this rank's parts of all weights."""
        for name, tensor in state_tensors(self._built.model.parts).items():
            self._see_part(moment, name, tensor, local(tensor))

    def see_gradients(self) -> None:
        """Record checksums of this rank's parts of all gradients, summed over the slots of the step."""
        parameters = state_tensors(self._built.model.parts)
        for name, gradient in gradients(self._built.model.parts).items():
            self._see_part("gradient", name, parameters[name], gradient)

    def _see_part(self, moment: Moment, name: str, parameter: Tensor, part: Tensor) -> None:
        """Record the checksum of ``part``, which covers the same slice of the full tensor as this rank's part of
        ``parameter``. An empty slice is skipped.
        """
        partition = self._built.placement.partition(name)
        offset, shape = partition.local_slice(parameter)
        if 0 in shape:
            return
        index = [torch.arange(start, start + size) for start, size in zip(offset, shape, strict=True)]
        piece = ",".join(f"{start}:{start + size}" for start, size in zip(offset, shape, strict=True))
        value = piece_checksum(name, part, index, partition.full_shape)
        self._seen.append((Observation(self.step, moment, name, 0, piece=piece), value))

    def _hook(self, name: str, path: str) -> Callable[[nn.Module, object, object], None]:
        """Return a forward hook that records a module's outputs, and registers hooks for the gradients of them and of
        the module's own weights.

        It does nothing in backward (recomputation) and outside of a micro-batch that counts. ``path`` is empty for
        the stage itself, whose head the loss reads without a call: then modules that were not called are followed
        too.
        """

        def see(module: nn.Module, _args: object, output: object) -> None:
            """Record each tensor of ``output``, and its gradient when that comes; later calls of a module in a
            micro-batch are numbered. Nothing is recorded outside of ``calling`` or in a backward pass.
            """
            now = self._now
            if now is None or self._backward:  # in a backward pass, layers are only recomputed
                return
            now.calls[name] += 1
            calls = now.calls[name]
            title = name if calls == 1 else f"{name} (call {calls})"
            tensors = list(output) if isinstance(output, (tuple, list)) else [output]
            for number, tensor in enumerate(tensors):
                if not isinstance(tensor, Tensor):
                    continue
                label = title if len(tensors) == 1 else f"{title}[{number}]"
                self._see_output("forward", label, name, tensor, now)
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient_hook(label, name, now))  # type: ignore[no-untyped-call]
            if path:
                self._follow(path, module)
            else:  # the model's head is not called, because the loss reads its weights
                for inner, part in module.named_modules():
                    if inner and inner not in now.calls:
                        self._follow(inner, part)

        return see

    def _follow(self, path: str, module: nn.Module) -> None:
        """Record the gradients of the unsharded weights that ``module`` itself has, micro-batch by micro-batch. Each
        weight is hooked once.

        Nothing is recorded of sharded weights, or under a pipeline schedule that splits backward.
        """
        parallel = self._built.spec.parallel
        if parallel.pipeline > 1 and parallel.pipeline_schedule in SPLIT_BACKWARD:
            return  # weights' gradients are postponed, and arrive in pieces
        for name, weight in module.named_parameters(recurse=False):
            if weight.requires_grad and not isinstance(weight, DTensor) and id(weight) not in self._followed:
                self._followed[id(weight)] = weight  # referenced, so that no other object gets its id
                weight.register_hook(self._weight_hook(f"{path}.{name}"))  # type: ignore[no-untyped-call]

    def _weight_hook(self, name: str) -> Callable[[Tensor], None]:
        """Return a hook that records a weight's gradient under the micro-batch in backward; outside of backward it does nothing."""

        def see(gradient: Tensor) -> None:
            now = self._in_backward
            if now is not None:
                adds_up = self._mesh.layout.dividing == (1, 1, 1, 1)
                self._see_whole("slot gradient", name, gradient, now, adds_up=adds_up)

        return see

    def _gradient_hook(self, label: str, name: str, now: _Now) -> Callable[[Tensor], None]:
        """Return a hook that marks ``now`` as the micro-batch in backward and records the gradient. The gradient of
        the loss itself is not recorded: it is the slot's scale.
        """

        def see(gradient: Tensor) -> None:
            self._in_backward = now
            if name != LOSS:  # the loss's own gradient is the slot's scale
                self._see_output("backward", label, name, gradient, now)

        return see

    def _see_output(self, moment: Moment, label: str, name: str, tensor: Tensor, now: _Now) -> None:
        """Record an output or its gradient. Hidden states ``(batch, seq / model ranks, dim)`` are summed by position,
        so that the checksums of several ranks' pieces add up; all other tensors are recorded by ``_see_whole``.
        """
        spec, layout, mesh = self._built.spec, self._mesh.layout, self._mesh
        batch = now.batch.tokens.shape[0]
        hidden = (batch, spec.train.seq_len, spec.model.dim)
        adds_up = bool(_HIDDEN.fullmatch(name)) and tensor.shape == (
            batch,
            spec.train.seq_len // layout.model_ranks,
            spec.model.dim,
        )
        if adds_up:
            # A context rank's positions, of which a tensor rank has a contiguous piece.
            positions = now.batch.positions.chunk(layout.tensor)[mesh.tensor_rank]  # (seq / model ranks,)
            index = [torch.arange(batch), positions, torch.arange(spec.model.dim)]
            value = piece_checksum(label, tensor, index, hidden)
            piece = "" if layout.model_ranks == 1 else self._own_piece
            observation = Observation(
                self.step, moment, label, 0, now.slot, now.micro_batch, piece, True, now.stage
            )
            self._seen.append((observation, value))
        else:
            self._see_whole(moment, label, tensor, now, adds_up=False)

    def _see_whole(self, moment: Moment, label: str, tensor: Tensor, now: _Now, *, adds_up: bool) -> None:
        """Record the checksum of a tensor by its own indices. With ``adds_up`` it is a full tensor; otherwise it is
        labeled as this rank's piece, comparable only to the same rank of an equal layout.
        """
        index = [torch.arange(size) for size in tensor.shape]
        value = piece_checksum(label, tensor, index, tensor.shape)
        piece = "" if adds_up else self._own_piece
        observation = Observation(
            self.step, moment, label, 0, now.slot, now.micro_batch, piece, adds_up, now.stage
        )
        self._seen.append((observation, value))

    def _witnessed(self, work: SlotWork) -> SlotWork:
        """Return ``work`` with wrapped functions: ``read`` notes slot and number of each micro-batch that counts, and
        ``audited`` marks that backward runs. Forget the micro-batches of earlier work.
        """

        def read(turn: int) -> list[MicroBatch]:
            batches, current = list(work.read(turn)), work.rounds[turn]
            if current.counts:
                for number, batch in enumerate(batches):
                    self._micro_batches[id(batch)] = _Now(current.slot, number, batch)
            return batches

        @contextmanager
        def audited(turn: int) -> Iterator[None]:
            """Run the slot's audit of ``work``, and mark meanwhile that its backward pass runs."""
            with work.audited(turn):
                self._backward, self._in_backward = True, None
                try:
                    yield
                finally:
                    self._backward, self._in_backward = False, None

        self._micro_batches.clear()
        return dataclasses.replace(work, read=read, audited=audited)

    @contextmanager
    def calling(self, stage: nn.Module, batch: MicroBatch) -> Iterator[None]:
        """Context of the forward pass of a stage on ``batch``: hooks record only inside, and only if ``batch`` counts."""
        place = self._micro_batches.get(id(batch))
        if place is not None:
            self._now = dataclasses.replace(place, stage=self._stages.get(stage, 0), calls=Counter())
        try:
            yield
        finally:
            self._now = None


@dataclass(frozen=True)
class _WitnessedLosses(Losses):
    """Losses that call stages as ``Losses`` does, and give the witness the micro-batch that is computed."""

    witness: ModuleWitness

    def call(self, stage: nn.Module, x: Tensor, batch: MicroBatch, *, ahead: bool) -> Tensor:
        with self.witness.calling(stage, batch):
            return super().call(stage, x, batch, ahead=ahead)


def _own_piece(mesh: Mesh) -> str:
    """Return a name of this rank's piece of what the axes of the model divide: equal on ranks of equal layouts with the same piece."""
    degrees = " x ".join(map(str, mesh.layout.dividing))
    return f"context rank {mesh.context_rank}, tensor rank {mesh.tensor_rank} of {degrees}"


def nothing(_step: int, _built: Built) -> None:
    """Do nothing before a step."""


def replay(
    spec: RunSpec,
    order: ReplayOrder,
    directory: RunDirectory,
    device: torch.device,
    before_step: Callable[[int, Built], None] = nothing,
) -> RankReplay:
    """Compute the steps after ``order.from_step`` up to ``order.to_step`` again. A collective call of all ranks of
    the run's layout.

    Start from the checkpoint of ``order.from_step``; from 0, initialize or take over the weights. Return this rank's
    observations, or measures with ``order.is_measured``, and each step's loss and gradient norm.

    ``spec`` is the resolved run, ``order`` the steps, ``directory`` one for this replay alone with a record as
    that of a run, ``device`` this rank's. ``before_step`` is called with the number of each step and the model ahead
    of it.

    Raises ``CheckpointError`` if the checkpoint cannot be read, ``LayoutError`` if the run cannot be laid out on the
    ranks of the process group, and ``RunDirectoryError`` if the run was trained on other data.
    """
    machine_ranks = find_machines(device).ranks_each if spec.train.reduction == "reproducible" else 0
    mesh = build_mesh(spec, dist.get_world_size(), device, machine_ranks=machine_ranks)
    built = build_model(spec, mesh)
    parts = built.model.parts
    shards = state_shards(parts, built.optimizer, built.placement)
    progress = TrainProgress()
    if order.from_step:
        extra = restore(DiskTier(Path(order.checkpoints)), order.from_step, shards, rank=mesh.rank)
        progress = TrainProgress.from_extra(extra)
    else:
        fill_initial(parts, built.placement, spec)
        if spec.checkpoint.init_from:
            taken = take_over(spec.checkpoint, directory, built, shards)
            progress = TrainProgress.from_extra(taken.extra) if taken else progress
    dist.barrier()
    witness = None if order.is_measured else ModuleWitness(built)
    observed: list[Observation] = []
    numbers: dict[int, dict[str, float]] = {}
    data = RunData.of_run(spec)
    check_data(directory, data.fingerprint)
    meter = StepMeter(built, data, order.to_step) if order.is_measured else None
    batches = SampleSupply(data, spec, built.rounds, progress).up_to(order.to_step)
    stepper = progress.stepper(built, batches, Ledger(time.monotonic_ns()))
    for step in range(progress.step + 1, order.to_step + 1):
        before_step(step, built)
        if witness is not None:
            witness.step = step
            witness.see_weights("weight")
            report = stepper.run(step, before_update=witness.see_gradients)
            witness.see_weights("updated")
            observed += witness.take()
        elif meter is not None:
            meter.before_step(step, progress)
            report = stepper.run(step, statistics=meter)
            meter.after_step(step, report)
        progress.advance(report, stepper.updates, spec.train, progress.spike(report, spec.train))
        numbers[step] = {"loss": report.loss, "grad_norm": report.grad_norm}
    measures, scores = ({}, None) if meter is None else (meter.measures, meter.scores())
    return RankReplay(mesh.layout.degrees, observed, numbers, measures, scores)
