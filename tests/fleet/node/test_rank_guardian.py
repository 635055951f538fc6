"""What ranks tell each other of snapshots takes a bounded amount of memory on each of them, however many they are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.fleet.node.rank.rank_guardian import _TOLD_BY_ALL_BYTES, _TOLD_BYTES, _not_too_long


@given(st.integers(1, 100_000), st.integers(1, 40), st.integers(1, 24))
def test_records_are_told_in_their_order_up_to_a_limit_for_all_ranks_together(
    ranks: int, records: int, mebibytes: int
) -> None:
    record = bytes(mebibytes << 20)
    kept = _not_too_long(dict.fromkeys(range(records), record), ranks)
    told_bytes = len(kept) * len(record)
    assert list(kept) == list(range(len(kept)))
    assert told_bytes <= _TOLD_BYTES
    assert told_bytes * ranks <= _TOLD_BY_ALL_BYTES
    room = min(_TOLD_BYTES, _TOLD_BY_ALL_BYTES // ranks)
    assert len(kept) == records or told_bytes + len(record) > room
