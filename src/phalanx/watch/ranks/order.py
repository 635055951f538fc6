"""The order in which the ranks of a run are drawn: by their numbers, by node, or by their place along an axis of the mesh.

The ranks of a slow node, of a slow switch or of a slow pipeline stage may lie far apart by their numbers; in the right order they are one band.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from phalanx.run.layout import Layout

BY_RANK, BY_NODE = "rank", "node"
_DIGITS = re.compile(r"(\d+)")


def orders(layout: Layout | None, nodes: Mapping[int, str]) -> list[str]:
    """The names of the orders that make a difference for a run."""
    axes = [axis for axis, degree in layout.degrees.items() if degree > 1] if layout else []
    return [BY_RANK, *([BY_NODE] if nodes else []), *(axes if len(axes) > 1 else [])]


def in_order(name: str, ranks: int, layout: Layout | None, nodes: Mapping[int, str]) -> NDArray[np.int64]:
    """All ranks in the order ``name``, ``(ranks,)``; those that have no node come last. By their numbers for a name that is not theirs."""
    numbers = np.arange(ranks, dtype=np.int64)
    if name == BY_NODE and nodes:
        places = {node: place for place, node in enumerate(sorted(set(nodes.values()), key=_natural))}
        keys = np.fromiter(
            (places.get(nodes.get(rank, ""), len(places)) for rank in range(ranks)), np.int64, ranks
        )
        return np.argsort(keys, kind="stable")
    if layout is not None and layout.ranks == ranks and name in layout.degrees:
        stride = 1
        for axis, degree in reversed(layout.degrees.items()):
            if axis == name:
                return np.argsort(numbers // stride % degree, kind="stable")
            stride *= degree
    return numbers


def _natural(name: str) -> list[tuple[int, str]]:
    """A key by which node-9 comes before node-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(name)]
