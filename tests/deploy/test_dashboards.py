"""The dashboards: whole as Grafana wants them, and their files as the code writes them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import promql_parser
import pytest
from deploy.grafana.dashboards import DASHBOARDS, Dashboard, write

from deploy.prometheus_rules import DEPLOY, RULES, names_in
from deploy.test_alert_rules import ALL_METRICS


def filled(expression: str) -> str:
    """An expression as Grafana would send it, for all runs and nodes."""
    for variable, value in (("$__rate_interval", "30s"), ("$run", ".*"), ("$node", ".*"), ("$model", ".*")):
        expression = expression.replace(variable, value)
    return expression


def test_the_files_are_what_the_code_writes(tmp_path: Path) -> None:
    write(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in (DEPLOY / "grafana").glob("*.json")}
    for name in names:
        assert (tmp_path / name).read_text() == (DEPLOY / "grafana" / name).read_text(), "run dashboards.py"


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_every_expression_can_be_parsed_and_queries_only_series_that_exist(dashboard: Dashboard) -> None:
    recorded = set(re.findall(r"record: (\S+)", (RULES / "recording.yml").read_text()))
    for expression in dashboard.expressions:
        promql_parser.parse(filled(expression))
        assert names_in(expression) <= ALL_METRICS | recorded, expression


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_panels_have_identities_of_their_own_and_do_not_lie_on_each_other(dashboard: Dashboard) -> None:
    panels = json.loads(json.dumps(dashboard.to_json()["panels"]))
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(x < 24 for x, _ in cells)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_units_are_those_of_the_panel_and_not_words_of_its_title(dashboard: Dashboard) -> None:
    units: dict[str, set[str]] = {}
    for panel in json.loads(json.dumps(dashboard.to_json()["panels"])):
        assert not re.search(r"\((MHz|GHz|s|ms|bytes|%)\)", panel["title"])
        if panel["type"] != "row":
            units.setdefault(panel["title"], set()).add(panel["fieldConfig"]["defaults"]["unit"])
    assert units.get("Tokens a second", {"short"}) == {"short"}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_no_panel_names_a_data_source_or_is_of_a_kind_that_grafana_has_removed(dashboard: Dashboard) -> None:
    text = json.dumps(dashboard.to_json())
    assert set(re.findall(r'"uid": "(\$\{\w+\})"', text)) == {"${datasource}"}
    kinds = {str(panel["type"]) for panel in json.loads(text)["panels"]}
    assert kinds <= {"row", "timeseries", "stat", "table"}
