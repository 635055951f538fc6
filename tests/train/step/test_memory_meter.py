"""Measured memory is that of closed forms."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.run.spec import MemorySpec, RunSpec
from phalanx.train.activations import FileStore, apply_recompute, offload_activations
from phalanx.train.step.meters import MemoryByKind, MemoryMeter, storage_bytes
from ranks import Ranks
from train.blocks import DENSE, build, gradients_of, loss_of

CPU = torch.device("cpu")


def measured(
    model: nn.Module, state: list[torch.Tensor] | None = None, micro_batches: int = 1
) -> MemoryByKind:
    """Bytes that a step of ``model`` holds; ``state`` is its optimizer's."""
    meter = MemoryMeter([model], lambda: state or [], CPU, compiled=False)
    with meter:
        for seed in range(micro_batches):
            loss_of(model, seed).backward()
        meter.gradients_complete()
    return meter.result()


def recompute(kind: Any) -> Any:
    return partial(apply_recompute, spec=RunSpec(memory=MemorySpec(recompute=kind)))


def test_parameters_gradients_and_optimizer_state_have_their_closed_form() -> None:
    model = build(DENSE)
    elements = sum(math.prod(parameter.shape) for parameter in model.parameters())
    moments = [torch.zeros_like(parameter) for parameter in model.parameters() for _ in range(2)]
    memory = measured(model, moments)
    assert (memory.parameters, memory.gradients, memory.optimizer) == (
        4 * elements,
        4 * elements,
        8 * elements,
    )


def test_views_of_what_was_there_before_do_not_count_again() -> None:
    model = nn.Linear(64, 64)
    moments = [torch.zeros(64, 64)]
    meter = MemoryMeter([model], lambda: moments, CPU, compiled=False)
    with meter:
        views = [model.weight.detach().t(), moments[0][:8], model.bias.view(8, 8)]
        new = torch.zeros(100)
    assert meter.result().total == 4 * (64 * 64 + 64 + 64 * 64 + 100)
    del views, new


def test_activations_of_a_stack_of_layers_have_their_closed_form() -> None:
    width, rows, layers = 64, 128, 5
    stack = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
    stack.requires_grad_()
    x = torch.randn(rows, width)
    meter = MemoryMeter([stack], list, CPU, compiled=False)
    with meter:
        stack(x).sum().backward()
    # Each layer keeps the result of tanh, which is the next layer's input.
    assert meter.result().activations == 4 * layers * rows * width


def test_recomputing_more_keeps_less() -> None:
    kept = [measured(build(DENSE, recompute(kind))).activations for kind in ("none", "selective", "full")]
    assert None not in kept
    assert kept == sorted(kept, reverse=True)  # type: ignore[type-var]
    assert len(set(kept)) == 3


class PromptStore(FileStore):
    """A store that returns once all is written: bytes on their way still take memory, and disks differ in speed."""

    def __call__(self, source: torch.Tensor) -> Any:
        waiting = super().__call__(source)
        self.flush()
        return waiting


def test_offloaded_activations_do_not_count(tmp_path: Any) -> None:
    away = partial(offload_activations, store=PromptStore(tmp_path, CPU), smallest=1)
    here, there = measured(build(DENSE)).activations, measured(build(DENSE, away)).activations
    assert here is not None
    assert there is not None
    assert there < here / 5


def test_one_micro_batch_after_another_keeps_no_more_than_one() -> None:
    model = build(DENSE)
    measured(model)  # gradients are there from now on
    single, three = measured(model), measured(model, micro_batches=3)
    assert three.activations == single.activations


def test_micro_batches_in_flight_add_up() -> None:
    model = build(DENSE)
    meter = MemoryMeter([model], list, CPU, compiled=False)
    with meter:
        losses = [loss_of(model, seed) for seed in range(3)]
        for loss in losses:
            loss.backward()
    single = measured(build(DENSE)).activations
    assert single is not None
    assert meter.result().activations == pytest.approx(3 * single, rel=0.01)


def test_measuring_changes_no_bit() -> None:
    plain, watched = build(DENSE), build(DENSE)
    expected = gradients_of(plain)
    with MemoryMeter([watched], list, CPU, compiled=False):
        got = gradients_of(watched)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_compiled_code_on_a_cpu_is_not_watched() -> None:
    model = build(DENSE)
    meter = MemoryMeter([model], list, CPU, compiled=True)
    with meter:
        loss_of(model).backward()
        meter.gradients_complete()
    memory = meter.result()
    assert memory.activations is None
    assert memory.gradients == memory.parameters > 0


def test_shared_memory_counts_once() -> None:
    flat = torch.zeros(100)
    assert storage_bytes([flat, flat[:10], flat.view(10, 10)], CPU) == 400


def sharded_steps() -> list[MemoryByKind]:
    """Measure a step of a sharded model, several times."""
    from torch.distributed.fsdp import fully_shard

    measures = []
    for _ in range(8):
        model = build(DENSE)
        for block in model.blocks.values():
            fully_shard(block)
        fully_shard(model)
        measures.append(measured(model))
    return measures


def test_a_rank_is_charged_with_its_share_of_the_weights(ranks: Ranks) -> None:
    alone = measured(build(DENSE))
    for measures in ranks.run(2, sharded_steps):
        for memory in measures:
            # Norms of the heads have 16 elements; everything divides evenly but one row of 97.
            assert memory.parameters == pytest.approx(alone.parameters / 2, rel=0.01)
            assert memory.gradients == pytest.approx(alone.gradients / 2, rel=0.01)
        # Gathered weights, which are kept to the end of the forward pass, are no activations. Now and then a thread of gloo holds a
        # block's buffer a moment longer, so one of eight steps has to show it.
        assert alone.activations in [memory.activations for memory in measures]


def seen_of_a_divided_tensor() -> tuple[int, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    divided = distribute_tensor(torch.zeros(64, 64), init_device_mesh("cpu", (2,)), [Shard(0)])
    meter = MemoryMeter([nn.Identity()], list, CPU, compiled=False)
    with meter:
        view, double = divided.detach(), divided * 2
    return meter.result().total, view.to_local().nbytes + double.to_local().nbytes


def test_of_a_divided_tensor_only_the_share_of_this_rank_is_seen(ranks: Ranks) -> None:
    for total, shares in ranks.run(2, seen_of_a_divided_tensor):
        assert total == shares
