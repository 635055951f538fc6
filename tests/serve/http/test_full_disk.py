"""A disk that is full while a run is served: every text comes, nothing half written stays, and each trouble is told once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from phalanx.observe.record.notes import read_serving
from phalanx.run.directory.files import files_below
from phalanx.run.directory.paths import RunDirectory
from serve.workers.services import until
from small_disks import fill, small_disk


@pytest.fixture(name="disk")
def _disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", "4m") as mount:
        yield mount


@pytest.mark.slow
def test_a_served_run_on_a_full_disk_answers_as_before_and_notes_itself_when_there_is_room(
    chat_run: Path, disk: Path
) -> None:
    run = disk / "run"
    # Servers of other tests leave notes in the folder that is copied.
    shutil.copytree(chat_run, run, ignore=shutil.ignore_patterns("serving"))
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    before = _said(chat_run, env)
    filler = fill(disk)
    after = _said(run, env, filler)
    assert before["answers"] == after["answers"]
    assert len(re.findall("cannot be noted in", after["errors"])) == 1
    assert "Traceback" not in after["errors"]
    assert not [path for path in files_below(disk) if path.suffix == ".tmp"]
    assert not list((run / "serving").iterdir())


def _said(run: Path, env: dict[str, str], filler: Path | None = None) -> dict[str, Any]:
    """What a server answers, and prints on standard error; the disk is emptied before it ends."""
    command = [sys.executable, "-m", "phalanx", "serve", str(run), "--port", "0", "--context", "128"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split(" at ")[1].split()[0]
        answers = []
        for seed in range(3):
            body = {"model": "run", "prompt": "the cat", "max_tokens": 20, "seed": seed, "logprobs": 2}
            choice = (
                httpx.post(f"{url}/completions", json=body, timeout=120)
                .raise_for_status()
                .json()["choices"][0]
            )
            answers.append(choice)
        directory = RunDirectory(run)
        assert filler is None or read_serving(directory) == []
        if filler is not None:
            filler.unlink()
        until(lambda: read_serving(directory))
        process.terminate()
        return {"answers": answers, "errors": process.communicate(timeout=120)[1]}
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_a_pack_for_streaming_that_finds_no_room_is_refused_with_what_it_takes(
    chat_run: Path, disk: Path
) -> None:
    from phalanx.checkpoint.format.errors import CheckpointError
    from phalanx_serve.weights.open_model import open_model

    run = disk / "run"
    shutil.copytree(chat_run, run)
    filler = fill(disk)
    with pytest.raises(CheckpointError, match="No space left on device"):
        open_model(run, stream=True, memory_bytes=1 << 28, dtype=torch.float32)
    filler.unlink()
    assert not list((run / "packs").iterdir())
    open_model(run, stream=True, memory_bytes=1 << 28, dtype=torch.float32)
