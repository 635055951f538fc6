"""``phalanx why``: what is wrong with a run, since when, the evidence, and the next step; and notices of it.

A notice is a call of the user's own command for each reason that begins, and for its end. Mail, chat and pagers have programs of their
own; each is given a JSON object on standard input, and the same facts as environment variables.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import click

from phalanx.cli.errors import TroubleError, demand_folder
from phalanx.cli.output import moment
from phalanx.command import Argument, AsJson, Option, command_options
from phalanx.command_help import Command
from phalanx.launch.engines.engine import standing_or_end
from phalanx.launch.engines.order import FOLDER
from phalanx.observe.throughput import format_duration
from phalanx.run.directory.paths import RunDirectory
from phalanx_watch.why.observed import Code, Reason
from phalanx_watch.why.reasons import reasons

_TIMEOUT_S = 60.0
_ATTEMPTS = 3
Key = tuple[Code, str]
"""Code and place: a reason whose evidence or severity changes is the same reason."""


@dataclass(frozen=True)
class ReasonChange:
    """A reason that has begun or ended."""

    state: Literal["begins", "ends"]
    reason: Reason
    t: float
    """Unix seconds."""


class NoticeCommand:
    """Notifier that calls a shell command for each change of a run's reasons."""

    def __init__(self, command: str, run: str, warn: Callable[[str], None]) -> None:
        """Begin without known reasons. ``command`` is a shell command, ``warn`` receives its failures."""
        self._command, self._run, self._warn = command, run, warn
        self._delivered: dict[Key, Reason] = {}
        """Reasons of which the command knows, or for which it was given up."""
        self._failures: Counter[Key] = Counter()
        """Failed calls in a row, by reason."""

    def update(self, reasons: Sequence[Reason], t: float) -> None:
        """Take the present reasons, and call the command for each that it does not know of yet, and for the end of each that it does.

        A call that fails is made again by the next updates, three times in all. A reason that ends before it could be delivered is left out.
        """
        current = {(reason.code, reason.where): reason for reason in reasons}
        new = [ReasonChange("begins", current[key], t) for key in current if key not in self._delivered]
        ended = [
            ReasonChange("ends", self._delivered[key], t) for key in self._delivered if key not in current
        ]
        for change in (*new, *ended):
            self._deliver(change)

    def _deliver(self, change: ReasonChange) -> None:
        """Call the command for a change and record it as delivered, or after several failures as given up. Each failure is a warning."""
        key = change.reason.code, change.reason.where
        problem = self._call(change)
        self._failures[key] += bool(problem)
        is_given_up = self._failures[key] >= _ATTEMPTS
        if problem:
            after = "this notice is given up" if is_given_up else "it is called again"
            self._warn(f"--exec for {change.reason.code}, which {change.state}: {problem}; {after}")
        if problem and not is_given_up:
            return
        del self._failures[key]
        if change.state == "begins":
            self._delivered[key] = change.reason
        else:
            del self._delivered[key]

    def _call(self, notice: ReasonChange) -> str:
        """Run the command in a shell, with the change as JSON on its input and facts in variables; its output goes to
        standard error.

        Waits at most ``_TIMEOUT_S``. Return what is wrong with it, or an empty string.
        """
        body = {"run": self._run, "state": notice.state, "t": notice.t, "reason": asdict(notice.reason)}
        facts = {
            "PHALANX_RUN": self._run,
            "PHALANX_STATE": notice.state,
            "PHALANX_CODE": notice.reason.code,
            "PHALANX_SEVERITY": notice.reason.severity,
            "PHALANX_TITLE": notice.reason.title,
        }
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", self._command],
                input=json.dumps(body),
                text=True,
                env=os.environ | {name: text.replace("\0", "") for name, text in facts.items()},
                stdout=sys.stderr,  # standard output may be read as JSON
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"it has not ended within {_TIMEOUT_S:g} s"
        except OSError as error:
            return f"it cannot be started: {error.strerror}"
        return f"it ended with code {done.returncode}" if done.returncode else ""


# The command.


_POLL_S = 2.0
_ENGINE_S = 60.0
"""Seconds between queries of a scheduler, which all users share."""
_COLORS = {"critical": "red", "warning": "yellow", "info": "cyan"}
_NARROWEST = 40


@dataclass(frozen=True, kw_only=True)
class WhyOptions:
    run_dir: Annotated[Path, Argument()]
    as_json: AsJson = False
    """Print one JSON object; with --watch one a line, at each change."""
    follow: Annotated[bool, Option("--watch")] = False
    """Look again and again, and print what has changed, until Ctrl-C."""
    notice_command: Annotated[str | None, Option("--exec", metavar="COMMAND")] = None
    """With --watch: a shell command for each reason that begins, and for its end. It gets a JSON object on standard input, and
    PHALANX_RUN, PHALANX_STATE (begins or ends), PHALANX_CODE, PHALANX_SEVERITY and PHALANX_TITLE."""


@click.command("why", cls=Command)
@command_options(WhyOptions)
def command(options: WhyOptions) -> None:
    """Print what is wrong with the run in RUN_DIR: since when, the evidence, what is being done about it, and what to do next.

    Every reason is named, the worst first. Exit codes: 0 nothing is wrong, 1 warnings, 2 something critical, or
    no run there.

    \b
      phalanx why runs/quickstart-1f3a9c04
      phalanx why runs/quickstart-1f3a9c04 --json
      phalanx why runs/quickstart-1f3a9c04 --watch --exec 'mail -s "$PHALANX_TITLE" me@example.org'
      phalanx why runs/quickstart-1f3a9c04 --watch --exec 'curl -sf --data-binary @- https://example.org/hook'
    """
    run_dir, notice_command = options.run_dir, options.notice_command
    if notice_command is not None and not options.follow:
        raise click.UsageError("--exec is for --watch")
    if notice_command is not None and not notice_command.strip():
        raise click.UsageError(
            "--exec: the command is empty, so that no notice would go anywhere; name one, or leave --exec out"
        )
    demand_folder(run_dir, TroubleError)
    directory = RunDirectory(run_dir)
    if not (directory.events.exists() or directory.record.exists() or (run_dir / FOLDER).is_dir()):
        raise TroubleError(f"{run_dir} is no run directory: it has neither events.jsonl nor record.json")
    job, checked_s = standing_or_end(run_dir), time.monotonic()
    current = reasons(directory, time.time(), job)
    _print(current, directory, options.as_json)
    notices = None
    if notice_command is not None:
        notices = NoticeCommand(notice_command, str(run_dir), lambda text: click.echo(text, err=True))
        notices.update(current, time.time())
    while options.follow:
        time.sleep(_POLL_S)
        if time.monotonic() - checked_s >= _ENGINE_S:
            job, checked_s = standing_or_end(run_dir), time.monotonic()
        before, current = current, reasons(directory, time.time(), job)
        if [_key(reason) for reason in current] != [_key(reason) for reason in before]:
            _print(current, directory, options.as_json)
        if notices is not None:
            notices.update(current, time.time())
    severities = {reason.severity for reason in current}
    sys.exit(2 if "critical" in severities else 1 if "warning" in severities else 0)


def _key(reason: Reason) -> tuple[str, str, str]:
    """Return what identifies a reason: code, place and severity."""
    return reason.code, reason.where, reason.severity


def _print(reasons: list[Reason], directory: RunDirectory, as_json: bool) -> None:
    """Print the reasons, or that nothing is wrong; as one JSON object if ``as_json``."""
    now = time.time()
    if as_json:
        click.echo(
            json.dumps(
                {"run": str(directory.path), "t": now, "reasons": [asdict(reason) for reason in reasons]}
            )
        )
        return
    if not reasons:
        click.echo(f"nothing is wrong with {directory.path}")
    for number, reason in enumerate(reasons):
        if number:
            click.echo()
        _print_reason(reason, now)


def _print_reason(reason: Reason, now: float) -> None:
    """Print a reason's severity, title and code, and a row for each of its facts that is known."""
    head = click.style(reason.severity, fg=_COLORS[reason.severity], bold=True)
    click.echo(f"{head}  {click.style(' '.join(reason.title.split()), bold=True)}  [{reason.code}]")
    since = ""
    if reason.since is not None:
        since = f"{moment(reason.since)}, {format_duration(max(0.0, now - reason.since))} ago"
    rows = [("where", reason.where), ("since", since), *(("because", line) for line in reason.evidence)]
    for name, text in [*rows, ("doing", reason.doing), ("next", reason.next)]:
        if text:
            _print_row(name, text)


def _print_row(name: str, text: str) -> None:
    """Print a name and its text, wrapped to the terminal's width (at least ``_NARROWEST``) with a hanging indent."""
    width = max(_NARROWEST, shutil.get_terminal_size((120, 24)).columns)
    first, *lines = textwrap.wrap(text, width - 12, break_long_words=False, break_on_hyphens=False) or [""]
    click.echo(f"  {click.style(f'{name:<8}', dim=True)}{first}")
    for line in lines:
        click.echo(f"  {'':<8}{line}")
