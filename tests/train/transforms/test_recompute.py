"""Recomputation: less memory, the same bits, the same names."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.model.layers.attention.attention import Documents
from phalanx.model.layers.moe import routers
from phalanx.run.spec import MemorySpec, RunSpec
from phalanx.train.activations import apply_recompute
from phalanx.train.compose import compile_blocks
from phalanx_process import RUN_FILE, last_json, run
from ranks import Ranks
from tiny_runs import make_dataset
from train.blocks import DENSE, MIXTURE, MODELS, build, gradients_of, loss_of, same_bits

KINDS = ("full", "selective")


def recompute(kind: Any) -> Any:
    return partial(apply_recompute, spec=RunSpec(memory=MemorySpec(recompute=kind)))


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def counted(model: nn.Module) -> dict[str, int]:
    """How often each operation runs in a forward and backward pass."""
    with Counted() as mode:
        loss_of(model).backward()
    return mode.calls


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_keep_their_bits(kind: str, model: str) -> None:
    plain, saving = build(MODELS[model]), build(MODELS[model], recompute(kind))
    assert same_bits(gradients_of(plain), gradients_of(saving))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", KINDS)
def test_under_hooks_of_saved_tensors_bits_are_kept_and_nothing_is_announced(kind: str) -> None:
    plain, saving = build(DENSE), build(DENSE, recompute(kind))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda copy: copy):
        gradients = gradients_of(saving)
    assert same_bits(gradients_of(plain), gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_keep_their_names(kind: str) -> None:
    plain, saving = build(MIXTURE), build(MIXTURE, recompute(kind))
    assert plain.state_dict().keys() == saving.state_dict().keys()
    assert dict(plain.named_parameters()).keys() == dict(saving.named_parameters()).keys()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_counted_once(kind: str) -> None:
    plain, saving = build(MIXTURE), build(MIXTURE, recompute(kind))
    gradients_of(plain)
    gradients_of(saving)
    seen = {name: router.token_counts for name, router in routers(plain)}
    assert seen
    assert all(
        int(counts.sum()) == 2 * 32 * 2 for counts in seen.values()
    )  # batch x sequence x experts a token
    assert same_bits(seen, {name: router.token_counts for name, router in routers(saving)})


def test_full_recomputation_runs_attention_twice_and_selective_once() -> None:
    name = "_scaled_dot_product_flash_attention_for_cpu"
    runs = {
        kind: counted(build(DENSE, recompute(kind)))[name] / DENSE.layers
        for kind in ("none", "full", "selective")
    }
    assert runs == {"none": 1, "full": 2, "selective": 1}


def test_selective_recomputation_repeats_only_the_products_that_widen() -> None:
    extra = counted(build(DENSE, recompute("selective")))["mm"] - counted(build(DENSE))["mm"]
    assert extra == 2 * DENSE.layers  # gate and up


def test_evaluation_recomputes_nothing() -> None:
    model = build(DENSE, recompute("full"))
    with torch.no_grad():
        assert torch.equal(loss_of(model), loss_of(build(DENSE)))


def test_recomputed_blocks_are_compiled_too_to_one_program_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    counters.clear()
    saving = gradients_of(build(DENSE, compile_blocks, recompute("full")))
    assert counters["stats"]["unique_graphs"] == 1
    assert same_bits(saving, gradients_of(build(DENSE, compile_blocks)))
    assert counters["stats"]["unique_graphs"] == 1


def gradients_by_document(model: nn.Module, length: int) -> dict[str, torch.Tensor]:
    """The gradients of a batch whose documents have ``length`` tokens, and half as many in its second sequence."""
    tokens = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(length))
    ids = torch.arange(40) * torch.tensor([[1], [2]]) // length
    model.zero_grad()
    model(tokens, documents=Documents.numbered(ids)).square().mean().backward()
    return {
        name: torch.clone(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None
    }


def test_documents_of_other_lengths_need_no_other_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    counters.clear()
    compiled, saving = build(DENSE, compile_blocks), build(DENSE, compile_blocks, recompute("full"))
    programs = []
    for length in (4, 7, 12, 40):
        gradients = gradients_by_document(compiled, length)
        torch.testing.assert_close(
            gradients, gradients_by_document(build(DENSE), length), rtol=1e-4, atol=1e-5
        )
        assert same_bits(gradients, gradients_by_document(saving, length))
        programs.append(counters["stats"]["unique_graphs"])
    assert len(set(programs)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputation_keeps_the_bits_of_compiled_blocks(dtype: torch.dtype) -> None:
    def narrowed(model: nn.Module) -> None:
        model.to(dtype)

    torch.compiler.reset()
    plain = gradients_of(build(DENSE, narrowed, compile_blocks))
    assert same_bits(plain, gradients_of(build(DENSE, narrowed, compile_blocks, recompute("full"))))


@pytest.mark.slow
def test_compiled_blocks_can_keep_to_a_budget() -> None:
    torch.compiler.reset()
    saving = gradients_of(build(DENSE, compile_blocks, recompute("budget")))
    torch.testing.assert_close(saving, gradients_of(build(DENSE)), rtol=1e-4, atol=1e-4)


def gradients_on_two_tensor_ranks(kinds: tuple[Any, ...]) -> list[dict[str, torch.Tensor]]:
    """This rank's part of the gradients of a mixture, for each kind of recomputation."""
    from phalanx.hardware.local.device import CommClock
    from phalanx.model.transformer import Transformer
    from phalanx.parallel.mesh import build_mesh
    from phalanx.parallel.tensor.apply import apply_tensor
    from phalanx.run.kinds.whole_model import resolve
    from phalanx.run.spec import ParallelSpec, TrainSpec

    results = []
    for kind in kinds:
        spec = RunSpec(
            model=resolve(MIXTURE),
            train=TrainSpec(seq_len=32),
            parallel=ParallelSpec(tensor=2),
            memory=MemorySpec(recompute=kind),
        )
        device = torch.device("cpu")
        with torch.device("meta"):
            model = Transformer(spec.model)
        apply_tensor(model, build_mesh(spec, 2, device), spec, CommClock(blocking=True))
        apply_recompute(model, spec)
        model.to_empty(device=device)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
        tokens = torch.randint(0, 97, (2, 32), generator=generator)
        model(tokens, lambda hidden, weight: hidden.square().mean() + weight.square().mean()).backward()
        results.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return results


def test_collectives_of_the_tensor_axis_can_be_in_what_is_recomputed(ranks: Ranks) -> None:
    for plain, *saving in ranks.run(2, gradients_on_two_tensor_ranks, ("none", *KINDS)):
        assert len(plain) > 10
        for gradients in saving:
            assert same_bits(plain, gradients)


@pytest.mark.slow
def test_a_mixture_that_keeps_selectively_in_bf16_has_the_bits_of_one_that_keeps_everything(
    tmp_path: Path,
) -> None:
    """Experts are an FSDP unit within their block, whose hooks open profiler ranges, once more when the block is recomputed."""
    (tmp_path / "tiny.toml").write_text(RUN_FILE.format(data=make_dataset(tmp_path / "words")))
    mixture = ["model.moe.experts=4", "model.moe.per_token=2", "precision.compute=bf16", "train.steps=2"]
    command = [
        "train",
        "tiny.toml",
        "--ranks",
        "1",
        "--json",
        *(part for override in mixture for part in ("--set", override)),
    ]
    hashes = {
        how: last_json(run([*command, "--run-dir", how, "--set", f"memory.recompute={how}"], tmp_path))[
            "weights_sha256"
        ]
        for how in ("none", "selective")
    }
    assert hashes["selective"] == hashes["none"]
