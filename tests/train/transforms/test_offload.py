"""Offload: what is away comes back with its bits, and leaves nothing behind."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forked_python import Popen
from phalanx.run.spec import MemorySpec, RunSpec
from phalanx.train.activations import (
    FileStore,
    HostStore,
    Regions,
    apply_activation_offload,
    apply_recompute,
    offload_activations,
)
from phalanx.train.optimizers.optimizer import MomentStore
from train.blocks import DENSE, MODELS, build, gradients_of, loss_of, same_bits

CPU = torch.device("cpu")


def to_file(folder: Path) -> Any:
    return partial(offload_activations, store=FileStore(folder, CPU), smallest=1)


@pytest.mark.parametrize("kind", ["none", "full", "selective"])
@pytest.mark.parametrize("model", MODELS)
def test_activations_in_a_file_change_no_bit(tmp_path: Path, model: str, kind: Any) -> None:
    recompute = partial(apply_recompute, spec=RunSpec(memory=MemorySpec(recompute=kind)))
    away = build(MODELS[model], recompute, to_file(tmp_path))
    plain = build(MODELS[model])
    for seed in (1, 2):
        assert same_bits(gradients_of(away, seed), gradients_of(plain, seed))


def test_micro_batches_in_flight_do_not_mix(tmp_path: Path) -> None:
    plain, away = build(DENSE), build(DENSE, to_file(tmp_path))
    for model in (plain, away):
        losses = [loss_of(model, seed) for seed in (1, 2, 3)]
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
    assert same_bits(
        {name: p.grad for name, p in plain.named_parameters() if p.grad is not None},
        {name: p.grad for name, p in away.named_parameters() if p.grad is not None},
    )


def test_the_room_of_a_step_is_used_again_in_the_next(tmp_path: Path) -> None:
    store = FileStore(tmp_path, CPU)
    model = build(DENSE, partial(offload_activations, store=store, smallest=1))
    sizes = []
    for seed in (1, 2, 3):
        gradients_of(model, seed)
        gc.collect()
        sizes.append(store.regions.size)
    assert sizes[0] == sizes[1] == sizes[2] > 0


def test_a_forward_pass_without_backward_gives_its_room_back(tmp_path: Path) -> None:
    store = FileStore(tmp_path, CPU)
    model = build(DENSE, partial(offload_activations, store=store, smallest=1))
    sizes = []
    for _ in range(3):
        loss_of(model)
        gc.collect()
        store.flush()
        sizes.append(store.regions.size)
    assert sizes[0] == sizes[1] == sizes[2] > 0


@pytest.mark.parametrize(("kind", "blocks_inputs_only"), [("none", False), ("full", True)])
def test_a_storage_goes_away_once_however_often_it_is_saved(
    tmp_path: Path, kind: Any, blocks_inputs_only: bool
) -> None:
    store, offloaded = FileStore(tmp_path, CPU), []

    def remember(source: torch.Tensor) -> Any:
        offloaded.append(source)  # kept, so that no address is used twice
        return store(source)

    recompute = partial(apply_recompute, spec=RunSpec(memory=MemorySpec(recompute=kind)))
    model = build(DENSE, recompute, partial(offload_activations, store=remember, smallest=1))
    loss_of(model)
    assert len({source.data_ptr() for source in offloaded}) == len(offloaded)
    assert (len(offloaded) == DENSE.layers) == blocks_inputs_only


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=12))
def test_a_file_gives_back_what_was_put_into_it(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    store = FileStore(tmp_path_factory.getbasetemp(), CPU)
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    waiting = [store(source) for source in sources]
    assert all(torch.equal(source, item.get()) for source, item in zip(sources, waiting, strict=True))


@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=20))
def test_regions_do_not_overlap_and_waste_little(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    regions = Regions(tmp_path_factory.getbasetemp())
    taken = sorted((regions.take(size), size) for size in sizes)
    for (offset, size), (following, _) in zip(taken, [*taken[1:], (regions.size, 0)], strict=True):
        assert offset + size <= following
    assert regions.size <= sum(1.125 * size + 4096 for size in sizes)


def test_activations_on_the_host_stay_where_they_are_on_a_cpu() -> None:
    model = build(DENSE)
    before = [block.forward for block in model.blocks.values()]
    apply_activation_offload(model, MemorySpec(offload_activations="host"), CPU)
    assert before == [block.forward for block in model.blocks.values()]


def ran(program: str, folder: Path) -> tuple[int, str]:
    """The exit code of a program in a process of its own, and what it printed."""
    script = folder / "program.py"
    script.write_text(program)
    process = Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    printed, _ = process.communicate()
    return process.returncode, printed


def test_a_full_disk_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    # A limit on the size of files is the full disk that a test can make.
    program = f"""
import resource, signal
from pathlib import Path
from phalanx.train.activations import OffloadError, Regions
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
regions = Regions(Path({str(tmp_path)!r}))
regions.take(1 << 19)
try:
    regions.take(1 << 20)
except OffloadError as error:
    print(error)
"""
    code, printed = ran(program, tmp_path)
    assert code == 0
    assert str(tmp_path) in printed
    assert "memory.offload_path" in printed


def test_a_killed_process_leaves_no_file_behind(tmp_path: Path) -> None:
    (files := tmp_path / "files").mkdir()
    program = f"""
import os, signal, torch
from pathlib import Path
from phalanx.train.activations import FileStore
store = FileStore(Path({str(files)!r}), torch.device("cpu"))
store(torch.zeros(1 << 20, dtype=torch.uint8)).get()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert ran(program, tmp_path)[0] == -signal.SIGKILL
    assert os.listdir(files) == []


@pytest.mark.parametrize("where", ["none", "host", "file"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_moments_begin_as_zeros_and_keep_what_is_written(
    tmp_path: Path, where: Any, dtype: torch.dtype
) -> None:
    store = MomentStore(MemorySpec(offload_optimizer=where, offload_path=str(tmp_path)), CPU)
    shapes = [(7, 5), (0, 3), (1000,), ()]
    tensors = [store.zeros(shape, dtype) for shape in shapes]
    assert [(tuple(t.shape), t.dtype, int(t.count_nonzero())) for t in tensors] == [
        (s, dtype, 0) for s in shapes
    ]
    flat = [tensor.view(-1) for tensor in tensors]
    for piece in store.visiting((column,) for column in ([tensor] for tensor in flat)):
        for tensor in piece[0]:
            tensor.add_(1)
    assert all(int(t.sum()) == math.prod(s) for t, s in zip(tensors, shapes, strict=True))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("where", ["host", "file"])
def test_what_a_gpu_offloads_changes_no_bit(tmp_path: Path, where: Any) -> None:
    gpu = torch.device("cuda", 0)
    spec = MemorySpec(offload_activations=where, offload_optimizer=where, offload_path=str(tmp_path))
    store = HostStore(gpu) if where == "host" else FileStore(tmp_path, gpu)
    with gpu:
        plain, away = build(DENSE), build(DENSE, partial(offload_activations, store=store, smallest=1))
        for seed in (1, 2):
            assert same_bits(gradients_of(away, seed), gradients_of(plain, seed))
    moments = MomentStore(spec, gpu)
    home = [moments.zeros((1 << 20,)) for _ in range(3)]
    weights = [torch.randn(1 << 20, device=gpu) for _ in home]
    for here, there in moments.visiting(
        ([weight], [tensor]) for weight, tensor in zip(weights, home, strict=True)
    ):
        assert there[0].device == here[0].device
        there[0].add_(here[0])
    assert all(torch.equal(tensor.cpu(), weight.cpu()) for tensor, weight in zip(home, weights, strict=True))


def test_an_optimizer_steps_to_the_same_bits_wherever_its_moments_live(tmp_path: Path) -> None:
    from phalanx.run.kinds.operations import Parameter
    from phalanx.run.spec import OptimizerSpec
    from phalanx.train.optimizers.adamw import AdamW

    def stepped(store: MomentStore | None) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 70_001))
        optimizer = AdamW(OptimizerSpec(), {"w": weight}, {"w": Parameter("w", (70_001,), "matrix")})
        if store is not None:
            optimizer.exp_avg["w"], optimizer.exp_avg_sq["w"] = store.zeros((70_001,)), store.zeros((70_001,))
        for number in (1, 2, 3):
            weight.grad = weight.detach().sin() * number
            optimizer.step(number, 1e-2, 1.0)
        return weight.detach()

    memory = MemorySpec(offload_optimizer="file", offload_path=str(tmp_path))
    assert torch.equal(stepped(MomentStore(memory, CPU)), stepped(None))
