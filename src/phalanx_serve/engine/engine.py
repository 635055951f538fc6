"""One worker's engine: each step schedules rows of the submitted requests, computes them and returns outputs.

All requests of a step share the matrix products. Attention runs for each request over its own text
(``phalanx_serve.kv_cache.memory``). Exact numerics use portable kernels (``phalanx.hardware.portable``), whose
result for a row does not depend on the other rows of the step. So batching, chunked prefill, preemption and prefix
caching change no token and no log-probability.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

import torch

from phalanx.hardware.local.device import brought
from phalanx.model.custom import Chain
from phalanx.model.facts.shape import longest_short
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.latent_attention import is_absorbed
from phalanx.run.spec import ModelSpec
from phalanx_serve.engine import model_runner
from phalanx_serve.engine.drafts import Drafter, DraftInput
from phalanx_serve.engine.sampler import SampledToken, SamplerOutput, require_sampling
from phalanx_serve.kv_cache import memory
from phalanx_serve.kv_cache.layer_cache import Rule
from phalanx_serve.kv_cache.manager import Batch, InFlightBatch, KVCacheManager, RunningText, build_batch
from phalanx_serve.numerics import Numerics, begin_exact, computing_on, numerics_id, require_device
from phalanx_serve.traffic import events
from phalanx_serve.traffic.scheduler import PAGE, SchedulerOutput, schedule, youngest


@dataclass(frozen=True)
class EngineStatistics:
    """Counters of an engine."""

    running: int
    waiting: int
    pages_used: int
    pages: int
    rows_last_step: int
    cached_tokens: int
    """Tokens that were not computed because their pages were cached, since the engine started."""
    preempted: int
    recomputed_pages: int
    swaps: int
    """Number of weight swaps."""
    drafted: int
    """Drafted tokens that were computed."""
    accepted: int
    """Drafted tokens that were accepted."""


KeptPages = Literal["recompute", "mixed"]
"""Treatment of the keys and values of running texts when weights are swapped."""


@dataclass(frozen=True)
class Prepared:
    """Weights that are ready to replace those of the same model."""

    runner: model_runner.ModelRunner
    drafter: Drafter | None


class Engine:
    """Engine of one worker. One thread calls it."""

    def __init__(
        self,
        model: Transformer | Chain,
        spec: ModelSpec,
        *,
        memory_bytes: int = 0,
        pages: int = 0,
        texts: int = 0,
        rows: int = 256,
        numerics: Numerics = "exact",
        prefix_cache: bool = True,
        context: int = 0,
        drafts: int = 0,
        kept: memory.KVFormatName = "compute",
        far: model_runner.FarLayers | None = None,
        weights_id: str,
    ) -> None:
        """Serve ``model``, built from a resolved ``spec``, with ``pages`` KV pages or as many as fit into
        ``memory_bytes``.

        ``context`` is the most tokens of a text; 0 allows as many as the pages hold. ``texts`` limits the texts that
        are computed at a time; 0 sets no limit but the pages. Exact numerics switch this process to portable kernels
        (``phalanx_serve.numerics``).

        ``drafts`` is the number of tokens that the model's multi-token prediction drafts per step
        (``phalanx_serve.engine.drafts``). It changes no text. ``kept`` is the storage format of keys and values
        (``phalanx_serve.kv_cache.memory``).

        ``far`` has the layers that ``model`` lacks; ``model`` then is the first part, and ``memory_bytes`` is the
        memory of each process.

        The engine computes on the device of the weights and keeps keys and values there: a CPU, or a GPU with fast
        numerics. Raises ServeError for a model, machine or memory that cannot serve.
        """
        if not isinstance(model, Transformer):
            raise events.ServeError(
                "the engine serves the transformer of [model], and model.factory makes another, whose blocks keep no keys and values: "
                "use phalanx generate"
            )
        exact = numerics == "exact"
        model_runner.require_supported(model, drafts=drafts)
        weight = next(model.parameters())
        self.device = weight.device
        """Where it computes."""
        require_device(self.device, exact=exact, divided=far is not None)
        form = memory.kv_format(kept, spec, weight.dtype)
        self.page_bytes = memory.page_bytes(spec, form)
        """Bytes of a page as it is kept, and as it travels."""
        own_spec = spec if far is None else far.kv_spec
        own_form = memory.kv_format(kept, own_spec, weight.dtype)
        needed = memory.page_bytes(own_spec, own_form) + memory.copy_bytes(own_spec, weight.dtype, drafts)
        pages = pages or memory.pages_within(own_spec, own_form, memory_bytes, drafts)
        if pages < 1:
            raise events.ServeError(
                f"{memory_bytes} bytes hold no page of 64 tokens: one needs {needed} bytes; give more memory"
            )
        memory.require_memory(pages * needed, self.device)
        if exact:
            begin_exact()
        self._spec, self._rows, self._texts, self._far = spec, rows, texts, far
        self._rule = Rule(exact, form if kept != "compute" else None)
        self._runner = self._computing(model)
        self.context = min(context or pages * PAGE, pages * PAGE)
        layers = range(len(model.blocks))
        if far is not None:
            far.hold(pages)
        with computing_on(self.device, f"{pages} pages of keys and values, {pages * needed:,} bytes"):
            self._pages = KVCacheManager(
                own_spec,
                pages,
                own_form,
                prefix_cache=prefix_cache,
                layers=layers,
                far=far,
                device=self.device,
            )
        self._dtype = weight.dtype
        self.numerics_id = numerics_id(
            numerics, weight.dtype, kept=kept, absorbed=is_absorbed(spec), device=self.device
        )
        """Engines with equal ids give equal weights and texts equal bits, if numerics are exact."""
        self.weights_id = weights_id
        """The name of the weights that compute now."""
        self._pages.made_by(weights_id, self.numerics_id)
        self._waiting: list[RunningText] = []
        self._running: list[RunningText] = []
        self._pending: list[events.EngineOutput] = []
        self._drafts, self._drafter = drafts, Drafter(model, drafts) if drafts else None
        self._drafted = self._accepted = 0
        self.max_in_flight, self._in_flight = 1 if far is None else far.max_in_flight, deque[InFlightBatch]()
        """Steps that may be in flight at a time."""
        self._rows_last = self._cached = self._preempted = self._recomputed = self._swaps = 0
        self._long_turn = False

    def _computing(self, model: Transformer) -> model_runner.ModelRunner:
        """Return the runner of a model, attached to the other processes if there are any."""
        projection = None if self._far is None else self._far.attach(model, exact=self._rule.exact)
        return model_runner.ModelRunner(model, self._rule, projection)

    # Calls from outside.

    @property
    def busy(self) -> bool:
        """True if a step has work to do."""
        return bool(self._running or self._waiting or self._pending or self._in_flight)

    def statistics(self) -> EngineStatistics:
        """See ``EngineStatistics``."""
        return EngineStatistics(
            len(self._running),
            len(self._waiting),
            *self.pages(),
            self._rows_last,
            self._cached,
            self._preempted,
            self._recomputed,
            self._swaps,
            self._drafted,
            self._accepted,
        )

    def pages(self) -> tuple[int, int]:
        """Return the number of KV-cache pages in use, and of all."""
        return self._pages.table.used, self._pages.table.count

    def drafts(self) -> tuple[int, int]:
        """Return the number of drafted tokens that were computed, and of those that were accepted."""
        return self._drafted, self._accepted

    def submit(self, request: events.Request) -> None:
        """Add a request to the waiting texts, without computing.

        Raises GenerationRequestError for one that cannot be computed or an id in use, and ValueError for ``sampling``
        out of range.
        """
        if any(text.request.id == request.id for text in (*self._running, *self._waiting)):
            raise events.GenerationRequestError(
                f"a request {request.id!r} is being computed: give each its own id", "id"
            )
        model_runner.require_computable(request, self._spec.vocab_size, self.context)
        require_sampling(request.sampling)
        self._waiting.append(self._pages.new(request))

    def cancel(self, request_id: str) -> None:
        """Cancel a request, if it is here; the next step returns its ``Ended``."""
        for text in (*self._running, *self._waiting):
            if text.request.id == request_id:
                self._end(text, "cancelled")

    def step(self) -> list[events.EngineOutput]:
        """Admit texts, compute scheduled rows, and finish the oldest step in flight; return the outputs since the
        last call.

        In one process each step is finished at once. If other processes have a part of the layers, enough steps are
        in flight to keep all of them busy, each of other texts, so outputs are of an earlier step or ``[]``. Raises
        DeviceMemoryError if a GPU is out of memory, and PartLostError if it no longer answers.
        """
        with computing_on(self.device, f"a step of {len(self._running) + len(self._waiting)} texts"):
            self._admit()
            scheduled = self._schedule()
            if scheduled.requests:
                self._in_flight.append(self._execute(scheduled))
            if self._in_flight and (not scheduled.requests or len(self._in_flight) >= self.max_in_flight):
                self._finish(self._in_flight.popleft())
        outputs, self._pending = self._pending, []
        return outputs

    def held_pages(self, names: Collection[bytes]) -> list[bytes]:
        """Return the ``names`` whose KV pages are on this worker."""
        return [name for name in names if self._pages.table.holds(name)]

    @property
    def root(self) -> bytes:
        """Root of the names of this engine's pages (``phalanx_serve.traffic.scheduler.page_names``)."""
        return self._pages.root

    def read_page(self, name: bytes) -> bytes:
        """Return the bytes of a page. Raises KeyError if it is not cached, and the errors of ``step`` if a GPU
        cannot return it.
        """
        with computing_on(self.device, "a page that is read"):
            return self._pages.read(name)

    def write_page(self, name: bytes, content: memory.PageBytes, before: bytes = b"") -> bool:
        """Cache a page that another worker computed, after the page named ``before`` (empty: the first of a text).

        Return False if all pages are in use. Raises the errors of ``step`` if a GPU cannot store it.
        """
        with computing_on(self.device, "a page that is written"):
            return self._pages.write(name, content, before)

    @property
    def spec(self) -> ModelSpec:
        """Architecture of the model."""
        return self._spec

    @property
    def dtype(self) -> torch.dtype:
        """Number format of weights, keys and values."""
        return self._dtype

    def forget_pages(self) -> None:
        """Drop the pages that no running request uses."""
        self._pages.table.drop_unused()

    def prepare(self, model: Transformer) -> Prepared:
        """Prepare ``model``, of the same architecture, to replace the weights, and leave the present ones in use.

        Any thread may call it while the engine computes. Raises ServeError for another architecture, format or
        device, or a divided model.
        """
        if self._far is not None:
            raise events.ServeError(
                "weights of a model in several stages cannot be exchanged: start another server"
            )
        weight = next(model.parameters())
        if model.spec != self._spec or weight.dtype != self._dtype or weight.device != self.device:
            raise events.ServeError(
                "the weights are of another model, or in another format or place, than those served: start another server for them"
            )
        return Prepared(self._computing(model), Drafter(model, self._drafts) if self._drafts else None)

    def swap(self, prepared: Prepared, weights_id: str, *, pages: KeptPages) -> None:
        """Compute with the weights that ``prepare`` returned from the next step on. Each token names the ``weights``
        that made it.

        With ``recompute``, the new weights compute the keys and values of running texts again, so the next tokens have
        the bits of a text that only these weights have read. With ``mixed``, texts that have a token keep their keys
        and values. That costs nothing, but no single set of weights gives the result. Texts without a token always
        begin again.
        """
        self._runner, self._drafter, self.weights_id = prepared.runner, prepared.drafter, weights_id
        self._pages.made_by(weights_id, self.numerics_id)
        self._swaps += 1
        restarted = [text for text in self._running if pages == "recompute" or not text.has_begun]
        for text in restarted:
            self._pages.restart(text)
            self._running.remove(text)
        self._waiting[:0] = restarted
        for text in self._running:
            text.weights += f"+{weights_id}"

    # Pages.

    def _admit(self) -> None:
        """Move texts from waiting to running, in order of arrival, until one lacks pages or ``texts`` are running.

        Their cached prefix counts as computed. Counts cached tokens at the first admission and recomputed pages at
        later ones.
        """
        while self._waiting and not 0 < self._texts <= len(self._running):
            text = self._waiting[0]
            computed = self._pages.open(text, alone=not self._running)
            if computed is None:
                return
            text.weights = self.weights_id
            if text.cached is None:
                text.cached = min(computed, len(text.request.prompt))
                self._cached += text.cached
            else:
                self._recomputed += max(0, text.most_computed - computed + PAGE - 1) // PAGE
            self._running.append(self._waiting.pop(0))

    def _schedule(self) -> SchedulerOutput:
        """Schedule rows of texts that are not in flight, and allocate their pages.

        A text without room for its drafts computes none; others may be preempted for pages. Long and short texts take
        turns. A step takes at most an equal part of the running texts, so that ``max_in_flight`` steps have some.
        """
        in_flight = {span.kv for step in self._in_flight for span in step.batch.spans}
        running = [text for text in self._running if text.kv not in in_flight]
        # Texts that LongRoPE rotates by other factors have other tables: they take turns.
        sides = {self._pages.is_long(text) for text in running}
        if len(sides) == 2:
            self._long_turn = not self._long_turn
            running = [text for text in running if self._pages.is_long(text) == self._long_turn]
        by_id = {text.request.id: text for text in running}
        allocated = []
        # Texts are divided among the steps that can be in flight, so that every process has some.
        most = -(-len(self._running) // self.max_in_flight)
        for rows in schedule([text.progress for text in running], self._rows, most).requests:
            text = by_id[rows.id]
            # No page is preempted for a draft.
            if rows.drafted and not self._pages.room_for(text, rows.end):
                rows = rows.without_drafts()
            if text in self._running and self._pages.make_room(text, rows.end, self._preempt):
                allocated.append(rows)
        return SchedulerOutput(tuple(rows for rows in allocated if by_id[rows.id] in self._running))

    def _preempt(self) -> RunningText:
        """Preempt the youngest running request: free its pages, and put it first among the waiting. Return it."""
        name = youngest([other.progress for other in self._running])
        victim = next(other for other in self._running if other.request.id == name)
        self._preempted += 1
        self._pages.restart(victim)
        self._running.remove(victim)
        self._waiting.insert(0, victim)
        return victim

    # A step.

    @torch.no_grad()
    def _execute(self, scheduled: SchedulerOutput) -> InFlightBatch:
        """Compute the scheduled rows through the layers of this process, and send them to the others.

        Sampled results may still be on their way.
        """
        batch = build_batch(scheduled, {text.request.id: text for text in self._running})
        spans, requests = batch.spans, batch.sampling_requests
        self._rows_last = len(batch.tokens)
        # Either all texts or none are longer than LongRoPE's switch.
        length = batch.length if longest_short(self._spec) else 0
        rows, far = brought(torch.tensor(batch.tokens), self.device), self._far
        if far is None:
            output = self._runner.compute(rows, spans, length, requests)
            sampler_output: SamplerOutput | Future[SamplerOutput] | None = output.sampler_output
        else:
            far_spans = [model_runner.FarSpan(span.kv.number, span.begin, span.end) for span in spans]
            with far.step(rows, far_spans, length, requests) as inputs:
                output = self._runner.compute(inputs, spans, length, requests)
            sampler_output = output.sampler_output
            if sampler_output is None:
                sampler_output = far.compute(output.states, far_spans, length, requests)
        assert sampler_output is not None, "the last layers are here, or in another process"
        return InFlightBatch(batch, output.states, length, sampler_output)

    def _finish(self, step: InFlightBatch) -> None:
        """Wait for a step's results, and take those of texts that still have its keys and values.

        Names full pages in the cache, emits tokens, and drafts the next ones if the engine has a drafter.
        """
        sampler_output, live = step.wait(), step.batch.live(self._running)
        for text, rows in step.batch.texts:
            if text not in live:
                continue
            # Drafts follow the text's own tokens; they count as computed when they are accepted.
            self._drafted += rows.drafted
            text.computed = rows.end - rows.drafted
            self._pages.keep(text)
        self._take_output(step.batch, sampler_output, live)
        if self._drafter is not None:
            self._draft(self._drafter, step)

    def _draft(self, drafter: Drafter, step: InFlightBatch) -> None:
        """Replace the drafts of the step's texts: those that still run and advanced get new ones, from their states,
        as many as pages permit.
        """
        going: list[RunningText] = []
        progress: list[DraftInput] = []
        start = 0
        for text, scheduled in step.batch.texts:
            text.drafts = ()
            most = self._pages.most_drafts(text, self._drafts)
            if text in self._running and text.computed > scheduled.begin and most > 0:
                rows = step.states[start : start + text.computed - scheduled.begin]
                going.append(text)
                progress.append(
                    DraftInput(text.tokens, rows, text.computed, most, text.request.sampling, text.ahead)
                )
            start += scheduled.end - scheduled.begin
        if going:
            for text, (ahead, drafts) in zip(going, drafter.guess(progress, step.length), strict=True):
                text.ahead, text.drafts = ahead, drafts

    def _take_output(self, batch: Batch, sampler_output: SamplerOutput, live: set[RunningText]) -> None:
        """Take the sampled tokens of ``live`` texts: a new token, a prompt's score, or the token behind an accepted
        draft.

        Discards the results behind a draft that was not drawn; a text without finite logits ends with an error.
        """
        for row, (text, position) in enumerate(batch.sampled):
            if text not in live or text not in self._running:
                continue
            if position >= text.computed:
                # A draft is accepted if it is the token that the row before has just drawn.
                if text.tokens[position:] != [batch.input_token(row)]:
                    continue
                text.computed += 1
                self._accepted += 1
                self._pages.keep(text)
            token = sampler_output[row]
            if not token.finite:
                self._end(
                    text,
                    "error",
                    f"the logits after token {position} of request {text.request.id!r} are not finite: the weights are, or too large for the "
                    "format computed in; take an earlier step",
                )
            elif position + 1 < len(text.tokens):
                text.scores[position + 1] = token
            else:
                self._take_token(text, token)

    def _take_token(self, text: RunningText, sampled: SampledToken) -> None:
        """Append a sampled token to a text, and emit it, after the prompt's scores if they were requested.

        Ends the text at its length, or at a stop token, which is neither appended nor emitted. A text that passes
        LongRoPE's switch keeps its tokens, and its keys and values are computed again.
        """
        request = text.request
        if text.scores_prompt:
            text.scored = True
            scores = [text.scores[position] for position in range(1, len(request.prompt))]
            top = tuple(score.top for score in scores) if request.top_logprobs > 0 else ()
            self._pending.append(
                events.PromptScored(request.id, tuple(score.logprob for score in scores), top)
            )
        token = sampled.token
        if token in request.stop_tokens:
            return self._end(text, "stop")
        self._pending.append(
            events.Token(
                request.id,
                len(text.tokens) - len(request.prompt),
                token,
                sampled.logprob,
                sampled.top,
                text.weights,
            )
        )
        was_long = self._pages.is_long(text)
        text.tokens.append(token)
        if len(text.tokens) - len(request.prompt) >= request.max_tokens:
            return self._end(text, "length")
        if self._pages.is_long(text) != was_long:
            # From here on all positions are rotated by other factors, those of the kept keys too.
            self._pages.restart(text)
            text.weights = self.weights_id
        return None

    def _end(self, text: RunningText, outcome: events.Outcome, message: str = "") -> None:
        """Release a text's pages, remove it, and emit its end."""
        self._pages.release(text)
        (self._running if text in self._running else self._waiting).remove(text)
        self._pending.append(events.Ended(text.request.id, outcome, message, text.cached or 0))
