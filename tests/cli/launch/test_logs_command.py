"""The logs of real runs: who failed first, what is shown of it, and a disk that takes no logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from forked_python import Popen
from phalanx.cli.fleet import status_command
from phalanx.cli.launch import logs_command
from phalanx.cli.launch.logs_command import moment, ranks_of
from phalanx.fleet.control.fleet_file import write_fleet_file
from phalanx.fleet.core.state import FleetPhase
from phalanx.launch.engines.submission import Submitted
from phalanx.observe.logs.line import LogLine, encode
from phalanx.observe.logs.read_lines import LogQuery, first_logged_failure, read_lines
from phalanx.run.directory.paths import RunDirectory
from phalanx_process import ENVIRONMENT, TIMEOUT_S, last_json, run
from traced_memory import peak_and_found
from watch.why.watched import fleet_file

MODEL = """
import os

from examples.mixer import GatedConvolution, Mixer


class Fails(GatedConvolution):
    called = 0

    def forward(self, x):
        self.called += 1
        if self.called == 9 and os.environ.get("PHALANX_RANK") == "1":
            raise ValueError("bad luck on one")
        return super().forward(x)


def build(spec):
    model = Mixer(spec)
    model.blocks[0] = Fails(spec.dim)
    return model
"""
PROGRAM = """
import phalanx
spec = phalanx.read_run_file("tiny.toml", "parallel.ranks=3", "run_dir=failed")
try:
    phalanx.train_run(spec, model="failing:build")
except RuntimeError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def failed(folder: Path) -> tuple[RunDirectory, str]:
    """A run of three ranks of which rank 1 has raised, and what its user was told."""
    (folder / "failing.py").write_text(MODEL)
    (folder / "program.py").write_text(PROGRAM)
    path = [str(Path(__file__).parents[3]), ENVIRONMENT.get("PYTHONPATH", "")]
    process = Popen(
        [sys.executable, "program.py"],
        cwd=folder,
        env={**ENVIRONMENT, "PYTHONPATH": ":".join(filter(None, path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        starts_others=True,
    )
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    return RunDirectory(folder / "failed"), out


def test_the_rank_that_raised_is_told_from_those_that_failed_because_of_it(
    failed: tuple[RunDirectory, str],
) -> None:
    directory, told_user = failed
    assert told_user.startswith("rank 1 ended with exit code 1")
    assert "ValueError: bad luck on one" in told_user
    failure = first_logged_failure(directory)
    assert failure is not None
    assert failure.line.rank == 1
    assert failure.line.step is not None
    assert failure.line.text.endswith("ValueError: bad luck on one")
    assert {line.rank for line in failure.followers} == {0, 2}


def test_it_is_shown_before_the_lines_and_those_can_be_chosen(
    failed: tuple[RunDirectory, str], folder: Path
) -> None:
    shown = run(["logs", "failed", "--level", "error"], folder)
    assert shown.stderr.startswith("first failure: rank 1 on ")
    assert "ValueError: bad luck on one" in shown.stdout
    line = last_json(
        run(["logs", "failed", "--rank", "1", "--grep", "bad LUCK", "--since", "1d", "--json"], folder)
    )
    assert (line["rank"], line["level"], line["process"]) == (1, "error", "rank-00001")
    groups = run(
        ["logs", "failed", "--grouped", "--json", "--grep", "its process ended"], folder
    ).stdout.splitlines()
    assert [(group["count"], group["place"].partition(" on ")[0]) for group in map(json.loads, groups)] == [
        (3, "ranks 0-2")
    ]
    assert read_lines(failed[0], LogQuery(ranks=(range(7, 8),))) == []


def test_a_disk_that_takes_no_logs_changes_neither_the_run_nor_its_bits(
    folder: Path, result: dict[str, Any]
) -> None:
    logs = folder / "full" / "logs"
    logs.mkdir(parents=True)
    for rank in (0, 1):
        for name in (f"attempt-000-rank-{rank:05d}.jsonl", f"attempt-000-rank-{rank:05d}.out.jsonl"):
            (logs / name).symlink_to("/dev/full")
    done = run(
        ["train", "tiny.toml", "--ranks", "2", "--set", "train.steps=6", "--set", "run_dir=full", "--json"],
        folder,
    )
    assert last_json(done)["weights_sha256"] == result["weights_sha256"]
    output = " ".join((done.stdout + done.stderr).split())
    assert output.count("cannot be written: No space left on device") == 1


def test_lines_are_shown_with_their_place_and_cannot_command_the_terminal(folder: Path) -> None:
    logs = folder / "hostile" / "logs"
    logs.mkdir(parents=True)
    line = LogLine(1e9, "warning", "node-1", 3, 2, 0, 117, "\x1b]0;owned\x07two\nlines", "node-1-0")
    (logs / "attempt-000-node-1-0.jsonl").write_bytes(encode(line))
    shown = run(["logs", "hostile"], folder).stdout
    assert "W node-1-0 r3 s117 | two\n    lines\n" in shown
    assert "\x1b" not in shown


def test_a_folder_without_logs_is_named(folder: Path) -> None:
    (folder / "unused").mkdir(exist_ok=True)
    done = run(["logs", "unused"], folder)
    assert done.returncode == 1
    assert "no run was started in unused yet" in done.stderr


def test_a_choice_that_no_line_fits_is_reported(tmp_path: Path) -> None:
    logs = RunDirectory(tmp_path).logs
    logs.mkdir()
    (logs / "attempt-000-node-1-0.jsonl").write_bytes(
        encode(LogLine(1e9, "info", "node-1", 3, 2, 0, 117, "text", "node-1-0"))
    )
    for options, is_reported in (
        (["--rank", "4"], True),
        (["--node", "nod-1"], True),
        (["--rank", "3"], False),
    ):
        result = CliRunner().invoke(logs_command.command, [str(tmp_path), *options])
        assert (result.exit_code, "fits the options" in result.stderr) == (0, is_reported)


def test_logs_without_a_line_blame_no_option_where_none_is_given(tmp_path: Path) -> None:
    RunDirectory(tmp_path).logs.mkdir()
    result = CliRunner().invoke(logs_command.command, [str(tmp_path)])
    assert (result.exit_code, result.stderr) == (0, f"no line in {tmp_path / 'logs'} yet\n")


def test_times_and_ranks_are_read_as_people_write_them() -> None:
    assert [moment(words, 1e6) for words in ("90s", "10m", "1.5h", "1d")] == [
        999_910,
        999_400,
        994_600,
        913_600,
    ]
    assert moment("2026-11-25T07:20:00+00:00", 0) == 1795591200
    assert list(ranks_of("3,8-10")) == [range(3, 4), range(8, 11)]
    for wrong in ("soon", "10 parsecs"):
        with pytest.raises(click.BadParameter, match="is no time"):
            moment(wrong, 0)
    for wrong in ("x", "15-8", "3,8-7", "", "9" * 5000):
        with pytest.raises(click.BadParameter, match="is no rank"):
            list(ranks_of(wrong))


def test_bounds_without_a_time_between_them_are_refused(tmp_path: Path) -> None:
    RunDirectory(tmp_path).logs.mkdir()
    result = CliRunner().invoke(logs_command.command, [str(tmp_path), "--since", "10m", "--until", "20m"])
    assert result.exit_code == 2
    assert '"20m" is before "10m"' in result.output


@pytest.mark.parametrize(
    ("engine", "of_this_start", "printed"),
    [("ssh", True, "host-1"), ("ssh", False, "host-0"), ("local", True, "host-0")],
)
def test_the_log_is_that_of_the_host_that_leads_now(
    engine: str, of_this_start: bool, printed: str, tmp_path: Path
) -> None:
    folder = tmp_path / "launch"
    folder.mkdir()
    for name in ("host-0", "host-1"):
        (folder / f"{name}.log").write_text(f"{name} says\n")
    made = Submitted(engine, "2 hosts", "tiny", 2, 0, 0.0, str(tmp_path), leader="host-0")
    (folder / "submitted.json").write_text(json.dumps(asdict(made)))
    write_fleet_file(tmp_path, fleet_file(0.0, leader="host-1", reign=2, phase=FleetPhase.FINISHED))
    (folder / "job.sh").touch()
    then_s = (tmp_path / "fleet.json").stat().st_mtime
    os.utime(folder / "job.sh", (then_s, then_s - 60 if of_this_start else then_s + 60))
    assert CliRunner().invoke(logs_command.command, [str(tmp_path)]).output == f"{printed} says\n"
    invocation = CliRunner().invoke(status_command.command, [str(tmp_path)])
    assert f"its log is {folder / printed}.log" in invocation.output


def submitted_log(folder: Path) -> Path:
    """The log of a job that somebody has submitted for the run in ``folder``."""
    (folder / "launch").mkdir(parents=True)
    made = Submitted("ssh", "1 host", "tiny", 1, 0, 0.0, str(folder), leader="host-0")
    (folder / "launch" / "submitted.json").write_text(json.dumps(asdict(made)))
    return folder / "launch" / "host-0.log"


@given(
    lines=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=4), max_size=6),
    last=st.integers(0, 7),
    is_torn=st.booleans(),
)
def test_the_last_lines_of_a_job_are_those_of_its_log(
    lines: list[str], last: int, is_torn: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_dir = tmp_path_factory.mktemp("run") / "run"
    log = submitted_log(run_dir)
    ended = [f"{line}\n" for line in lines]
    ended += ["torn"] if is_torn else []
    log.write_text("".join(ended), newline="")
    printed = CliRunner().invoke(
        logs_command.command, [str(run_dir), "--job", "--last", str(last)], color=True
    )
    assert printed.output_bytes.decode() == "".join(ended[-last:])


@pytest.mark.parametrize("last", [0, 2])
def test_a_log_of_a_job_without_newlines_is_printed_in_bounded_memory(last: int, tmp_path: Path) -> None:
    with submitted_log(tmp_path / "run").open("wb") as log:
        log.write(b"first\n")
        for _ in range(64):
            log.write(b"\0" * (1 << 20))
        log.write(b"\nlast\n")
    peak, printed = peak_and_found(
        tmp_path,
        f"""
        import os, sys
        from phalanx.cli.launch.logs_command import command
        shown, sys.stdout = sys.stdout, open({str(tmp_path / "printed")!r}, "w")
        """,
        f"""
        command([{str(tmp_path / "run")!r}, "--job", "--last", "{last}"], standalone_mode=False)
        sys.stdout.close()
        sys.stdout = shown
        found = os.path.getsize({str(tmp_path / "printed")!r})
        """,
    )
    assert printed >= 64 << 20
    assert peak < 16 << 20
