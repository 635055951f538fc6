"""Fleets whose checkpoints are copied to an object store: nodes fall while they upload, disks are lost, and the bits stay."""

from __future__ import annotations

import functools
import secrets
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import phalanx_process
from phalanx.checkpoint.committed.copying import verify_tier
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier
from phalanx.checkpoint.tiers.store_standing import store_standing
from phalanx.observe.display.state import State, reduce
from phalanx.observe.event_log import read_events
from phalanx.observe.events import CheckpointCopied, CheckpointFailed, Restored, Stopped
from phalanx.observe.goodput import goodput
from phalanx.process.exit_codes import EXIT_STOPPED
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.store.open_store import open_store
from phalanx_process import ended, last_json, start, steps_done, wait_until
from store.servers import Server


@pytest.fixture
def url(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh place on the server, which this process and those that it starts can reach."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setitem(phalanx_process.ENVIRONMENT, name, value)
    return s3_server.url(secrets.token_hex(8))


def started(run_file: Path, folder: Path, url: str, nodes: int, *arguments: str) -> subprocess.Popen[str]:
    command = ["train", str(run_file), "--nodes", str(nodes), "--run-dir", str(folder / "run"), "--json"]
    settings = (f'checkpoint.store="{url}"', "fleet.heartbeat_s=1", "fleet.lease_s=4")
    sets = [part for setting in settings for part in ("--set", setting)]
    return start([*command, *sets, *arguments], folder)


def fleet(run_file: Path, folder: Path, url: str, nodes: int, *arguments: str) -> dict[str, Any]:
    return last_json(ended(started(run_file, folder, url, nodes, *arguments)))


def bodies(run_dir: Path, kind: type) -> list[Any]:
    return [event.body for event in read_events(run_dir / "events.jsonl") if isinstance(event.body, kind)]


@pytest.mark.slow
def test_a_fleet_that_loses_nodes_while_they_upload_and_then_its_disk_goes_on_from_the_store_with_the_same_bits(
    run_file: Path, undisturbed: str, tmp_path: Path, url: str
) -> None:
    slow = ("--set", "checkpoint.store_mib_s=0.3", "--set", "checkpoint.store_keep_last=9")
    faults = ("--spares", "1", "--fault", "kill node 0 at step 8", "--fault", "kill node 1 at step 14")
    result = fleet(run_file, tmp_path, url, 3, *slow, *faults)
    assert result["weights_sha256"] == undisturbed
    assert len(result["faults"]) == 2
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    account, state = goodput(events), functools.reduce(reduce, events, State())
    assert account.buckets_ns.get("unattributed", 0) < 0.001 * account.total_ns
    assert not [note.text for note in state.notes if "without a word" in note.text]
    store = ObjectTier(open_store(url))
    assert store.steps()[-1] == 20
    assert verify_tier(store, "store") == []
    assert bodies(tmp_path / "run", CheckpointCopied)[-1].step == 20

    store.delete(20)  # the disk was lost before it was copied
    newest = store.steps()[-1]
    shutil.rmtree(tmp_path / "run")
    again = fleet(run_file, tmp_path, url, 2)
    assert again["weights_sha256"] == undisturbed
    (restored,) = bodies(tmp_path / "run", Restored)
    assert (restored.step, restored.source) == (newest, url)
    assert bodies(tmp_path / "run", CheckpointFailed) == []
    assert store.steps()[-1] == 20
    assert verify_tier(ObjectTier(open_store(url)), "store") == []


@pytest.mark.slow
def test_a_fleet_that_is_stopped_waits_for_its_copies_and_at_a_second_request_ends_and_the_next_start_makes_them(
    run_file: Path, undisturbed: str, tmp_path: Path, url: str
) -> None:
    run_dir, slow = tmp_path / "run", ("--set", "checkpoint.store_mib_s=0.001")
    process = started(run_file, tmp_path, url, 2, *slow)
    wait_until(lambda: steps_done(run_dir) >= 4, process)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: bool(bodies(run_dir, Stopped)), process)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(4)
    process.send_signal(signal.SIGINT)
    done = ended(process)
    assert done.returncode == EXIT_STOPPED
    assert "on disk alone" in "".join(done.stderr.split("\n"))
    assert ObjectTier(open_store(url)).steps() == []
    newest = DiskTier(run_dir / "checkpoints").steps()[-1]
    standing = store_standing(read_resolved(RunDirectory(run_dir)), RunDirectory(run_dir))
    assert standing is not None
    assert standing.behind[-1] == newest

    assert fleet(run_file, tmp_path, url, 2)["weights_sha256"] == undisturbed
    assert ObjectTier(open_store(url)).steps()[-1] == 20
