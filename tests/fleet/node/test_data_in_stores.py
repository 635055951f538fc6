"""Workers whose dataset lies in an object store that does not answer while the fleet changes."""

from __future__ import annotations

import dataclasses
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from driven_workers import PATIENCE_S, Driver, Node
from phalanx.data.stored.copies import copy_dataset
from phalanx.fleet.node.worker_link import Warm
from store.faulty_proxy import Faults, faulty_proxy
from store.servers import Server
from tiny_runs import make_dataset, tiny_run, train_on_this_rank


@pytest.mark.slow
def test_a_fleet_loses_a_node_while_the_store_is_away_and_goes_on_with_the_same_bits(
    tmp_path: Path, ranks: Any, s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset(tmp_path / "bytes")
    spec = tiny_run(dataset, tmp_path / "undisturbed", steps=12)
    (undisturbed,) = ranks.run(1, train_on_this_rank, spec)
    with faulty_proxy(s3_server.port, Faults(), seed=7) as proxy:
        for name, value in s3_server.behind(proxy.port).items():
            monkeypatch.setenv(name, value)
        url = s3_server.url(secrets.token_hex(8))
        copy_dataset(str(dataset), url)
        # A cache that keeps nothing, so that every step reads from the store.
        data = dataclasses.replace(
            spec.data, path=url, cache=str(tmp_path / "cache"), cache_gib=1e-9, read_ahead_mib=0.0
        )
        driver = Driver(dataclasses.replace(spec, data=data, run_dir=str(tmp_path / "run")), 3)
        try:
            first, second, spare = driver.nodes
            driver.stop_after(3)
            driver.bind([first, second])
            driver.wait_until_stopped()
            port, proxy.upstream_port = proxy.upstream_port, 1  # nothing answers there
            driver.go_on()
            until_s = time.monotonic() + PATIENCE_S
            while not first.waiting_s > 0.5:  # its heartbeats have it, so that this is not taken for a hang
                assert time.monotonic() < until_s
                time.sleep(0.1)
            second.lose()
            driver.park([first])
            proxy.upstream_port = port
            driver.bind([first, spare], driver.resume([first, spare]))
            assert driver.finish() == undisturbed["weights_sha256"]
            assert first.pids == [first.process.pid], "the survivor is the same process"
        finally:
            driver.close()


@pytest.mark.slow
def test_a_new_worker_reports_that_it_waits_for_a_store_that_does_not_give_it_the_index_and_then_is_warm(
    tmp_path: Path, s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset(tmp_path / "bytes")
    spec = tiny_run(dataset, tmp_path / "run")
    spec = dataclasses.replace(spec, fleet=dataclasses.replace(spec.fleet, worker_lease_s=2.0))
    with faulty_proxy(s3_server.port, Faults(), seed=7) as proxy:
        for name, value in s3_server.behind(proxy.port).items():
            monkeypatch.setenv(name, value)
        url = s3_server.url(secrets.token_hex(8))
        copy_dataset(str(dataset), url)
        data = dataclasses.replace(spec.data, path=url, cache=str(tmp_path / "cache"))
        driver = Driver(dataclasses.replace(spec, data=data), 1)
        try:
            shutil.rmtree(tmp_path / "cache")  # a machine that never read it
            port, proxy.upstream_port = proxy.upstream_port, 1  # nothing answers there
            newcomer = Node(driver.spec, 1)
            driver.nodes.append(newcomer)
            until_s = time.monotonic() + PATIENCE_S
            while (
                not newcomer.waiting_s > 0.5
            ):  # else its agent takes it for one that hangs, after ten minutes
                assert time.monotonic() < until_s
                time.sleep(0.1)
            proxy.upstream_port = port
            newcomer.hear(Warm)
        finally:
            driver.close()
