"""One worker's engine: requests are submitted, and each step computes some rows of all of them and tells what came of it.

The rows of all requests go through the model's products together; attention runs for each request over its own text
(``phalanx.serve.engine.rows``). In exact mode a row's bits do not depend on what else is in the step, so that batching, cutting
prompts, giving pages up and using another request's pages change no token and no log-probability.
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
from phalanx.model.facts.stretching import longest_short
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.latent_attention import is_absorbed
from phalanx.run.spec import ModelSpec
from phalanx.serve.computing_device import computing_on, require_device
from phalanx.serve.engine.drafts import Drafter, Progress
from phalanx.serve.engine.errors import EngineError, RequestError
from phalanx.serve.engine.flight import Flight, asked_rows
from phalanx.serve.engine.pages.kept import KeptName, kept_as
from phalanx.serve.engine.pages.memory import PageBytes, page_bytes, pages_within, piece_bytes
from phalanx.serve.engine.part import FarLayers, FarSpan, ModelPart
from phalanx.serve.engine.readings import Reading, Readings
from phalanx.serve.engine.rows import Rule, Span
from phalanx.serve.engine.statistics import EngineStatistics
from phalanx.serve.engine.supported import require_computable, require_supported
from phalanx.serve.engine.texts import RunningText, TextPages
from phalanx.serve.numerics.exact import exact_numerics
from phalanx.serve.numerics.identity import numerics_id
from phalanx.serve.sampling import require_sampling
from phalanx.traffic.batching import plan_step, youngest
from phalanx.traffic.pages import PAGE
from phalanx.traffic.requests import Ended, Outcome, PromptScored, Request, Token, Told

KeptPages = Literal["recompute", "mixed"]
"""What becomes of the keys and values of texts that go on when other weights take over."""


@dataclass(frozen=True)
class Prepared:
    """Weights that are ready to take over from others of the same model."""

    part: ModelPart
    drafter: Drafter | None


class Engine:
    """See the module; called by one thread."""

    def __init__(
        self,
        model: Transformer | Chain,
        spec: ModelSpec,
        *,
        memory_bytes: int = 0,
        pages: int = 0,
        texts: int = 0,
        rows: int = 256,
        numerics: Literal["exact", "fast"] = "exact",
        prefix_cache: bool = True,
        sequence: int = 0,
        context: int = 0,
        drafts: int = 0,
        kept: KeptName = "compute",
        far: FarLayers | None = None,
        weights_id: str,
    ) -> None:
        """Serves ``model``, built of a resolved ``spec``, with so many ``pages`` or what fits into ``memory_bytes``.

        ``sequence`` is the length of the training sequences (``data.seq_len``), which exact attention follows; ``context`` the most
        tokens of a text, 0 for as many as the pages hold; ``texts`` how many may be computed at a time, 0 for as many as have pages. Exact
        numerics are tried on this machine first (``phalanx.serve.numerics``), and give the model products whose rows are independent.
        ``drafts`` is how many tokens the model's predictions ahead guess in each step (``phalanx.serve.engine.drafts``), which changes no
        text. ``kept`` is the format of keys and values (``phalanx.serve.engine.pages.kept``), with fast numerics. ``far`` has the layers that ``model`` lacks, which then
        is the first part of one; ``memory_bytes`` is what each process has. Computes where the weights are, and keeps keys and values there: on a CPU, or
        with fast numerics on a GPU. Raises EngineError for a model, machine or memory that cannot serve.
        """
        if not isinstance(model, Transformer):
            raise EngineError(
                "the engine serves the transformer of [model], and model.factory makes another, whose blocks keep no keys and values: "
                "use phalanx generate"
            )
        exact = numerics == "exact"
        require_supported(model, exact=exact, drafts=drafts, kept=kept)
        weight = next(model.parameters())
        self.device = weight.device
        """Where it computes."""
        require_device(self.device, exact=exact, divided=far is not None)
        form = kept_as(kept, spec, weight.dtype)
        self.page_bytes = page_bytes(spec, form)
        """Bytes of a page as it is kept, and as it travels."""
        held = spec if far is None else far.held
        held_form = kept_as(kept, held, weight.dtype)
        needed = page_bytes(held, held_form) + piece_bytes(held, weight.dtype, drafts)
        pages = pages or pages_within(held, held_form, memory_bytes, drafts)
        if pages < 1:
            raise EngineError(
                f"{memory_bytes} bytes hold no page of 64 tokens: one needs {needed} bytes; give more memory"
            )
        self._exact = (
            exact_numerics(model, spec, sequence, 1 if far is None else far.shares) if exact else None
        )
        self._spec, self._rows, self._texts, self._far = spec, rows, texts, far
        self._rule = Rule(exact, sequence, form if kept != "compute" else None)
        self._part = self._computing(model)
        self.context = min(context or pages * PAGE, pages * PAGE)
        layers = range(len(model.blocks))
        if far is not None:
            far.hold(pages)
        with computing_on(self.device, f"{pages} pages of keys and values, {pages * needed:,} bytes"):
            self._pages = TextPages(
                held, pages, held_form, prefix_cache=prefix_cache, layers=layers, far=far, device=self.device
            )
        self._dtype = weight.dtype
        self.numerics_id = numerics_id(
            numerics, weight.dtype, sequence, kept=kept, absorbed=is_absorbed(spec), device=self.device
        )
        """Engines with equal ids give equal weights and texts equal bits, if numerics are exact."""
        self.weights_id = weights_id
        """The name of the weights that compute now."""
        self._pages.made_by(weights_id, self.numerics_id)
        self._waiting: list[RunningText] = []
        self._running: list[RunningText] = []
        self._pending: list[Told] = []
        self._drafts, self._drafter = drafts, Drafter(model, drafts) if drafts else None
        self._drafted = self._accepted = 0
        self.flights, self._flights = 1 if far is None else far.flights, deque[Flight]()
        """Steps that are under way at most at a time."""
        self._rows_last = self._cached = self._preempted = self._recomputed = self._swaps = 0
        self._long_turn = False

    def _computing(self, model: Transformer) -> ModelPart:
        exact = self._exact
        if self._far is not None:
            return ModelPart(model, self._rule, exact, self._far.attach(model, exact))
        return ModelPart(model, self._rule, exact, None if exact is None else exact.products)

    # What callers ask.

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._running or self._waiting or self._pending or self._flights)

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
        """Pages in use, and pages in all."""
        return self._pages.table.used, self._pages.table.count

    def drafts(self) -> tuple[int, int]:
        """Tokens that were guessed and computed, and those of them that the model drew."""
        return self._drafted, self._accepted

    def submit(self, request: Request) -> None:
        """Takes a request on. Raises RequestError, and ValueError for ``sampling`` out of range."""
        if any(held.request.id == request.id for held in (*self._running, *self._waiting)):
            raise RequestError(f"a request {request.id!r} is being computed: give each its own id", "id")
        require_computable(request, self._spec.vocab_size, self.context)
        require_sampling(request.sampling)
        self._waiting.append(self._pages.new(request))

    def cancel(self, request_id: str) -> None:
        """Gives a request up, if it is here; ``Ended`` is told by the next step."""
        for held in (*self._running, *self._waiting):
            if held.request.id == request_id:
                self._end(held, "cancelled")

    def step(self) -> list[Told]:
        """Computes some rows and tells what came of them, or of those of an earlier step; ``[]`` if there is nothing to do, or nothing yet.

        Where other processes have a part of the layers, as many steps are under way as keep all of them busy, each of other texts. Raises
        DeviceMemoryError where a GPU's memory gives out, and PartLostError where it does not answer any more.
        """
        with computing_on(self.device, f"a step of {len(self._running) + len(self._waiting)} texts"):
            self._admit()
            planned = self._planned()
            if planned:
                self._flights.append(self._begun(planned))
            if self._flights and (not planned or len(self._flights) >= self.flights):
                self._land(self._flights.popleft())
        told, self._pending = self._pending, []
        return told

    def held_pages(self, names: Collection[bytes]) -> list[bytes]:
        """Those of ``names`` whose pages are here."""
        return [name for name in names if self._pages.table.holds(name)]

    @property
    def root(self) -> bytes:
        """What the names of this engine's pages are rooted in (``phalanx.traffic.pages.page_names``)."""
        return self._pages.root

    def read_page(self, name: bytes) -> bytes:
        """The bytes of a page. Raises KeyError if it is not held, and as ``step`` where a GPU cannot give it."""
        with computing_on(self.device, "a page that is read"):
            return self._pages.read(name)

    def write_page(self, name: bytes, content: PageBytes, before: bytes = b"") -> bool:
        """Keeps a page that another worker computed, behind that named ``before``; False if all pages are in use. Raises as ``step`` where a GPU
        cannot take it."""
        with computing_on(self.device, "a page that is written"):
            return self._pages.write(name, content, before)

    @property
    def spec(self) -> ModelSpec:
        """The shape of the model."""
        return self._spec

    @property
    def dtype(self) -> torch.dtype:
        """The number format of weights, keys and values."""
        return self._dtype

    def forget_pages(self) -> None:
        """Drops the pages that no running request uses."""
        self._pages.table.drop_unused()

    def prepare(self, model: Transformer) -> Prepared:
        """Makes ``model``, of the same description, ready to take over. From any thread, while this computes: its kernels are tried, which takes
        as long as some steps. Raises EngineError for a model of another kind."""
        if self._far is not None:
            raise EngineError(
                "weights of a model in several stages cannot be exchanged: start another server"
            )
        weight = next(model.parameters())
        if model.spec != self._spec or weight.dtype != self._dtype or weight.device != self.device:
            raise EngineError(
                "the weights are of another model, or in another format or place, than those served: start another server for them"
            )
        if self._exact is not None:
            self._exact.use(model)
        return Prepared(self._computing(model), Drafter(model, self._drafts) if self._drafts else None)

    def swap(self, prepared: Prepared, weights_id: str, *, pages: KeptPages) -> None:
        """Computes with what ``prepare`` gave from the next step on; each token tells the ``weights`` that made it.

        Keys and values of texts that go on are computed again by the new weights (``recompute``), so that the next tokens have the bits of a
        text that only these weights have read; or, of texts that have a token already, are left as they are (``mixed``), which costs
        nothing and gives what no weights give by themselves.
        """
        self._part, self._drafter, self.weights_id = prepared.part, prepared.drafter, weights_id
        self._pages.made_by(weights_id, self.numerics_id)
        self._swaps += 1
        again = [held for held in self._running if pages == "recompute" or not held.has_begun]
        for held in again:
            self._pages.restart(held)
            self._running.remove(held)
        self._waiting[:0] = again
        for held in self._running:
            held.weights += f"+{weights_id}"

    # Pages.

    def _admit(self) -> None:
        while self._waiting and not 0 < self._texts <= len(self._running):
            held = self._waiting[0]
            begun = self._pages.open(held, alone=not self._running)
            if begun is None:
                return
            held.weights = self.weights_id
            if held.cached is None:
                held.cached = min(begun, len(held.request.prompt))
                self._cached += held.cached
            else:
                self._recomputed += max(0, held.most_computed - begun + PAGE - 1) // PAGE
            self._running.append(self._waiting.pop(0))

    def _planned(self) -> list[tuple[RunningText, int]]:
        flying = {span.piece for flight in self._flights for span in flight.spans}
        running = [held for held in self._running if held.piece not in flying]
        # Texts that LongRoPE rotates by other factors have other tables: they take turns.
        sides = {self._pages.is_long(held) for held in running}
        if len(sides) == 2:
            self._long_turn = not self._long_turn
            running = [held for held in running if self._pages.is_long(held) == self._long_turn]
        by_id = {held.request.id: held for held in running}
        planned = []
        # Divided among as many steps as can be under way, so that every process has some.
        most = -(-len(self._running) // self.flights)
        for name, count in plan_step([held.course for held in running], self._rows, most):
            held = by_id[name]
            sure = len(held.text) - held.computed
            if count > sure and not self._pages.room_for(held, held.computed + count):
                count = sure  # nobody gives pages up for a guess
            if held in self._running and self._pages.make_room(held, held.computed + count, self._give_up):
                planned.append((held, count))
        return [(held, count) for held, count in planned if held in self._running]

    def _give_up(self) -> RunningText:
        """Frees the pages of the youngest request, which is computed again later."""
        name = youngest([other.course for other in self._running])
        victim = next(other for other in self._running if other.request.id == name)
        self._preempted += 1
        self._pages.restart(victim)
        self._running.remove(victim)
        self._waiting.insert(0, victim)
        return victim

    # A step.

    @torch.no_grad()
    def _begun(self, planned: list[tuple[RunningText, int]]) -> Flight:
        spans = [Span(held.piece, held.computed, held.computed + count) for held, count in planned]
        tokens = [
            t
            for (held, _), span in zip(planned, spans, strict=True)
            for t in (*held.text, *held.drafts)[span.begin : span.end]
        ]
        self._rows_last = len(tokens)
        asks, owners = asked_rows(planned)
        # Of these, all or none are behind LongRoPE's switch.
        length = max(len(held.text) for held, _ in planned) if longest_short(self._spec) else 0
        rows, far = brought(torch.tensor(tokens), self.device), self._far
        if far is None:
            passed = self._part.compute(rows, spans, length, asks)
            readings: Readings | Future[Readings] | None = passed.readings
        else:
            far_spans = [FarSpan(span.piece.number, span.begin, span.end) for span in spans]
            with far.step(rows, far_spans, length, asks) as taken:
                passed = self._part.compute(taken, spans, length, asks)
            readings = passed.readings
            if readings is None:
                readings = far.compute(passed.states, far_spans, length, asks)
        assert readings is not None, "a part that ends the model, or one that goes on far away"
        given = [tokens[ask.row] for ask in asks]
        return Flight(planned, spans, owners, given, passed.states, length, readings)

    def _land(self, flight: Flight) -> None:
        """Takes what a step has computed, of the texts that have not given it up meanwhile."""
        readings, live = flight.landed(), flight.live(self._running)
        for held, count in flight.planned:
            if held not in live:
                continue
            # Behind the text's own tokens there are guesses, which are counted when they are taken.
            sure = min(count, len(held.text) - held.computed)
            self._drafted += count - sure
            held.computed += sure
            self._pages.keep(held)
        self._read_rows(flight, readings, live)
        if self._drafter is not None:
            self._guess(self._drafter, flight)

    def _guess(self, drafter: Drafter, flight: Flight) -> None:
        """Guesses the next tokens of the texts that go on, by the states of this step."""
        going: list[RunningText] = []
        progress: list[Progress] = []
        start = 0
        for (held, count), span in zip(flight.planned, flight.spans, strict=True):
            held.drafts = ()
            wanted = self._pages.most_drafts(held, self._drafts)
            if held in self._running and held.computed > span.begin and wanted > 0:
                rows = flight.states[start : start + held.computed - span.begin]
                going.append(held)
                progress.append(
                    Progress(held.text, rows, held.computed, wanted, held.request.sampling, held.ahead)
                )
            start += count
        if going:
            for held, found in zip(going, drafter.guess(progress, flight.length), strict=True):
                held.ahead, held.drafts = found

    def _read_rows(self, flight: Flight, readings: Readings, live: set[RunningText]) -> None:
        """Takes what the distributions of the rows of ``live`` texts say."""
        for row, (held, position) in enumerate(flight.owners):
            if held not in live or held not in self._running:
                continue
            if position >= held.computed:
                # A guess counts if it is the token that the row before has just drawn.
                if held.text[position:] != [flight.given[row]]:
                    continue
                held.computed += 1
                self._accepted += 1
                self._pages.keep(held)
            reading = readings[row]
            if not reading.finite:
                self._end(
                    held,
                    "error",
                    f"the logits after token {position} of request {held.request.id!r} are not finite: the weights are, or too large for the "
                    "format computed in; take an earlier step",
                )
            elif position + 1 < len(held.text):
                held.scores[position + 1] = reading.logprob
            else:
                self._take_token(held, reading)

    def _take_token(self, held: RunningText, reading: Reading) -> None:
        request = held.request
        if held.scores_prompt:
            held.scored = True
            self._pending.append(
                PromptScored(request.id, tuple(held.scores[p] for p in range(1, len(request.prompt))))
            )
        token = reading.token
        if token in request.stop_tokens:
            return self._end(held, "stop")
        self._pending.append(
            Token(
                request.id,
                len(held.text) - len(request.prompt),
                token,
                reading.logprob,
                reading.top,
                held.weights,
            )
        )
        was_long = self._pages.is_long(held)
        held.text.append(token)
        if len(held.text) - len(request.prompt) >= request.max_tokens:
            return self._end(held, "length")
        if self._pages.is_long(held) != was_long:
            # From here on all positions are rotated by other factors, those of the kept keys too.
            self._pages.restart(held)
            held.weights = self.weights_id
        return None

    def _end(self, held: RunningText, outcome: Outcome, text: str = "") -> None:
        self._pages.release(held)
        (self._running if held in self._running else self._waiting).remove(held)
        self._pending.append(Ended(held.request.id, outcome, text, held.cached or 0))
