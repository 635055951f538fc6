"""The process of one rank of a replay, started by ``phalanx.launch.local``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from phalanx.process.this_process import StopRequest
from phalanx.run.directory.files import write_atomically
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.train.compare.observation import ReplayOrder, order_file, reached_file, seen_file
from phalanx.train.lifecycle.worker import main


def replay_rank(run_dir: Path, _attempt: int, _stop: StopRequest) -> object:
    """Replay the steps of the order in ``run_dir``, write this rank's observations there as msgpack, and return them.
    Rank 0 also writes the number of each step ahead of it.
    """
    from phalanx.parallel.process_group.rendezvous import device_for, rank_from_environment
    from phalanx.train.assemble import make_deterministic
    from phalanx.train.compare.replay import replay

    directory = RunDirectory(run_dir)
    spec = read_resolved(directory)
    order = msgspec.json.decode(order_file(run_dir).read_bytes(), type=ReplayOrder)
    place = rank_from_environment(os.environ)
    assert place is not None
    device = device_for(spec.runtime.device, place.local_rank)
    make_deterministic(spec, device)

    def report_step(step: int, _built: object) -> None:
        if place.rank == 0:
            write_atomically(reached_file(run_dir), str(step).encode())

    seen = replay(spec, order, directory, device, report_step)
    write_atomically(seen_file(run_dir, place.rank), msgspec.msgpack.encode(seen))
    return seen


if __name__ == "__main__":
    sys.exit(main(replay_rank))
