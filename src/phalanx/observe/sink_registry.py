"""Open the trackers that a run file names.

A missing package or an unknown name is reported before training starts; everything else about a tracker happens on
its own thread (``background``).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from phalanx.observe.event_log import EventLogError, lines_from_the_end, read_events
from phalanx.observe.events import Evaluated, Event, LayerStatistics, Sampled, Step, TaskEvaluated, decode
from phalanx.observe.sinks import Background, Sink, none_missing, point_of
from phalanx.plugins import PluginError, load_plugin, plugin_names
from phalanx.run.directory.files import open_regular
from phalanx.run.fields import unknown_value

# Points of a run's event stream that a tracker has not received, because the process was killed before its tracker had sent
# them.
#
# The stream in the run directory is complete, so each start sends the missing points. A tracker receives points in order, so it
# has all points before its newest step, unless its queue was full. ``phalanx sinks fill`` sends those.

_BLOCK_BYTES = 1 << 16
_MOST_LINES = 20_000
"""If more lines are missing, the stream is read from its beginning instead of being kept in memory."""
_POINTS = (Step, Evaluated, TaskEvaluated, LayerStatistics, Sampled)
"""The events that a tracker draws."""
_KINDS = tuple(b'"kind":"%s"' % kind.__name__.encode() for kind in _POINTS)
_SEARCHED = 120
"""In so many first bytes a line of ours has its kind."""


def missing_points(
    path: Path, holds: Callable[[Event], bool], *, most_lines: int = _MOST_LINES
) -> Iterator[Event]:
    """Yield the points that a tracker lacks (steps, evaluations, statistics, samples), in the order written; nothing if the stream
    cannot be read.

    Reads back from the end to the newest step for which ``holds`` is true. If more than ``most_lines`` points come
    after that, the stream is read again from its start, so that they need no memory.
    """
    lines: list[bytes] = []
    with suppress(OSError), open_regular(path) as file:
        for line in lines_from_the_end(file, _BLOCK_BYTES):
            point = next(_points([line]), None)
            if point is None:
                continue
            if isinstance(point.body, Step) and holds(point):
                break
            lines.append(line)
            if len(lines) > most_lines:
                break
    if len(lines) <= most_lines:
        yield from (point for point in _points(reversed(lines)) if not holds(point))
        return
    with suppress(EventLogError):
        yield from (
            event for event in read_events(path) if isinstance(event.body, _POINTS) and not holds(event)
        )


def _points(lines: Iterable[bytes]) -> Iterator[Event]:
    """Yield the events in ``lines`` that a tracker draws: steps, evaluations, statistics and samples. Other lines are skipped."""
    for line in lines:
        if any(kind in line[:_SEARCHED] for kind in _KINDS):
            with suppress(ValueError, RecursionError):
                event = decode(line)
                if isinstance(event.body, _POINTS):
                    yield event


class SinkError(Exception):
    """A sink that is not available; the message has what to install or to write."""


@dataclass(frozen=True)
class Vendor:
    """A supported tracker, and the module it needs, which has the name of its package if no other is given."""

    module: str
    open_sink: Callable[[Path, str], Sink]
    folder: str = ""
    """The folder in the run directory that is all that the tracker keeps; empty if it keeps anything elsewhere."""
    package: str = ""
    resends: bool = True
    """Each start sends the points that it lacks."""


def open_sinks(
    names: Sequence[str],
    run_directory: Path,
    run: str,
    vendors: Mapping[str, Vendor] | None = None,
) -> list[Background]:
    """Return the sinks called ``names``, each running on its thread, which first sends the points that its tracker
    lacks.

    Raises SinkError, before any is opened, if a name is unknown or a package is not installed.
    """
    opened = require_sinks(names, vendors)
    missing = partial(missing_points, run_directory / "events.jsonl")
    return [
        Background(
            name,
            partial(opened[name].open_sink, run_directory, run),
            missing=missing if opened[name].resends else none_missing,
        )
        for name in names
    ]


def fill_sink(
    name: str,
    run_directory: Path,
    run: str,
    events: Iterable[Event],
    vendors: Mapping[str, Vendor] | None = None,
) -> int:
    """Send a run's ``events`` to the sink ``name``, and return the number sent: each point that it lacks once,
    others every time.

    Blocks until the tracker has taken everything. A tracker that is a folder of the run is made again. Raises
    SinkError as ``open_sinks`` does, and if the tracker fails, and the EventLogError of ``events``; the folder
    is then as before.
    """
    vendor = require_sinks([name], vendors)[name]
    with _remade(run_directory / vendor.folder) if vendor.folder else nullcontext():
        try:
            sink, sent = vendor.open_sink(run_directory, run), 0
            drawn: set[tuple[str, int] | None] = set()
            for event in events:
                point = point_of(event)
                if point is not None and (point in drawn or sink.holds(event)):
                    continue
                drawn.add(point)
                sink.write(event)
                sent += 1
            sink.close()
        except EventLogError:
            raise
        except Exception as error:  # the vendor's code may raise any error
            raise SinkError(
                f"{name} failed: {type(error).__name__}: {error}. Nothing is lost, the events are in the run directory: try again"
            ) from error
    return sent


@contextmanager
def _remade(folder: Path) -> Iterator[None]:
    """Context in which ``folder`` is moved aside, to be made again; the old one is deleted at the end.

    After an exception the old one is put back, in place of what was made.
    """
    before = folder.with_name(f".{folder.name}.before")
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
    try:
        yield
    except BaseException:
        if before.exists():
            shutil.rmtree(folder, ignore_errors=True)
            before.rename(folder)
        raise
    shutil.rmtree(before, ignore_errors=True)


def require_sinks(names: Sequence[str], vendors: Mapping[str, Vendor] | None = None) -> Mapping[str, Vendor]:
    """Return the vendors of these names by name, by default those that installed packages offer (group
    ``phalanx.sinks``).

    Raises SinkError if a name is unknown or its tracker is not installed; no tracker is imported.
    """
    chosen: dict[str, Vendor] = {}
    for name in names:
        try:
            vendor = load_plugin("phalanx.sinks", name) if vendors is None else vendors.get(name)
        except PluginError as error:
            raise SinkError(str(error)) from error
        if vendor is None:
            offered = plugin_names("phalanx.sinks") if vendors is None else sorted(vendors)
            problem = unknown_value("observe.sinks", name, offered)
            raise SinkError(f"the sink {problem.finding}: {problem.remedy}")
        chosen[name] = vendor
        module, package = vendor.module, vendor.package
        if not _installed(module):
            package = package or module
            raise SinkError(
                f"the sink {name!r} needs the package {package}, which is not installed: pip install {package}"
            )
    return chosen


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
