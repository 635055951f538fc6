"""A run's model divided over several processes, layer by layer: for models that no one process, or no one machine, holds.

The engine is with the first layers. Every process reads its own layers of the same step; the hash of the weights is made of all their
digests, so it is that of the whole model, and numerics must have one id everywhere: then so have the tokens the bits of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from phalanx.checkpoint.pack.reader import is_pack
from phalanx.checkpoint.tiers.digest import TensorDigest, combine
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.restore import candidates
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.kinds import prediction_ahead
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.portable import numerics_environment
from phalanx.serve.engine.engine import Engine
from phalanx.serve.engine.errors import EngineError, PartLostError
from phalanx.serve.engine.kept import kept_as
from phalanx.serve.gateway.served.opened import OpenedEngine
from phalanx.serve.gateway.served.served_run import ServedRun
from phalanx.serve.gateway.worker import Identity
from phalanx.serve.stages import messages as m
from phalanx.serve.stages.door import Door, await_stages, opened_stages, start_stages
from phalanx.serve.stages.far_stages import FarStage, FarStages
from phalanx.serve.stages.link import StageLink
from phalanx.serve.stages.part_weights import checkpoint_name, divided, restored_part
from phalanx.traffic.pages import PAGE


def open_staged(served: ServedRun, tell: Callable[[str], None]) -> OpenedEngine:
    """The engine of a run whose model is divided over ``served.stages`` processes. Raises EngineError, and as ``restored_part`` does."""
    _require_dividable(served)
    run = read_resolved(RunDirectory(served.path))
    if run.model.factory:
        raise EngineError(
            "a model of your own (model.factory) cannot be divided into stages: serve it without --pipeline"
        )
    spec = resolve(prediction_ahead.without(run.model))
    layers = divided(spec, served.stages)
    step = newest_step(served.path) if served.step is None else served.step
    door: Door
    if served.stages_at:
        door = await_stages(served.stages_at, Path(served.token_file), served.stages - 1, tell)
    else:
        door = start_stages(served.stages - 1, numerics_environment(run.runtime))
    try:
        return _opened(served, door, layers, step, run.train.seq_len)
    except PartLostError as error:
        door.close()
        raise EngineError(str(error)) from error
    except BaseException:
        with suppress(OSError):
            door.close()
        raise


def _opened(served: ServedRun, door: Door, layers: list[range], step: int, sequence: int) -> OpenedEngine:
    links: list[StageLink] = door.admit(len(layers) - 1)
    opens = [m.Open(served, step, stage, part.start, part.stop) for stage, part in enumerate(layers) if stage]
    dtype = getattr(torch, served.dtype)
    for link, opening in zip(links, opens, strict=True):
        link.say(opening)  # all read at the same time
    model, spec, own = restored_part(served.path, step, layers[0], dtype)
    ready = opened_stages(links)
    digests = dict(own)
    for one in ready:
        digests |= {name: TensorDigest(d.dtype, d.shape, d.sha256) for name, d in one.digests.items()}
    stages = [
        FarStage(n, part, link) for n, (part, link) in enumerate(zip(layers[1:], links, strict=True), 1)
    ]
    far = FarStages(stages, max(map(len, layers)), kept_as(served.kept, spec, dtype).row_bytes * PAGE)
    digest, context = combine(digests)[:16], served.context or sequence
    engine = Engine(
        model,
        spec,
        memory_bytes=served.memory_bytes,
        rows=served.rows,
        numerics=served.numerics,
        sequence=sequence,
        context=context,
        kept=served.kept,
        far=far,
        weights_id=digest,
    )
    checkpoint = checkpoint_name(served.path, step)
    for stage, one in zip(stages, ready, strict=True):
        if one.checkpoint != checkpoint:
            raise EngineError(
                f"{stage} has another checkpoint of step {step} ({one.checkpoint}) than this process ({checkpoint}): give every stage the same run"
            )
        if one.numerics_id != engine.numerics_id:
            raise EngineError(
                f"{stage} computes by numerics {one.numerics_id}, and this process by {engine.numerics_id}: they would not give the bits of one; "
                "use machines of one kind, with the same libraries and number of threads"
            )
    parts = "; ".join([f"layers {layers[0].start} to {layers[0].stop - 1} here", *map(str, stages)])
    return OpenedEngine(
        engine,
        Identity(digest, engine.numerics_id, context),
        spec,
        step=step,
        note=f"{len(layers)} stages: {parts}",
        trouble=far.trouble,
    )


def _require_dividable(served: ServedRun) -> None:
    if served.stream or is_pack(served.path):
        raise EngineError(
            "--pipeline divides the model of a run directory: give that, without --stream, and no pack"
        )
    if served.drafts:
        raise EngineError(f"--drafts {served.drafts}: stages draft nothing: leave it out")


def newest_step(run_dir: Path) -> int:
    """The newest step that is committed: a run that goes on has another one a moment later."""
    checkpoints = RunDirectory(run_dir).checkpoints
    steps = candidates(DiskTier(checkpoints)) if checkpoints.is_dir() else []
    if not steps:
        raise RunDirectoryError(f"{checkpoints}: no checkpoint is committed; let the run save one first")
    return steps[0]
