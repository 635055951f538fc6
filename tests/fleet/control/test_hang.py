"""A hang: the rank that everybody waits for is named, and the collective."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.small_fleets import running
from phalanx.fleet.control.inquiry import (
    Call,
    FlightRecord,
    FlightRecordError,
    Inquiry,
    diagnose,
    parse_record,
    shortened,
)
from phalanx.fleet.core.messages import Recorded
from ranks import Ranks

WORLD = tuple(range(4))


def call(number: int, *, over: bool = False, operation: str = "gloo:all_reduce") -> Call:
    return Call(number, operation, ((8,),), over, 0)


def record(
    rank: int, last: dict[str, Call], groups: Mapping[str, tuple[int, ...]] | None = None
) -> FlightRecord:
    groups = groups or {"world": WORLD}
    return FlightRecord(rank, {name: members for name, members in groups.items() if rank in members}, last)


def test_the_rank_that_never_came_is_named_with_the_collective() -> None:
    records = [record(rank, {"world": call(7)}) for rank in (0, 1, 3)]
    diagnosis = diagnose([*records, record(2, {"world": call(6, over=True)})], 4)
    assert diagnosis.culprits == (2,)
    assert str(diagnosis) == "rank 2: gloo:all_reduce number 7 of group world: ranks 0, 1, 3 wait for rank 2"


def test_a_rank_without_a_record_is_named_if_others_wait_for_it() -> None:
    diagnosis = diagnose([record(rank, {"world": call(7)}) for rank in (0, 1, 3)], 4)
    assert (diagnosis.culprits, diagnosis.silent) == ((2,), (2,))


def test_who_waits_for_the_culprit_is_not_blamed_by_those_who_wait_for_it() -> None:
    # 0 waits for 1 in the rows, 1 waits for 3 in the columns.
    groups = {"row": (0, 1), "other row": (2, 3), "column": (1, 3), "other column": (0, 2)}
    records = [
        record(0, {"row": call(2)}, groups),
        record(1, {"row": call(1, over=True), "column": call(5)}, groups),
        record(2, {"other column": call(4)}, groups),
        record(3, {"column": call(4, over=True), "other row": call(1, over=True)}, groups),
    ]
    diagnosis = diagnose(records, 4)
    assert diagnosis.culprits == (3,)
    assert diagnosis.stuck[0].group == "column"


def test_a_rank_that_calls_something_else_is_named() -> None:
    records = [record(rank, {"world": call(7)}) for rank in (0, 1, 3)]
    diagnosis = diagnose([*records, record(2, {"world": call(7, operation="gloo:broadcast")})], 4)
    assert diagnosis.culprits == (2,)
    assert "rank 2 calls another operation" in str(diagnosis)


def test_when_all_are_in_it_nobody_is_named() -> None:
    diagnosis = diagnose([record(rank, {"world": call(7)}) for rank in WORLD], 4)
    assert diagnosis.culprits == ()
    assert "are in it" in str(diagnosis)


def test_a_run_that_is_not_in_a_collective_is_not_stuck_in_one() -> None:
    diagnosis = diagnose([record(rank, {"world": call(7, over=True)}) for rank in WORLD], 4)
    assert (diagnosis.culprits, diagnosis.stuck) == ((), ())


def test_a_culprit_is_proven_only_if_all_show_records_and_the_others_have_waited_long() -> None:
    def culprits(waited_s: float, ranks: tuple[int, ...] = WORLD) -> tuple[int, ...]:
        waiting = [
            dataclasses.replace(record(rank, {"world": call(7)}), taken_ns=int(waited_s * 1e9))
            for rank in (0, 1, 3)
        ]
        records = [*waiting, record(2, {"world": call(6, over=True)})]
        return diagnose([shown for shown in records if shown.rank in ranks], 4).proven(5.0)

    assert culprits(6.0) == (2,)
    assert culprits(4.0) == (), "it may be about to come"
    assert culprits(6.0, (0, 1, 3)) == (), "who shows no record may be in it"
    assert culprits(6.0, (0, 1, 2)) == ()


def test_groups_of_one_name_with_other_ranks_are_not_mixed_up() -> None:
    rows = {"0": {"row": (0, 1)}, "1": {"row": (2, 3)}}
    records = [
        record(0, {"row": call(2)}, rows["0"]),
        record(1, {"row": call(1, over=True)}, rows["0"]),
        record(2, {"row": call(1, over=True)}, rows["1"]),
        record(3, {"row": call(1, over=True)}, rows["1"]),
    ]
    assert diagnose(records, 4).culprits == (1,)


def entry(group: str, number: int, *, over: bool, at_ns: int) -> dict[str, object]:
    return {
        "process_group": [group, ""],
        "collective_seq_id": number,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[8]],
        "retired": over,
        "state": "completed" if over else "scheduled",
        "time_created_ns": at_ns,
        "is_p2p": False,
        "frames": "x" * 500,
    }


@given(st.integers(1, 40), st.data())
def test_a_record_is_cut_to_what_a_diagnosis_needs(groups: int, data: st.DataObject) -> None:
    waits = data.draw(st.integers(0, groups - 1))
    entries = [
        entry(f"g{group}", number, over=group != waits or number < 3, at_ns=100 * number + group)
        for number in (1, 2, 3)
        for group in range(groups)
    ]
    members = {f"g{group}": [0, group + 1] for group in range(groups)}
    full_record = {"rank": 0, "taken_ns": 9, "groups": members, "recorder": {"entries": entries}}
    text = json.dumps(full_record).encode()
    assert parse_record(shortened(text).encode()) == parse_record(text)
    cut = shortened(text, 1000)
    assert len(cut) <= 1000
    kept = parse_record(cut.encode())
    assert kept.last[f"g{waits}"] == parse_record(text).last[f"g{waits}"], "where it waits is kept above all"
    assert kept.cut == (len(kept.last) < groups)
    with pytest.raises(FlightRecordError, match="fits"):
        shortened(text, 200)


def test_an_inquiry_takes_one_record_of_each_rank_from_its_own_node() -> None:
    fleet = running()
    inquiry = Inquiry.into(fleet.state, 30.0, 100.0)

    def report(seat: int, rank: int, epoch: int = 0, number: int = 7) -> Recorded:
        last = entry("world", number, over=rank == 2, at_ns=0)
        full_record = {
            "rank": rank,
            "taken_ns": 29 * 10**9,
            "groups": {"world": WORLD},
            "recorder": {"entries": [last]},
        }
        return Recorded(fleet.state.seats[seat], 1, epoch, json.dumps(full_record))

    for refused in (report(1, 0), report(0, 0, epoch=3), Recorded("stranger", 1, 0, report(0, 0).record)):
        assert "is not on" in inquiry.add(refused)
    assert "no flight record" in inquiry.add(Recorded(fleet.state.seats[0], 1, 0, "[]"))
    assert not inquiry.records
    for seat in range(4):
        assert not inquiry.over(101.0)
        number = 6 if seat == 2 else 7
        assert inquiry.add(report(seat, seat, number=number)) == ""
        assert inquiry.add(report(seat, seat, number=99)) == "", "the first counts"
    assert inquiry.over(101.0)
    finding = inquiry.finding()
    assert (finding.epoch, finding.ranks) == (0, (2,))
    assert "rank 2: gloo:all_reduce number 7 of group world" in finding.text


def test_an_inquiry_that_waits_in_vain_names_the_silent_and_proves_nothing() -> None:
    inquiry = Inquiry.into(running().state, 30.0, 100.0)
    assert inquiry.over(102.5)
    finding = inquiry.finding()
    assert finding.ranks == ()
    assert "no full record of ranks 0, 1, 2, 3" in finding.text


@given(st.permutations(range(8)), st.integers(1, 5), st.integers(0, 7))
def test_at_the_end_of_any_chain_of_waiting_stands_the_culprit(
    order: list[int], length: int, extra: int
) -> None:
    chain = order[: length + 1]
    groups = {f"pair {i}": (chain[i], chain[i + 1]) for i in range(length)} | {"world": tuple(range(8))}
    last = {rank: {"world": call(extra, over=True)} for rank in range(8)}
    for i in range(length):
        last[chain[i]][f"pair {i}"] = call(3)
        last[chain[i + 1]][f"pair {i}"] = call(2, over=True)
    diagnosis = diagnose([record(rank, last[rank], groups) for rank in range(8)], 8)
    assert diagnosis.culprits == (chain[-1],)


ENTRY = b'{"is_p2p": false, "process_group": ["0"], "input_sizes": 3}'


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"rank": 0, "groups": [], "recorder": {}}',
        b'{"rank": 0, "groups": {}, "taken_ns": 1, "recorder": {"entries": [' + ENTRY + b"]}}",
    ],
)
def test_what_is_no_record_is_refused(text: bytes) -> None:
    with pytest.raises(FlightRecordError, match="no flight record"):
        parse_record(text)


def sleeping(sleeper: int) -> bytes:
    """The record of this rank while rank ``sleeper`` has not come to the third all-reduce of a group of all."""
    import threading
    import time

    import torch
    import torch.distributed as dist

    from phalanx.parallel.torch_compat import flight_record

    begin_ns = time.time_ns()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, ranks - 1])
    dist.all_reduce(torch.ones(5))
    if rank in (0, ranks - 1):
        dist.all_reduce(torch.ones(6), group=pair)
    store = dist.distributed_c10d._get_default_store()
    taken: list[bytes] = []

    def in_place() -> bool:
        last = json.loads(flight_record(begin_ns))["recorder"]["entries"][-1]
        # Another thread records the end of a collective, a moment later.
        return bool(last["retired"]) if rank == sleeper else last["input_sizes"] == [[7]]

    def watch() -> None:
        while not in_place():
            time.sleep(0.05)
        taken.append(flight_record(begin_ns))
        store.add("taken", 1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    if rank == sleeper:
        while store.add("taken", 0) < ranks:
            time.sleep(0.05)
    dist.all_reduce(torch.ones(7))
    watcher.join()
    return taken[0]


def test_of_three_real_ranks_the_one_that_sleeps_is_named(ranks: Ranks) -> None:
    records = [parse_record(shortened(data).encode()) for data in ranks.run(3, sleeping, 1)]
    assert [record.rank for record in records] == [0, 1, 2]
    assert set(records[0].groups.values()) == {(0, 1, 2), (0, 2)}
    diagnosis = diagnose(records, 3)
    assert diagnosis.culprits == (1,)
    assert diagnosis.stuck[0].operation == "gloo:all_reduce"
    assert diagnosis.stuck[0].sizes == ((7,),)
    assert diagnosis.stuck[0].waiting == (0, 2)
