"""Published training runs: typed rows of a CSV table, and the time of a step that each row measured.

A row has the model, machines, layout and speed of a run, and its source. Each source states speed in its own unit: seconds
of a step, tokens per second, or a FLOP rate, and sources count FLOP differently (attention in full or causal, recomputation
counted or not). ``measured_step`` converts all of them to seconds of a step, by the row's own convention, and refuses a row whose
figures contradict each other. The table that comes with the repository was transcribed from the documents that its ``source``
column names, each with the commit or arXiv number that was read.

Sources of the conventions: PaLM, arXiv 2204.02311, appendix B (model FLOP); Narayanan et al., arXiv 2104.04473, equation 3
(96 B s l h^2 ..., which counts a full recomputation).
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from phalanx.hardware.cluster import Accelerator
from phalanx.model.facts.shape import ModelCounts
from phalanx.run.spec import ModelSpec

TABLE = Path(__file__).parent / "data" / "published_runs.csv"
"""The rows that come with the repository."""

_REQUIRED = ["id", "gpu", "gpus", "layers", "hidden", "heads", "seq_len", "global_batch_seqs", "tp", "pp"]
"""Columns that a table must have; a missing optional column reads as blank in every row."""
_LEADING_NUMBER = re.compile(
    r"\s*(\d{1,3}(?:[,'\s]\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?:\s*$|\s*[^\w\s.,'/]|\s+[^\W\d])"
)
"""Thousands may be separated by a comma, an apostrophe or a space. What follows may explain ("3 (FSDP2)", "62 GiB"), but not
change the number ("8k", "1/2")."""
_MOST = {"layers": 4096}
_MOST_OF_ANYTHING = 10**9
"""A larger number is a typing error: no run has it."""
_SHORTEST_STEP_S = 1e-5

CONTRADICTION = 0.15
"""Relative difference from which two figures of one row cannot both be right."""
MIXTURE_CONTRADICTION = 0.3
"""The same for mixtures of experts, where sources differ in what FLOP they count of router, experts and sliding windows."""

Convention = Literal["model", "model, causal", "hardware, full recomputation", "hardware, without logits"]
"""FLOP that a source counts: of the model with attention in full; of the model with the causal half of attention; with a full
recomputation; the same without the output projection."""
FlopBasis = Literal[Convention, "unreliable"]
"""A convention, or "unreliable": the source itself no longer stands by its formula, so its FLOP rate is not used.

Megatron Core counts the causal half since 2025: of its rows, those that state tokens per second too agree with no other count.
MoE Parallel Folding (arXiv 2504.14960) ran Megatron Core of 2025; if its attention were counted in full, it would be the slower,
the longer the sequence."""


class PublishedRunError(ValueError):
    """A table of runs that cannot be read."""


class Excluded(Exception):  # noqa: N818 - not an error: a row that is left out, with the reason
    """A row that cannot be compared with a prediction; the message is the reason."""


@dataclass(frozen=True)
class PublishedRun:
    """One row; the fields are the columns of the table.

    A blank cell is ``None`` for a number, false for yes or no, empty for text, and the default for a choice of words.
    """

    id: str = ""
    source: str = ""
    """Document that was read, with its version."""
    model: str = ""
    params_total_b: float | None = None
    """Billions of parameters."""
    params_active_b: float | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    seq_len: int | None = None
    experts: int | None = None
    top_k: int | None = None
    shared_experts: int | None = None
    moe_ffn: int | None = None
    gpu: str = ""
    gpus: int | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    zero: int | None = None
    micro_batch: int | None = None
    """Sequences."""
    global_batch_seqs: int | None = None
    precision: str = ""
    recompute: str = ""
    seq_parallel: str = ""
    schedule: str = ""
    tflops_per_gpu: float | None = None
    mfu_pct: float | None = None
    hfu_pct: float | None = None
    step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    memory_gb: float | None = None
    """Memory of an accelerator, in ``memory_unit``."""
    software: str = "megatron-core"
    """Name of an entry of ``phalanx_plan.workload.software.SOFTWARE``."""
    outcome: Literal["ran", "out of memory", "regression"] = "ran"
    """A regression is a run that its source calls slower than it should be."""
    flop_basis: FlopBasis = "model"
    """FLOP counted in ``tflops_per_gpu`` and ``mfu_pct``."""
    mfu_peak: Literal["bf16", "fp8"] = "bf16"
    """Format whose peak rate ``mfu_pct`` is a share of."""
    memory_meter: Literal["", "allocated", "reserved", "device"] = ""
    """Quantity in ``memory_gb``: the allocator's allocated or reserved peak, or all memory in use on the device."""
    memory_unit: Literal["GiB", "GB", "1000 MiB"] = "GiB"
    """torch.cuda and nvidia-smi report MiB. Tables write thousands of MiB as GB: one of bigscience's reads 80 for a device with
    79.3 GiB."""
    architecture: Literal["transformer", "other"] = "transformer"
    """Anything but a plain transformer, and what is not stated, is "other"."""
    mlp: Literal["", "gated", "plain"] = ""
    """Feed-forward layer: gated with three matrices, or plain with two."""
    head_dim: int | None = None
    sliding_window: int | None = None
    """Tokens of the attention window of every second layer."""
    learned_positions: bool = False
    """True if the stated size counts a table of positions."""
    mla_q_rank: int | None = None
    mla_kv_rank: int | None = None
    """Blank if the model has no latent attention."""
    mla_nope_dim: int | None = None
    mla_rope_dim: int | None = None
    mla_value_dim: int | None = None
    mtp_depth: int | None = None
    """Multi-token prediction layers."""
    first_dense: int | None = None
    """Leading layers without experts."""
    moe_every: int | None = None
    """A mixture in every so many layers."""
    balanced_experts: bool = False
    """True if every expert gets as many tokens as any other: forced balancing, or dropped tokens at capacity factor 1."""
    expert_tensor: int | None = None
    """Tensor-parallel ranks of an expert."""
    shard_domain: Literal["", "node"] = ""
    """Set to "node" if states are sharded within a node and replicated across nodes."""
    slices: int | None = None
    """TPU slices; states are sharded within a slice and replicated across slices."""
    reduce_precision: Literal["", "bf16"] = ""
    """Format in which gradients are reduced, if it is not the software's usual one."""
    compiled: Literal["", "model", "model and loss"] = ""
    """Parts of the step that torch.compile compiled."""
    activation_offload: bool = False
    recipe_release: float | None = None
    """Release (25.11) of Megatron-Bridge's container whose performance recipes the row ran; blank for fine-tuning."""
    dispatcher: Literal["", "deepep", "hybridep"] = ""
    """Library of the exchange of tokens; blank for an all-to-all. This and the next two hold for rows without a recipe."""
    expert_overlap: bool = False
    """True if the exchange of tokens is hidden behind another micro-batch."""
    cuda_graphs: Literal["", "router", "layer", "step"] = ""
    """Extent of CUDA graphs: router and preprocessing, attention and router of each layer, or the whole step."""
    notes: str = ""
    """Free text for readers. No code reads it."""
    unreadable: str = ""
    """Reason why cells of the row cannot be read; empty if all can. Not a column."""

    @property
    def mixture(self) -> bool:
        """True if the model has routed experts to choose from."""
        return (self.experts or 0) > 1

    @property
    def timed(self) -> bool:
        """True if any figure states the speed of the run."""
        return bool(self.step_time_s or self.tokens_per_s_per_gpu or self.tflops_per_gpu or self.mfu_pct)

    @property
    def ran_out_of_memory(self) -> bool:
        """True if the row reports that the run did not fit."""
        return self.outcome == "out of memory"

    @property
    def origin(self) -> str:
        """The repository or document that the row is from, without version, page and table."""
        head = re.split(r"[@:\[(,]|\s+(?:Table|Appendix|refs/|README|report)\b", self.source, maxsplit=1)[0]
        return head.strip() or self.source

    @property
    def family(self) -> str:
        """Key of rows that are summarized together: one origin, one accelerator, dense models or mixtures."""
        accelerator = (self.gpu.split() or ["no accelerator"])[0]
        return f"{self.origin}, {accelerator}, {'mixture' if self.mixture else 'dense'}"

    @property
    def subject(self) -> tuple[str, str]:
        """Model and accelerator. Rows that share both are no independent evidence of each other."""
        return re.sub(r"[^a-z0-9.]", "", self.model.split("(")[0].lower()), self.gpu


def read_published(path: Path = TABLE) -> tuple[PublishedRun, ...]:
    """Read the rows of a CSV file whose columns are the fields of ``PublishedRun``, in any order.

    A row with a cell that cannot be read is kept, with the reason (``PublishedRun.unreadable``). Raises ``PublishedRunError`` if
    the file does not exist, or lacks required columns.
    """
    if not path.is_file():
        raise PublishedRunError(f"{path} does not exist: name a CSV file with the columns of {TABLE.name}")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return parse_published(file, str(path))
    except (UnicodeDecodeError, csv.Error) as error:
        raise PublishedRunError(f"{path} is no CSV file in UTF-8 ({error}): save it as one") from error


def parse_published(lines: Iterable[str], name: str = "table") -> tuple[PublishedRun, ...]:
    """Do as ``read_published``, from lines; ``name`` is the table's name in errors."""
    reader = csv.DictReader(lines)
    missing = [column for column in _REQUIRED if column not in (reader.fieldnames or ())]
    if missing:
        raise PublishedRunError(
            f"{name} lacks the columns {', '.join(missing)}: the header is that of {TABLE.name}"
        )
    return tuple(_row(values) for values in reader)


_COLUMNS = {name: kind for name, kind in get_type_hints(PublishedRun).items() if name != "unreadable"}


def _row(cells: dict[str, str | None]) -> PublishedRun:
    wrong: list[str] = []
    values: dict[str, Any] = {}
    for column, kind in _COLUMNS.items():
        text = (cells.get(column) or "").strip()
        value = text if kind is str else _value(text, column, kind, wrong)
        if value not in ("", None):
            values[column] = value
    run = PublishedRun(**values)
    if run.ran_out_of_memory and (run.timed or run.memory_gb):
        wrong.append("outcome is 'out of memory' beside figures of a run that ran: leave out one of the two")
    return replace(run, unreadable="; ".join(wrong))


_NOT_STATED = {"", "-", "?", "n/a", "na", "nan", "none", "null", "unknown", "not stated"}
_WORDS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def _value(text: str, column: str, kind: Any, wrong: list[str]) -> float | bool | str | None:
    """Return the cell's value by the type of its field, ``None`` if it is not stated; an unreadable cell is added to ``wrong``."""
    if text.lower() in _NOT_STATED:
        return None
    if get_origin(kind) is Literal:
        if text in get_args(kind):
            return text
        wrong.append(
            f"{column} is {text!r}: write one of {', '.join(filter(None, get_args(kind)))}, or nothing"
        )
        return None
    if kind is bool:
        if text.lower() not in _WORDS:
            wrong.append(f"{column} is {text!r}: write yes, or no, or nothing")
        return _WORDS.get(text.lower())
    number = _number(text, column, wrong)
    return round(number) if number is not None and int in get_args(kind) else number


def _number(text: str, column: str, wrong: list[str]) -> float | None:
    """Return the number that ``text`` begins with: "3 (FSDP2)" is 3. Text without one, or with one too large, is added to ``wrong``."""
    match = _LEADING_NUMBER.match(text)
    number = float(re.sub(r"[,'\s]", "", match[1])) if match else math.inf
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
    """Time of a step as a row states it."""

    step_s: float
    how: str
    """Column and convention from which it was derived."""


def measured_step(
    run: PublishedRun,
    model: ModelSpec,
    counts: ModelCounts,
    batch: int,
    seq_len: int,
    accelerator: Accelerator,
) -> Measured:
    """Return the seconds of the run's step. Raises ``Excluded`` if no figure states it, or if two contradict each other."""
    tokens_each = batch * seq_len / (run.gpus or 1)
    stated = []
    if run.step_time_s:
        stated.append(Measured(run.step_time_s, "step time"))
    if run.tokens_per_s_per_gpu:
        stated.append(Measured(tokens_each / run.tokens_per_s_per_gpu, "tokens per second"))
    rate = _flop_rate(run, accelerator)
    by_rate = []
    if rate:
        conventions: list[Convention] = [rate[0]]
        # If time is stated too, the rate is only a check, and sources differ in whether they count the causal half.
        if stated and rate[0] == "model":
            conventions.append("model, causal")
        for convention in conventions:
            flops = flops_per_token(convention, model, counts)
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


def _flop_rate(run: PublishedRun, accelerator: Accelerator) -> tuple[Convention, float] | None:
    """Return the FLOP/s of an accelerator with the convention by which its FLOP are counted, if the row has a usable rate."""
    if run.flop_basis == "unreliable":
        return None
    if run.tflops_per_gpu:
        return run.flop_basis, run.tflops_per_gpu * 1e12
    peak = accelerator.flops.get(run.mfu_peak) or accelerator.flops.get("fp16")
    return (run.flop_basis, run.mfu_pct / 100 * peak.value) if run.mfu_pct and peak else None


def flops_per_token(convention: Convention, model: ModelSpec, counts: ModelCounts) -> float:
    """Return the FLOP of a token by this convention."""
    if convention == "model":
        return counts.flops_per_token
    if convention == "model, causal":
        return counts.flops_per_token_causal
    logits = 6 * model.dim * model.vocab_size
    blocks = counts.flops_per_token - logits
    return blocks * 4 / 3 + (logits if convention == "hardware, full recomputation" else 0)
