"""Processes forked from one that has imported PyTorch and all commands, which takes seconds: ``FORKS.Process`` starts one.

The process that they are forked from is started with the first of them, and ends with the tests.
"""

from __future__ import annotations

import multiprocessing

from phalanx.cli.main import _COMMANDS

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "phalanx.train.lifecycle.loop",
        *(f"phalanx.cli.{folder}.{name}_command" for name, (folder, _) in _COMMANDS.items()),
    ]
)
