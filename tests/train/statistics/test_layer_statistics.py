"""Statistics of layers are those of plain torch, the same bits on every layout, and change no weight."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.initialized import initialized
from phalanx.model.layers.attention.attend import Score
from phalanx.model.layers.attention.attention import Documents
from phalanx.observe.event_log import read_events
from phalanx.observe.events import LayerStatistics
from phalanx.parallel.context.fixed_tiles import by_tile
from phalanx.run.sections.monitoring import StatisticsSpec
from phalanx.run.spec import OptimizerSpec, RunSpec
from phalanx.train.statistics import largest_logit
from ranks import Ranks
from run.specs import replace_at
from tiny_runs import on_layout, tiny_run, train_on_this_rank
from train.pieces import divided, model_in, run_in_pieces
from train.statistics.measured import MeasuredSteps, measure_on_this_rank, samples_of

LAYOUTS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "zero2": ("whole", "dense", 4, {"sharding": "zero2"}),
    "zero3": ("whole", "shared key heads", 2, {"sharding": "zero3"}),
    "a pipeline": ("whole", "four layers", 2, {"pipeline": 2}),
    "lanes over tensor ranks": ("lanes", "shared key heads", 2, {"tensor": 2}),
    "tiles over context ranks": ("tiles", "dense", 2, {"context": 2}),
    "latent attention in tiles": ("tiles", "absorbed", 2, {"context": 2}),
    "lanes and tiles on four ranks": ("lanes and tiles", "dense", 4, {"tensor": 2, "context": 2}),
    "experts on two ranks": ("whole", "mixture", 2, {"expert": 2, "sharding": "zero2"}),
    "experts in lanes": ("lanes", "mixture", 2, {"tensor": 2}),
    "predictions ahead": ("whole", "ahead", 2, {"sharding": "zero2"}),
}
"""Pieces, model, ranks, and how they are used."""


def tiny_spec(model: str = "shared key heads", **fields: Any) -> RunSpec:
    spec = run_in_pieces(model_in("whole", model))
    return dataclasses.replace(spec, **fields)


def column(measured: MeasuredSteps, figure: str) -> dict[str, float | None]:
    event = measured.events[-1]
    return dict(zip(event.layers, event.figures[figure], strict=True))


def logits_of(measured: MeasuredSteps) -> dict[str, float]:
    """The largest attention logit of each layer that has one."""
    logits = column(measured, "attention.largest_logit")
    return {layer: value for layer, value in logits.items() if value is not None}


def whole_norm(measured: MeasuredSteps, figure: str) -> float:
    """The norm of the whole model, from those of all layers and groups."""
    columns = [values for name, values in measured.events[-1].figures.items() if name.endswith(f".{figure}")]
    return math.sqrt(math.fsum(value**2 for values in columns for value in values if value is not None))


@pytest.mark.parametrize("name", LAYOUTS)
def test_figures_have_the_same_bits_on_every_layout_and_every_rank(ranks: Ranks, name: str) -> None:
    pieces, model, count, degrees = LAYOUTS[name]
    spec = run_in_pieces(model_in(pieces, model))
    (alone,) = ranks.run(1, measure_on_this_rank, spec)
    (unmeasured,) = ranks.run(1, measure_on_this_rank, spec, 2, 0)
    assert alone.weights_sha256 == unmeasured.weights_sha256
    parallel = divided(spec.model, **degrees)
    assert len(logits_of(alone)) == spec.model.layers
    for measured in ranks.run(count, measure_on_this_rank, dataclasses.replace(spec, parallel=parallel)):
        assert measured.events == alone.events
        assert measured.weights_sha256 == alone.weights_sha256


@pytest.mark.parametrize("mode", ["ring", "allgather"])
@pytest.mark.parametrize("window", [0, 5])
def test_context_ranks_without_tiles_find_the_largest_logit_of_the_whole_sequence(
    ranks: Ranks, mode: str, window: int
) -> None:
    # With tiles there is a document mask, and each sequence is long enough for two context ranks.
    spec = run_in_pieces(model_in("tiles", "shared key heads"))
    model = dataclasses.replace(
        spec.model,
        context_tiles=0,
        attention_pattern=("window" if window else "full",),
        window=window,
        init_std=0.3,
    )
    spec = dataclasses.replace(spec, model=model)
    (alone,) = ranks.run(1, measure_on_this_rank, spec, 1)
    parallel = dataclasses.replace(divided(model, context=2), context_mode=mode)
    for measured in ranks.run(2, measure_on_this_rank, dataclasses.replace(spec, parallel=parallel), 1):
        assert logits_of(measured) == pytest.approx(logits_of(alone), rel=1e-5)


@given(st.sampled_from([1, 2, 4]), st.integers(0, 7), st.integers(0, 9), st.booleans())
def test_the_largest_logit_over_tiles_is_that_of_plain_torch(
    tiles: int, window: int, seed: int, has_documents: bool
) -> None:
    batch, heads, keys, seq, width = 2, 4, 2, 16, 8
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(batch, count, seq, width, generator=generator) for count in (heads, keys))
    ids = torch.randint(0, 2, (batch, seq), generator=generator).cumsum(1)
    documents = Documents.numbered(ids) if has_documents else None
    positions = by_tile(torch.arange(seq), tiles, 0)
    largest = max(
        largest_logit(query[:, :, rows], key[:, :, positions], Score(), rows, positions, window, documents)
        for rows in positions.chunk(tiles)
    )
    logits = (
        query.double() @ key.double().repeat_interleave(heads // keys, 1).transpose(2, 3) / math.sqrt(width)
    )
    visible = torch.ones(seq, seq, dtype=torch.bool).tril()
    if window:
        visible &= torch.ones_like(visible).triu(1 - window)
    if has_documents:
        visible = (visible & (ids[:, :, None] == ids[:, None])).unsqueeze(1)
    expected = logits.masked_fill(~visible, -math.inf).max().item()
    assert largest == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("optimizer", "state"), [("adamw", "fp32"), ("adamw", "bf16"), ("muon", "fp32")])
def test_statistics_change_no_bit_of_the_weights_with_any_optimizer(
    ranks: Ranks, optimizer: str, state: str
) -> None:
    spec = tiny_spec(optimizer=OptimizerSpec(name=optimizer, state=state, lr=0.01))  # type: ignore[arg-type]
    (measured,) = ranks.run(1, measure_on_this_rank, spec)
    (plain,) = ranks.run(1, measure_on_this_rank, spec, 2, 0)
    assert measured.weights_sha256 == plain.weights_sha256
    assert len(measured.events) == 2
    assert plain.events == ()
    changes = [(measured.after[name] - weight).flatten() for name, weight in measured.before.items()]
    assert whole_norm(measured, "update_norm") == pytest.approx(torch.cat(changes).double().norm().item())
    for group, layer, names in [
        ("attention", "1", [f"blocks.1.attention.{n}.weight" for n in ("query", "key", "value", "output")]),
        ("feed_forward", "0", [f"blocks.0.ffn.{n}.weight" for n in ("gate", "up", "down")]),
    ]:
        parts = [
            name for name in measured.before if name in names or name.removesuffix("bias") + "weight" in names
        ]
        moved = torch.cat(
            [(measured.after[n].double() - measured.before[n].double()).flatten() for n in parts]
        )
        weights = torch.cat([measured.before[n].double().flatten() for n in parts])
        assert column(measured, f"{group}.update_norm")[layer] == pytest.approx(moved.norm().item(), rel=1e-4)
        assert column(measured, f"{group}.weight_norm")[layer] == pytest.approx(weights.norm().item())
        ratio = column(measured, f"{group}.update_ratio")[layer]
        assert ratio == pytest.approx((moved.norm() / weights.norm()).item(), rel=1e-4)


def test_norms_of_gradients_add_up_to_the_norm_of_the_step(ranks: Ranks) -> None:
    (measured,) = ranks.run(1, measure_on_this_rank, tiny_spec())
    assert whole_norm(measured, "gradient_norm") == pytest.approx(measured.grad_norm)


def test_activations_are_those_of_plain_torch(ranks: Ranks) -> None:
    spec = replace_at(tiny_spec(), "model.init_std", 0.3)
    (measured,) = ranks.run(1, measure_on_this_rank, spec, 1)
    model = initialized(spec.model, seed=spec.runtime.seed)
    streams: dict[str, torch.Tensor] = {}
    heads: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer, block in model.blocks.items():
        block.register_forward_hook(lambda _, _args, y, layer=layer: streams.update({layer: y}))
        attention = block.attention
        projected = attention.projected

        def keep(*args: Any, layer: str = layer, projected: Any = projected) -> Any:
            query, key, value = projected(*args)
            heads[layer] = query, key
            return query, key, value

        attention.projected = keep
    with torch.no_grad():
        rows = spec.train.micro_batch_size
        model(torch.from_numpy(samples_of(spec, 1, 0))[:rows, :-1])
    for layer, stream in streams.items():
        x = stream.double()
        assert column(measured, "residual.rms")[layer] == pytest.approx(
            x.square().mean().sqrt().item(), rel=1e-5
        )
        kurtosis = (x**4).mean() / x.square().mean() ** 2
        assert column(measured, "residual.kurtosis")[layer] == pytest.approx(kurtosis.item(), rel=1e-4)
        query, key = heads[layer]
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        logits = query.double() @ keys.double().transpose(2, 3) / math.sqrt(query.shape[-1])
        visible = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        largest = logits[..., visible].max().item()
        assert column(measured, "attention.largest_logit")[layer] == pytest.approx(largest, rel=1e-5)


def test_loads_of_routers_are_those_of_the_whole_step(ranks: Ranks) -> None:
    (measured,) = ranks.run(1, measure_on_this_rank, tiny_spec("mixture"))
    share, entropy = column(measured, "router.largest_share"), column(measured, "router.entropy")
    assert share["0"] is None
    assert 1 / 8 <= (share["1"] or 0) <= 1 / 2
    assert 0.5 < (entropy["1"] or 0) <= 1


def test_a_step_that_is_not_finite_is_measured_and_names_the_first_layer(ranks: Ranks) -> None:
    broken = "blocks.1.ffn.up.weight"
    (measured,) = ranks.run(1, measure_on_this_rank, tiny_spec(), 1, 100, broken)
    (event,) = measured.events
    assert not event.applied
    rms = column(measured, "residual.rms")
    assert math.isfinite(rms["0"] or 0)
    assert rms["1"] == math.inf
    assert column(measured, "feed_forward.weight_norm") == {
        **column(measured, "feed_forward.weight_norm"),
        "1": math.inf,
    }
    assert not any(figure.endswith("update_norm") for figure in event.figures)


def test_hidden_units_that_no_token_activates_are_counted(ranks: Ranks) -> None:
    spec = tiny_spec("four layers", optimizer=OptimizerSpec(lr=1e-12))
    (measured,) = ranks.run(1, measure_on_this_rank, spec, 1, 1, "blocks.1.ffn.up.weight", 0.0, 16)
    dead = column(measured, "feed_forward.dead_units")
    assert dead["0"] == 0
    assert dead["1"] == 16 / 64


def test_only_steps_that_are_due_are_measured(ranks: Ranks) -> None:
    (measured,) = ranks.run(1, measure_on_this_rank, tiny_spec(), 5, 2)
    assert [event.step for event in measured.events] == [2, 4]


def statistics_events(run_dir: Path) -> list[LayerStatistics]:
    bodies = [event.body for event in read_events(run_dir / "events.jsonl")]
    return [dataclasses.replace(body, seconds=0.0) for body in bodies if isinstance(body, LayerStatistics)]


def test_a_run_that_breaks_off_and_changes_its_layout_has_the_same_figures(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    unbroken = dataclasses.replace(
        tiny_run(dataset, tmp_path / "whole"), statistics=StatisticsSpec(every_steps=3)
    )
    (result,) = ranks.run(1, train_on_this_rank, unbroken)
    broken = dataclasses.replace(unbroken, run_dir=str(tmp_path / "broken"))
    ranks.run(2, train_on_this_rank, on_layout(broken, "zero3", 2), 4)
    results = ranks.run(4, train_on_this_rank, on_layout(broken, "zero2", 2))
    assert [event.step for event in statistics_events(tmp_path / "whole")] == [3, 6]
    # The step that was lost is measured again, with the same figures.
    by_step = {event.step: event for event in statistics_events(tmp_path / "broken")}
    assert list(by_step.values()) == statistics_events(tmp_path / "whole")
    assert len(statistics_events(tmp_path / "broken")) == 3
    assert results[0]["weights_sha256"] == result["weights_sha256"]
