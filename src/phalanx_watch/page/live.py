"""Tells open pages which runs have changed, by server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).

One task looks at the files of all runs that are watched, once a second for all viewers together, or so much less often that telling them, and
answering what they ask then, takes half a percent of a processor: the run may have the same one. A viewer has no queue but a note of the
newest change of each run: one that reads slowly misses steps in between, which it is told, and holds no memory. One that takes nothing
at all for half a minute is let go; its browser comes back by itself.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
from anyio import to_thread
from starlette.types import Receive, Send

from phalanx.observe.record.notes import read_serving
from phalanx.run.directory.paths import RunDirectory
from phalanx_watch.page.runs import Place

MOST_VIEWERS = 256
HEARTBEAT_S = 15.0
STALLED_S = 30.0
LOOK_S = 1.0
MOST_PAUSE_S = 15.0
_SHARE = 0.005
_NEWEST_COUNTS = 0.2
"""The share of the newest look in the mean."""
_FILES = ("events.jsonl", "ranks.bin", "fleet.json", "result.json", "serving")
"""The last one is the folder of servers' notes."""
_HEARTBEAT = b'data: {"kind":"heartbeat"}\n\n'
"""Scripts see messages, and not comments: a page that hears nothing for longer knows that its server is gone, or stands still."""
News = dict[str, object]
Describe = Callable[[Place], News]
"""What to tell of a run that has changed."""


class Viewer:
    """One open page: the runs that it shows, and what it was not told yet."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = {place.id: place for place in places}
        self._due: dict[str, News] = {}
        self._missed = 0
        self._woken = asyncio.Event()

    def note(self, place: Place, news: News) -> None:
        """Keeps the newest change of a run until it can be told."""
        self._missed += place.id in self._due
        self._due[place.id] = news
        self._woken.set()

    async def next_lines(self, patience_s: float) -> bytes:
        """What is to be told now, as lines of the protocol; after ``patience_s`` without news, a heartbeat."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), patience_s)
        self._woken.clear()
        due, missed = self._due, self._missed
        self._due, self._missed = {}, 0
        if not due:
            return _HEARTBEAT
        told = [*due.values(), *([{"kind": "dropped", "count": missed}] if missed else [])]
        return b"".join(b"data: " + msgspec.json.encode(news) + b"\n\n" for news in told)


class Pace:
    """How long to wait between two looks, by the processor time that the thread which tells viewers has used since the last one.

    The mean over some looks counts, so that a page that is opened, which takes as much as many words to it, delays nobody for long.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s, self._used_s, self._mean_s = least_s, math.inf, 0.0

    def pause_s(self, used_s: float) -> float:
        """The pause now, given what the thread has used in all."""
        since_s, self._used_s = max(0.0, used_s - self._used_s), used_s
        self._mean_s += _NEWEST_COUNTS * (since_s - self._mean_s)
        return min(max(self._least_s, self._mean_s / _SHARE), MOST_PAUSE_S)


class Live:
    """All viewers, and the task that looks for them."""

    def __init__(
        self,
        describe: Describe,
        on_change: Callable[[Place], None] = lambda _place: None,
        *,
        look_s: float = LOOK_S,
        stalled_s: float = STALLED_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            describe: Called in a thread for a run that has changed.
            on_change: Called before its viewers are told.
            look_s: Between two looks, for a few viewers.
            stalled_s: A viewer that takes nothing for so long is let go.
            clock: Unix seconds, by which servers of a run's weights are silent.
        """
        self._describe, self._on_change = describe, on_change
        self._look_s, self._stalled_s, self._clock = look_s, stalled_s, clock
        self._viewers: set[Viewer] = set()
        self._signs: dict[str, object] = {}

    @property
    def full(self) -> bool:
        """True if there are as many viewers as one server has."""
        return len(self._viewers) >= MOST_VIEWERS

    async def watch(self) -> None:
        """Looks until it is cancelled."""
        pace = Pace(self._look_s)
        while True:
            await asyncio.sleep(pace.pause_s(time.thread_time()))
            places = {place.id: place for viewer in self._viewers for place in viewer.places.values()}
            try:
                changed = await to_thread.run_sync(self._changed, list(places.values()))
            except OSError:  # a disk that is gone for a moment: the next look tells
                continue
            for place, news in changed:
                self._on_change(place)
                for viewer in self._viewers:
                    if place.id in viewer.places:
                        viewer.note(place, news)

    def _changed(self, places: list[Place]) -> list[tuple[Place, News]]:
        """The runs whose files are others than at the last look, or whose servers are silent since, with what to tell; a run that nobody watched
        before is as it is."""
        found, now = [], self._clock()
        signs: dict[str, object] = {}
        for place in places:
            sign = signs[place.id] = _sign(place, now)
            if place.id in self._signs and self._signs[place.id] != sign:
                found.append((place, self._describe(place)))
        self._signs = signs
        return found

    async def serve(self, places: Sequence[Place], receive: Receive, send: Send) -> None:
        """Answers a request for events until its viewer leaves, or stalls."""
        viewer = Viewer(places)
        for place_id, sign in (await to_thread.run_sync(_signs_of, places, self._clock())).items():
            self._signs.setdefault(place_id, sign)  # the next look tells what has changed since
        self._viewers.add(viewer)
        leaving = asyncio.create_task(_until_left(receive))
        try:
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"retry: 3000\n\n", "more_body": True})
            while not leaving.done():
                lines = asyncio.create_task(viewer.next_lines(HEARTBEAT_S))
                await asyncio.wait((lines, leaving), return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    lines.cancel()
                    break
                body = {"type": "http.response.body", "body": lines.result(), "more_body": True}
                await asyncio.wait_for(send(body), self._stalled_s)
            with suppress(OSError):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError):
            return  # stalled, or gone: the connection is closed by the server
        finally:
            self._viewers.discard(viewer)
            leaving.cancel()


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _signs_of(places: Sequence[Place], now: float) -> dict[str, object]:
    return {place.id: _sign(place, now) for place in places}


def _sign(place: Place, now: float) -> object:
    found: list[tuple[int, int, int] | None] = []
    directory = RunDirectory(place.path)
    for name in _FILES:
        try:
            seen = os.stat(directory.path / name)
            found.append((seen.st_ino, seen.st_size, seen.st_mtime_ns))
        except OSError:
            found.append(None)
    # A server that is killed changes no file: only the time tells it.
    silent = sum(one.silent(now) for one in read_serving(directory)) if found[-1] else 0
    return (*found, silent)
