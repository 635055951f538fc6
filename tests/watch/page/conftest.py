"""A browser and runs that tests of the page share; a test that uses neither needs no browser."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from observe.served_runs import SERVED
from phalanx.observe.record.notes import ServingNote
from phalanx.run.directory.paths import RunDirectory
from recorded_runs import RecordedRun, a_folder_of_runs, renamed
from watch.page.browsing import (
    CHROMIUM,
    HOSTILE,
    HOSTILE_NAME,
    PATIENCE_MS,
    Open,
    Watched,
    serving,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, recorded by the writers of real ones; the last is by somebody who means harm."""
    folder = tmp_path_factory.mktemp("runs")
    for _ in a_folder_of_runs(folder):
        pass
    tiny = RecordedRun(folder / "tiny", "tiny", 4)
    tiny.train(4)
    tiny.finish()
    hostile = RecordedRun(folder / "hostile", "hostile", 10)
    renamed(hostile, HOSTILE_NAME)
    hostile.train(3)
    hostile.say(HOSTILE)
    for name, state in (("tiny", "serving"), ("hostile", HOSTILE)):
        figures = replace(SERVED, model=state, state=state, seen_s=time.time() + 3600)
        ServingNote(RunDirectory(folder / name), "here", lambda figures=figures: figures).once()
    return folder


@pytest.fixture(scope="module")
def site(runs: Path) -> Iterator[str]:
    with serving(runs) as port:
        yield f"http://127.0.0.1:{port}/"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright_api = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}: the page is NOT tested in a browser")
    playwright_api.expect.set_options(timeout=PATIENCE_MS)
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """Context of the pages of tests without options of their own; a test leaves nothing in it."""
    made = browser.new_context()
    made.set_default_timeout(PATIENCE_MS)
    yield made
    made.close()


@pytest.fixture
def open_page(browser: Browser, context: BrowserContext, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Open the page at an address. At the end its console must be empty, and no other host may have been requested.

    A page that the test before has left is used again: half of what a new one costs is its process.
    """
    own, opened, quiet_ones = [], [], []

    def open_at(
        address: str = "", width: int = 1280, quiet: bool = True, alone: bool = False, **options: object
    ) -> Watched:
        if alone or options:
            own.append(browser.new_context(**options))  # type: ignore[arg-type]
            own[-1].set_default_timeout(PATIENCE_MS)
            page = own[-1].new_page()
        else:
            used = {watched.page for watched in opened}
            free = [page for page in context.pages if page not in used]
            page = free[0] if free else context.new_page()
        watched = Watched(page)
        page.set_viewport_size({"width": width, "height": 800})
        page.goto(address if ":" in address else request.getfixturevalue("site") + address)
        opened.append(watched)
        if quiet:
            quiet_ones.append(watched)
        return watched

    yield open_at
    for watched in opened:
        if not watched.page.is_closed():
            watched.leave()
    for own_context in own:
        own_context.close()
    for watched in quiet_ones:
        assert watched.console == []
        assert watched.hosts() <= {"127.0.0.1", None}
