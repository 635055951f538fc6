"""One run, all of whose bytes come from and go to a store that fails, on a fleet that is killed, shrinks and grows: the undisturbed bits."""

from __future__ import annotations

import json
import random
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

import phalanx_process
from chaos.stored_runs import befall, drawn, fill_half, scattered_dataset
from phalanx.checkpoint.committed.copying import verify_tier
from phalanx.checkpoint.tiers.object_tier import ObjectTier
from phalanx.data.stored.copies import copy_dataset
from phalanx.store.open_store import open_store
from phalanx_process import RUN_FILE, ended, last_json, run, start
from store.faulty_proxy import Faults, faulty_proxy
from store.servers import Server

STEPS = 48


@dataclass(frozen=True)
class Local:
    """A run from a folder, which nothing disturbs, on one rank."""

    run_file: Path
    dataset: Path
    weights: str


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Local:
    folder = tmp_path_factory.mktemp("local")
    dataset = scattered_dataset(folder / "words", megabytes=4, shards=8)
    run_file = folder / "tiny.toml"
    run_file.write_text(RUN_FILE.format(data=dataset).replace("steps = 20", f"steps = {STEPS}"))
    done = last_json(run(["train", str(run_file), "--ranks", "1", "--json"], folder))
    return Local(run_file, dataset, str(done["weights_sha256"]))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_a_run_from_a_failing_store_on_a_fleet_that_is_killed_and_resized_ends_with_the_bits_of_the_undisturbed_local_one(
    seed: int, local: Local, s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    data, copies = (s3_server.url(secrets.token_hex(8)) for _ in range(2))
    copy_dataset(str(local.dataset), data)
    cache, run_dir = tmp_path / "cache", tmp_path / "run"
    fill_half(data, cache)
    faults = Faults(slow_down=0.05, reset=0.02, lost_answer=0.02, truncated=0.02, latency_s=0.05)
    settings = {
        "data.path": data,
        "data.cache": str(cache),
        "data.read_ahead_mib": chance.choice((0, 1)),
        "checkpoint.store": copies,
        "checkpoint.store_keep_last": 9,
        "fleet.heartbeat_s": 1,
        "fleet.lease_s": 4,
    }
    sets = [part for field, value in settings.items() for part in ("--set", f"{field}={json.dumps(value)}")]
    train = ["train", str(local.run_file), "--run-dir", str(run_dir), "--json", *sets]
    with faulty_proxy(s3_server.port, faults, seed) as proxy:
        for name, value in s3_server.behind(proxy.port).items():
            monkeypatch.setitem(phalanx_process.ENVIRONMENT, name, value)
        # Executed: victims are chosen by command lines, and those of forked programs are the template's.
        command = [*train, "--nodes", "3", "--spares", "1"]
        process = start(command, tmp_path, kind=subprocess.Popen)
        mishaps = drawn(seed, STEPS)
        happened = befall(process, run_dir, mishaps, proxy, chance)
        result = last_json(ended(process))
        assert result["weights_sha256"] == local.weights
        assert happened == mishaps
        assert sum(count for fault, count in proxy.done.items() if fault != "good") > 10

        store = ObjectTier(open_store(copies))
        assert store.steps()[-1] == STEPS
        assert verify_tier(store, "store") == []
        for step in store.steps()[-2:]:  # as if the disk had been lost before these were copied
            store.delete(step)
        shutil.rmtree(run_dir)
        again = last_json(ended(start([*train, "--nodes", "2"], tmp_path)))
        assert again["weights_sha256"] == local.weights
    assert ObjectTier(open_store(copies)).steps()[-1] == STEPS
