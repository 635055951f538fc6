"""Replays steps of a run on this machine's ranks, in a directory of their own.

The ranks are started as those of a training are; the run itself is only read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import tomli_w

from phalanx.hardware.local.detect import gpu_count
from phalanx.launch.local import run_locally
from phalanx.run.directory.files import write_atomically
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.fields import listing
from phalanx.run.layout import layout_problems
from phalanx.run.read import to_table
from phalanx.run.resolve import found_again
from phalanx.run.smaller_degrees import divided_over
from phalanx.run.spec import RunSpec
from phalanx.train.compare.logged import Logged
from phalanx.train.compare.observation import RankReplay, Replay, ReplayOrder, order_file, seen_file
from phalanx.train.start.open_run import OpenRun, take_lock

_PROGRAM = "phalanx.train.compare.replay_worker"


class ReplayError(RuntimeError):
    """A replay could not be done; the message says why."""


def replay_run(path: Path, log: Logged, steps: tuple[int, int], ranks: int, folder: Path) -> Replay:
    """Replays the run in ``path`` from the state of the first of ``steps`` to the second, in the new directory ``folder``.

    ``ranks`` 0 means as many as the run had at the last of these steps. Raises ``ReplayError``.
    """
    directory = RunDirectory(path)
    spec, record = read_resolved(directory), directory.read_record()
    spec = dataclasses.replace(spec, data=found_again(spec.data, record, same_end=False))
    started = log.started.ranks if log.started is not None else spec.parallel.ranks
    order = ReplayOrder(steps[1], steps[0], str(directory.checkpoints.resolve()))
    fingerprint = str(record.get("data_fingerprint", ""))
    count = ranks or log.ranks.get(steps[1], started) or 1
    # A fleet that lost nodes may have computed these steps under a smaller degree.
    return replay_locally(divided_over(spec, count), order, count, folder, fingerprint)


def replay_locally(
    spec: RunSpec,
    order: ReplayOrder,
    ranks: int,
    folder: Path,
    fingerprint: str = "",
    on_wait: Callable[[], None] = lambda: None,
) -> Replay:
    """Replays a resolved run on ``ranks`` processes of this machine, in the new directory ``folder``.

    Args:
        spec: The run.
        order: The steps.
        ranks: How many to start.
        folder: For what the ranks write.
        fingerprint: Of the data that the run was trained on; empty if any will do.
        on_wait: Called now and then while the ranks compute.

    Raises:
        ReplayError: The run cannot be laid out on these ranks, or one of them failed.
    """
    problems = layout_problems(spec, ranks)
    if problems:
        raise ReplayError(listing(f"{spec.name} cannot be replayed on {ranks} ranks", problems))
    if spec.runtime.device == "cuda" and gpu_count() < ranks:
        raise ReplayError(f"{spec.name} needs {ranks} GPUs to be replayed; this machine has {gpu_count()}")
    directory = RunDirectory(folder)
    directory.logs.mkdir(parents=True)
    table = to_table(dataclasses.replace(spec, run_dir=str(folder)))
    write_atomically(directory.run_file, tomli_w.dumps(table).encode())
    known = {"data_fingerprint": fingerprint} if fingerprint else {}
    write_atomically(directory.record, json.dumps({"attempts": 1, **known}).encode())
    write_atomically(order_file(folder), msgspec.json.encode(order))
    lock = take_lock(directory.lock)

    def wait(ended: Callable[[], bool]) -> None:
        while not ended():
            on_wait()
            time.sleep(0.05)

    try:
        ending = run_locally(OpenRun(directory, spec, 0, lock), ranks, wait, program=_PROGRAM)
    finally:
        os.close(lock)
    if ending.status != "finished":
        who = "" if ending.failed_rank is None else f"rank {ending.failed_rank} "
        raise ReplayError(f"the replay on {ranks} ranks {ending.status}: {who}{ending.message}")
    seen = [
        msgspec.msgpack.decode(seen_file(folder, rank).read_bytes(), type=RankReplay) for rank in range(ranks)
    ]
    return Replay(seen[0].layout, [one.observed for one in seen], seen[0].numbers)
