"""Compare the tokens and log-probabilities of servers in every mode, bit by bit, with those of a reference server and of ``phalanx score``.

    python -m bench.serve.exact
    python -m bench.serve.exact --models dense latent --formats bf16 --modes tensor-2 pipeline-3 --requests 100

Small models with random weights are saved by the real writers. Their widths are no multiples of a vector: hidden 72, heads of 24, inner 200,
vocabulary 515. For each model and format a reference server, one process of one thread, answers random requests one at a time. Then ``phalanx
serve`` runs in each mode and answers the same requests in another order. A third is sent one at a time, a third 8 and a third 32 at a time, and
half of the responses are streamed. Prompts are 1 to 180 tokens long, and some share a beginning. Temperature, ``top_p``, ``top_k``, ``min_p``, ``n``,
``logprobs``, ``stop``, ``echo`` and ``prompt_logprobs`` are drawn for each request.

A response differs if a token id, the text or the reason to end differs, or if any log-probability does: that of a token, of its likeliest
alternatives, or of the prompt. ``phalanx score`` computes the log-probabilities of all texts of the reference again, where keys and values are
kept in the format of computation. The exit code is 1 if anything differs, and the first difference of each mode is printed below its row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import torch

from bench.common.saved_run import save_run_of_bytes
from bench.running import run_bench
from bench.serve.streamed import served
from phalanx.checkpoint.pack.layout import PackFormat
from phalanx.checkpoint.pack.writer import pack
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import MlaSpec, ModelSpec, MoeSpec

_CONTEXT = 256
_CONCURRENCIES = (1, 8, 32)
_LONGEST_PROMPT = 180
_STD = 0.12
"""Scale of the weights: logits have about unit variance at a width of 72."""


def _model(**fields: Any) -> ModelSpec:
    return ModelSpec(layers=3, dim=72, heads=4, ffn_dim=200, vocab_size=515, **fields)


_LATENTS = MlaSpec(query_rank=40, kv_rank=32, nope_head_dim=24, rope_head_dim=8, value_head_dim=24)
MODELS = {
    "dense": _model(kv_heads=2, head_dim=24, qk_norm=True, mtp_depth=2),
    "mixture": _model(
        kv_heads=2, head_dim=24, moe=MoeSpec(experts=6, per_token=2, ffn_dim=40, shared=1, first_dense=1)
    ),
    "latent": _model(mla=_LATENTS),
    "latent-absorbed": _model(mla=replace(_LATENTS, absorbed=True)),
    "windows": _model(
        kv_heads=2,
        head_dim=32,
        attention_pattern=("window", "full"),
        window=24,
        sinks=True,
        score_cap=20.0,
        logit_cap=30.0,
    ),
}


@dataclass(frozen=True)
class Format:
    """A format of weights, computation, keys and values: servers of one format return the same bits."""

    options: tuple[str, ...]
    pack: PackFormat | None = None
    """Format of the pack whose weights are those of the run in this format."""
    is_only_packed: bool = False
    """True if a run directory has no weights of this format."""

    @property
    def keeps_computed(self) -> bool:
        """True if keys and values are kept as computed, as ``phalanx score`` reads them."""
        return "--kv" not in self.options


FORMATS = {
    "fp32": Format(("--dtype", "float32"), "fp32"),
    "bf16": Format(("--dtype", "bfloat16"), "bf16"),
    "int8-weights": Format(("--dtype", "bfloat16"), "int8", is_only_packed=True),
    "fp8-weights": Format(("--dtype", "bfloat16"), "fp8", is_only_packed=True),
    "int8-kv": Format(("--dtype", "float32", "--kv", "int8")),
    "fp8-kv": Format(("--dtype", "float32", "--kv", "fp8")),
}


@dataclass(frozen=True)
class Mode:
    """A way to start a server, and to send it the requests."""

    options: tuple[str, ...] = ()
    threads: int = 1
    rounds: int = 1
    """Times that all requests are sent to the same server; the last ones are compared."""
    concurrencies: tuple[int, ...] = _CONCURRENCIES
    is_divided: bool = False
    """True if the model is divided over processes, which reads a run directory."""
    is_packed: bool = False
    """True if a pack is served also where there is a run directory."""
    drafts: int = 0


REFERENCE = Mode(concurrencies=(1,))
_WORKERS = ("--threads", "1", "--workers")
MODES = {
    "batches": Mode(),
    **{f"threads-{count}": Mode(threads=count) for count in (2, 3, 4, 8)},
    "few-pages": Mode(("--memory", "1536KiB")),
    "cached-prefixes": Mode(rounds=2),
    "rows-16": Mode(("--rows", "16")),
    "drafts-2": Mode(drafts=2),
    "tensor-2": Mode(("--tensor", "2"), is_divided=True),
    "tensor-2-threads-2": Mode(("--tensor", "2"), threads=2, is_divided=True),
    "pipeline-3": Mode(("--pipeline", "3"), is_divided=True),
    "workers-2": Mode((*_WORKERS, "2")),
    "prefill-decode": Mode((*_WORKERS, "prefill:1,decode:1")),
    "prefill-decode-tensor-2": Mode(
        (*_WORKERS, "prefill:1,decode:1", "--tensor", "prefill:2,decode:1"), is_divided=True
    ),
    "pack": Mode(is_packed=True),
    "streamed-pack": Mode(("--stream", "--memory", "512MiB", "--requests", "128"), is_packed=True),
}
CONTROLS = {"fast-numerics": Mode(("--numerics", "fast"))}
"""Modes that differ, which shows that the bench finds differences; they run only if they are named."""


def is_possible(spec: ModelSpec, form: Format, mode: Mode) -> bool:
    """Return True if a model can be served in a format and a mode."""
    if (mode.is_divided and form.is_only_packed) or (mode.is_packed and form.pack is None):
        return False
    if mode.drafts > (0 if form.is_only_packed else spec.mtp_depth):
        return False
    kept_width = spec.mla.kv_rank if spec.mla else spec.head_dim
    return form.keeps_computed or kept_width % 32 == 0  # 8-bit pages have a scale for 32 neighbors


# Requests.


def random_requests(seed: int, count: int) -> list[dict[str, Any]]:
    """Return the bodies of ``count`` completions."""
    draw = random.Random(seed)
    stems = [_ids(draw, _LONGEST_PROMPT) for _ in range(4)]
    return [_request(draw, stems) for _ in range(count)]


def _ids(draw: random.Random, most: int) -> list[int]:
    return [draw.randrange(256) for _ in range(draw.randint(1, most))]


def _request(draw: random.Random, stems: Sequence[list[int]]) -> dict[str, Any]:
    kind = draw.random()
    if kind < 0.4:
        prompt = _ids(draw, 40)
    elif kind < 0.7:
        prompt = _ids(draw, _LONGEST_PROMPT)
    else:  # begins as others do
        stem = draw.choice(stems)
        prompt = [*stem[: draw.randint(1, len(stem))], *_ids(draw, 8)][:_LONGEST_PROMPT]
    body: dict[str, Any] = {
        "model": "exact",
        "prompt": prompt,
        "max_tokens": draw.choice(
            [1, 2, draw.randint(1, 16), draw.randint(1, 16), draw.randint(16, _CONTEXT - _LONGEST_PROMPT)]
        ),
        "seed": draw.getrandbits(62),
        "temperature": draw.choice([0, 0, 0.3, 0.8, 1, 1, 1.7]),
        "logprobs": draw.choice([0, 1, 5, 20]),
        "ignore_eos": draw.random() < 0.3,
        "return_token_ids": True,
    }
    optional = {
        "top_p": (0.4, [0.1, 0.5, 0.9, 0.99]),
        "top_k": (0.4, [1, 2, 10, 50]),
        "min_p": (0.2, [0.01, 0.1, 0.5]),
        "stop": (0.3, [["e", "~"], list("abcdefgh"), ["\n", "é", "0", "1", "2"]]),
        "n": (0.1, [2, 3]),
        "echo": (0.15, [True]),
        "prompt_logprobs": (0.15, [0]),
    }
    return body | {
        name: draw.choice(values) for name, (share, values) in optional.items() if draw.random() < share
    }


# Responses.


@dataclass
class Choice:
    """A text with all that was returned about it, joined from the events of a stream or read from one body."""

    text: str = ""
    finish: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    """Log-probabilities of the tokens, after those of an echoed prompt."""
    top: list[Any] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)

    def add(self, part: dict[str, Any]) -> None:
        """Append what an event, or a body, has of this choice."""
        logprobs = part["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
        self.text += part["text"]
        self.finish = part["finish_reason"] or self.finish
        self.token_ids += part["token_ids"] or []
        self.logprobs += logprobs["token_logprobs"]
        self.top += logprobs["top_logprobs"]
        self.prompt_logprobs += part.get("prompt_logprobs") or []

    @property
    def output(self) -> object:
        """Return the tokens, the text and the reason to end."""
        return self.token_ids, self.text, self.finish

    @property
    def probabilities(self) -> object:
        """Return all log-probabilities."""
        return self.logprobs, self.top, self.prompt_logprobs


@dataclass
class Response:
    """The choices of a response, by index, or the error."""

    choices: dict[int, Choice] = field(default_factory=dict)
    cached_tokens: int = 0
    error: str = ""

    def add(self, content: dict[str, Any]) -> None:
        """Append an event of a stream, or a body."""
        if "error" in content:
            self.error = content["error"]["message"]
            return
        for part in content["choices"]:
            self.choices.setdefault(part["index"], Choice()).add(part)
        if usage := content.get("usage"):
            self.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]

    @property
    def tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())


async def responses_of(
    url: str, bodies: Sequence[dict[str, Any]], concurrencies: Sequence[int], draw: random.Random
) -> list[Response]:
    """Send all requests in random order, as many at a time as each of ``concurrencies`` for an equal part of them."""
    responses = [Response() for _ in bodies]
    order = draw.sample(range(len(bodies)), len(bodies))
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        for number, concurrency in enumerate(concurrencies):
            places = asyncio.Semaphore(concurrency)

            async def send(request: int, places: asyncio.Semaphore = places) -> None:
                async with places:
                    responses[request] = await _response(
                        client, url, bodies[request], is_streamed=draw.random() < 0.5
                    )

            await asyncio.gather(*map(send, order[number :: len(concurrencies)]))
    return responses


async def _response(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], *, is_streamed: bool
) -> Response:
    """Return the response to a request, which is repeated while the server is overloaded."""
    streaming = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
    while True:
        response = Response()
        async with client.stream("POST", f"{url}/completions", json=body | streaming) as answer:
            if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
                await asyncio.sleep(float(answer.headers["Retry-After"]))
                continue
            if not is_streamed or answer.is_error:
                response.add(json.loads(await answer.aread()))
                return response
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    response.add(json.loads(line.removeprefix("data: ")))
            return response


# Comparison.


@dataclass
class Differences:
    """Requests whose responses differ from the reference."""

    tokens: int = 0
    logprobs: int = 0
    first: str = ""

    def compare(self, number: int, response: Response, reference: Response) -> None:
        """Count a response."""
        if response.error or response.choices.keys() != reference.choices.keys():
            self._add_tokens(f"request {number}: {response.error or 'another number of choices'}")
            return
        pairs = [(response.choices[index], choice) for index, choice in sorted(reference.choices.items())]
        for choice, expected in pairs:
            if choice.output != expected.output:
                self._add_tokens(f"request {number}: {choice.output}, reference {expected.output}")
                return
        for choice, expected in pairs:
            if choice.probabilities != expected.probabilities:
                self.add_logprobs(f"request {number}: {first_difference(choice, expected)}")
                return

    def _add_tokens(self, difference: str) -> None:
        self.tokens += 1
        self.first = self.first or difference

    def add_logprobs(self, difference: str) -> None:
        """Count a request of which only log-probabilities differ."""
        self.logprobs += 1
        self.first = self.first or difference

    def print(self) -> int:
        """Print the first difference, if there is any, and return the number of all."""
        if self.first:
            print(f"  {self.first}", flush=True)
        return self.tokens + self.logprobs


def first_difference(choice: Choice, expected: Choice) -> str:
    """Return where log-probabilities differ first, and both."""
    for kind in ("logprobs", "prompt_logprobs", "top"):
        values, references = getattr(choice, kind), getattr(expected, kind)
        for place, (value, reference) in enumerate(zip(values, references, strict=False)):
            if value != reference:
                return f"{kind} {place} is {value}, reference {reference}"
        if len(values) != len(references):
            return f"{len(values)} {kind}, reference {len(references)}"
    return ""


def compare_with_score(
    place: Path, form: Format, bodies: Sequence[dict[str, Any]], reference: Sequence[Response]
) -> Differences:
    """Let ``phalanx score`` score the texts of the reference, and compare the log-probabilities of their tokens."""
    texts = [
        (number, choice, [*bodies[number]["prompt"], *choice.token_ids])
        for number, response in enumerate(reference)
        for choice in response.choices.values()
    ]
    scored = subprocess.run(
        [sys.executable, "-m", "phalanx", "score", str(place), "-", "--json", *form.options],
        input="".join(json.dumps({"tokens": tokens}) + "\n" for _, _, tokens in texts),
        capture_output=True,
        text=True,
    )
    if scored.returncode:
        raise RuntimeError(scored.stderr)
    differences = Differences()
    for (number, choice, _), line in zip(texts, scored.stdout.splitlines(), strict=True):
        values: list[float | None] = [
            None,
            *json.loads(line)["log_probs"],
        ]  # nothing precedes the first token
        expected = Choice(
            logprobs=values[len(values) - len(choice.logprobs) :],
            prompt_logprobs=values[: len(choice.prompt_logprobs)],
            top=choice.top,
        )
        if choice.probabilities != expected.probabilities:
            differences.add_logprobs(f"request {number}: {first_difference(choice, expected)}")
    return differences


# The bench.


def place_of(run: Path, form: Format, mode: Mode) -> Path:
    """Return what is served: the run directory, or its pack, which is written on first use."""
    if not (form.is_only_packed or mode.is_packed):
        return run
    assert form.pack is not None
    path = run.with_name(f"{run.name}.{form.pack}.pack")
    if not path.exists():
        pack(run, None, path, form.pack)
    return path


def served_responses(
    run: Path, form: Format, mode: Mode, bodies: Sequence[dict[str, Any]], draw: random.Random
) -> list[Response]:
    """Start a server in a mode, and return its responses to the last round of the requests."""
    words = ("--name", "exact", "--context", str(_CONTEXT), *form.options, *mode.options)
    place = place_of(run, form, mode)
    drafts = ("--drafts", str(mode.drafts)) if place == run and not mode.is_divided else ()
    with served(place, *words, *drafts, threads=mode.threads) as server:
        for _ in range(mode.rounds):
            responses = asyncio.run(responses_of(server.url, bodies, mode.concurrencies, draw))
    return responses


_COLUMNS = (
    "model",
    "format",
    "mode",
    "requests",
    "tokens",
    "prompt tokens from the cache",
    "tokens differ",
    "log-probabilities differ",
)


def print_row(*cells: object) -> None:
    """Print a row of the table in Markdown."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def counts_of(responses: Sequence[Response]) -> tuple[int, int, int]:
    """Return the number of responses, of their tokens, and of prompt tokens whose pages were in the cache."""
    return (
        len(responses),
        sum(response.tokens for response in responses),
        sum(response.cached_tokens for response in responses),
    )


def measure_format(
    run: Path, spec: ModelSpec, form_name: str, modes: Sequence[str], bodies: Sequence[dict[str, Any]]
) -> int:
    """Print a row for each mode in one format, and return the number of responses that differ."""
    form, count = FORMATS[form_name], 0
    reference = served_responses(run, form, REFERENCE, bodies, random.Random(0))
    if errors := [response.error for response in reference if response.error]:
        raise RuntimeError(f"the reference refuses {len(errors)} of {len(bodies)} requests: {errors[0]}")
    print_row(run.name, form_name, "reference", *counts_of(reference), "", "")
    if form.keeps_computed:
        differences = compare_with_score(place_of(run, form, REFERENCE), form, bodies, reference)
        print_row(
            run.name, form_name, "phalanx score", *counts_of(reference)[:2], "", "", differences.logprobs
        )
        count += differences.print()
    for mode_name in modes:
        mode = (MODES | CONTROLS)[mode_name]
        if not is_possible(spec, form, mode):
            continue
        responses = served_responses(run, form, mode, bodies, random.Random(mode_name))
        differences = Differences()
        for number, pair in enumerate(zip(responses, reference, strict=True)):
            differences.compare(number, *pair)
        counts = counts_of(responses)
        print_row(run.name, form_name, mode_name, *counts, differences.tokens, differences.logprobs)
        count += differences.print()
    return count


def measure(
    folder: Path,
    models: Sequence[str],
    formats: Sequence[str],
    modes: Sequence[str],
    requests: int,
    seed: int,
) -> int:
    """Print the table, and return the number of responses that differ."""
    bodies = random_requests(seed, requests)
    count = 0
    print_row(*_COLUMNS)
    print_row(*("---" for _ in _COLUMNS))
    for model in models:
        spec = MODELS[model]
        torch.manual_seed(seed)
        run = folder / model
        save_run_of_bytes(run, resolve(spec), _CONTEXT, std=_STD)
        possible = (name for name in formats if is_possible(spec, FORMATS[name], REFERENCE))
        count += sum(measure_format(run, spec, name, modes, bodies) for name in possible)
    return count


def main() -> int:
    """Parse, measure, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--modes", nargs="+", choices=MODES | CONTROLS, default=list(MODES))
    parser.add_argument("--seed", type=int, default=1, help="of weights and requests")
    options = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        return int(measure(Path(folder), **options) > 0)


if __name__ == "__main__":
    run_bench(main)
