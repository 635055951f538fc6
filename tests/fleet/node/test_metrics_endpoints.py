"""A fleet's processes serve their metrics, through the loss of a node and of the coordinator."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import tomli_w
from prometheus_client.parser import text_string_to_metric_families as parse_text

from fleet.fleet_processes import FLEET, PATIENCE_S, Fleet, make_run
from free_ports import free_port
from phalanx.observe.metrics.endpoint import targets
from phalanx.run.read import to_table
from phalanx.run.spec import ObserveSpec


class _Fleet(Fleet):
    """One that leaves nothing behind."""

    close = Fleet.end


def scrape(address: str) -> dict[str, float]:
    """Value by name and labels, those of the run left out; empty if nobody answers."""
    try:
        text = urllib.request.urlopen(f"http://{address}/metrics", timeout=100).read().decode()
    except OSError:
        return {}
    return {",".join([s.name, *(v for k, v in s.labels.items() if k != "run")]): s.value for f in parse_text(text) for s in f.samples}  # fmt: skip


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def addresses(run_dir: Path) -> dict[str, str]:
    """Address by node; that of the coordinator under the empty name."""
    entries = json.loads(json.dumps(targets([run_dir])))
    return {entry["labels"].get("node", ""): entry["targets"][0] for entry in entries}


def test_coordinator_and_agents_serve_their_metrics_and_a_coordinator_that_is_started_again_at_the_same_port(
    tmp_path: Path,
) -> None:
    port = free_port(4)
    spec = make_run(tmp_path, replace(FLEET, nodes=2, spares=1), steps=1000)
    watched = replace(spec, observe=ObserveSpec(metrics_port=port))
    (tmp_path / "run.toml").write_text(tomli_w.dumps(to_table(watched)))
    with closing(_Fleet(tmp_path)) as fleet:
        fleet.hold_at(20)
        fleet.start_coordinator()
        wait_for(lambda: "" in addresses(tmp_path))  # has the port that the agents would take, too
        for node in ("a", "b", "c"):
            fleet.start_agent(node)
        fleet.gathered(20)
        wait_for(lambda: set(addresses(tmp_path)) == {"", "a", "b", "c"})
        address_of = addresses(tmp_path)
        assert address_of[""] == f"127.0.0.1:{port}"
        wait_for(lambda: scrape(address_of[""]).get("phalanx_fleet_nodes,spare") == 1)
        metrics = scrape(address_of[""])
        assert metrics["phalanx_fleet_nodes,member"] == 2
        assert (
            sum(value for name, value in metrics.items() if name.startswith("phalanx_fleet_node_ranks")) == 2
        )
        of_a = scrape(address_of["a"])
        assert (of_a["phalanx_node_workers,a"], of_a["phalanx_node_attached,a"]) == (1, 1)
        assert 0 < of_a["phalanx_node_disk_free_bytes,a"] <= of_a["phalanx_node_disk_bytes,a"]

        lost = next(node for node in "abc" if metrics[f"phalanx_fleet_node_ranks,{node}"])
        fleet.hold_at(40)
        fleet.kill_node(lost)
        fleet.held(40, epoch=1)
        wait_for(lambda: scrape(address_of[""]).get("phalanx_fleet_nodes,lost") == 1)
        assert scrape(address_of[""])["phalanx_fleet_recoveries_total"] == 1
        assert lost in addresses(tmp_path), "its file stays, and Prometheus finds it down"

        fleet.kill_coordinator()
        fleet.start_coordinator()
        wait_for(lambda: scrape(address_of[""]).get("phalanx_fleet_coordinator_restarts_total") == 1)
