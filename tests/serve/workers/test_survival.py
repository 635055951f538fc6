"""A service of real processes under faults drawn from a seed, in small; ``python -m bench.serve.survives`` does it at any size."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from bench.serve.faults import WEIGHTS, drawn
from bench.serve.survives import StreamedAnswer, SurvivalLoad, SurvivalReport, judged, make_run, survived

WHOLE = StreamedAnswer(
    [(1, -0.5, "{}"), (2, -0.25, "{}"), (3, -1.0, "{}")], "abc", "length", {"weights:numerics"}, done=True
)


@pytest.mark.parametrize(
    ("tokens", "text", "done", "verdict"),
    [
        ([0, 1, 2], "abc", True, ""),
        ([0, 1], "ab", False, ""),
        ([], "", False, ""),
        ([0, 1], "ab", True, "lost"),
        ([0, 1, 1], "abb", False, "doubled"),
        ([0, 1, 2, 2], "abcc", True, "doubled"),
        ([0, 2], "ac", False, "changed"),
        ([0, 1, 2], "abd", True, "changed"),
    ],
)
def test_lost_doubled_and_changed_tokens_are_distinguished(
    tokens: list[int], text: str, done: bool, verdict: str
) -> None:
    received = StreamedAnswer(
        [WHOLE.tokens[n] for n in tokens], text, "length" if done else "", WHOLE.made_by, done
    )
    assert judged(WHOLE, received).partition(":")[0] == verdict


def test_one_bit_of_a_log_probability_and_another_servers_name_are_changes() -> None:
    (token_id, _, top), *rest = WHOLE.tokens
    other = dataclasses.replace(WHOLE, tokens=[(token_id, -0.5000000000000001, top), *rest])
    assert judged(WHOLE, other).startswith("changed")
    assert judged(WHOLE, dataclasses.replace(WHOLE, made_by={"weights:other"})).startswith("changed")


def test_faults_are_a_function_of_the_seed_and_of_all_kinds() -> None:
    assert drawn(3, 500) == drawn(3, 500) != drawn(4, 500)
    assert {fault.kind for fault in drawn(3, 500)} == set(WEIGHTS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_token_is_lost_doubled_or_changed_by_any_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    findings: list[SurvivalReport] = []
    plan = SurvivalLoad(requests=100, faults=20, distinct=30, workers="prefill:1,decode:2")
    asyncio.run(survived(make_run(tmp_path / "run"), plan, tmp_path, findings))
    (finding,) = findings
    assert finding.wrong == []
    assert (finding.requests, finding.faults.total()) == (100, 20)
    assert finding.counts["requests_moved"] > 0
