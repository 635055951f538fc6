"""What of a run's own steps a score cannot repeat, said in one sentence."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.run.spec import RunSpec


def other_arithmetic(spec: RunSpec, compute: str, *, on_gpu: bool = False) -> str:
    """One sentence on why scores in the format ``compute`` may differ by roundings from what the run's steps computed; empty if
    they do not."""
    reasons = list(_reasons(spec, compute, on_gpu=on_gpu))
    if not reasons:
        return ""
    if on_gpu:
        where = "GPU, with rows that are independent of each other"
    else:
        where = "CPU" if spec.model.factory else "CPU with portable numerics"
    return (
        f"these are not bit by bit the numbers of the run's own steps, which computed {_joined(reasons)}: "
        f"scores come of the whole model, uncompiled, on one {where}"
    )


def _joined(words: list[str]) -> str:
    return " and ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]


def _reasons(spec: RunSpec, compute: str, *, on_gpu: bool) -> Iterator[str]:
    model, parallel = spec.model, spec.parallel
    if spec.runtime.device == "cuda" and not on_gpu:
        yield "on GPUs (runtime.device)"
    elif spec.runtime.device == "cpu" and on_gpu:
        yield "on CPUs (runtime.device)"
    elif spec.runtime.numerics == "native" and not on_gpu and not model.factory:
        yield 'with kernels of their processor (runtime.numerics = "native")'
    if model.factory:
        yield "a module of the user's own (model.factory), whose rows may depend on those beside them"
    if spec.precision.compute != compute:
        yield f"in {spec.precision.compute} (precision.compute)"
    if spec.precision.matmul != "compute":
        yield f"products of 8-bit operands (precision.matmul = {spec.precision.matmul!r})"
    if model.moe is not None and spec.precision.rows == "any" and on_gpu:
        yield 'each expert\'s rows without padding (precision.rows = "any")'
    if spec.runtime.compile:
        yield "with compiled blocks (runtime.compile)"
    if spec.train.document_mask:
        yield "attention for each document by itself (train.document_mask)"
    for path, degree in (
        ("parallel.context", parallel.context),
        ("parallel.tensor", parallel.tensor),
        ("parallel.expert_tensor", parallel.expert_tensor),
    ):
        if degree > 1:
            yield f"sums over {degree} ranks ({path})"
    for path, count in (("model.lanes", model.lanes), ("model.context_tiles", model.context_tiles)):
        if count:
            yield f"in {count} pieces ({path})"
