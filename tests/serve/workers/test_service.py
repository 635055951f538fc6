"""The configuration that a service gives to all its workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from checkpoint.saved_models import save_models
from phalanx.run.directory.paths import RunDirectoryError
from phalanx_serve.served.served_run import ServedRun
from phalanx_serve.traffic.events import Role, ServeError
from phalanx_serve.workers import nixl_client, service
from phalanx_serve.workers.page_transfer import PageWay
from phalanx_serve.workers.service import ServiceConfig, WorkerDivision
from serve.packed_runs import DENSE, make_run, random_model


def started(
    served: ServedRun,
    monkeypatch: pytest.MonkeyPatch,
    roles: Sequence[Role],
    pages: PageWay = "auto",
    threads: int = 0,
    **divisions: WorkerDivision,
) -> ServiceConfig:
    """The configuration of the workers; none is started."""
    configs: list[ServiceConfig] = []
    monkeypatch.setattr(service, "read_model_text", lambda *_: None)
    monkeypatch.setattr(service, "RouterClient", lambda config, _: configs.append(config))
    service.open_service(
        served,
        None,
        roles,
        divisions=divisions,  # type: ignore[arg-type]
        threads=threads,
        audit_share=0.0,
        tell=lambda _: None,
        pages=pages,
    )
    return configs[0]


def settled(served: ServedRun, monkeypatch: pytest.MonkeyPatch) -> ServedRun:
    """The run that workers of one role are to open."""
    return started(served, monkeypatch, ("both", "both")).task.served


def served_step(run_dir: Path, step: int | None, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """The step that workers are to open."""
    served = ServedRun(str(run_dir), step, "float32", None, 1 << 20, 64, "exact")
    return settled(served, monkeypatch).step


def test_workers_that_start_while_the_run_continues_open_the_step_that_the_service_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path / "run", DENSE, (1, 3))
    assert served_step(run_dir, None, monkeypatch) == 3
    save_models(run_dir / "checkpoints", {5: random_model(DENSE)})
    assert served_step(run_dir, 3, monkeypatch) == 3
    assert served_step(run_dir, None, monkeypatch) == 5


def test_a_run_without_a_checkpoint_is_refused_before_any_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path / "run", DENSE, ())
    with pytest.raises(RunDirectoryError, match="let the run save one first"):
        served_step(run_dir, None, monkeypatch)


def test_a_run_that_is_streamed_is_packed_before_any_worker_starts_and_memory_is_divided_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path / "run", DENSE, (1, 3))
    served = ServedRun(str(run_dir), None, "bfloat16", None, 0, 64, "exact", stream=True)
    monkeypatch.setattr(service, "free_to_use", lambda: 5 << 30)
    opened = settled(served, monkeypatch)
    assert Path(opened.run_dir).name == "step-00000003-bf16.pack"
    assert Path(opened.run_dir).is_file()
    assert opened.memory_bytes == 2 << 30
    assert settled(opened, monkeypatch) == opened


def test_drafts_of_a_run_that_is_streamed_are_refused_before_it_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path / "run", DENSE)
    served = ServedRun(str(run_dir), None, "float32", None, 0, 64, "exact", drafts=1, stream=True)
    with pytest.raises(ServeError, match="--drafts 1: a pack is served without its predictions ahead"):
        settled(served, monkeypatch)
    assert not (run_dir / "packs").exists()


def test_pages_over_nixl_are_refused_where_it_is_not_installed_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl_client, "find_spec", lambda _: None)
    served = ServedRun("nowhere", None, "float32", None, 1 << 20, 64, "exact")
    with pytest.raises(ServeError, match=r"--pages nixl needs the package nixl.*phalanx-train\[nixl\]"):
        started(served, monkeypatch, ("both", "both"), pages="nixl")


@pytest.mark.parametrize("pages", ["auto", "socket", "nixl"])
def test_all_workers_take_pages_in_the_way_that_the_option_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: PageWay
) -> None:
    monkeypatch.setattr(nixl_client, "find_spec", lambda name: name)
    served = ServedRun(str(make_run(tmp_path / "run", DENSE)), None, "float32", None, 1 << 20, 64, "exact")
    config = started(served, monkeypatch, ("prefill", "decode"), pages=pages)
    assert [config.task_of(role).pages for role in config.roles] == [pages, pages]


def test_workers_divide_the_model_as_their_role_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_run(tmp_path / "run", DENSE)
    served = ServedRun(str(run_dir), None, "float32", None, 1 << 20, 64, "exact")
    roles: tuple[Role, ...] = ("prefill", "decode", "both")
    config = started(
        served,
        monkeypatch,
        roles,
        prefill=WorkerDivision(tensor=2),
        decode=WorkerDivision(stages=3),
        both=WorkerDivision(),
    )
    opened = [config.task_of(role).served for role in roles]
    assert [(served_run.stages, served_run.tensor) for served_run in opened] == [(1, 2), (3, 1), (1, 1)]
    assert {served_run.step for served_run in opened} == {1}


@pytest.mark.parametrize(("processors", "threads"), [(24, "4"), (13, "2"), (3, "1")])
def test_processors_are_divided_among_all_processes_of_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processors: int, threads: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    run_dir = make_run(tmp_path / "run", DENSE)
    served = ServedRun(str(run_dir), None, "float32", None, 1 << 20, 64, "exact")
    service = started(
        served,
        monkeypatch,
        ("prefill", "decode", "both"),
        prefill=WorkerDivision(tensor=2),
        decode=WorkerDivision(stages=3),
    )
    assert service.environment == {"OMP_NUM_THREADS": threads}


def test_a_named_number_of_threads_is_that_of_each_process_however_many_processors_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(24)))
    run_dir = make_run(tmp_path / "run", DENSE)
    served = ServedRun(str(run_dir), None, "float32", None, 1 << 20, 64, "exact")
    service = started(served, monkeypatch, ("prefill", "decode"), threads=5, prefill=WorkerDivision(tensor=2))
    assert service.environment == {"OMP_NUM_THREADS": "5"}


@pytest.mark.parametrize(
    ("division", "message"),
    [
        (WorkerDivision(tensor=3), "--tensor 3: .* give --tensor 2"),
        (WorkerDivision(stages=6), "--pipeline 6: the model has 5 layers"),
    ],
)
def test_a_division_that_a_role_cannot_have_is_refused_before_any_worker_starts(
    division: WorkerDivision, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path / "run", DENSE)
    served = ServedRun(str(run_dir), None, "float32", None, 1 << 20, 64, "exact")
    with pytest.raises(ServeError, match=message):
        started(served, monkeypatch, ("prefill", "decode"), decode=division)


@pytest.mark.parametrize("damaged", [True, False])
def test_a_newest_step_that_is_damaged_is_skipped_with_a_notice_and_other_errors_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    run_dir = make_run(tmp_path / "run", DENSE, (1, 3))
    if damaged:
        file = run_dir / "checkpoints" / "step-00000003" / "rank-00000.safetensors"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    steps: list[int | None] = []
    notices: list[str] = []

    def begin(config: ServiceConfig, _tell: object) -> None:
        steps.append(config.task.served.step)
        if steps[-1] == 3:
            raise ServeError("the reason of a worker")

    monkeypatch.setattr(service, "read_model_text", lambda *_: None)
    monkeypatch.setattr(service, "RouterClient", begin)

    def opened(step: int | None) -> None:
        served = ServedRun(str(run_dir), step, "float32", None, 1 << 20, 64, "exact")
        service.open_service(
            served,
            None,
            ("both",),
            threads=1,
            audit_share=0.0,
            tell=lambda notice: notices.append(notice.text),
        )

    with pytest.raises(ServeError, match="the reason of a worker"):
        opened(3)  # requested by its number
    if damaged:
        opened(None)
        assert steps == [3, 3, 1]
        assert notices == ["step 3 cannot be read and is skipped: the reason of a worker"]
    else:
        with pytest.raises(ServeError, match="the reason of a worker"):
            opened(None)
        assert (steps, notices) == ([3, 3], [])
