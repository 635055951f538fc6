"""One table of optimizer state: the real optimizers keep what ``phalanx show`` and the planner count."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import DENSE, MIXTURE, legal_layouts, tiny
from matrix_holders import holders_of
from phalanx.model.facts.holdings import fullest, moment_bytes, work_of_owners
from phalanx.model.facts.optimizer_state import matrix_work, state_tensors, takes_matrix
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import fleet_state_bytes, parameters
from phalanx.model.transformer import Transformer
from phalanx.parallel.divisions import LocalSlice
from phalanx.parallel.mesh import piece
from phalanx.run.kinds.operations import Parameter
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.layout import Layout
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec, OptimizerSpec, ParallelSpec, RunSpec, TrainSpec
from phalanx.train.compose import make_optimizer
from phalanx.train.optimizers.matrix_optimizer import matrices_of, owners_of
from phalanx.train.optimizers.matrix_rules import MATRIX_RULES
from phalanx_plan.step_cost import memory
from phalanx_plan.step_cost.estimate import prepare
from phalanx_plan.workload import stacks
from plan.jobs import job, one

SPECS = st.one_of(
    st.builds(OptimizerSpec, state=st.sampled_from(["fp32", "bf16", "int8"])),
    st.builds(
        OptimizerSpec,
        name=st.sampled_from(list(MATRIX_RULES)),
        beta1=st.sampled_from([0.0, 0.9]),
        block_size=st.sampled_from([5, 24, 1024]),
    ),
)
MODELS = st.builds(
    ModelSpec,
    layers=st.integers(1, 3),
    dim=st.sampled_from([8, 24]),
    heads=st.just(2),
    ffn_dim=st.sampled_from([20, 72]),
    ffn=st.sampled_from(["swiglu", "gelu"]),
    vocab_size=st.sampled_from([33, 64]),
    tie_embeddings=st.booleans(),
    attention_bias=st.booleans(),
    mla=st.sampled_from(
        [None, MlaSpec(query_rank=6, kv_rank=6, nope_head_dim=4, rope_head_dim=2, value_head_dim=4)]
    ),
    moe=st.sampled_from([None, MoeSpec(experts=3, ffn_dim=12, shared=1, first_dense=1)]),
    mtp_depth=st.sampled_from([0, 1]),
)


@settings(max_examples=60, deadline=None)
@given(SPECS, MODELS)
def test_the_state_that_is_allocated_is_what_show_and_the_planner_count(
    optimizer: OptimizerSpec, model: ModelSpec
) -> None:
    model = resolve(model)
    kinds = {parameter.name: parameter for parameter in parameters(model)}
    by_name = dict(Transformer(model).named_parameters())
    state = make_optimizer(optimizer, by_name, kinds).state()

    # Tensor by tensor: names, shapes and bytes.
    expected = {
        f"{t.name}/{p.name}": (t.shape, t.bytes) for p in kinds.values() for t in state_tensors(optimizer, p)
    }
    allocated = {
        name: (parts[0].full_shape, sum(part.tensor.nbytes for part in parts))
        for name, parts in state.items()
    }
    assert allocated == expected

    total = sum(size for _, size in allocated.values())
    spec = RunSpec(model=model, optimizer=optimizer, train=TrainSpec(batch_size=8, seq_len=16, slots=2))
    sizes = fleet_state_bytes(model, optimizer, 4)
    assert sum(sizes.values()) - sizes["weights"] - sizes["gradients"] == total
    assert moment_bytes(optimizer, Layout(), fullest(spec, Layout(), 0)) == total
    assert planned_moments(spec, Layout()) == [total]


def planned_moments(spec: RunSpec, layout: Layout) -> list[float]:
    """Bytes of the optimizer's state on the planner's fullest rank of each place of the pipeline."""
    mine = job(spec.model, batch=8, seq_len=16, stack=stacks.stack_of(spec))
    evaluation = prepare(mine, one(layout, zero=2))
    places = map(evaluation.table.__getitem__, range(len(evaluation.table)))
    return [memory.state_bytes(evaluation, place)["moments"].item() for place in places]


@pytest.mark.parametrize("state", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", ["adamw", *MATRIX_RULES])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(shard=4),
        Layout(shard=2, tensor=2),
        Layout(shard=3, pipeline=2),
        Layout(context=2, replicate=2),
    ],
    ids=lambda layout: str(layout.ranks),
)
def test_show_and_planner_agree_on_every_optimizer_of_a_preset(name: str, state: str, layout: Layout) -> None:
    optimizer = OptimizerSpec(name=name, state=state if name == "adamw" else "fp32")  # type: ignore[arg-type]
    model = resolve(PRESETS["toy-4m"], 4096)
    parallel = ParallelSpec(pipeline=layout.pipeline, tensor=layout.tensor, context=layout.context)
    spec = RunSpec(
        model=model,
        optimizer=optimizer,
        parallel=parallel,
        train=TrainSpec(batch_size=12, seq_len=16, slots=12),
    )
    shown = [moment_bytes(optimizer, layout, fullest(spec, layout, rank)) for rank in range(layout.pipeline)]
    assert max(planned_moments(spec, layout)) == max(shown)


MATRIX_OPTIMIZERS = [OptimizerSpec(name=n, block_size=24) for n in MATRIX_RULES]  # type: ignore[arg-type]
LAYOUTS = [
    (model, layout)
    for model in (DENSE, MIXTURE)
    for ranks in (1, 2, 4, 8)
    for _, layout in legal_layouts(model, ranks)
    if layout.pipeline == 1
]


@settings(deadline=None)
@given(st.sampled_from(LAYOUTS), st.sampled_from(MATRIX_OPTIMIZERS))
def test_owners_have_the_work_that_the_trainer_gives_them(
    drawn: tuple[ModelSpec, Layout], optimizer: OptimizerSpec
) -> None:
    model, layout = drawn
    taken = [p for p in parameters(tiny(model, ParallelSpec()).model) if takes_matrix(optimizer, p)]
    ranks = layout.shard * layout.model_ranks
    boxes = [{p.name: box for p in taken if (box := held_box(p, layout, rank))} for rank in range(ranks)]
    holders = holders_of({p.name: p.shape for p in taken}, boxes)
    matrices = [m for p in taken for m in matrices_of(p.name, p.shape)]
    works = [matrix_work(optimizer, m.rows, m.columns) for m in matrices]
    owners = owners_of(matrices, holders, [w.flops for w in works], ranks)
    given_work = [0] * ranks
    for owner, work in zip(owners, works, strict=True):
        given_work[owner] += work.state_bytes
    assert [work.state_bytes for work in work_of_owners(optimizer, taken, layout)] == given_work


def held_box(parameter: Parameter, layout: Layout, rank: int) -> LocalSlice | None:
    """The part that a rank of a stage holds: its tensor or expert piece, of which FSDP's chunk of rows; ``None`` if that is empty."""
    ranges = [range(size) for size in parameter.shape]
    splits: Mapping[int, tuple[int, int]]
    if parameter.stacked:
        share, inner = divmod(rank, layout.expert * layout.expert_tensor)
        splits = {
            0: (inner // layout.expert_tensor, layout.expert),
            parameter.tensor_dim or 1: (inner % layout.expert_tensor, layout.expert_tensor),
        }
        shares = layout.expert_shard
    else:
        share, inner = divmod(rank, layout.tensor)
        splits = {} if parameter.tensor_dim is None else {parameter.tensor_dim: (inner, layout.tensor)}
        shares = layout.shard * layout.context
    for dim, (index, count) in splits.items():
        ranges[dim] = piece(parameter.shape[dim], index, count)
    rows = -(-len(ranges[0]) // shares)
    ranges[0] = ranges[0][share * rows : (share + 1) * rows]
    if not ranges[0]:
        return None
    return LocalSlice(tuple(r.start for r in ranges), tuple(len(r) for r in ranges))


def test_a_named_field_of_every_optimizer_reaches_the_planner() -> None:
    spec = RunSpec(model=resolve(PRESETS["toy-4m"], 4096))
    per_parameter = {
        name: moments_of(dataclasses.replace(spec, optimizer=OptimizerSpec(name=name)))  # type: ignore[arg-type]
        for name in ("adamw", "muon", "adafactor", "shampoo", "soap")
    }
    assert per_parameter == pytest.approx(
        {"adamw": 8.0, "muon": 5.05, "adafactor": 4.03, "shampoo": 24.88, "soap": 24.88}, abs=0.02
    )


def moments_of(spec: RunSpec) -> float:
    """Bytes of optimizer state per parameter, as ``stack_of`` gives them."""
    (moments,) = (state.bytes for state in stacks.stack_of(spec).states.kept if state.kind == "moments")
    return moments
