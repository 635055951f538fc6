"""The page's answers, over runs that the real writers made."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
from starlette.testclient import TestClient

from observe.recorded import crashed_run, step
from phalanx.observe.event_log import read_events
from phalanx.observe.events import EpochLeft, Event, Finished, Message, RunStarted
from phalanx.observe.goodput import goodput
from phalanx_watch.page.app import application
from phalanx_watch.page.http import access_for
from phalanx_watch.page.runs import PageRuns
from phalanx_watch.runs.recorded import read_recorded
from recorded_runs import RecordedRun
from watch.made_runs import crashed, write_events

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    crashed(tmp_path / "runs" / "first")
    return tmp_path / "runs"


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    with TestClient(
        application(PageRuns([folder]), access_for("127.0.0.1", ""), kept_s=0.0), base_url="http://127.0.0.1"
    ) as made:
        yield made


def _ids(client: TestClient) -> list[str]:
    return [run["id"] for run in client.get("/api/runs").json()["runs"]]


def test_the_list_has_a_row_for_each_run_with_its_newest_numbers(client: TestClient) -> None:
    (row,) = client.get("/api/runs").json()["runs"]
    assert (row["step"], row["steps"], row["state"], row["ranks"]) == (40, 40, "finished", 2)
    assert row["loss"] == 2.0


def test_the_list_is_filtered_and_a_mistake_is_refused_with_the_nearest_column(client: TestClient) -> None:
    answer = client.get("/api/runs", params={"where": "step>39 and name~first"}).json()
    assert [row["name"] for row in answer["runs"]] == ["first"]
    answer = client.get("/api/runs", params={"where": "step>40"}).json()
    assert (answer["runs"], answer["total"]) == ([], 1)
    answer = client.get("/api/runs", params={"where": "stop>40"})
    assert answer.status_code == 400
    assert "did you mean step?" in answer.json()["error"]


def test_settings_that_differ_between_runs_have_their_values(tmp_path: Path) -> None:
    for number in range(2):
        run = RecordedRun(tmp_path / f"run-{number}", "run", 20, lr=1e-3 * (number + 1))
        run.train(1)
    client = TestClient(
        application(PageRuns([tmp_path]), access_for("127.0.0.1", "")), base_url="http://127.0.0.1"
    )
    answer = client.get("/api/settings", params={"names": "train.steps"}).json()
    assert answer["differ"] == ["optimizer.lr"]
    assert sorted(answer["values"]["optimizer.lr"].values()) == [0.001, 0.002]
    assert {*answer["values"]["train.steps"].values()} == {20}
    assert "train.batch_size" in answer["all"]


def test_a_run_file_that_cannot_be_read_makes_no_setting_differ(tmp_path: Path) -> None:
    for number in range(3):
        run = RecordedRun(tmp_path / f"run-{number}", "run", 20, lr=1e-3 * (number + 1))
        run.train(1)
    run.directory.run_file.write_text("[")
    client = TestClient(
        application(PageRuns([tmp_path]), access_for("127.0.0.1", "")), base_url="http://127.0.0.1"
    )
    answer = client.get("/api/settings").json()
    assert answer["differ"] == ["optimizer.lr"]
    assert len(answer["values"]["optimizer.lr"]) == 3


def test_settings_of_one_value_come_before_lists(tmp_path: Path) -> None:
    for number in range(2):
        run = RecordedRun(tmp_path / f"run-{number}", "run", 20, lr=1e-3 * (number + 1))
        run.train(1)
        table = tomllib.loads(run.directory.run_file.read_text())
        table["data"]["stages"] = [0, 5 + number]
        run.directory.run_file.write_text(tomli_w.dumps(table))
    client = TestClient(
        application(PageRuns([tmp_path]), access_for("127.0.0.1", "")), base_url="http://127.0.0.1"
    )
    assert client.get("/api/settings").json()["differ"] == ["optimizer.lr", "data.stages"]


def test_two_runs_of_one_name_have_addresses_of_their_own(folder: Path, tmp_path: Path) -> None:
    write_events(tmp_path / "more" / "first", [Event(1.8e9, 0, step(1, 9, loss=7.0))])
    client = TestClient(
        application(PageRuns([folder, tmp_path / "more"]), access_for("127.0.0.1", "")),
        base_url="http://127.0.0.1",
    )
    first_losses = {
        run: client.get(f"/api/run/{run}/curves").json()["series"]["loss"]["y"][0] for run in _ids(client)
    }
    assert len(first_losses) == 2
    assert sorted(first_losses.values()) == [3.95, 7.0]


def test_curves_come_with_marks_and_in_as_many_points_as_requested(client: TestClient) -> None:
    (run,) = _ids(client)
    curves = client.get(f"/api/run/{run}/curves?names=loss,lr,eval_loss").json()
    assert curves["x"] == list(range(1, 41))
    assert curves["series"].keys() == {"loss", "lr", "eval_loss"}
    assert not curves["reduced"]
    assert {mark["kind"] for mark in curves["marks"]} >= {"checkpoint", "recovery", "nonfinite", "evaluation"}
    small = client.get(f"/api/run/{run}/curves?points=10").json()
    assert (len(small["x"]), small["reduced"], small["total"]) == (10, True, 40)


def test_goodput_is_that_of_the_events_in_seconds(client: TestClient, folder: Path) -> None:
    (run,) = _ids(client)
    report = client.get(f"/api/run/{run}/goodput?price_per_accelerator_hour=3.6").json()
    ours = goodput(read_events(folder / "first" / "events.jsonl"))
    assert report["goodput"] == ours.goodput
    assert sum(report["buckets"].values()) == pytest.approx(report["held_s"])
    assert report["cost"]["dollars"] == pytest.approx(2 * report["held_s"] / 1000)
    (cause,) = report["causes"]
    assert (cause["lost_steps"], cause["between_s"]) == (5, pytest.approx(30.0))
    assert {attempt["attempt"] for attempt in report["attempts"]} == {0, 1}


def test_each_attempt_costs_the_time_of_its_own_ranks(tmp_path: Path) -> None:
    ledger = {"step.compute": 3600.0}
    run_dir = tmp_path / "run"
    write_events(
        run_dir,
        [
            Event(1e9, 0, RunStarted("x", 1, ranks=8)),
            Event(1e9 + 3600, 0, step(1, 1, ledger=ledger)),
            Event(1e9 + 3600, 1, RunStarted("x", 1, ranks=2)),
            Event(1e9 + 7200, 1, step(1, 1, ledger=ledger)),
            Event(1e9 + 7200, 1, Finished({})),
        ],
    )
    client = TestClient(
        application(PageRuns([tmp_path]), access_for("127.0.0.1", "")), base_url="http://127.0.0.1"
    )
    (run,) = _ids(client)
    cost = client.get(f"/api/run/{run}/goodput?price_per_accelerator_hour=1").json()["cost"]
    assert (cost["accelerator_hours"], cost["dollars"]) == (10.0, 10.0)
    assert cost["buckets"]["step.compute"] == 10.0
    assert (cost["outcomes"]["discarded.rollback"], cost["outcomes"]["committed"]) == (8.0, 2.0)
    assert cost["not_in_the_weights"] == 8.0
    shown = read_recorded(run_dir, 1.0).cost
    assert shown is not None
    assert (shown.accelerator_hours, shown.amount) == (10.0, 10.0)


def test_a_price_out_of_bounds_is_refused_with_both(client: TestClient) -> None:
    (run,) = _ids(client)
    for price in ("-1", "1000001"):
        answer = client.get(f"/api/run/{run}/goodput?price_per_accelerator_hour={price}")
        assert answer.status_code == 400
        assert "give dollars, from 0 to 1,000,000" in answer.json()["error"]


def test_without_a_price_nothing_costs_anything(client: TestClient) -> None:
    (run,) = _ids(client)
    assert client.get(f"/api/run/{run}/goodput").json()["cost"] is None


def test_a_fault_names_its_node_its_phases_and_who_noticed(tmp_path: Path) -> None:
    ledger = {"start.restore": 2.0, "fault.undetected": 0.5, "step.compute": 1.0}
    reason = f"node {HOSTILE}: worker 0 exited with code -9"
    write_events(
        tmp_path / "run",
        [
            Event(1e9, 0, RunStarted("x", 9, ranks=2)),
            Event(1e9 + 5, 0, step(3, 9, ledger={"step.compute": 3.0})),
            Event(1e9 + 6, 0, EpochLeft(0, reason)),
            Event(1e9 + 9, 1, RunStarted("x", 9, ranks=2)),
            Event(1e9 + 10, 1, step(1, 9, ledger=ledger)),
            Event(1e9 + 11, 1, Finished({})),
        ],
    )
    client = TestClient(
        application(PageRuns([tmp_path]), access_for("127.0.0.1", "")), base_url="http://127.0.0.1"
    )
    (run,) = _ids(client)
    fleet = client.get(f"/api/run/{run}/fleet").json()
    assert fleet["missing"]
    (fault,) = fleet["faults"]
    assert (fault["node"], fault["what"]) == (
        HOSTILE,
        "worker 0 exited with code -9",
    )  # data, which the page escapes
    assert fault["phases"] == {"fault.undetected": 0.5, "start.restore": 2.0}
    assert fault["lost_steps"] == 3
    assert "worker process" in fault["detected_by"]
    assert [epoch["epoch"] for epoch in fleet["epochs"]] == [0, 1]


def test_answers_are_json_also_for_a_run_with_markup_and_nan(tmp_path: Path) -> None:
    nan = float("nan")
    write_events(
        tmp_path / "<b>", [Event(1e9, 0, Message("error", HOSTILE)), Event(1e9, 0, step(1, 2, loss=nan))]
    )
    client = TestClient(
        application(PageRuns([tmp_path]), access_for("127.0.0.1", "")), base_url="http://127.0.0.1"
    )
    (run,) = _ids(client)
    answer = client.get(f"/api/run/{run}/curves")
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(answer.text)["series"]["loss"]["y"] == [None]


@pytest.mark.parametrize(
    "query",
    [
        "names=happiness",
        "x=sideways",
        "first=much",
        "points=0",
        "points=1e9",
        "first=nan",
        "names=" + "a," * 100,
        "x=flops",
        "last=" + "9" * 200,
    ],
)
def test_a_question_that_makes_no_sense_is_refused_with_the_reason(client: TestClient, query: str) -> None:
    (run,) = _ids(client)
    answer = client.get(f"/api/run/{run}/curves?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]


@pytest.mark.parametrize(
    "path",
    [
        "/api/run/nobody",
        "/api/run/..",
        "/api/run/%2e%2e/curves",
        "/api/run/..%2f..%2fetc%2fpasswd",
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static//etc/passwd",
        "/static/..%2f..%2fguard.py",
        "/api/run/first/profile/..%2f..%2fevents.jsonl/trace",
        "/%00",
        "/nothing",
        "/export/nobody.html",
    ],
)
def test_no_path_leads_out_of_the_page(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code in (400, 404), answer.text
    assert "root:" not in answer.text


def test_a_run_that_vanishes_is_no_longer_there(client: TestClient, folder: Path) -> None:
    (run,) = _ids(client)
    client.get(f"/api/run/{run}")
    shutil.rmtree(folder / "first")
    for path in ("", "/curves", "/goodput", "/fleet", "/checkpoints"):
        assert client.get(f"/api/run/{run}{path}").status_code in (200, 404), path


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 4096, b"{" * 10_000, b'{"t":1}\n' * 100, os.urandom(5000)]
)
@pytest.mark.parametrize(
    "name",
    [
        "events.jsonl",
        "fleet.json",
        "run.toml",
        "record.json",
        "result.json",
        "checkpoints/step-00000010/checkpoint.json",
        "ranks.bin",
        "steps.bin",
    ],
)
def test_garbage_in_any_file_of_a_run_breaks_no_view(
    client: TestClient, folder: Path, name: str, content: bytes
) -> None:
    path = folder / "first" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    for run in _ids(client):
        for view in (
            "",
            "/curves?names=all",
            "/goodput",
            "/fleet",
            "/checkpoints",
            "/ranks",
            "/logs",
            "/why",
            "/profiles",
        ):
            answer = client.get(f"/api/run/{run}{view}")
            assert answer.status_code in (200, 404), (view, answer.text)


def test_views_write_nothing_into_a_run(client: TestClient, folder: Path) -> None:
    def state() -> list[tuple[str, int]]:
        return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))

    before = state()
    (run,) = _ids(client)
    for view in (
        "",
        "/curves",
        "/goodput",
        "/fleet",
        "/checkpoints",
        "/ranks",
        "/layers",
        "/logs",
        "/why",
        "/profiles",
    ):
        client.get(f"/api/run/{run}{view}")
    assert state() == before


def test_events_written_later_are_in_the_next_answer(client: TestClient, folder: Path) -> None:
    (run,) = _ids(client)
    assert client.get(f"/api/run/{run}/curves").json()["total"] == 40
    write_events(folder / "first", [Event(1.9e9, 1, step(41, 42)), Event(1.9e9, 1, step(42, 42))])
    assert client.get(f"/api/run/{run}/curves").json()["total"] == 42


def test_the_recorded_run_is_the_one_that_was_written(folder: Path) -> None:
    assert list(read_events(folder / "first" / "events.jsonl")) == crashed_run()
