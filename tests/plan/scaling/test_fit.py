"""A law fitted to small runs finds what made them, and refuses runs that cannot fix it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from click.testing import CliRunner

from phalanx.run.kinds.whole_model import resolve
from phalanx.run.read import to_table
from phalanx.run.spec import ModelSpec, RunSpec, TrainSpec
from phalanx_plan.cli.plan_command import command
from phalanx_plan.cli.what_to_train import read_runs
from phalanx_plan.scaling.fit import FitError, SmallRun, fit
from phalanx_plan.scaling.laws import CHINCHILLA, PowerLaw


def made_by(law: PowerLaw, noise: float = 0.0, seed: int = 0) -> tuple[SmallRun, ...]:
    random = np.random.default_rng(seed)
    return tuple(
        SmallRun(f"{size:g}/{tokens:g}", size, tokens, law.loss(size, tokens) * float(np.exp(noise * random.normal())))
        for size in (1e7, 4e7, 1.6e8, 6e8)
        for tokens in (2e8, 1e9, 5e9, 2.5e10)
    )  # fmt: skip


@pytest.mark.parametrize(
    "law", [CHINCHILLA.law, PowerLaw(1.2, 30.0, 0.2, 200.0, 0.25), PowerLaw(0.5, 5e3, 0.5, 50.0, 0.15)]
)
def test_planted_constants_are_found(law: PowerLaw) -> None:
    fitted_law = fit(made_by(law), samples=2).law
    assert (fitted_law.floor, fitted_law.alpha, fitted_law.beta) == pytest.approx(
        (law.floor, law.alpha, law.beta), rel=0.01
    )
    assert fitted_law.loss(1e11, 2e12) == pytest.approx(law.loss(1e11, 2e12), rel=1e-3)


def test_the_band_holds_what_made_noisy_runs_and_widens_with_distance() -> None:
    law = CHINCHILLA.law
    fitted = [fit(made_by(law, noise=0.005, seed=seed), samples=30) for seed in range(3)]
    far = [noisy_fit.band(7e10, 1.4e12) for noisy_fit in fitted]
    near = [noisy_fit.band(1.6e8, 5e9) for noisy_fit in fitted]
    hits = sum(low <= law.loss(7e10, 1.4e12) <= high for low, high in far)
    assert hits >= 1
    assert all(f[1] - f[0] > n[1] - n[0] for f, n in zip(far, near, strict=True))


def test_one_spoiled_run_hardly_moves_the_law() -> None:
    """Huber's loss grows linearly with what a run is off."""
    law = CHINCHILLA.law
    first, *others = made_by(law)
    fitted_law = fit((replace(first, loss=1.3 * first.loss), *others), samples=2).law
    assert fitted_law.loss(1e11, 2e12) == pytest.approx(law.loss(1e11, 2e12), rel=0.01)


def test_the_same_runs_give_the_same_law_and_band() -> None:
    runs = made_by(CHINCHILLA.law, noise=0.01)
    assert fit(runs, samples=4) == fit(runs, samples=4)


RUNS = made_by(CHINCHILLA.law)


@pytest.mark.parametrize(
    ("runs", "says"),
    [
        ((), "0 runs"),
        (RUNS[:6], "6 runs"),
        (tuple(replace(run, tokens=1e9) for run in RUNS), "numbers of tokens"),
        (
            tuple(replace(run, parameters=1e9 + (n % 2)) for n, run in enumerate(RUNS)),
            "numbers of parameters",
        ),
        ((*RUNS, replace(RUNS[0], loss=float("nan"))), "positive and finite"),
        ((*RUNS, replace(RUNS[0], tokens=0.0)), "positive and finite"),
    ],
)
def test_runs_that_cannot_fix_a_law_are_refused_with_what_is_missing(
    runs: tuple[SmallRun, ...], says: str
) -> None:
    with pytest.raises(FitError, match=says):
        fit(runs)


def finished(
    place: Path, width: int, steps: int, *, data: str = "one", vocabulary: int = 512, loss: float | None = 3.0
) -> Path:
    """A run directory as a finished run leaves it, its held-out loss that of a planted law."""
    place.mkdir()
    spec = RunSpec(
        model=resolve(ModelSpec(layers=2, dim=width, heads=width // 32, vocab_size=vocabulary)),
        train=TrainSpec(steps=steps, batch_size=8, seq_len=128, slots=1),
    )
    (place / "run.toml").write_text(tomli_w.dumps(to_table(spec)))
    (place / "record.json").write_text(json.dumps({"attempts": 1, "data_fingerprint": data}))
    tokens = steps * 8 * 128
    if loss is not None:
        loss = PLANTED.loss(sized(width, vocabulary), tokens)
    result = {"step": steps, "tokens": tokens, "held_out_loss": loss, "weights_sha256": "0" * 64}
    (place / "result.json").write_text(json.dumps(result))
    return place


PLANTED = PowerLaw(floor=1.0, a=60.0, alpha=0.35, b=90.0, beta=0.3)


def sized(width: int, vocabulary: int = 512) -> float:
    from phalanx.model.facts.shape import count

    return count(
        resolve(ModelSpec(layers=2, dim=width, heads=width // 32, vocab_size=vocabulary)), 128
    ).active_parameters


@pytest.fixture(scope="module")
def run_directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    grid = [(width, steps) for width in (32, 64, 128) for steps in (100, 400, 1600)]
    return [finished(folder / f"{width}-{steps}", width, steps) for width, steps in grid]


def test_runs_on_disk_predict_a_larger_run_file(run_directories: list[Path], tmp_path: Path) -> None:
    large = finished(tmp_path / "large", 512, 10_000) / "run.toml"
    arguments = ["--fit", *map(str, run_directories), str(large), "--json"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    (predicted,) = json.loads(result.output)["predicted"]
    assert predicted["parameters"] == sized(512)
    assert predicted["tokens"] == 10_000 * 8 * 128
    assert predicted["loss"] == pytest.approx(PLANTED.loss(sized(512), predicted["tokens"]), rel=0.01)
    shown = CliRunner().invoke(command, ["--fit", *map(str, run_directories), "--budget", "1e18 FLOP"])
    assert "predicted loss" in shown.output


def test_runs_of_another_kind_are_refused_by_name(run_directories: list[Path], tmp_path: Path) -> None:
    other = {
        "data": finished(tmp_path / "text", 64, 100, data="two"),
        "vocab_size": finished(tmp_path / "words", 64, 100, vocabulary=1024),
        "no held-out loss": finished(tmp_path / "blind", 64, 100, loss=None),
    }
    for says, place in other.items():
        with pytest.raises(FitError, match=says):
            read_runs([*run_directories, place])
    unfinished = finished(tmp_path / "half", 64, 100)
    (unfinished / "result.json").unlink()
    with pytest.raises(FitError, match="not finished"):
        read_runs([*run_directories, unfinished])
    damaged = finished(tmp_path / "torn", 64, 100)
    (damaged / "record.json").write_text("{")
    with pytest.raises(FitError, match=r"record\.json is damaged"):
        read_runs([*run_directories, damaged])
    with pytest.raises(FitError, match="given twice"):
        read_runs([*run_directories, run_directories[0]])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "is not a run directory"),
        ([], "0 runs"),
        (["--model", "llama3-8b"], "--model cannot be given with --fit"),
        (["--budget", "40M$"], "in FLOP"),
        (["a.toml", "b.toml"], "one run file"),
        (["--tokens", "1T"], "give one"),
    ],
)
def test_a_mistaken_fit_is_explained(arguments: list[str], says: str, run_directories: list[Path]) -> None:
    runs = [] if arguments in ([], ["nowhere"]) else list(map(str, run_directories))
    result = CliRunner().invoke(command, ["--fit", *runs, *arguments])
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())
