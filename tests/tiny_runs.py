"""Tiny runs for tests: a model of a few thousand weights on a corpus of a few thousand tokens."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any, cast

from phalanx.data.formats.document import Document
from phalanx.data.preparing.prepare import prepare
from phalanx.data.reading.sources import index_of_places, open_places, tokenizer_folder
from phalanx.run.spec import (
    CheckpointSpec,
    DataSpec,
    EvalSpec,
    ModelSpec,
    ObserveSpec,
    OptimizerSpec,
    ParallelSpec,
    RunSpec,
    RuntimeSpec,
    ScheduleSpec,
    SourceSpec,
    TrainSpec,
)
from phalanx.train.start.prepare import resolve

TINY_MODEL = ModelSpec(layers=2, dim=32, heads=4, kv_heads=2, ffn_dim=64, tie_embeddings=True)


def make_dataset(folder: Path, salt: str = "") -> Path:
    """A prepared dataset of byte tokens: pseudo-random words, the same every time for a ``salt``."""
    words = [hashlib.sha256(f"{salt}{n}".encode()).hexdigest()[: 2 + n % 5] for n in range(400)]
    documents = [
        Document(f"document-{n}", " ".join(words[(n * 7 + i * i) % 400] for i in range(120)))
        for n in range(60)
    ]
    prepare(documents, folder, tokenizer="bytes", held_out_fraction=0.1)
    return folder


def tiny_run(
    dataset: Path, run_dir: Path, steps: int = 6, micro_batch_size: int = 2, **train: Any
) -> RunSpec:
    """A resolved run on ``dataset`` that clips, decays, evaluates and saves; a slot is two sequences, in one micro-batch or in two."""
    spec = RunSpec(
        name="tiny",
        run_dir=str(run_dir),
        model=TINY_MODEL,
        data=DataSpec(path=str(dataset)),
        train=TrainSpec(
            steps=steps,
            batch_size=16,
            seq_len=24,
            slots=8,
            micro_batch_size=micro_batch_size,
            loss_chunk=16,
            **train,
        ),
        optimizer=OptimizerSpec(lr=1e-2, weight_decay=0.1, clip_norm=0.5),
        schedule=ScheduleSpec(warmup_steps=2),
        runtime=RuntimeSpec(
            device="cpu", seed=3, numerics="native"
        ),  # a worker of tests has other runs after this one
        checkpoint=CheckpointSpec(every_steps=2, keep_last=3),
        evaluation=EvalSpec(every_steps=2, sequences=5, final_sequences=16),
        observe=ObserveSpec(memory_at_step=0),  # a step whose memory is looked at takes as long as five
    )
    return resolve(spec, open_places(spec.data), Path("tiny.toml"))


def tiny_mixture(datasets: dict[str, Path], run_dir: Path, steps: int = 6) -> RunSpec:
    """A resolved run on several datasets, whose weights change after the third step."""
    base = tiny_run(next(iter(datasets.values())), run_dir, steps)
    sources = tuple(
        SourceSpec(name, str(folder), (0.5 + number, 1.0), epochs=0)
        for number, (name, folder) in enumerate(datasets.items())
    )
    return dataclasses.replace(base, data=DataSpec(stages=(0, 3), sources=sources))


def on_layout(spec: RunSpec, sharding: str, shard_ranks: int) -> RunSpec:
    """The same run, held differently by the fleet."""
    parallel = ParallelSpec(sharding=sharding, shard_ranks=shard_ranks)  # type: ignore[arg-type]
    return dataclasses.replace(spec, parallel=parallel)


def train_on_this_rank(
    spec: RunSpec,
    stop_before_step: int | None = None,
    guardian: Any = None,
    stop: Any = None,
    boot_id: Path | None = None,
) -> dict[str, Any] | None:
    """Runs ``spec`` as one rank of the current process group, in its run directory; as a worker process does.

    ``stop_before_step`` breaks the run off without saving, as a crash would: whatever is not durable is lost.
    ``guardian`` watches over this rank, and is told of what was assembled; ``stop`` is its request to save and stop.
    ``boot_id`` replaces the file that identifies the machine.
    """
    import os
    import time

    import torch
    import torch.distributed as dist

    from phalanx.observe.event_log import EventLog, next_attempt
    from phalanx.observe.ledger import Ledger
    from phalanx.observe.rank_writer import RankRecorder
    from phalanx.parallel.mesh import BOOT_ID
    from phalanx.process.this_process import StopRequest
    from phalanx.run.directory.paths import RunDirectory
    from phalanx.train.assemble import EpochInputs, assemble
    from phalanx.train.lifecycle.guardian import Guardian
    from phalanx.train.lifecycle.loop import train
    from phalanx.train.lifecycle.reporter import Reporter
    from phalanx.train.start.open_run import open_run

    opened: list[Any] = [None]
    lock_fd = -1
    if dist.get_rank() == 0:
        places = open_places(spec.data)
        run = open_run(spec, index_of_places(places).fingerprint, tokenizer_folder(places))
        lock_fd = run.lock_fd
        opened = [next_attempt(run.directory.events)]
    dist.broadcast_object_list(opened, src=0)
    directory = RunDirectory(Path(spec.run_dir))
    reporter = Reporter(None)
    if dist.get_rank() == 0:
        reporter = Reporter(EventLog(directory.events, opened[0]), RankRecorder(directory.ranks))
    device = torch.device("cpu")
    ledger = Ledger(time.monotonic_ns())
    inputs = EpochInputs(
        spec,
        directory,
        opened[0],
        device,
        ledger,
        stop or StopRequest(),
        guardian=guardian or Guardian(),
        boot_id=boot_id or BOOT_ID,
    )
    training = assemble(inputs, reporter)
    inputs.guardian.assembled(training.built, training.saver)
    if stop_before_step is not None:
        broken = Crashing(training.built.model, stop_before_step, len(training.built.rounds), training)
        runner = dataclasses.replace(training.built.runner, model=broken)  # type: ignore[type-var]
        training.built = dataclasses.replace(training.built, model=cast(Any, broken), runner=runner)
    try:
        result = train(training)
        return None if result is None else result.to_json()
    except BrokenOffError:
        training.saver.wait()
        return None
    finally:
        training.saver.close()
        if training.copies:
            training.copies.cancel()
        reporter.close()
        if lock_fd >= 0:
            os.close(lock_fd)


class BrokenOffError(Exception):
    """Raised where a crash is simulated."""


class Crashing:
    """A spread model that fails in the middle of a step; everything else it passes on."""

    def __init__(self, model: Any, step: int, rounds: int, training: Any) -> None:
        restored = training.restored.step if training.restored else 0
        self._model, self._left = model, (step - 1 - restored) * rounds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def begin(self, current: Any) -> None:
        """Fails when the step's first round begins."""
        self._left -= 1
        if self._left < 0:
            raise BrokenOffError
        self._model.begin(current)
