"""Workers whose dataset lies in an object store that does not answer while the fleet changes."""

from __future__ import annotations

import dataclasses
import secrets
import time
from pathlib import Path
from typing import Any

import pytest

from driven_workers import PATIENCE_S, Driver
from forked_workers import Zygote
from phalanx.data.copies import copy_dataset
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
        # A cache that keeps nothing, so that every step asks the store.
        data = dataclasses.replace(
            spec.data, path=url, cache=str(tmp_path / "cache"), cache_gib=1e-9, read_ahead_mib=0.0
        )
        zygote = Zygote()
        driver = Driver(dataclasses.replace(spec, data=data, run_dir=str(tmp_path / "run")), 3, zygote)
        try:
            first, second, spare = driver.nodes
            driver.bind([first, second])
            driver.wait_for_step(3)
            port, proxy.upstream_port = proxy.upstream_port, 1  # nothing answers there
            until_s = time.monotonic() + PATIENCE_S
            while not first.waiting_s > 0.5:  # heartbeats say so, that it is not taken for a hang
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
            zygote.close()
