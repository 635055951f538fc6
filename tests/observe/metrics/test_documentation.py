"""Names of metrics, and the page's table of alerts. (``tests/cli/test_reference.py`` has the page of all metrics.)"""

from __future__ import annotations

import re
from pathlib import Path

from tools.reference.metrics import metrics

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "watch" / "metrics.md").read_text()


def test_the_names_follow_prometheus_conventions_and_the_labels_are_few() -> None:
    names = [metric.name for _, metric in metrics()]
    assert len(names) == len(set(names))
    for _, metric in metrics():
        assert re.fullmatch(r"(phalanx|DCGM_FI_DEV)_\w+", metric.name)
        assert metric.name.startswith("DCGM") or (metric.kind == "counter") == metric.name.endswith("_total")
        assert (metric.kind == "info") == metric.name.endswith("_info")
        assert not {"attempt", "rank", "job", "pod", "instance", "epoch"} & set(metric.labels)
        assert metric.help.endswith(".")


def test_the_page_has_a_row_for_each_alert_with_its_severity() -> None:
    rules = (ROOT / "deploy" / "prometheus" / "rules" / "alerts.yml").read_text()
    alerts = dict(re.findall(r"- alert: (\w+).*?severity: (\w+)", rules, re.DOTALL))
    assert alerts == dict(re.findall(r"^\| `(Phalanx\w+)` \| (\w+) \|", PAGE, re.MULTILINE))
