"""The lines of a run's processes on a terminal, or as JSON."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from datetime import datetime

import click

from phalanx.cli.launch.log_options import LogsOptions
from phalanx.observe.logs.assemble import clean
from phalanx.observe.logs.line import LogLine, encode, what_happened, who
from phalanx.observe.logs.read_lines import (
    Follower,
    LogGroup,
    LogQuery,
    LogQueryError,
    all_lines,
    grouped,
    read_lines,
    recovered_step,
    told_failure,
)
from phalanx.run.directory.paths import RunDirectory

_POLL_S = 0.5
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_COLORS = {"error": "red", "warning": "yellow", "debug": "bright_black"}
_LETTERS = {"error": "E", "warning": "W", "debug": "D"}


def print_lines(options: LogsOptions) -> None:
    """Prints the lines. Raises ``click.ClickException`` with what is wrong with the options, or if there are no logs."""
    directory = RunDirectory(options.run_dir)
    if not directory.logs.is_dir():
        raise click.ClickException(
            f"there is no {directory.logs}: nobody has started a run in {options.run_dir} yet, or its logs were removed"
        )
    query = _query(options, time.time())
    follower = Follower(directory, query) if options.follow else None
    if not options.as_json:
        _print_first_failure(directory)
    _print(
        read_lines(directory, query, options.last) if options.last else all_lines(directory, query), options
    )
    while follower is not None:
        complete = directory.finished_result() is not None
        new = follower.look()
        _print(new, options)
        if complete and not new:
            return
        time.sleep(_POLL_S)


def _print(lines: Iterable[LogLine], options: LogsOptions) -> None:
    for text in _texts(lines, options):
        click.echo(text)


def _query(options: LogsOptions, now_s: float) -> LogQuery:
    try:
        return LogQuery(
            frozenset(number for words in options.ranks for number in ranks_of(words)),
            frozenset(options.nodes),
            options.level or "debug",
            moment(options.since, now_s) if options.since else None,
            moment(options.until, now_s) if options.until else None,
            options.grep or "",
            options.attempt,
        )
    except LogQueryError as error:
        raise click.BadParameter(str(error), param_hint="--grep") from error


def ranks_of(words: str) -> Iterable[int]:
    """The ranks that ``3``, ``8-15`` or ``1,4`` names. Raises ``click.BadParameter``."""
    for part in words.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not match:
            raise click.BadParameter(
                f'"{part}" is no rank, like 3, and no ranks, like 8-15', param_hint="--rank"
            )
        first = int(match[1])
        yield from range(first, int(match[2] or first) + 1)


def moment(words: str, now_s: float) -> float:
    """The unix time that ``10m`` (ago) or an ISO time means. Raises ``click.BadParameter``."""
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
    told = told_failure(directory)
    if told is None:
        return
    at = datetime.fromtimestamp(told.line.t).strftime("%m-%d %H:%M:%S")
    message = what_happened(told.line.text).splitlines()[0][:300]
    recovered = recovered_step(directory, told.line)
    since = "" if recovered is None else f" (recovered: step {recovered:,} was reached since)"
    text = f"first failure{since}: {who(told.line)}, {at}: {_safe(message)}"
    click.secho(text, fg="red" if recovered is None else "yellow", bold=True, err=True)
    for words in told.evidence:
        click.secho(f"  {_safe(words)}", dim=True, err=True)


def _texts(lines: Iterable[LogLine], options: LogsOptions) -> Iterator[str]:
    """What is printed of some lines."""
    if options.grouped:
        for group in grouped(lines):
            yield _group_as_json(group) if options.as_json else _group_as_text(group)
        return
    for line in lines:
        yield encode(line).decode().rstrip() if options.as_json else _line_as_text(line)


def _line_as_text(line: LogLine) -> str:
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
    """A text that cannot command a terminal: a stranger may have written the file."""
    return clean(text).replace("\n", " ")


def _group_as_json(group: LogGroup) -> str:
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
