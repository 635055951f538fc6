"""Tiny runs whose loss jumps: in one step their data are another dataset's, of bytes that the first never has; or their rate is too high."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from phalanx.data.formats.document import Document
from phalanx.data.preparing.prepare import prepare
from phalanx.run.spec import CheckpointSpec, DataSpec, EvalSpec, RunSpec, SourceSpec
from tiny_runs import tiny_run

SPIKE = 13
"""The step of the spike."""
STEPS = 18


def make_noise(folder: Path) -> Path:
    """The other dataset."""
    documents = [Document(f"document-{n}", "ÿþ%$#@!~^&*Ÿ" * 60) for n in range(12)]
    prepare(documents, folder, tokenizer="bytes", held_out_fraction=0.1)
    return folder


def spiking_run(dataset: Path, noise: Path, run_dir: Path, noise_share: float = 1.0) -> RunSpec:
    """The run: it goes on after the spike, which it judges by a short window. ``noise_share`` of the sequences of its step are noise."""
    # A part of a batch raises the loss less, and the loss of so short a run still falls over the window.
    base = tiny_run(dataset, run_dir, STEPS, spike_window=8, spike_deviations=8.0 * noise_share**1.5)
    sources = (
        SourceSpec("words", str(dataset), (1.0, 1.0 - noise_share, 1.0), epochs=0),
        SourceSpec("noise", str(noise), (0.0, noise_share, 0.0), epochs=0),
    )
    return dataclasses.replace(
        base,
        train=dataclasses.replace(base.train, slots=4, micro_batch_size=4),
        data=DataSpec(stages=(0, SPIKE - 1, SPIKE), sources=sources),
        checkpoint=CheckpointSpec(every_steps=2, keep_last=1),
        evaluation=EvalSpec(every_steps=0, final_sequences=4),
    )


def fast_run(dataset: Path, run_dir: Path, steps: int = STEPS) -> RunSpec:
    """A run without warm-up whose rate is too high: its updates raise the loss."""
    base = tiny_run(dataset, run_dir, steps, spike_window=8)
    return dataclasses.replace(
        base,
        train=dataclasses.replace(base.train, micro_batch_size=2),
        optimizer=dataclasses.replace(base.optimizer, lr=0.5),
        schedule=dataclasses.replace(base.schedule, warmup_steps=0),
        checkpoint=CheckpointSpec(every_steps=2, keep_last=10),
        evaluation=EvalSpec(every_steps=0, final_sequences=4),
    )
