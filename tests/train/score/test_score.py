"""A score is the trainer's own loss, token by token, also beside other texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.initialized import initialized
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import (
    MlaSpec,
    ModelSpec,
    MoeSpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
    RuntimeSpec,
    TrainSpec,
)
from phalanx.train.score import ScoreError, Scorer, other_arithmetic
from phalanx.train.step.loss import IGNORE, summed_cross_entropy

pytestmark = pytest.mark.usefixtures("portable_kernels")
SEQUENCE, ROWS, CHUNK = 64, 4, 96
DENSE = ModelSpec(layers=2, dim=64, heads=4, kv_heads=2, head_dim=16, vocab_size=160, qk_norm=True)
KINDS = {
    "dense": DENSE,
    "capped": replace(DENSE, logit_cap=5.0),
    "latent mixture": replace(
        DENSE,
        kv_heads=0,
        head_dim=0,
        qk_norm=False,
        mla=MlaSpec(query_rank=0, kv_rank=32, nope_head_dim=16, rope_head_dim=8, value_head_dim=16),
        moe=MoeSpec(experts=8, per_token=2, ffn_dim=32, shared=1),
    ),
}
EITHER = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def run_of(kind: str, dtype: torch.dtype = torch.float32, **train: int) -> RunSpec:
    settings_of_train = {"seq_len": SEQUENCE, "batch_size": 8, "slots": 2, "micro_batch_size": ROWS, **train}
    return RunSpec(
        model=resolve(replace(KINDS[kind], init_std=0.3)),
        train=replace(TrainSpec(loss_chunk=CHUNK), **settings_of_train),
        precision=PrecisionSpec(compute="bf16" if dtype == torch.bfloat16 else "fp32"),
        runtime=RuntimeSpec(numerics="portable"),
    )


def scorer(spec: RunSpec, dtype: torch.dtype = torch.float32) -> Scorer:
    return Scorer(spec, initialized(spec.model).to(dtype))


def text(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 160, (length,), generator=generator).tolist()


def trained_loss(spec: RunSpec, dtype: torch.dtype, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """The summed loss that a training step computes of a micro-batch of these texts, gradients and all."""
    model: Transformer = initialized(spec.model).to(dtype).requires_grad_(True)
    tokens = torch.zeros(ROWS, SEQUENCE, dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORE)
    for row, ids in enumerate(texts):
        tokens[row, : len(ids)] = torch.tensor(ids)
        targets[row, : len(ids) - 1] = torch.tensor(ids[1:])
    loss = model(tokens, lambda h, w: summed_cross_entropy(h, w, targets, CHUNK, cap=spec.model.logit_cap))
    loss.backward()
    return loss.detach()


@EITHER
@pytest.mark.parametrize("kind", KINDS)
def test_scores_add_up_to_the_loss_of_a_training_step_by_bits(kind: str, dtype: torch.dtype) -> None:
    spec = run_of(kind, dtype)
    texts = [text(seed, length) for seed, length in enumerate((64, 17, 2, 50))]
    losses = torch.zeros(ROWS, SEQUENCE)
    for row, log_probs in enumerate(scorer(spec, dtype).score(texts)):
        losses[row, : len(log_probs)] = -log_probs
    total = torch.zeros(())
    for chunk in losses.flatten().split(CHUNK):  # in the order in which the loss is summed
        total += chunk.sum()
    assert torch.equal(total, trained_loss(spec, dtype, texts))


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(list(KINDS)),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.lists(st.integers(2, SEQUENCE), min_size=1, max_size=9),
    st.sampled_from([{}, {"seq_len": 63}, {"loss_chunk": 253}]),  # with the last two, rows are left over
)
def test_a_texts_score_does_not_depend_on_the_others(
    kind: str, dtype: torch.dtype, lengths: list[int], train: dict[str, int]
) -> None:
    judge = scorer(run_of(kind, dtype, **train), dtype)
    texts = [text(seed, min(length, judge.length)) for seed, length in enumerate(lengths)]
    together = judge.score(texts)
    assert [len(log_probs) for log_probs in together] == [len(ids) - 1 for ids in texts]
    for ids, log_probs in zip(texts, together, strict=True):
        assert torch.equal(judge.score([ids])[0], log_probs)


def test_a_score_is_the_log_softmax_of_the_models_logits() -> None:
    spec, ids = run_of("dense"), text(5, 40)
    model = initialized(spec.model)
    expected = model(torch.tensor([ids])).log_softmax(-1)[0, :-1].gather(1, torch.tensor(ids[1:])[:, None])
    torch.testing.assert_close(scorer(spec).score([ids])[0], expected[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "text 2 is empty"),
        ([3], "text 2 is one token"),
        ([3] * 65, r"text 2 has 65 tokens, and the run was trained on sequences of 64"),
        ([3, 160], "token id 160 is outside the model's vocabulary of 160"),
        ([3, -1], "token id -1 is outside"),
    ],
)
def test_a_text_that_cannot_be_scored_is_refused_by_its_number(ids: list[int], message: str) -> None:
    with pytest.raises(ScoreError, match=message):
        scorer(run_of("dense")).score([[1, 2], ids])


def test_weights_that_are_not_finite_are_reported() -> None:
    spec = run_of("dense")
    model = initialized(spec.model)
    assert model.embedding is not None
    model.embedding.weight[7] = torch.nan
    with pytest.raises(ScoreError, match="text 1: its log-probabilities are not finite"):
        Scorer(spec, model).score([[7, 3]])


def test_threads_and_kernels_are_left_as_they_were() -> None:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    scorer(run_of("dense")).score([[1, 2]])
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            lambda spec: replace(spec, runtime=replace(spec.runtime, numerics="native")),
            'with kernels of their processor (runtime.numerics = "native")',
        ),
        (lambda spec: replace(spec, runtime=replace(spec.runtime, compile=True)), "runtime.compile"),
        (
            lambda spec: replace(spec, runtime=replace(spec.runtime, device="cuda")),
            "on GPUs (runtime.device)",
        ),
        (
            lambda spec: replace(spec, model=replace(spec.model, factory="mine:model")),
            "a module of the user's own (model.factory)",
        ),
        (
            lambda spec: replace(spec, parallel=ParallelSpec(context=2)),
            "sums over 2 ranks (parallel.context)",
        ),
        (
            lambda spec: replace(spec, precision=replace(spec.precision, matmul="fp8-rowwise")),
            "products of 8-bit operands",
        ),
        (lambda spec: replace(spec, precision=replace(spec.precision, compute="bf16")), "in bf16"),
        (lambda spec: replace(spec, train=replace(spec.train, document_mask=True)), "train.document_mask"),
    ],
)
def test_a_run_with_another_arithmetic_is_reported_with_the_reason(
    changed: Callable[[RunSpec], RunSpec], reason: str
) -> None:
    spec = run_of("latent mixture")
    assert other_arithmetic(spec, "fp32") == ""
    assert reason in other_arithmetic(changed(spec), "fp32")


def test_a_text_has_the_same_bits_at_a_place_with_three_rows_left_over() -> None:
    judge = scorer(run_of("dense", loss_chunk=253))
    texts = [text(seed, SEQUENCE) for seed in range(4)]
    assert torch.equal(judge.score(texts)[3], judge.score([texts[3]])[0])


def test_experts_whose_rows_have_no_padding_are_another_arithmetic_on_a_gpu_alone() -> None:
    spec = run_of("latent mixture")
    on_gpus = replace(spec, runtime=replace(spec.runtime, device="cuda"))
    assert 'precision.rows = "any"' in other_arithmetic(on_gpus, "fp32", on_gpu=True)
    assert 'precision.rows = "any"' not in other_arithmetic(spec, "fp32")
