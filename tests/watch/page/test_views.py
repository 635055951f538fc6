"""Views of ranks, logs and comparisons, over what the real writers wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from observe.rank_frames import drawn_frame, write
from observe.recorded import step
from phalanx.fleet.control.fleet_file import Member, write_fleet_file
from phalanx.observe.events import Event, MachineUsed, Sampled
from phalanx.observe.logs.line import LogLine, encode
from phalanx.observe.rank_stream import RankStream
from phalanx.run.directory.paths import RunDirectory
from phalanx_watch.page.app import application
from phalanx_watch.page.http import access_for
from phalanx_watch.page.runs import PageRuns
from phalanx_watch.runs.row import run_id
from watch.made_runs import crashed, write_events
from watch.why.watched import fleet_file

HOSTILE = "<script>alert(1)</script>"
UNREACHABLE = "rank {} cannot reach 10.0.0.{}: " + HOSTILE


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return crashed(tmp_path / "runs" / "a")


@pytest.fixture
def client(run_dir: Path) -> TestClient:
    runs = PageRuns([run_dir.parent])
    return TestClient(application(runs, access_for("127.0.0.1", ""), kept_s=0.0), base_url="http://127.0.0.1")


def _write_log(run_dir: Path, rank: int, lines: list[LogLine]) -> None:
    path = RunDirectory(run_dir).log(0, rank)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(map(encode, lines)))


def _line(t: float, rank: int, text: str, level: str = "warning") -> LogLine:
    return LogLine(t, level, "node-1", rank, None, 0, 7, text, f"rank-{rank:05d}")


def _logs(client: TestClient, run_dir: Path, query: str) -> dict[str, Any]:
    logs: dict[str, Any] = client.get(f"/api/run/{run_id(run_dir)}/logs?{query}").json()
    return logs


def test_a_heat_map_is_a_header_and_its_values(client: TestClient, run_dir: Path) -> None:
    write(RunDirectory(run_dir).ranks, *(drawn_frame(3, 10 * n, ranks=6) for n in range(1, 9)))
    body = client.get(f"/api/run/{run_id(run_dir)}/ranks?column=compute_s&columns=4&rows=3").content
    head, values = _map(body)
    with RankStream(RunDirectory(run_dir).ranks) as stream:
        expected = stream.heat_map("compute_s", most_columns=4, most_rows=3)
    assert np.array_equal(values, expected.values, equal_nan=True)
    assert (head["rows"], head["columns"], head["ranks"], head["reduced"]) == (3, 4, 6, True)
    assert head["row_ranks"] == [0, 2, 4]
    assert head["maximum"] == np.nanmax(values)


def test_a_row_of_many_ranks_names_the_one_that_stands_out(client: TestClient, run_dir: Path) -> None:
    frames = [drawn_frame(3, 10 * n, ranks=1000) for n in (1, 2)]
    frames[-1].columns["compute_s"][777] = 99.0
    write(RunDirectory(run_dir).ranks, *frames)
    body = client.get(f"/api/run/{run_id(run_dir)}/ranks?column=compute_s&rows=4").content
    head, _ = _map(body)
    assert head["row_ranks"] == [0, 250, 500, 750]
    assert head["row_worst"][3] == 777


def test_a_part_of_the_map_is_drawn_in_the_order_of_nodes_against_what_is_usual_for_all(
    client: TestClient, run_dir: Path
) -> None:
    frames = [drawn_frame(3, 10 * n, ranks=1000) for n in (1, 2)]
    write(RunDirectory(run_dir).ranks, *frames)
    order = np.array([4 * rank + node for node in range(4) for rank in range(250)])  # rank r on node r % 4
    members = tuple(Member(f"n{node}", "member", "a", tuple(range(node, 1000, 4))) for node in (3, 1, 0, 2))
    write_fleet_file(run_dir, fleet_file(1.0, ranks=1000, members=members))
    query = "column=compute_s&columns=2&rows=3&order=node&from=200&to=280"
    head, values = _map(client.get(f"/api/run/{run_id(run_dir)}/ranks?{query}").content)
    rows = [order[200:227], order[227:254], order[254:281]]
    assert (head["order"], head["ranks"], head["places"], head["first_place"]) == ("node", 81, 1000, 200)
    assert head["row_sizes"] == [27, 27, 27]
    assert head["row_ranks"] == [int(row[0]) for row in rows]
    assert head["row_nodes"] == ["n0", "n0 … n1", "n1"]
    for column, frame in enumerate(frames):
        own = frame.columns["compute_s"]
        assert values[:, column] == pytest.approx([np.nanmax(own[row]) for row in rows], rel=1e-3)
        like = np.sort([np.nanmax(own[order[at : at + 27]]) for at in range(0, 999, 27)])
        assert head["column_usual"][column] == pytest.approx(like[len(like) // 2], rel=1e-3)


def _map(body: bytes) -> tuple[dict[str, Any], Any]:
    """The header of a heat map and its values."""
    length = int.from_bytes(body[:4], "little")
    head = json.loads(body[4 : 4 + length])
    values = np.frombuffer(body[4 + length :], "<f4").reshape(head["rows"], head["columns"])
    return head, values


def test_a_rank_has_its_history(client: TestClient, run_dir: Path) -> None:
    write(RunDirectory(run_dir).ranks, *(drawn_frame(3, 10 * n, ranks=6) for n in range(1, 4)))
    history = client.get(f"/api/run/{run_id(run_dir)}/rank/5?column=memory_bytes").json()
    assert history["steps"] == [10, 20, 30]
    assert client.get(f"/api/run/{run_id(run_dir)}/rank/6").status_code == 404
    assert client.get(f"/api/run/{run_id(run_dir)}/rank/-1").status_code == 404


def test_a_run_without_numbers_of_ranks_has_none_to_show(client: TestClient, run_dir: Path) -> None:
    assert client.get(f"/api/run/{run_id(run_dir)}/ranks").json() == {"missing": True}


def test_lines_of_all_ranks_are_merged_in_time_and_filtered(client: TestClient, run_dir: Path) -> None:
    for rank in (0, 1):
        _write_log(run_dir, rank, [_line(100.0 + 2 * n + rank, rank, f"line {n}") for n in range(5)])
    times = [line["t"] for line in _logs(client, run_dir, "")["lines"]]
    assert times == sorted(times)
    assert len(times) == 10
    assert {line["rank"] for line in _logs(client, run_dir, "rank=1")["lines"]} == {1}
    assert len(_logs(client, run_dir, "since=105&until=107")["lines"]) == 3
    assert _logs(client, run_dir, "level=error")["lines"] == []
    newest = _logs(client, run_dir, "last=2")
    assert ([line["t"] for line in newest["lines"]], newest["more"]) == ([108.0, 109.0], True)


def test_the_same_words_of_many_ranks_are_one_line_with_a_count(client: TestClient, run_dir: Path) -> None:
    for rank in range(5):
        _write_log(run_dir, rank, [_line(100.0 + rank, rank, UNREACHABLE.format(rank, rank))])
    (group,) = _logs(client, run_dir, "grouped=1")["lines"]
    assert (group["count"], group["first"], group["last"], group["place"]) == (
        5,
        100.0,
        104.0,
        "ranks 0-4 on node-1",
    )
    assert group["text"] == UNREACHABLE.format(0, 0)  # data, which the page escapes


def test_text_is_searched_for_literally(client: TestClient, run_dir: Path) -> None:
    _write_log(run_dir, 0, [_line(1.0, 0, "a+b (c"), _line(2.0, 0, "aab c")])
    assert [line["t"] for line in _logs(client, run_dir, "grep=a%2Bb%20(C")["lines"]] == [1.0]


@pytest.mark.parametrize(
    "query", ["rank=x", "rank=-1", "rank=9999999999", "level=loud", "last=0", "last=1e9", "since=soon"]
)
def test_a_filter_that_makes_no_sense_is_refused(client: TestClient, run_dir: Path, query: str) -> None:
    assert client.get(f"/api/run/{run_id(run_dir)}/logs?{query}").status_code == 400


def test_runs_without_run_files_cannot_be_compared_and_are_named(client: TestClient, run_dir: Path) -> None:
    write_events(run_dir.parent / "b", [Event(1e9, 0, step(1, 2))])
    ids = [run["id"] for run in client.get("/api/runs").json()["runs"]]
    answer = client.get(f"/api/compare?ids={','.join(ids)}")
    assert answer.status_code == 400
    assert "run.toml" in answer.json()["error"]
    assert client.get(f"/api/compare?ids={ids[0]}").status_code == 400
    assert client.get(f"/api/compare?ids={ids[0]},nobody").status_code == 404


def _profile(run_dir: Path, name: str) -> Path:
    folder = RunDirectory(run_dir).profiles / name
    folder.mkdir(parents=True)
    (folder / "trace.json.gz").write_bytes(b"the trace")
    table = {"columns": ["compute"], "rows": []}
    summary = {"step": 12, "steps": [12, 13], "ranks": [0], "step_s": 1.5, "verdict": HOSTILE, "table": table}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_profiles_are_listed_shown_and_downloaded(client: TestClient, run_dir: Path) -> None:
    _profile(run_dir, "step-12")
    base = f"/api/run/{run_id(run_dir)}"
    (profile,) = client.get(f"{base}/profiles").json()["profiles"]
    assert (profile["name"], profile["step"], profile["verdict"]) == ("step-12", 12, HOSTILE)
    assert client.get(f"{base}/profile/step-12").json()["step_s"] == 1.5
    trace = client.get(f"{base}/profile/step-12/trace")
    assert (trace.content, trace.headers["content-type"]) == (b"the trace", "application/gzip")
    assert 'filename="step-12.json.gz"' in trace.headers["content-disposition"]


@pytest.mark.parametrize("name", ["%2e%2e", "..%2f..%2ffirst", "%2fetc", "a%00b", "nothing"])
def test_a_name_of_a_profile_leads_nowhere_else(client: TestClient, run_dir: Path, name: str) -> None:
    (run_dir / "trace.json.gz").write_bytes(b"secret")
    for view in ("", "/trace"):
        answer = client.get(f"/api/run/{run_id(run_dir)}/profile/{name}{view}")
        assert answer.status_code == 404
        assert "secret" not in answer.text


def test_a_trace_that_is_a_link_out_of_the_run_is_not_sent(
    client: TestClient, run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = _profile(run_dir, "step-12")
    (folder / "trace.json.gz").unlink()
    (folder / "trace.json.gz").symlink_to(tmp_path / "secret")
    assert client.get(f"/api/run/{run_id(run_dir)}/profile/step-12/trace").status_code == 404


def test_what_is_wrong_is_a_list_of_reasons(client: TestClient, run_dir: Path) -> None:
    assert isinstance(client.get(f"/api/run/{run_id(run_dir)}/why").json()["reasons"], list)


def test_samples_are_listed_newest_first_and_a_step_that_is_done_again_counts_once(
    client: TestClient, run_dir: Path
) -> None:
    texts = {(10, "a"): "one", (10, "b"): "two", (20, "a"): "three", (20, "b"): "four"}
    samples = [Sampled(at, name, "p", text, [1, 2]) for (at, name), text in texts.items()]
    write_events(run_dir, [Event(2e9, 5, body) for body in (*samples, samples[-1])])
    content = client.get(f"/api/run/{run_id(run_dir)}/samples").json()["samples"]
    assert [
        (sample["name"], [(text["step"], text["text"]) for text in sample["texts"]]) for sample in content
    ] == [
        ("a", [(20, "three"), (10, "one")]),
        ("b", [(20, "four"), (10, "two")]),
    ]
    assert client.get(f"/api/run/{run_id(run_dir)}").json()["has"]["samples"]


def test_use_of_the_machine_is_curves_of_a_run(client: TestClient, run_dir: Path) -> None:
    figures = {"cpu": 0.5, "memory_bytes": 2.0**30}
    write_events(run_dir, [Event(2e9, 5, MachineUsed(20, "node", figures))])
    series = client.get(f"/api/run/{run_id(run_dir)}/curves?names=machine.cpu,machine.gpu").json()["series"]
    assert 0.5 in series["machine.cpu"]["y"]
    assert set(series["machine.gpu"]["y"]) == {None}
