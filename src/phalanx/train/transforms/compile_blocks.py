"""Compilation of the transformer's blocks, one program for all of them.

A block's ``forward`` is compiled before anything is put around it. So recomputation and offload, which belong to the fleet, find
the same program inside, and FSDP's hooks stay outside. Compiling what is around instead would change the bits: Dynamo makes no
graph of a checkpointed block, and eager kernels round elsewhere than compiled ones.
"""

from __future__ import annotations

import torch
from torch import nn

from phalanx.model.custom import blocks_of


def compile_blocks(module: nn.Module) -> None:
    """Compiles the forward and backward pass of the blocks of ``module``, which are not recomputed, offloaded or sharded yet."""
    for block in blocks_of(module):
        block.forward = torch.compile(block.forward, dynamic=False)  # shapes are the run's, never the fleet's
