"""What a run is shown on may fail without ending the run."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
from rich.console import Console

from phalanx.cli.train.session import DisplayStream


def test_a_full_disk_behind_the_display_is_named_once_and_ends_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it fails too
    console = Console(file=DisplayStream(full), highlight=False)
    for step in range(5):
        console.print(f"step {step}" + "." * 10_000)
    with suppress(OSError):
        full.close()
    assert capfd.readouterr().err.count("No space left on device; training continues") == 1


def test_a_reader_that_has_gone_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    pipe = open(writing, "w")  # noqa: SIM115 - closing it fails too
    console = Console(file=DisplayStream(pipe), highlight=False)
    console.print("step 1")
    console.print("step 2")
    with suppress(OSError):
        pipe.close()
    assert "training continues" in capfd.readouterr().err
