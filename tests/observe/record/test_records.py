"""A run's record of its surroundings, and the imports of the package itself."""

import hashlib
import importlib
import json
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

import phalanx
from phalanx.observe.record import records
from phalanx.observe.record.records import (
    code_version,
    command_line,
    cpu_model,
    environment_record,
    module_digests,
    package_versions,
    process_age_ns,
    usable_cores,
    variables,
)


def git(directory: Path, *arguments: str) -> str:
    identity = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    return subprocess.run(
        ["git", "-C", str(directory), *arguments],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **identity},
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit that holds a package; returns the package."""
    package = tmp_path / "src" / "phalanx"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return package


def test_what_is_recorded_is_the_whole_package(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Path] = []
    for module in (records,):
        monkeypatch.setattr(module, "is_checkout", checked.append)
    code_version()
    records.code_patch()
    assert checked == [Path(phalanx.__file__).resolve().parent] * 2


def test_a_clean_checkout_is_its_commit(checkout: Path) -> None:
    version = code_version(checkout)
    assert version["git_commit"] == git(checkout, "rev-parse", "HEAD")
    assert version["git_dirty"] is False


@pytest.mark.parametrize("name", ["__init__.py", "new.py"])
def test_a_changed_or_a_new_file_makes_it_dirty(checkout: Path, name: str) -> None:
    (checkout / name).write_text("x = 1\n")
    assert code_version(checkout)["git_dirty"] is True


def test_a_run_directory_in_the_checkout_does_not_make_it_dirty(checkout: Path) -> None:
    runs = checkout.parents[1] / "runs"
    runs.mkdir()
    (runs / "events.jsonl").write_text("{}\n")
    assert code_version(checkout)["git_dirty"] is False


def test_a_package_installed_inside_another_repository_does_not_claim_its_commit(checkout: Path) -> None:
    installed = checkout.parents[1] / "venv" / "phalanx"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert set(code_version(installed)) == {"version"}


def test_outside_a_repository_there_is_the_version_alone(tmp_path: Path) -> None:
    assert set(code_version(tmp_path)) == {"version"}


def test_versions_are_those_installed() -> None:
    versions = package_versions(("numpy", "no-such-package"))
    assert versions["numpy"] == metadata.version("numpy")
    assert set(versions) == {"python", "numpy"}


def test_the_record_is_plain_json() -> None:
    record = environment_record()
    assert json.loads(json.dumps(record)) == record
    assert set(record) == {"code", "packages", "modules", "host", "command", "variables"}
    assert 1 <= record["host"]["cores"] == usable_cores() <= (os.cpu_count() or 1)


def test_the_processor_has_a_name_even_without_proc(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert cpu_model(cpuinfo)
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Abacus 3000\n")
    assert cpu_model(cpuinfo) == "Abacus 3000"


@pytest.mark.parametrize(("part", "name"), [("0xd4f", "Neoverse-V2 r1p0"), ("0xfff", "Arm 0x41 0xfff r1p0")])
def test_an_arm_processor_is_named_by_its_core_or_else_by_its_numbers(
    part: str, name: str, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    numbers = f"CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\nCPU part\t: {part}\nCPU revision\t: 0\n"
    cpuinfo.write_text(f"processor\t: 0\nFeatures\t: fp asimd\n{numbers}")
    assert cpu_model(cpuinfo) == name


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the start of a process is read from /proc")
def test_the_age_of_a_process_is_about_how_long_it_has_run() -> None:
    code = (
        "import time; from phalanx.observe.record.records import process_age_ns; a = process_age_ns();"
        "time.sleep(0.3); print(a, process_age_ns() - a)"
    )
    started = time.monotonic_ns()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    age, slept = map(int, done.stdout.split())
    assert 0 < age < time.monotonic_ns() - started + 20_000_000
    assert slept >= 300_000_000
    assert process_age_ns() > age


@pytest.mark.parametrize(("ranks", "arrays"), [(False, []), (True, ["numpy"])], ids=["events", "ranks"])
def test_nothing_here_imports_torch_or_a_higher_floor(ranks: bool, arrays: list[str]) -> None:
    """Only the stream of the ranks and recorded steps are large enough to need numpy."""
    code = f"""
import pkgutil, importlib, sys, phalanx.observe
for module in pkgutil.walk_packages(phalanx.observe.__path__, "phalanx.observe."):
    if module.name.rpartition(".")[2] not in ("tensorboard", "wandb", "mlflow") and ({ranks} or not {{"rank_stream", "rank_file", "rank_writer", "recorded_step"}} & set(module.name.split("."))):
        importlib.import_module(module.name)
ours = {{name.split(".")[1] for name in sys.modules if name.startswith("phalanx.")}}
print(sorted({{"torch", "numpy", "wandb", "tensorboardX"}} & set(sys.modules)), sorted(ours - {{"process", "run", "version", "plugins"}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{arrays} ['observe']"


def test_the_command_line_is_recorded_without_its_secrets() -> None:
    words = [
        "phalanx",
        "train",
        "run.toml",
        "--set",
        "store.password=correct-horse",
        "hf_" + "a1B2" * 8,
        "two words",
    ]
    shown = command_line(words)
    assert shown.startswith("phalanx train run.toml")
    assert "correct-horse" not in shown
    assert "a1B2" not in shown
    assert shown.endswith("'two words'")
    assert len(command_line(["x" * 100_000])) < 5000


def test_variables_that_libraries_act_by_are_recorded_and_secrets_only_named() -> None:
    environment = {
        "OMP_NUM_THREADS": "1",
        "NCCL_DEBUG": "INFO",
        "PHALANX_RUN_TOKEN": "secret-of-the-run",
        "TORCH_AUTH_KEY": "x",
        "NCCL_NOTE": "says secret-of-the-run",
        "HOME": "/root",
        "HF_TOKEN": "y",
    }
    assert variables(environment) == {
        "NCCL_DEBUG": "INFO",
        "NCCL_NOTE": "says ***",
        "OMP_NUM_THREADS": "1",
        "TORCH_AUTH_KEY": "***",
    }


def test_code_outside_of_installed_packages_is_recorded_by_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "helper_of_a_model.py"
    source.write_text("SCALE = 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("helper_of_a_model")
    before = module_digests()
    assert before["helper_of_a_model"] == hashlib.sha256(b"SCALE = 1.0\n").hexdigest()[:12]
    assert not any(name.partition(".")[0] in ("phalanx", "json", "pytest", "numpy") for name in before)
    source.write_text("SCALE = 1.1\n")
    assert module_digests()["helper_of_a_model"] != before["helper_of_a_model"]
    monkeypatch.delitem(sys.modules, "helper_of_a_model")


def test_packages_of_another_environment_on_the_path_are_not_taken_for_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "dist-packages"
    packages.mkdir()
    (packages / "package_of_the_system.py").write_text("")
    monkeypatch.syspath_prepend(packages)
    importlib.import_module("package_of_the_system")
    assert "package_of_the_system" not in module_digests()
    monkeypatch.delitem(sys.modules, "package_of_the_system")
