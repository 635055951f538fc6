"""The texts that an engine computes, and the pages of each: how far a text is, which pages it holds, and how it gives them up."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from phalanx.model.facts.stretching import longest_short
from phalanx.run.spec import ModelSpec
from phalanx.serve.engine.drafts import Ahead
from phalanx.serve.engine.model_runner import FarLayers
from phalanx.serve.engine.pages.boxes import PageBox, PageShape
from phalanx.serve.engine.pages.kept import KeptFormat
from phalanx.serve.engine.pages.memory import PageBytes, PageMemory, Piece
from phalanx.traffic.batching import Course
from phalanx.traffic.pages import PAGE, PageTable, next_name, page_names, root_name
from phalanx.traffic.requests import Request


@dataclass(eq=False)
class RunningText:
    """A request with its text so far, and what is held of it."""

    request: Request
    tokens: list[int]
    piece: Piece
    places: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    computed: int = 0
    cached: int | None = None
    scores: dict[int, float] = field(default_factory=dict)
    scored: bool = False
    most_computed: int = 0
    weights: str = ""
    """The weights of its keys and values, and of its next token; after a swap that left it its pages, the names of all with ``+`` between."""

    ahead: Ahead | None = None
    """What its guesses rest on."""
    drafts: tuple[int, ...] = ()
    """Guesses of its next tokens, to be computed behind its last one."""

    @property
    def course(self) -> Course:
        """How far it is."""
        return Course(self.request.id, self.computed, len(self.tokens), len(self.drafts))

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still to be told."""
        return self.request.prompt_logprobs and not self.scored

    @property
    def has_begun(self) -> bool:
        """Whether a token was made here, so that its prompt is read and scored."""
        return len(self.tokens) > len(self.request.prompt) + len(self.request.told)


class TextPages:
    """The pages of an engine's texts, named after the weights that made them."""

    def __init__(
        self,
        spec: ModelSpec,
        pages: int,
        kept: KeptFormat,
        *,
        prefix_cache: bool,
        layers: range,
        far: FarLayers | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Keys and values of ``layers`` are here, on ``device``, and those of the rest ``far`` away."""
        own = PageBox(layers, range(kept.heads))
        self._shape = PageShape.around([own] if far is None else [far.own, *far.boxes], kept)
        self._spec, self._dtype, self._prefix_cache = spec, kept.dtype, prefix_cache
        self._layers, self._far, self._numbers = layers, far, itertools.count(1)
        self._device = device
        self.table, self._memory = PageTable(pages), PageMemory(len(layers), pages, kept, device)
        self.root = b""
        """What pages' names are rooted in."""

    def made_by(self, weights: str, numerics: str) -> None:
        """Names pages after these weights from now on; those of other weights are found no more, and go when places are needed."""
        self.root = root_name(weights, numerics)

    def new(self, request: Request) -> RunningText:
        """The text of a request, with nothing held of it."""
        return RunningText(request, [*request.prompt, *request.told], self._piece())

    def _piece(self) -> Piece:
        return Piece(self._spec, self._dtype, self._layers, next(self._numbers), self._device)

    def is_long(self, held: RunningText) -> bool:
        """Whether LongRoPE rotates the text by its long factors."""
        return 0 < longest_short(self._spec) < len(held.tokens)

    def open(self, held: RunningText, *, alone: bool) -> int | None:
        """Takes the pages with which a text begins and that are held; tokens that are computed so. ``None`` if no page is left for more of it,
        unless it is ``alone`` and would wait for ever."""
        # One row of a text is always computed, for its logits.
        usable = 0 if held.scores_prompt else len(held.tokens) - 1
        names = page_names(held.tokens[:usable], self._root_of(held)) if self._prefix_cache else []
        places = self.table.use_prefix(names)
        if self.table.available < 1 and len(places) * PAGE <= usable and not alone:
            self.table.release(places)
            return None
        held.places, held.names = places, names[: len(places)]
        held.computed = len(places) * PAGE
        held.piece.grow(held.computed + 1)
        for number, place in enumerate(places):
            self._memory.copy_in(held.piece, number, place)
            if self._far is not None:
                self._far.copy_in(held.piece.number, number, place)
        return held.computed

    def make_room(self, held: RunningText, tokens: int, give_up: Callable[[], RunningText]) -> bool:
        """Takes the pages of a text of ``tokens``; ``give_up`` frees those of another, perhaps of this one itself: False then."""
        while len(held.places) * PAGE < tokens:
            place = self.table.take()
            if place is not None:
                held.places.append(place)
            elif give_up() is held:
                return False
        held.piece.grow(tokens)
        return True

    def most_drafts(self, held: RunningText, depths: int) -> int:
        """Tokens to guess behind a text: not beyond its longest, and none that LongRoPE would rotate by other factors."""
        most = min(depths, held.request.max_tokens - (len(held.tokens) - len(held.request.prompt)) - 1)
        short = longest_short(self._spec)
        return most if not short > 0 or self.is_long(held) else min(most, short - len(held.tokens))

    def room_for(self, held: RunningText, tokens: int) -> bool:
        """Whether there are pages for a text of ``tokens`` that no other uses."""
        return tokens <= (len(held.places) + self.table.available) * PAGE

    def keep(self, held: RunningText) -> None:
        """Names the pages that are whole now, so that others may use them."""
        # Those that several weights made have no name.
        if not self._prefix_cache or "+" in held.weights:
            return
        while (len(held.names) + 1) * PAGE <= held.computed:
            number = len(held.names)
            before = held.names[-1] if held.names else self._root_of(held)
            name = next_name(before, held.tokens[number * PAGE : (number + 1) * PAGE])
            place = held.places[number]
            self._memory.copy_out(held.piece, number, place)
            if self._far is not None:
                self._far.copy_out(held.piece.number, number, place)
            held.places[number] = self.table.name(place, name, before)
            held.names.append(name)

    def restart(self, held: RunningText) -> None:
        """Gives a text's pages up, so that it is computed again from its beginning."""
        self.release(held)
        held.most_computed = max(held.most_computed, held.computed)
        held.names, held.computed = [], 0
        held.piece = self._piece()
        held.ahead, held.drafts = None, ()

    def release(self, held: RunningText) -> None:
        """Gives a text's pages up."""
        self.table.release(held.places[::-1])
        held.places = []
        if self._far is not None:
            self._far.drop(held.piece.number)

    def read(self, name: bytes) -> bytes:
        """The bytes of a page. Raises KeyError if it is not held."""
        place = self.table.place(name)
        here, far = self._memory.read(place), self._far
        if far is None or far.own == self._shape.whole:
            return here
        return bytes(self._shape.assemble(zip((far.own, *far.boxes), (here, *far.read(place)), strict=True)))

    def write(self, name: bytes, content: PageBytes, before: bytes) -> bool:
        """Keeps a page behind that named ``before``; False if all pages are in use. Raises ValueError for ``content`` of another length."""
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
        if len(content) != self._shape.nbytes:
            raise ValueError(
                f"a page has {self._shape.nbytes} bytes, and {len(content)} came: the other worker has another model or format"
            )
        if self._far is None:
            return self._memory.write(place, content)
        self._memory.write(place, self._shape.cut(content, self._far.own))
        self._far.write(place, [self._shape.cut(content, box) for box in self._far.boxes])
        return None

    def _root_of(self, held: RunningText) -> bytes:
        return next_name(self.root, [1]) if self.is_long(held) else self.root
