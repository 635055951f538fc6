"""Chooses the ranks that record a profile: decisions on numbers alone.

Ranks at one place of the mesh (same stage, same piece of the matrices, of the sequence, same experts) do the same work on other data, so one of
each place shows what there is to see, and the slowest that is known shows why the others wait. A small fleet is recorded whole.
"""

from __future__ import annotations

from phalanx.observe.profile_request import MOST_RANKS, ProfileRequestError
from phalanx.run.layout import Layout

SMALL = 8
"""Up to so many ranks, all of them are recorded."""


def chosen_ranks(requested: tuple[int, ...] | str, layout: Layout, slowest: int | None) -> dict[int, str]:
    """Return the ranks to record, each with the reason: those requested; all, if requested or the run is small; else
    one of each kind of place in the mesh, and ``slowest`` if it is known.

    ``requested`` is the field ``ranks`` of a request. Raises ``ProfileRequestError`` if it names a rank that does not
    exist, or all of more than ``MOST_RANKS``.
    """
    if isinstance(requested, tuple):
        if requested[-1] >= layout.ranks:
            raise ProfileRequestError(f"there is no rank {requested[-1]}: the run has {layout.ranks}, from 0")
        return dict.fromkeys(requested, "asked for")
    if requested == "all" and layout.ranks > MOST_RANKS:
        raise ProfileRequestError(f"all are {layout.ranks:,} ranks; at most {MOST_RANKS} are recorded")
    if requested == "all" or layout.ranks <= SMALL:
        return dict.fromkeys(range(layout.ranks), "all ranks")
    reasons = dict.fromkeys(_one_of_each_place(layout)[: MOST_RANKS - 1], "its place in the mesh")
    if slowest is not None and 0 <= slowest < layout.ranks:
        reasons[slowest] = "the slowest rank"
    return dict(sorted(reasons.items()))


def _one_of_each_place(layout: Layout) -> list[int]:
    """The first rank at each place: a stage, its context and tensor ranks in one slot, and all owners of experts."""
    stage = layout.data_ranks * layout.model_ranks
    width = max(layout.model_ranks, layout.expert * layout.expert_tensor if layout.expert > 1 else 1)
    return [first * stage + rank for first in range(layout.pipeline) for rank in range(min(width, stage))]
