"""The run files that come with Phalanx are in every installation, and begin one's own."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest

import phalanx
from phalanx.model.facts.presets import PRESETS
from phalanx.run.fields import field_docs
from phalanx.run.read import first_run_file, read_run, shipped_names, shipped_or_given
from phalanx.run.spec import OptimizerSpec

ROOT = Path(__file__).parents[2]


def test_a_checkouts_configs_are_those_that_are_installed() -> None:
    assert (ROOT / "configs").resolve() == Path(phalanx.__file__).parent / "configs"


def test_every_file_of_the_package_is_installed_with_it() -> None:
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = Path(phalanx.__file__).parent
    installed = {path for pattern in tables["package-data"]["phalanx"] for path in package.glob(pattern)}
    files = {
        path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".so")
    }
    assert files - installed == set()


@pytest.mark.parametrize("name", shipped_names())
def test_a_first_run_file_is_the_shipped_run_under_its_own_name_with_every_field_explained(
    name: str, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(first_run_file(name, "mine"))
    shipped = read_run(Path("configs") / f"{name}.toml", PRESETS)
    assert read_run(mine, PRESETS) == dataclasses.replace(shipped, name="mine")
    if "\nlr = " in mine.read_text():
        assert field_docs(OptimizerSpec)["lr"] in mine.read_text()


def test_the_examples_of_the_help_work_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_run(Path("configs/quickstart.toml"), PRESETS).name == "quickstart"


def test_a_file_of_ones_own_comes_before_one_that_is_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.toml").write_text('name = "mine"\n')
    assert read_run(Path("configs/quickstart.toml"), PRESETS).name == "mine"
    for other in ("quickstart.toml", "configs/nothing.toml", "mine/configs/quickstart.toml"):
        assert shipped_or_given(Path(other)) == Path(other)
