"""One worker's engine: requests are submitted, and each step computes some rows of all of them and tells what came of it.

The rows of all requests go through the model's products together; attention runs for each request over its own text
(``phalanx.serve.engine.rows``). In exact mode a row's bits do not depend on what else is in the step, so that batching, cutting
prompts, giving pages up and using another request's pages change no token and no log-probability.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from phalanx.model.custom import Chain
from phalanx.model.facts.stretching import longest_short
from phalanx.model.transformer import Transformer
from phalanx.run.spec import ModelSpec
from phalanx.serve.engine.errors import EngineError, RequestError
from phalanx.serve.engine.page_memory import PageMemory, Piece, page_bytes, pages_within
from phalanx.serve.engine.rows import LayerRows, Rule, Span
from phalanx.serve.engine.supported import require_computable, require_supported
from phalanx.serve.numerics.exact import exact_numerics
from phalanx.serve.numerics.identity import numerics_id
from phalanx.serve.sampling import draw, likeliest, require_sampling
from phalanx.traffic.batching import Course, plan_step, youngest
from phalanx.traffic.pages import PAGE, PageTable, next_name, page_names, root_name
from phalanx.traffic.requests import Ended, Outcome, PromptScored, Request, Token, Told
from phalanx.train.step.loss import log_probabilities


@dataclass(frozen=True)
class EngineStatistics:
    """How much an engine does and did."""

    running: int
    waiting: int
    pages_used: int
    pages: int
    rows_last_step: int
    cached_tokens: int
    """Tokens that were not computed because their pages were held, since the engine began."""
    preempted: int
    recomputed_pages: int


@dataclass
class _Running:
    request: Request
    text: list[int]
    piece: Piece
    places: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    computed: int = 0
    cached: int | None = None
    scores: dict[int, float] = field(default_factory=dict)
    scored: bool = False
    most_computed: int = 0

    @property
    def course(self) -> Course:
        return Course(self.request.id, self.computed, len(self.text))


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
        weights_id: str,
    ) -> None:
        """Serves ``model``, built of a resolved ``spec``, with so many ``pages`` or what fits into ``memory_bytes``.

        ``sequence`` is the length of the training sequences (``data.seq_len``), which exact attention follows; ``context`` the most
        tokens of a text, 0 for as many as the pages hold; ``texts`` how many may be computed at a time, 0 for as many as have pages. Exact numerics are tried on this machine first (``phalanx.serve.numerics``), and
        give the model products whose rows are independent. Raises EngineError for a model, machine or memory that cannot serve.
        """
        if not isinstance(model, Transformer):
            raise EngineError(
                "the engine serves the transformer of [model], and model.factory makes another, whose blocks keep no keys and values: "
                "use phalanx generate"
            )
        exact = numerics == "exact"
        require_supported(model, exact=exact)
        weight = next(model.parameters())
        if weight.device.type != "cpu":
            raise EngineError(
                f"the engine computes on the CPU, and the weights are on {weight.device}: move them"
            )
        pages = pages or pages_within(spec, weight.dtype, memory_bytes)
        if pages < 1:
            raise EngineError(
                f"{memory_bytes} bytes hold no page of 64 tokens: one needs {2 * page_bytes(spec, weight.dtype)} bytes; give more memory"
            )
        self._exact = exact_numerics(model, spec, sequence) if exact else None
        self._model, self._spec, self._rows, self._texts = model, spec, rows, texts
        self._rule = Rule(exact, sequence)
        self._prefix_cache = prefix_cache
        self.context = min(context or pages * PAGE, pages * PAGE)
        self._table, self._memory = PageTable(pages), PageMemory(spec, weight.dtype, pages)
        self._dtype = weight.dtype
        self.numerics_id = numerics_id(numerics, weight.dtype, sequence)
        """Engines with equal ids give equal weights and texts equal bits, if numerics are exact."""
        self._root = root_name(weights_id, self.numerics_id)
        self._waiting: list[_Running] = []
        self._running: list[_Running] = []
        self._pending: list[Told] = []
        self._rows_last = self._cached = self._preempted = self._recomputed = 0
        self._long_turn = False

    # What callers ask.

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._running or self._waiting or self._pending)

    def statistics(self) -> EngineStatistics:
        """See ``EngineStatistics``."""
        return EngineStatistics(
            len(self._running),
            len(self._waiting),
            self._table.used,
            self._table.count,
            self._rows_last,
            self._cached,
            self._preempted,
            self._recomputed,
        )

    def pages(self) -> tuple[int, int]:
        """Pages in use, and pages in all."""
        return self._table.used, self._table.count

    def submit(self, request: Request) -> None:
        """Takes a request on. Raises RequestError, and ValueError for ``sampling`` out of range."""
        if any(held.request.id == request.id for held in (*self._running, *self._waiting)):
            raise RequestError(f"a request {request.id!r} is being computed: give each its own id", "id")
        require_computable(request, self._spec.vocab_size, self.context)
        require_sampling(request.sampling)
        self._waiting.append(
            _Running(request, [*request.prompt, *request.told], Piece(self._spec, self._dtype))
        )

    def cancel(self, request_id: str) -> None:
        """Gives a request up, if it is here; ``Ended`` is told by the next step."""
        for held in (*self._running, *self._waiting):
            if held.request.id == request_id:
                self._end(held, "cancelled")

    def step(self) -> list[Told]:
        """Computes some rows and tells what came of them; ``[]`` if there is nothing to do."""
        self._admit()
        planned = self._planned()
        if planned:
            self._compute(planned)
        told, self._pending = self._pending, []
        return told

    def held_pages(self, names: Collection[bytes]) -> list[bytes]:
        """Those of ``names`` whose pages are here."""
        return [name for name in names if self._table.holds(name)]

    @property
    def root(self) -> bytes:
        """What the names of this engine's pages are rooted in (``phalanx.traffic.pages.page_names``)."""
        return self._root

    def read_page(self, name: bytes) -> bytes:
        """The bytes of a page. Raises KeyError if it is not held."""
        return self._memory.read(self._table.place(name))

    def write_page(self, name: bytes, content: bytes, before: bytes = b"") -> bool:
        """Keeps a page that another worker computed, behind that named ``before``; False if all pages are in use."""
        if self._table.holds(name):
            return True
        place = self._table.take()
        if place is None:
            return False
        try:
            self._memory.write(place, content)
        except ValueError:
            self._table.release([place])
            raise
        self._table.release([self._table.name(place, name, before)])
        return True

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, keys and values."""
        return self._dtype

    def forget_pages(self) -> None:
        """Drops the pages that no running request uses."""
        self._table.drop_unused()

    # Pages.

    def _admit(self) -> None:
        while self._waiting and not 0 < self._texts <= len(self._running):
            held = self._waiting[0]
            # One row of a text is always computed, for its logits.
            usable = len(held.text) - 1 if not self._scores_prompt(held) else 0
            names = page_names(held.text[:usable], self._root_of(held)) if self._prefix_cache else []
            places = self._table.use_prefix(names)
            if self._table.available < 1 and len(places) * PAGE <= usable and self._running:
                self._table.release(places)
                return
            held.places, held.names = places, names[: len(places)]
            held.computed = len(places) * PAGE
            held.piece.grow(held.computed + 1)
            for number, place in enumerate(places):
                self._memory.copy_in(held.piece, number, place)
            if held.cached is None:
                held.cached = min(held.computed, len(held.request.prompt))
                self._cached += held.cached
            else:
                self._recomputed += max(0, held.most_computed - held.computed + PAGE - 1) // PAGE
            self._running.append(self._waiting.pop(0))

    def _scores_prompt(self, held: _Running) -> bool:
        return held.request.prompt_logprobs and not held.scored

    def _is_long(self, held: _Running) -> bool:
        short = longest_short(self._spec)
        return 0 < short < len(held.text)

    def _root_of(self, held: _Running) -> bytes:
        return next_name(self._root, [1]) if self._is_long(held) else self._root

    def _planned(self) -> list[tuple[_Running, int]]:
        running = self._running
        # Texts that LongRoPE rotates by other factors have other tables: they take turns.
        sides = {self._is_long(held) for held in running}
        if len(sides) == 2:
            self._long_turn = not self._long_turn
            running = [held for held in running if self._is_long(held) == self._long_turn]
        by_id = {held.request.id: held for held in running}
        planned = []
        for name, count in plan_step([held.course for held in running], self._rows):
            held = by_id[name]
            if held in self._running and self._make_room(held, held.computed + count):
                planned.append((held, count))
        return [(held, count) for held, count in planned if held in self._running]

    def _make_room(self, held: _Running, tokens: int) -> bool:
        """Takes the pages of a text of ``tokens``; the youngest requests give theirs up, perhaps this one itself."""
        while len(held.places) * PAGE < tokens:
            place = self._table.take()
            if place is not None:
                held.places.append(place)
                continue
            name = youngest([other.course for other in self._running])
            victim = next(other for other in self._running if other.request.id == name)
            self._preempt(victim)
            if victim is held:
                return False
        held.piece.grow(tokens)
        return True

    def _preempt(self, held: _Running) -> None:
        self._preempted += 1
        self._restart(held)
        self._running.remove(held)
        self._waiting.insert(0, held)

    def _restart(self, held: _Running) -> None:
        self._table.release(held.places[::-1])
        held.most_computed = max(held.most_computed, held.computed)
        held.places, held.names, held.computed = [], [], 0
        held.piece = Piece(self._spec, self._dtype)

    def _keep_pages(self, held: _Running) -> None:
        """Names the pages that are whole now, so that others may use them."""
        if not self._prefix_cache:
            return
        while (len(held.names) + 1) * PAGE <= held.computed:
            number = len(held.names)
            before = held.names[-1] if held.names else self._root_of(held)
            name = next_name(before, held.text[number * PAGE : (number + 1) * PAGE])
            place = held.places[number]
            self._memory.copy_out(held.piece, number, place)
            held.places[number] = self._table.name(place, name, before)
            held.names.append(name)

    # A step.

    @torch.no_grad()
    def _compute(self, planned: list[tuple[_Running, int]]) -> None:
        spans = [Span(held.piece, held.computed, held.computed + count) for held, count in planned]
        tokens = [
            t
            for (held, _), span in zip(planned, spans, strict=True)
            for t in held.text[span.begin : span.end]
        ]
        positions = [p for span in spans for p in range(span.begin, span.end)]
        self._rows_last = len(tokens)
        wanted, owners = self._wanted(planned)
        tokens, positions = self._padded(tokens), self._padded(positions)
        masks: dict[tuple[int, ...], Tensor] = {}
        cache = [LayerRows(layer, spans, self._rule, masks) for layer in range(self._spec.layers)]
        found: list[tuple[Tensor, Tensor]] = []

        def readout(hidden: Tensor, weight: Tensor) -> Tensor:
            product = self._exact.products if self._exact else None
            if rows := self._padded(wanted):
                found.append(log_probabilities(hidden[0, rows], weight, self._spec.logit_cap, product))
            return hidden

        # Of these, all or none are behind LongRoPE's switch.
        length = max(len(held.text) for held, _ in planned) if longest_short(self._spec) else 0
        self._model(
            torch.tensor([tokens]), readout, positions=torch.tensor(positions), length=length, cache=cache
        )
        for held, count in planned:
            held.computed += count
            self._keep_pages(held)
        if found:
            self._read_rows(owners, *found[0])

    def _padded(self, values: list[int]) -> list[int]:
        """The values with the last one repeated, until rows so many keep their bits."""
        return values + values[-1:] * (self._exact.rows.padding(len(values)) if self._exact and values else 0)

    def _wanted(self, planned: list[tuple[_Running, int]]) -> tuple[list[int], list[tuple[_Running, int]]]:
        """The rows whose distribution is asked for, and of each the request and its place in the text."""
        rows: list[int] = []
        owners: list[tuple[_Running, int]] = []
        start = 0
        for held, count in planned:
            for position in range(held.computed, held.computed + count):
                scored = self._scores_prompt(held) and position + 1 < len(held.request.prompt)
                if scored or position + 1 == len(held.text):
                    rows.append(start + position - held.computed)
                    owners.append((held, position))
            start += count
        return rows, owners

    def _read_rows(self, owners: list[tuple[_Running, int]], scores: Tensor, log_probs: Tensor) -> None:
        for row, (held, position) in enumerate(owners):
            if held not in self._running:
                continue
            if not bool(torch.isfinite(scores[row].max())):
                self._end(
                    held,
                    "error",
                    f"the logits after token {position} of request {held.request.id!r} are not finite: the weights are, or too large for the "
                    "format computed in; take an earlier step",
                )
            elif position + 1 < len(held.text):
                held.scores[position + 1] = float(log_probs[row, held.text[position + 1]])
            else:
                self._take_token(held, scores[row], log_probs[row])

    def _take_token(self, held: _Running, scores: Tensor, log_probs: Tensor) -> None:
        request = held.request
        if self._scores_prompt(held):
            held.scored = True
            self._pending.append(
                PromptScored(request.id, tuple(held.scores[p] for p in range(1, len(request.prompt))))
            )
        token = draw(scores, request.sampling, len(held.text))
        if token in request.stop_tokens:
            return self._end(held, "stop")
        told = request.top_logprobs >= 0
        self._pending.append(
            Token(
                request.id,
                len(held.text) - len(request.prompt),
                token,
                float(log_probs[token]) if told else 0.0,
                likeliest(log_probs, request.top_logprobs),
            )
        )
        was_long = self._is_long(held)
        held.text.append(token)
        if len(held.text) - len(request.prompt) >= request.max_tokens:
            return self._end(held, "length")
        if self._is_long(held) != was_long:
            # From here on all positions are rotated by other factors, those of the kept keys too.
            self._restart(held)
        return None

    def _end(self, held: _Running, outcome: Outcome, text: str = "") -> None:
        self._table.release(held.places[::-1])
        held.places = []
        (self._running if held in self._running else self._waiting).remove(held)
        self._pending.append(Ended(held.request.id, outcome, text, held.cached or 0))
