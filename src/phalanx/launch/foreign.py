"""Detects that this process is one rank of a launcher that is not ours (torchrun or srun)."""

from __future__ import annotations

from collections.abc import Mapping


def started_as_rank(environ: Mapping[str, str]) -> bool:
    """True under ``torchrun`` (or anything that sets RANK and WORLD_SIZE) and inside a Slurm step of tasks.

    A shell from ``srun --pty`` is a step of one task and does not count as a rank.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return True
    return (
        "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ and environ.get("SLURM_NTASKS", "1") != "1"
    )
