"""One training step of a tiny model on any layout, and all of what came of it, for comparison with one process."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.checkpoint.committed.digest import WEIGHTS, combine, tensor_digest
from phalanx.checkpoint.format.boxes import Box
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.layout import Layout, layout_of, layout_problems
from phalanx.run.spec import (
    MlaSpec,
    ModelSpec,
    MoeSpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
    RuntimeSpec,
    ScheduleSpec,
    TrainSpec,
)

DENSE = ModelSpec(
    layers=4,
    dim=32,
    heads=4,
    kv_heads=4,
    ffn_dim=64,
    vocab_size=61,
    qk_norm=True,
    qkv_bias=True,
    rope_fraction=0.5,
    attention_pattern=("window", "full", "no-position"),
    window=7,
    score_width=10,
    ffn="geglu",
    norm_offset=True,
    scale_embeddings=True,
    window_rope_theta=100.0,
    sinks=True,
    score_cap=0.8,
    logit_cap=0.5,
)
LATENT = MlaSpec(query_rank=24, kv_rank=16, nope_head_dim=8, rope_head_dim=4, value_head_dim=8)
MIXTURE = ModelSpec(
    layers=4,
    dim=32,
    heads=4,
    ffn_dim=64,
    vocab_size=61,
    ffn="swiglu-clamped",
    ffn_bias=True,
    mla=LATENT,
    moe=MoeSpec(
        experts=8,
        per_token=2,
        ffn_dim=32,
        shared=1,
        shared_gate=True,
        first_dense=1,
        router_bias=True,
        score="sigmoid",
        balance_bias=True,
        aux_loss=0.01,
        z_loss=0.001,
    ),
)


def tiny(model: ModelSpec, parallel: ParallelSpec, seq_len: int = 32, batch_size: int = 16) -> RunSpec:
    """A resolved run of ``model``: four slots, a micro-batch for each sequence, with clipping and decay."""
    return RunSpec(
        model=resolve(model),
        train=TrainSpec(
            steps=4, batch_size=batch_size, seq_len=seq_len, slots=4, micro_batch_size=1, loss_chunk=16
        ),
        optimizer=OptimizerSpec(lr=1e-2, clip_norm=0.5),
        schedule=ScheduleSpec(warmup_steps=0),
        precision=PrecisionSpec(compute="fp32"),
        runtime=RuntimeSpec(device="cpu", seed=3),
        parallel=parallel,
    )


@dataclass(frozen=True)
class Outcome:
    """The result of some steps, as far as one rank knows."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: tuple[tuple[Box, NDArray[np.float32]], ...]
    """This rank's shares of the gradients of the first step, as far as no other rank has the same."""
    weights_sha256: str
    shares: tuple[tuple[Box, bool, bytes], ...]
    """This rank's shares of the weights: where they lie, True on the rank that writes them to a checkpoint, and their bytes."""


def steps_on_this_rank(spec: RunSpec, steps: int = 2, piece_bytes: int = 8000) -> Outcome:
    """Trains ``steps`` steps on random tokens that depend on the slot alone, as one rank of the process group.

    The weights' hash is put together of ``piece_bytes`` at a time: so few that a tensor has several. Activations of any size are offloaded, if
    the run offloads any: those of tiny models would all be too small.
    """
    import time

    import torch.distributed as dist

    from phalanx.observe.ledger import Ledger
    from phalanx.parallel.mesh import build_mesh
    from phalanx.parallel.reduction.data_parallel import named_parameters
    from phalanx.train.assemble import make_deterministic
    from phalanx.train.compose import build_model
    from phalanx.train.step.state import fill_initial, weight_shards, weights_sha256
    from phalanx.train.step.step import Stepper

    device = torch.device("cpu")
    make_deterministic(spec, device)
    mesh = build_mesh(spec, dist.get_world_size(), device)
    built = build_model(spec, mesh, smallest_offload_bytes=1)
    fill_initial(built.model.parts, built.placement, spec)
    gradients: list[tuple[Box, NDArray[np.float32]]] = []

    def keep_gradients() -> None:
        if not gradients:
            for name, part in named_parameters(built.model.parts).items():
                assert part.grad is not None
                share = built.placement.shard("gradient", name, part.grad)
                if share.copies.index == 0:
                    gradients.append((share.box, share.tensor.numpy().copy()))

    slots = [current.slot for current in built.rounds]
    stepper = Stepper(built, random_batches(spec, slots), Ledger(time.monotonic_ns()))
    reports = [stepper.run(number, before_update=keep_gradients) for number in range(1, steps + 1)]
    return Outcome(
        tuple(report.loss for report in reports),
        tuple(report.grad_norm for report in reports),
        tuple(gradients),
        weights_sha256(built.model.parts, built.placement, piece_bytes=piece_bytes),
        tuple(
            (shard.box, shard.copies.index == 0, shard.tensor.numpy().tobytes())
            for shard in weight_shards(built.model.parts, built.placement)
        ),
    )


def random_batches(spec: RunSpec, slots: list[int]) -> Iterator[NDArray[np.int64]]:
    """Random tokens of a rank's ``slots``, step after step, which depend on step and slot alone."""
    per_slot = spec.train.batch_size // spec.train.slots
    step = 0
    while True:
        for slot in slots:
            random = np.random.default_rng([step, slot])
            yield random.integers(0, spec.model.vocab_size, (per_slot, spec.train.seq_len + 1))
        step += 1


@dataclass(frozen=True)
class Whole:
    """The result of some steps over all ranks."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: dict[str, NDArray[np.float32]]
    weights_sha256: str


def merged(outcomes: list[Outcome]) -> Whole:
    """All ranks' outcomes together; they must agree, and copies of a weight have the same bits and be written once."""
    first = outcomes[0]
    for outcome in outcomes:
        assert (outcome.losses, outcome.norms) == (first.losses, first.norms)
        assert outcome.weights_sha256 == first.weights_sha256
    shares = [share for outcome in outcomes for share in outcome.shares]
    assert len({(box, data) for box, _, data in shares}) == len({box for box, _, _ in shares})
    written = sum(math.prod(box.shape) for box, writes, _ in shares if writes)
    assert written == sum(
        math.prod(shape) for shape in {box.name: box.global_shape for box, _, _ in shares}.values()
    )
    assert first.weights_sha256 == _hash_of(shares)
    every = _together([share for outcome in outcomes for share in outcome.gradients])
    assert not any(np.isnan(gradient).any() for gradient in every.values()), "each element is somebody's"
    return Whole(first.losses, first.norms, every, first.weights_sha256)


def _together(shares: Sequence[tuple[Box, NDArray[np.float32]]]) -> dict[str, NDArray[np.float32]]:
    """Whole tensors, put together of all ranks' shares."""
    wholes: dict[str, NDArray[np.float32]] = {}
    for box, data in shares:
        tensor = wholes.setdefault(box.name, np.full(box.global_shape, np.nan, np.float32))
        assert box.dtype == "float32"
        part = tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
        tensor[part] = data
    return wholes


def _hash_of(shares: Sequence[tuple[Box, bool, bytes]]) -> str:
    """The hash of the weights, from whole tensors that are put together of all ranks' shares."""
    wholes = _together([(box, np.frombuffer(data, np.float32).reshape(box.shape)) for box, _, data in shares])
    return combine(
        {
            name.removeprefix(WEIGHTS): tensor_digest("float32", tensor.shape, [tensor.tobytes()])
            for name, tensor in wholes.items()
        }
    )


def worst_error(found: Whole, reference: Whole) -> float:
    """The largest difference of loss and gradients, each relative to the reference's largest element."""
    assert found.gradients.keys() == reference.gradients.keys()
    errors = [abs(found.losses[0] - reference.losses[0]) / abs(reference.losses[0])]
    for name, gradient in reference.gradients.items():
        scale = float(np.abs(gradient).max()) or 1.0
        errors.append(float(np.abs(found.gradients[name] - gradient).max()) / scale)
    return max(errors)


def legal_layouts(
    model: ModelSpec,
    ranks: int,
    most: int = 4,
    made: Callable[[ModelSpec, ParallelSpec], RunSpec] = tiny,
) -> Iterator[tuple[ParallelSpec, Layout]]:
    """Every way of dividing ``ranks`` over the axes with degrees up to ``most``, with all ways of sharding.

    ``made`` makes the run that must be legal. Context ranks pass keys in a ring, or gather them if the model is in context tiles.
    """
    degrees = [degree for degree in (1, 2, 4, 8) if degree <= most]
    for pipeline in degrees:
        for context in degrees:
            for tensor in degrees:
                for expert in degrees if model.moe else (1,):
                    for expert_tensor in {1, tensor} if model.moe else (1,):
                        base = ParallelSpec(
                            pipeline=pipeline,
                            context=context,
                            context_mode="allgather" if model.context_tiles else "ring",
                            tensor=tensor,
                            expert=expert,
                            expert_tensor=expert_tensor,
                        )
                        for parallel in _shardings(base, ranks, most):
                            if not layout_problems(made(model, parallel), ranks):
                                yield parallel, layout_of(parallel, ranks)


def _shardings(base: ParallelSpec, ranks: int, most: int) -> Iterator[ParallelSpec]:
    model_ranks = base.pipeline * base.context * base.tensor
    if ranks % model_ranks or ranks // model_ranks > most:
        return
    data_ranks = ranks // model_ranks
    for shard in (1, 2, 4):
        for sharding in ("zero3", "zero2", "zero1", "none"):
            if data_ranks % shard or (sharding == "none") != (shard == 1):
                continue
            yield dataclasses.replace(base, sharding=sharding, shard_ranks=shard)  # type: ignore[arg-type]
