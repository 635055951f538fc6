"""The stages of a preparation, and the function with which every engine runs a task of a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from phalanx.data.errors import PreparationError
from phalanx.data.portions.find_duplicates import (
    CLUSTER,
    EXACT,
    NEAR,
    READ,
    duplicate_stages,
    find_exact,
    find_near,
    read_and_sketch,
    write_dropped_documents,
)
from phalanx.data.portions.planning.plan import PreparationPlan, software_of
from phalanx.data.portions.tasks import SEAL, Stage, Workplace
from phalanx.data.portions.write_portion import seal, train_tokenizer, write_portion

_WORK: Mapping[str, Callable[[Workplace, int], None]] = MappingProxyType(
    {
        READ: read_and_sketch,
        EXACT: find_exact,
        NEAR: find_near,
        CLUSTER: write_dropped_documents,
        "tokenizer": train_tokenizer,
        "write": write_portion,
        SEAL: seal,
    }
)


def stages_of(plan: PreparationPlan) -> list[Stage]:
    """Return the stages of a plan in order. Each stage needs all stages before it."""
    return [
        *duplicate_stages(plan),
        *([Stage("tokenizer", 1)] if plan.tokenizer == "bpe" else []),
        Stage("write", len(plan.portions)),
        Stage(SEAL, 1),
    ]


def do_task(place: Workplace, stage: str, task: int) -> None:
    """Run a task unless it is done. Raises ``DataError`` and ``StoreError``; the task is then not done."""
    _require_software(place.plan)
    if not place.is_done(stage, task):
        _WORK[stage](place, task)


def _require_software(plan: PreparationPlan) -> None:
    """Raise ``PreparationError`` if this machine's software is not the plan's: it could write other bytes."""
    installed = software_of(plan.recipe)
    if installed != plan.software:
        other = ", ".join(
            f"{name} {installed.get(name)}, planned with {version}"
            for name, version in plan.software.items()
            if installed.get(name) != version
        )
        raise PreparationError(
            f"this worker has other software ({other}), and could write other bytes; install what the plan was made with"
        )
