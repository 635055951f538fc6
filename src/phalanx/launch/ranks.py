"""The number of ranks that a run gets on this machine, where the run file leaves it open."""

from __future__ import annotations

from pathlib import Path

from phalanx.hardware.local.detect import gpu_count
from phalanx.observe.record.records import usable_cores
from phalanx.run.fields import RunFileError
from phalanx.run.layout import layout_problems, replica_ranks
from phalanx.run.spec import RunSpec


def ranks_on_this_machine(spec: RunSpec, run_file: Path) -> int:
    """Returns the run's own number of ranks, or else as many as the machine has room for: one for each GPU, or by cores.

    Raises ``RunFileError``, which names ``run_file``, if the run can be laid out on none of these numbers.
    """
    if spec.parallel.ranks:
        return spec.parallel.ranks
    room = gpu_count() if spec.runtime.device != "cpu" else 0
    replica = replica_ranks(spec.parallel)
    most = spec.train.slots * spec.parallel.pipeline * spec.parallel.context * spec.parallel.tensor
    ranks = max(min(room or max(1, usable_cores() // spec.runtime.threads), most), replica)
    while ranks > replica and layout_problems(spec, ranks):
        ranks -= 1
    problems = layout_problems(spec, ranks)
    if problems:
        raise RunFileError(run_file, problems)
    return ranks
