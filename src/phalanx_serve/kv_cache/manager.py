"""KV-cache manager: the running texts of an engine, the pages of each in the block table, and the batch of their rows in one step.

A batch has the scheduled rows with their tokens, and the rows to sample. Its rows are computed in this process, or pass through others while the
next batch is computed here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.hardware.local.device import on_gpu
from phalanx.model.facts.shape import longest_short
from phalanx.run.spec import ModelSpec
from phalanx_serve.engine.drafts import DraftState
from phalanx_serve.engine.model_runner import FarLayers
from phalanx_serve.engine.sampler import SampledToken, SamplerOutput, SamplingRequest
from phalanx_serve.kv_cache.memory import KVFormat, PageBox, PageBytes, PageMemory, PageShape, RowSpan, TextKV
from phalanx_serve.traffic import scheduler
from phalanx_serve.traffic.events import Request


@dataclass(eq=False)
class RunningText:
    """A request with its tokens so far and its KV cache."""

    request: Request
    tokens: list[int]
    kv: TextKV
    places: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    computed: int = 0
    cached: int | None = None
    scores: dict[int, SampledToken] = field(default_factory=dict)
    """The scored tokens of the prompt, by position."""
    scored: bool = False
    most_computed: int = 0
    weights: str = ""
    """The weights of its keys and values, and of its next token. After a swap that kept its pages: all names, joined by ``+``."""

    ahead: DraftState | None = None
    """The state of its drafts."""
    drafts: tuple[int, ...] = ()
    """Drafts of its next tokens, to be computed behind its last one."""

    @property
    def progress(self) -> scheduler.RequestProgress:
        """Progress for the scheduler."""
        return scheduler.RequestProgress(self.request.id, self.computed, len(self.tokens), len(self.drafts))

    @property
    def scores_prompt(self) -> bool:
        """True if log-probabilities of its prompt are not returned yet."""
        return self.request.prompt_logprobs and not self.scored

    @property
    def has_begun(self) -> bool:
        """True if a token was generated here, so that its prompt is computed and scored."""
        return len(self.tokens) > len(self.request.prompt) + len(self.request.generated)


class KVCacheManager:
    """The pages of an engine's texts, named after the weights that computed them."""

    def __init__(
        self,
        spec: ModelSpec,
        pages: int,
        kept: KVFormat,
        *,
        prefix_cache: bool,
        layers: range,
        far: FarLayers | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate ``pages`` pages for ``layers`` on ``device``; ``far`` caches the other layers, none if None."""
        own = PageBox(layers, range(kept.heads))
        self._shape = PageShape.around([own] if far is None else [far.own, *far.boxes], kept)
        self._spec, self._dtype, self._prefix_cache = spec, kept.dtype, prefix_cache
        self._layers, self._far, self._numbers = layers, far, itertools.count(1)
        self._device = device
        # A device that is too small refuses the pages, before the table takes memory for each.
        self._memory = PageMemory(len(layers), pages, kept, device)
        self.table = scheduler.BlockTable(pages)
        self.root = b""
        """Root of the names of pages."""

    def made_by(self, weights: str, numerics: str) -> None:
        """Name pages after these weights from now on. Pages of other weights are no longer found, and are evicted when memory is needed."""
        self.root = scheduler.root_name(weights, numerics)

    def new(self, request: Request) -> RunningText:
        """Return the text of a request, without pages."""
        return RunningText(request, [*request.prompt, *request.generated], self._new_kv())

    def _new_kv(self) -> TextKV:
        return TextKV(self._spec, self._dtype, self._layers, next(self._numbers), self._device)

    def is_long(self, text: RunningText) -> bool:
        """Return True if LongRoPE rotates the text by its long factors."""
        return 0 < longest_short(self._spec) < len(text.tokens)

    def open(self, text: RunningText, *, alone: bool) -> int | None:
        """Copy the cached pages of a text's prefix into its tensors, and return the number of their tokens.

        Return None if no page is left for more of the text, unless it is ``alone`` and would wait for ever. Texts
        whose prompt is scored take none. The tensors get room for the next token.
        """
        # One row of a text is always computed, for its logits.
        usable = 0 if text.scores_prompt else len(text.tokens) - 1
        names = scheduler.page_names(text.tokens[:usable], self._root_of(text)) if self._prefix_cache else []
        places = self.table.use_prefix(names)
        if self.table.available < 1 and len(places) * scheduler.PAGE <= usable and not alone:
            self.table.release(places)
            return None
        text.places, text.names = places, names[: len(places)]
        text.computed = len(places) * scheduler.PAGE
        text.kv.grow(text.computed + 1)
        if places and on_gpu(text.kv.device):
            self._memory.copy_in_together(text.kv, places)
        else:
            for number, place in enumerate(places):
                self._memory.copy_in(text.kv, number, place)
        if self._far is not None:
            for number, place in enumerate(places):
                self._far.copy_in(text.kv.number, number, place)
        return text.computed

    def make_room(self, text: RunningText, tokens: int, preempt: Callable[[], RunningText]) -> bool:
        """Allocate pages and tensors for ``tokens`` tokens of a text, with ``preempt`` as often as pages lack.

        ``preempt`` frees the pages of the text that it returns; return False if it was this one, else True.
        """
        while len(text.places) * scheduler.PAGE < tokens:
            place = self.table.take()
            if place is not None:
                text.places.append(place)
            elif preempt() is text:
                return False
        text.kv.grow(tokens)
        return True

    def most_drafts(self, text: RunningText, depths: int) -> int:
        """Return the number of tokens to draft: not beyond the longest text, and none that LongRoPE would rotate by other factors."""
        most = min(depths, text.request.max_tokens - (len(text.tokens) - len(text.request.prompt)) - 1)
        short = longest_short(self._spec)
        return most if not short > 0 or self.is_long(text) else min(most, short - len(text.tokens))

    def room_for(self, text: RunningText, tokens: int) -> bool:
        """Return True if unused pages suffice for a text of ``tokens``."""
        return tokens <= (len(text.places) + self.table.available) * scheduler.PAGE

    def keep(self, text: RunningText) -> None:
        """Name the pages that are full now, and copy their contents out, so that other texts may use them.

        Nothing is kept without a prefix cache, or for texts of several weights.
        """
        # Pages computed by several weights have no name.
        if not self._prefix_cache or "+" in text.weights:
            return
        while (len(text.names) + 1) * scheduler.PAGE <= text.computed:
            number = len(text.names)
            before = text.names[-1] if text.names else self._root_of(text)
            name = scheduler.next_name(
                before, text.tokens[number * scheduler.PAGE : (number + 1) * scheduler.PAGE]
            )
            place = text.places[number]
            self._memory.copy_out(text.kv, number, place)
            if self._far is not None:
                self._far.copy_out(text.kv.number, number, place)
            text.places[number] = self.table.name(place, name, before)
            text.names.append(name)

    def restart(self, text: RunningText) -> None:
        """Release a text's pages and drafts, so that it is computed again from its beginning in new tensors.

        Records how far it had been computed.
        """
        self.release(text)
        text.most_computed = max(text.most_computed, text.computed)
        text.names, text.computed = [], 0
        text.kv = self._new_kv()
        text.ahead, text.drafts = None, ()

    def release(self, text: RunningText) -> None:
        """Release a text's pages, here and in other processes. Named pages remain cached."""
        self.table.release(text.places[::-1])
        text.places = []
        if self._far is not None:
            self._far.drop(text.kv.number)

    def read(self, name: bytes) -> bytes:
        """Return the bytes of a page, assembled from all processes that have parts of it. Raises KeyError if it is not here."""
        place = self.table.place(name)
        own, far = self._memory.read(place), self._far
        if far is None or far.own == self._shape.full_box:
            return own
        return bytes(self._shape.assemble(zip((far.own, *far.boxes), (own, *far.read(place)), strict=True)))

    def write(self, name: bytes, content: PageBytes, before: bytes) -> bool:
        """Cache a page behind the page named ``before``, unless it is here already.

        Return True, or False if all pages are in use. Raises ValueError for ``content`` of another length, and then
        frees the page.
        """
        if self.table.holds(name):
            return True
        place = self.table.take()
        if place is None:
            return False
        try:
            self._write(place, content)
        except Exception:
            self.table.release([place])
            raise
        self.table.release([self.table.name(place, name, before)])
        return True

    def _write(self, place: int, content: PageBytes) -> None:
        """Write a page's content into the parts of this process and the others. Raises ValueError for another length."""
        if len(content) != self._shape.nbytes:
            raise ValueError(
                f"a page has {self._shape.nbytes} bytes, and {len(content)} came: the other worker has another model or format"
            )
        if self._far is None:
            return self._memory.write(place, content)
        self._memory.write(place, self._shape.cut(content, self._far.own))
        self._far.write(place, [self._shape.cut(content, box) for box in self._far.boxes])
        return None

    def _root_of(self, text: RunningText) -> bytes:
        """Return the root of a text's page names, another one for texts that LongRoPE rotates by its long factors."""
        return scheduler.next_name(self.root, [1]) if self.is_long(text) else self.root


# Batch of one engine step.


@dataclass(frozen=True)
class Batch:
    """Rows of several texts that the model computes together."""

    texts: list[tuple[RunningText, scheduler.ScheduledRows]]
    spans: list[RowSpan]
    """The rows of the texts, in the same order."""
    tokens: list[int]
    """The token of each row."""
    sampling_requests: list[SamplingRequest]
    sampled: list[tuple[RunningText, int]]
    """For each sampling request, its text and the row's position there."""

    @property
    def length(self) -> int:
        """Tokens of the longest text."""
        return max(len(text.tokens) for text, _ in self.texts)

    def input_token(self, number: int) -> int:
        """Return the token that the row of a sampling request was computed for."""
        return self.tokens[self.sampling_requests[number].row]

    def live(self, running: Collection[RunningText]) -> set[RunningText]:
        """Return the texts that still have the keys and values of this step: not those that ended or lost their pages."""
        pairs = zip(self.texts, self.spans, strict=True)
        return {text for (text, _), span in pairs if text.kv is span.kv and text in running}


@dataclass(frozen=True)
class InFlightBatch:
    """A batch behind the layers of this process, with its results to come."""

    batch: Batch
    states: Tensor
    """``(rows, dim)``, behind the layers of this process."""
    length: int
    """As ``Transformer`` takes it."""
    output: SamplerOutput | Future[SamplerOutput]

    def wait(self) -> SamplerOutput:
        """Wait for the sampler output. Raises the error of the process that failed."""
        return self.output.result() if isinstance(self.output, Future) else self.output


def build_batch(scheduled: scheduler.SchedulerOutput, running: Mapping[str, RunningText]) -> Batch:
    """Collect tokens, drafts and sampling requests of the scheduled rows; ``running`` has the texts by the ids of
    their requests.

    Sampled are the rows at and behind the last known token, and of scored prompts all rows, with their known next
    tokens.
    """
    batch = Batch([], [], [], [], [])
    for rows in scheduled.requests:
        text = running[rows.id]
        first_row = len(batch.tokens)
        batch.texts.append((text, rows))
        batch.spans.append(RowSpan(text.kv, rows.begin, rows.end))
        batch.tokens.extend([*text.tokens, *text.drafts][rows.begin : rows.end])
        for position in range(rows.begin, rows.end):
            scored = text.scores_prompt and position + 1 < len(text.request.prompt)
            if scored or position + 1 >= len(text.tokens):
                target = text.tokens[position + 1] if position + 1 < len(text.tokens) else -1
                row, request = first_row + position - rows.begin, text.request
                batch.sampling_requests.append(
                    SamplingRequest(row, position + 1, target, request.sampling, request.top_logprobs)
                )
                batch.sampled.append((text, position))
    return batch
