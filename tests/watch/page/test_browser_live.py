"""The page in a real browser while runs continue, vanish, or their server is away: it follows, shows that, and catches up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recorded_runs import RecordedRun
from watch.page.browsing import (
    CHROMIUM,
    Open,
    Watched,
    go,
    serving,
)

playwright_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: the page is NOT tested in a browser"
)
pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(
        not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}: the page is NOT tested in a browser"
    ),
]
from playwright.sync_api import expect  # noqa: E402


def test_a_run_that_continues_is_followed_without_a_reload(open_page: Open, tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "live", "live", 100)
    run.train(5)
    with serving(tmp_path) as port:
        page = open_page(f"http://127.0.0.1:{port}/").page
        expect(page.locator("tbody .c-step")).to_contain_text("5 / 100")
        run.train(2)
        expect(page.locator("tbody .c-step")).to_contain_text("7 / 100")
        go(page, "live")
        expect(page.locator(".tile").first).to_contain_text("7 / 100")
        expect(page.locator(".live")).to_have_attribute("data-state", "live")
        run.train(3)
        expect(page.locator(".tile").first).to_contain_text("10 / 100")
        page.goto("about:blank")


def test_the_page_shows_that_the_server_is_away_and_catches_up_when_it_is_back(
    open_page: Open, tmp_path: Path
) -> None:
    run = RecordedRun(tmp_path / "live", "live", 100)
    run.train(5)
    with serving(tmp_path) as port:
        page = open_page(f"http://127.0.0.1:{port}/", quiet=False).page
        expect(page.locator(".live")).to_have_attribute("data-state", "live")
    expect(page.locator(".live")).to_have_attribute("data-state", "reconnecting")
    run.train(1)
    with serving(tmp_path, port):
        expect(page.locator(".live")).to_have_attribute("data-state", "live")
        expect(page.locator("tbody .c-step")).to_contain_text("6 / 100")
        page.goto("about:blank")


def test_a_run_whose_directory_vanishes_is_shown_as_missing_and_leaves_the_list(
    open_page: Open, tmp_path: Path
) -> None:
    for name in ("stays", "goes"):
        RecordedRun(tmp_path / name, name, 100).train(5)
    with serving(tmp_path) as port:
        page = open_page(f"http://127.0.0.1:{port}/", quiet=False).page
        go(page, "goes")
        expect(page.locator(".tile").first).to_contain_text("5 / 100")
        expect(page.locator(".live")).to_have_attribute("data-state", "live")
        shutil.rmtree(tmp_path / "goes")
        expect(page.locator(".trouble")).to_contain_text("no run")
        expect(page.locator(".tile").first).to_contain_text("5 / 100")  # the last known state stays
        page.keyboard.press("g")
        page.keyboard.press("r")
        expect(page.locator("tbody .c-name a")).to_have_text(["stays"])
        expect(page.locator(".trouble")).to_be_hidden()
        page.goto("about:blank")


def test_compared_runs_of_one_name_are_labeled_by_their_folders(open_page: Open, tmp_path: Path) -> None:
    for folder in ("first", "second"):
        RecordedRun(tmp_path / folder, "twin", 10).train(3)
    with serving(tmp_path) as port:
        page = open_page(f"http://127.0.0.1:{port}/").page
        rows = page.evaluate("fetch('/api/runs').then((answer) => answer.json())")["runs"]
        page.goto(f"http://127.0.0.1:{port}/#/compare?ids={','.join(row['id'] for row in rows)}")
        expect(page.locator(".legendbox b")).to_have_text(["first", "second"])
        page.goto("about:blank")


@pytest.mark.slow
def test_a_server_that_stands_still_with_its_connections_open_is_shown_as_away(
    open_page: Open, tmp_path: Path
) -> None:
    RecordedRun(tmp_path / "runs" / "live", "live", 100).train(5)
    command = [sys.executable, "-m", "phalanx", "ui", str(tmp_path / "runs"), "--port", "0", "--no-open"]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    )
    try:
        assert server.stdout is not None
        # Its clock is that of its context.
        page = open_page(server.stdout.readline().split()[0], quiet=False, alone=True).page
        sign = page.locator(".live")
        expect(sign).to_have_attribute("data-state", "live")
        page.clock.install()
        page.reload()
        expect(sign).to_have_attribute("data-state", "live")
        server.send_signal(signal.SIGSTOP)
        page.clock.fast_forward(39_000)
        expect(sign).to_have_attribute("data-state", "live")
        page.clock.fast_forward(2_000)
        expect(sign).to_have_attribute("data-state", "reconnecting")
        server.send_signal(signal.SIGCONT)
        expect(sign).to_have_attribute("data-state", "live")
        page.goto("about:blank")
    finally:
        server.kill()
        server.wait()


def lists(watched: Watched) -> int:
    """Number of the page's requests for all runs."""
    return sum(url.endswith("/api/runs") for url in watched.requests)


def test_a_slow_answer_never_makes_requests_pile_up_and_a_hidden_tab_sends_none(
    open_page: Open, tmp_path: Path
) -> None:
    run = RecordedRun(tmp_path / "live", "live", 1000)
    run.train(5)
    with serving(tmp_path) as port:
        watched = open_page(f"http://127.0.0.1:{port}/")
        page = watched.page
        expect(page.locator("tbody tr")).to_have_count(1)
        pending = []
        page.route("**/api/runs", lambda route: route.continue_() if pending else pending.append(route))
        before = lists(watched)
        with page.expect_request("**/api/runs"):
            run.train(1)
        for _ in range(3):
            run.train(1)
            page.wait_for_timeout(400)
        assert lists(watched) == before + 1  # one is being answered, the rest is remembered
        pending[0].continue_()
        expect(page.locator("tbody .c-step")).to_contain_text("9 / 1,000")
        page.evaluate(
            "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        expect(page.locator(".live")).to_have_attribute("data-state", "paused")
        before = len(watched.requests)
        run.train(1)
        page.wait_for_timeout(1500)
        assert len(watched.requests) == before
        page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
        expect(page.locator("tbody .c-step")).to_contain_text("10 / 1,000")
        page.goto("about:blank")
