"""A mixture of experts on many ranks against the same model on one process."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard

from parallel.full_parameters import full_parameter
from phalanx.hardware.local.device import CommClock
from phalanx.model.layers.moe import Experts, routers
from phalanx.model.transformer import Transformer
from phalanx.parallel.context.apply import apply_context
from phalanx.parallel.context.exchange import context_positions
from phalanx.parallel.expert import apply_experts
from phalanx.parallel.mesh import Mesh, Partition, build_mesh
from phalanx.parallel.reduction.data_parallel import local
from phalanx.parallel.reduction.tree import SlotTree
from phalanx.parallel.tensor.apply import VocabularyPiece, apply_tensor, vocabulary_piece
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec, MoeSpec, ParallelSpec, RunSpec, TrainSpec
from phalanx.train.step.loss import summed_cross_entropy
from ranks import Ranks

BATCH, SEQ, CHUNK = 2, 16, 20

# Inner widths fill whole vector registers: a CPU's SiLU rounds the last few elements of a buffer differently, so that rows
# that are narrower would have bits that depend on their place in memory.
MODEL = ModelSpec(
    layers=2,
    dim=32,
    heads=4,
    kv_heads=4,
    ffn_dim=48,
    vocab_size=96,
    moe=MoeSpec(experts=8, per_token=3, ffn_dim=32, shared=1, first_dense=1, aux_loss=0.1, z_loss=0.01),
)
SLOTS = 4

LAYOUTS = {
    "shard": (4, {"expert": 4}),
    "shard, in two teams": (4, {"expert": 2}),
    "tensor": (2, {"tensor": 2, "expert": 2}),
    "tensor and shard": (4, {"tensor": 2, "expert": 4}),
    "part of tensor": (4, {"tensor": 4, "expert": 2}),
    "context and shard": (4, {"context": 2, "expert": 4}),
    "tensor and context": (4, {"context": 2, "tensor": 2, "expert": 4}),
    "nothing, beside tensor": (2, {"tensor": 2}),
    "nothing, beside context": (2, {"context": 2}),
    "their inner elements": (2, {"tensor": 2, "expert_tensor": 2}),
    "shard and their inner elements": (4, {"tensor": 2, "expert": 2, "expert_tensor": 2}),
    "context and their inner elements": (4, {"context": 2, "tensor": 2, "expert": 2, "expert_tensor": 2}),
}


@dataclass
class Part:
    """A rank's part of a parameter's gradient."""

    gradient: Tensor
    offset: tuple[int, ...]
    copy: int
    """The number of this rank among those with the same part of the same gradient."""

    @property
    def place(self) -> tuple[slice, ...]:
        """Its slice of the full gradient."""
        sizes = zip(self.offset, self.gradient.shape, strict=True)
        return tuple(slice(begin, begin + size) for begin, size in sizes)


@dataclass
class Result:
    """One rank's result of a forward and a backward pass."""

    data_rank: int
    team: int
    loss: float
    parts: dict[str, Part]
    seen: list[int]
    """Tokens of this rank that the first router counted for each expert."""


def run_spec(model: ModelSpec, parallel: dict[str, int]) -> RunSpec:
    return RunSpec(
        model=resolve(model),
        train=TrainSpec(seq_len=SEQ, slots=SLOTS, batch_size=SLOTS * BATCH),
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


def tokens(slot: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(slot)
    samples = torch.randint(0, MODEL.vocab_size, (BATCH, SEQ + 1), generator=generator)
    return samples[:, :-1], samples[:, 1:]


def learn(module: Transformer, slot: int, positions: Tensor, rows: VocabularyPiece | None) -> float:
    """The loss of a slot's tokens at ``positions``, after its backward pass."""
    inputs, targets = (each[:, positions] for each in tokens(slot))
    for _, router in routers(module):
        router.auxiliary_scale = 1.0

    def readout(hidden: Tensor, weight: Tensor) -> Tensor:
        return summed_cross_entropy(hidden, weight, targets, CHUNK, rows)

    loss = module(inputs, readout, positions=positions)
    loss.backward()
    return loss.item()


def on_one_process(model: ModelSpec, slots: int) -> tuple[float, dict[str, Tensor]]:
    """The sums over slots of losses and gradients."""
    module = Transformer(resolve(model))
    module.load_state_dict(weights(module.spec), strict=False)
    loss = sum(learn(module, slot, torch.arange(SEQ), None) for slot in range(slots))
    return loss, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def build(
    model: ModelSpec, ranks: int, parallel: dict[str, int], clock: CommClock
) -> tuple[Transformer, Mesh, RunSpec, dict[str, Partition]]:
    spec = run_spec(model, parallel)
    mesh = build_mesh(spec, ranks, torch.device("cpu"))
    with torch.device("meta"):
        module = Transformer(spec.model)
    partitions = apply_tensor(module, mesh, spec, clock) | apply_experts(module, mesh, spec, clock)
    apply_context(module, mesh, spec, clock)
    return module, mesh, spec, partitions


def fill(module: Transformer, partitions: dict[str, Partition]) -> None:
    module.to_empty(device="cpu")
    full_weights = weights(module.spec)
    for _, router in routers(module):
        router.token_counts.zero_()
    for name, parameter in module.named_parameters():
        place = partitions.get(name, Partition(tuple(parameter.shape)))
        offset, shape = place.local_slice(parameter)
        piece = tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))
        local(parameter.detach()).copy_(full_weights[name][piece])


def shard_experts(module: Transformer, mesh: Mesh) -> None:
    """Divides the experts further over the ranks that hold the same; gradients are added over these."""
    for part in module.modules():
        if isinstance(part, Experts):
            sharded = fully_shard(part, mesh=mesh.expert_mesh["expert_shard"])
            assert isinstance(sharded, FSDPModule)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)


def dealt(
    model: ModelSpec, ranks: int, parallel: dict[str, int], compiled: bool = False, sharded: bool = False
) -> Result:
    """Each data rank computes the slot of its number."""
    clock = CommClock(blocking=True)
    module, mesh, spec, partitions = build(model, ranks, parallel, clock)
    if compiled:
        for block in module.blocks.values():
            block.compile(dynamic=False, backend="aot_eager")
    if sharded:
        shard_experts(module, mesh)
    fill(module, partitions)
    positions = torch.arange(SEQ)
    if mesh.layout.context > 1:
        positions = context_positions(SEQ, mesh.layout.context, mesh.context_rank)
    loss = learn(module, mesh.data_rank, positions, vocabulary_piece(mesh, spec, clock))
    parts = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        partition = partitions.get(name, Partition(tuple(parameter.shape)))
        offset, _ = partition.local_slice(parameter.grad)
        parts[name] = Part(local(parameter.grad), offset, partition.copy)
    counted = next(router.token_counts.tolist() for _, router in routers(module))
    counts = mesh.tensor_rank == 0
    return Result(mesh.data_rank, mesh.layout.team, loss if counts else 0.0, parts, counted)


def total(results: list[Result], name: str, like: Tensor) -> Tensor:
    """The sum of what the ranks have of a gradient."""
    full_gradient = torch.zeros_like(like)
    for part in (result.parts[name] for result in results):
        if part.copy == 0:
            full_gradient[part.place] += part.gradient
    return full_gradient


def assert_same(results: list[Result], model: ModelSpec) -> None:
    slots = len({result.data_rank for result in results})
    loss, gradients = on_one_process(model, slots)
    assert sum(result.loss for result in results) == pytest.approx(loss, rel=2e-6)
    assert results[0].parts.keys() == gradients.keys()
    for name, expected in gradients.items():
        error = (total(results, name, expected) - expected).abs().max() / expected.abs().max()
        assert error <= 2e-6, f"{name}: {error:.1e}"
    # Every token is counted once, wherever it was routed.
    assert sum(sum(result.seen) for result in results) == slots * BATCH * SEQ * model.moe.per_token  # type: ignore[union-attr]


@pytest.mark.parametrize(("count", "parallel"), LAYOUTS.values(), ids=LAYOUTS)
def test_loss_and_gradients_are_those_of_one_process_with_experts_dealt_over(
    ranks: Ranks, count: int, parallel: dict[str, int]
) -> None:
    assert_same(ranks.run(count, dealt, MODEL, count, parallel), MODEL)


@pytest.mark.parametrize("expert", [2, 4])
def test_fully_shard_divides_the_parts_further(ranks: Ranks, expert: int) -> None:
    assert_same(ranks.run(4, dealt, MODEL, 4, {"tensor": 2, "expert": expert}, False, True), MODEL)


def test_compiled_blocks_give_the_same(ranks: Ranks) -> None:
    assert MODEL.moe is not None
    one_block = replace(MODEL, layers=1, moe=replace(MODEL.moe, first_dense=0))  # each is compiled by itself
    assert_same(ranks.run(2, dealt, one_block, 2, {"expert": 2}, True), one_block)


def test_layers_that_predict_ahead_have_their_experts_dealt_too(ranks: Ranks) -> None:
    model = replace(MODEL, mtp_depth=1)
    for names in ranks.run(2, dealt_names, model):
        assert "mtp.0.block.ffn.experts.down" in names
        assert names == [name for name in weights(resolve(model)) if ".experts." in name]


def dealt_names(model: ModelSpec) -> list[str]:
    _, _, _, partitions = build(model, 2, {"expert": 2}, CommClock(blocking=True))
    return list(partitions)


def wholes(model: ModelSpec, ranks: int, parallel: dict[str, int]) -> dict[str, Tensor]:
    """The experts' weights, put together from the ranks' parts."""
    module, _, _, partitions = build(model, ranks, parallel, CommClock(blocking=True))
    fill(module, partitions)
    parts = dict(module.named_parameters())
    for name, partition in partitions.items():
        assert partition.part[1] == parts[name].shape
    return {
        name: full_parameter(partitions[name], parts[name].detach())
        for name in partitions
        if ".experts." in name
    }


def test_the_parts_of_all_ranks_make_the_whole(ranks: Ranks) -> None:
    expected = weights(resolve(MODEL))
    count, parallel = LAYOUTS["shard and their inner elements"]
    for full_weights in ranks.run(count, wholes, MODEL, count, parallel):
        assert len(full_weights) == 3
        assert all(torch.equal(full_weights[name], expected[name]) for name in full_weights)


def in_tree_order(results: list[Result], name: str) -> Tensor:
    """The gradient of a parameter of the experts, summed over slots as a step does."""
    slots = 1 + max(result.data_rank for result in results)
    tree: SlotTree[Tensor] = SlotTree(slots, lambda left, right: left + right)
    team, weight = results[0].team, weights(resolve(MODEL))[name]
    for hand in range(slots // team):
        node = torch.full_like(weight, torch.nan)
        for result in results:
            if result.data_rank // team == hand:
                node[result.parts[name].place] = result.parts[name].gradient
        tree.push_node((team.bit_length() - 1, hand), node)
    return tree.take_root()


@pytest.mark.parametrize(
    ("tensor", "alone", "teams"),
    [(1, {"expert": 1}, {2: {"expert": 2}, 4: {"expert": 4}}), (2, {"expert": 2}, {2: {"expert": 4}})],
    ids=["without tensor", "with tensor"],
)
def test_how_many_slots_a_team_computes_at_once_changes_no_bit(
    ranks: Ranks, tensor: int, alone: dict[str, int], teams: dict[int, dict[str, int]]
) -> None:
    expected = ranks.run(4, dealt, MODEL, 4, {"tensor": tensor, **alone})
    for team, parallel in teams.items():
        results = ranks.run(4, dealt, MODEL, 4, {"tensor": tensor, **parallel})
        assert [result.team for result in results] == [team] * 4
        for ours, theirs in zip(results, expected, strict=True):
            assert ours.loss == theirs.loss
            for name, part in theirs.parts.items():
                if ".experts." not in name:
                    assert torch.equal(ours.parts[name].gradient, part.gradient), name
        for name in expected[0].parts:
            if ".experts." in name:
                assert torch.equal(in_tree_order(results, name), in_tree_order(expected, name)), name
