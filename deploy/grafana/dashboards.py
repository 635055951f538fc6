"""Grafana's dashboards as code: ``python deploy/grafana/dashboards.py`` writes the JSON files beside it, which Grafana imports or provisions.

Panels are ``timeseries``, ``stat`` and ``table`` of schema 39 (Grafana 11; later ones migrate it by themselves). A data source, runs and nodes are variables, so
that one file serves every installation. A page is a list of rows of panels, and a panel a few expressions: the other fields of Grafana (identities,
places on the grid, letters of queries) are made here. In the tests every expression is parsed by a parser of PromQL and queried from a Prometheus
that has scraped a real fleet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Json = dict[str, object]
SCHEMA = 39
_SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT = 24, 8
Unit = Literal["none", "s", "bytes", "percentunit", "short", "dateTimeFromNow", "celsius", "rotmhz", "ops"]


@dataclass(frozen=True)
class Query:
    """An expression, and the legend of its series."""

    expr: str
    legend: str = "{{run}}"


@dataclass(frozen=True)
class Panel:
    """One chart or table."""

    title: str
    queries: Sequence[Query]
    unit: Unit = "short"
    about: str = ""
    kind: Literal["timeseries", "stat", "table"] = "timeseries"
    width: int = 8
    stacked: bool = False
    thresholds: tuple[tuple[float | None, str], ...] = ((None, "green"),)
    """Least values with their colors."""
    logarithmic: bool = False

    def to_json(self, number: int, x: int, y: int, height: int) -> Json:
        """Return the panel as Grafana stores it."""
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.about,
            "datasource": _SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": height},
            "targets": [
                self._target(query, letter) for query, letter in zip(self.queries, "ABCDEFGH", strict=False)
            ],
            "fieldConfig": {"defaults": self._field(), "overrides": []},
            "options": _OPTIONS[self.kind],
        }

    def _target(self, query: Query, letter: str) -> Json:
        once = self.kind != "timeseries"
        return {
            "refId": letter,
            "datasource": _SOURCE,
            "editorMode": "code",
            "expr": query.expr,
            "legendFormat": query.legend,
            "range": not once,
            "instant": once,
            "format": "table" if self.kind == "table" else "time_series",
        }

    def _field(self) -> Json:
        steps = [{"value": value, "color": color} for value, color in self.thresholds]
        config: Json = {"unit": self.unit, "thresholds": {"mode": "absolute", "steps": steps}, "mappings": []}
        if self.kind == "timeseries":
            scale: Json = {"type": "log", "log": 10} if self.logarithmic else {"type": "linear"}
            config["color"] = {"mode": "palette-classic"}
            config["custom"] = {
                "drawStyle": "line",
                "lineWidth": 1,
                "fillOpacity": 30 if self.stacked else 0,
                "showPoints": "never",
                "spanNulls": False,
                "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
                "scaleDistribution": scale,
            }
        return config


_OPTIONS: dict[str, Json] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "auto",
    },
    "table": {"showHeader": True, "cellHeight": "sm"},
}


@dataclass(frozen=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: Sequence[Panel]
    height: int = _HEIGHT


@dataclass(frozen=True)
class Dashboard:
    """One page."""

    uid: str
    title: str
    rows: Sequence[Row] = field(default_factory=tuple)
    nodes: bool = False
    """True if it has the variable ``$node``."""
    models: bool = False
    """True if it is about servers: it has the variable ``$model`` instead of ``$run``."""

    @property
    def expressions(self) -> list[str]:
        """All expressions, with Grafana's variables in them."""
        return [query.expr for row in self.rows for panel in row.panels for query in panel.queries]

    def to_json(self) -> Json:
        """Return the dashboard as Grafana imports it."""
        return {
            "uid": self.uid,
            "title": self.title,
            "tags": ["phalanx"],
            "schemaVersion": SCHEMA,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-6h", "to": "now"},
            "timezone": "browser",
            "templating": {"list": self._variables()},
            "annotations": {"list": [] if self.models else [_annotation()]},
            "links": [
                {
                    "type": "dashboards",
                    "tags": ["phalanx"],
                    "title": "Phalanx",
                    "asDropdown": False,
                    "includeVars": True,
                    "keepTime": True,
                }
            ],
            "panels": self._panels(),
        }

    def _variables(self) -> list[Json]:
        variables: list[Json] = [
            {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
        ]
        if self.models:
            return [*variables, _variable("model", "label_values(vllm:num_requests_running, model_name)")]
        variables.append(_variable("run", "label_values(phalanx_run_state, run)"))
        if self.nodes:
            variables.append(_variable("node", 'label_values(phalanx_node_attached{run=~"$run"}, node)'))
        return variables

    def _panels(self) -> list[Json]:
        grid: list[Json] = []
        y = 0
        for row in self.rows:
            grid.append(
                {
                    "id": len(grid) + 1,
                    "type": "row",
                    "title": row.title,
                    "collapsed": False,
                    "panels": [],
                    "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1},
                }
            )
            x, y = 0, y + 1
            for panel in row.panels:
                if x + panel.width > _WIDTH:
                    x, y = 0, y + row.height
                grid.append(panel.to_json(len(grid) + 1, x, y, row.height))
                x += panel.width
            y += row.height
        return grid


def _variable(name: str, query: str) -> Json:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _annotation() -> Json:
    """Return the annotation that marks recoveries on every chart."""
    return {
        "name": "Recoveries",
        "datasource": _SOURCE,
        "enable": True,
        "expr": 'changes(phalanx_recoveries_total{run=~"$run"}[1m]) > 0',
        "titleFormat": "recovery of {{run}}",
        "iconColor": "orange",
    }


def _of_run(metric: str, more: str = "") -> str:
    """Return an expression for a run's metric once, also if several endpoints export it."""
    by = f"run, {more}" if more else "run"
    return f'max by ({by}) ({metric}{{run=~"$run"}})'


def _rate(metric: str, more: str = "") -> str:
    by = f"run, {more}" if more else "run"
    return f'max by ({by}) (rate({metric}{{run=~"$run"}}[$__rate_interval]))'


def _of_node(metric: str, more: str = "") -> str:
    by = f"run, node, {more}" if more else "run, node"
    return f'max by ({by}) ({metric}{{run=~"$run",node=~"$node"}})'


_AT_NODE = "{{run}} {{node}}"
RUN = Dashboard(
    "phalanx-run",
    "Phalanx: runs",
    [
        Row("Now", [
            Panel("Step", [Query(_of_run("phalanx_step"))], "none", kind="stat", width=4),
            Panel("Last step", [Query(f"1000 * {_of_run('phalanx_last_step_timestamp_seconds')}")], "dateTimeFromNow", kind="stat", width=4),
            Panel("Loss", [Query(_of_run("phalanx_loss"))], "short", kind="stat", width=4),
            Panel("Tokens a second", [Query(_of_run("phalanx_tokens_per_second"))], "short", kind="stat", width=4),
            Panel("Goodput", [Query(_of_run("phalanx_goodput_ratio"))], "percentunit", kind="stat", width=4, thresholds=((None, "red"), (0.8, "orange"), (0.95, "green"))),
            Panel("Not finite", [Query(_of_run("phalanx_nonfinite_steps_total"))], "none", kind="stat", width=4, thresholds=((None, "green"), (1, "red"))),
        ], height=4),
        Row("Learning", [
            Panel("Loss", [Query(_of_run("phalanx_loss"), "{{run}} training"), Query(_of_run("phalanx_evaluation_loss"), "{{run}} held out")], "short", width=12),
            Panel("Gradient norm", [Query(_of_run("phalanx_grad_norm"))], "short", width=6, logarithmic=True),
            Panel("Learning rate", [Query(_of_run("phalanx_learning_rate"))], "short", width=6),
        ]),
        Row("Speed", [
            Panel("Tokens a second", [Query(_of_run("phalanx_tokens_per_second")), Query('phalanx:run:tokens_per_second:median10m{run=~"$run"}', "{{run}} median of 10 min")], "short"),
            Panel("Seconds of a step", [Query(_of_run("phalanx_step_seconds")), Query(_of_run("phalanx_usual_step_seconds"), "{{run}} usual")], "s"),
            Panel("Model FLOPs utilization", [Query(_of_run("phalanx_mfu_ratio"))], "percentunit"),
            Panel("Peak memory", [Query(_of_run("phalanx_peak_memory_bytes"))], "bytes"),
            Panel("Memory by kind", [Query(_of_run("phalanx_memory_bytes", "kind"), "{{run}} {{kind}}")], "bytes", about="On the rank with most, when it was last measured."),
            Panel("Tokens trained on", [Query(_of_run("phalanx_tokens"))], "short"),
        ]),
        Row("Where the time goes", [
            Panel("Share of time by bucket", [Query(_rate("phalanx_ledger_seconds_total", "bucket"), "{{run}} {{bucket}}")], "percentunit", width=12, stacked=True, about="The buckets of the goodput ledger: every second is in exactly one of them."),
            Panel("Goodput", [Query(_of_run("phalanx_goodput_ratio"), "{{run}} since the beginning"), Query('phalanx:run:goodput:ratio1h{run=~"$run"}', "{{run}} last hour")], "percentunit", width=6),
            Panel("Time in steps, by what became of it", [Query(_of_run("phalanx_outcome_seconds", "outcome"), "{{run}} {{outcome}}")], "s", width=6, stacked=True),
        ]),
        Row("Failures and checkpoints", [
            Panel("Recoveries", [Query(_of_run("phalanx_recoveries_total"))], "none"),
            Panel("Time of recoveries by phase", [Query(_of_run("phalanx_recovery_seconds_total", "phase"), "{{run}} {{phase}}")], "s", stacked=True),
            Panel("Steps lost", [Query(_of_run("phalanx_lost_steps_total"))], "none"),
            Panel("Steps since the newest checkpoint", [Query(f"{_of_run('phalanx_step')} - {_of_run('phalanx_checkpoint_step')}")], "none"),
            Panel("Failed checkpoints", [Query(_of_run("phalanx_checkpoint_failures_total"))], "none"),
            Panel("Seconds of saves", [Query(_of_run("phalanx_checkpoint_seconds_total"), "{{run}} in all"), Query(_of_run("phalanx_checkpoint_blocked_seconds_total"), "{{run}} training stood still")], "s"),
            Panel("Loss spikes and steps that are not finite", [Query(_of_run("phalanx_loss_spikes_total"), "{{run}} spikes"), Query(_of_run("phalanx_nonfinite_steps_total"), "{{run}} not finite")], "none"),
            Panel("Evaluations", [Query(_of_run("phalanx_evaluations_total")), Query(_of_run("phalanx_evaluation_seconds_total"), "{{run}} seconds")], "none"),
            Panel("Messages", [Query(_of_run("phalanx_messages_total", "level"), "{{run}} {{level}}")], "none"),
        ]),
    ],
)  # fmt: skip
_NEEDS = "empty without observe.metrics_port in the run file"
FLEET = Dashboard(
    "phalanx-fleet",
    "Phalanx: fleets",
    [
        Row(f"Now ({_NEEDS})", [
            Panel("Phase", [Query(f"{_of_run('phalanx_fleet_phase', 'phase')} == 1", "{{run}} {{phase}}")], "none", kind="stat", width=6),
            Panel("Members", [Query('max by (run) (phalanx_fleet_nodes{run=~"$run",role="member"})')], "none", kind="stat", width=4),
            Panel("Spares", [Query('max by (run) (phalanx_fleet_nodes{run=~"$run",role="spare"})')], "none", kind="stat", width=4, thresholds=((None, "red"), (1, "green"))),
            Panel("Recoveries", [Query(_of_run("phalanx_fleet_recoveries_total"))], "none", kind="stat", width=4),
            Panel("Unsaved steps", [Query(_of_run("phalanx_fleet_unsaved_steps"))], "none", kind="stat", width=6),
        ], height=4),
        Row("Members", [
            Panel("Nodes by role", [Query(_of_run("phalanx_fleet_nodes", "role"), "{{run}} {{role}}")], "none", width=12, stacked=True),
            Panel("Ranks", [Query(_of_run("phalanx_fleet_ranks"))], "none", width=6),
            Panel("Expected nodes", [Query(_of_run("phalanx_fleet_expected_nodes"))], "none", width=6),
            Panel("Epoch", [Query(_of_run("phalanx_fleet_epoch"))], "none"),
            Panel("Recoveries and regroups", [Query(_of_run("phalanx_fleet_recoveries_total"), "{{run}} recoveries"), Query(_of_run("phalanx_fleet_regroups_total"), "{{run}} regroups")], "none"),
            Panel("Coordinator", [Query(_of_run("phalanx_fleet_coordinator_reign"), "{{run}} reign"), Query(_of_run("phalanx_fleet_coordinator_restarts_total"), "{{run}} restarts")], "none"),
            Panel("Steps", [Query(_of_run("phalanx_fleet_step"), "{{run}} done"), Query(_of_run("phalanx_fleet_durable_step"), "{{run}} on disk")], "none"),
            Panel("Messages ignored and refused", [Query(_of_run("phalanx_fleet_stale_messages_total"), "{{run}} late"), Query(_of_run("phalanx_fleet_refused_total"), "{{run}} refused")], "none"),
            Panel("Age of the coordinator's state", [Query(f"time() - {_of_run('phalanx_fleet_state_timestamp_seconds')}")], "s"),
        ]),
        Row("Nodes, as the coordinator sees them", [
            Panel("Silent for longest", [Query('topk(10, max by (run, node) (phalanx_fleet_node_silent_seconds{run=~"$run"}))', _AT_NODE)], "s"),
            Panel("Not connected", [Query('count by (run) (phalanx_fleet_node_attached{run=~"$run"} == 0) or max by (run) (phalanx_fleet_epoch{run=~"$run"}) * 0')], "none"),
            Panel("Quarantined and slow", [Query('sum by (run) (phalanx_fleet_node_quarantined{run=~"$run"})', "{{run}} quarantined"), Query('sum by (run) (phalanx_fleet_node_straggler{run=~"$run"})', "{{run}} slow")], "none"),
        ]),
    ],
)  # fmt: skip
_GPU = '{run=~"$run",node=~"$node"}'
NODES = Dashboard(
    "phalanx-nodes",
    "Phalanx: nodes",
    [
        Row(f"Workers ({_NEEDS})", [
            Panel("Workers that run", [Query(_of_node("phalanx_node_workers"), _AT_NODE)], "none"),
            Panel("Deaths of workers", [Query(_of_node("phalanx_node_worker_deaths_total"), _AT_NODE)], "none"),
            Panel("Step", [Query(_of_node("phalanx_node_step"), _AT_NODE)], "none"),
            Panel("Connected to a coordinator", [Query(_of_node("phalanx_node_attached"), _AT_NODE)], "none"),
            Panel("Fit", [Query(_of_node("phalanx_node_fit"), _AT_NODE)], "none"),
            Panel("Waiting for samples", [Query(_of_node("phalanx_node_waiting_seconds"), _AT_NODE)], "s"),
        ]),
        Row("Machine", [
            Panel("Free memory", [Query(_of_node("phalanx_node_memory_free_bytes"), _AT_NODE)], "bytes"),
            Panel("Snapshots in memory", [Query(_of_node("phalanx_node_snapshot_bytes"), _AT_NODE)], "bytes"),
            Panel("Free room for the run directory", [Query(_of_node("phalanx_node_disk_free_bytes"), _AT_NODE)], "bytes"),
            Panel("Processor of the agent", [Query('max by (run, node) (rate(phalanx_process_cpu_seconds_total{run=~"$run",node=~"$node"}[$__rate_interval]))', _AT_NODE)], "percentunit"),
            Panel("Clock against Prometheus", [Query('max by (run, node) (phalanx_clock_timestamp_seconds{run=~"$run",node=~"$node"} - timestamp(phalanx_clock_timestamp_seconds{run=~"$run",node=~"$node"}))', _AT_NODE)], "s"),
            Panel("Software", [Query('max by (run, node, phalanx, python, torch, numpy, driver, kernel) (phalanx_node_software_info{run=~"$run",node=~"$node"})')], "none", kind="table"),
        ]),
        Row("Accelerators (DCGM's names)", [
            Panel("Temperature", [Query(f"DCGM_FI_DEV_GPU_TEMP{_GPU}", "{{node}} {{gpu}}")], "celsius"),
            Panel("Clock of the multiprocessors", [Query(f"1e6 * DCGM_FI_DEV_SM_CLOCK{_GPU}", "{{node}} {{gpu}}")], "hertz"),
            Panel("Uncorrectable memory errors, newest Xid", [Query(f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{_GPU}", "{{node}} {{gpu}} errors"), Query(f"DCGM_FI_DEV_XID_ERRORS{_GPU}", "{{node}} {{gpu}} Xid")], "none"),
        ]),
    ],
    nodes=True,
)  # fmt: skip
_SERVER = "{{model_name}} {{instance}}"


def _served(metric: str, more: str = "") -> str:
    by = f"model_name, instance, {more}" if more else "model_name, instance"
    return f'max by ({by}) ({metric}{{model_name=~"$model"}})'


def _served_rate(metric: str, more: str = "") -> str:
    by = f"model_name, instance, {more}" if more else "model_name, instance"
    return f'sum by ({by}) (rate({metric}{{model_name=~"$model"}}[$__rate_interval]))'


def _quantiles(metric: str) -> list[Query]:
    return [
        Query(f"histogram_quantile({part}, {_served_rate(f'{metric}_bucket', 'le')})", f"{_SERVER} {name}")
        for part, name in ((0.5, "median"), (0.99, "99 %"))
    ]


SERVE = Dashboard(
    "phalanx-serve",
    "Phalanx: serving",
    [
        Row("Now", [
            Panel("Texts that are computed", [Query(_served("vllm:num_requests_running"), _SERVER)], "none", kind="stat", width=6),
            Panel("Texts that wait", [Query(_served("vllm:num_requests_waiting"), _SERVER)], "none", kind="stat", width=6, thresholds=((None, "green"), (1, "orange"))),
            Panel("Pages in use", [Query(_served("vllm:kv_cache_usage_perc"), _SERVER)], "percentunit", kind="stat", width=6, thresholds=((None, "green"), (0.95, "red"))),
            Panel("Tokens a second", [Query(_served_rate("vllm:generation_tokens_total"), _SERVER)], "short", kind="stat", width=6),
        ], height=4),
        Row("What a user waits for", [
            Panel("To the first token", _quantiles("vllm:time_to_first_token_seconds"), "s"),
            Panel("Between two tokens", _quantiles("vllm:inter_token_latency_seconds"), "s"),
            Panel("To the end", _quantiles("vllm:e2e_request_latency_seconds"), "s"),
        ]),
        Row("Work", [
            Panel("Texts", [Query(_served("vllm:num_requests_running"), f"{_SERVER} computed"), Query(_served("vllm:num_requests_waiting"), f"{_SERVER} waiting")], "none"),
            Panel("Tokens a second", [Query(_served_rate("vllm:prompt_tokens_total"), f"{_SERVER} prompts"), Query(_served_rate("vllm:generation_tokens_total"), f"{_SERVER} generated")], "short"),
            Panel("Pages in use", [Query(_served("vllm:kv_cache_usage_perc"), _SERVER)], "percentunit"),
            Panel("Texts that ended", [Query(_served_rate("vllm:request_success_total", "finished_reason"), f"{_SERVER} {{{{finished_reason}}}}")], "ops"),
            Panel("Refused, and left by clients", [Query(_served_rate("phalanx_requests_refused_total", "status"), f"{_SERVER} {{{{status}}}}"), Query(_served_rate("phalanx_requests_cancelled_total"), f"{_SERVER} left")], "ops"),
            Panel("Prompt tokens held already", [Query("phalanx:serve:prefix_hits:ratio5m", _SERVER)], "percentunit"),
        ]),
    ],
    models=True,
)  # fmt: skip
DASHBOARDS = (RUN, FLEET, NODES, SERVE)


def write(folder: Path) -> None:
    """Write all dashboards."""
    for dashboard in DASHBOARDS:
        content = json.dumps(dashboard.to_json(), indent=1) + "\n"
        (folder / f"{dashboard.uid}.json").write_text(content)


if __name__ == "__main__":
    write(Path(__file__).parent)
