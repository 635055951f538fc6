"""Runs on real ranks that are recorded, for tests: tiny models on gloo, with or without something planted that slows them down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.observe.profile_request import ProfileRequest, write_request
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import ParallelSpec, RunSpec
from ranks import Ranks
from tiny_runs import tiny_run, train_on_this_rank

NAME = "planted"
STEPS = 2


def profiled_run(dataset: Path, run_dir: Path, **parallel: Any) -> RunSpec:
    """A tiny run that neither evaluates nor saves on the way."""
    spec = tiny_run(dataset, run_dir, steps=4)
    spec = replace(spec, model=replace(spec.model, tie_embeddings=False))
    return replace(
        spec,
        checkpoint=replace(spec.checkpoint, every_steps=100),
        evaluation=replace(spec.evaluation, every_steps=0),
        observe=replace(spec.observe, memory_at_step=0),
        parallel=ParallelSpec(**parallel),
    )


def ask(run_dir: Path, ranks: tuple[int, ...] | str = "auto", steps: int = STEPS) -> None:
    """Leaves a request for a profile, as the command does."""
    run_dir.mkdir(exist_ok=True)
    write_request(RunDirectory(run_dir), ProfileRequest(NAME, steps, ranks, time.time() + 600))


def record(ranks: Ranks, count: int, spec: RunSpec, plant: str = "") -> list[dict[str, Any]]:
    """Trains ``spec`` on ``count`` ranks, each with ``plant`` (a name of ``PLANTS``); returns their results."""
    return ranks.run(count, train_planted, spec, plant)


def train_planted(spec: RunSpec, plant: str) -> dict[str, Any] | None:
    """Trains on this rank with something planted."""
    with PLANTS[plant]() if plant else _nothing():
        return train_on_this_rank(spec)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def slow_rank() -> Iterator[None]:
    """Rank 1 multiplies matrices of its own in each slot."""
    import torch
    import torch.distributed as dist

    from phalanx.train.step.slot import LoopRunner

    original = LoopRunner._slot
    extra = torch.ones(256, 256)

    def slot(self: LoopRunner, *args: Any) -> Any:
        if dist.get_rank() == 1:
            until_s = time.monotonic() + 0.06
            while time.monotonic() < until_s:
                torch.mm(extra, extra)
        return original(self, *args)

    with _replaced(LoopRunner, "_slot", slot):
        yield


@contextmanager
def slow_link() -> Iterator[None]:
    """Exchanges of gradients among ranks 2 and 3 take longer than those among 0 and 1, though nobody is late."""
    import torch.distributed as dist

    original = dist.all_to_all_single

    def slowly(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if dist.get_process_group_ranks(kwargs.get("group")) == [2, 3]:
            time.sleep(0.05)
        return result

    with _replaced(dist, "all_to_all_single", slowly):
        yield


@contextmanager
def host_gap() -> Iterator[None]:
    """Every rank sleeps after each step."""
    from phalanx.train.lifecycle.saving import Saving

    original = Saving.collect

    def late(self: Saving) -> None:
        time.sleep(0.4)
        original(self)

    with _replaced(Saving, "collect", late):
        yield


@contextmanager
def broken_recorder() -> Iterator[None]:
    """The profiler of rank 1 does not start."""
    import torch.distributed as dist

    from phalanx.train.profile import recording

    original = recording.make_profiler

    def fails(*args: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("no profiler here")
        return original(*args)

    with _replaced(recording, "make_profiler", fails):
        yield


@contextmanager
def full_disk() -> Iterator[None]:
    """No rank can write what it has recorded."""
    from phalanx.train.profile import recording

    def fails(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with _replaced(recording, "write_rank_trace", fails):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


PLANTS: dict[str, Callable[[], Any]] = {
    one.__name__: one for one in (slow_rank, slow_link, host_gap, broken_recorder, full_disk)
}
