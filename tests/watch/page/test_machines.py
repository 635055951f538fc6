"""Use of a run's machines on the page: a line for each of a few, a band over many."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from phalanx.train.step.machines import MACHINE_FIGURES, machines_used
from phalanx_watch.page.app import application
from phalanx_watch.page.http import access_for
from phalanx_watch.page.runs import PageRuns
from phalanx_watch.runs.row import run_id
from recorded_runs import RecordedRun
from watch.page.browsing import Open, go, serving


def run_on(path: Path, machines: int, gpus: bool = False) -> RecordedRun:
    """A run whose machines are measured every four steps; the last machine computes most."""
    run = RecordedRun(path, path.name, 40)
    random = np.random.default_rng(machines)
    names = tuple(f"node-{place}.cluster" for place in range(machines))
    scale = [1.0, 2.0**36, 2.0**28, 2.0**27, 2.0**30, 1.0, 700.0]
    for _ in range(10):
        run.train(4)
        rows = random.uniform(0.2, 0.8, (machines, len(MACHINE_FIGURES))) * scale
        rows[-1, MACHINE_FIGURES.index("cpu")] = 0.95
        if not gpus:
            rows[:, 5:] = np.nan
        event = machines_used(run.step, names, rows)
        assert event is not None
        run.log.append(event)
    run.finish()
    return run


def test_medians_extremes_and_the_figures_of_a_few_machines_are_curves(tmp_path: Path) -> None:
    few, many = run_on(tmp_path / "few", 2), run_on(tmp_path / "many", 12)
    app = application(PageRuns([tmp_path]), access_for("127.0.0.1", ""), kept_s=0.0)
    client = TestClient(app, base_url="http://127.0.0.1")
    for run, machines in ((few, 2), (many, 12)):
        summary = client.get(f"/api/run/{run_id(run.directory.path)}").json()
        own = [name for name in summary["curves"] if name.startswith("machine.cpu@")]
        assert len(own) == (2 if machines == 2 else 0)
        assert {"machine.cpu", "machine.cpu.least", "machine.cpu.most"} <= set(summary["curves"])
        assert summary["machines"]["nodes"] == machines
        assert summary["machines"]["most"]["cpu"] == f"node-{machines - 1}.cluster"


@pytest.mark.servers
@pytest.mark.parametrize("width", [1280, 360])
def test_one_machine_has_its_line_three_have_theirs_and_twelve_a_band_whose_edges_are_named(
    open_page: Open, tmp_path: Path, width: int
) -> None:
    from playwright.sync_api import expect

    for name, machines in (("one", 1), ("three", 3), ("twelve", 12)):
        run_on(tmp_path / "runs" / name, machines)
    with serving(tmp_path / "runs") as port:
        page = open_page(f"http://127.0.0.1:{port}/", width=width).page
        chart = page.locator("figure", has_text="Use of machines")
        go(page, "one")
        expect(chart.locator(".legend .entry")).to_have_count(1)
        expect(chart.locator(".foot:visible")).to_have_count(0)
        go(page, "three")
        expect(chart.locator(".legend .label")).to_have_text(
            [f"CPU node-{place}.cluster" for place in range(3)]
        )
        go(page, "twelve")
        expect(chart.locator(".legend .entry")).to_have_count(1)
        expect(chart.locator(".foot:visible")).to_contain_text("Median of 12 machines")
        expect(chart.locator(".foot:visible")).to_contain_text("greatest on node-11.cluster")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
