"""A route costs the rows not held, the rows queued and the pages to fetch; ties go to the lower number."""

from __future__ import annotations

from phalanx_serve.traffic.events import NOBODY, Role
from phalanx_serve.traffic.routing import Bidder, Link, Route, choose

LINK = Link(page_bytes=1 << 20, bytes_per_s=1e9, round_trip_s=1e-3)


def worker(number: int, role: Role = "both", queued: int = 0, held: int = 0) -> Bidder:
    return Bidder(number, role, queued, held, 1000.0)


def route(workers: list[Bidder], sources: list[tuple[int, int]] | None = None, rows: int = 640) -> Route:
    found = choose(rows, rows // 64, workers, sources or [], LINK)
    assert found is not None
    return found


def test_equal_workers_are_taken_by_number() -> None:
    assert route([worker(2), worker(1)]).worker == 1


def test_a_worker_that_holds_the_prefix_is_worth_a_queue_as_long_as_it() -> None:
    assert route([worker(1), worker(2, queued=300, held=9)]).worker == 2
    assert route([worker(1), worker(2, queued=600, held=9)]).worker == 1


def test_pages_are_fetched_where_that_is_faster_than_computing_them() -> None:
    assert route([worker(1)], [(2, 10)]).source == 2
    slow = Link(page_bytes=1 << 20, bytes_per_s=1e6)
    found = choose(640, 10, [worker(1)], [(2, 10)], slow)
    assert found is not None
    assert found.source == NOBODY


def test_prompts_go_to_prefill_workers_and_small_rests_to_decode_workers() -> None:
    both_roles = [worker(1, "prefill"), worker(2, "decode")]
    assert route(both_roles).prefill
    assert not route(both_roles, rows=40).prefill
    assert route(both_roles, rows=40).worker == 2


def test_each_role_does_the_others_work_where_the_other_is_missing() -> None:
    assert not route([worker(1, "prefill")]).prefill
    assert not route([worker(2, "decode")]).prefill
    assert choose(64, 1, [], [], LINK) is None
