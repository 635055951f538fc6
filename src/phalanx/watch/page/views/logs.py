"""``/api/run/ID/logs``: what the processes of a run said, merged in time, filtered, and grouped where many say the same."""

from __future__ import annotations

import re

from msgspec import UNSET, structs, to_builtins

from phalanx.observe.logs.first_failure import what_happened
from phalanx.observe.logs.line import LEVELS
from phalanx.run.directory.paths import RunDirectory
from phalanx.watch.logs.read import (
    LogGroup,
    LogLine,
    LogQuery,
    grouped,
    read_lines,
    recovered_step,
    told_failure,
)
from phalanx.watch.page.answer import Parameters, RequestError
from phalanx.watch.page.places import Place
from phalanx.watch.page.views.runs import Runs

_MOST_LINES = 20_000
_MOST_RANK = 10_000_000
_LONGEST_TEXT = 20_000
_MOST_FOLLOWERS = 20


def logs_view(_runs: Runs, place: Place, parameters: Parameters) -> dict[str, object]:
    """The newest ``last`` lines that the request's filters leave, oldest first, and the failure that came before its followers."""
    directory = RunDirectory(place.path)
    last = parameters.whole("last", 500, 1, _MOST_LINES)
    found = read_lines(directory, query_of(parameters), last + 1)
    shown = found[-last:]
    told = told_failure(directory)
    return {
        "lines": [_group(one) for one in grouped(shown)]
        if parameters.text("grouped") == "1"
        else [_line(one) for one in shown],
        "more": len(found) > last,
        "first_failure": None
        if told is None
        else _line(told.line)
        | {
            "what": what_happened(told.line.text)[:_LONGEST_TEXT],
            "recovered_step": recovered_step(directory, told.line),
            "evidence": list(told.evidence),
            "followers": [_line(one) for one in told.followers[:_MOST_FOLLOWERS]],
        },
    }


def query_of(parameters: Parameters) -> LogQuery:
    """Which lines a request asks for. Text is looked for as it stands: an expression could be one that takes forever."""
    ranks = [_rank(word) for word in parameters.names("rank", most=1000)]
    level = parameters.choice("level", LEVELS)
    return LogQuery(
        ranks=frozenset(ranks),
        nodes=frozenset(parameters.names("node", most=1000)),
        level=level,
        since=parameters.number("since"),
        until=parameters.number("until"),
        grep=re.escape(parameters.text("grep", most=500)),
    )


def _rank(word: str) -> int:
    if not word.isdecimal() or len(word) > 9 or int(word) > _MOST_RANK:
        raise RequestError(f"rank={word[:50]!r}: give the numbers of ranks, with commas between them")
    return int(word)


def _line(line: LogLine) -> dict[str, object]:
    where = ", ".join(word for word in (line.process, line.node or "") if word)
    return _said(line) | {"count": 1, "first": line.t, "last": line.t, "place": where}


def _group(group: LogGroup) -> dict[str, object]:
    return _said(group.example) | {
        "count": group.count,
        "first": group.first,
        "last": group.last,
        "place": group.place,
    }


def _said(line: LogLine) -> dict[str, object]:
    text = line.text if len(line.text) <= _LONGEST_TEXT else f"{line.text[:_LONGEST_TEXT]} ..."
    shortened = structs.replace(line, text=text, goes_on=UNSET)
    facts: dict[str, object] = to_builtins(shortened)
    return facts
