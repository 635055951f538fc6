"""``phalanx ranks`` as a user sees it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from observe.rank_frames import drawn_frame
from phalanx.observe.rank_stream import HeatMap, RankFrame, RankStreamWriter
from phalanx_process import last_json, run
from phalanx_watch.cli.run_views import ranks_command, text_map

SLOW, RANKS = 5, 8


@pytest.fixture
def slow_run(folder: Path, result: dict[str, Any], tmp_path: Path) -> Path:
    """A run directory in which rank 5 of 8 has become slow."""
    run_dir = tmp_path / "run"
    shutil.copytree(folder / result["run_dir"], run_dir)
    with RankStreamWriter(run_dir / "ranks.bin") as writer:
        for step in range(10, 310, 10):
            writer.append(_frame(step, slow=step > 150))
    return run_dir


def _frame(step: int, *, slow: bool) -> RankFrame:
    frame = drawn_frame(1, step, RANKS, attempt=3)
    times = (0.2 + 0.001 * np.random.default_rng(step).random(RANKS)).astype(np.float32)
    times[SLOW] *= 1.5 if slow else 1.0
    return RankFrame(step, frame.t, 3, RANKS, {**frame.columns, "compute_s": times}, 10)


def shown(*arguments: str) -> str:
    done = CliRunner().invoke(ranks_command, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


def test_a_finished_run_shows_its_ranks(folder: Path, result: dict[str, Any]) -> None:
    output = last_json(run(["ranks", str(result["run_dir"]), "--json"], folder))
    assert (output["ranks"], output["first_step"], output["last_step"]) == (2, 1, 6)
    assert {entry["rank"] for entry in output["found"]} == {0, 1}
    assert all(entry["value"] > 0 for entry in output["found"])


def test_the_slow_rank_is_first_with_its_place_and_how_much_slower_it_is(slow_run: Path) -> None:
    output = json.loads(shown(str(slow_run), "--slow", "--last", "15", "--json"))
    (slowest,) = output["found"]
    assert (slowest["rank"], slowest["slow"], slowest["windows"], output["windows"]) == (SLOW, True, 15, 15)
    assert slowest["slowdown"] == pytest.approx(0.5, abs=0.02)
    assert slowest["place"]["shard"] == SLOW
    lines = shown(str(slow_run), "--last", "15").splitlines()
    assert "8 ranks, steps 151 to 300 of attempt 3" in lines[0]
    assert lines[2].split()[0] == str(SLOW)
    assert lines[2].split()[-1] == "slow"


def test_the_map_shows_since_when_it_is_slow(slow_run: Path) -> None:
    rows = {
        line.split()[0]: line.split()[-1] for line in shown(str(slow_run), "--last", "30").splitlines()[-9:-1]
    }
    assert rows.keys() == {str(rank) for rank in range(RANKS)}
    early, late = rows[str(SLOW)][: len(rows["5"]) // 2], rows[str(SLOW)][len(rows["5"]) // 2 :]
    assert set(late) == {"█"}
    assert set(early) == {"▁"}
    assert all(set(row) == {"▁"} for rank, row in rows.items() if rank != str(SLOW))


def test_nobody_is_slow_in_a_healthy_run(slow_run: Path) -> None:
    (slow_run / "ranks.bin").unlink()
    with RankStreamWriter(slow_run / "ranks.bin") as writer:
        for step in range(10, 100, 10):
            writer.append(_frame(step, slow=False))
    assert "no rank is slow" in shown(str(slow_run), "--slow")


@pytest.mark.parametrize(
    ("content", "remedy"),
    [(None, "observe.ranks_every_steps"), (b"something else", "Move it away")],
    ids=["no file", "another file"],
)
def test_a_run_without_numbers_is_refused_with_a_remedy(
    slow_run: Path, content: bytes | None, remedy: str
) -> None:
    (slow_run / "ranks.bin").unlink()
    if content is not None:
        (slow_run / "ranks.bin").write_bytes(content)
    done = CliRunner().invoke(ranks_command, [str(slow_run)])
    assert done.exit_code == 1
    assert remedy in done.output
    assert "ranks.bin" in done.output


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(ranks_command, [str(tmp_path / "nowhere")])
    assert done.exit_code == 1
    assert "nowhere" in done.output


def test_a_map_names_its_rows_by_their_ranks_and_marks_what_is_not_known() -> None:
    values = np.array([[1.0, np.nan], [2.0, 3.0]], np.float32)
    steps = np.array([10, 20])
    picture = HeatMap(
        values=values,
        rows=(range(50), range(50, 100)),
        drawn=np.arange(100),
        column_steps=steps,
        column_times=steps.astype(float),
        usual=values[0],
        reduced=True,
    )
    scale, upper, lower, axis = text_map(picture, 1.0, 2)
    assert "█ 3" in scale
    assert upper.split() == ["0-49", "▁·"]
    assert lower.split() == ["50-99", "▅█"]
    assert "20" in axis
