"""A user's own model is trained like Phalanx's: the same bits on any fleet, after any interruption; and correctly at all."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples.mixer import Mixer

from phalanx.data.reading.dataset import RunData
from phalanx.data.reading.sources import open_places
from phalanx.data.stored.index import read_index
from phalanx.model.custom import custom_facts
from phalanx.model.init import fill
from phalanx.observe.event_log import read_events
from phalanx.observe.events import LayerStatistics
from phalanx.run.directory.paths import RunDirectoryError
from phalanx.run.fields import RunFileError
from phalanx.run.sections.monitoring import StatisticsSpec
from phalanx.run.spec import ModelSpec, ParallelSpec, RunSpec
from phalanx.train.optimizers.optimizer import decays
from phalanx.train.start.open_run import open_run
from phalanx.train.start.prepare import resolve
from phalanx.train.step.learning_rate import multiplier
from phalanx_serve.generate import generate, load_model
from ranks import Ranks
from tiny_runs import tiny_run, train_on_this_rank

STEPS = 4
LAYOUTS = {
    "2 replicas": (2, ParallelSpec(sharding="none")),
    "2 shards of the optimizer": (2, ParallelSpec(sharding="zero1")),
    "3 shards": (3, ParallelSpec(sharding="zero3")),
    "2 replicas of 2 shards": (4, ParallelSpec(sharding="zero3", shard_ranks=2)),
    "2 stages": (2, ParallelSpec(sharding="none", pipeline=2)),
    "2 stages of 2 shards": (4, ParallelSpec(sharding="zero3", pipeline=2)),
}


def mixer_run(dataset: Path, run_dir: Path) -> RunSpec:
    """A resolved run of ``mixers.Mixer``."""
    spec = tiny_run(dataset, run_dir, STEPS)
    spec = dataclasses.replace(spec, model=ModelSpec(factory="examples.mixer:Mixer", layers=3, dim=32))
    return resolve(spec, open_places(spec.data), Path("mixer.toml"))


def on(layout: str, spec: RunSpec) -> RunSpec:
    return dataclasses.replace(spec, parallel=LAYOUTS[layout][1])


@pytest.fixture(scope="module")
def reference(ranks: Ranks, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The undisturbed run on one rank."""
    spec = mixer_run(dataset, tmp_path_factory.mktemp("reference") / "run")
    result = ranks.run(1, train_on_this_rank, spec)[0]
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_shards_and_stages_change_no_bit(
    layout: str, ranks: Ranks, dataset: Path, reference: dict[str, Any], tmp_path: Path
) -> None:
    spec = on(layout, mixer_run(dataset, tmp_path / "run"))
    for result in ranks.run(LAYOUTS[layout][0], train_on_this_rank, spec):
        assert result["weights_sha256"] == reference["weights_sha256"]
        assert result["loss"] == reference["loss"]
        assert result["held_out_loss"] == reference["held_out_loss"]


def test_layers_of_a_users_own_model_are_measured_with_the_same_bits_on_any_layout(
    ranks: Ranks, dataset: Path, reference: dict[str, Any], tmp_path: Path
) -> None:
    events = []
    for name, layout in (("alone", None), ("stages", "2 stages of 2 shards")):
        spec = dataclasses.replace(mixer_run(dataset, tmp_path / name), statistics=StatisticsSpec(2))
        count = LAYOUTS[layout][0] if layout else 1
        result = ranks.run(count, train_on_this_rank, on(layout, spec) if layout else spec)[0]
        assert isinstance(result, dict)
        assert result["weights_sha256"] == reference["weights_sha256"]
        bodies = [event.body for event in read_events(tmp_path / name / "events.jsonl")]
        measured = [body for body in bodies if isinstance(body, LayerStatistics)]
        events.append([dataclasses.replace(body, seconds=0.0) for body in measured])
    assert [body.step for body in events[0]] == [2, 4]
    assert events[0] == events[1]
    assert events[0][0].layers[:4] == ["embedding", "0", "1", "2"]
    assert {"residual.rms", "other.gradient_norm", "norms.update_ratio"} <= set(events[0][0].figures)


def test_a_run_broken_off_goes_on_with_the_same_bits_on_another_layout(
    ranks: Ranks, dataset: Path, reference: dict[str, Any], tmp_path: Path
) -> None:
    spec = mixer_run(dataset, tmp_path / "run")
    ranks.run(2, train_on_this_rank, on("2 stages", spec), 4)
    recomputing = dataclasses.replace(spec, memory=dataclasses.replace(spec.memory, recompute="full"))
    results = ranks.run(3, train_on_this_rank, on("3 shards", recomputing))
    assert {result["weights_sha256"] for result in results} == {reference["weights_sha256"]}


def test_the_loss_is_that_of_a_plain_loop(dataset: Path, reference: dict[str, Any], tmp_path: Path) -> None:
    spec = mixer_run(dataset, tmp_path / "run")
    kinds = {kind.name: kind for kind in custom_facts(spec.model, spec.train.seq_len).parameters}
    model = Mixer(spec.model)
    groups = []
    for name, parameter in model.named_parameters():
        fill(parameter.data, kinds[name], (0,) * parameter.ndim, spec.model, spec.runtime.seed)
        decay = spec.optimizer.weight_decay if decays(kinds[name], spec.optimizer) else 0.0
        groups.append({"params": [parameter], "weight_decay": decay})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=spec.optimizer.eps)
    data = RunData.open(dataset, spec.train.seq_len, spec.runtime.seed)
    for step in range(STEPS):
        samples = torch.from_numpy(data.train_samples(step * spec.train.batch_size, spec.train.batch_size))
        loss = F.cross_entropy(model(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.optimizer.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = spec.optimizer.lr * multiplier(spec.schedule, step + 1, STEPS)
        optimizer.step()
    assert reference["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_a_run_is_not_continued_with_other_source(dataset: Path, tmp_path: Path, ranks: Ranks) -> None:
    spec = mixer_run(dataset, tmp_path / "run")
    ranks.run(1, train_on_this_rank, spec, 3)
    other = dataclasses.replace(spec, model=dataclasses.replace(spec.model, factory_sha256="0" * 64))
    with pytest.raises(RunDirectoryError, match=r"belongs to another run(.|\n)*model\.factory_sha256"):
        open_run(other, read_index(dataset).fingerprint, dataset)
    with pytest.raises(RunFileError, match=r"the source of examples\.mixer:Mixer is another now"):
        resolve(other, open_places(other.data), Path("mixer.toml"))
    with pytest.raises(AssertionError, match="not the one that this run began with"):
        ranks.run(1, train_on_this_rank, dataclasses.replace(other, run_dir=str(tmp_path / "third")))


def test_a_model_of_ones_own_generates_text_from_its_checkpoint(
    reference: dict[str, Any],
) -> None:
    model, _ = load_model(Path(reference["run_dir"]))
    ids = list(generate(model, [5, 6], tokens=3, temperature=0))
    text = [5, 6]
    for token in ids:
        assert int(model(torch.tensor([text]))[0, -1].argmax()) == token
        text.append(token)
    assert len(ids) == 3
