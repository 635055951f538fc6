"""``phalanx runs`` and ``phalanx reproduce`` on the directory of a real run."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from phalanx.run.directory.paths import RunDirectory
from phalanx_watch.cli.reproduction import reproduce_command
from phalanx_watch.cli.runs_command import command
from watch.runs.some_runs import make_run


@pytest.fixture(scope="module")
def run_dir(folder: Path, result: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run, alone in its folder."""
    place = tmp_path_factory.mktemp("runs") / "tiny"
    shutil.copytree(folder / str(result["run_dir"]), place)
    return place


@pytest.fixture
def copy(run_dir: Path, tmp_path: Path) -> Path:
    shutil.copytree(run_dir, tmp_path / "copy")
    return tmp_path / "copy"


def runs(*words: object) -> Result:
    return CliRunner().invoke(command, [*map(str, words)])


def with_another_loss(path: Path, step: int) -> None:
    events = RunDirectory(path).events
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    changed = [
        {**event, "loss": 9.5} if event["kind"] == "Step" and event["step"] == step else event
        for event in lines
    ]
    events.write_text("".join(json.dumps(event) + "\n" for event in changed))


AGO = r" *\d+ (?:s|min) ago *"


def test_the_folder_alone_lists_its_runs_and_so_does_the_word(
    run_dir: Path, result: dict[str, object]
) -> None:
    short, long = runs(run_dir.parent), runs("list", run_dir.parent)
    assert short.exit_code == 0, short.output
    # Between the two a second may pass, or a minute.
    assert re.sub(AGO, "", short.stdout) == re.sub(AGO, "", long.stdout)
    assert "finished" in short.stdout
    assert str(result["weights_sha256"])[:12] in short.stdout


def test_runs_are_chosen_sorted_and_shown_by_columns(run_dir: Path, copy: Path) -> None:
    runs("tag", copy, "second")
    words = [run_dir, copy, "--where", "state=finished", "--where", "optimizer.lr=0.01", "--json"]
    assert len(json.loads(runs(*words).stdout)) == 2
    (row,) = json.loads(runs(*words, "--tag", "second").stdout)
    assert (row["path"], row["tags"]) == (str(copy), ["second"])
    shown = runs(copy, "--columns", "state,optimizer.lr").stdout
    assert shown.split("\n")[0].split() == ["run", "state", "optimizer.lr", "goes", "on", "from"]
    wrong = runs(copy, "--where", "los<2")
    assert wrong.exit_code == 1
    assert "did you mean loss?" in wrong.output


def test_labels_are_given_shown_and_taken_away(copy: Path) -> None:
    assert runs("tag", copy, "good", "base").stdout == "base good\n"
    assert runs("tag", copy, "--remove", "base").stdout == "good\n"
    assert runs("note", copy, "for the paper").exit_code == 0
    assert runs("note", copy).stdout == "for the paper\n"
    assert "labels       good  for the paper" in runs("show", copy).stdout
    assert "is no tag" in runs("tag", copy, "two words").output
    assert runs("note", copy, "").exit_code == 0
    assert runs("note", copy).stdout == "\n"


def test_everything_that_was_recorded_is_shown(run_dir: Path, result: dict[str, object]) -> None:
    shown = runs("show", run_dir, "--price", "2").stdout
    assert f"weights        {result['weights_sha256']}" in shown
    for title in (
        "command        phalanx train tiny.toml",
        "code ",
        "packages ",
        "machines       1",
        "data ",
        "cost ",
    ):
        assert f"\n{title}" in shown
    details = json.loads(runs("show", run_dir, "--price", "2", "--json").stdout)
    (data,) = details["started"]["environment"]["data"].values()
    assert data["fingerprint"] == details["row"]["data_fingerprint"]
    assert data["recipe"]["tokenizer"] == "bytes"
    assert details["cost"]["amount"] == pytest.approx(2 * details["cost"]["accelerator_hours"])
    assert Path(details["packages"]).read_text().count("==") > 10


def test_changes_of_the_code_that_git_could_not_read_are_shown_as_missing(tmp_path: Path) -> None:
    code = {"version": "0.1.0", "git_commit": "c0ffee", "git_dirty": True, "patch_failed": True}
    make_run(tmp_path / "a", environment={"code": code})
    assert "\n  changes      not kept (git failed)\n" in runs("show", tmp_path / "a").stdout


def test_the_manifest_that_was_recorded_is_the_one_on_disk(run_dir: Path) -> None:
    details = json.loads(runs("show", run_dir, "--json").stdout)
    (data,) = details["started"]["environment"]["data"].values()
    manifest = Path(data["address"]) / "index.json"
    assert hashlib.sha256(manifest.read_bytes()).hexdigest() == data["manifest_sha256"]


def test_a_text_of_a_run_cannot_move_the_cursor_of_a_terminal(copy: Path) -> None:
    runs("note", copy, "red \x1b[31m and gone \r\x1b[2K")
    assert "\x1b" not in runs("show", copy).stdout
    assert "\x1b" not in runs(copy, "--columns", "note").stdout


def test_a_copy_has_the_same_bits_and_one_that_was_altered_parts(run_dir: Path, copy: Path) -> None:
    same = runs("compare", run_dir, copy).stdout
    assert "every bit should be equal" in same
    assert "the numbers of all 6 common logged steps are equal" in same
    with_another_loss(copy, 4)
    assert json.loads(runs("compare", run_dir, copy, "--json").stdout)["same_bits"]["parts_at"] == 4


def test_a_run_is_removed_only_with_yes_and_without_it_the_loss_is_printed(copy: Path) -> None:
    refused = runs("rm", copy)
    assert refused.exit_code == 1
    assert "checkpoints " in refused.output
    assert "give --yes" in refused.output
    assert copy.exists()
    done = runs("rm", copy, "--yes")
    assert done.exit_code == 0, done.output
    assert not copy.exists()


def test_a_dry_run_prints_what_has_changed_since_the_run_and_runs_nothing(copy: Path) -> None:
    machine = next((copy / "machines").iterdir())
    machine.write_text(machine.read_text().replace('"cpu_model": "', '"cpu_model": "not '))
    done = CliRunner().invoke(reproduce_command, [str(copy), "--dry-run", "--json"])
    plan = json.loads(done.stdout.splitlines()[-1])
    assert [change["weight"] for change in plan["changed"] if change["what"] == "processor"] == [
        "no"
    ]  # its probes are equal
    assert not copy.with_name("copy-again").exists()


def test_a_run_that_is_not_run_again_without_a_confirmation_counts_as_no_success(copy: Path) -> None:
    done = CliRunner().invoke(reproduce_command, [str(copy)])
    assert done.exit_code == 2
    assert "nothing was run" in done.output
    assert not copy.with_name("copy-again").exists()


def test_a_run_is_reproduced_on_another_number_of_ranks_with_the_same_hash(
    copy: Path, result: dict[str, object]
) -> None:
    done = CliRunner().invoke(reproduce_command, [str(copy), "--yes", "--ranks", "1"])
    assert done.exit_code == 0, done.output
    assert f"same hash: {result['weights_sha256']}" in done.output
    assert json.loads((copy.with_name("copy-again") / "result.json").read_text())["ranks"] == 1


@pytest.mark.slow
def test_the_first_steps_suffice_and_a_run_that_logged_something_else_is_detected(copy: Path) -> None:
    with_another_loss(copy, 2)
    words = [str(copy), "--yes", "--steps", "2", "--into", str(copy.with_name("new"))]
    done = CliRunner().invoke(reproduce_command, words)
    assert done.exit_code == 1, done.output
    assert "they part at step 2" in done.output


def test_what_is_no_run_cannot_be_reproduced(tmp_path: Path) -> None:
    done = CliRunner().invoke(reproduce_command, [str(tmp_path), "--dry-run"])
    assert done.exit_code == 2
    assert "is no run directory" in done.output
