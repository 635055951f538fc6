"""Every kind of run trains a step on a GPU: no refusal of deterministic mode, no tensor on another device, and only documented waits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from null_gpu import counters
from null_gpu.kinds import NAMES, all_kinds
from null_gpu.steps import stepper_of, waits
from phalanx.run.spec import RunSpec

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
ROW = re.compile(r"^\| .*? \| `(?P<place>.*?)` \| (?P<runs>.*?) \| (?P<count>.*?) \|$", re.MULTILINE)
IN_RUNS: dict[str, Callable[[RunSpec], bool]] = {
    "all": lambda _: True,
    "mixtures": lambda spec: spec.model.moe is not None,
    "experts on several ranks": lambda spec: spec.parallel.expert > 1,
    "fp32 mixtures": lambda spec: spec.model.moe is not None and spec.precision.compute == "fp32",
    "offloaded moments": lambda spec: spec.memory.offload_optimizer != "none",
}
"""Runs that the page names, as predicates."""


def documented_waits(spec: RunSpec) -> dict[str, str]:
    """Return the waits of one step by place, as the page lists them for runs of this kind; the values are numbers or words."""
    rows = ROW.findall(PAGE.read_text())
    return {place: count for place, runs, count in rows if IN_RUNS[runs](spec)}


@pytest.mark.parametrize("name", NAMES)
def test_a_step_trains_and_the_host_waits_only_where_the_page_says(name: str, tmp_path: Path) -> None:
    spec = all_kinds(tmp_path)[name]
    places: Counter[str] = Counter()
    with stepper_of(spec, spec.parallel.expert) as (_, step):
        step()
        counters.reset()
        with waits(places):
            step()
    documented = documented_waits(spec)
    assert places.keys() == documented.keys()
    exact = {place: int(count) for place, count in documented.items() if count.isdigit()}
    assert {place: places[place] for place in exact} == exact
    if spec.memory.offload_optimizer != "file":
        assert counters.counts()["h2d_pageable"] == 0


@pytest.mark.parametrize(
    ("name", "passes"), [("experts on two ranks", 1), ("experts on two ranks, recompute full", 2)]
)
def test_the_host_waits_for_the_sizes_of_an_exchange_once_a_mixture_and_forward_pass(
    name: str, passes: int, tmp_path: Path
) -> None:
    spec = all_kinds(tmp_path)[name]
    micro_batches = spec.train.batch_size // spec.train.micro_batch_size // spec.parallel.expert
    places: Counter[str] = Counter()
    with stepper_of(spec, spec.parallel.expert) as (_, step), waits(places):
        step()
    assert places["parallel/expert.py ExpertExchange._route"] == spec.model.layers * micro_batches * passes
