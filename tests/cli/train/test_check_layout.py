"""``phalanx train --check-layout``: two layouts side by side; the ranks are those that all tests share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from phalanx.cli.output import left_out_lines
from phalanx.cli.train import train_command
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import RunSpec
from phalanx.train.compare.observation import Compared, RankReplay, Replay, ReplayOrder
from phalanx.train.compare.replay import replay
from ranks import Ranks


def replayed(spec: RunSpec, order: ReplayOrder, folder: Path) -> RankReplay:
    return replay(spec, order, RunDirectory(folder), torch.device("cpu"))


@pytest.fixture
def checked(folder: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command with processes that have imported everything."""

    def on_shared_ranks(
        spec: RunSpec, order: ReplayOrder, count: int, place: Path, _fingerprint: str
    ) -> Replay:
        seen = ranks.run(count, replayed, spec, order, place)
        return Replay(seen[0].layout, [one.observed for one in seen], seen[0].numbers)

    monkeypatch.setattr(train_command, "replay_locally", on_shared_ranks)
    monkeypatch.chdir(folder)

    def run(layout: str, *words: str) -> Result:
        return CliRunner().invoke(
            train_command.command,
            ["tiny.toml", "--ranks", "1", "--check-layout", layout, "--check-steps", "1", *words],
        )

    return run


def test_a_layout_that_changes_no_bit_is_said_to_agree(checked: Any) -> None:
    before = set(Path().iterdir())
    done = checked("sharding=zero2, ranks=3", "--check-steps", "2")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("A  1 rank\nB  3 ranks: shard 3\n")
    assert done.stdout.endswith("the layouts agree in every bit\n")
    assert set(Path().iterdir()) == before


def test_so_is_another_context_degree_of_a_run_in_context_tiles(checked: Any) -> None:
    layout = "context=2, context_mode=allgather, ranks=2"
    done = checked(layout, "--set", "model.context_tiles=2")
    assert done.exit_code == 0, done.output
    assert "the layouts agree in every bit\n" in done.stdout


def test_the_module_is_named_where_a_layout_of_other_sums_parts(checked: Any) -> None:
    done = checked("context=2,ranks=2", "--json")
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert (found["equal"], found["layouts"][1]["context"]) == (False, 2)
    assert (found["parting"]["name"], found["parting"]["moment"]) == ("blocks.0.attention", "forward")
    said = checked("context=2,ranks=2").stdout
    assert "the layouts part at step 1, slot 0, micro-batch 0" in said
    assert "which decides how sums are split" in said


def test_layouts_of_one_run_that_part_are_said_to_break_its_promise(
    checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = train_command.replay_locally

    def of_another_seed_on_two_ranks(
        spec: RunSpec, order: ReplayOrder, count: int, place: Path, fingerprint: str
    ) -> Replay:
        other = replace(spec, runtime=replace(spec.runtime, seed=spec.runtime.seed + count - 1))
        return honest(other, order, count, place, fingerprint)

    monkeypatch.setattr(train_command, "replay_locally", of_another_seed_on_two_ranks)
    assert "its promise is broken here" in checked("ranks=2").stdout


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("tensr=2", "there is no such field (did you mean tensor?)"),
        ("tensor=3,ranks=3", "cannot be divided over 3 tensor ranks"),
        ("tensor=2", "parallel.ranks"),
        ("tensor=3,ranks=3", '--check-layout "tensor=3,ranks=3": tiny.toml: '),
        ("parallel.tensor=3,ranks=3", "cannot be divided over 3 tensor ranks"),
        ("pipeline_split=[3, 9],pipeline=2,ranks=2", "pipeline_split"),
        ("", "names no field of [parallel]"),
        ("tensor", '"tensor" is not of the form field=value'),
        ("model.lanes=2,tensor=2", "model.lanes is no field of [parallel]"),
    ],
)
def test_a_layout_that_cannot_be_is_explained_with_an_exit_code_of_its_own(
    layout: str, words: str, checked: Any
) -> None:
    done = checked(layout)
    assert (done.exit_code, words in done.output) == (2, True), done.output


def test_what_a_comparison_would_not_heed_is_refused(checked: Any) -> None:
    done = checked("ranks=2", "--run-dir", "elsewhere", "--fault", "kill node 0 at step 1")
    assert (done.exit_code, "--fault, --run-dir" in done.output) == (2, True), done.output


def test_a_module_that_could_not_be_compared_is_named_once_however_often_it_is_called() -> None:
    calls = [f"blocks.{block}.ffn{call}" for block in range(10) for call in ("", " (call 2)", " (call 3)")]
    (line,) = left_out_lines(Compared(None, 5, tuple(calls)))
    assert line.endswith(f"differently: {', '.join(f'blocks.{block}.ffn' for block in range(8))} and 2 more")
    routers = [f"router{call}[{result}]" for call in ("", " (call 2)") for result in (0, 1)]
    assert list(left_out_lines(Compared(None, 5, (*routers, "router.weight")))) == [
        "not compared, because the layouts cut it differently: router, router.weight"
    ]
    assert list(left_out_lines(Compared(None, 5, ()))) == []
