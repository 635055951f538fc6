"""Fleets that serve: the search against all pairs, the directions in which answers must move, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.hardware.catalog import cluster
from phalanx.model.facts.presets import PRESETS
from phalanx.run.kinds.whole_model import resolve
from phalanx_plan.serving import fleet
from phalanx_plan.serving.fleet import nearest, plan_service, split
from phalanx_plan.serving.workers import (
    DemandError,
    Objectives,
    RequestTraffic,
    Service,
    read_objectives,
    read_traffic,
    workers_of,
)

SMALL = Service(
    resolve(PRESETS["llama3-8b"]),
    cluster("h100:8"),
    RequestTraffic(2000, 500, 0.3, 20),
    Objectives(1.0, 0.05),
)


def test_traffic_and_objectives_are_read_with_their_units() -> None:
    assert read_traffic("in=2k, out=500,hit=0.3,rate=40") == RequestTraffic(2000, 500, 0.3, 40)
    assert read_objectives("ttft=1s,tpot=50ms") == Objectives(1.0, 0.05)
    assert read_objectives("") == Objectives()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("out=500", "in missing"),
        ("in=2000,out=5,hit=1", "hit=1: it must be between 0 and 0.999"),
        ("in=2000,out=5,hits=1", "no field 'hits'"),
        ("in=2000,out=many", "out=many: it must be a number"),
        ("in=2000,in=3,out=4", "given twice"),
        ("in=nan,out=4", "it must be a number"),
    ],
)
def test_a_wrong_field_of_traffic_is_named(text: str, words: str) -> None:
    with pytest.raises(DemandError, match=words):
        read_traffic(text)


@pytest.mark.parametrize("text", ["tpot=50", "ttft=-1s", "tpot=0ms", "tbt=3s"])
def test_a_wrong_objective_is_refused(text: str) -> None:
    with pytest.raises(DemandError, match="--slo"):
        read_objectives(text)


@pytest.mark.parametrize("place", ["h100:4", "h100:8", "a100:8"])
@pytest.mark.parametrize("rate", [2.0, 20.0])
def test_the_search_finds_what_trying_all_pairs_finds(place: str, rate: float) -> None:
    service = replace(SMALL, cluster=cluster(place), traffic=replace(SMALL.traffic, rate=rate))
    workers = list(workers_of(service))
    every = [fleet._together(service, worker) for worker in workers]
    every += [fleet._apart(service, first, second) for first in workers for second in workers]
    cheapest = min((each.dollars_per_million for each in every if not each.killed), default=None)
    good, _ = plan_service(service)
    assert (good[0].dollars_per_million if good else None) == cheapest


def test_every_answer_keeps_the_objectives_on_the_cluster() -> None:
    good, bad = plan_service(SMALL)
    assert good
    assert all(each.killed for each in bad)
    for each in good:
        assert each.accelerators <= 8
        assert each.ttft_s[0] <= each.ttft_s[1] <= 1.0
        assert each.tpot_s[0] <= each.tpot_s[1] <= 0.05 * 1.02
        assert each.rate == pytest.approx(20)


def test_more_requests_never_take_fewer_accelerators() -> None:
    used = [
        min(
            each.accelerators
            for each in plan_service(replace(SMALL, traffic=replace(SMALL.traffic, rate=rate)))[0]
        )
        for rate in (1.0, 10.0, 20.0, 30.0)
    ]
    assert used == sorted(used)


def test_more_accelerators_never_serve_less() -> None:
    most = []
    for count in (2, 4, 8, 16):
        traffic = RequestTraffic(2000, 500, 0.3)
        good, _ = plan_service(replace(SMALL, cluster=cluster(f"h100:{count}"), traffic=traffic))
        most.append(max(each.rate for each in good))
    assert most == sorted(most)


def test_prefill_and_decode_workers_share_the_published_day_as_deepseek_did() -> None:
    day = RequestTraffic(prompt=608e9, text=168e9)
    assert split(day, 73.7e3, 14.8e3) == pytest.approx(95.5 / 131.4, rel=1e-3)


def test_an_impossible_objective_is_answered_with_the_nearest() -> None:
    service = replace(SMALL, objectives=Objectives(1.0, 1e-4))
    good, bad = plan_service(service)
    assert good == []
    assert "relax --slo" in nearest(service, bad)


def test_a_model_that_no_worker_holds_is_refused_with_what_is_missing() -> None:
    service = replace(SMALL, model=resolve(PRESETS["llama3-405b"]), cluster=cluster("h100:2"))
    with pytest.raises(DemandError, match="GB on a rank"):
        plan_service(service)
