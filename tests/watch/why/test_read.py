"""Reading of a run directory for ``phalanx why``: bounded for any content, and without a lock."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from phalanx.observe.event_log import read_events
from phalanx.observe.events import Message, RunStarted
from phalanx.observe.rank_stream import RANK_COLUMNS, RankFrame, RankStreamWriter
from phalanx.observe.record.notes import Machine
from phalanx.run.directory.paths import RunDirectory
from phalanx_watch.why import reasons
from phalanx_watch.why.reasons import judge, observe, read_ends
from watch.why.watched import Watched, step, steps


def test_all_of_a_short_stream_is_read(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    run.write(steps(1, 50))
    assert read_ends(run.directory.events) == ([], list(read_events(run.directory.events)), [])


def test_the_end_of_a_long_stream_is_read_and_samples_of_the_past_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_TAIL_BYTES", 20_000), ("_HEAD_BYTES", 2000), ("_SAMPLE_BYTES", 2000)):
        monkeypatch.setattr(reasons, name, value)
    run = Watched(tmp_path)
    run.write(steps(1, 500))
    everything = list(read_events(run.directory.events))
    past, newest, unreadable = read_ends(run.directory.events)
    assert newest == everything[-len(newest) :]
    assert len(newest) < 100
    assert not unreadable
    assert past[0] == everything[0]
    numbers = [getattr(event.body, "step", 0) for event in past]
    assert numbers == sorted(numbers)
    assert all(event in everything for event in past)


@pytest.mark.parametrize("seed", range(8))
def test_damage_anywhere_breaks_no_answer(tmp_path: Path, seed: int) -> None:
    run, chance = Watched(tmp_path), random.Random(seed)
    run.write(steps(1, 60))
    run.fleet()
    (tmp_path / "record.json").write_text('{"attempts": 1, "data_fingerprint": 7}')
    (tmp_path / "run.toml").write_text("[train]\nsteps = 9\n")
    for path in (
        run.directory.events,
        tmp_path / "fleet.json",
        tmp_path / "record.json",
        tmp_path / "run.toml",
    ):
        content = bytearray(path.read_bytes())
        for _ in range(20):
            content[chance.randrange(len(content))] = chance.randrange(256)
        path.write_bytes(content[: chance.randrange(1, len(content))])
    judge(observe(run.directory, run.t))


def test_a_folder_with_nothing_in_it_has_no_reasons(tmp_path: Path) -> None:
    assert judge(observe(RunDirectory(tmp_path), 0.0)) == []
    assert judge(observe(RunDirectory(tmp_path / "gone"), 0.0)) == []


def test_a_stream_that_cannot_be_read_is_a_reason_and_one_that_is_not_there_yet_is_none(
    tmp_path: Path,
) -> None:
    run = Watched(tmp_path)
    run.directory.events.unlink(missing_ok=True)
    assert "events-unreadable" not in [reason.code for reason in judge(observe(run.directory, 0.0))]
    run.directory.events.mkdir()  # a file that cannot be read, for root too
    (reason,) = [
        reason for reason in judge(observe(run.directory, 0.0)) if reason.code == "events-unreadable"
    ]
    assert reason.severity == "critical"
    assert reason.evidence == ("it is no file",)


def damage(run: Watched, first: int, content: bytes) -> int:
    """Overwrite the stream from the line of a step on, and return the offset."""
    stream = bytearray(run.directory.events.read_bytes())
    offset = stream.index(f'"kind":"Step","step":{first},'.encode()) - 20
    stream[offset : offset + len(content)] = content
    run.directory.events.write_bytes(stream)
    return offset


def test_lines_that_cannot_be_read_are_named_with_the_steps_around_them(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    run.write(steps(1, 60))
    damage(run, 20, bytes(900))  # a block that a power cut has lost, with more than two lines
    damage(run, 40, b"#")
    for changes in ({}, {"finished": True, "is_held": False}):
        (reason,) = run.reasons(**changes)
        assert (reason.code, reason.severity) == ("events-unreadable", "warning")
        assert "2 lines" in reason.title
        assert reason.evidence[0].endswith("between steps 19 and 23")
        assert reason.evidence[1].endswith("between steps 39 and 41")


def test_an_unfinished_last_line_is_no_reason_also_once_a_later_start_has_closed_it(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    run.write(steps(1, 30))
    stream = run.directory.events.read_bytes()
    run.directory.events.write_bytes(stream[:-40])
    assert run.codes() == []
    run.write([Message("warning", "a process beside the ranks")], attempt=7)
    assert run.codes() == []
    run.write([RunStarted("r", 100_000, ranks=4), *steps(21, 40)], attempt=1)
    assert run.codes() == []


def test_lost_blocks_at_the_end_of_a_start_are_named(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    run.write(steps(1, 30))
    with run.directory.events.open("ab") as file:
        file.write(bytes(512))
    run.write([RunStarted("r", 100_000, ranks=4), *steps(21, 40)], attempt=1)
    (reason,) = run.reasons()
    assert reason.evidence == (
        f"512 bytes from byte {run.directory.events.read_bytes().index(bytes(512)):,} are no event, between steps 30 and 21",
    )


def test_nested_and_endless_lines_are_passed_over(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    with run.directory.events.open("ab") as file:
        file.write(b"[" * 200_000 + b"\n" + b"x" * 300_000 + b"\n" + b'{"t":1e999}\n\xff\xfe\n')
    run.write([step(7)])
    assert [event.body for event in read_ends(run.directory.events)[1]][-1] == step(7)


def test_a_library_that_one_node_has_otherwise_is_read_with_the_node(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    run.directory.machines.mkdir()
    for node, torch in (("node-0", "2.13.0"), ("node-1", "2.13.0"), ("node-2", "2.12.1")):
        machine = Machine(node, node, 0, 1.0, packages={"torch": torch})
        (run.directory.machines / f"{node}.json").write_bytes(msgspec.json.encode(machine))
    (sentence,) = observe(run.directory, run.t).machines
    assert sentence == "torch: node-2 with 2.12.1; the others with 2.13.0"
    run.write(steps(1, 3))
    assert "mixed-machines" in run.codes()


def test_a_rank_that_computes_longer_than_its_peers_is_read_from_the_stream_of_ranks(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    (tmp_path / "run.toml").write_text('[data]\npath = "words"\n')
    run.write(steps(1, 80))
    with RankStreamWriter(run.directory.ranks) as writer:
        for window in range(1, 9):
            compute = np.array([1.0, 1.01, 0.99, 1.6], np.float32)
            columns = {name: np.full(4, np.nan, np.float32) for name in RANK_COLUMNS} | {"compute_s": compute}
            writer.append(RankFrame(10 * window, run.t + window, 0, 4, columns, 10))
    stragglers = [reason for reason in run.reasons() if reason.code == "straggler"]
    assert [reason.where for reason in stragglers] == ["rank 3"]


@pytest.mark.parametrize(("windows", "codes"), [(20, []), (80, ["straggler"])])
def test_ranks_are_not_compared_over_a_moment(tmp_path: Path, windows: int, codes: list[str]) -> None:
    run = Watched(tmp_path)
    (tmp_path / "run.toml").write_text('[data]\npath = "words"\n')
    run.write(steps(1, 80))
    with RankStreamWriter(run.directory.ranks) as writer:
        for window in range(1, windows + 1):
            compute = np.array([1.0, 1.01, 0.99, 1.6], np.float32)
            columns = {name: np.full(4, np.nan, np.float32) for name in RANK_COLUMNS} | {"compute_s": compute}
            writer.append(RankFrame(10 * window, run.t + 0.1 * window, 0, 4, columns, 10))
    assert run.codes() == codes


def test_the_memory_that_grows_most_is_read_from_the_stream_of_ranks_without_the_first_part(
    tmp_path: Path,
) -> None:
    run = Watched(tmp_path)
    run.write(steps(1, 80))
    with RankStreamWriter(run.directory.ranks) as writer:
        for window in range(61):
            memory = np.array([8.0, 8.0 + max(window, 10), 9.0], np.float32) * (1 << 30)
            columns = {name: np.full(3, np.nan, np.float32) for name in RANK_COLUMNS} | {
                "memory_bytes": memory
            }
            writer.append(RankFrame(10 * window, run.t + window, 0, 3, columns, 10))
    seen = observe(run.directory, run.t).memory
    assert seen is not None
    assert (seen.rank, seen.alike, seen.ranks) == (1, 1, 3)
    assert seen.steps == (100, 200, 300, 400, 500, 600)
    assert [size / (1 << 30) for size in seen.sizes] == pytest.approx([18, 28, 38, 48, 58, 68], rel=1e-3)


@pytest.mark.parametrize(
    ("every", "late", "others", "named"),
    [(5, 1.8, 0.02, ["rank 3"]), (5, 1.8, 0.9, []), (20, 99.0, 0.06, [])],
)
def test_a_rank_that_is_late_in_bursts_is_named_unless_all_are_or_it_was_one_pause(
    tmp_path: Path, every: int, late: float, others: float, named: list[str]
) -> None:
    run = Watched(tmp_path)
    (tmp_path / "run.toml").write_text('[data]\npath = "words"\n')
    run.write(steps(1, 80))
    with RankStreamWriter(run.directory.ranks) as writer:
        for window in range(1, 21):
            compute = np.array([1.0, 1.0, 1.0, 1.0], np.float32)
            compute[3] += late * (window % every == 1)
            compute[window % 3 if every == 5 else 3] += others * (window % 2)
            columns = {name: np.full(4, np.nan, np.float32) for name in RANK_COLUMNS} | {"compute_s": compute}
            writer.append(RankFrame(10 * window, run.t + window, 0, 4, columns, 10))
    reasons = [reason for reason in run.reasons() if reason.code == "straggler"]
    assert [reason.where for reason in reasons] == named
    assert all("late in bursts" in reason.title for reason in reasons)
