"""Process groups whose members are threads, and a sum in one place to compare theirs with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from phalanx.parallel.reduction.tree import SlotTree


class Group:
    """A process group whose members are threads; each has its own ``Group``, and all share ``board``."""

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.board, self.barrier = rank, board, barrier

    def size(self) -> int:
        return len(self.board)

    def gather(self, own: Any) -> list[Any]:
        self.board[self.rank] = own
        self.barrier.wait(60)
        gathered = list(self.board)
        self.barrier.wait(60)
        return gathered


def all_to_all(
    received: Tensor,
    sent: Tensor,
    get: list[int] | None = None,
    give: list[int] | None = None,
    *,
    group: Group,
) -> None:
    pieces = torch.split(sent.clone(), give or len(sent) // group.size())
    mine = [theirs[group.rank] for theirs in group.gather(pieces)]
    assert get is None or get == [len(piece) for piece in mine]
    received.copy_(torch.cat(mine))


def all_gather(output: Tensor, piece: Tensor, group: Group) -> None:
    output.copy_(torch.cat(group.gather(piece.clone())))


def on_ranks(ranks: int, function: Callable[[Group], Tensor]) -> list[Tensor]:
    """The values that each of ``ranks`` threads returns; all of them are in one group."""
    board, barrier = [None] * ranks, threading.Barrier(ranks)

    def run(rank: int) -> Tensor:
        try:
            return function(Group(rank, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def in_one_place(values: Tensor) -> Tensor:
    """The sum of leaves ``(leaves, elements)`` in tree order."""
    tree: SlotTree[Tensor] = SlotTree(len(values), torch.add)
    for leaf, value in enumerate(values):
        tree.push(leaf, value)
    return tree.take_root()


def leaves_of(count: int, elements: int) -> Tensor:
    """Values whose sum depends on the order of additions."""
    return torch.randn(count, elements, generator=torch.Generator().manual_seed(count)).exp().pow(5)
