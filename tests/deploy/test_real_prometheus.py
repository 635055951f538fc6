"""A real Prometheus scrapes; at the end a whole fleet through a recovery, with every expression of dashboards and rules, and an alert that comes and goes."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from deploy.grafana.dashboards import DASHBOARDS

from deploy.prometheus_rules import expressions, require
from deploy.servers import Prometheus, Receiver, alertmanager, prometheus, wait_for
from deploy.test_dashboards import filled
from free_ports import free_port
from phalanx.observe.event_log import EventLog
from phalanx.observe.events import RunStarted, Step
from phalanx.observe.metrics.endpoint import Endpoint
from phalanx.observe.metrics.exporter import EXPORTER_METRICS, RunSampler
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import ObserveSpec
from phalanx_process import RUN_FILE, start, wait_until
from recorded_runs import run_samples
from tiny_runs import make_dataset

pytestmark = pytest.mark.servers


def test_prometheus_takes_every_series_of_a_run_from_the_endpoint(tmp_path: Path) -> None:
    require("prometheus")
    run = tmp_path / "run"
    run.mkdir()
    with EventLog(run / "events.jsonl", 0) as log:
        log.append(RunStarted('ti"ny\n', 9))
        log.append(Step(1, 9, 2.5, 0.5, 1e-3, 64, 64.0, 1.0, ledger={"step.compute": 1.0}))
    port = free_port(3)
    end = Endpoint(RunDirectory(run), ObserveSpec(metrics_port=port), 0, "", "127.0.0.1", print)
    end.start({"run": RunSampler(run).samples})
    expected = {sample.metric.name for sample in run_samples(run)} | {
        metric.name for metric in EXPORTER_METRICS
    }
    with closing(end), prometheus(tmp_path / "prometheus", f"http://127.0.0.1:{port}/targets") as client:
        wait_for("a scrape", lambda: client.values('up{job="phalanx",run="run",node=""}') == [1.0])
        wait_for("its series", lambda: client.values("phalanx_loss") == [2.5])
        names = set(client.get("label/__name__/values"))
        assert {name for name in names if name.startswith("phalanx_")} == expected
        kinds = {name: entries[0]["type"] for name, entries in client.get("metadata").items()}
        assert kinds.get("phalanx_steps_total", kinds.get("phalanx_steps")) == "counter"


FAULTS = ("--fault", "kill rank 1 at step 40", "--fault", "kill coordinator at step 90")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A fleet of two nodes and a spare whose worker and whose coordinator are killed; its run directory and port."""
    require("prometheus")
    require("prometheus-alertmanager")
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "tiny.toml").write_text(RUN_FILE.format(data=make_dataset(folder / "words")))
    port, run = free_port(4), folder / "run"
    command = ["train", "tiny.toml", "--nodes", "2", "--spares", "1", "--run-dir", str(run)]
    settings = ["--set", f"observe.metrics_port={port}", "--set", "fleet.heartbeat_s=0.5", "--set", "train.steps=100000"]  # fmt: skip
    process = start([*command, *settings, *FAULTS], folder)
    try:
        wait_until((run / "targets" / "coordinator.json").exists, process)
        yield run, port
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)


def shortened(rules: str) -> str:
    """Rules that need minutes of a run, for one of seconds."""
    rules = re.sub(r"for: \d+m", "for: 0s", rules)
    return re.sub(r"\[(10m|15m|30m|1h|6h)\]", "[10s]", re.sub(r" offset (10m|1h)", " offset 1s", rules))


def unfiltered(expression: str) -> str:
    """An alert's expression whose comparisons return 0 or 1 instead of leaving out what is well."""
    outside = re.split(r"(\{[^}]*\})", expression)
    return "".join(
        part if part.startswith("{") else re.sub(r"(?<![<>=!])(==|!=|>=|<=|>|<)(?!=)", r"\1 bool ", part)
        for part in outside
    )


def finite(client: Prometheus, expression: str) -> bool:
    values = client.values(expression)
    return bool(values) and all(math.isfinite(value) for value in values)


@pytest.mark.slow
def test_through_a_recovery_every_expression_is_finite_and_an_alert_fires_and_resolves(
    fleet: tuple[Path, int], tmp_path: Path
) -> None:
    _, port = fleet
    receiver = Receiver()
    with (
        alertmanager(tmp_path / "alertmanager", receiver) as manager,
        prometheus(tmp_path / "prometheus", f"http://127.0.0.1:{port}/targets", manager, shortened) as client,
    ):
        wait_for("all targets", lambda: client.values('sum(up{job="phalanx"})') == [4.0])
        wait_for("a recovery", lambda: max(client.values("phalanx_fleet_recoveries_total"), default=0) >= 1)
        wait_for("the alert", lambda: "firing" in receiver.statuses("PhalanxCoordinatorGone"))
        wait_for("its end", lambda: "resolved" in receiver.statuses("PhalanxCoordinatorGone"))
        (notification, *_) = (
            alert for alert in receiver.alerts if alert["labels"]["alertname"] == "PhalanxCoordinatorGone"
        )
        assert notification["annotations"]["next"] == "phalanx status runs/run"
        wait_for(
            "steps after it",
            lambda: finite(client, "phalanx_fleet_step") and finite(client, "phalanx_node_step"),
        )
        queries = [filled(expression) for dashboard in DASHBOARDS for expression in dashboard.expressions]
        queries += [unfiltered(shortened(expression)) for expression in expressions()]
        # No GPU is here, no server of models, and no watcher from outside.
        absent = (
            "DCGM",
            "vllm:",
            "phalanx-serve",
            "phalanx:serve",
            "phalanx_requests",
            "phalanx_reason",
            "phalanx-ui",
        )
        queries = [query for query in queries if not any(name in query for name in absent)]
        for query in queries:
            wait_for(query, lambda query=query: finite(client, query))
        rules = [rule for group in client.get("rules")["groups"] for rule in group["rules"]]
        assert [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] != "ok"] == []
        assert client.values('phalanx_lost_steps_total{run="run"}')[0] >= 0
