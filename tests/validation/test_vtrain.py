"""vTrain's tables as rows: their columns, and the model and layout that they mean."""

from __future__ import annotations

from dataclasses import replace

import pytest

from validation.compare import outcome_of, sweeps
from validation.setup import model_of
from validation.vtrain import choices, micro_batch_work, runs_of, summary

_COLUMNS = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,"
    "data parallelism,pipeline parallelism,iteration time (ms)"
)
_ROW = "8,32,4,1024,16,24,1024,2,2,2,250.5"


def test_a_row_is_a_gpt_with_a_plain_feed_forward_layer() -> None:
    (run,) = runs_of([_COLUMNS, _ROW], "one-node")
    assert (run.tp, run.dp, run.pp, run.micro_batch, run.global_batch_seqs) == (2, 2, 2, 4, 32)
    assumptions: list[str] = []
    model = model_of(run, 1024, assumptions)
    assert (model.layers, model.dim, model.heads, model.ffn_dim) == (24, 1024, 16, 4096)
    assert model.ffn == "gelu"


def test_a_row_is_predicted_in_its_own_layout_and_its_time_is_in_seconds() -> None:
    (run,) = runs_of([_COLUMNS, _ROW], "one-node")
    outcome = outcome_of(run)
    assert outcome.complete
    assert outcome.time is not None
    assert outcome.time.measured_s == pytest.approx(0.2505)
    assert outcome.estimate is not None
    layout = outcome.estimate.layout
    assert (layout.tensor, layout.data, layout.pipeline, layout.recompute) == (2, 2, 2, "full")
    ((name, count, middle, mean, bias, _),) = summary([outcome], micro_batch_work)
    assert (name, count) == ("15 to 60 G", 1)
    assert middle == mean == abs(bias) == abs(outcome.time.error)


def test_rows_of_one_model_in_several_layouts_are_a_choice() -> None:
    slower = _ROW.replace("2,2,2,250.5", "4,2,1,501.0")
    outcomes = [outcome_of(run) for run in runs_of([_COLUMNS, _ROW, slower], "one-node")]
    assert "1 choices: mean regret" in choices(sweeps(outcomes))
    assert choices([]) == "no model was measured in several layouts"


def test_a_missing_column_is_named() -> None:
    with pytest.raises(KeyError, match="hidden size"):
        runs_of([_COLUMNS.replace("hidden size", "width"), _ROW], "one-node")


def test_a_plain_feed_forward_layer_is_kept_where_no_size_is_stated() -> None:
    (run,) = runs_of([_COLUMNS, _ROW], "one-node")
    assumptions: list[str] = []
    model = model_of(replace(run, params_total_b=None), 1024, assumptions)
    assert model.ffn == "gelu"
    assert any("plain feed-forward" in text for text in assumptions)
