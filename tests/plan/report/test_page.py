"""The report of a plan."""

from __future__ import annotations

import dataclasses
import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.hardware.catalog import cluster
from phalanx_plan.report.analyses import step_changes
from phalanx_plan.report.elements import Bar, Dot, curves, gantt, scatter, stacked_bars, tornado
from phalanx_plan.report.page import answer, rank_memory, report_page, verdict
from phalanx_plan.search.plan import Caveat, Plan, make_plan
from phalanx_plan.search.query import Aim, run_of_model


def planned(aim: Aim, *, searching: bool) -> Plan:
    spec = run_of_model("llama3-8b", 4096, 128)
    return make_plan(spec, cluster("h100:64"), aim, stated=(), searching=searching)


@pytest.fixture(scope="module")
def searched() -> Plan:
    return planned(Aim(), searching=True)


@pytest.fixture(scope="module")
def piped() -> Plan:
    return planned(Aim(layout="tp=2,pp=8,dp=4,schedule=1f1b"), searching=False)


def body(page: str) -> ET.Element:
    return ET.fromstring(page.removeprefix("<!DOCTYPE html>"))


@pytest.mark.parametrize("name", ["searched", "piped"])
def test_the_page_is_well_formed_and_loads_nothing(name: str, request: pytest.FixtureRequest) -> None:
    page = report_page(request.getfixturevalue(name))
    root = body(page)
    assert not [tag for tag in root.iter() if tag.tag in ("script", "link", "img", "iframe", "object")]
    assert not [tag for tag in root.iter() for key in tag.attrib if key in ("src", "href")]
    assert not re.search(r"url\(|@import", page)


def test_the_first_page_has_all_that_a_person_who_pays_must_know(searched: Plan) -> None:
    first = next(iter(body(report_page(searched)).iter("section")))
    text = " ".join("".join(first.itertext()).split())
    for expected in (
        answer(searched),
        "P5",
        "P95",
        "What this rests on",
        str(searched.evidence),
        "What would change",
    ):
        assert expected in text
    plans = next(table for table in first.iter("table") if "plans" in table.attrib.get("class", ""))
    heads = [head.text for head in plans.iter("th")]
    assert heads[1:] == ["plan 1", "plan 2", "plan 3"]
    assert {row[0].text for row in plans.iter("tr")} >= {"gives up", "--layout", "the idea"}


def test_the_answer_is_no_figure_without_its_range(searched: Plan) -> None:
    days = searched.run.finish_days
    assert f"{days.p5:.4g} to {days.p95:.4g} days" in answer(searched)
    endless = dataclasses.replace(days, p95=math.inf)
    without_end = dataclasses.replace(searched, run=dataclasses.replace(searched.run, finish_days=endless))
    assert "would never finish" in answer(without_end)


def test_large_products_follow_the_power_limit_rather_than_the_data_sheets_peak(searched: Plan) -> None:
    lower, _ = step_changes(searched)["power limit"]
    assert lower > 5


def test_software_that_was_never_measured_is_measured_before_it_is_paid_for(searched: Plan) -> None:
    word, reasons = verdict(searched)
    assert word == "measure first"
    assert "never measured" in reasons[0]


def test_what_does_not_fit_or_takes_years_is_not_gone_for(searched: Plan) -> None:
    full = dataclasses.replace(searched.chosen, capacity_bytes=searched.chosen.memory_bytes / 2)
    assert verdict(dataclasses.replace(searched, chosen=full))[0] == "no-go"
    years, unusual = Caveat("this takes 7 years", decides=True), Caveat("no pipelines are possible")
    assert verdict(dataclasses.replace(searched, caveats=(unusual, years))) == ("no-go", (years.text,))
    word, reasons = verdict(dataclasses.replace(searched, caveats=(unusual,)))
    assert (word, unusual.text in reasons) == ("measure first", True)


def test_long_layouts_wrap_rather_than_push_money_off_the_page(searched: Plan) -> None:
    style = re.search(r"<style>(.*?)</style>", report_page(searched), re.DOTALL)
    assert style is not None
    assert "overflow-wrap: anywhere" in style[1]
    assert re.findall(r"([^{}]*){[^{}]*nowrap", style[1]) == [" .figures td + td, .figures th "]


def test_the_page_answers_every_question_of_a_plan(searched: Plan) -> None:
    titles = [title.text for title in body(report_page(searched)).iter("h2")]
    for word in ("Memory", "A step", "Pareto", "What moves", "Goodput", "Assumptions"):
        assert any(word in (title or "") for title in titles)


def test_peaks_are_listed_with_their_source(searched: Plan) -> None:
    page = report_page(searched)
    assert searched.job.cluster.accelerator.flops["bf16"].source in page


def test_the_fullest_rank_of_the_chart_is_the_one_that_the_estimate_is_of(piped: Plan) -> None:
    totals = [sum(bar.parts.values()) * 1e9 for bar in rank_memory(piped)]
    assert max(totals) == pytest.approx(piped.chosen.memory_bytes)
    assert totals[piped.chosen.worst_rank] == pytest.approx(piped.chosen.memory_bytes)


def test_earlier_ranks_of_equal_weights_hold_more_activations_under_1f1b(piped: Plan) -> None:
    by_weights: dict[float, list[float]] = {}
    for bar in rank_memory(piped):
        by_weights.setdefault(bar.parts["master weights"], []).append(bar.parts["activations"])
    assert max(map(len, by_weights.values())) > 1
    assert all(kept == sorted(kept, reverse=True) for kept in by_weights.values())


def test_lower_figures_never_make_a_step_quicker(searched: Plan) -> None:
    for name, (lower, higher) in step_changes(searched).items():
        sign = -1 if name in ("scale tax",) else 1
        assert sign * lower >= -1e-9
        assert sign * higher <= 1e-9


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.text("abc<&\"'", min_size=1), st.floats(0, 1e15), min_size=1),
        min_size=1,
        max_size=5,
    )
)
def test_bars_of_any_size_and_name_make_well_formed_pictures(sizes: list[dict[str, float]]) -> None:
    picture = stacked_bars([Bar(f"<{number}>", parts) for number, parts in enumerate(sizes)], "GB", 80.0)
    root = ET.fromstring(f"<div>{picture}</div>")
    widths = [float(box.attrib["width"]) for box in root.iter("rect")]
    assert all(0 < width <= 860 for width in widths)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(1e-6, 1e6), st.floats(0, 1)), min_size=1, max_size=9))
def test_points_are_inside_their_chart(points: list[tuple[float, float]]) -> None:
    root = ET.fromstring(scatter([Dot(x, y, "point") for x, y in points], "s", "GB"))
    for mark in root.iter("circle"):
        assert 0 <= float(mark.attrib["cx"]) <= 860
        assert 0 <= float(mark.attrib["cy"]) <= 300
    ET.fromstring(f"<div>{curves({'line': points}, 's', 'share', (points[0][0], 'here'))}</div>")


def test_empty_changes_and_time_lines_are_drawn_too() -> None:
    ET.fromstring(f"<div>{tornado({'nothing': (0.0, 0.0)}, '%')}{gantt([], [], 1.0, 's')}</div>")
