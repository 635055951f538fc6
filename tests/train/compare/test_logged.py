"""Numbers of a run's event file with any content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from observe.recorded import step
from phalanx.observe.event_log import EventLog, EventLogError
from phalanx.run.directory.paths import RunDirectory
from phalanx.train.compare.runs import read_logged
from traced_memory import peak_and_found


def test_a_line_without_an_end_takes_no_memory_and_hides_no_step(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with EventLog(directory.events, 0) as log:
        log.append(step(1, 9, 3.0))
    os.truncate(directory.events, 256 << 20)
    with directory.events.open("ab") as file:
        file.write(b"\n")
    with EventLog(directory.events, 0) as log:
        log.append(step(2, 9, 2.0))
    peak, (torn, steps) = peak_and_found(
        tmp_path,
        f"""
        from pathlib import Path
        from phalanx.run.directory.paths import RunDirectory
        from phalanx.train.compare.runs import read_logged
        directory = RunDirectory(Path({str(tmp_path)!r}))
        """,
        """
        logged = read_logged(directory)
        found = [logged.torn_lines, sorted(logged.ranks)]
        """,
    )
    assert peak < 64 << 20
    assert (torn, steps) == (1, [1, 2])


def test_a_step_that_is_being_written_is_no_torn_line(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with EventLog(directory.events, 0) as log:
        log.append(step(1, 9, 3.0))
    with directory.events.open("ab") as file:
        file.write(b'{"t": 1')
    assert read_logged(directory).torn_lines == 0


def test_a_pipe_in_the_place_of_the_events_is_an_error(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    os.mkfifo(directory.events)
    with pytest.raises(EventLogError, match="cannot read"):
        read_logged(directory)
