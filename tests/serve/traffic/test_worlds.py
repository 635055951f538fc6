"""Services in which everything fails: no token is lost, doubled or changed, and a planted defect of the router is noticed."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs

from phalanx_serve.cli.simulate_traffic import command
from phalanx_serve.traffic import dispatch, journal
from phalanx_serve.traffic.simulated_world import Load, RouterInvariantError, run_seed


def test_no_token_is_lost_doubled_or_changed_whatever_fails() -> None:
    outcomes = [run_seed(seed) for seed in range(60)]
    assert sum(outcome.tokens for outcome in outcomes) > 10_000
    assert sum(outcome.counts.get("moved", 0) for outcome in outcomes) > 100


@pytest.mark.slow
def test_thousands_of_worlds_hold() -> None:
    run_all(range(3000))


def test_a_world_is_a_function_of_its_seed() -> None:
    assert run_seed(5) == run_seed(5)


def test_hundreds_of_workers_serve_under_faults() -> None:
    outcome = run_seed(1, Load(workers=200, rate=20.0, faults_per_s=2.0))
    assert outcome.requests > 200


def test_arrivals_may_come_from_a_trace() -> None:
    assert run_seed(2, Load(arrivals_s=(0.5, 0.5, 9.0))).requests == 3


def forget_told(original: Callable[..., Any]) -> Callable[..., Any]:
    def remaining_request(entry: journal.Entry) -> Any:
        request = original(entry)
        return structs.replace(request, generated=request.generated[:-1])

    return remaining_request


def forget_seen(original: Callable[..., Any]) -> Callable[..., Any]:
    def open_entry(request: Any, _: int, *, audited: bool) -> Any:
        return original(request, 0, audited=audited)

    return open_entry


def tell_again(original: Callable[..., Any]) -> Callable[..., Any]:
    def take(entry: journal.Entry, told: Any, worker: int) -> Any:
        return original(entry, told, worker) or [structs.replace(told, request=entry.request.id)]

    return take


def keep_jobs_of_the_late(_: Callable[..., Any]) -> Callable[..., Any]:
    def move(*_: Any, **__: Any) -> None:
        return None

    return move


def accuse_the_scorer(original: Callable[..., Any]) -> Callable[..., Any]:
    def judge(one: journal.TextAudit, others: frozenset[int]) -> Any:
        if one.scoring or all(score == one.served for score in one.scores.values()):
            return original(one, others)
        return journal.AuditResult(frozenset(one.scores), difference=True)

    return judge


MUTANTS = [
    (dispatch.journal, "remaining_request", forget_told),
    (dispatch.journal, "open_entry", forget_seen),
    (dispatch.journal, "take", tell_again),
    (dispatch, "_move", keep_jobs_of_the_late),
    (dispatch, "judge", accuse_the_scorer),
]


def run_all(seeds: range) -> None:
    for seed in seeds:
        run_seed(seed)


@pytest.mark.parametrize(("where", "name", "plant"), MUTANTS, ids=[name for _, name, _ in MUTANTS])
def test_a_planted_defect_is_noticed(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, plant: Callable[..., Any]
) -> None:
    monkeypatch.setattr(where, name, plant(getattr(where, name)))
    with pytest.raises(RouterInvariantError, match="phalanx simulate traffic --seeds"):
        run_all(range(400))


def test_the_command_in_the_message_of_a_defect_shows_the_same_defect_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dispatch.journal, "take", tell_again(journal.take))
    trace = tmp_path / "arrivals of a day"
    trace.write_text("\n".join(f"{number / 4}" for number in range(60)))
    words = ["--seeds", "3:99", "--workers", "2", "--faults", "2.1234567", "--trace", str(trace)]
    for more in ([], words):
        shown = CliRunner().invoke(command, more).output
        assert shown.startswith("Error: ")
        _, _, again = shown.partition("phalanx simulate traffic ")
        assert CliRunner().invoke(command, shlex.split(again)).output == shown
