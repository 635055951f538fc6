"""Batch of one engine step. Its rows are computed in this process, or pass through others while the next batch is computed here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from phalanx.serve.engine.sampler import SamplerOutput, SamplingRequest
from phalanx.serve.kv_cache.layer_cache import Span
from phalanx.serve.kv_cache.manager import RunningText


@dataclass(frozen=True)
class Batch:
    """Rows of a step in flight, and their results."""

    planned: list[tuple[RunningText, int]]
    """The texts, with their number of rows."""
    spans: list[Span]
    """The rows of the texts, in the same order."""
    sampled: list[tuple[RunningText, int]]
    """For each sampled row, its text and its position there."""
    input_tokens: list[int]
    """For each sampled row, the token that it was computed for."""
    states: Tensor
    """``(rows, dim)``, behind the layers of this process."""
    length: int
    output: SamplerOutput | Future[SamplerOutput]

    def wait(self) -> SamplerOutput:
        """Wait for the sampler output. Raises the error of the process that failed."""
        return self.output.result() if isinstance(self.output, Future) else self.output

    def live(self, running: Collection[RunningText]) -> set[RunningText]:
        """Return the texts that still have the keys and values of this step: not those that ended or lost their pages."""
        pairs = zip(self.planned, self.spans, strict=True)
        return {text for (text, _), span in pairs if text.kv is span.kv and text in running}


def rows_to_sample(
    planned: Sequence[tuple[RunningText, int]],
) -> tuple[list[SamplingRequest], list[tuple[RunningText, int]]]:
    """Return the sampling requests of a step, and for each its text and its position there."""
    requests: list[SamplingRequest] = []
    sampled: list[tuple[RunningText, int]] = []
    start = 0
    for text, count in planned:
        for position in range(text.computed, text.computed + count):
            scored = text.scores_prompt and position + 1 < len(text.request.prompt)
            if scored or position + 1 >= len(text.tokens):
                target = text.tokens[position + 1] if position + 1 < len(text.tokens) else -1
                row, request = start + position - text.computed, text.request
                requests.append(
                    SamplingRequest(row, position + 1, target, request.sampling, request.top_logprobs)
                )
                sampled.append((text, position))
        start += count
    return requests, sampled
