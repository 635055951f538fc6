"""The words of a profile: what a moment of a rank is spent on, and what kind of operation runs."""

from __future__ import annotations

import re

COMPUTE, COPY, OPTIMIZER, DATA, BUBBLE = "compute", "copies", "optimizer", "data wait", "bubble"
BETWEEN, INSIDE = "host gap between steps", "host gap inside steps"
SAVE, EVALUATION, AUDIT, LOG = "save and snapshot", "evaluation", "audit", "log"
COMM = "communication: "
"""Before the name of an axis: time in its collectives that nothing hides."""
GAPS = (BETWEEN, INSIDE, LOG)
"""Time in which a rank computes nothing and waits for nobody."""
ORDER = (COMPUTE, COPY, OPTIMIZER, BUBBLE, DATA, INSIDE, BETWEEN, LOG, SAVE, EVALUATION, AUDIT)

_OF_BUCKET = {
    "step.data_wait": DATA,
    "step.optimizer": OPTIMIZER,
    "ckpt.blocking": SAVE,
    "eval": EVALUATION,
    "health.sdc_check": AUDIT,
}
_OF_WORK = {"save": SAVE, "snapshot": SAVE, "log": LOG, "norm": COMPUTE}
_COPIES = re.compile(
    r"aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|_pin_memory|pad|constant_pad_nd|split_with_sizes_copy)$"
)
_PRODUCTS = re.compile(r"aten::(mm|addmm|bmm|baddbmm|_scaled_mm|_grouped_mm|linear|matmul|addmv|mv|dot)$")
_LOOKUPS = re.compile(r"aten::(embedding|index|gather|scatter|take|where|masked)")
_COLLECTIVE_KERNEL = re.compile(r"nccl|gloo|rccl", re.IGNORECASE)


def category_of_mark(kind: str, name: str, axis: str) -> str | None:
    """What the time of a range is spent on, if the range itself says so; ``None`` if what is around it does."""
    if kind == "bucket":
        return _OF_BUCKET.get(name)
    if kind == "work":
        return _OF_WORK.get(name)
    if kind in ("collective", "wait", "send"):
        return BUBBLE if axis == "pipeline" and kind == "wait" else COMM + axis
    return BUBBLE if kind == "receive" else None


def kind_of(name: str) -> str:
    """The kind of an operation of PyTorch's or of a kernel, by its name."""
    if "attention" in name or "flash" in name or "fmha" in name:
        return "attention"
    if _PRODUCTS.match(name) or "gemm" in name or "cutlass" in name or "nvjet" in name:
        return "matrix products"
    if _COPIES.match(name) or "memcpy" in name.lower() or "memset" in name.lower():
        return "copies"
    return "lookups" if _LOOKUPS.match(name) else "elementwise and sums"


def is_collective_kernel(name: str) -> bool:
    """True for a kernel of a communication library."""
    return _COLLECTIVE_KERNEL.search(name) is not None


def axis_of(category: str) -> str | None:
    """The axis of a category of communication; ``None`` for others."""
    return category.removeprefix(COMM) if category.startswith(COMM) else None


def duration(seconds: float) -> str:
    """Seconds for people, in milliseconds below one."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def in_order(categories: set[str]) -> list[str]:
    """Categories as tables show them: computing first, then communication by axis, then what is idle."""
    place = {name: number for number, name in enumerate(ORDER)}
    return sorted(categories, key=lambda name: (place.get(name, 2.5), name))
