"""The message with which a job of a preparation has ended is read from the end of its log, beside any other output."""

from __future__ import annotations

from pathlib import Path

from phalanx.data.portions.clusters import failure_message
from traced_memory import peak_and_found


def test_the_newest_message_counts(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    assert failure_message(log) == ""
    log.write_text("read 3 files\nError: part-0 is torn\nretried\nError: part-1 is torn\nslurmstepd: done\n")
    assert failure_message(log) == "part-1 is torn"
    log.write_text("read 3 files\n")
    assert failure_message(log) == ""


def test_a_filter_that_prints_without_newlines_costs_no_memory_and_hides_no_message(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    with log.open("wb") as file:
        for _ in range(64):
            file.write(b"." * (1 << 20))
        file.write(b"\nError: part-1 is torn\n")
    peak, message = peak_and_found(
        tmp_path,
        "from pathlib import Path\nfrom phalanx.data.portions.clusters import failure_message",
        f"found = failure_message(Path({str(log)!r}))",
    )
    assert message == "part-1 is torn"
    assert peak < 4 << 20
