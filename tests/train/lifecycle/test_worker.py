"""A rank's process: it starts without looking at all that it imports, and one that fails ends at once, also if its report fails."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.process.exit_codes import EXIT_FAILED
from phalanx.run.directory.paths import RunDirectory
from phalanx.train.lifecycle import worker
from phalanx.train.lifecycle.ending import read_failure


class ProcessEnded(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDirectory]:
    """A directory without a run, given to ``worker.main`` in this process, which must not end by it."""

    def end(code: int) -> None:
        assert code == EXIT_FAILED
        raise ProcessEnded

    run_dir = tmp_path / "run"
    (run_dir / "logs").mkdir(parents=True)
    for name in ("PHALANX_RANK", "RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(worker, "set_for_rank", lambda: None)  # the variables would stay
    monkeypatch.setattr("sys.argv", ["worker", str(run_dir), "--attempt", "0"])
    monkeypatch.setattr(worker, "die_with_parent", lambda: None)
    monkeypatch.setattr(os, "_exit", end)
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    yield RunDirectory(run_dir)
    for number, handler in before:
        signal.signal(number, handler)


def test_no_collection_looks_at_what_was_imported_then_or_later() -> None:
    before = gc.get_freeze_count()
    with worker.without_gc():
        assert not gc.isenabled()
        modules = [[number] for number in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(modules)


def be_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    for name, value in (("RANK", str(rank)), ("RANKS", "4"), ("MEETING_POINT", "file:///nowhere")):
        monkeypatch.setenv(f"PHALANX_{name}", value)


def test_a_rank_files_its_error_and_ends(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    be_rank(monkeypatch, 3)
    with pytest.raises(ProcessEnded):
        worker.main()
    failure = read_failure(directory.log(0, 3))
    assert failure is not None
    assert (failure.kind, failure.rank) == ("RunDirectoryError", 3)


@pytest.mark.usefixtures("directory")
def test_a_rank_ends_where_its_error_cannot_be_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object) -> None:
        raise UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed")

    be_rank(monkeypatch, 3)
    monkeypatch.setattr(worker, "report_failure", broken)
    with pytest.raises(ProcessEnded):
        worker.main()


def test_an_error_before_the_rank_is_known_is_nobodys_record(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ProcessEnded):
        worker.main()
    assert "error: torchrun gave this process a rank but no address" in capsys.readouterr().err
    assert os.listdir(directory.logs) == []
