"""Rules for combinations of a run's fields, with remedies: the model, the batch, checkpoints, the fleet.

The rules of each kind of layer are in its file in ``phalanx.run.kinds``. The rules of layouts (which degrees fit the model, the batch and the number
of ranks) are in ``phalanx.run.layout``. Both are checked from here.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Literal

from phalanx.run.factory import is_factory_name
from phalanx.run.fields import Problem, divisors_near
from phalanx.run.kinds import latent_attention, whole_model
from phalanx.run.peers import AddressError, read_host
from phalanx.run.sections.monitoring import NAME, evaluation_problems
from phalanx.run.smaller_degrees import problems_on, smaller_degree_problems
from phalanx.run.spec import (
    CheckpointSpec,
    DataSpec,
    FleetSpec,
    ModelSpec,
    RopeScalingSpec,
    RunSpec,
    SourceSpec,
    TrainSpec,
)


def check(spec: RunSpec) -> list[Problem]:
    """Return all impossible combinations of fields in ``spec``, each with the fields concerned, those of its ranks
    included. Nothing is read or imported.
    """
    model = _custom_model(spec) if spec.model.factory else _model(spec.model)
    fleet = _fleet(spec.fleet)
    return [
        *_directory(spec.name, spec.run_dir),
        *model,
        *independent_rows_problems(spec),
        *portable_problems(spec),
        *expected_weights_problems(spec),
        *_absorbed(spec),
        *mixture_problems(spec.data),
        *evaluation_problems(spec.evaluation, spec.train.seq_len),
        *_train(spec.train),
        *_fork(spec),
        *_checkpoint(spec.checkpoint, spec.fleet),
        *_metrics_host(spec.observe.metrics_host),
        *fleet,
        *smaller_degree_problems(spec),
        *problems_on(spec, spec.parallel.ranks),
    ]


def _absorbed(spec: RunSpec) -> Iterator[Problem]:
    """Yield a problem for absorbed latent attention with 8-bit products: heads multiply with their own parts of a
    matrix, which no such product does.
    """
    if latent_attention.is_absorbed(spec.model) and spec.precision.matmul != "compute":
        yield Problem(
            "model.mla.absorbed",
            f"absorbed latent attention has no products of 8-bit operands, which precision.matmul = {spec.precision.matmul!r} requires",
            'set precision.matmul = "compute", or leave this out, so that keys and values are expanded',
            ("precision.matmul",),
        )


def _directory(name: str, run_dir: str) -> Iterator[Problem]:
    """Yield the problems of a ``name`` that cannot be a folder's, and of a ``run_dir`` that is a URL."""
    if (
        name in ("", ".", "..")
        or "/" in name
        or not name.isprintable()
        or len(name) > 100
        or len(name.encode()) > 200
    ):
        yield Problem(
            "name",
            f"{name[:100]!r} cannot be the name of a folder",
            "up to 100 visible characters of at most 200 bytes, without slashes; for a run directory elsewhere, set run_dir",
        )
    if "://" in run_dir:
        yield Problem(
            "run_dir",
            f"{run_dir} is a URL, and a run directory is a folder",
            "give a folder, which may be empty, and name the store in checkpoint.store: the run resumes from the newest checkpoint there",
            ("checkpoint.store",),
        )


def _metrics_host(host: str) -> Iterator[Problem]:
    """Yield a problem if ``host`` is no name or IP address; empty is allowed."""
    try:
        read_host(host or "::")
    except AddressError as error:
        yield Problem(
            "observe.metrics_host", str(error), "the port is observe.metrics_port", ("observe.metrics_port",)
        )


def _checkpoint(checkpoint: CheckpointSpec, fleet: FleetSpec) -> Iterator[Problem]:
    """Yield the problems of an origin without a checkpoint, of copies without a store, of chosen saves with audits,
    and of a failure interval that is not used.
    """
    if checkpoint.init_with != "weights" and not checkpoint.init_from:
        yield Problem(
            "checkpoint.init_with",
            f'"{checkpoint.init_with}" of no checkpoint',
            "name a run directory or a checkpoint in checkpoint.init_from",
            ("checkpoint.init_from",),
        )
    default = CheckpointSpec()
    for name in ("store_every_steps", "store_keep_last", "store_keep_every", "store_mib_s"):
        if not checkpoint.store and getattr(checkpoint, name) != getattr(default, name):
            yield Problem(
                f"checkpoint.{name}",
                "there is no store for it",
                "name one in checkpoint.store, or leave this out",
                ("checkpoint.store",),
            )
    if fleet.audit_every_steps and not checkpoint.every_steps:
        yield Problem(
            "checkpoint.every_steps",
            f"0 chooses steps that need not be audited, and fleet.audit_every_steps = {fleet.audit_every_steps} can go back to audited ones only",
            f"a multiple of {fleet.audit_every_steps}",
            ("fleet.audit_every_steps",),
        )
    if checkpoint.hours_between_failures and checkpoint.every_steps:
        yield Problem(
            "checkpoint.hours_between_failures",
            f"has no part in saving every {checkpoint.every_steps} steps",
            "set checkpoint.every_steps = 0, which chooses the interval by it, or leave it out",
            ("checkpoint.every_steps",),
        )


def _fleet(fleet: FleetSpec) -> Iterator[Problem]:
    """Yield a problem if a lease is shorter than two heartbeats: with one heartbeat lost, every node would be
    declared lost again and again.
    """
    if fleet.lease_s < 2 * fleet.heartbeat_s:
        yield Problem(
            "fleet.lease_s",
            f"{fleet.lease_s:g} s without a heartbeat, which comes every {fleet.heartbeat_s:g} s, would end a healthy node",
            f"at least {2 * fleet.heartbeat_s:g}, or a smaller fleet.heartbeat_s",
            ("fleet.heartbeat_s",),
        )


def _custom_model(spec: RunSpec) -> Iterator[Problem]:
    """Yield the settings that a user's own model does not support: a malformed factory name, division over tensor,
    context or expert ranks, layers of this project, document masks, 8-bit products.
    """
    model, parallel = spec.model, spec.parallel
    if not is_factory_name(model.factory):
        yield Problem("model.factory", f"{model.factory!r} names no factory", 'write "package.module:name"')
    for path, degree in (
        ("parallel.tensor", parallel.tensor),
        ("parallel.context", parallel.context),
        ("parallel.expert", parallel.expert),
        ("parallel.expert_tensor", parallel.expert_tensor),
    ):
        if degree > 1:
            yield Problem(
                path,
                f"{model.factory} does not state how its blocks are divided over {degree} ranks",
                "set it to 1; a model of your own can be divided over shards and over a pipeline of its blocks",
                ("model.factory",),
            )
    refused = list(whole_model.described_layers(model))
    if spec.train.document_mask:
        refused.append(("train.document_mask", "set it to false: blocks are called with hidden states alone"))
    if spec.precision.matmul != "compute":
        refused.append(("precision.matmul", 'set it to "compute"'))
    for path, remedy in refused:
        problem = f"this describes Phalanx's transformer, and {model.factory} is a model of your own"
        yield Problem(path, problem, remedy, ("model.factory",))


def _model(model: ModelSpec) -> Iterator[Problem]:
    yield from whole_model.problems(model)
    if model.rope_scaling is not None:
        yield from _rope_scaling(model.rope_scaling)


def _rope_scaling(scaling: RopeScalingSpec) -> Iterator[Problem]:
    """Yield the problem of a Llama 3 or YaRN band whose upper end is below its lower, or of a LongRoPE context too
    short to give a temperature that is not stated.
    """
    if scaling.kind == "llama3" and scaling.high_freq_factor < scaling.low_freq_factor:
        yield Problem(
            "model.rope_scaling.high_freq_factor",
            f"{scaling.high_freq_factor:g} is below low_freq_factor {scaling.low_freq_factor:g}",
            "the band between the two is where frequencies are blended",
            ("model.rope_scaling.low_freq_factor", "model.rope_scaling"),
        )
    if scaling.kind == "longrope" and scaling.original_max_seq_len < 2 and not scaling.temperature:
        yield Problem(
            "model.rope_scaling.original_max_seq_len",
            f"{scaling.original_max_seq_len} gives no temperature",
            "at least 2, or set model.rope_scaling.temperature",
            ("model.rope_scaling.temperature", "model.rope_scaling"),
        )
    if scaling.kind == "yarn" and scaling.beta_fast < scaling.beta_slow:
        yield Problem(
            "model.rope_scaling.beta_fast",
            f"{scaling.beta_fast:g} is below beta_slow {scaling.beta_slow:g}",
            "the band between the two is where frequencies are blended",
            ("model.rope_scaling.beta_slow", "model.rope_scaling"),
        )


def _train(train: TrainSpec) -> Iterator[Problem]:
    """Yield the problem of a batch that does not divide into slots, or else of a slot that does not divide into micro-batches."""
    if train.batch_size % train.slots:
        yield Problem(
            "train.slots",
            f"a batch of {train.batch_size} sequences cannot be divided into {train.slots} equal slots",
            f"{divisors_near(train.batch_size, train.slots)} divide {train.batch_size}",
            ("train.batch_size",),
        )
        return
    per_slot = train.batch_size // train.slots
    if train.micro_batch_size and per_slot % train.micro_batch_size:
        yield Problem(
            "train.micro_batch_size",
            f"a slot of {per_slot} sequences cannot be divided into micro-batches of {train.micro_batch_size}",
            f"{divisors_near(per_slot, train.micro_batch_size)} divide {per_slot}",
            ("train.slots", "train.batch_size"),
        )


def _fork(spec: RunSpec) -> Iterator[Problem]:
    """Yield the reasons for which a run cannot fork at its spikes; none if it does not. They are no or repeated
    candidates, "clip" or "wide" without effect, "wide" with compilation, and audits.
    """
    if spec.train.on_spike != "fork":
        return
    candidates = spec.spike.candidates
    if not candidates or len(set(candidates)) < len(candidates):
        yield Problem(
            "spike.candidates",
            "has a candidate twice" if candidates else "is empty, so that a fork has nothing to try",
            'name each once, as in ["skip", "rate"]',
        )
    if "clip" in candidates and not spec.optimizer.clip_norm:
        yield Problem(
            "spike.candidates",
            '"clip" lowers optimizer.clip_norm, and 0 is no clipping',
            'set optimizer.clip_norm, or leave "clip" out',
            ("optimizer.clip_norm",),
        )
    if "wide" in candidates and spec.precision.matmul == "compute":
        yield Problem(
            "spike.candidates",
            '"wide" computes products in precision.compute, as they are already; a run cannot change precision.compute, for which its model is built',
            'leave "wide" out; phalanx spike repeats a spike in fp32, and phalanx train RUN_DIR --from STEP --set precision.compute=fp32 continues in it',
            ("precision.matmul",),
        )
    if "wide" in candidates and spec.runtime.compile:
        yield Problem(
            "spike.candidates",
            '"wide" changes products that runtime.compile = true has compiled into the blocks',
            'set runtime.compile = false, or leave "wide" out',
            ("runtime.compile",),
        )
    if spec.fleet.audit_every_steps:
        yield Problem(
            "train.on_spike",
            f"the steps of a fork are not audited, and fleet.audit_every_steps = {spec.fleet.audit_every_steps} audits all steps",
            'set fleet.audit_every_steps = 0, or train.on_spike = "skip"',
            ("fleet.audit_every_steps",),
        )


# Rules of ``runtime.numerics = "portable"``: settings that its kernels do not support are refused.
#
# Ranks of such a run use kernels with defined operations (``phalanx.hardware.portable``). So x86-64 processors with AVX2 and
# 64-bit Arm processors compute the same bits, with any number of threads and any release of PyTorch.


ARITHMETIC = "portable 2"
"""Name of the definition of portable numerics. A change of any bit needs a new name, which changes the identity of runs."""
_FACTORS = ("shampoo", "soap")


class NotPortableError(RuntimeError):
    """This process cannot compute with portable numerics; the message is the reason, and what to do about it."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(f"{reason}: {remedy}" if remedy else reason)
        self.reason = reason


def portable_problems(spec: RunSpec) -> Iterator[Problem]:
    """Yield the fields that portable numerics does not allow; none for a run with other numerics."""
    if spec.runtime.numerics != "portable":
        return
    for path, reason in not_portable(spec):
        yield Problem(
            path,
            f"{reason}, which portable numerics does not allow",
            'leave it at its default, or set runtime.numerics = "native"',
            ("runtime.numerics",),
        )


def not_portable(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield the fields of ``spec`` whose values portable kernels do not compute, each with the reason, for any numerics."""
    optimizer = spec.optimizer.name
    for path, reason in (
        ("runtime.device", "it is arithmetic of CPUs" if spec.runtime.device == "cuda" else ""),
        ("runtime.compile", "the compiler makes kernels of its own" if spec.runtime.compile else ""),
        (
            "optimizer.name",
            f"{optimizer} factors matrices with LAPACK, whose bits are the machine's" if optimizer in _FACTORS else "",
        ),
        ("model.factory", "what a model of your own computes is not known" if spec.model.factory else ""),
    ):  # fmt: skip
        if reason:
            yield path, reason


# Rules of ``precision.rows = "independent"``: settings with which a row's bits would depend on other rows are refused.
#
# On a CPU, element-wise functions such as ``silu`` are computed 32 elements at a time, and remainders with other instructions.
# With rows in multiples of 4, there are no remainders if widths are multiples of 8. An expert has any number of rows, so its
# width must be a multiple of 32.


_ROWS, _WIDTH, _EXPERT_WIDTH = 4, 8, 32


def independent_rows_problems(spec: RunSpec) -> Iterator[Problem]:
    """Yield a problem for each field of ``spec`` with which rows cannot be independent: compilation, divided rows or
    sums, 8-bit products, a user's model, and widths. Yield nothing unless ``precision.rows`` is "independent".
    """
    if spec.precision.rows != "independent":
        return
    for path, problem in (
        ("runtime.compile", "the compiler chooses kernels by shape" if spec.runtime.compile else ""),
        (
            "parallel.context",
            "partial results are merged in an order of their own" if spec.parallel.context > 1 else "",
        ),
        ("parallel.tensor", _divided(spec.parallel.tensor)),
        ("parallel.expert_tensor", _divided(spec.parallel.expert_tensor)),
        (
            "precision.matmul",
            "scales or kernels of 8-bit formats are not kept apart by row"
            if spec.precision.matmul != "compute"
            else "",
        ),
        ("model.factory", "what a model of your own computes is not known" if spec.model.factory else ""),
    ):
        if problem:
            remedy = 'leave it at its default, or set precision.rows = "any"'
            yield Problem(
                path, problem + ", which rows that are independent do not allow", remedy, ("precision.rows",)
            )
    if not spec.model.factory:
        yield from _widths(spec)


def _divided(degree: int) -> str:
    """Return why ``degree`` ranks prevent independent rows; empty for one rank."""
    return (
        f"sums over {degree} ranks are added in an order that depends on the row's place"
        if degree > 1
        else ""
    )


def _widths(spec: RunSpec) -> Iterator[Problem]:
    """Yield a problem for each size that is no multiple of what independent rows need: ``model.dim`` and ``ffn_dim``,
    sequence length, loss chunk, and of a mixture experts' width and number.

    The caller checks whether ``precision.rows`` requires this at all.
    """
    model, moe = spec.model, spec.model.moe
    widths = [
        ("model.dim", model.dim, _WIDTH),
        ("model.ffn_dim", model.ffn_dim, _WIDTH),
        ("train.seq_len", spec.train.seq_len, _ROWS),
        ("train.loss_chunk", spec.train.loss_chunk, _ROWS),
    ]
    if moe is not None:
        widths += [
            ("model.moe.ffn_dim", moe.ffn_dim, _EXPERT_WIDTH),
            ("model.moe.experts", moe.experts, _WIDTH),
        ]
    for path, width, multiple in widths:
        if width % multiple:
            yield Problem(
                path,
                f'{width} leaves rows or elements over, which precision.rows = "independent" does not allow',
                f'a multiple of {multiple}, or precision.rows = "any"',
                ("precision.rows",),
            )


# Rules of ``[[data.sources]]`` and ``data.stages`` that can be checked without looking at a dataset.


MOST_SOURCES = 4096
"""More are likelier a mistake than a mixture; each is opened by every rank."""


def stages_of(data: DataSpec) -> tuple[int, ...]:
    """The numbers of steps after which each stage begins."""
    return data.stages or (0,)


def mixture_problems(data: DataSpec) -> Iterator[Problem]:
    """Yield all that is impossible in a run's sources and stages, ``data.path`` or ``data.corpus`` beside sources,
    and cache settings without a store. After too many sources nothing further is checked. Nothing on disk is looked
    at.
    """
    yield from _cache_problems(data)
    if not data.sources:
        if data.stages:
            remedy = "add [[data.sources]], or leave data.stages out"
            yield Problem("data.stages", "there are no sources whose weights could change", remedy)
        return
    if data.path != DataSpec().path:
        yield Problem(
            "data.path",
            "the run has data.sources, and would read one or the other",
            "leave out one of the two",
            ("data.sources",),
        )
    if data.corpus:
        remedy = "prepare each source with `phalanx data prepare`, and leave data.corpus out"
        yield Problem(
            "data.corpus", "text is prepared for data.path, not for data.sources", remedy, ("data.sources",)
        )
    if len(data.sources) > MOST_SOURCES:
        problem = f"{len(data.sources)} sources are too many"
        yield Problem("data.sources", problem, f"at most {MOST_SOURCES}; prepare some of them together")
        return
    stages = stages_of(data)
    if stages[0] != 0 or any(a >= b for a, b in itertools.pairwise(stages)):
        remedy = "steps in rising order, 0 first, such as [0, 90000]"
        yield Problem("data.stages", f"{list(stages)} are no stages of one run", remedy)
    names = [source.name for source in data.sources]
    for number, source in enumerate(data.sources):
        yield from _source(source, f"data.sources[{number}]", len(stages))
        if source.name in names[:number]:
            problem = f"two sources are called {source.name!r}"
            yield Problem(f"data.sources[{number}].name", problem, "give each a name of its own")
    if all(len(source.weights) == len(stages) for source in data.sources):
        for number, step in enumerate(stages):
            if not any(source.weights[number] for source in data.sources):
                problem = f"all weights of the stage that begins after step {step} are 0"
                yield Problem("data.sources", problem, "give a source a weight there")


def _cache_problems(data: DataSpec) -> Iterator[Problem]:
    """Yield the cache settings that differ from their default although all data are in folders."""
    places = [source.path for source in data.sources] or [data.path]
    if any("://" in place for place in places):
        return
    for name in ("cache", "cache_gib", "read_ahead_mib", "timeout_s"):
        if getattr(data, name) != getattr(DataSpec(), name):
            problem = "is about datasets in object stores, and the run reads folders"
            yield Problem(f"data.{name}", problem, "leave it out", ("data.path",))


def _source(source: SourceSpec, path: str, stages: int) -> Iterator[Problem]:
    """Yield the problems of a source's name, path, weights (one for each stage) and used part."""
    if not NAME.fullmatch(source.name):
        problem = f"{source.name[:100]!r} is no name of a source"
        yield Problem(f"{path}.name", problem, 'letters, digits, "-" and "_", such as "web"')
    if not source.path:
        yield Problem(f"{path}.path", "is missing", "the folder of a prepared dataset")
    if len(source.weights) != stages:
        has, are = _count(len(source.weights), "entry", "entries"), _count(stages, "stage", "stages")
        problem = f"weights of {source.name!r} has {has}, and there {'is' if stages == 1 else 'are'} {are}"
        yield Problem(f"{path}.weights", problem, "one for each step of data.stages", ("data.stages",))
    elif not all(math.isfinite(weight) and weight >= 0 for weight in source.weights):
        yield Problem(f"{path}.weights", f"{list(source.weights)} are no weights", "numbers of at least 0")
    if len(source.use) != 2 or not 0 <= source.use[0] < source.use[1] <= 1:
        problem = f"{list(source.use)} is no part of a dataset"
        yield Problem(f"{path}.use", problem, "two fractions, such as [0.0, 0.95]")


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"


# Compare a finished run's weights with those that its run file expects (``[expect]``).


Comparison = Literal["equal", "different", "not expected"]
_ENTRY = re.compile(r"[0-9a-f]{8,64} [0-9a-f]{64}")


def expected_weights_problems(spec: RunSpec) -> Iterator[Problem]:
    """Yield the entries of ``expect.weights`` that are not a run's key of 8 to 64 hexadecimal digits and a SHA-256."""
    for number, entry in enumerate(spec.expect.weights):
        if not _ENTRY.fullmatch(entry):
            yield Problem(
                f"expect.weights[{number}]",
                f"{entry[:100]!r} is not a run's key and a hash",
                "8 to 64 hexadecimal digits of the key (the run directory's name ends with 8), a space, and the 64 of the weights' SHA-256",
            )


def compared(spec: RunSpec, key: str, weights_sha256: str) -> Comparison | None:
    """Return "equal" or "different" for the weights of the run with ``key``, by the hashes that ``spec`` expects for a
    prefix of its key. "not expected" if the list names none for it, None without a list.
    """
    if not spec.expect.weights:
        return None
    expected = (entry.split() for entry in spec.expect.weights)
    hashes = {sha256 for run, sha256 in expected if key.startswith(run)}
    if not hashes:
        return "not expected"
    return "equal" if weights_sha256 in hashes else "different"
