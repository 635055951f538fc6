"""Small real runs that diverge by a planted cause, and healthy ones, for ``bench.watch.divergences``.

A cause is in the run file, in the data of one step, or in the weights, which ``damaged_runs`` then changes before a step, as a faulty initialization or an overflow would.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from damaged_runs import train_damaged
from phalanx.data.formats.document import Document
from phalanx.data.preparing.prepare import prepare
from phalanx.run.sections.monitoring import StatisticsSpec
from phalanx.run.spec import CheckpointSpec, DataSpec, EvalSpec, MoeSpec, RunSpec, ScheduleSpec, SourceSpec
from spiking_runs import make_noise
from tiny_runs import make_dataset, tiny_run

PLANTED_STEP = 61
"""The step of a bad batch, and the first of wrong targets."""
_STEPS = 140
_WINDOW = 32
_MIXTURE = MoeSpec(experts=8, per_token=2, ffn_dim=16, router_bias=True, aux_loss=0.3)

Changes = Mapping[str, Mapping[str, Any]]
"""Changed fields by section of the run file."""


@dataclass(frozen=True)
class Case:
    """A run, and what ``phalanx why`` must name in it."""

    name: str
    codes: tuple[str, ...] = ()
    """Reasons of which one must be named; none for a healthy run."""
    where: str = ""
    """Layer or step that the reason must contain."""
    changes: Changes = field(default_factory=dict)
    source: str = ""
    """Dataset of the bad batch or, with ``lasting``, of all steps from then on."""
    lasting: bool = False
    fault: str = ""
    """Damage to the weights (``damaged_runs``)."""
    fault_step: int = 1
    """The step before which they are damaged."""


_RATE = ("diverged", "loss-spike", "not-learning", "saturated-layer", "growing-norm", "not-finite")

DIVERGENCES = (
    Case("learning rate too high", _RATE, changes={"optimizer": {"lr": 3.0}}),
    Case("weights of one layer scaled", ("saturated-layer",), "layer 1", fault="saturated"),
    Case("a bad batch of noise", ("loss-spike",), f"step {PLANTED_STEP}", source="noise"),
    Case("a batch of one repeated token", ("loss-spike",), f"step {PLANTED_STEP}", source="repeated"),
    Case(
        "shuffled targets from a step on",
        ("loss-spike", "diverged"),
        f"step {PLANTED_STEP}",
        source="shuffled",
        lasting=True,
    ),
    Case("an overflow in one layer", ("not-finite",), "step 41", fault="infinite", fault_step=41),
    Case("initialization 100 times too large", _RATE, changes={"model": {"init_std": 2.0}}),
    Case(
        "no gradient clip, high rate, a bad batch",
        ("loss-spike", "diverged"),
        f"step {PLANTED_STEP}",
        changes={"optimizer": {"clip_norm": 0.0, "lr": 3e-2}},
        source="noise",
    ),
    Case(
        "a collapsed router",
        ("collapsed-router",),
        "layer 1",
        changes={"model": {"moe": replace(_MIXTURE, aux_loss=0.0)}, "train": {"steps": 300}},
        fault="collapsed",
    ),
    Case(
        "one document repeated without end",
        ("loss-too-low",),
        changes={"data": {"path": "one"}},
    ),
)

CONTROLS = (
    Case("small and dense"),
    Case("mixture of experts", changes={"model": {"moe": _MIXTURE}, "train": {"steps": 300}}),
    Case("long warm-up", changes={"schedule": {"warmup_steps": 100}}),
    Case("no gradient clip", changes={"optimizer": {"clip_norm": 0.0}}),
    Case("constant rate", changes={"schedule": {"kind": "constant"}, "train": {"steps": 300}}),
    Case("norms of queries and keys", changes={"model": {"qk_norm": True}}),
    Case("four layers", changes={"model": {"layers": 4}}),
    Case("another seed", changes={"runtime": {"seed": 11}}),
    Case("no weight decay, low rate", changes={"optimizer": {"weight_decay": 0.0, "lr": 1e-3}}),
    Case(
        "untied embeddings, small batch",
        changes={"model": {"tie_embeddings": False}, "train": {"batch_size": 8}, "optimizer": {"lr": 3e-3}},
    ),
)


def make_datasets(folder: Path) -> dict[str, Path]:
    """Return the datasets of all cases by name: words, noise, one repeated character, shuffled characters, and one document."""
    generator = random.Random(0)
    characters = "0123456789abcdef "
    texts: dict[str, Callable[[int], str]] = {
        "repeated": lambda _: "e" * 700,
        "shuffled": lambda _: "".join(generator.choices(characters, k=700)),
        "one": lambda _: "abcdef 0123456789 " * 12,
    }
    datasets = {"words": make_dataset(folder / "words"), "noise": make_noise(folder / "noise")}
    for name, text in texts.items():
        documents = [Document(f"document-{number}", text(number)) for number in range(24)]
        prepare(documents, folder / name, tokenizer="bytes", held_out_fraction=0.1)
        datasets[name] = folder / name
    return datasets


def run_of(case: Case, datasets: Mapping[str, Path], run_dir: Path) -> RunSpec:
    """Return the run of ``case`` in ``run_dir``."""
    changes = {name: dict(fields) for name, fields in case.changes.items()}
    path = datasets[changes.pop("data", {}).get("path", "words")]
    spec = replace(
        tiny_run(path, run_dir, _STEPS, spike_window=_WINDOW),
        schedule=ScheduleSpec(warmup_steps=10),
        checkpoint=CheckpointSpec(every_steps=0),
        evaluation=EvalSpec(every_steps=0, final_sequences=4),
        statistics=StatisticsSpec(20),
    )
    if case.source:
        rest = 0.0 if case.lasting else 1.0
        words = SourceSpec("words", str(path), (1.0, 0.0, rest), epochs=0)
        planted = SourceSpec(case.source, str(datasets[case.source]), (0.0, 1.0, 1.0 - rest), epochs=0)
        stages = (0, PLANTED_STEP - 1, PLANTED_STEP)
        spec = replace(spec, data=DataSpec(stages=stages, sources=(words, planted)))
    sections = {section: replace(getattr(spec, section), **fields) for section, fields in changes.items()}
    return replace(spec, **sections)


def train_with(spec: RunSpec, case: Case) -> None:
    """Train ``spec`` with the fault of ``case`` on this rank. A run that stops at a step that is not finite ends quietly."""
    from phalanx.train.lifecycle.bad_steps import NonFiniteError

    with suppress(NonFiniteError):
        train_damaged(spec, case.fault, case.fault_step)
