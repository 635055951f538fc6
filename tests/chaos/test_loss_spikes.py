"""A spike that is left out while workers are killed: the same bits as on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.observe.event_log import read_events
from phalanx.observe.events import LossSpike
from phalanx_process import RUN_FILE, last_json, run
from spiking_runs import SPIKE, make_noise
from tiny_runs import make_dataset


def run_file(folder: Path) -> Path:
    """A run file whose data in one step are another dataset's, of bytes that the first never has."""
    words, noise = make_dataset(folder / "words"), make_noise(folder / "noise")
    text = RUN_FILE.format(data=words).replace(
        f'path = "{words}"',
        f"stages = [0, {SPIKE - 1}, {SPIKE}]\n"
        f'[[data.sources]]\nname = "words"\npath = "{words}"\nweights = [1, 0, 1]\nepochs = 0\n'
        f'[[data.sources]]\nname = "noise"\npath = "{noise}"\nweights = [0, 1, 0]\nepochs = 0\n',
    )
    file = folder / "spike.toml"
    file.write_text(text.replace("slots = 8", 'slots = 8\nspike_window = 8\non_spike = "skip"'))
    return file


@pytest.mark.slow
def test_a_fleet_whose_workers_are_killed_around_a_spike_leaves_it_out_with_the_same_bits(
    tmp_path: Path,
) -> None:
    file = run_file(tmp_path)
    for name in ("alone", "fleet"):
        (tmp_path / name).mkdir()
    alone = last_json(run(["train", str(file), "--ranks", "1", "--json"], tmp_path / "alone"))
    faults = (f"kill rank 1 at step {SPIKE}", f"kill rank 0 at step {SPIKE + 2}")
    words = [part for fault in faults for part in ("--fault", fault)]
    fleet = [*("train", str(file), "--nodes", "2", "--spares", "1", "--json"), *words]
    result = last_json(run([*fleet, "--run-dir", str(tmp_path / "run")], tmp_path / "fleet"))
    assert len(result["recoveries"]) == 2
    assert result["weights_sha256"] == alone["weights_sha256"]
    spikes = [e.body for e in read_events(tmp_path / "run" / "events.jsonl") if isinstance(e.body, LossSpike)]
    assert {(spike.step, spike.action) for spike in spikes} == {(SPIKE, "skip")}
