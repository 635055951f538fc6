"""The parts of a training session that all ways to train from the command line share.

They are the console, the display of events while ranks run, and the final messages and table of a run. rich
is imported only when something is shown.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

import click

from phalanx.cli.output import text_console, unfiltered
from phalanx.launch.engines.order import FOLDER
from phalanx.observe.display.curve import keep_drawn
from phalanx.observe.display.terminal import show_events
from phalanx.observe.event_log import EventLogError, follow
from phalanx.observe.ledger import Recovery
from phalanx.plugins import load_plugin
from phalanx.run.directory.paths import (
    RunDirectory,
    RunDirectoryError,
    RunResult,
    newest_in_words,
    read_resolved,
    step_of,
)
from phalanx.run.rules import Comparison, compared
from phalanx.run.spec import RunSpec, SampleSpec
from phalanx.train.lifecycle.ending import Ending
from phalanx.train.start.open_run import OpenRun, key_of, note_of_fallback
from phalanx.train.start.origins import changes_from_parent, notes_of_earlier_data

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


# The stream that a run is shown on: a full disk or a closed pipe behind it does not end the run.


class DisplayStream(io.TextIOBase):
    """Stream that writes to ``stream`` until that fails, then warns once on stderr and drops all later output."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._failed = False

    @property
    def encoding(self) -> str:  # type: ignore[override]  # read by rich, which never sets it
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Write ``text`` and return its length. After a failure, text is dropped."""
        if not self._failed:
            try:
                self._stream.write(text)
            except (OSError, ValueError) as error:  # ValueError: it was closed.
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream; does nothing after a failure."""
        if not self._failed:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        with suppress(OSError, ValueError):  # Writing to stderr may have failed too.
            print(f"warning: the display failed: {error}; training continues", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class FleetStory:
    """The faults, recoveries and ledger of a fleet during this start; its fields are added to the result's JSON."""

    faults: tuple[str, ...]
    """The requested faults that happened."""
    faults_missed: tuple[str, ...]
    """The requested faults that did not happen: the rank or node did not exist in that step."""
    recoveries: tuple[Recovery, ...]
    ledger: dict[str, float]
    """Seconds by ledger bucket, over all epochs."""


def console_for(as_json: bool) -> Console:
    """Return the console for people: on stderr if stdout is to carry JSON. A failed write does not end a run."""
    return text_console(file=cast("TextIO", DisplayStream(unfiltered(sys.stderr if as_json else sys.stdout))))


def progress_on(console: Console) -> Callable[[str, int, int], None]:
    """Return a callback ``(label, done, total)`` that prints the progress of data preparation: at most once a
    second for each label, and at its end.
    """
    last_s: dict[str, float] = {}

    def show(label: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if done == total or now_s - last_s.get(label, 0.0) > 1.0:
            last_s[label] = now_s
            console.print(f"{label} {done:,}" + (f" of {total:,}" if total else ""), style="dim")

    return show


def event_display(run: OpenRun, console: Console) -> Callable[[Callable[[], bool]], None]:
    """Return a function for launchers that shows the events of this attempt until ``ended()``, and keeps the loss
    curve drawn.

    A broken display (for example a closed pipe) does not end a run: it prints a warning and returns.
    """

    def show(ended: Callable[[], bool]) -> None:
        events = (event for event in follow(run.directory.events, ended) if event.attempt >= run.attempt)
        run.directory.events.touch()
        drawn = keep_drawn(events, run.directory.events, run.directory.curve)
        try:
            show_events(drawn, console, live=console.is_terminal)
        except Exception as error:
            # stderr may be broken too.
            with suppress(OSError):
                text = f"{error}" if isinstance(error, EventLogError) else f"{error!r}"
                click.echo(f"warning: the display failed: {text}; training continues", err=True)
                if not run.directory.path.is_dir():
                    click.echo(
                        f"warning: {run.directory.path} is gone, renamed or removed: move it back, since no checkpoint can be saved "
                        "before",
                        err=True,
                    )

    return show


def print_on(console: Console) -> Callable[[str], None]:
    """Return a function for launchers that prints the reaction to a request to stop."""
    return lambda words: console.print(words, style="yellow", soft_wrap=True)


def print_beginning(written: RunSpec, run: OpenRun, console: Console) -> None:
    """Print which checkpoint a child run continues from, with the settings that differ from its parent's; which runs of this
    run file are superseded because their dataset was prepared again; and why the numerics that ``written`` leaves open are
    native, if they are.
    """
    checkpoint = run.spec.checkpoint
    if checkpoint.init_with == "training":
        start = Path(checkpoint.init_from)
        console.print(f"continues from {start}")
        with suppress(RunDirectoryError):  # The parent may have been removed.
            for change in changes_from_parent(
                read_resolved(RunDirectory(start.parent.parent)), run.spec, step_of(start) or 0
            ):
                _print_marked(console, "from there on", change)
    for note in notes_of_earlier_data(run):
        _print_marked(console, "note:", note)
    if note := note_of_fallback(written, run.spec):
        _print_marked(console, "note:", note)


def _print_marked(console: Console, mark: str, text: str) -> None:
    from rich.text import Text

    console.print(Text.assemble((mark, "yellow"), f" {text}"), soft_wrap=True)


def report_finished(spec: RunSpec, run_file: Path, result: RunResult, console: Console, as_json: bool) -> int:
    """Report a run that is complete, after checking that the directory is of this run file and data. Return the
    exit code 0.

    Raises as ``prepare_run`` does.
    """
    from phalanx.train.start.prepare import prepare_run

    run = prepare_run(spec, run_file, progress_on(console))  # Checks that it is this run's directory.
    os.close(run.lock_fd)
    console.print(f"{run.directory.path} is complete: {result.step} steps, nothing to do")
    if result.early_stop is not None:
        console.print(
            f"it ended before step {spec.train.steps}, since {result.early_stop}; to train on, change evaluation.stop_after: "
            f"phalanx train {shlex.quote(str(run.directory.path))} --set evaluation.stop_after=0",
            soft_wrap=True,
        )
    _report(run.directory, run.spec, console, as_json, None)
    return 0


def resume_command(run_dir: Path, words: Sequence[str], *, child: bool) -> str:
    """Return the command that continues a run that was started with ``words``.

    For a child run it names its directory, since the original command would look for the parent again. A
    submitted run's ``words`` are those of a job on one of its nodes.
    """
    frozen = (run_dir / FOLDER / "run.toml").resolve()
    if any(Path(word).resolve() == frozen for word in words):
        return "the same phalanx submit"
    return shlex.join([*_program(), *(["train", str(run_dir)] if child else words)])


def conclude(run: OpenRun, ending: Ending, console: Console, as_json: bool, story: FleetStory | None) -> int:
    """Print how a run ended, with the fleet's ``story`` if it had one, and the command that continues it. Return
    the exit code.

    0 finished, 1 failed, else that of a stop.
    """
    for fault in story.faults_missed if story else ():
        _print_marked(console, "did not happen:", f"{fault}: its moment was not reached")
    if ending.status == "finished":
        _report(run.directory, run.spec, console, as_json, story)
        return 0
    again = resume_command(
        run.directory.path, sys.argv[1:], child=run.spec.checkpoint.init_with == "training"
    )
    if ending.status == "stopped":
        step = max(run.directory.committed_steps(), default=0)
        how = f"{ending.message or 'stopped'}{' without saving' if ending.unsaved else ''};"
        # The last save may have failed, and on a full disk no event records that.
        _print_marked(console, how, f"{newest_in_words(step)}; to continue: {again}")
        if as_json:
            fleets = {"unsaved_steps": ending.unsaved_steps} if story else {}
            click.echo(json.dumps({"stopped": True, "saved_step": step} | fleets))
        return ending.exit_code
    who = "" if ending.failed_rank is None else f"rank {ending.failed_rank}: "
    click.echo(f"error: {who}{ending.message}", err=True)
    if run.directory.committed_steps():
        click.echo(f"To continue from the newest checkpoint: {again}", err=True)
    return 1


def _program() -> list[str]:
    """Return the words with which the user starts this program: phalanx, python -m phalanx, or the path of the
    script.
    """
    started = Path(sys.argv[0])
    if started.name == "__main__.py":
        return [sys.executable, "-m", "phalanx"]
    installed = shutil.which("phalanx")
    if installed is not None and started.exists() and os.path.samefile(installed, started):
        return ["phalanx"]
    return [str(started)]


def _report(
    directory: RunDirectory, spec: RunSpec, console: Console, as_json: bool, story: FleetStory | None
) -> None:
    """Print a finished run's sample, if a prompt is set, and the table of its result.

    With ``as_json``, also one JSON object on standard output, with the story and the comparison with expected
    weights.
    """
    result = directory.finished_result()
    assert result is not None
    table = result.to_json() | (asdict(story) if story else {})
    text = _sample(directory.path, spec.sample, console) if spec.sample.prompt else None
    if text is not None:
        console.rule("sample", align="left")
        console.print(text)
        console.rule()
        table["sample"] = text
    record = directory.read_record()
    key = key_of(str(record.get("identity", "")), str(record.get("data_fingerprint", "")))
    comparison = compared(spec, key, result.weights_sha256)
    if comparison is not None:
        table["expected_weights"] = comparison
    console.print(result_table(result, directory, _program(), comparison))
    if as_json:
        click.echo(json.dumps(table))


def _sample(path: Path, sample: SampleSpec, console: Console) -> str | None:
    """Return the text that the run's weights continue ``sample`` with; print the reason and return ``None`` if that
    fails.
    """
    sampler = load_plugin("phalanx.samplers", "phalanx")
    if sampler is None:
        console.print(
            "no sample: no package that generates text is installed: pip install --force-reinstall --no-deps phalanx-train",
            style="yellow",
        )
        return None
    try:
        text: str = sampler(path, sample)
        return text
    except Exception as error:  # The run has ended well: its result is printed even if the sample fails.
        console.print(f"no sample: {error}", style="yellow")
        return None


# The closing table of a run.


_ABOVE = " (above the measured peak: other work slowed that measurement when the run began)"


_COMPARED = {
    "equal": (
        ("equal", "green"),
        " to the hash in the run file: this machine computes what others have computed",
    ),
    "different": (
        ("different", "red"),
        " from the hash in the run file: please report it with the file record.json of the run directory",
    ),
    "not expected": (("not compared", ""), ": the run file has no hash for this run on this dataset"),
}


def result_table(
    result: RunResult,
    directory: RunDirectory,
    program: Sequence[str] = ("phalanx",),
    comparison: Comparison | None = None,
) -> Table:
    """Return the figures by which runs are compared, in two columns, and the command that shows them beside other
    runs'.

    ``program`` are the words by which this program is called. ``comparison`` adds a row on the weights that the run
    file expects.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for label, value in _rows(result, directory):
        table.add_row(label, value)
    if comparison is not None:
        run = f" ({directory.path.name})" if comparison == "not expected" else ""
        table.add_row("expected", Text.assemble(*_COMPARED[comparison], run))
    table.add_row("see all of it", page_command(directory, program))
    return table


def page_command(directory: RunDirectory, program: Sequence[str]) -> str:
    """Return the command that opens the page over the run's parent folder, which is left out if it is the usual one."""
    folder = directory.path.parent
    usual = folder.resolve() == (Path.cwd() / "runs").resolve()
    return shlex.join([*program, "ui", *([] if usual else [str(folder)])])


def _rows(result: RunResult, directory: RunDirectory) -> Iterator[tuple[str, str]]:
    """Yield label and text: bits per byte of the held-out text, speed, run directory, loss curve, and hash of the weights.

    Bits per byte and speed are left out if they are unknown.
    """
    if result.bits_per_byte is not None:
        text = f"{result.bits_per_byte:.3f} bits per byte"
        if result.xz_bits_per_byte is not None:
            text += f" (xz -9 reaches {result.xz_bits_per_byte:.3f} on the same text)"
        yield "held-out text", text
    if result.tokens_per_s and result.mfu is not None:
        yield (
            "speed",
            f"{result.tokens_per_s:,.0f} tokens/s, MFU {result.mfu:.1%} of {result.peak_source}{_ABOVE if result.mfu > 1 else ''}",
        )
    yield "run directory", str(directory.path)
    yield "loss curve", str(directory.curve)
    yield "weights", f"sha256 {result.weights_sha256}"
