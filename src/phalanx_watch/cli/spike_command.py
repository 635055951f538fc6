"""``phalanx spike``: the cause of a loss spike, by an exact replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from phalanx.cli.errors import TrustCode, demand_folder, explained, require_trusted_code
from phalanx.cli.output import number_text
from phalanx.command import Argument, AsJson, command_options
from phalanx.command_help import Command
from phalanx.run.fields import POSITIVE

if TYPE_CHECKING:
    from phalanx.train.compare.spike import SpikeFindings
    from phalanx_watch.cli.spike_report import SpikeDocument, SpikeReport

_SLOTS, _LAYERS = 4, 5
"""So many slots and layers are printed; --json has all."""


@dataclass(frozen=True, kw_only=True)
class SpikeOptions:
    run_dir: Annotated[Path, Argument()]
    step: Annotated[int | None, POSITIVE, Argument(metavar="[STEP]")] = None
    ranks: Annotated[int | None, POSITIVE] = None
    """Replay on so many ranks of this machine; as many as the run had if not given."""
    from_start: bool = False
    """Without a checkpoint before STEP, replay more than 20 steps from the beginning."""
    trust_code: TrustCode = False
    as_json: AsJson = False
    """Print one JSON object."""


@click.command("spike", cls=Command)
@command_options(SpikeOptions)
def command(options: SpikeOptions) -> None:
    """Find the cause of the loss spike in STEP of the run in RUN_DIR: a bad batch, the learning rate, the number format or one layer.

    Without STEP it is the newest spike, or the newest step that was not finite. The steps from the last checkpoint before it are computed
    again on this machine, with the bits that the run recorded. The run is not written to.

    Printed are the slots with the largest losses, their documents, the gradient norm of each layer, and a verdict with a remedy. A run that
    computes in a format narrower than fp32 is replayed in fp32 too.

    \b
      phalanx spike runs/quickstart-1f3a9c04
      phalanx spike runs/quickstart-1f3a9c04 812 --ranks 2
      phalanx spike runs/quickstart-1f3a9c04 812 --json

    Exit codes: 0 the step was replayed, 1 it could not be.
    """
    from phalanx.checkpoint.format.errors import CheckpointError
    from phalanx.data.errors import DataError
    from phalanx.launch.local import ReplayError
    from phalanx.observe.event_log import EventLogError
    from phalanx.run.directory.paths import RunDirectoryError
    from phalanx.store.store import StoreError
    from phalanx_watch.cli.spike_report import examine_spike

    demand_folder(options.run_dir)
    with explained(CheckpointError, DataError, EventLogError, ReplayError, RunDirectoryError, StoreError):
        require_trusted_code(options.run_dir, trust_code=options.trust_code)
        report = examine_spike(
            options.run_dir,
            options.step,
            options.ranks or 0,
            from_start=options.from_start,
            progress=lambda line: click.echo(line, err=True),
        )
    if options.as_json:
        import msgspec

        click.echo(msgspec.json.encode(report).decode())
        return
    for line in spike_lines(report):
        click.echo(line)


def spike_lines(report: SpikeReport) -> Iterator[str]:
    """Yield the lines of a report: cause, remedy, exactness, figures, sources, slots, documents and layers."""
    findings = report.findings
    yield click.style(f"step {report.step:,} of {report.run}: {findings.cause}", bold=True)
    yield f"  {findings.sentence}"
    yield f"  remedy: {report.remedy}"
    yield _exactness(report)
    yield from _figures(findings)
    sources = ", ".join(f"{count:,} of {name}" for name, count in report.sources.items() if name)
    if sources:
        yield f"sequences by source: {sources}"
    yield from _slots(findings)
    if report.documents:
        yield "documents with the largest losses in the slots above:"
    for document in report.documents:
        yield from _document(document)
    yield from _layers(findings)


def _exactness(report: SpikeReport) -> str:
    """Return a line on the replayed steps: all numbers have the recorded bits, the first that has not, or none were recorded."""
    steps = (
        f"steps {report.from_step + 1:,} to {report.step:,}, on {report.ranks} rank{'s' * (report.ranks > 1)}"
    )
    if not report.compared:
        return f"replayed: {steps}; the run recorded none of their losses, so that nothing can be compared"
    if not report.unconfirmed:
        return f"replayed: {steps}; all {report.compared} recorded numbers have the same bits"
    other = report.unconfirmed[0]
    return (
        f"replayed: {steps}; NOT with the recorded bits: {other.name} of step {other.step:,} was {number_text(other.logged)}, and is "
        f"{number_text(other.replayed)}. The figures are those of this machine and layout"
    )


def _figures(findings: SpikeFindings) -> Iterator[str]:
    """Yield lines on the step's loss and norm beside the usual ones, its deviations, the batch before, and the step
    in fp32.

    Figures that were not found are left out.
    """
    usual = "" if findings.usual_loss is None else f" (usual {findings.usual_loss:.4g})"
    spike = findings.spike
    of_norm = "" if spike is None else f" (usual {spike.typical_grad_norm:.4g})"
    yield f"loss {findings.loss:.4g}{usual}, gradient norm {findings.grad_norm:.4g}{of_norm}, learning rate {findings.lr:.4g}"
    if spike is not None:
        yield f"the {spike.figure} is {spike.deviations:.3g} deviations above the usual one"
    if not findings.is_applied:
        yield "the step changed no weight"
    if findings.batch_before is not None:
        yield f"batch of the step before, under the same weights: loss {findings.batch_before:.4g}"
    if findings.in_fp32 is not None:
        wide = findings.in_fp32
        yield f"in fp32: loss {wide.loss:.4g}, gradient norm {wide.grad_norm:.4g}, {'a spike too' if wide.is_spike else 'no spike'}"


def _slots(findings: SpikeFindings) -> Iterator[str]:
    """Yield the ``_SLOTS`` slots with the largest losses, and their deviations from the usual one, if that is known."""
    if findings.usual_slot is not None:
        usual, deviation = findings.usual_slot
        count = findings.slot_steps
        spread = f"over {count} step{'s' * (count > 1)}" if count else "by the losses of batches"
        yield f"slots with the largest losses (usual {usual:.4g} ± {deviation:.2g} {spread}):"
    else:
        yield "slots with the largest losses:"
    for slot in findings.slots[:_SLOTS]:
        by = "" if slot.deviations is None else f"  {slot.deviations:+.3g} deviations"
        yield f"  slot {slot.slot:<4} loss {slot.loss:.4g}{by}{'  stands out' if slot.stands_out else ''}"


def _document(document: SpikeDocument) -> Iterator[str]:
    """Yield the lines of a document: place, loss, source and first words."""
    number = "" if document.document is None else f", document {document.document:,}"
    source = f"{document.source} " if document.source else ""
    yield (
        f"  slot {document.slot:<4} loss {document.loss:.4g}, {document.tokens:,} tokens: {source}record {document.record:,}{number}, at byte "
        f"{document.offset_bytes:,} of {document.file}"
    )
    if document.url:
        yield f"            {document.name} of {document.url}"
    yield f"            {document.text}"


def _layers(findings: SpikeFindings) -> Iterator[str]:
    """Yield the gradient norms of the ``_LAYERS`` layers that rose most over the step before, with that ratio.

    If the step before was not replayed, yield the layers with the largest norms.
    """
    layers = findings.layers[:_LAYERS]
    if layers and layers[0].rise is None:
        yield "gradient norm by layer (the step before was not replayed: no checkpoint is far enough back):"
    else:
        yield "gradient norm by layer, the one that rose most first:"
    for layer in layers:
        rise = "" if layer.rise is None else f", {layer.rise:.3g} times that of the step before"
        yield f"  {layer.layer:<12} {layer.norm:.4g}{rise}"
