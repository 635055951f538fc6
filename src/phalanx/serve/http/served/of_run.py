"""A run's directory or a pack as a served model: its weights in an engine, and its words."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from phalanx.checkpoint.committed.digest import combine
from phalanx.checkpoint.pack.reader import is_pack, open_pack
from phalanx.model.transformer import Transformer
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.kinds import prediction_ahead
from phalanx.serve.computing_device import computing_on, shown_device
from phalanx.serve.engine.engine import Engine as PagedEngine
from phalanx.serve.engine.errors import EngineError
from phalanx.serve.http.served.model_text import ModelText, read_model_text
from phalanx.serve.http.served.of_pack import open_packed
from phalanx.serve.http.served.of_processes import open_divided
from phalanx.serve.http.served.opened import OpenedEngine, context_of, device_of
from phalanx.serve.http.served.served_run import ServedRun
from phalanx.serve.http.served.turns import TurnsEngine
from phalanx.serve.http.worker import Engine, EngineWorker, Identity
from phalanx.serve.numerics import bits_of, numerics_id
from phalanx.serve.stages.part_weights import tensor_digests
from phalanx.serve.weights.open_model import run_folder
from phalanx.train.score.score import restored_model

_log = logging.getLogger(__name__)


def open_run(
    served: ServedRun, name: str | None, tell: Callable[[str], None]
) -> tuple[ModelText, EngineWorker]:
    """The model of a run or a pack, ready to be asked. Raises EngineError, and as ``restored_model`` and ``load_run_tokenizer`` do."""
    opened = open_engine(served, tell)
    with served_folder(served) as folder:
        words = read_model_text(folder, served.text_name(name), opened.spec.vocab_size, served.chat_template)
    if opened.note:
        tell(opened.note)
    tell(f"computing on {shown_device(opened.device)}")
    return words, EngineWorker(opened.engine, opened.identity, opened.streaming, trouble=opened.trouble)


def open_engine(served: ServedRun, tell: Callable[[str], None] = _log.info) -> OpenedEngine:
    """The engine of a run or a pack; ``tell`` hears what is waited for. Raises EngineError, and as ``restored_model`` and ``open_model`` do."""
    device = device_of(served)
    if served.stages > 1 or served.tensor > 1:
        return open_divided(served, tell)
    require_drafts(served)
    if served.stream or is_pack(served.path):
        return open_packed(served)
    dtype = getattr(torch, served.dtype)
    run = read_resolved(RunDirectory(served.path))
    depths = prediction_ahead.depths(run.model)
    drafts = depths if served.drafts is None else served.drafts
    if drafts > depths:
        raise EngineError(
            f"--drafts {drafts}: the run's model predicts {depths} tokens ahead (model.mtp_depth), so no more can be drafted"
        )
    with computing_on(device, f"the weights in {served.dtype}"):
        model, spec, step = restored_model(
            served.path, served.step, device=device, dtype=dtype, ahead=drafts > 0
        )
    context, digest = context_of(served, run, served.path), weights_digest(model)
    engine: Engine
    if isinstance(model, Transformer):
        paged = PagedEngine(
            model,
            spec,
            memory_bytes=served.memory_bytes,
            rows=served.rows,
            numerics=served.numerics,
            context=context,
            drafts=drafts,
            kept=served.kept,
            weights_id=digest,
        )
        engine, computed = paged, paged.numerics_id
    else:
        engine = TurnsEngine(model, context, kept=served.kept)
        computed = numerics_id("turns", dtype, device=device)
    bits = bits_of(served.numerics, run, served.dtype, kept=served.kept)
    return OpenedEngine(engine, Identity(digest, computed, context, bits), spec, step=step, device=device)


def require_drafts(served: ServedRun) -> None:
    """Raises EngineError if drafts are asked of a pack, or of a run that is packed for streaming."""
    if served.drafts and (served.stream or is_pack(served.path)):
        raise EngineError(
            f"--drafts {served.drafts}: a pack is served without its predictions ahead, so nothing can be drafted: serve the run's directory, "
            "without --stream"
        )


@contextmanager
def served_folder(served: ServedRun) -> Iterator[Path]:
    """The folder of the small files of what is served: the run's directory, or for a while those that a pack has of it."""
    if not is_pack(served.path):
        yield served.path
        return
    file = open_pack(served.path)
    file.close()
    with run_folder(file.index) as folder:
        yield folder


def weights_digest(model: nn.Module) -> str:
    """The first 16 digits of the hash of the weights as they are computed with: in fp32, of the one that ``phalanx hash`` prints."""
    return combine(tensor_digests(model))[:16]
