"""``phalanx hardware`` and ``phalanx models``, as a user calls them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from phalanx.hardware.catalog import accelerators, systems
from phalanx.model.facts.presets import PRESETS
from phalanx_plan.cli.catalogs import hardware_command as hardware
from phalanx_plan.cli.catalogs import models_command as models


def test_the_list_names_every_accelerator_and_system() -> None:
    shown = CliRunner().invoke(hardware, [], env={"COLUMNS": "200"}).output
    assert all(key in shown for key in (*accelerators(), *systems()))


def test_one_accelerator_is_shown_with_sources_and_fits() -> None:
    shown = CliRunner().invoke(hardware, ["h100"], env={"COLUMNS": "300"}).output
    assert "NVIDIA H100 datasheet" in shown
    assert "aiconfigurator" in shown
    assert "median error" in shown


@pytest.mark.parametrize("name", ["meta-h100-24k", "vr200", "tpu-v5p", "cpu"])
def test_json_carries_every_figure_with_its_source(name: str) -> None:
    shown = json.loads(CliRunner().invoke(hardware, [name, "--json"]).output)
    memory = shown["accelerator"]["memory_bytes"]
    assert memory["value"] > 0
    assert memory["source"]
    assert all(fit["provenance"]["source"] for fit in shown["fitted"].values())


def test_json_of_the_whole_catalog_is_one_object() -> None:
    shown = json.loads(CliRunner().invoke(hardware, ["--json"]).output)
    assert set(shown["accelerators"]) == set(accelerators())
    assert set(shown["systems"]) == set(systems())


def test_an_unknown_name_is_answered_with_what_exists() -> None:
    result = CliRunner().invoke(hardware, ["zork"])
    assert result.exit_code == 1
    assert "h100" in result.output
    result = CliRunner().invoke(models, ["zork"])
    assert result.exit_code == 1
    assert "llama3-405b" in result.output


def test_models_are_listed_with_their_sizes() -> None:
    shown = json.loads(CliRunner().invoke(models, ["--json"]).output)
    assert set(shown["models"]) == set(PRESETS)
    assert shown["models"]["llama3-405b"]["parameters"] == 405_853_388_800
    assert "arXiv" in shown["sources"]
    assert "llama3-405b" in CliRunner().invoke(models, [], env={"COLUMNS": "200"}).output


def test_one_model_is_shown_with_its_shape() -> None:
    shown = CliRunner().invoke(models, ["deepseek-v3"], env={"COLUMNS": "300"}).output
    assert "7,168" in shown
