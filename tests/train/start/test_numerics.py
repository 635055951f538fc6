"""A run whose file leaves its arithmetic open is portable where it can be, and keeps the arithmetic that it has begun with."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import pytest
import tomli_w

from phalanx.hardware.portable.build import library_file, unfit_processor
from phalanx.run.directory.paths import RunDirectoryError
from phalanx.run.identity import identity
from phalanx.run.read import to_table
from phalanx.run.rules import not_portable
from phalanx.run.spec import CheckpointSpec, OptimizerSpec, RunSpec, RuntimeSpec
from phalanx.train.start.open_run import choose, note_of_fallback, open_run, reason_for_native, with_numerics

OPEN = RunSpec(name="open", runtime=RuntimeSpec(device="cpu"))
FINGERPRINT = "f" * 64


@pytest.fixture(autouse=True)
def folder_of_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs are in a folder of the test's own."""
    if reason := unfit_processor():
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without compiled kernels; return the one folder in which compilers are looked for."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return programs


def of(numerics: str, **fields: object) -> RunSpec:
    runtime = dataclasses.replace(OPEN.runtime, numerics=numerics)  # type: ignore[arg-type]
    return dataclasses.replace(OPEN, runtime=runtime, **fields)  # type: ignore[arg-type]


def begin(spec: RunSpec, *, finished: bool = False) -> Path:
    """Writes what the first start of a run leaves."""
    directory = choose(spec, FINGERPRINT)
    (directory.checkpoints / "step-00000001").mkdir(parents=True)
    directory.record.write_text(json.dumps({"identity": identity(spec)}))
    directory.run_file.write_text(tomli_w.dumps(to_table(spec)))
    if finished:
        directory.result.write_text("{}")
    return directory.path


def chosen(spec: RunSpec) -> str:
    return with_numerics(spec, FINGERPRINT).runtime.numerics


def test_it_is_portable_on_a_cpu_and_native_on_a_gpu() -> None:
    assert chosen(OPEN) == "portable"
    assert chosen(dataclasses.replace(OPEN, runtime=RuntimeSpec(device="cuda"))) == "native"


@pytest.mark.parametrize("numerics", ["portable", "native"])
def test_the_choice_of_the_run_file_holds(numerics: str) -> None:
    begin(of("native" if numerics == "portable" else "portable"))
    assert chosen(of(numerics)) == numerics


def cost(resolved: RunSpec) -> str:
    assert resolved.runtime.numerics == "native"
    note = note_of_fallback(OPEN, resolved)
    start = "numerics are native, so the weights' bits belong to this kind of processor; "
    assert note.startswith(start)
    assert note_of_fallback(of("native"), resolved) == ""
    return note.removeprefix(start)


@pytest.mark.usefixtures("without_kernels")
def test_without_a_compiler_it_is_native_and_a_note_names_the_cost_and_the_remedy() -> None:
    reason = cost(with_numerics(OPEN, FINGERPRINT))
    assert "gcc and g++" in reason
    assert "there is no C compiler" in reason


def test_with_a_compiler_that_fails_it_is_native(without_kernels: Path) -> None:
    broken = without_kernels / "gcc"
    calls = without_kernels / "calls"
    broken.write_text(f"#!/bin/sh\necho called >> {calls}\necho no room >&2\nexit 1\n")
    broken.chmod(0o755)
    assert "no room" in cost(with_numerics(OPEN, FINGERPRINT))
    assert calls.read_text() == "called\n"


def test_kernels_that_are_compiled_already_need_no_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library_file()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert chosen(OPEN) == "portable"


def test_what_portable_kernels_do_not_compute_is_native() -> None:
    spec = dataclasses.replace(OPEN, optimizer=OptimizerSpec(name="soap"))
    assert next(not_portable(spec))[0] == "optimizer.name"
    assert chosen(spec) == "native"
    assert reason_for_native(spec).startswith("optimizer.name: ")


@pytest.mark.parametrize("numerics", ["portable", "native"])
@pytest.mark.usefixtures("without_kernels")
def test_a_run_that_has_begun_keeps_its_arithmetic(numerics: str) -> None:
    folder = begin(of(numerics))
    assert chosen(OPEN) == numerics
    assert choose(with_numerics(OPEN, FINGERPRINT), FINGERPRINT).path == folder
    assert note_of_fallback(OPEN, with_numerics(OPEN, FINGERPRINT)) == "" or numerics == "native"


@pytest.mark.usefixtures("without_kernels")
def test_a_start_that_failed_before_it_saved_does_not_decide() -> None:
    folder = begin(of("portable"))
    (folder / "checkpoints" / "step-00000001").rmdir()
    assert chosen(OPEN) == "native"


def test_a_run_of_another_definition_is_not_gone_on_with(tmp_path: Path) -> None:
    spec = of("portable", run_dir="mine")
    folder = begin(spec)
    for record in ({"attempts": 1}, {"attempts": 1, "arithmetic": "portable 0"}):
        (folder / "record.json").write_text(json.dumps(record))
        with pytest.raises(RunDirectoryError, match="another definition of portable numerics"):
            open_run(spec, FINGERPRINT, tmp_path)


def test_a_finished_run_does_not_decide_for_the_next() -> None:
    begin(of("native"), finished=True)
    assert chosen(OPEN) == "portable"


@pytest.mark.parametrize("numerics", ["portable", "native"])
def test_so_does_one_in_a_directory_that_is_named(numerics: str) -> None:
    begin(of(numerics, run_dir="mine"))
    assert chosen(dataclasses.replace(OPEN, run_dir="mine")) == numerics


def test_a_run_from_before_there_was_a_choice_is_native() -> None:
    folder = begin(of("native", run_dir="mine"))
    table = to_table(of("native", run_dir="mine"))
    del table["runtime"]["numerics"]
    (folder / "run.toml").write_text(tomli_w.dumps(table))
    assert chosen(dataclasses.replace(OPEN, run_dir="mine")) == "native"


def test_a_run_that_goes_on_from_another_takes_over_its_arithmetic() -> None:
    parent = begin(of("native", run_dir="parent"))
    start = CheckpointSpec(init_from=str(parent / "checkpoints" / "step-00000002"), init_with="training")
    assert chosen(dataclasses.replace(OPEN, checkpoint=start)) == "native"
