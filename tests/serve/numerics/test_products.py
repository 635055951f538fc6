"""Probes of matrix products: a shape whose rows depend on each other is named before anything is served."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.serve.engine.errors import EngineError
from phalanx.serve.numerics import products


def test_products_of_a_single_row_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # fp32 kernels compute one to three rows in another order: the rule that products have sixteen rows and more is not for nothing.
    monkeypatch.setattr(products, "_NUMBERS", (1, 2, 3))
    assert any(products.dependent_rows(torch.randn(256, inputs)) for inputs in (256, 700, 1024))


def test_a_matrix_whose_rows_depend_on_each_other_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.ModuleDict({"good": nn.Linear(8, 16), "bad": nn.Linear(8, 24)})
    monkeypatch.setattr(
        products.F,
        "linear",
        lambda rows, matrix: rows @ matrix.T + (1 if len(rows) == 64 and len(matrix) == 24 else 0),
    )
    with pytest.raises(EngineError, match=r"bad\.weight: .*8 inputs and 24 outputs.*--numerics fast"):
        products.require_independent_rows(model)


def test_fp32_models_of_usual_widths_pass() -> None:
    model = nn.ModuleList(
        nn.Linear(inputs, outputs) for inputs, outputs in ((64, 256), (256, 704), (704, 256))
    )
    products.require_independent_rows(model)
