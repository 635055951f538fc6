"""Values of a declared type between ranks: what arrives, and what is refused by the name of its rank."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.parallel.divisions import LocalSlice
from ranks import Ranks


@dataclass(frozen=True)
class Note:
    text: str
    number: int
    parts: dict[str, LocalSlice]
    raw: bytes


def gathered(rounds: list[list[Note]]) -> list[list[Note]]:
    import torch.distributed as dist

    from phalanx.parallel.process_group.typed_gather import gather_typed

    return [gather_typed(notes[dist.get_rank()], Note) for notes in rounds]


slices = st.builds(LocalSlice, *[st.lists(st.integers(0, 2**62), max_size=3).map(tuple) for _ in range(2)])
notes = st.builds(
    Note, st.text(), st.integers(-(2**63), 2**64 - 1), st.dictionaries(st.text(), slices), st.binary()
)


@settings(max_examples=3)
@given(st.lists(st.lists(notes, min_size=2, max_size=2), min_size=10, max_size=20))
def test_every_rank_gets_every_ranks_value_in_the_order_of_ranks(
    ranks: Ranks, sent: list[list[Note]]
) -> None:
    assert ranks.run(2, gathered, sent) == [sent] * 2


def broadcast(values: list[int]) -> int:
    import torch.distributed as dist

    from phalanx.parallel.process_group.typed_gather import broadcast_typed

    return broadcast_typed(values[dist.get_rank()], int)


def test_every_rank_gets_rank_0s_value(ranks: Ranks) -> None:
    assert ranks.run(3, broadcast, [7, 8, 9]) == [7, 7, 7]


def misread(value: Any, sender: int) -> str:
    """Gathers text, where ``sender`` gives ``value`` instead; the error."""
    import torch.distributed as dist

    from phalanx.parallel.process_group.typed_gather import RankMessageError, gather_typed

    try:
        return f"no error: {gather_typed(value if dist.get_rank() == sender else 'fine', str)}"
    except RankMessageError as error:
        return str(error)


@pytest.mark.parametrize("value", [3, ["text"], None, pickle.dumps("text")])
def test_a_message_of_another_type_is_refused_by_the_name_of_its_rank(ranks: Ranks, value: Any) -> None:
    errors = ranks.run(3, misread, value, 2)
    assert all("message of rank 2 cannot be read" in error for error in errors), errors


def too_long(broadcasting: bool) -> str:
    import torch.distributed as dist

    from phalanx.parallel.process_group.typed_gather import RankMessageError, broadcast_typed, gather_typed

    long = "x" * 1000 if dist.get_rank() == 0 else "x"
    send = broadcast_typed if broadcasting else gather_typed
    try:
        send(long, str, max_message_bytes=1000)
    except RankMessageError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("broadcasting", [False, True])
def test_a_message_that_is_too_long_is_refused_on_every_rank_before_it_is_sent(
    ranks: Ranks, broadcasting: bool
) -> None:
    errors = ranks.run(2, too_long, broadcasting)
    assert all(error.startswith("rank 0 announces a message of 1,003 bytes") for error in errors), errors
