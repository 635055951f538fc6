"""Whoever waits for a first start hears what is tried of the machine's kernels; whoever starts again hears nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from model.initialized import initialized
from phalanx.hardware.kernels.rows.product import row_kernel, row_kernel_is_to_compile
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec
from phalanx.serve.numerics import attention, exact, facts, products, widths
from phalanx.serve.numerics.exact import exact_numerics
from phalanx.serve.numerics.trials import Trial, first_told, trials_told

DENSE = ModelSpec(layers=2, dim=64, heads=4, kv_heads=2, head_dim=16, vocab_size=160)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of facts of a machine of which nothing is known."""
    monkeypatch.setattr(facts, "facts_path", lambda: tmp_path / "facts.json")
    return tmp_path


def told() -> list[Trial]:
    """What a process that begins hears."""
    for kept in (
        products._facts_of,
        attention._first_difference,
        widths._norm,
        widths._activation,
        widths._softmax,
    ):
        kept.cache_clear()
    model: Transformer = initialized(resolve(DENSE)).requires_grad_(False).eval()
    heard: list[Trial] = []
    with trials_told(heard.append):
        exact_numerics(model, model.spec, 96)
    return heard


def test_a_first_start_tells_each_part_before_it_is_tried_and_the_next_one_tells_none(folder: Path) -> None:
    row_kernel()
    first = told()
    (of,) = {trial.of for trial in first}
    assert [trial.number for trial in first] == list(range(2, of + 1))  # the kernel of few rows is there
    assert first[0].part.startswith("blocks.0.attention.query.weight: torch.float32 product with 64 inputs")
    assert first[-1].part == "attention of layer 0"
    assert str(first[0]) == (
        f"trying this machine's kernels for exact numerics, once: what is found is kept in {folder}"
    )
    assert told() == []


def test_the_compiler_is_told_before_it_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(exact, "row_kernel_is_to_compile", lambda: True)
    monkeypatch.setattr(exact, "tell_search", lambda _: calls.append("told"))
    monkeypatch.setattr(exact, "row_kernel", lambda: calls.append("compiled"))
    told()
    assert calls == ["told", "compiled"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "of nobody"))
    there = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert row_kernel_is_to_compile() is bool(there)
    monkeypatch.setenv("PATH", "")
    assert not row_kernel_is_to_compile(), "there is no compiler to wait for"


def test_what_alone_is_not_known_is_told_alone(folder: Path) -> None:
    of = told()[0].of
    table = json.loads((folder / "facts.json").read_text())
    (norm,) = (name for name in table if name.startswith("norm"))
    del table[norm]
    (folder / "facts.json").write_text(json.dumps(table))
    (only,) = told()
    assert (only.part, only.of) == ("the norm of width 64", of)


def test_without_a_home_it_is_said_that_the_next_start_tries_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(facts, "facts_path", homeless)
    assert "at each start" in str(told()[0])


def test_of_many_processes_each_tells_its_first_part_alone() -> None:
    heard: list[Trial] = []
    tell = first_told(heard.append)
    for number in (1, 2):
        tell(Trial("a part", number, 2, ""))
    assert [trial.number for trial in heard] == [1]


def test_nobody_hears_of_trials_outside_the_block(folder: Path) -> None:
    heard: list[Trial] = []
    with trials_told(heard.append):
        pass
    facts.recalled("a product", lambda: facts.Facts(1, 1), lambda _: True)
    assert heard == []
    assert (folder / "facts.json").exists()
