"""A rank whose collective is aborted on a GPU leaves its epoch with an error that accuses nobody, and joins the next one."""

from __future__ import annotations

import json

import pytest

from null_gpu.programs import printed

BY_CHANCE = {"DistBackendError", "ValueError", "RuntimeError"}
"""NCCL's error, or one of two about a process group that the aborting thread has just removed."""


@pytest.mark.parametrize("call", ["all_reduce", "all_to_all_single"])
def test_an_aborted_rank_joins_three_epochs_in_one_process(call: str) -> None:
    epochs = [json.loads(line) for line in printed("abort", call)]
    assert len(epochs) == 3
    for epoch in epochs:
        assert epoch["error"] in BY_CHANCE, epoch["text"]
        assert epoch["answers"]
        assert not epoch["is_reported"]
        assert epoch["made"] == epoch["aborted"] > 0
    assert epochs[-1]["threads"] <= epochs[0]["threads"]
