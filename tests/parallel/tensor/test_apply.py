"""A model divided over tensor ranks against the same model on one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from parallel.full_parameters import full_parameter
from phalanx.hardware.local.device import CommClock
from phalanx.model.facts.shape import parameters
from phalanx.model.layers.dense import Linear
from phalanx.model.layers.moe import routers
from phalanx.model.transformer import Transformer, targets_ahead, training_loss
from phalanx.parallel.mesh import Partition, build_mesh
from phalanx.parallel.reduction.data_parallel import local
from phalanx.parallel.tensor.apply import VocabularyPiece, apply_tensor, vocabulary_piece
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec, ParallelSpec, RunSpec, TrainSpec
from phalanx.train.step.loss import IGNORE, summed_cross_entropy
from quick_cases import quick
from ranks import Ranks

BATCH, SEQ, CHUNK = 3, 16, 20

# 101 rows of the vocabulary cannot be divided evenly.
GROUPED = ModelSpec(layers=2, dim=32, heads=8, kv_heads=4, head_dim=8, ffn_dim=48, vocab_size=101)
LATENT = replace(
    GROUPED, mla=MlaSpec(query_rank=20, kv_rank=24, nope_head_dim=8, rope_head_dim=4, value_head_dim=12)
)
MIXTURE = MoeSpec(experts=8, per_token=2, ffn_dim=16, shared=1, first_dense=1, aux_loss=0.1, z_loss=0.01)
MODELS = {
    "grouped heads": GROUPED,
    "biases, gelu, norms of heads, tied embedding": replace(
        GROUPED, attention_bias=True, ffn_bias=True, ffn="gelu", qk_norm=True, tie_embeddings=True
    ),
    "two key heads": replace(GROUPED, kv_heads=2, qk_norm=True, attention_bias=True),
    "one key head": replace(GROUPED, kv_heads=1, layers=1),
    "latent attention": LATENT,
    "latent attention with direct queries": replace(
        LATENT, mla=MlaSpec(kv_rank=24, nope_head_dim=8, rope_head_dim=4, value_head_dim=12)
    ),
    "absorbed latent attention": replace(
        LATENT, layers=1, mla=MlaSpec(kv_rank=24, nope_head_dim=8, rope_head_dim=4, absorbed=True)
    ),
    "mixture of experts": replace(GROUPED, moe=MIXTURE),
    "predictions ahead": replace(LATENT, layers=1, mtp_depth=2),
}


@dataclass
class Result:
    """One rank's result of a forward and a backward pass."""

    loss: float
    gradients: dict[str, Tensor]
    """Gradients of whole parameters."""
    waited_ns: int = 0


def run_spec(model: ModelSpec, **parallel: int) -> RunSpec:
    return RunSpec(
        model=resolve(model),
        train=TrainSpec(seq_len=SEQ),
        parallel=ParallelSpec(**parallel),  # type: ignore[arg-type]
    )


def weights(spec: ModelSpec) -> dict[str, Tensor]:
    """The same random weights on every process; norms near 1, so that none is without effect."""
    generator = torch.Generator().manual_seed(7)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Transformer(spec).named_parameters()}
    return {
        name: torch.randn(shape, generator=generator) * 0.1 + ("norm" in name)
        for name, shape in shapes.items()
    }


def tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    samples = torch.randint(0, GROUPED.vocab_size, (BATCH, SEQ + 1), generator=generator)
    targets = samples[:, 1:].clone()
    targets[0, 3] = IGNORE
    return samples[:, :-1], targets


def learn(module: Transformer, rows: VocabularyPiece | None) -> float:
    """The loss, after its backward pass."""
    inputs, targets = tokens()
    for _, router in routers(module):
        router.auxiliary_scale = 1.0

    def readout(hidden: Tensor, weight: Tensor, depth: int = 0) -> Tensor:
        shifted = targets_ahead(targets, depth, IGNORE) if depth else targets
        return summed_cross_entropy(hidden, weight, shifted, CHUNK, rows)

    parts = module(inputs, readout, ahead=readout if len(module.mtp) else None)
    loss = training_loss(parts, module.spec)
    loss.backward()
    return loss.item()


def on_one_process(model: ModelSpec) -> Result:
    spec = resolve(model)
    module = Transformer(spec)
    module.load_state_dict(weights(spec), strict=False)
    loss = learn(module, None)
    return Result(loss, {name: p.grad for name, p in module.named_parameters() if p.grad is not None})


def build(
    spec: RunSpec, clock: CommClock, ranks: int
) -> tuple[Transformer, dict[str, Partition], VocabularyPiece]:
    """This rank's part of the model, with its part of the weights."""
    mesh = build_mesh(spec, ranks, torch.device("cpu"))
    with torch.device("meta"):
        module = Transformer(spec.model)
    partitions = apply_tensor(module, mesh, spec, clock)
    rows = vocabulary_piece(mesh, spec, clock)
    assert rows is not None
    return module, partitions, rows


def fill(module: Transformer, partitions: dict[str, Partition]) -> None:
    module.to_empty(device="cpu")
    full_weights = weights(module.spec)
    for name, parameter in module.named_parameters():
        place = partitions.get(name, Partition(tuple(parameter.shape)))
        offset, shape = place.local_slice(parameter)
        piece = tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))
        local(parameter.detach()).copy_(full_weights[name][piece])


def gathered(
    module: Transformer, partitions: dict[str, Partition], rows: VocabularyPiece
) -> dict[str, Tensor]:
    """Gradients of whole parameters; those of experts, of which every rank saw other tokens, are added up."""
    gradients = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        gradient = (
            full_parameter(partitions[name], parameter.grad)
            if name in partitions
            else rows.comm.total(parameter.grad)
        )
        gradients[name] = gradient
    return gradients


def on_tensor_ranks(
    model: ModelSpec, degree: int, alter: Callable[[Transformer], None] | None = None
) -> Result:
    clock = CommClock(blocking=True)
    module, partitions, rows = build(run_spec(model, tensor=degree), clock, degree)
    fill(module, partitions)
    if alter is not None:
        alter(module)
    loss = learn(module, rows)
    waited_ns = clock.take_ns()
    return Result(loss, gathered(module, partitions, rows), waited_ns)


def assert_same(ours: Result, expected: Result) -> None:
    assert ours.loss == pytest.approx(expected.loss, rel=2e-6)
    assert ours.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        error = (ours.gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert error <= 2e-6, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    ("name", "degree"),
    quick(
        ((name, degree) for name in MODELS for degree in (2, 4)),
        # Fewer key heads than ranks are another path; else two ranks divide what four do.
        of_the_suite=[*((name, 4) for name in MODELS), ("two key heads", 2), ("one key head", 2)],
    ),
)
def test_loss_and_gradients_are_those_of_one_process(ranks: Ranks, name: str, degree: int) -> None:
    expected = on_one_process(MODELS[name])
    results = ranks.run(degree, on_tensor_ranks, MODELS[name], degree)
    for result in results:
        assert_same(result, expected)
        assert result.loss == results[0].loss, "every rank must see the same bits"
        assert result.waited_ns > 0


def recompute(module: Transformer) -> None:
    """Computes each block's activations again in backward."""
    for block in module.blocks.values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def recompute_with_hooks(module: Transformer) -> None:
    """The same around the whole call of each block, so that what is hooked to it runs again too."""
    for layer, block in list(module.blocks.items()):
        module.blocks[layer] = Recomputed(block)


class Recomputed(torch.nn.Module):
    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self._called = [block]  # in a list, so that parameters keep their names
        for name, child in block.named_children():
            self.add_module(name, child)

    def forward(self, *args: object) -> object:
        return checkpoint(self._called[0], *args, use_reentrant=False)


def compile_blocks(module: Transformer) -> None:
    for block in module.blocks.values():
        block.compile(dynamic=False, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(
    ("alter", "name"),
    quick(
        (
            (alter, name)
            for alter in (recompute, recompute_with_hooks)
            for name in (
                "biases, gelu, norms of heads, tied embedding",
                "latent attention",
                "mixture of experts",
            )
        ),
        of_the_suite=[
            (recompute, "latent attention"),
            (recompute_with_hooks, "biases, gelu, norms of heads, tied embedding"),
            (recompute_with_hooks, "mixture of experts"),
        ],
    ),
)
def test_recomputing_activations_changes_no_bit(
    ranks: Ranks, alter: Callable[[Transformer], None], name: str
) -> None:
    plain = ranks.run(2, on_tensor_ranks, MODELS[name], 2)
    again = ranks.run(2, on_tensor_ranks, MODELS[name], 2, alter)
    for kept, recomputed in zip(plain, again, strict=True):
        assert kept.loss == recomputed.loss
        assert all(torch.equal(kept.gradients[n], recomputed.gradients[n]) for n in kept.gradients)


@pytest.mark.parametrize(
    "name",
    quick(
        ["biases, gelu, norms of heads, tied embedding", "latent attention"],
        of_the_suite=["latent attention"],
    ),
)
def test_blocks_compile_as_one_graph(ranks: Ranks, name: str) -> None:
    one_block = replace(MODELS[name], layers=1)  # each is compiled by itself
    expected = on_one_process(one_block)
    for result in ranks.run(2, on_tensor_ranks, one_block, 2, compile_blocks):
        assert_same(result, expected)


def on_fsdp_and_tensor_ranks(model: ModelSpec) -> Result:
    """Two data-parallel ranks that compute the same slot, so that the mean of the gradients is each one's."""
    clock = CommClock(blocking=True)
    spec = run_spec(model, tensor=2)
    mesh = build_mesh(spec, 4, torch.device("cpu"))
    with torch.device("meta"):
        module = Transformer(spec.model)
    partitions = apply_tensor(module, mesh, spec, clock)
    for unit in (*module.blocks.values(), module):
        fully_shard(unit, mesh=mesh.dense["fsdp"], reshard_after_forward=unit is not module)
    fill(module, partitions)
    rows = vocabulary_piece(mesh, spec, clock)
    assert rows is not None
    loss = learn(module, rows)
    gradients = {
        name: full_parameter(partitions[name], cast(DTensor, parameter.grad).full_tensor())
        for name, parameter in module.named_parameters()
    }
    return Result(loss, gradients)


@pytest.mark.parametrize("name", ["biases, gelu, norms of heads, tied embedding", "latent attention"])
def test_fully_shard_divides_the_parts_further(ranks: Ranks, name: str) -> None:
    expected = on_one_process(MODELS[name])
    for result in ranks.run(4, on_fsdp_and_tensor_ranks, MODELS[name]):
        assert_same(result, expected)


def in_two_stages(model: ModelSpec) -> Result:
    """Both stages of a pipeline, one after the other on the same ranks."""
    clock = CommClock(blocking=True)
    spec = run_spec(model, tensor=2)
    mesh = build_mesh(spec, 2, torch.device("cpu"))
    inputs, targets = tokens()
    stages, partitions = [], {}
    for number in range(2):
        with torch.device("meta"):
            stage = Transformer(spec.model)
        stage.keep(range(number, number + 1), first=number == 0, last=number == 1)
        partitions |= apply_tensor(stage, mesh, spec, clock)
        fill(stage, partitions)
        stages.append(stage)
    rows = vocabulary_piece(mesh, spec, clock)
    assert rows is not None
    readout = partial(summed_cross_entropy, targets=targets, chunk=CHUNK, rows=rows)
    loss = stages[1](stages[0](inputs), readout, positions=torch.arange(SEQ))
    loss.backward()
    gradients = {}
    for stage in stages:
        gradients |= gathered(stage, partitions, rows)
    return Result(loss.item(), gradients)


def test_stages_of_a_pipeline_hand_each_other_pieces_of_the_sequence(ranks: Ranks) -> None:
    expected = on_one_process(GROUPED)
    for result in ranks.run(2, in_two_stages, GROUPED):
        assert_same(result, expected)


def places(model: ModelSpec, degree: int) -> dict[str, tuple[Partition, tuple[int, ...]]]:
    """The partition and shape of each parameter on the meta device, which is where the model is divided."""
    module, partitions, _ = build(run_spec(model, tensor=degree), CommClock(blocking=True), degree)
    assert all(parameter.is_meta for parameter in module.parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    return {
        name: (
            replace(partition, splits=tuple(replace(s, group=None) for s in partition.splits)),
            shapes[name],
        )  # type: ignore[arg-type]
        for name, partition in partitions.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_the_parts_of_each_parameter_make_up_the_whole(ranks: Ranks, name: str) -> None:
    spec = resolve(MODELS[name])
    everybodys = ranks.run(4, places, MODELS[name], 4)
    for parameter in parameters(spec):
        if ".experts." in parameter.name:
            assert all(parameter.name not in mine for mine in everybodys)
            continue
        times = torch.zeros(parameter.shape)
        for rank, mine in enumerate(everybodys):
            partition, shape = mine[parameter.name]
            offset, expected_shape = partition.part
            assert shape == expected_shape
            assert partition.full_shape == parameter.shape
            assert partition.copies == 4 // parameter.parts_over(4)
            assert partition.copy == rank % partition.copies
            times[tuple(slice(b, b + n) for b, n in zip(offset, shape, strict=True))] += 1 / partition.copies
        assert torch.equal(times, torch.ones(parameter.shape)), parameter.name


def undivided() -> tuple[int, int]:
    spec = run_spec(GROUPED)
    mesh = build_mesh(spec, 1, torch.device("cpu"))
    module = Transformer(spec.model)
    partitions = apply_tensor(module, mesh, spec, CommClock(blocking=True))
    hooks = sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in module.modules())
    return len(partitions), hooks


def test_one_tensor_rank_changes_nothing(ranks: Ranks) -> None:
    assert ranks.run(1, undivided) == [(0, 0)]


def totals(context: int, tensor: int) -> list[int]:
    spec = run_spec(MODELS["mixture of experts"], context=context, tensor=tensor)
    mesh = build_mesh(spec, 4, torch.device("cpu"))
    module = Transformer(spec.model)
    apply_tensor(module, mesh, spec, CommClock(blocking=True))
    (_, router), *_ = routers(module)
    return router.total_over(torch.tensor([1, 10**mesh.rank])).tolist()


@pytest.mark.parametrize(
    ("context", "tensor", "expected"),
    [
        (1, 1, [[1, 1], [1, 10], [1, 100], [1, 1000]]),
        (2, 1, [[2, 11], [2, 11], [2, 1100], [2, 1100]]),
        (1, 2, [[2, 11], [2, 11], [2, 1100], [2, 1100]]),
        (2, 2, [[4, 1111]] * 4),
    ],
)
def test_routers_see_the_load_of_all_ranks_that_share_a_slot(
    ranks: Ranks, context: int, tensor: int, expected: list[list[int]]
) -> None:
    assert ranks.run(4, totals, context, tensor) == expected


def exchange_products(module: Transformer) -> None:
    for part in module.modules():
        if isinstance(part, Linear):
            part.product = doubled


def doubled(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t() * 2


def on_one_process_doubled(model: ModelSpec) -> Result:
    module = Transformer(resolve(model))
    module.load_state_dict(weights(module.spec))
    exchange_products(module)
    loss = learn(module, None)
    return Result(loss, {name: p.grad for name, p in module.named_parameters() if p.grad is not None})


def test_exchanged_products_stay_exchanged(ranks: Ranks) -> None:
    expected = on_one_process_doubled(GROUPED)
    for result in ranks.run(2, on_tensor_ranks, GROUPED, 2, exchange_products):
        assert_same(result, expected)


def with_overlap() -> tuple[float, bool]:
    from torch._inductor import config

    spec = run_spec(GROUPED, tensor=2)
    spec = replace(spec, parallel=replace(spec.parallel, async_tensor=True))
    clock = CommClock(blocking=True)
    mesh = build_mesh(replace(spec, parallel=ParallelSpec(tensor=2)), 2, torch.device("cpu"))
    with torch.device("meta"):
        module = Transformer(spec.model)
    try:
        partitions = apply_tensor(module, mesh, spec, clock)
        is_enabled = config._micro_pipeline_tp
        fill(module, partitions)
        for block in module.blocks.values():
            block.compile(dynamic=False)
        return learn(module, vocabulary_piece(mesh, spec, clock)), is_enabled
    finally:
        config._micro_pipeline_tp = False


@pytest.mark.slow
def test_overlap_does_no_harm_where_there_is_none(ranks: Ranks) -> None:
    expected = on_one_process(GROUPED)
    for loss, is_enabled in ranks.run(2, with_overlap):
        assert is_enabled
        assert loss == pytest.approx(expected.loss, rel=2e-6)
