"""Statistics of layers on the page: one figure at a time over layers and steps, with marks where it was not finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from observe.recorded import step
from phalanx.observe.events import Body, Event, LayerStatistics
from phalanx_watch.page.app import application
from phalanx_watch.page.export import export_run
from phalanx_watch.page.http import access_for
from phalanx_watch.page.runs import PageRuns
from phalanx_watch.page.view_curves import MOST_STEPS
from phalanx_watch.runs.row import run_id
from recorded_runs import RecordedRun
from watch.made_runs import crashed, write_events
from watch.page.browsing import PATIENCE_MS, Open, go, serving

LAYERS = ["embedding", "0", "1", "head"]


def measured(number: int, **changes: Any) -> LayerStatistics:
    figures: dict[str, list[float | None]] = {
        "residual.rms": [0.5, 1.0 * number, 2.0 * number, None],
        "attention.weight_norm": [None, 3.0, 4.0, None],
    }
    return LayerStatistics(**{"step": number, "layers": LAYERS, "figures": figures, **changes})


def broken(number: int) -> LayerStatistics:
    return measured(number, figures={"residual.rms": [0.5, 1.0, math.inf, None]})


def view(run_dir: Path, query: str = "") -> Any:
    runs = PageRuns([run_dir.parent])
    app = application(runs, access_for("127.0.0.1", ""), kept_s=0.0)
    client = TestClient(app, base_url="http://127.0.0.1")
    return client.get(f"/api/run/{run_id(run_dir)}/layers{query}")


def run_of(path: Path, *bodies: Body) -> Path:
    run_dir = crashed(path)
    write_events(run_dir, [Event(1e9 + at, 0, body) for at, body in enumerate((step(1, 9), *bodies))])
    return run_dir


def test_a_figure_has_a_row_for_each_layer_that_has_it_and_a_column_for_each_step(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path / "run", measured(2), measured(4), broken(6))
    answer = view(run_dir).json()
    assert answer["figure"] == "residual.rms"
    assert answer["figures"] == ["attention.weight_norm", "residual.rms"]
    assert (answer["layers"], answer["steps"]) == (["embedding", "0", "1"], [2, 4, 6])
    assert answer["values"] == [[0.5, 0.5, 0.5], [2, 4, 1], [4, 8, None]]
    assert answer["nonfinite"] == [[2, 2]]
    other = view(run_dir, "?column=attention.weight_norm").json()
    assert (other["layers"], other["values"]) == (["0", "1"], [[3, 3, None], [4, 4, None]])


def test_a_step_that_was_repeated_counts_as_it_was_measured_last(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path / "run", measured(2), broken(4), measured(4))
    answer = view(run_dir).json()
    assert (answer["steps"], answer["nonfinite"]) == ([2, 4], [])


def test_evenly_spaced_steps_of_many_measured_ones_are_shown_with_the_newest(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path / "run", *(measured(number) for number in range(1, 2 * MOST_STEPS + 2)))
    answer = view(run_dir).json()
    assert answer["steps"] == list(range(1, 2 * MOST_STEPS + 2))[::-1][::3][::-1]
    assert answer["left_out"] == 2 * MOST_STEPS + 1 - len(answer["steps"])


def test_a_run_without_statistics_has_an_empty_answer_and_an_unknown_figure_lists_those_there_are(
    tmp_path: Path,
) -> None:
    assert view(run_of(tmp_path / "none")).json()["steps"] == []
    refused = view(run_of(tmp_path / "run", measured(2)), "?column=residual.mean")
    assert refused.status_code == 400
    assert "attention.weight_norm, residual.rms" in refused.json()["error"]


def test_an_exported_file_has_every_figure(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path / "run", measured(2))
    export_run(run_dir, tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text()
    for key in ("/layers", "/layers?column=residual.rms", "/layers?column=attention.weight_norm"):
        assert f'"/api/run/{run_id(run_dir)}{key}"' in text


@pytest.mark.servers
@pytest.mark.parametrize("width", [1280, 360])
def test_the_map_shows_the_value_under_the_pointer_and_where_it_was_not_finite(
    open_page: Open, tmp_path: Path, width: int
) -> None:
    from playwright.sync_api import expect

    run = RecordedRun(tmp_path / "runs" / "run", "run", 9)
    run.train(9)
    for body in (measured(2), measured(4), broken(6)):
        run.log.append(body)
    run.finish()
    with serving(tmp_path / "runs") as port:
        page = open_page(f"http://127.0.0.1:{port}/", width=width).page
        go(page, "run", "/layers")
        expect(page.locator(".note")).to_contain_text("1 value not finite, the first at step 6")
        expect(page.locator(".scale")).to_contain_text("not finite")
        page.locator(".heat canvas").first.focus()
        page.keyboard.press("ArrowDown")
        expect(page.locator(".heat .tip")).to_contain_text("residual.rms 1")
        page.keyboard.press("ArrowDown")
        expect(page.locator(".heat .tip")).to_contain_text("residual.rms not finite")
        page.locator("select").select_option("attention.weight_norm", timeout=PATIENCE_MS)
        expect(page.locator(".note")).to_contain_text("2 layers, steps 2 to 6")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
