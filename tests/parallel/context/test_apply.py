"""Sequences divided over ranks: every result is held against the whole sequence on one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from model.initialized import initialized
from phalanx.hardware.local.device import CommClock
from phalanx.model.layers.attention.attend import Score
from phalanx.model.layers.attention.attention import Documents
from phalanx.model.transformer import Transformer
from phalanx.parallel.context.apply import apply_context
from phalanx.parallel.context.exchange import (
    GatherMethod,
    RingMethod,
    context_positions,
    in_order,
    own_pieces,
)
from phalanx.parallel.context.tiles import DividedCore
from phalanx.parallel.mesh import Mesh, build_mesh
from phalanx.run.spec import MlaSpec, ModelSpec, ParallelSpec, RunSpec, TrainSpec
from quick_cases import quick
from ranks import Ranks

METHODS = {"ring": RingMethod, "allgather": GatherMethod}
modes = pytest.mark.parametrize("mode", list(METHODS))
degrees = pytest.mark.parametrize("context", [2, 4])


@dataclass(frozen=True)
class Case:
    """Shapes of one attention."""

    heads: int = 4
    kv_heads: int = 4
    width: int = 16
    value_width: int = 16
    documents: bool = False
    scale: float | None = None
    window: int = 0
    cap: float = 0.0
    dtype: torch.dtype = torch.float32
    seq: int = 48
    batch: int = 2


CASES = {
    "as many key heads as query heads": Case(),
    "grouped heads": Case(kv_heads=2),
    "latent attention's widths": Case(width=24, value_width=16, scale=0.3),
    "values wider than keys, not a multiple of 8": Case(width=12, value_width=20),
    "documents": Case(kv_heads=2, documents=True),
    "a window of a few tokens": Case(kv_heads=2, window=5),
    "a window of more than a piece": Case(window=17),
    "a window and documents": Case(window=11, documents=True),
    "a soft cap, a window and documents": Case(kv_heads=2, window=11, documents=True, cap=0.7),
    "documents and latent attention's widths": Case(width=24, documents=True),
}


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key, value, upstream gradient and documents of a whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, width: int) -> Tensor:
        x = torch.randn(case.batch, heads, case.seq, width, generator=generator)
        return x.to(case.dtype)

    query, key = draw(case.heads, case.width), draw(case.kv_heads, case.width)
    value, upstream = draw(case.kv_heads, case.value_width), draw(case.heads, case.value_width)
    # Documents of all lengths: some end within a piece, some fill several, one row has a document for each token at its end.
    ends = torch.rand(case.batch, case.seq, generator=generator) < 0.1
    ends[0, -case.seq // 6 :] = True
    return query, key, value, upstream, ends.long().cumsum(1) if case.documents else None


def attention_of_all(case: Case) -> list[Tensor]:
    """Output and gradients by definition: a softmax of masked scores, in fp64."""
    query, key, value, upstream, documents = inputs(case)
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    repeat = case.heads // case.kv_heads
    keys, values = (x.repeat_interleave(repeat, 1) for x in leaves[1:])
    scores = leaves[0] @ keys.transpose(-1, -2) * (case.scale or case.width**-0.5)
    if case.cap:
        scores = case.cap * torch.tanh(scores / case.cap)
    hidden = torch.ones(case.seq, case.seq, dtype=torch.bool).triu(1)
    if case.window:
        hidden |= torch.ones_like(hidden).tril(-case.window)
    if documents is not None:
        hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :])
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.double())]


def attention_of_a_rank(mode: str, case: Case, clock: CommClock | None = None) -> list[Tensor]:
    """Output and gradients of this rank's tokens."""
    *full_tensors, documents = inputs(case)
    positions = context_positions(case.seq, dist.get_world_size(), dist.get_rank())
    query, key, value, upstream = (x[:, :, positions] for x in full_tensors)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    group = dist.group.WORLD
    assert group is not None
    core = DividedCore(
        METHODS[mode](group, clock or CommClock(blocking=True), Score(case.scale, case.cap), case.window)
    )
    out = core(*leaves, Documents.numbered(documents) if documents is not None else None)
    assert out.dtype == case.dtype
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def distance(ours: Tensor, reference: Tensor, scale: float | None = None) -> float:
    """The largest deviation as a fraction of the largest element (of ``reference``, unless its ``scale`` is given)."""
    return float((ours - reference).abs().max() / (scale or reference.abs().max()))


def errors_of_a_rank(mode: str, case: Case) -> list[float]:
    positions = context_positions(case.seq, dist.get_world_size(), dist.get_rank())
    parts = zip(attention_of_a_rank(mode, case), attention_of_all(case), strict=True)
    return [
        distance(ours, expected[:, :, positions], float(expected.abs().max())) for ours, expected in parts
    ]


@modes
@degrees
@pytest.mark.parametrize("name", list(CASES))
def test_divided_attention_and_its_gradients_are_those_of_the_whole_sequence(
    ranks: Ranks, mode: str, context: int, name: str
) -> None:
    for errors in ranks.run(context, errors_of_a_rank, mode, CASES[name]):
        assert max(errors) <= 2e-6


@modes
def test_in_bf16_divided_attention_errs_no_more_than_pytorch_s_own(ranks: Ranks, mode: str) -> None:
    case = Case(kv_heads=2, dtype=torch.bfloat16)
    query, key, value, upstream, _ = inputs(case)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    pytorch_results = [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
    usual = [distance(a, b) for a, b in zip(pytorch_results, attention_of_all(case), strict=True)]
    for errors in ranks.run(4, errors_of_a_rank, mode, case):
        assert all(ours <= 1.5 * theirs for ours, theirs in zip(errors, usual, strict=True))


class ScoreCounter(TorchDispatchMode):
    """Counts the scores that attention kernels compute: a causal square is half of one."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_scores = self.backward_scores = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "flash_attention_for_cpu" in func.__name__:
            backward = "backward" in func.__name__
            query, key = args[1:3] if backward else args[0:2]
            causal = any(args[7 if backward else 4 :])  # an argument left at its default is not there
            scores = query.shape[2] * key.shape[2] * (0.5 if causal else 1.0)
            if backward:
                self.backward_scores += scores
            else:
                self.forward_scores += scores
        return func(*args, **(kwargs or {}))


def scores_of_a_rank(mode: str, case: Case) -> tuple[float, float]:
    with ScoreCounter() as counter:
        attention_of_a_rank(mode, case)
    return counter.forward_scores, counter.backward_scores


@modes
@degrees
def test_every_rank_computes_an_equal_share_of_the_causal_half_of_the_scores(
    ranks: Ranks, mode: str, context: int
) -> None:
    share = 48 * 48 / 2 / context
    assert ranks.run(context, scores_of_a_rank, mode, Case()) == [(share, share)] * context


def bits_twice_and_waiting(mode: str) -> tuple[bool, bool]:
    clock = CommClock(blocking=True)
    first = attention_of_a_rank(mode, CASES["documents"], clock)
    second = attention_of_a_rank(mode, CASES["documents"])
    return all(map(torch.equal, first, second)), clock.take_ns() > 0


@modes
def test_the_same_inputs_give_the_same_bits_and_waiting_is_measured(ranks: Ranks, mode: str) -> None:
    assert ranks.run(3, bits_twice_and_waiting, mode) == [(True, True)] * 3


@given(context=st.integers(1, 8), piece=st.integers(1, 5))
def test_the_ranks_pieces_put_together_in_order_are_the_sequence(context: int, piece: int) -> None:
    sequence = torch.arange(2 * context * piece)
    parts = [context_positions(len(sequence), context, rank) for rank in range(context)]
    assert torch.equal(in_order(parts, 0), sequence)
    assert all(torch.equal(own_pieces(sequence, context, r, 0), part) for r, part in enumerate(parts))


@given(context=st.integers(1, 8), piece=st.integers(1, 5))
def test_the_tokens_of_every_rank_see_equally_many_tokens(context: int, piece: int) -> None:
    seen = {int((context_positions(2 * context * piece, context, rank) + 1).sum()) for rank in range(context)}
    assert len(seen) == 1


def test_a_sequence_that_cannot_be_divided_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="8 equal pieces"):
        context_positions(12, 4, 0)


# The model.

SEQ, BATCH, VOCAB = 32, 2, 64
GQA = ModelSpec(layers=2, dim=32, heads=4, kv_heads=2, vocab_size=VOCAB, qk_norm=True)
MLA = ModelSpec(
    layers=2,
    dim=32,
    heads=4,
    vocab_size=VOCAB,
    mla=MlaSpec(kv_rank=16, query_rank=16, nope_head_dim=16, rope_head_dim=8, value_head_dim=16),
)
MODELS = {"GQA": GQA, "MLA": MLA}


def run_spec(model: ModelSpec, context: int, mode: str, tensor: int = 1) -> RunSpec:
    return RunSpec(
        model=model,
        train=TrainSpec(seq_len=SEQ, batch_size=BATCH, slots=1),
        parallel=ParallelSpec(context=context, context_mode=mode, tensor=tensor),  # type: ignore[arg-type]
    )


def tokens_and_documents() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    samples = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=generator)
    return samples[:, :-1], samples[:, 1:], (samples[:, :-1] < 4).long().cumsum(1)


def loss_of(model: Transformer, positions: Tensor, documents: Tensor | None) -> Tensor:
    """The summed loss of the tokens at ``positions``."""
    tokens, targets, _ = tokens_and_documents()
    numbered_documents = Documents.numbered(documents) if documents is not None else None
    logits = model(tokens[:, positions], positions=positions, documents=numbered_documents)
    return F.cross_entropy(logits.flatten(0, 1), targets[:, positions].flatten(), reduction="sum")


def ready(model: ModelSpec) -> Transformer:
    return initialized(dataclasses.replace(model, init_std=0.1)).requires_grad_(True)


def on_this_rank(model: ModelSpec, mode: str, tensor: int = 1) -> tuple[Transformer, Mesh, Tensor]:
    spec = run_spec(model, dist.get_world_size() // tensor, mode, tensor)
    mesh, module = build_mesh(spec, dist.get_world_size(), torch.device("cpu")), ready(model)
    apply_context(module, mesh, spec, CommClock(blocking=True))
    return module, mesh, context_positions(SEQ, mesh.layout.context, mesh.context_rank)


def model_errors(model: ModelSpec, mode: str, masked: bool, tensor: int = 1) -> dict[str, float]:
    """How far the sums over a context group of losses and gradients are from those of one process."""
    documents = tokens_and_documents()[2] if masked else None
    undivided = ready(model)
    reference = loss_of(undivided, torch.arange(SEQ), documents)
    reference.backward()
    module, mesh, positions = on_this_rank(model, mode, tensor)
    loss = loss_of(module, positions, documents)
    loss.backward()
    total = loss.detach()
    dist.all_reduce(total, group=mesh.context_group)
    errors = {"loss": distance(total, reference.detach())}
    for (name, ours), theirs in zip(module.named_parameters(), undivided.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        dist.all_reduce(ours.grad, group=mesh.context_group)
        errors[name] = distance(ours.grad, theirs.grad)
    return errors


@modes
@pytest.mark.parametrize(
    ("context", "model", "masked"),
    quick(
        ((context, model, masked) for context in (2, 4) for model in MODELS for masked in (False, True)),
        of_the_suite=[(4, "GQA", True), (4, "MLA", False), (2, "MLA", True)],
    ),
)
def test_losses_and_gradients_of_a_model_add_up_to_those_of_one_process(
    ranks: Ranks, model: str, mode: str, context: int, masked: bool
) -> None:
    for errors in ranks.run(context, model_errors, MODELS[model], mode, masked):
        assert max(errors.values()) <= 2e-6, errors


@modes
def test_a_context_group_may_be_some_ranks_of_a_larger_mesh(ranks: Ranks, mode: str) -> None:
    for errors in ranks.run(4, model_errors, GQA, mode, True, 2):
        assert max(errors.values()) <= 2e-6, errors


def bits_of_gradients(mode: str, change: Callable[[Transformer], None]) -> bool:
    """True if the gradients of a changed module have the bits of an unchanged one's."""
    (plain, _, positions), (changed, _, _) = on_this_rank(GQA, mode), on_this_rank(GQA, mode)
    change(changed)
    documents = tokens_and_documents()[2]
    for module in (plain, changed):
        loss_of(module, positions, documents).backward()
    return all(
        a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
        for a, b in zip(plain.parameters(), changed.parameters(), strict=True)
    )


def recompute_blocks(module: Transformer) -> None:
    for block in module.blocks.values():
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)


def compile_blocks(module: Transformer) -> None:
    for block in module.blocks.values():
        block.compile(backend="aot_eager", dynamic=False)


@modes
def test_recomputed_blocks_communicate_again_and_give_the_same_bits(ranks: Ranks, mode: str) -> None:
    assert ranks.run(4, bits_of_gradients, mode, recompute_blocks) == [True] * 4


def compiled_distance(mode: str) -> float:
    one_block = dataclasses.replace(GQA, layers=1)  # each is compiled by itself
    (plain, _, positions), (compiled, _, _) = (on_this_rank(one_block, mode) for _ in range(2))
    compile_blocks(compiled)
    for module in (plain, compiled):
        loss_of(module, positions, None).backward()
    torch._dynamo.reset()
    pairs = zip(plain.parameters(), compiled.parameters(), strict=True)
    return max(distance(b.grad, a.grad) for a, b in pairs if a.grad is not None and b.grad is not None)


@pytest.mark.parametrize("mode", quick(METHODS, of_the_suite=["ring"]))
def test_compiled_blocks_leave_the_communication_to_eager_code(ranks: Ranks, mode: str) -> None:
    assert max(ranks.run(2, compiled_distance, mode)) <= 2e-6


def unchanged_alone() -> bool:
    module = ready(GQA)
    before = [block.attention.core for block in module.blocks.values()]
    spec = run_spec(GQA, 1, "ring")
    apply_context(module, build_mesh(spec, 1, torch.device("cpu")), spec, CommClock(blocking=True))
    return before == [block.attention.core for block in module.blocks.values()]


def test_without_a_context_axis_attention_is_left_as_it_is(ranks: Ranks) -> None:
    assert ranks.run(1, unchanged_alone) == [True]
