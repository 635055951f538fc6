"""A kernel that adds in another order in one number of rows alone is noticed in bf16 too, whose results hide nearly all of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.layers.feed_forward import gated
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec
from phalanx.serve.numerics import facts, widths
from phalanx.serve.numerics.facts import Facts

BF16 = torch.bfloat16
WIDTHS = [32, 64, 200, 768, 1536]
ALL, MULTIPLES_OF_FOUR = Facts(1, 1), Facts(4, 4)
DENSE = ModelSpec(layers=2, dim=64, heads=4, kv_heads=2, head_dim=16, vocab_size=160)


@pytest.fixture(autouse=True)
def own_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads what another process found, nor keeps what a planted kernel gave."""
    monkeypatch.setattr(facts, "facts_path", lambda: tmp_path / "facts.json")
    forget()


def forget() -> None:
    """Has the next trial find nothing in this process or in the folder."""
    facts.facts_path().unlink(missing_ok=True)
    for kept in (widths._norm, widths._activation, widths._softmax, widths._shared_gate):
        kept.cache_clear()


class Planted:
    """Kernels like PyTorch's, but that some numbers of rows go the other way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: tuple[int, ...] = ()
        for name in ("rms_norm", "linear", "log_softmax"):
            monkeypatch.setattr(F, name, getattr(self, name))

    def ordered(self, x: Tensor) -> Tensor:
        return x.roll(x.shape[-1] // 3, -1) if len(x) in self.rows else x

    def rms_norm(self, x: Tensor, _: Sequence[int], weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        mean = self.ordered(wide.square()).mean(-1, keepdim=True)
        return (wide * (mean + eps).rsqrt() * weight.float()).to(x.dtype)

    def linear(self, x: Tensor, matrix: Tensor) -> Tensor:
        return self.ordered(x.float() * matrix.float()).sum(-1, keepdim=True).to(x.dtype)

    def log_softmax(self, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        wide = x.to(dtype) - x.to(dtype).amax(dim, keepdim=True)
        return wide - self.ordered(wide.exp()).sum(dim, keepdim=True).log()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["norm", "norm with an offset", "gate", "softmax"])
def test_a_planted_kernel_for_one_number_of_rows_is_noticed(
    kind: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = Planted(monkeypatch)

    def found(*rows: int) -> Facts | None:
        forget()
        planted.rows = rows
        match kind:
            case "gate":
                return widths._shared_gate(width, BF16)
            case "softmax":
                return widths._softmax(width, 0.0, BF16)
            case _:
                return widths._norm(width, 1e-5, kind != "norm", BF16)

    assert found() == ALL
    for number in (1, 7, 33):
        assert found(number) == MULTIPLES_OF_FOUR, number
    assert found(*range(1, 100)) != ALL


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("width", [96, 352, 704])
def test_numbers_of_rows_that_threads_cut_apart_keep_their_bits_or_are_not_offered(
    width: int, threads: int
) -> None:
    # Each thread has elements left over behind its last whole vectors, where the width and the number of rows let it.
    spec, before = resolve(replace(DENSE, ffn_dim=width)), torch.get_num_threads()
    x = torch.randn(threads * 32768 // width + 200, width, generator=torch.Generator().manual_seed(5)).mul_(4)
    torch.set_num_threads(threads)
    try:
        rule = widths._activation(spec, width, torch.float32)
        whole = gated(spec, x, x.flip(1))
        for number in range(1, len(x) - 40, 7) if rule is not None else ():
            part = x[: number + rule.padding(number)]
            assert torch.equal(gated(spec, part, part.flip(1))[:number], whole[:number]), number
    finally:
        torch.set_num_threads(before)
