"""All runs of a folder as metrics, seen from outside."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from observe.recorded import step
from observe.served_runs import SERVED
from phalanx.observe.events import Event, Finished, RunStarted
from phalanx.observe.metrics.endpoint import Target, announce
from phalanx.observe.metrics.samples import Labels, render
from phalanx.observe.record.notes import SILENT_S, ServingNote
from phalanx.run.directory.paths import RunDirectory
from phalanx_watch.lookout import (
    ACKNOWLEDGED,
    MOST_RUNS,
    OLD_S,
    OVER_S,
    SERVING_METRICS,
    Lookout,
    reason_samples,
    rest_s,
    watched,
)
from phalanx_watch.page.app import application
from phalanx_watch.page.http import access_for
from phalanx_watch.page.runs import PageRuns
from phalanx_watch.runs.index import RunIndex
from phalanx_watch.runs.row import RunLabels, RunRow, read_labels, run_id, write_labels
from phalanx_watch.why.observed import CODES, Reason
from watch.made_runs import write_events

T0 = 1_900_000_000.0


def _broken_off(run: Path, loss: float = 2.0, begin_s: float = T0) -> Path:
    """A run of which no process is left, and whose stream has no end."""
    write_events(
        run,
        [
            Event(begin_s, 0, RunStarted(str(run), 100)),
            *(Event(begin_s + n, 0, step(n, 100, loss=loss)) for n in (1, 2, 3)),
        ],
    )
    return run


def _series(lookout: Lookout) -> dict[tuple[str, str, str], float]:
    """Series: name, run and the other labels -> value."""
    series = {}
    for family in text_string_to_metric_families(render(lookout.look()).decode()):
        for sample in family.samples:
            more = [value for name, value in sample.labels.items() if name != "run"]
            series[sample.name, sample.labels["run"], ",".join(more)] = sample.value
    return series


def _lookout(tmp_path: Path, *folders: Path, at: float = T0 + 4) -> Lookout:
    return Lookout(RunIndex(folders, tmp_path / "cache").rows, lambda: at)


def test_a_run_without_any_process_has_its_numbers_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    _broken_off(tmp_path / "runs" / "a")
    series = _series(_lookout(tmp_path, tmp_path / "runs"))
    assert series["phalanx_loss", "a", ""] == 2.0
    assert series["phalanx_reason", "a", "gone"] == 3
    assert series["phalanx_reason", "a", "loss-spike"] == 0
    assert series["phalanx_reasons_timestamp_seconds", "a", ""] == T0 + 4
    assert {key[2] for key in series if key[0] == "phalanx_reason"} == set(CODES)


def test_the_servers_of_a_run_are_reported_however_long_ago_it_was_trained_and_nothing_else_of_it(
    tmp_path: Path,
) -> None:
    run, now = _broken_off(tmp_path / "runs" / "a"), T0 + 2 * OLD_S
    directory = RunDirectory(run)
    for name, state, age_s in (("one", "serving", 1), ("two", "out of memory", 2), ("three", "serving", 100)):
        figures = replace(SERVED, url=name, state=state, seen_s=now - age_s)
        ServingNote(directory, name, lambda figures=figures: figures).once()
    series = _series(_lookout(tmp_path, tmp_path / "runs", at=now))
    servers = {key[2]: value for key, value in series.items() if key[0] == "phalanx_serving_servers"}
    assert servers == {"serving": 1, "draining": 0, "trouble": 1, "silent": 1}
    assert series["phalanx_serving_texts", "a", "waiting"] == 2 * SERVED.waiting
    assert series["phalanx_serving_tokens_total", "a", "generated"] == 2 * SERVED.generated_tokens
    assert {key[0] for key in series} == {metric.name for metric in SERVING_METRICS}
    assert _series(_lookout(tmp_path, tmp_path / "runs", at=now + OVER_S)) == {}


def test_what_servers_have_counted_never_falls_when_one_of_them_ends_or_is_silent_for_a_while(
    tmp_path: Path,
) -> None:
    run, now = _broken_off(tmp_path / "runs" / "a"), [T0]
    lookout = Lookout(RunIndex([tmp_path / "runs"], tmp_path / "cache").rows, lambda: now[0])

    def report(name: str, generated: int, seen_s: float) -> ServingNote:
        figures = replace(
            SERVED, url=name, generated_tokens=generated, refused=generated // 10, seen_s=seen_s
        )
        note = ServingNote(RunDirectory(run), name, lambda: figures)
        note.once()
        return note

    def counted() -> tuple[float, float]:
        series = _series(lookout)
        names = ("phalanx_serving_tokens_total", "generated"), ("phalanx_serving_requests_refused_total", "")
        tokens, refused = (series[name, "a", more] for name, more in names)
        return tokens, refused

    ending = report("one", 500, T0)
    report("other", 100, T0)
    assert counted() == (600, 60)
    ending.start().close()
    report("other", 110, T0)
    assert counted() == (610, 61)
    now[0] += SILENT_S + 1.0
    assert counted() == (610, 61)
    report("other", 150, now[0])
    assert counted() == (650, 65)


def test_two_runs_whose_folders_have_the_same_name_have_series_of_their_own(tmp_path: Path) -> None:
    for place, loss in (("one", 2.0), ("other", 3.0)):
        _broken_off(tmp_path / place / "a", loss)
    series = _series(_lookout(tmp_path, tmp_path / "one", tmp_path / "other"))
    assert sorted(value for key, value in series.items() if key[0] == "phalanx_loss") == [2.0, 3.0]


def test_runs_whose_folders_have_the_same_name_keep_their_labels_when_either_is_the_newest(
    tmp_path: Path,
) -> None:
    first, second = _broken_off(tmp_path / "one" / "a"), tmp_path / "other" / "a"
    lookout = _lookout(tmp_path, first.parent, second.parent, at=T0 + 60)
    lookout.look()
    _broken_off(second, loss=3.0)
    for number in range(4, 8):
        newer = (second, first)[number % 2]
        write_events(newer, [Event(T0 + number, 0, step(number, 100, loss=2.0 if newer == first else 3.0))])
        samples = lookout.look()
        named = [(sample.metric.name, tuple(sorted(sample.labels.pairs.items()))) for sample in samples]
        assert len(set(named)) == len(named)
        loss = {
            sample.labels.pairs["run"]: sample.value
            for sample in samples
            if sample.metric.name == "phalanx_loss"
        }
        assert loss == {"a": 2.0, run_id(second): 3.0}
        assert {sample.labels.pairs["run"] for sample in samples} == {"a", run_id(second)}


def test_a_run_that_cannot_be_looked_at_costs_no_other_and_shows_when_it_was_looked_at_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        _broken_off(tmp_path / "runs" / name)
    now = [T0 + 4]
    lookout = Lookout(RunIndex([tmp_path / "runs"], tmp_path / "cache").rows, lambda: now[0])
    before = _series(lookout)

    def breaks_on_b(directory: RunDirectory, _at: float) -> list[Reason]:
        if directory.path.name == "b":
            raise RecursionError("too deep")
        return []

    monkeypatch.setattr("phalanx_watch.lookout.reasons", breaks_on_b)
    now[0] += 60
    series = _series(lookout)
    looked = "phalanx_reasons_timestamp_seconds"
    assert (series[looked, "a", ""], series[looked, "b", ""]) == (T0 + 64, T0 + 4)
    assert series["phalanx_reason", "a", "gone"] == 0
    assert series["phalanx_reason", "b", "gone"] == before["phalanx_reason", "b", "gone"] == 3
    monkeypatch.undo()
    assert _series(lookout)[looked, "b", ""] == T0 + 64


def test_a_stream_of_which_half_is_read_has_no_step_since_that_would_be_an_old_one(tmp_path: Path) -> None:
    run = _broken_off(tmp_path / "runs" / "a")
    write_events(run, [Event(T0 + 3 + n / 1e3, 0, step(n, 100)) for n in range(4, 1000)])
    rows = RunIndex([tmp_path / "runs"], tmp_path / "cache").rows
    lookout = Lookout(rows, lambda: T0 + 4, reading_budget_s=0.0)
    assert ("phalanx_step", "a", "") not in (first := _series(lookout))
    assert first["phalanx_reason", "a", "gone"] == 3
    for _ in range(20):
        series = _series(lookout)
    assert series["phalanx_step", "a", ""] == 999


def test_what_has_ended_or_fallen_silent_long_ago_is_left_out_and_of_the_rest_the_newest_are_kept(
    tmp_path: Path,
) -> None:
    _broken_off(tmp_path / "runs" / "a")
    write_events(
        tmp_path / "runs" / "b",
        [Event(T0, 0, RunStarted("b", 3)), Event(T0 + 3, 0, Finished({"step": 3}))],
    )
    rows = RunIndex([tmp_path / "runs"], tmp_path / "cache").rows()

    def names(age_s: float) -> list[str]:
        return [row.name for row in watched(rows, T0 + 3 + age_s)]

    assert names(OVER_S - 1) == ["a", "b"]
    assert names(OVER_S + 1) == ["a"]
    assert names(OLD_S + 1) == []
    many = [replace(rows[0], path=str(n), updated=T0 + n) for n in range(100)]
    assert [row.path for row in watched(many, T0 + 100)] == [str(99 - n) for n in range(MOST_RUNS)]


def test_of_several_reasons_of_a_kind_the_worst_counts() -> None:
    mild = Reason(code="not-finite", title="", where="", evidence=(), doing="", next="")
    samples = reason_samples([mild, replace(mild, severity="critical"), mild], Labels(run="r"), T0)
    assert {sample.labels.pairs["code"]: sample.value for sample in samples[:-1] if sample.value} == {
        "not-finite": 3
    }


def test_the_page_serves_them_and_lists_the_endpoints_of_the_runs_own_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = _broken_off(tmp_path / "runs" / "a", begin_s=time.time() - 10)
    announce(RunDirectory(run), Target("h:9400", "a", "", 0))
    app = application(PageRuns([tmp_path / "runs"]), access_for("127.0.0.1", ""))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        answer = client.get("/metrics", headers={"accept-encoding": "gzip"})
        while (
            'phalanx_reason{run="a",code="gone"}' not in answer.text
        ):  # a busy machine looks at the runs late
            answer = client.get("/metrics", headers={"accept-encoding": "gzip"})
        assert "phalanx_exporter_failures_total{" in answer.text
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        headers = {"accept": "application/openmetrics-text; version=1.0.0", "accept-encoding": "identity"}
        assert client.get("/metrics", headers=headers).text.endswith("# EOF\n")
        assert client.get("/targets").json()[0]["targets"] == ["h:9400"]


def test_the_error_of_a_round_that_fails_is_raised_at_a_scrape() -> None:
    def rows() -> list[RunRow]:
        raise OSError("the disk is gone")

    lookout = Lookout(rows)

    def scrape() -> None:
        while not lookout.samples():  # a busy machine ends its first round after some scrapes
            pass

    with pytest.raises(OSError, match="the disk is gone"):
        scrape()


@given(st.floats(0, 1e4))
def test_rounds_take_half_a_percent_of_a_processor_or_a_tenth_where_they_would_come_too_seldom(
    took_s: float,
) -> None:
    share = took_s / (took_s + rest_s(took_s))
    assert rest_s(took_s) >= 1
    assert share <= 0.005 + 1e-9 or rest_s(took_s) >= 15
    assert share <= 0.1 + 1e-9


def test_a_run_whose_end_somebody_acknowledged_has_no_series_until_it_continues(tmp_path: Path) -> None:
    now = time.time()
    run = _broken_off(tmp_path / "runs" / "a", begin_s=now - 60)
    lookout = _lookout(tmp_path, tmp_path / "runs", at=now)
    assert _series(lookout)["phalanx_reason", "a", "gone"] == 3
    write_labels(run, RunLabels().tagged(ACKNOWLEDGED, at_s=now))
    assert _series(lookout) == {}
    write_events(run, [Event(now + 60, 1, RunStarted(str(run), 100))])
    assert ("phalanx_reason", "a", "gone") in _series(lookout)


def test_a_note_on_a_run_acknowledges_no_later_end(tmp_path: Path) -> None:
    now = time.time()
    run = _broken_off(tmp_path / "runs" / "a", begin_s=now - 60)
    write_labels(run, RunLabels().tagged(ACKNOWLEDGED, at_s=now - 50))
    write_events(run, [Event(now - 40, 1, RunStarted(str(run), 100))])
    write_labels(run, read_labels(run).tagged("later", at_s=now).noted("again"))
    lookout = _lookout(tmp_path, tmp_path / "runs", at=now)
    assert ("phalanx_reason", "a", "gone") in _series(lookout)
