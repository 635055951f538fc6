"""Published training runs: rows of a table, and what each row measured.

A row says who trained what, on which machines, in which layout, and how fast. Speed is stated in whatever unit the source
likes: seconds of a step, tokens per second, or a FLOP rate whose count of FLOP differs from source to source (attention in
full or causal, recomputation counted or not). ``measured_step`` brings all of them to seconds of a step, by the row's own
convention, and refuses a row whose figures contradict each other. The table that comes with the package was transcribed from
the documents that its ``source`` column names, each with the commit or arXiv number that was read.

Sources of the conventions: PaLM, arXiv 2204.02311, appendix B (model FLOP); Narayanan et al., arXiv 2104.04473, equation 3
(96 B s l h^2 ..., which counts a full recomputation).
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from phalanx.hardware.cluster import Accelerator
from phalanx.model.facts.counts import Counts
from phalanx.run.spec import ModelSpec

TABLE = Path(__file__).parent / "data" / "published_runs.csv"
"""The rows that come with the package."""

_WHOLE = [
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "seq_len",
    "experts",
    "top_k",
    "shared_experts",
    "moe_ffn",
    "gpus",
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "dp",
    "zero",
    "micro_batch",
    "global_batch_seqs",
]
_REAL = [
    "params_total_b",
    "params_active_b",
    "tflops_per_gpu",
    "mfu_pct",
    "hfu_pct",
    "step_time_s",
    "tokens_per_s_per_gpu",
    "memory_gb",
]
_TEXT = ["id", "source", "model", "gpu", "precision", "recompute", "seq_parallel", "schedule", "notes"]
_REQUIRED = ["id", "gpu", "gpus", "layers", "hidden", "heads", "seq_len", "global_batch_seqs", "tp", "pp"]
"""Columns without which no row says enough; where another is missing, no row states it."""
_LEADING_NUMBER = re.compile(
    r"\s*(\d{1,3}(?:[,'\s]\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?:\s*$|\s*[^\w\s.,'/]|\s+[^\W\d])"
)
"""Thousands may be parted by a comma, an apostrophe or a space. What follows may explain ("3 (FSDP2)", "62 GiB"), but not change
the number ("8k", "1/2")."""
_MOST = {"layers": 4096}
_MOST_OF_ANYTHING = 10**9
"""What no run has: a larger number is a slip of the pen."""
_SHORTEST_STEP_S = 1e-5

CONTRADICTION = 0.15
"""Relative difference from which two figures of one row cannot both be right."""
MIXTURE_CONTRADICTION = 0.3
"""The same for mixtures of experts, where sources differ in what FLOP they count of router, experts and sliding windows."""


class PublishedRunError(ValueError):
    """A table of runs that cannot be read."""


class Excluded(Exception):  # noqa: N818 - not an error: a row that is left out, with the reason
    """A row that cannot be held against a prediction; its text is the reason."""


@dataclass(frozen=True)
class PublishedRun:
    """One row. ``None`` is what the source does not say; text is empty where it does not."""

    id: str
    source: str
    model: str
    params_total_b: float | None
    """Billions of parameters."""
    params_active_b: float | None
    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    ffn: int | None
    vocab: int | None
    seq_len: int | None
    experts: int | None
    top_k: int | None
    shared_experts: int | None
    moe_ffn: int | None
    gpu: str
    gpus: int | None
    tp: int | None
    pp: int | None
    vpp: int | None
    cp: int | None
    ep: int | None
    dp: int | None
    zero: int | None
    zero_text: str
    micro_batch: int | None
    """Sequences."""
    global_batch_seqs: int | None
    precision: str
    recompute: str
    seq_parallel: str
    schedule: str
    tflops_per_gpu: float | None
    mfu_pct: float | None
    hfu_pct: float | None
    step_time_s: float | None
    tokens_per_s_per_gpu: float | None
    memory_gb: float | None
    notes: str
    unreadable: str = ""
    """What is wrong with figures of the row; empty if nothing is."""

    @property
    def mixture(self) -> bool:
        """Whether the model has routed experts to choose from."""
        return (self.experts or 0) > 1

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether what the row reports is that the run did not fit."""
        timed = self.step_time_s or self.tokens_per_s_per_gpu or self.tflops_per_gpu or self.mfu_pct
        return "OOM" in self.notes and not timed and not self.memory_gb

    @property
    def origin(self) -> str:
        """The repository or document that the row is from, without version, page and table."""
        head = re.split(r"[@:\[(,]|\s+(?:Table|Appendix|refs/|README|report)\b", self.source, maxsplit=1)[0]
        return head.strip() or self.source

    @property
    def family(self) -> str:
        """Rows that are summarized together: one origin, one accelerator, dense models or mixtures."""
        accelerator = (self.gpu.split() or ["no accelerator"])[0]
        return f"{self.origin}, {accelerator}, {'mixture' if self.mixture else 'dense'}"

    @property
    def subject(self) -> tuple[str, str]:
        """Model and accelerator: rows that share both are no independent evidence of each other."""
        return re.sub(r"[^a-z0-9.]", "", self.model.split("(")[0].lower()), self.gpu


def read_published(path: Path = TABLE) -> tuple[PublishedRun, ...]:
    """The rows of a CSV file with the columns of the package's own table.

    A row with a figure that is no number is kept, with the reason (``PublishedRun.unreadable``). Raises ``PublishedRunError``
    if there is no such file, or columns are missing.
    """
    if not path.is_file():
        raise PublishedRunError(f"{path} does not exist: name a CSV file with the columns of {TABLE.name}")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return parse_published(file, str(path))
    except (UnicodeDecodeError, csv.Error) as error:
        raise PublishedRunError(f"{path} is no CSV file in UTF-8 ({error}): save it as one") from error


def parse_published(lines: Iterable[str], name: str = "table") -> tuple[PublishedRun, ...]:
    """``read_published`` of lines; ``name`` is what errors call them."""
    reader = csv.DictReader(lines)
    missing = [column for column in _REQUIRED if column not in (reader.fieldnames or ())]
    if missing:
        raise PublishedRunError(
            f"{name} lacks the columns {', '.join(missing)}: the header is that of {TABLE.name}"
        )
    return tuple(_row(values) for values in reader)


def _row(values: dict[str, str | None]) -> PublishedRun:
    text = dict.fromkeys((*_TEXT, *_WHOLE, *_REAL), "")
    text |= {column: (value or "").strip() for column, value in values.items() if isinstance(column, str)}
    wrong: list[str] = []
    numbers = {column: _number(text[column], column, wrong) for column in (*_WHOLE, *_REAL)}
    whole = {column: None if numbers[column] is None else round(numbers[column] or 0) for column in _WHOLE}
    found: dict[str, object] = {column: text[column] for column in _TEXT}
    found |= whole | {column: numbers[column] for column in _REAL}
    found |= {"zero_text": text["zero"], "unreadable": "; ".join(wrong)}
    return PublishedRun(**{field.name: found[field.name] for field in fields(PublishedRun)})  # type: ignore[arg-type]


_NOT_STATED = {"", "-", "?", "n/a", "na", "nan", "none", "null", "unknown", "not stated"}


def _number(text: str, column: str, wrong: list[str]) -> float | None:
    """The number that ``text`` begins with: "3 (FSDP2)" is 3. What is no number, or too large for one, is added to ``wrong``."""
    if text.lower() in _NOT_STATED:
        return None
    found = _LEADING_NUMBER.match(text)
    number = float(re.sub(r"[,'\s]", "", found[1])) if found else math.inf
    if not math.isfinite(number):
        wrong.append(f"{column} is {text!r}: write a number, or nothing if it is not stated")
        return None
    most = _MOST.get(column, _MOST_OF_ANYTHING)
    if number > most:
        wrong.append(f"{column} is {text!r}, more than the {most:,} that any run has: correct it")
        return None
    return number


@dataclass(frozen=True)
class Measured:
    """What a row says of the time of a step."""

    step_s: float
    how: str
    """The column and the convention that it was derived from."""


def measured_step(
    run: PublishedRun, model: ModelSpec, counts: Counts, batch: int, seq_len: int, accelerator: Accelerator
) -> Measured:
    """Seconds of the run's step. Raises ``Excluded`` if no figure says, or if two contradict each other."""
    tokens_each = batch * seq_len / (run.gpus or 1)
    stated = []
    if run.step_time_s:
        stated.append(Measured(run.step_time_s, "step time"))
    if run.tokens_per_s_per_gpu:
        stated.append(Measured(tokens_each / run.tokens_per_s_per_gpu, "tokens per second"))
    rate = _flop_rate(run, accelerator)
    by_rate = []
    if rate:
        # Where time is stated too, the rate is only a check, and sources differ in whether they count the causal half.
        conventions = (rate[0], "model, causal") if stated and rate[0] == "model" else (rate[0],)
        for convention in conventions:
            flops = flops_per_token(convention, model, counts)  # type: ignore[arg-type]
            by_rate.append(Measured(flops * tokens_each / rate[1], f"FLOP rate ({convention})"))
    if not stated and not by_rate:
        raise Excluded(
            "states neither step time, nor tokens per second, nor a FLOP rate whose basis is known"
        )
    first = (stated or by_rate)[0]
    if first.step_s < _SHORTEST_STEP_S:
        raise Excluded(f"no step takes {first.step_s:.2g} s, as its {first.how} says: correct it")
    others = stated[1:] + sorted(by_rate, key=lambda other: abs(other.step_s / first.step_s - 1))[:1]
    tolerance = MIXTURE_CONTRADICTION if run.mixture else CONTRADICTION
    for other in others:
        if abs(other.step_s / first.step_s - 1) > tolerance:
            raise Excluded(
                f"its figures contradict each other: {first.step_s:.4g} s by its {first.how}, "
                f"{other.step_s:.4g} s by its {other.how}"
            )
    return first


Convention = Literal["model", "model, causal", "hardware, full recomputation", "hardware, without logits"]

_COUNTS_CAUSAL = re.compile(r"Megatron-Bridge|MoE-ModelZoo|moe_recipes|2504\.14960|causal attention, vs")
"""Sources whose FLOP count the causal half of attention, as Megatron Core does since 2025: the rows of theirs that state
tokens per second too agree with no other count. MoE Parallel Folding (arXiv 2504.14960) ran Megatron Core of 2025; counted in full, its
attention would be the slower, the longer the sequence."""


def _flop_rate(run: PublishedRun, accelerator: Accelerator) -> tuple[Convention, float] | None:
    """FLOP/s of an accelerator, with what its FLOP count."""
    basis = next((part for part in run.notes.split(";") if part.strip().startswith("basis=")), "").strip()
    convention: Convention = "model"
    if "hardware" in basis:
        without = "96Bslh^2 formula" in basis
        convention = "hardware, without logits" if without else "hardware, full recomputation"
    elif _COUNTS_CAUSAL.search(run.source + basis) and "non-causal" not in basis:
        convention = "model, causal"
    if run.tflops_per_gpu:
        # A formula that the source itself calls off says little; what else the row has says more.
        return None if "old formula" in run.notes else (convention, run.tflops_per_gpu * 1e12)
    narrow = "FP8 MFU vs FP8 peak" in run.notes and "fp8" in run.precision
    peak = accelerator.flops.get("fp8" if narrow else "bf16") or accelerator.flops.get("fp16")
    return (convention, run.mfu_pct / 100 * peak.value) if run.mfu_pct and peak else None


def flops_per_token(convention: Convention, model: ModelSpec, counts: Counts) -> float:
    """FLOP that a source with this convention counts for a token."""
    if convention == "model":
        return counts.flops_per_token
    if convention == "model, causal":
        return counts.flops_per_token_causal
    logits = 6 * model.dim * model.vocab_size
    blocks = counts.flops_per_token - logits
    return blocks * 4 / 3 + (logits if convention == "hardware, full recomputation" else 0)
