"""``phalanx diff`` on real run directories: equal, parted, damaged."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from phalanx.run.directory.paths import RunDirectory
from phalanx_watch.cli.reproduction import diff_command


@pytest.fixture(scope="module")
def run(folder: Path, result: dict[str, object]) -> Path:
    return folder / str(result["run_dir"])


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy"


def diff(*words: object) -> Result:
    return CliRunner().invoke(diff_command, [*map(str, words)])


def with_another_loss(path: Path, step: int) -> None:
    """Move one logged loss to the next float."""
    events = RunDirectory(path).events
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "Step" and line["step"] == step:
            line["loss"] = math.nextafter(line["loss"], 9.0)
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_equal_runs_differ_in_nothing_that_was_computed(run: Path, copy: Path) -> None:
    done = diff(run, copy, "--replay")
    assert done.exit_code == 0, done.output
    assert "nothing is replayed: no step and no checkpoint differs" in done.stderr
    assert "the numbers of all 6 common steps are equal" in done.output
    assert "checkpoints of the same steps: 3, 6 (equal)" in done.output


def test_the_first_step_with_another_number_and_fields_with_their_owner_are_shown(
    run: Path, copy: Path
) -> None:
    with_another_loss(copy, 5)
    file = RunDirectory(copy).run_file
    file.write_text(file.read_text().replace("clip_norm = 0.5", "clip_norm = 0.75"))
    done = diff(run, copy, "--json")
    assert done.exit_code == 1, done.output
    report = json.loads(done.stdout)
    assert (report["parts_at"], report["last_equal_step"], list(report["numbers"]["numbers"])) == (
        5,
        4,
        ["loss"],
    )
    assert report["same_run"] is False
    assert [(field["path"], field["owner"]) for field in report["fields"]] == [("optimizer.clip_norm", "run")]


@pytest.mark.slow
def test_a_replay_names_the_run_that_logged_what_it_does_not_compute_again(run: Path, copy: Path) -> None:
    with_another_loss(copy, 5)
    done = diff(run, copy, "--replay", "--ranks", 1)
    assert done.exit_code == 1, done.output
    assert "replayed from the checkpoint of step 3 to step 5" in done.output
    assert "the replays agree in every bit, but not with what B logged" in done.output


def test_torn_lines_are_passed_over_and_damaged_checkpoints_are_reported(run: Path, copy: Path) -> None:
    with RunDirectory(copy).events.open("a") as events:
        events.write('{"t": 1, "att\n{}\n')
    image = copy / "checkpoints" / "step-00000003" / "rank-00000.safetensors"
    data = bytearray(image.read_bytes())
    data[-1] ^= 1
    image.write_bytes(data)
    done = diff(run, copy)
    assert done.exit_code == 0, done.output
    assert "torn lines were passed over" in done.output
    assert "the checkpoint of step 3 cannot be compared" in done.output


def test_trouble_has_an_exit_code_of_its_own(run: Path, copy: Path, tmp_path: Path) -> None:
    no_run = diff(run, tmp_path)
    assert (no_run.exit_code, "is not a run directory" in no_run.output) == (2, True)
    shutil.rmtree(copy / "checkpoints")
    RunDirectory(copy).events.unlink()
    nothing = diff(run, copy)
    assert (nothing.exit_code, "there is nothing to compare" in nothing.output) == (2, True)
    assert diff(run, run, "--ranks", 1).exit_code == 2


def test_how_far_two_runs_are_the_same_is_printed_first(run: Path, copy: Path) -> None:
    file = RunDirectory(copy).run_file
    text = file.read_text()
    file.write_text(text.replace("\ntensor = 1\n", "\ntensor = 2\n"))
    assert "the same run and the same data on other layouts" in diff(run, copy).output
    file.write_text(text.replace("\nseed = 0\n", "\nseed = 1\n"))
    assert "two different runs" in diff(run, copy).output
