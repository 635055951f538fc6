"""Where a rank sits in the mesh, and with whom: functions on integers, for people who look for the neighbors of a slow rank.

The mesh itself, with its process groups, is ``phalanx.parallel.mesh.mesh``; a test holds these to it.
"""

from __future__ import annotations

from phalanx.run.layout import Layout


def rank_place(layout: Layout, rank: int) -> dict[str, int]:
    """The index of ``rank`` on each axis of the mesh, slowest first; along "expert" only if experts are divided.

    Raises ``ValueError`` for a rank that the layout does not have.
    """
    if not 0 <= rank < layout.ranks:
        raise ValueError(f"there is no rank {rank} among {layout.ranks}")
    place, rest = {}, rank
    for axis, degree in reversed(layout.degrees.items()):
        rest, place[axis] = divmod(rest, degree)
    place = dict(reversed(place.items()))
    if layout.expert > 1:
        place["expert"] = rank // layout.expert_tensor % layout.expert
    return place


def rank_groups(layout: Layout, rank: int) -> dict[str, list[int]]:
    """The ranks that differ from ``rank`` along one axis only, itself among them, for each axis of more than one rank.

    Those of "expert" are the ones that share a layer's experts. Raises ``ValueError`` for a rank that the layout does not have.
    """
    place, groups, stride = rank_place(layout, rank), {}, 1
    for axis, degree in reversed(layout.degrees.items()):
        if degree > 1:
            first = rank - place[axis] * stride
            groups[axis] = list(range(first, first + degree * stride, stride))
        stride *= degree
    groups = dict(reversed(groups.items()))
    if layout.expert > 1:
        stride = layout.expert_tensor
        first = rank - place["expert"] * stride
        groups["expert"] = list(range(first, first + layout.expert * stride, stride))
    return groups
