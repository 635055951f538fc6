"""The page in a real browser: what a person would click, on a real server over real run directories."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from observe.served_runs import SERVED
from phalanx.observe.events import Sampled, TaskEvaluated
from phalanx_watch.page.export import export_run
from phalanx_watch.runs.row import run_id
from recorded_runs import RecordedRun
from watch.page.browsing import (
    CHROMIUM,
    HOSTILE,
    HOSTILE_NAME,
    Open,
    go,
    id_of,
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
from playwright.sync_api import Browser, expect  # noqa: E402

LEGENDS_UNDER_TOOLS = """[...document.querySelectorAll("figcaption")].filter((head) => {
  const tools = head.querySelector(".tools")?.getBoundingClientRect();
  return tools && [...head.querySelectorAll(".entry")].map((entry) => entry.getBoundingClientRect())
    .some(({ right, top, bottom }) => right > tools.left && top < tools.bottom && bottom > tools.top);
}).map((head) => head.innerText)"""
"""The heads of charts in which a legend runs into the buttons."""
VIEWS = ("", "/time", "/ranks", "/layers", "/fleet", "/logs", "/profile", "/checkpoints")
"""Views of one run."""


# --- runs ------------------------------------------------------------------------------------------


def test_all_runs_are_listed_with_state_step_and_loss(open_page: Open) -> None:
    page = open_page().page
    expect(page.locator("tbody tr")).to_have_count(4)
    row = page.locator("tbody tr", has_text="tiny")
    expect(row).to_contain_text("finished")
    expect(row).to_contain_text("4 / 4")


def test_a_run_is_searched_and_opened_with_keys_alone(open_page: Open) -> None:
    page = open_page().page
    expect(page.locator("tbody tr")).to_have_count(4)
    page.keyboard.press("/")
    page.keyboard.type("flee")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("fleet")
    page.keyboard.press("g")
    page.keyboard.press("r")
    expect(page.locator("tbody tr")).to_have_count(4)


def test_a_click_on_a_column_sorts_by_it_and_what_is_not_known_comes_last(open_page: Open) -> None:
    page = open_page().page
    page.get_by_role("button", name="Loss", exact=True).click()
    expect(page.locator("th[data-column=loss]")).to_have_attribute("aria-sort", "descending")
    losses = [text for text in page.locator("tbody .c-loss").all_text_contents() if text != "–"]
    assert losses == sorted(losses, key=float, reverse=True)
    assert "sort=-loss" in page.url


def test_chosen_runs_are_compared_on_the_chosen_axis(open_page: Open) -> None:
    page = open_page().page
    for name in ("long", "fleet"):
        page.get_by_role("checkbox", name=f"Choose {name}", exact=True).check()
    page.keyboard.press("c")
    legend = page.locator(".legendbox")
    expect(legend).to_contain_text("long")
    expect(legend).to_contain_text("fleet")
    page.get_by_role("radio", name="tokens").click()
    plot = page.locator("figure.wide .plot")
    expect(plot).to_have_attribute("aria-label", re.compile("Loss over tokens"))
    assert "x=tokens" in page.url
    row = page.locator("tr", has_text="optimizer.lr")
    expect(row).to_contain_text("0.001")
    expect(row).to_contain_text("0.002")
    expect(page.locator(".verdict")).to_contain_text("need not have the same bits")
    expect(page.locator("figure.wide .note")).to_contain_text("drawn as")
    held_out = page.locator("figure", has=page.locator(".title", has_text="Held-out loss"))
    expect(held_out.locator(".note")).to_be_hidden()  # two evaluations are drawn as two


def test_the_list_of_runs_with_long_names_fits_a_small_screen(tmp_path: Path, browser: Browser) -> None:
    for number in range(2):
        RecordedRun(tmp_path / f"{'a-long-name-' * 12}{number}", "a-long-name-" * 6, 20).train(5)
    with serving(tmp_path) as port:
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator("tbody tr")).to_have_count(2)
        overflows = "(table) => table.parentElement.scrollWidth > table.parentElement.clientWidth"
        assert not page.locator("table.rows").evaluate(overflows)
        page.close()


def test_many_runs_of_one_name_are_labeled_by_their_settings_and_fit_a_phone(
    tmp_path: Path, browser: Browser
) -> None:
    for number in range(10):
        run = RecordedRun(tmp_path / f"tiny-{number}", "tiny", 20, lr=1e-3 * (number + 1))
        run.train(5)
    ids = ",".join(run_id(path) for path in sorted(tmp_path.iterdir()))
    with serving(tmp_path) as port:
        page = browser.new_page(viewport={"width": 390, "height": 800})
        page.goto(f"http://127.0.0.1:{port}/#/compare?ids={ids}")
        expect(page.locator(".legendbox .entry").first).to_contain_text("tiny · lr 0.001")
        cell = page.get_by_role("columnheader", name="state", exact=True)  # each of many runs is a row
        assert cell.evaluate("cell => cell.getBoundingClientRect().height") < 60, "a letter in each line"
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        expect(page.locator("figure:not(.wide) .legend").first).to_be_hidden()
        page.close()


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Nine runs with three rates, three each."""
    for number in range(9):
        RecordedRun(tmp_path / f"sweep-{number}", f"sweep-{number}", 20, lr=1e-3 * (1 + number % 3)).train(5)
    return tmp_path


def test_settings_that_differ_are_columns_and_others_can_be_chosen(sweep: Path, browser: Browser) -> None:
    with serving(sweep) as port:
        page = browser.new_page(viewport={"width": 360, "height": 800})
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator("th[data-column='optimizer.lr']")).to_have_text("lr")
        expect(page.locator("tr", has_text="sweep-1").locator(".c-setting")).to_have_text("0.002")
        page.locator(".columns summary").click()
        page.get_by_role("checkbox", name="optimizer.lr").uncheck()
        page.get_by_label("Add a setting as a column").fill("runtime.seed")
        page.get_by_label("Add a setting as a column").press("Enter")
        expect(page.locator("tr", has_text="sweep-1").locator(".c-setting")).to_have_text("0")
        assert "settings=runtime.seed" in page.url
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.close()


def test_a_filter_is_the_language_of_the_command_and_a_mistake_in_it_is_shown_with_the_nearest_column(
    sweep: Path, browser: Browser
) -> None:
    with serving(sweep) as port:
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator("tbody tr")).to_have_count(9)
        for text, count in (("optimizer.lr=0.002 and step<9", 3), ("los<2", 3), ("optimizer.lr<0.0025", 6)):
            page.get_by_label("Filter runs by columns and settings").fill(text)
            page.get_by_label("Filter runs by columns and settings").press("Enter")
            expect(page.locator("tbody tr")).to_have_count(count)
            if text == "los<2":
                expect(page.get_by_role("alert").first).to_contain_text("did you mean loss?")
        expect(page.locator(".wrong")).to_be_hidden()
        page.close()


def test_many_runs_are_searched_in_the_legend_and_grouped_by_a_setting(sweep: Path, browser: Browser) -> None:
    ids = ",".join(run_id(path) for path in sorted(sweep.iterdir()))
    with serving(sweep) as port:
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/#/compare?ids={ids}")
        entries = page.locator(".legendbox .entry")
        expect(entries).to_have_count(9)
        colors = entries.locator("i").evaluate_all(
            "all => all.map((one) => getComputedStyle(one).backgroundColor)"
        )
        assert len(set(colors)) == 9
        page.get_by_placeholder("Search lines").fill("sweep-4")
        expect(entries).to_have_count(1)
        page.get_by_placeholder("Search lines").fill("")
        page.get_by_label("group").select_option("optimizer.lr")
        expect(entries).to_have_text([re.compile(f"lr 0.00{n} \\(3 runs\\)loss 7.4") for n in (1, 2, 3)])
        assert "group=optimizer.lr" in page.url
        page.close()


# --- one run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "names"), [(360, ("fleet", HOSTILE_NAME)), (1280, ("long",))])
def test_every_view_of_a_run_has_content_and_fits_the_screen(
    open_page: Open, width: int, names: tuple[str, ...]
) -> None:
    page = open_page(width=width).page
    for address in [f"#/run/{id_of(page, name)}{view}" for name in names for view in VIEWS]:
        page.evaluate("(hash) => { location.hash = hash; }", address)
        expect(page.locator("main")).not_to_be_empty()
        page.wait_for_function("document.querySelector('main').innerText.length > 20")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, address
        assert page.evaluate(LEGENDS_UNDER_TOOLS) == [], address
        expect(page.locator(".trouble")).to_be_hidden()


def test_what_is_wrong_stands_above_all_else_with_its_evidence_and_what_to_do(open_page: Open) -> None:
    page = open_page().page
    reason = {
        "code": "lost-node", "severity": "critical", "title": "Node node-1 is lost", "where": "node-1", "since": 1_790_000_050.0,
        "evidence": ["its agent has said nothing for 9 s", HOSTILE], "doing": "a spare takes its rank", "next": "phalanx status RUN",
    }  # fmt: skip
    page.route("**/why", lambda route: route.fulfill(json={"reasons": [reason]}))
    go(page, "fleet")
    box = page.locator("details.problem")
    for text in (reason["title"], *reason["evidence"], reason["doing"], reason["next"]):  # type: ignore[misc]
        expect(box).to_contain_text(str(text))
    assert page.evaluate("window.hacked") is None
    box.locator("a").click()
    page.wait_for_url(re.compile(r"/logs\?since=1789999990&until=1790000110"))


def test_what_serves_a_run_stands_above_its_curves(open_page: Open) -> None:
    page = open_page().page
    go(page, "tiny")
    row = page.get_by_role("region", name="Serving").locator("tbody tr")
    expect(row).to_have_count(1)
    for text in (SERVED.url, "serving", "3 + 2", "25.0 %", "9,000", "250 ms"):
        expect(row).to_contain_text(text)
    go(page, "fleet")
    expect(page.locator("h1")).to_have_text("fleet")
    expect(page.get_by_role("region", name="Serving")).to_be_hidden()


def test_a_curve_of_many_steps_is_marked_as_reduced_and_keeps_its_peak(open_page: Open) -> None:
    page = open_page().page
    go(page, "long")
    loss = page.locator("figure", has_text="Loss").first
    expect(loss.locator(".note")).to_contain_text("3,000 points drawn as")
    expect(page.locator("figure .note:visible")).to_have_count(1)
    copied = page.evaluate(
        "async (id) => (await (await fetch(`/api/run/${id}/curves?names=loss&points=100`)).json()).series.loss.hi",
        id_of(page, "long"),
    )
    assert max(copied) == 99


def test_figures_of_tasks_and_of_observers_of_a_users_own_have_charts(
    tmp_path: Path, browser: Browser
) -> None:
    run = RecordedRun(tmp_path / "run", "run", 20)
    run.train(5)
    scored = {"sums": {"exact_match": 0.5, "exact_match_error": 0.1}, "margin": {"margin": 0.25}}
    for step in (2, 4):
        for task, figures in scored.items():
            run.log.append(TaskEvaluated(step, task, "observer", items=2, figures=figures))
    with serving(tmp_path) as port:
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/#/run/{run_id(tmp_path / 'run')}")
        expect(page.get_by_role("img", name="Exact match of tasks")).to_have_accessible_name(
            re.compile("sums: last 50.0 %")
        )
        expect(page.get_by_role("img", name="margin of tasks")).to_have_accessible_name(
            re.compile("margin: last 0.25")
        )
        expect(page.locator("figcaption", has_text="error")).to_have_count(0)
        page.close()


def test_a_sample_of_white_space_alone_is_marked_as_such(tmp_path: Path, browser: Browser) -> None:
    run = RecordedRun(tmp_path / "run", "run", 20)
    run.train(5)
    for number, text in ((2, " \n "), (4, "a word")):
        run.log.append(Sampled(number, "story", "Once", text, [1, 2]))
    with serving(tmp_path) as port:
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/#/run/{run_id(tmp_path / 'run')}")
        expect(page.locator("ol.texts .sampled")).to_have_text(["a word", re.compile(r"\(white space\)")])
        page.close()


def test_the_axis_of_a_share_that_is_always_zero_ends_at_one(open_page: Open) -> None:
    ends = open_page().page.evaluate(
        "async () => (await import('/static/chart.js')).Chart.prototype.range.call({ options: {} }, 0, 0)"
    )
    assert ends == [0, 1]


def test_a_drag_over_a_curve_shows_these_steps_and_a_key_shows_all_again(open_page: Open) -> None:
    page = open_page().page
    go(page, "long")
    plot = page.locator("figure.wide .u-over")
    box = plot.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.50, box["y"] + 50)
    page.mouse.up()
    page.wait_for_url(re.compile("first="))
    first = int(re.findall(r"first=(\d+)", page.url)[0])
    assert 600 < first < 900
    page.keyboard.press("a")
    page.wait_for_function("!location.hash.includes('first=')")


def test_an_event_is_shown_with_a_link_to_the_lines_around_it(open_page: Open) -> None:
    page = open_page().page
    go(page, "fleet")
    row = page.locator("tr", has_text="leave epoch 0")
    expect(row).to_contain_text("epoch ended")
    row.locator("a").click()
    page.wait_for_url(re.compile(r"/logs\?since=\d+"))


def test_the_data_of_a_chart_are_copied_as_csv(open_page: Open) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"]).page
    go(page, "fleet")
    for _ in range(100):  # a chart is there before its numbers
        page.get_by_label("Copy the data of Gradient norm", exact=True).click()
        page.get_by_role("button", name="Copy the data of Gradient norm as CSV").click()
        expect(page.locator(".toast")).to_have_text("Copied as CSV")
        text = page.evaluate("navigator.clipboard.readText()")
        if text != "step\n":
            break
        page.wait_for_timeout(100)
    assert text.startswith("step,grad_norm\n1,")
    assert len(text.splitlines()) == 1 + 44  # the lost step is drawn once, as it was done again


def test_the_buckets_and_what_was_useful_sum_to_the_time_held(open_page: Open) -> None:
    page = open_page().page
    go(page, "fleet", "/time")
    shares = page.locator(".waterfall .share").all_text_contents
    expect(page.locator(".waterfall .row").first).to_contain_text("100.0 %")
    parts = [float(text.replace(" %", "")) for text in shares()]
    assert sum(parts[1:]) == pytest.approx(parts[0], abs=0.1 * len(parts))
    page.get_by_label("Dollars per accelerator-hour").fill("3600")
    page.keyboard.press("Tab")
    expect(page.locator(".money").first).to_contain_text("$")


def test_a_fault_is_shown_with_its_node_its_phases_and_what_it_cost(open_page: Open) -> None:
    page = open_page().page
    go(page, "fleet", "/fleet")
    row = page.locator("tr", has_text="worker 0 exited with code -9").first
    expect(row).to_contain_text("node-1")
    expect(row).to_contain_text("1.00 MiB")
    expect(page.locator(".epoch")).to_have_count(2)
    expect(page.locator("tbody tr", has_text="lost")).to_contain_text("node-1")


def test_a_slow_rank_stands_out_and_is_opened_from_the_map_by_click_or_keys(
    open_page: Open, tmp_path: Path
) -> None:
    run = RecordedRun(tmp_path / "wide", "wide", 40)
    run.train(40)
    run.measure_ranks(ranks=8, slow=5, steps=40)
    with serving(tmp_path) as port:
        page = open_page(f"http://127.0.0.1:{port}/").page
        go(page, "wide", "/ranks")
        expect(page.locator(".worst button").first).to_contain_text("rank 5")
        box = page.locator(".heat .stage canvas").bounding_box()
        assert box
        page.mouse.click(box["x"] + box["width"] - 20, box["y"] + (box["height"] - 22) * 5.5 / 8)
        expect(page.locator(".aside h2")).to_have_text("Rank 5")
        expect(page.locator(".aside .plot")).to_have_attribute("aria-label", re.compile("greatest 1.50 s"))
        assert "rank=5" in page.url
        page.locator(".heat .stage canvas").focus()
        page.keyboard.press("ArrowUp")
        expect(page.locator(".heat .tip")).to_contain_text("rank 4")
        page.keyboard.press("Enter")
        expect(page.locator(".aside h2")).to_have_text("Rank 4")
        page.goto("about:blank")


@pytest.mark.parametrize(
    ("ranks", "slow"), [(4_000, 280), pytest.param(100_000, 7_001, marks=pytest.mark.slow)]
)
def test_the_ranks_of_a_slow_node_are_one_band_in_the_order_of_nodes_and_are_seen_closer(
    open_page: Open, tmp_path: Path, ranks: int, slow: int
) -> None:
    per_node = 8
    nodes = ranks // per_node
    run = RecordedRun(tmp_path / "wide", "wide", 40)
    run.train(40)
    run.sit_on(
        [f"n{node}" for node in range(nodes)], ranks
    )  # rank r on node r % nodes: a node's ranks lie far apart
    run.measure_ranks(ranks=ranks, slow=range(slow, ranks, nodes), steps=12)
    with serving(tmp_path) as port:
        page = open_page(f"http://127.0.0.1:{port}/").page
        go(page, "wide", "/ranks")
        expect(page.locator(".worst button").nth(per_node - 1)).to_contain_text("1.25 ×")
        far_apart = {chip.split()[1] for chip in page.locator(".worst button").all_inner_texts()}
        assert len(far_apart) == per_node
        page.get_by_label("in the order of").select_option("node")
        expect(page.locator(".worst button").nth(1)).to_contain_text("1.00 ×")  # the first alone stands out
        expect(page.locator(".worst button").first).to_contain_text("1.25 ×")
        canvas = page.locator(".heat .stage canvas")
        box = canvas.bounding_box()
        assert box
        height = box["height"] - 22
        middle = box["y"] + height * slow / nodes
        page.mouse.move(box["x"] + 100, middle - 6)
        page.mouse.down()
        page.mouse.move(box["x"] + 100, middle + 6, steps=3)
        page.mouse.up()
        expect(page.locator(".note").first).to_contain_text(f"of {ranks:,}")
        shown = page.locator(".note").first.inner_text()
        assert int(shown.split(" ranks of")[0].replace(",", "")) < ranks / 10
        expect(page.locator(".worst button").first).to_contain_text("1.25 ×")
        page.locator(".worst button").first.click()
        expect(page.locator(".aside")).to_contain_text(f"n{slow}")
        canvas.focus()
        before = page.url
        page.keyboard.press("+")
        page.wait_for_url(lambda url: url != before)
        page.keyboard.press("a")
        expect(page.locator(".note").first).to_contain_text(f"{ranks:,} ranks, steps 1 to 12")
        assert "from=" not in page.url
        assert "order=node" in page.url
        page.goto("about:blank")


def test_lines_are_filtered_and_equal_lines_of_many_ranks_are_one_with_a_count(
    open_page: Open, tmp_path: Path
) -> None:
    run = RecordedRun(tmp_path / "talk", "talk", 40)
    for rank in range(3):
        run.log_lines(rank, ["cannot reach 10.0.0.7"])
    run.log_lines(1, [HOSTILE, "RuntimeError: no space left"], "error")
    with serving(tmp_path) as port:
        page = open_page(f"http://127.0.0.1:{port}/").page
        go(page, "talk", "/logs")
        expect(page.locator(".logline", has_text="cannot reach")).to_have_count(1)
        expect(page.locator(".logline", has_text="cannot reach").locator(".count")).to_have_text("×3")
        expect(page.locator(".logline .text", has_text=HOSTILE)).to_have_count(1)
        page.get_by_label("same lines as one").uncheck()
        expect(page.locator(".logline", has_text="cannot reach")).to_have_count(3)
        page.keyboard.press("/")
        page.keyboard.type("no space")
        expect(page.locator(".logline")).to_have_count(1)
        page.get_by_label("level").select_option("error")
        page.wait_for_url(re.compile("level=error"))
        assert "grep=no+space" in page.url
        assert page.evaluate("window.hacked") is None
        page.goto("about:blank")


# --- the page as a whole ---------------------------------------------------------------------------


def test_what_comes_from_a_run_is_only_ever_text(open_page: Open) -> None:
    page = open_page().page
    expect(page.locator("tbody .c-name a", has_text=HOSTILE_NAME)).to_have_count(1)
    go(page, HOSTILE_NAME)
    expect(page.locator("h1")).to_have_text(HOSTILE_NAME)
    expect(page.locator("main td", has_text=HOSTILE)).to_have_count(
        3
    )  # a line of its log, and what serves it
    for view in VIEWS[1:]:
        go(page, HOSTILE_NAME, view)
        expect(page.locator(".crumbs .name")).to_have_text(HOSTILE_NAME)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, main script").count() == 0


def test_an_exported_file_shows_every_view_without_a_server(
    open_page: Open, runs: Path, tmp_path: Path
) -> None:
    for name in ("fleet", "hostile"):
        export_run(runs / name, tmp_path / f"{name}.html")
        watched = open_page((tmp_path / f"{name}.html").as_uri())
        page = watched.page
        expect(page.locator(".live")).to_have_attribute("data-state", "file")
        expect(page.locator("figure.wide canvas")).to_be_visible()
        for view in VIEWS:
            page.evaluate(
                "(view) => { location.hash = location.hash.split('/').slice(0, 3).join('/') + view; }", view
            )
            page.wait_for_function("document.querySelector('main').innerText.length > 20")
            expect(page.locator(".trouble")).to_be_hidden()
        assert page.evaluate("window.hacked") is None
        assert [url for url in watched.requests if not url.startswith(("file:", "data:"))] == []


def test_the_keys_of_the_present_view_are_shown_on_a_question_mark(open_page: Open) -> None:
    page = open_page().page
    go(page, "fleet")
    expect(page.locator("h1")).to_have_text("fleet")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("Where the time went")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    for key, view in zip("tkyflpco", (*VIEWS[1:], ""), strict=True):
        page.keyboard.press("g")
        page.keyboard.press(key)
        page.wait_for_url(re.compile(rf"#/run/[^/?]+{view}([?].*)?$"))


@pytest.mark.slow
def test_without_a_mouse_the_focus_is_visible_and_reaches_what_can_be_clicked(open_page: Open) -> None:
    page = open_page().page
    expect(page.locator("tbody tr")).to_have_count(4)
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        tag, text, outline = page.evaluate(
            "(({ tagName, innerText, ariaLabel }, { outlineStyle }) => [tagName, ariaLabel ?? innerText, outlineStyle])"
            "(document.activeElement, getComputedStyle(document.activeElement))"
        )
        if tag == "BODY":  # once around
            break
        reached.add(text)
        assert outline != "none", f"nothing shows that the focus is at {text!r}"
    assert {"Loss", "Choose tiny", "tiny"} <= reached


@pytest.mark.slow
def test_it_is_dark_where_the_system_is_and_where_a_person_chose_so(open_page: Open) -> None:
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    dark = open_page(color_scheme="dark").page.evaluate(ground)
    page = open_page(color_scheme="light").page
    light = page.evaluate(ground)
    assert dark != light
    for _ in range(2):  # light, then dark
        page.keyboard.press("t")
    assert page.evaluate(ground) == dark
    page.reload()
    expect(page.locator("header button", has_text="dark")).to_be_visible()
    assert page.evaluate(ground) == dark
