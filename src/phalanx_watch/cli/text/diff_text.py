"""The text of ``phalanx diff``: what two runs differ in, a line for each thing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from phalanx.cli.output import MOST, left_out_lines, number_text
from phalanx.train.compare.runs import RunComparison, Verdict


def comparison_lines(found: RunComparison, one: Path, other: Path) -> Iterator[str]:
    """What the run directories say."""
    yield f"A  {one}"
    yield f"B  {other}"
    yield _kinship(found)
    for field in found.fields:
        yield f"  field of the {field.owner:<6}  {field.path}: {field.one!r} in A, {field.other!r} in B"
    for name, (left, right) in found.record.items():
        yield f"  recorded             {name}: {left!r} in A, {right!r} in B"
    if found.numbers is None:
        yield f"logged: the numbers of all {found.steps_compared} common steps are equal"
    else:
        before = f"equal up to step {found.last_equal_step}, then " if found.last_equal_step else ""
        yield f"logged: {before}different at step {found.numbers.step}"
        for name, (a, b) in found.numbers.numbers.items():
            yield f"  {name:<14} {number_text(a)} in A, {number_text(b)} in B"
    read = ", ".join(map(str, found.checkpoints_compared)) or "none"
    if found.checkpoint is None:
        yield f"checkpoints of the same steps: {read}" + (" (equal)" if found.checkpoints_compared else "")
    else:
        tensors = found.checkpoint.tensors
        count = "1 tensor" if len(tensors) == 1 else f"{len(tensors)} tensors"
        yield f"checkpoints of the same steps: {read}; that of step {found.checkpoint.step} differs in {count}"
        for tensor in tensors[:MOST]:
            yield f"  {tensor.name}: {tensor.what}"
        if len(tensors) > MOST:
            yield f"  ... and {len(tensors) - MOST} more"
    yield from (f"note: {note}" for note in found.notes)
    yield (
        "nothing that was computed differs"
        if found.equal
        else f"the runs part at step {found.parts_at}, or before it"
    )


def _kinship(found: RunComparison) -> str:
    """How far the two runs are the same."""
    if found.same_run:
        return "the same run and the same data: every bit should be equal"
    if "data_fingerprint" not in found.record and all(field.owner != "run" for field in found.fields):
        return "the same run and the same data on other layouts, which decide how sums are split"
    return "two different runs (fields of the run, or their data, differ): compared as far as they go"


def verdict_lines(verdict: Verdict) -> Iterator[str]:
    """What replays of both runs say."""
    origin = f"from the checkpoint of step {verdict.from_step}" if verdict.from_step else "from the beginning"
    yield f"replayed {origin} to step {verdict.to_step}: {verdict.compared.observations:,} tensors compared"
    yield verdict.sentence
    for one in verdict.unconfirmed:
        yield f"  {one.run} logged {one.name} {number_text(one.logged)} at step {one.step}, its replay gives {number_text(one.replayed)}"
    yield from left_out_lines(verdict.compared)
