"""Impossible divisions of a model among processes, and processes that cannot join one, are refused with what to do."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec, MoeSpec
from phalanx_serve.cli.serve_command import command as serve_command
from phalanx_serve.served import opened
from phalanx_serve.served.of_run import open_engine
from phalanx_serve.stages import far_part
from phalanx_serve.stages.door import Door, read_token
from phalanx_serve.stages.shares import require_shares, restored_part
from phalanx_serve.traffic.events import PartLostError, ServeError
from serve.packed_runs import DENSE, make_run
from serve.stages.staged_models import KINDS, TOKEN, served, staged, token_file


def test_a_stage_with_other_weights_of_the_step_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", KINDS["dense"])
    other = make_run(tmp_path / "other", KINDS["tied"])
    with pytest.raises(ServeError, match=r"stage 1 .* has another checkpoint of step 1"):
        staged(run, 2, other)
    short = make_run(tmp_path / "short", resolve(replace(DENSE, layers=2)))
    with pytest.raises(ServeError, match=r"stage 1 .* this run has 2 layers: give every stage the same run"):
        staged(run, 2, short)


def damaged_run(tmp_path: Path) -> Path:
    """A run whose newest step, 3, has a byte that is not the one that was written."""
    run = make_run(tmp_path / "run", KINDS["dense"], (1, 3))
    file = run / "checkpoints" / "step-00000003" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return run


@pytest.mark.parametrize("options", [{}, {"stages": 1, "tensor": 2}], ids=["layers", "shares"])
def test_a_newest_step_that_is_damaged_is_skipped_with_a_notice_unless_it_was_requested(
    tmp_path: Path, options: dict[str, object]
) -> None:
    run = damaged_run(tmp_path)
    with pytest.raises((CheckpointError, ServeError), match="rank-00000"):
        staged(run, 2, step=3, **options)
    notices: list[str] = []
    assert staged(run, 2, notices=notices, **options).step == 1
    (notice,) = notices
    assert notice.startswith("step 3 cannot be read and is skipped: ")
    assert "rank-00000.safetensors" in notice


def test_a_newest_step_that_only_another_process_finds_damaged_is_skipped_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, notices = damaged_run(tmp_path), list[str]()
    undamaged = make_run(tmp_path / "undamaged", KINDS["dense"], (1, 3))
    monkeypatch.setattr(opened, "restored_part", lambda _, *arguments: restored_part(undamaged, *arguments))
    assert staged(run, 2, notices=notices).step == 1
    (notice,) = notices
    assert notice.startswith("step 3 cannot be read and is skipped: stage 1 ")


def test_errors_other_than_damage_of_the_newest_step_skip_no_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", KINDS["dense"], (1, 3))
    short = make_run(tmp_path / "short", resolve(replace(DENSE, layers=2)), (1, 3))
    with pytest.raises(ServeError, match=r"stage 1 .* this run has 2 layers"):
        staged(run, 2, short, notices=[])


def test_a_stage_whose_arithmetic_is_of_another_release_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", KINDS["dense"])
    monkeypatch.setattr(far_part, "numerics_id", lambda *_, **__: "exact-float32-other")
    with pytest.raises(
        ServeError, match=r"by numerics exact-float32-other, .* install the same release on all machines"
    ):
        staged(run, 2)


@pytest.mark.parametrize("division", [{"stages": 3}, {"tensor": 2}], ids=["layers", "shares"])
def test_processes_that_a_server_starts_divide_its_processors_unless_a_number_of_threads_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, division: dict[str, int]
) -> None:
    environments: list[dict[str, str]] = []

    def start(_count: int, environment: dict[str, str]) -> Door:
        environments.append(environment)
        raise PartLostError("it was not started")

    (processes,) = division.values()
    before = torch.get_num_threads()
    run = make_run(tmp_path / "run", KINDS["dense"])
    monkeypatch.setattr(opened, "start_stages", start)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4 * processes)))
    try:
        for named in ("7", None):
            if named:
                monkeypatch.setenv("OMP_NUM_THREADS", named)
            else:
                monkeypatch.delenv("OMP_NUM_THREADS")
            with pytest.raises(PartLostError):
                open_engine(served(run, **division))
        assert environments == [{}, {"OMP_NUM_THREADS": "4"}]
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 6}, "the model has 5 layers"),
        ({"drafts": 1}, "drafts nothing"),
        ({"stream": True}, "divide the model of a run directory"),
        ({"tensor": 2}, "give one of them"),
        ({"stages": 1, "tensor": 4}, "2 key heads .* give --tensor 2"),
        ({"stages_at": "7070"}, "give HOST:PORT"),
        ({"stages_at": "a..b:7070"}, "'a..b' is no host"),
    ],
)
def test_an_impossible_division_is_refused_with_what_to_do(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    run = make_run(tmp_path / "run", KINDS["dense"])
    with pytest.raises(ServeError, match=message):
        open_engine(served(run, **{"stages": 2, "token_file": str(token_file(tmp_path)), **options}))


def test_a_model_without_dense_layers_needs_no_width_of_them() -> None:
    # model.ffn_dim has a value in every resolved model, even if no layer has that width.
    moe = MoeSpec(experts=6, per_token=2, ffn_dim=48)
    spec = resolve(ModelSpec(layers=2, dim=96, heads=6, vocab_size=96, ffn_dim=200, moe=moe))
    require_shares(spec, 3)
    with pytest.raises(ServeError, match=r"--tensor 3: the model's 200 inner elements .* give --tensor 2"):
        require_shares(replace(spec, moe=replace(moe, first_dense=1)), 3)


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [(TOKEN, 0o644, "others may read it"), ("short", 0o600, "holds 5 characters")],
)
def test_a_token_that_others_could_know_is_refused(
    tmp_path: Path, text: str, mode: int, message: str
) -> None:
    with pytest.raises(ServeError, match=message):
        read_token(token_file(tmp_path, text, mode))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--stream --kv int8 --port 80", "leave out --port, --stream, --kv"),
        ("--pipeline 2", "leave out --pipeline"),
        ("", "--join a..b:1: 'a..b' is no host"),
    ],
)
def test_options_that_mean_nothing_to_a_stage_are_refused_by_name_when_it_joins(
    tmp_path: Path, words: str, message: str
) -> None:
    ended = CliRunner().invoke(
        serve_command,
        [str(tmp_path), "--join", "a..b:1", "--token-file", str(token_file(tmp_path)), *words.split()],
    )
    assert ended.exit_code != 0
    assert message in " ".join(ended.output.replace("\u2502", " ").split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--stage-timeout 60", "for the processes of --pipeline or --tensor"),
        ("--tensor 2 --stage-timeout inf", "not in the range"),
        ("--pipeline 2 --stage-timeout nan", "nan is no finite number"),
    ],
)
def test_a_stage_timeout_that_has_no_effect_is_refused(tmp_path: Path, words: str, message: str) -> None:
    ended = CliRunner().invoke(serve_command, [str(tmp_path), *words.split()])
    assert ended.exit_code == 2
    assert message in " ".join(ended.output.replace("\u2502", " ").split())
