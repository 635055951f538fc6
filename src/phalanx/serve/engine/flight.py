"""A step that is under way: its rows are computed here, or go on through other processes while those of other texts are computed here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from phalanx.serve.engine.readings import Ask, Readings
from phalanx.serve.engine.rows import Span
from phalanx.serve.engine.texts import RunningText


@dataclass(frozen=True)
class Flight:
    """See the module."""

    planned: list[tuple[RunningText, int]]
    """The texts, and of each how many rows."""
    spans: list[Span]
    """Their rows, in the same order."""
    owners: list[tuple[RunningText, int]]
    """The text of each row whose distribution is asked for, and the row's place in it."""
    given: list[int]
    """The token that each of these rows was computed for."""
    states: Tensor
    """``(rows, dim)``, as the layers that are here gave them."""
    length: int
    readings: Readings | Future[Readings]

    def landed(self) -> Readings:
        """What was read of the rows, once they are through. Raises what went wrong on the way."""
        return self.readings.result() if isinstance(self.readings, Future) else self.readings

    def live(self, running: Collection[RunningText]) -> set[RunningText]:
        """The texts that still have the keys and values of this step: none that has ended or given its pages up meanwhile."""
        pairs = zip(self.planned, self.spans, strict=True)
        return {held for (held, _), span in pairs if held.piece is span.piece and held in running}


def asked_rows(
    planned: Sequence[tuple[RunningText, int]],
) -> tuple[list[Ask], list[tuple[RunningText, int]]]:
    """The rows of a step whose distribution is asked for, and of each the text and its place in it."""
    asks: list[Ask] = []
    owners: list[tuple[RunningText, int]] = []
    start = 0
    for held, count in planned:
        for position in range(held.computed, held.computed + count):
            scored = held.scores_prompt and position + 1 < len(held.request.prompt)
            if scored or position + 1 >= len(held.text):
                given = held.text[position + 1] if position + 1 < len(held.text) else -1
                row, request = start + position - held.computed, held.request
                asks.append(Ask(row, position + 1, given, request.sampling, request.top_logprobs))
                owners.append((held, position))
        start += count
    return asks, owners
