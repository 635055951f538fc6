"""Gradients are added to integer sums in one pass over memory, to the words of a chain of PyTorch operations."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from phalanx.hardware.kernels.choose import BinKernel
from phalanx.parallel.divisions import SpanLayout, share_layout
from phalanx.parallel.reduction import reproducible_sums
from phalanx.parallel.reduction.reproducible_sums import BinFormat, Bins

LAYOUT = share_layout([(3, 8), (2,)], 1)


def wild(shares: int, layout: SpanLayout, seed: int) -> Tensor:
    """A gradient of numbers of all sizes, and here and there of what is none."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-149, 128, (shares, layout.elements), generator=generator)
    gradient = (
        torch.randn(exponents.shape, generator=generator, dtype=torch.float64) * 2.0**exponents
    ).float()
    for number in (torch.inf, -torch.inf, torch.nan, 0.0):
        gradient[torch.rand(gradient.shape, generator=generator) < 0.01] = number
    return gradient


@pytest.mark.parametrize(("count", "rows", "threads"), [(8, 5, 1), (1025, 5, 1), (8, 3000, 2)])
def test_the_kernel_has_the_words_and_the_exponents_of_pytorchs_operations(
    monkeypatch: pytest.MonkeyPatch, count: int, rows: int, threads: int
) -> None:
    kernel = BinKernel()
    layout = share_layout([(rows, 96), (rows,), (3, 128)], 1)
    bins = [Bins.empty(2, layout, BinFormat(count), torch.device("cpu")) for _ in range(2)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for slot in range(3):
        gradient = wild(2, layout, slot) * 2.0 ** (20 * slot - 40)
        bins[0]._add_by_operations(gradient)
        kernel.add(gradient, bins[1].words, bins[1].tops, bins[1]._runs, bins[1].format.width)
        assert torch.equal(bins[0].words, bins[1].words)
        assert torch.equal(bins[0].tops, bins[1].tops)


def test_without_a_compiler_sums_are_those_of_pytorchs_operations_and_a_warning_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gradient, sums = wild(1, LAYOUT, 0), []
    for compiler in (True, False):
        if not compiler:
            monkeypatch.setattr(shutil, "which", lambda _: None)
            monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
        reproducible_sums._kernel.cache_clear()
        sums.append(Bins.empty(1, LAYOUT, BinFormat(8), torch.device("cpu")))
        sums[-1].add_gradient(gradient)
    reproducible_sums._kernel.cache_clear()
    assert torch.equal(sums[0].words, sums[1].words)
    (record,) = caplog.records
    assert "no C compiler" in record.message
