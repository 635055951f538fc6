"""The gateway's numbers for Prometheus, under vLLM's names where it has them, so that dashboards made for it work."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from phalanx.serve.gateway.worker import WorkerLoad

_FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_NEXT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Histogram:
    """Values counted in buckets."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> list[str]:
        sums = list(accumulate(self._counts))
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        return [
            *(f'{name}_bucket{{{labels},le="{b}"}} {n}' for b, n in zip(bounds, sums, strict=True)),
            f"{name}_sum{{{labels}}} {self._sum}",
            f"{name}_count{{{labels}}} {sums[-1]}",
        ]


class Counts:
    """What has been counted since the start."""

    def __init__(self, model: str) -> None:
        name = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._labels = f'model_name="{name}"'
        self.first_token, self.next_token, self.whole = Histogram(_FIRST), Histogram(_NEXT), Histogram(_WHOLE)
        self.prompt_tokens = self.generated_tokens = self.cached_tokens = self.cancelled = 0
        self.refused: dict[int, int] = {}
        self.finished: dict[str, int] = {}
        self.seconds_per_text = 0.0

    def ended(self, finish: str, seconds: float, beside: int) -> None:
        """A text has ended after ``seconds``, among ``beside`` that went on at once."""
        self.finished[finish] = self.finished.get(finish, 0) + 1
        self.whole.observe(seconds)
        mine = seconds / max(1, beside)
        self.seconds_per_text += (mine - self.seconds_per_text) * (0.1 if self.seconds_per_text else 1)

    def render(self, load: WorkerLoad) -> bytes:
        """All numbers as text."""
        used = load.pages_used / load.pages if load.pages else 0.0
        out: list[str] = []
        for name, kind, help_text, values in (
            ("vllm:num_requests_running", "gauge", "Texts that are computed.", {"": load.running}),
            ("vllm:num_requests_waiting", "gauge", "Texts that wait.", {"": load.waiting}),
            ("vllm:kv_cache_usage_perc", "gauge", "Pages in use; 1 is all of them.", {"": used}),
            ("vllm:prompt_tokens_total", "counter", "Tokens of prompts.", {"": self.prompt_tokens}),
            ("vllm:generation_tokens_total", "counter", "Tokens generated.", {"": self.generated_tokens}),
            (
                "vllm:prefix_cache_hits_total",
                "counter",
                "Prompt tokens held already.",
                {"": self.cached_tokens},
            ),
            (
                "vllm:request_success_total",
                "counter",
                "Texts that ended, by reason.",
                {f',finished_reason="{k}"': n for k, n in self.finished.items()},
            ),
            ("phalanx_requests_cancelled_total", "counter", "Texts left by clients.", {"": self.cancelled}),
            (
                "phalanx_requests_refused_total",
                "counter",
                "Requests refused, by status.",
                {f',status="{k}"': n for k, n in self.refused.items()},
            ),
        ):
            out += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
            out += [f"{name}{{{self._labels}{more}}} {value}" for more, value in values.items()]
        for name, histogram, help_text in (
            ("vllm:time_to_first_token_seconds", self.first_token, "From a request to its first token."),
            ("vllm:inter_token_latency_seconds", self.next_token, "Between two tokens of a text."),
            ("vllm:e2e_request_latency_seconds", self.whole, "From a request to its end."),
        ):
            out += [
                f"# HELP {name} {help_text}",
                f"# TYPE {name} histogram",
                *histogram.lines(name, self._labels),
            ]
        return ("\n".join(out) + "\n").encode()
