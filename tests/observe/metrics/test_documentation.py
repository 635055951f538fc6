"""The page of metrics has a row for each metric, as the code has it, and each alert."""

from __future__ import annotations

import re
from pathlib import Path

from phalanx.fleet.control import publisher
from phalanx.fleet.node import node_metrics
from phalanx.observe.metrics.exporter import EXPORTER_METRICS
from phalanx.observe.metrics.run_metrics import RUN_METRICS
from phalanx.observe.metrics.samples import Metric
from phalanx_watch.lookout import SERVING_METRICS, WATCHED_METRICS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "watch" / "metrics.md").read_text()


def metrics() -> list[tuple[str, Metric]]:
    """All metrics, with the labels that say where they stand."""
    run = [one.metric for one in RUN_METRICS]
    fleet = [one.metric for one in publisher.FLEET_METRICS]
    node = [one.metric for one in (*node_metrics.AGENT_METRICS, *node_metrics.MACHINE_METRICS)]
    gpu = [one.metric for one in node_metrics.GPU_METRICS]
    return [
        *(("run", one) for one in (*run, *fleet)),
        *(
            ("run, node", one)
            for one in (*publisher.NODE_METRICS, *node, node_metrics.SOFTWARE, *gpu, node_metrics.XID)
        ),
        *(("run, node", one) for one in EXPORTER_METRICS),
        *(("run", one) for one in (*WATCHED_METRICS, *SERVING_METRICS)),
    ]


def table() -> str:
    """The table of the page."""
    rows = [
        f"| `{one.name}` | {one.kind} | {', '.join([where, *one.labels])} | {one.help} | {one.source} |"
        for where, one in metrics()
    ]
    return "\n".join(["| name | kind | labels | what | from |", "|---|---|---|---|---|", *rows])


def test_the_page_has_the_table_of_all_metrics() -> None:
    assert table() in PAGE


def test_the_names_follow_prometheus_conventions_and_the_labels_are_few() -> None:
    names = [one.name for _, one in metrics()]
    assert len(names) == len(set(names))
    for _, one in metrics():
        assert re.fullmatch(r"(phalanx|DCGM_FI_DEV)_\w+", one.name)
        assert one.name.startswith("DCGM") or (one.kind == "counter") == one.name.endswith("_total")
        assert (one.kind == "info") == one.name.endswith("_info")
        assert not {"attempt", "rank", "job", "pod", "instance", "epoch"} & set(one.labels)
        assert one.help.endswith(".")


def test_the_page_has_a_row_for_each_alert_with_its_severity() -> None:
    rules = (ROOT / "deploy" / "prometheus" / "rules" / "alerts.yml").read_text()
    alerts = dict(re.findall(r"- alert: (\w+).*?severity: (\w+)", rules, re.DOTALL))
    assert alerts == dict(re.findall(r"^\| `(Phalanx\w+)` \| (\w+) \|", PAGE, re.MULTILINE))
