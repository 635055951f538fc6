"""Launchers that are not ours (torchrun or srun), by the environment: whether this process is a rank, and the domains of its node."""

from __future__ import annotations

from collections.abc import Mapping


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """True in a process that srun started."""
    return "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" in environ


def slurm_domains(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The switches or blocks above this node, widest first, by the environment of a Slurm step; none without topology/tree or block.

    SLURM_TOPOLOGY_ADDR is "core.spine1.leaf1.n1" with the pattern "switch.switch.switch.node" (slurm.schedmd.com/srun.html). Names may
    hold dots themselves only where the pattern has as many parts fewer, which is then not used.
    """
    parts = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    pattern = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    return tuple(parts[:-1]) if len(parts) == len(pattern) and pattern[-1] == "node" else ()


def started_as_rank(environ: Mapping[str, str]) -> bool:
    """True under ``torchrun`` (or anything that sets RANK and WORLD_SIZE) and inside a Slurm step of tasks.

    A shell from ``srun --pty`` is a step of one task and does not count as a rank.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return True
    return (
        "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ and environ.get("SLURM_NTASKS", "1") != "1"
    )
