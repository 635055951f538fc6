"""Each alert fires on its trouble and on nothing else, by Prometheus' own unit tests of rules."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml

from deploy.prometheus_rules import (  # fmt: skip
    DEPLOY,
    HEALTHY,
    RULES,
    TROUBLES,
    alerts,
    expressions,
    names_in,
    require,
    unit_test,
    with_trouble,
)
from phalanx.cli.main import _COMMANDS
from phalanx.fleet.control.publisher import FLEET_METRICS, NODE_METRICS
from phalanx.fleet.health.node_health import FATAL_XIDS
from phalanx.fleet.node.node_metrics import AGENT_METRICS, GPU_METRICS, MACHINE_METRICS, SOFTWARE, XID
from phalanx.hardware.local.detect import THROTTLED
from phalanx.observe.metrics.exporter import EXPORTER_METRICS
from phalanx.observe.metrics.run_metrics import RUN_METRICS
from phalanx_serve.http.counts import Counts
from phalanx_watch.lookout import WATCHED_METRICS
from phalanx_watch.why.observed import CODES

SERVED = {
    name
    for family in Counts("m").collect()
    for name in (
        [f"{family.name}_{end}" for end in ("bucket", "sum", "count")]
        if family.type == "histogram"
        else [f"{family.name}_total" if family.type == "counter" else family.name]
    )
}
ALL_METRICS = SERVED | {
    metric.name
    for metric in (
        *(
            derived.metric
            for derived in (*RUN_METRICS, *FLEET_METRICS, *AGENT_METRICS, *MACHINE_METRICS, *GPU_METRICS)
        ),
        *(*NODE_METRICS, SOFTWARE, XID, *EXPORTER_METRICS, *WATCHED_METRICS),
    )
}


def test_the_rules_and_configurations_are_valid_for_prometheus_and_alertmanager() -> None:
    promtool, amtool = require("promtool"), require("amtool")
    configurations = sorted((DEPLOY / "prometheus").glob("*.yml"))
    assert len(configurations) == 5
    commands = [
        [promtool, "check", "rules", *map(str, sorted(RULES.glob("*.yml")))],
        *([promtool, "check", "config", str(path)] for path in configurations),
        [amtool, "check-config", str(DEPLOY / "alertmanager" / "alertmanager.yml")],
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def test_on_a_healthy_run_no_alert_fires_and_each_trouble_fires_its_own(tmp_path: Path) -> None:
    promtool = require("promtool")
    tests = [unit_test(HEALTHY, set())]
    tests += [unit_test(with_trouble(changes), {name.split()[0]}) for name, changes in TROUBLES.items()]
    file = tmp_path / "test.yml"
    rules = [str(path) for path in sorted(RULES.glob("*.yml"))]
    # JSON is YAML, and written a hundred times as fast.
    file.write_text(json.dumps({"rule_files": rules, "evaluation_interval": "5m", "tests": tests}))
    done = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    named = dict(enumerate(["healthy", *TROUBLES]))
    assert done.returncode == 0, f"{named}\n{done.stdout}{done.stderr}"


def test_every_alert_has_its_trouble() -> None:
    assert {name.split()[0] for name in TROUBLES} == {rule["alert"] for rule in alerts()}


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_has_cause_evidence_and_the_next_command(rule: dict[str, dict[str, str]]) -> None:
    assert set(rule["annotations"]) == {"summary", "cause", "evidence", "next"}
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    command = rule["annotations"]["next"].split()
    assert command[0] == "chronyc" or (command[0] == "phalanx" and command[1] in _COMMANDS)


def test_every_expression_can_be_parsed_and_queries_only_series_that_exist() -> None:
    recorded = set(re.findall(r"record: (\S+)", (RULES / "recording.yml").read_text()))
    for expression in expressions():
        promql_parser.parse(expression)
        assert names_in(expression) <= ALL_METRICS | recorded, expression


def test_the_xids_that_raise_an_alert_are_those_that_speak_against_the_hardware() -> None:
    (rule,) = (rule for rule in alerts() if rule["alert"] == "PhalanxGpuErrors")
    named = re.findall(r'DCGM_FI_DEV_XID_ERRORS\{run!=""\}\) == (\d+)', str(rule["expr"]))
    assert {int(number) for number in named} == set(FATAL_XIDS)


def test_the_throttle_reasons_that_raise_an_alert_are_those_of_the_health_checks() -> None:
    (rule,) = (rule for rule in alerts() if rule["alert"] == "PhalanxThrottled")
    assert {int(bit) for bit in re.findall(r"/ (\d+)\) % 2", str(rule["expr"]))} == set(THROTTLED)


def test_a_reason_with_an_alert_of_its_own_raises_no_second_one() -> None:
    rules = yaml.safe_load((DEPLOY / "alertmanager" / "alertmanager.yml").read_text())["inhibit_rules"]
    pairs = [
        (match[1], code)
        for rule in rules
        for match in [re.fullmatch(r'alertname=~"(.*)"', rule["source_matchers"][0])]
        for code in re.findall(r'code=~"(.*)"', " ".join(rule["target_matchers"]))
        if match
    ]
    named = {str(rule["alert"]) for rule in alerts()}
    assert {name for sources, _ in pairs for name in sources.split("|")} <= named
    assert {code for _, codes in pairs for code in codes.split("|")} <= set(CODES)
    assert len(pairs) > 10


def test_a_run_that_is_dead_has_one_alert() -> None:
    rules = yaml.safe_load((DEPLOY / "alertmanager" / "alertmanager.yml").read_text())["inhibit_rules"]
    (rule,) = [
        rule for rule in rules if rule["source_matchers"] == ['alertname=~"PhalanxFailed|PhalanxGone"']
    ]
    assert rule["equal"] == ["run"]
    (kept,) = re.fullmatch(r'alertname!~"(.*)"', rule["target_matchers"][0]).groups()  # type: ignore[union-attr]
    inhibited = {str(alert["alert"]) for alert in alerts()} - set(kept.split("|"))
    assert {"PhalanxNoStep", "PhalanxNotFinite", "PhalanxCritical", "PhalanxCheckpointFailing"} <= inhibited
