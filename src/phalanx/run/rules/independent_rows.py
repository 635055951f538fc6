"""Rules of ``precision.rows = "independent"``: what would make a row's bits depend on the rows beside it, refused by its field.

Element-wise functions such as ``silu`` are computed 32 elements at a time on a CPU, and what is left over in another way. With rows in
multiples of 4 that never happens if widths are multiples of 8; an expert has any number of rows, so its width is a multiple of 32.
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.run.problems import Problem
from phalanx.run.spec import RunSpec

_ROWS, _WIDTH, _EXPERT_WIDTH = 4, 8, 32


def problems(spec: RunSpec) -> Iterator[Problem]:
    """The fields of ``spec`` with which rows cannot be independent."""
    if spec.precision.rows != "independent":
        return
    for path, found in (
        ("runtime.compile", "the compiler chooses kernels by shape" if spec.runtime.compile else ""),
        ("parallel.context", _context(spec)),
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
        if found:
            remedy = 'leave it at its default, or set precision.rows = "any"'
            yield Problem(
                path, found + ", which rows that are independent do not allow", remedy, ("precision.rows",)
            )
    if not spec.model.factory:
        yield from _widths(spec)


def _context(spec: RunSpec) -> str:
    return "partial results are merged in an order of their own" if spec.parallel.context > 1 else ""


def _divided(degree: int) -> str:
    return (
        f"sums over {degree} ranks are added in an order that depends on the row's place"
        if degree > 1
        else ""
    )


def _widths(spec: RunSpec) -> Iterator[Problem]:
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
