"""The server reads runs before the first request for them, and pauses while there are requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx_watch.page.runs import GIVES_WAY_S, PageRuns, SeriesCache
from phalanx_watch.series.run_series import RunSeries
from watch.made_runs import crashed


def test_all_runs_are_read_ahead_but_none_just_after_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        crashed(tmp_path / name)
        (tmp_path / name / "record.json").write_text("{}")
    now, requests_s, read = [100.0], [100.0], []
    runs = PageRuns([tmp_path], clock=lambda: now[0])
    first, *_ = runs.places()
    original = SeriesCache.get

    def spied(cache: SeriesCache, path: Path) -> RunSeries:
        read.append((path.name, now[0] - requests_s[-1]))
        return original(cache, path)

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if len(read) == 1 and len(requests_s) == 1:  # one run was read, and now a person comes
            requests_s.append(now[0])
            runs.series(first)

    runs.series(first)
    monkeypatch.setattr(SeriesCache, "get", spied)
    runs.read_ahead(lambda: False, sleep)
    ahead = [(name, after) for name, after in read if after > 0]
    assert sorted(name for name, _ in ahead) == ["a", "b", "c"]
    assert len(read) == len(ahead) + 1, "the person's own question is the other one"
    assert all(after >= GIVES_WAY_S for _, after in ahead)
