"""Stage worker: layers of a model with their own KV cache, driven by the process with the first layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.run.directory.paths import RunDirectoryError
from phalanx.run.kinds.latent_attention import is_absorbed
from phalanx.run.spec import ModelSpec
from phalanx.wire.messages import WireError
from phalanx_serve.engine.model_runner import ModelRunner, RunnerOutput, require_supported
from phalanx_serve.kv_cache.layer_cache import Rule
from phalanx_serve.kv_cache.memory import PageMemory, RowSpan, TextKV, kv_format
from phalanx_serve.numerics import begin_exact, numerics_id
from phalanx_serve.stages import messages as m
from phalanx_serve.stages import shares
from phalanx_serve.stages.far_layers import NearShare, tensor_of
from phalanx_serve.stages.messages import StageLink
from phalanx_serve.traffic.events import ServeError
from phalanx_serve.traffic.scheduler import PAGE

_log = logging.getLogger(__name__)


class FarPart:
    """Layers of an ``OpenStage`` message, ready to compute."""

    def __init__(self, opened: m.OpenStage, run_dir: Path, link: StageLink) -> None:
        """Read the weights of these layers, or of this share of each, from the run at ``run_dir``; no pages are
        allocated yet.

        Exact numerics switch this process to portable kernels. Raises ServeError, and the errors of
        ``restored_part``.
        """
        served = opened.served
        self._dtype = getattr(torch, served.dtype)
        self._layers = range(opened.begin, opened.end)
        exact = served.numerics == "exact"
        if exact:
            begin_exact()
        share = shares.Share(opened.stage, opened.shares)
        self._shares = opened.shares > 1
        if self._shares:
            model, self._spec, digests = shares.restored_share(run_dir, opened.step, share, self._dtype)
            self._layers = range(self._spec.layers)
        else:
            model, self._spec, digests = shares.restored_part(run_dir, opened.step, self._layers, self._dtype)
        require_supported(model)
        self._kv_spec = shares.held_share(self._spec, opened.shares)
        self._kept = kv_format(served.kept, self._kv_spec, self._dtype)
        rule = Rule(exact, self._kept if served.kept != "compute" else None)
        projection = shares.assemble(model, share, NearShare(link), exact=exact) if self._shares else None
        self._runner = ModelRunner(model, rule, projection)
        self._memory = PageMemory(len(self._layers), 0, self._kept)
        self._pieces: dict[int, TextKV] = {}
        self.ready = m.StageReady(
            {
                name: m.Digest(digest.dtype, tuple(digest.shape), digest.sha256)
                for name, digest in digests.items()
            },
            shares.checkpoint_name(run_dir, opened.step),
            numerics_id(
                served.numerics,
                self._dtype,
                kept=served.kept,
                absorbed=is_absorbed(self._spec),
            ),
        )

    @property
    def spec(self) -> ModelSpec:
        """Architecture of the full model."""
        return self._spec

    def work(self, link: StageLink) -> None:
        """Carry out messages until the connection ends.

        A step or read that fails is answered with its error, unless layers are shared. Raises WireError at the end,
        and ServeError if the stage cannot continue: a shared step or a KV operation failed.
        """
        while True:
            message = link.receive(m.TO_STAGE)
            body = (
                link.receive_body(message.nbytes)
                if isinstance(message, m.Compute | m.WritePage)
                else bytearray()
            )
            try:
                self._keep(message, body)
            except Exception as error:
                # The pages then differ from the other processes' view, and an unexpected answer would be read as the next one.
                _log.exception("keys and values are lost")
                remedy = "; give the server less --memory" if isinstance(message, m.Hold) else ""
                raise ServeError(f"{type(message).__name__}: {error!r}{remedy}"[:8000]) from error
            match message:
                case m.Hold():
                    link.send(m.PagesAllocated())
                case m.Compute() if self._shares:
                    self._share(message, body)
                case m.Compute():
                    self._answer(link, partial(self._compute, message, body))
                case m.ReadPage():
                    self._answer(link, partial(self._read, message.place))

    def _keep(self, message: m.ToStage, body: bytearray) -> None:
        """Do the part of a message that concerns memory: allocate the pages of ``Hold``, or apply the KV operations
        that come with another.

        Then writes the page of a ``WritePage``. Computes and answers nothing. Raises ServeError for an unexpected
        message.
        """
        match message:
            case m.Hold(pages):
                self._memory = PageMemory(len(self._layers), pages, self._kept)
            case m.Compute() | m.ReadPage():
                self._run(message.errands)
            case m.WritePage(errands, place):
                self._run(errands)
                self._memory.write(place, bytes(body))
            case m.OpenStage() | m.StageRefused() | m.Whole():
                raise ServeError(f"unexpected message {type(message).__name__}")

    def _answer(self, link: StageLink, compute: Callable[[], tuple[m.FromStage, memoryview]]) -> None:
        """Send the result of ``compute``; of an exception, log it and send its ``repr`` as ``Failed``."""
        try:
            answer, sent = compute()
        except Exception as error:  # the stage must survive a defect, and report it to the others
            _log.exception("a step has failed")
            answer, sent = m.Failed(repr(error)[:8000]), memoryview(b"")
        link.send(answer, sent)

    def _read(self, place: int) -> tuple[m.FromStage, memoryview]:
        """Return the message and the bytes of a page."""
        page = memoryview(self._memory.read(place))
        return m.Page(len(page)), page

    def _share(self, step: m.Compute, body: bytearray) -> None:
        """Compute a step together with the other shares, which need no answer. Raises ServeError if it fails, and WireError."""
        try:
            self._passed(step, body)
        except WireError:
            raise
        except Exception as error:
            _log.exception("a step has failed")
            raise ServeError(f"a step has failed: {error!r}"[:8000]) from error

    def _passed(self, step: m.Compute, body: bytearray) -> RunnerOutput:
        """Compute a step's rows through these layers, with the keys and values of its texts, which grow as needed."""
        spans = []
        for span in step.spans:
            piece = self._piece(span.piece)
            piece.grow(span.end)
            spans.append(RowSpan(piece, span.begin, span.end))
        states = tensor_of(body, self._dtype, self._spec.dim)
        return self._runner.compute(states, spans, step.length, step.asks)

    def _compute(self, step: m.Compute, body: bytearray) -> tuple[m.FromStage, memoryview]:
        """Compute a step; return the message for it, and the bytes of its states, empty if tokens were sampled."""
        passed = self._passed(step, body)
        if passed.sampler_output is not None:
            return m.Passed(0, tuple(passed.sampler_output[n] for n in range(len(step.asks)))), memoryview(
                b""
            )
        sent = shares.bytes_of(passed.states)
        return m.Passed(len(sent)), sent

    def _run(self, errands: Sequence[m.Errand]) -> None:
        """Apply pending operations on keys and values in order: drop a text, copy a page into its tensors or out of them."""
        for errand in errands:
            match errand:
                case m.Drop(piece):
                    self._pieces.pop(piece, None)
                case m.CopyIn(piece, number, place):
                    text = self._piece(piece)
                    text.grow((number + 1) * PAGE)
                    self._memory.copy_in(text, number, place)
                case m.CopyOut(piece, number, place):
                    self._memory.copy_out(self._piece(piece), number, place)

    def _piece(self, number: int) -> TextKV:
        """Return a text's keys and values, empty for a new one."""
        if number not in self._pieces:
            self._pieces[number] = TextKV(self._kv_spec, self._dtype, self._layers, number)
        return self._pieces[number]


def run_stage(link: StageLink, number: int, pid: int, run_dir: Path | None) -> str:
    """Serve as one stage until the service ends. Return the reason if it could not, else an empty string.

    ``run_dir`` is the run's path on this machine; None means the server's. Heartbeats are sent meanwhile. Raises
    WireError if the connection breaks before the layers are open.
    """
    link.send(m.Here(number, pid))
    opened = link.receive(m.TO_STAGE)
    if isinstance(opened, m.StageRefused):
        return opened.reason
    if not isinstance(opened, m.OpenStage):
        return "the other side is no server of stages"
    alive = link.keep_alive(opened.served.silence_s)
    try:
        return _run_opened(link, opened, run_dir)
    finally:
        alive.set()


def _run_opened(link: StageLink, opened: m.OpenStage, run_dir: Path | None) -> str:
    """Open the part and work until the connection ends, then return an empty string.

    If the part cannot be opened, or must not continue (ServeError), send the reason to the server and return it.
    A defect while opening is sent and raised; a defect while working is raised.
    """
    try:
        part = FarPart(opened, run_dir or opened.served.path, link)
    except (CheckpointError, RunDirectoryError, ServeError, OSError) as error:
        link.send(m.StageUnable(str(error)[:8000]))
        return str(error)
    except Exception as error:
        link.send(m.StageUnable(f"a defect: {error!r}"[:8000]))
        raise
    link.send(part.ready)
    try:
        part.work(link)
    except ServeError as error:
        with suppress(WireError):
            link.send(m.StageUnable(str(error)[:8000]))
        return str(error)
    except (WireError, OSError) as error:
        _log.debug("the service has ended: %s", error)
    return ""
