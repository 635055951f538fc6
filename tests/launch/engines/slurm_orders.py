"""An order for Slurm, and tools of Slurm's that say what a test wants them to."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.launch.engines.order import LaunchOrder
from phalanx.run.spec import LaunchSpec


def order(**launch: object) -> LaunchOrder:
    return LaunchOrder(
        name="big",
        run_dir=Path("/shared/runs/big one"),
        working_dir=Path("/home/me"),
        nodes=16,
        spares=2,
        gpus_per_node=8,
        port=0,
        python="/opt/venv/bin/python",
        launch=LaunchSpec(**launch),  # type: ignore[arg-type]
    )


def with_tools(folder: Path, **tools: str) -> dict[str, str]:
    """The environment of a job whose tools are these lines of shell; what they note with ``said`` is in the file ``told``."""
    (folder / "bin").mkdir()
    for name, does in tools.items():
        tool = folder / "bin" / name
        tool.write_text(f'#!/bin/sh\nsaid() {{ echo "$@" >> {folder}/told; }}\n{does}\n')
        tool.chmod(0o755)
    return {**os.environ, "SLURM_JOB_ID": "7", "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
