"""``phalanx logs``: the lines that a run's processes have logged; of a submitted run also the output of its job."""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import click

from phalanx.cli.errors import demand_folder, explained, refuse_unused
from phalanx.cli.launch.submit import leading_log, print_log
from phalanx.command import Argument, AsJson, Heading, Option, command_options, written_options
from phalanx.command_help import Command
from phalanx.launch.engines.engine import SubmittedRun, submission_of
from phalanx.launch.engines.order import EngineError
from phalanx.launch.engines.submission import read_record
from phalanx.observe.logs.assemble import clean
from phalanx.observe.logs.line import LogLine, encode, what_happened, who
from phalanx.observe.logs.read_lines import (
    Follower,
    LogGroup,
    LogQuery,
    LogQueryError,
    all_lines,
    first_logged_failure,
    grouped,
    read_lines,
    recovered_step,
)
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.fields import NOT_NEGATIVE

_Decoder = codecs.getincrementaldecoder("utf-8")
_BLOCK_BYTES = 1 << 20
_POLL_S = 0.5
_ASK_S = 5.0
_OF_LINES = ("ranks", "nodes", "level", "since", "until", "grep", "attempt", "grouped", "as_json")
"""Options that choose lines, or their form."""


@dataclass(frozen=True, kw_only=True)
class LogsOptions:
    run_dir: Annotated[Path, Argument()]
    ranks: Annotated[tuple[str, ...], Option("--rank", metavar="N|N-M"), Heading("Lines to print")] = ()
    """Only these ranks; may be given again."""
    nodes: Annotated[tuple[str, ...], Option("--node")] = ()
    """Only this node; may be given again."""
    level: Literal["debug", "info", "warning", "error"] | None = None
    """Only lines as serious as this, or more."""
    since: Annotated[str | None, Option(metavar="AGO|TIME")] = None
    """Only later lines: 90s, 10m, 2h, 1d ago, or an ISO time."""
    until: Annotated[str | None, Option(metavar="AGO|TIME")] = None
    """Only earlier lines."""
    grep: Annotated[str | None, Option(metavar="REGEX")] = None
    """Only lines that contain this text, in upper or lower case."""
    attempt: Annotated[int | None, NOT_NEGATIVE] = None
    """Only of this start of the run."""
    grouped: Annotated[bool, Heading("Output")] = False
    """Equal lines of many ranks and nodes are one line with a count."""
    as_json: AsJson = False
    """Lines of JSON, for programs."""
    follow: Annotated[bool, Option("--follow", "-f"), Heading("Output")] = False
    """Continue until the run is complete, or the job has ended."""
    last: Annotated[int, NOT_NEGATIVE] = 50
    """Begin with this many lines; 0: all."""
    job: Annotated[bool | None, Option("--job/--lines"), Heading("Job")] = None
    """The job's printed log, or the lines of its processes. By default the job's, of a submitted run for
    which no other option is given."""
    engine: Annotated[Literal["kubernetes"] | None, Option("--on")] = None
    """RUN_DIR is the name of a job there, as phalanx submit has printed it."""
    namespace: str = ""
    """With --on kubernetes: a namespace other than that of kubectl's context."""
    index: Annotated[int | None, NOT_NEGATIVE] = None
    """With --on kubernetes: the pod of this index; by default the leading pod."""


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_COLORS = {"error": "red", "warning": "yellow", "debug": "bright_black"}
_LETTERS = {"error": "E", "warning": "W", "debug": "D"}


def print_lines(options: LogsOptions) -> None:
    """Print the selected lines, the newest ``options.last`` (0: all), and before them the first failure, if there
    is one, except with ``as_json``.

    With ``follow``, print new ones until the run is finished. Raises ``click.ClickException`` for an error in
    the options, or without logs.
    """
    directory = RunDirectory(options.run_dir)
    if not directory.logs.is_dir():
        raise click.ClickException(
            f"there is no {directory.logs}: no run was started in {options.run_dir} yet, or its logs were removed"
        )
    query = _query(options, time.time())
    follower = Follower(directory, query) if options.follow else None
    if not options.as_json:
        _print_first_failure(directory)
    printed = _print_each(
        read_lines(directory, query, options.last) if options.last else all_lines(directory, query), options
    )
    if not printed and follower is None:
        remedy = "fits the options; without them all lines do"
        click.echo(f"no line in {directory.logs} {'yet' if query == LogQuery() else remedy}", err=True)
    while follower is not None:
        complete = directory.finished_result() is not None
        new = follower.look()
        _print_each(new, options)
        if complete and not new:
            return
        time.sleep(_POLL_S)


def _print_each(lines: Iterable[LogLine], options: LogsOptions) -> bool:
    """Print the lines, or their groups. Return True if there was one."""
    printed = False
    for text in _texts(lines, options):
        click.echo(text)
        printed = True
    return printed


def _query(options: LogsOptions, now_s: float) -> LogQuery:
    """Return the query that the options describe. Raises ``click.BadParameter``, also if no time is in their bounds."""
    since_s = moment(options.since, now_s) if options.since else None
    until_s = moment(options.until, now_s) if options.until else None
    if since_s is not None and until_s is not None and until_s < since_s:
        raise click.BadParameter(
            f'"{options.until}" is before "{options.since}": exchange them', param_hint="--since, --until"
        )
    try:
        return LogQuery(
            tuple(ranks for words in options.ranks for ranks in ranks_of(words)),
            frozenset(options.nodes),
            options.level or "debug",
            since_s,
            until_s,
            options.grep or "",
            options.attempt,
        )
    except LogQueryError as error:
        raise click.BadParameter(str(error), param_hint="--grep") from error


def ranks_of(words: str) -> Iterable[range]:
    """Yield the ranges of ranks in ``3``, ``8-15`` or ``1,4``. Raises ``click.BadParameter`` for another form."""
    for part in words.split(","):
        match = re.fullmatch("([0-9]{1,18})(?:-([0-9]{1,18}))?", part.strip())
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise click.BadParameter(
                f'"{part[:80]}" is no rank, like 3, and no ranks, like 8-15', param_hint="--rank"
            )
        first = int(match[1])
        yield range(first, int(match[2] or first) + 1)


def moment(words: str, now_s: float) -> float:
    """Return the Unix time of ``10m`` (before ``now_s``; s, m, h, d) or an ISO time, local by default. Raises
    ``click.BadParameter``.
    """
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", words.strip()):
        return now_s - float(match[1]) * _SECONDS[match[2]]
    try:
        return datetime.fromisoformat(words).timestamp()
    except ValueError as error:
        raise click.BadParameter(
            f'"{words}" is no time: 90s, 10m, 2h or 1d ago, or like 2026-11-25T07:20',
            param_hint="--since, --until",
        ) from error


def _print_first_failure(directory: RunDirectory) -> None:
    """Print to standard error the run's first failure, its evidence, and a step reached since; nothing without a
    failure.
    """
    failure = first_logged_failure(directory)
    if failure is None:
        return
    at = datetime.fromtimestamp(failure.line.t).strftime("%m-%d %H:%M:%S")
    message = what_happened(failure.line.text).splitlines()[0][:300]
    recovered = recovered_step(directory, failure.line)
    since = "" if recovered is None else f" (recovered: step {recovered:,} was reached since)"
    text = f"first failure{since}: {who(failure.line)}, {at}: {_safe(message)}"
    click.secho(text, fg="red" if recovered is None else "yellow", bold=True, err=True)
    for words in failure.evidence:
        click.secho(f"  {_safe(words)}", dim=True, err=True)


def _texts(lines: Iterable[LogLine], options: LogsOptions) -> Iterator[str]:
    """Yield the printed form of some lines, or with ``grouped`` of their groups, as text or JSON."""
    if options.grouped:
        for group in grouped(lines):
            yield _group_as_json(group) if options.as_json else _group_as_text(group)
        return
    for line in lines:
        yield encode(line).decode().rstrip() if options.as_json else _line_as_text(line)


def _line_as_text(line: LogLine) -> str:
    """Format a line with time, level, process, rank and step; the rank only if the process's name lacks it."""
    place = line.process or "-"
    if line.rank is not None and not place.startswith("rank-"):
        place = f"{place} r{line.rank}"
    place += "" if line.step is None else f" s{line.step}"
    return _text(line.t, line.level, place, line.text)


def _group_as_text(group: LogGroup) -> str:
    line = group.example
    return _text(group.first, line.level, f"{group.count:>7,} x {group.place}", line.text)


def _text(t: float, level: str, place: str, text: str) -> str:
    at = datetime.fromtimestamp(t).strftime("%m-%d %H:%M:%S.%f")[:-3]
    head = f"{at} {_LETTERS.get(level, 'I')} {_safe(place)} | "
    body = "\n    ".join(_safe(part) for part in text.split("\n"))
    return click.style(head, dim=True) + click.style(body, fg=_COLORS.get(level))


def _safe(text: str) -> str:
    """Return a text without control characters: the file may be of an untrusted author."""
    return clean(text).replace("\n", " ")


def _group_as_json(group: LogGroup) -> str:
    """Return a group as a JSON object: fields of its example, its count, first and last time, and its processes."""
    line = group.example
    return json.dumps(
        {
            "t": group.first,
            "level": line.level,
            "node": line.node,
            "rank": line.rank,
            "epoch": line.epoch,
            "step": line.step,
            "text": line.text,
            "count": group.count,
            "first": group.first,
            "last": group.last,
            "place": group.place,
        }
    )


# The command.


@click.command("logs", cls=Command)
@command_options(LogsOptions)
def command(options: LogsOptions) -> None:
    """Print the log lines of the run in RUN_DIR, merged in time: ranks, agents, coordinator, and libraries in
    them.

    If processes failed, the first failure is printed apart from the failures that it caused.

    For a run that phalanx submit has started, the job's own log is printed, unless --lines or one of the
    options that choose lines is given. Under Slurm each line of it begins with the number of its node in the
    job. For a run that was started by ssh it is the log of the leading host; those of the others are beside
    it.

    \b
      phalanx logs runs/quickstart-1f3a9c04
      phalanx logs runs/quickstart-1f3a9c04 --level warning --since 10m
      phalanx logs runs/big-1f3a9c04 --rank 3 --rank 8-15 --grep nccl --follow
      phalanx logs runs/big-1f3a9c04 --level error --grouped
      phalanx logs runs/big-1f3a9c04 --job --last 0 | grep '^3:'
      phalanx logs big-1f3a9c04 --on kubernetes --index 3
    """
    run_dir, job = options.run_dir, options.job
    line_options = written_options(options, *_OF_LINES)
    if options.engine is not None:
        refuse_unused(
            [*line_options, *written_options(options, "job")],
            "kubectl prints the log of a pod as it is: leave it out, or kubectl exec POD -- python -m phalanx logs RUN_DIR",
        )
        index, follow = options.index or 0, options.follow
        with explained(EngineError):
            code = print_log(str(run_dir), options.namespace, index=index, follow=follow, last=options.last)
        raise SystemExit(code)
    refuse_unused(written_options(options, "index", "namespace"), "is for --on kubernetes")
    demand_folder(run_dir)
    if job:
        refuse_unused(
            line_options, "chooses lines, and the log of a job is printed as it is: --lines instead of --job"
        )
    if job is None:
        job = not line_options and (run_dir / "launch").is_dir() and read_record(run_dir) is not None
    if job:
        _print_job(run_dir, options.last, follow=options.follow)
        return

    try:
        print_lines(options)
    except BrokenPipeError:  # Its reader has closed the pipe.
        sys.stderr.close()


def _print_job(run_dir: Path, last: int, *, follow: bool) -> None:
    """Print the log of a submitted run's job, or the job's state if it has none yet and ``follow`` is False.

    Raises ``click.ClickException`` if the run was not submitted, or has ended without output.
    """
    with explained(EngineError):
        run = submission_of(run_dir)
        if run is None:
            raise EngineError(
                f"{run_dir} holds no run that phalanx submit has started; leave --job out to see the logs of its processes"
            )
        path = leading_log(run)
        if not path.exists():
            job = run.standing()
            if job is None:
                raise EngineError(f"{run.title} has ended without output: there is no {path}")
            if not follow:
                click.echo(f"{run.title}: {job.doing}")
                return
        _print(path, run, last, follow=follow)


def _print(path: Path, run: SubmittedRun, last: int, *, follow: bool) -> None:
    """Print a job's log, at first its ``last`` lines (0: all). With ``follow``, continue until the job has ended.

    If another node leads from then on, switch to its log, which is printed from its start.
    """
    place, checked_s, ended = 0, 0.0, not follow
    first, decoder = True, _Decoder("replace")
    while True:
        if path.exists():
            with path.open("rb") as log:
                log.seek(_beginning_of_last(log, last) if first and last else place)
                while block := log.read(_BLOCK_BYTES):
                    click.echo(decoder.decode(block), nl=False)
                place = log.tell()
            first = False
        if ended:
            return
        if (now := leading_log(run)) != path:
            click.echo(f"{now.stem} leads from now on: {now}", err=True)
            path, place, first, decoder = now, 0, True, _Decoder("replace")
        if time.monotonic() - checked_s > _ASK_S:
            checked_s, ended = time.monotonic(), run.standing() is None
        else:
            time.sleep(_POLL_S)


def _beginning_of_last(log: BinaryIO, lines: int) -> int:
    """Return the offset of the last ``lines`` lines of a file, 0 if it has fewer; it is read in blocks from its end."""
    position = log.seek(0, os.SEEK_END)
    searched_end = position - 1  # the newline at the end of the last line begins no other
    while position:
        position = max(0, position - _BLOCK_BYTES)
        log.seek(position)
        block = log.read(searched_end - position)
        newline = len(block)
        while (newline := block.rfind(b"\n", 0, newline)) >= 0:
            lines -= 1
            if not lines:
                return position + newline + 1
        searched_end = position
    return 0


# Lines of the processes, on a terminal or as JSON.
