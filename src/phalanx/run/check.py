"""Rules that span several fields of a run: what is impossible together, with what would make it possible."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.run.problems import Problem
from phalanx.run.spec import ModelSpec, RunSpec, TrainSpec


def check(spec: RunSpec) -> list[Problem]:
    """Everything in ``spec`` that cannot be, each with the fields concerned."""
    return [*_model(spec.model), *_train(spec.train), *_parallel(spec)]


def _model(model: ModelSpec) -> Iterator[Problem]:
    if model.head_dim == 0 and model.dim % model.heads:
        yield Problem(
            "model.heads",
            f"dim {model.dim} is not divisible by {model.heads} heads",
            f"{_divisors_near(model.dim, model.heads)} divide it; or give model.head_dim",
            ("model.dim", "model.head_dim"),
        )
    elif _head_dim(model) % 2:
        yield Problem(
            "model.head_dim",
            f"a head of {_head_dim(model)} elements cannot be rotated in pairs",
            "rotary embeddings need an even head_dim",
            ("model.dim", "model.heads"),
        )
    if model.kv_heads and model.heads % model.kv_heads:
        yield Problem(
            "model.kv_heads",
            f"{model.heads} heads cannot be shared out over {model.kv_heads} key/value heads",
            f"{_divisors_near(model.heads, model.kv_heads)} divide {model.heads}",
            ("model.heads",),
        )
    scaling = model.rope_scaling
    if scaling is not None and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield Problem(
            "model.rope_scaling.high_freq_factor",
            f"{scaling.high_freq_factor:g} is not above low_freq_factor {scaling.low_freq_factor:g}",
            "the band between the two is where frequencies are blended",
            ("model.rope_scaling.low_freq_factor", "model.rope_scaling"),
        )


def _head_dim(model: ModelSpec) -> int:
    return model.head_dim or model.dim // model.heads


def _train(train: TrainSpec) -> Iterator[Problem]:
    if train.batch_size % train.slots:
        yield Problem(
            "train.slots",
            f"a batch of {train.batch_size} sequences cannot be divided into {train.slots} equal slots",
            f"{_divisors_near(train.batch_size, train.slots)} divide {train.batch_size}",
            ("train.batch_size",),
        )
        return
    per_slot = train.batch_size // train.slots
    if train.micro_batch_size and per_slot % train.micro_batch_size:
        yield Problem(
            "train.micro_batch_size",
            f"a slot of {per_slot} sequences cannot be divided into micro-batches of {train.micro_batch_size}",
            f"{_divisors_near(per_slot, train.micro_batch_size)} divide {per_slot}",
            ("train.slots", "train.batch_size"),
        )


def _parallel(spec: RunSpec) -> Iterator[Problem]:
    parallel = spec.parallel
    if parallel.sharding == "none" and parallel.shard_ranks > 1:
        yield Problem(
            "parallel.shard_ranks",
            f'{parallel.shard_ranks} ranks cannot share a model with sharding = "none"',
            'set parallel.sharding to "zero2" or "zero3"',
            ("parallel.sharding",),
        )
    if parallel.ranks:
        yield from check_ranks(spec, parallel.ranks)


def check_ranks(spec: RunSpec, ranks: int) -> Iterator[Problem]:
    """What is impossible about running ``spec`` on ``ranks`` data-parallel ranks."""
    shard_ranks = spec.parallel.shard_ranks or ranks
    if ranks % shard_ranks:
        yield Problem(
            "parallel.shard_ranks",
            f"{ranks} ranks cannot be divided into groups of {shard_ranks}",
            f"{_divisors_near(ranks, shard_ranks)} divide {ranks}; or set it to 0",
            ("parallel.ranks",),
        )
    if ranks > spec.train.slots:
        yield Problem(
            "parallel.ranks",
            f"{ranks} ranks for {spec.train.slots} slots: some would never have work",
            f"at most train.slots = {spec.train.slots} ranks, or more slots",
            ("train.slots",),
        )


def _divisors_near(number: int, wanted: int) -> str:
    divisors = [d for d in range(1, min(number, 65536) + 1) if number % d == 0]
    nearest = sorted(sorted(divisors, key=lambda d: abs(d - wanted))[:4])
    return ", ".join(map(str, nearest))
