"""Batch of one engine step: scheduled rows with their tokens, the rows to sample, and the results in flight.

Rows are computed in this process, or pass through others while the next batch is computed here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from phalanx_serve.engine.sampler import SamplerOutput, SamplingRequest
from phalanx_serve.kv_cache.layer_cache import Span
from phalanx_serve.kv_cache.manager import RunningText
from phalanx_serve.traffic.scheduler import ScheduledRows, SchedulerOutput


@dataclass(frozen=True)
class Batch:
    """Rows of several texts that the model computes together."""

    texts: list[tuple[RunningText, ScheduledRows]]
    spans: list[Span]
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


def build_batch(scheduled: SchedulerOutput, running: Mapping[str, RunningText]) -> Batch:
    """Collect tokens and sampling requests of the scheduled rows; ``running`` has the texts by the ids of their requests."""
    batch = Batch([], [], [], [], [])
    for rows in scheduled.requests:
        text = running[rows.id]
        first_row = len(batch.tokens)
        batch.texts.append((text, rows))
        batch.spans.append(Span(text.kv, rows.begin, rows.end))
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
