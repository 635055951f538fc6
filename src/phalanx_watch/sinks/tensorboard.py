"""TensorBoard event files, written by tensorboardX: scalars by step, the resolved run file as hyperparameters, and as text the messages, the
record of each start, the samples, and where the time went.

``tensorboard --logdir RUN_DIRECTORY`` shows them. A start writes the points that a killed one has not written; a step that is done again after
a restart has the same value, and is there once.
"""

import json
from pathlib import Path

from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event as EventRecord
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.summary import hparams, scalar

from phalanx.observe.events import EpochLeft, Event, Message, RunStarted
from phalanx.observe.sinks import (
    GOODPUT_COLUMNS,
    goodput_rows,
    hyperparameters,
    kind_of_tag,
    point_of,
    record,
    scalars,
    step_of,
    texts,
)


class TensorBoardSink:
    def __init__(self, run_directory: Path) -> None:
        """Write into the folder ``tensorboard`` of the run directory; first the run's settings, if they are known."""
        self._newest = newest_steps(run_directory / "tensorboard")
        self._writer = SummaryWriter(logdir=str(run_directory / "tensorboard"))
        self._step, self._directory = 0, run_directory
        self._tags: dict[str, str] = {}
        settings = hyperparameters(run_directory)
        if settings:
            # Not add_hparams, which would make a second, empty run of them.
            for summary in hparams(settings, dict.fromkeys(("train/loss", "eval/loss"), 0.0))[:2]:
                self._writer.file_writer.add_summary(summary)

    def holds(self, event: Event) -> bool:
        point = point_of(event)
        return point is not None and point[1] <= self._newest.get(point[0], 0)

    def write(self, event: Event) -> None:
        """Write the numbers and texts of an event, and on a start, message or end also its record, text or account."""
        self._step = step_of(event) or self._step
        if numbers := scalars(event):
            # In one record: a record of each number takes five times the processor time of the rank that writes it.
            values = [Summary.Value(tag=self._tag(name), simple_value=x) for name, x in numbers.items()]
            self._writer.file_writer.add_summary(Summary(value=values), self._step, event.t)
        for name, text in texts(event).items():
            self._writer.add_text(name, f"```\n{text}\n```", self._step, walltime=event.t)
        rows = goodput_rows(event, self._directory)
        if rows:
            self._writer.add_text("goodput", _table(rows), self._step, walltime=event.t)
        match event.body:
            case RunStarted() as body:
                text = json.dumps(record(body, event.attempt), indent=1)
                self._writer.add_text("record", f"```\n{text}\n```", self._step, walltime=event.t)
            case Message(level=level, text=text):
                self._writer.add_text("messages", f"{level}: {text}", self._step, walltime=event.t)
            case EpochLeft(text=text):
                self._writer.add_text("messages", f"warning: {text}", self._step, walltime=event.t)

    def _tag(self, name: str) -> str:
        """Return the name in TensorBoard's character set, as tensorboardX writes it."""
        if name not in self._tags:
            self._tags[name] = scalar(name, 0.0).value[0].tag
        return self._tags[name]

    def close(self) -> None:
        self._writer.close()


def newest_steps(folder: Path) -> dict[str, int]:
    """Return the newest step of each kind of point in the event files of a folder; a file that a killed writer left torn counts up to there.

    A file is a sequence of records: length (8 bytes), its checksum (4), the record, its checksum (4).
    """
    newest: dict[str, int] = {}
    for path in sorted(folder.glob("events.out.tfevents.*"), reverse=True):
        with path.open("rb") as file:
            while len(header := file.read(12)) == 12:
                data = file.read(int.from_bytes(header[:8], "little"))
                if len(file.read(4)) < 4:
                    break
                record = EventRecord.FromString(data)
                for value in record.summary.value:
                    if kind := kind_of_tag(value.tag):
                        newest[kind] = max(newest.get(kind, 0), record.step)
        if "Step" in newest:
            break
    return newest


def _table(rows: list[tuple[str, float, float]]) -> str:
    """Return a table in Markdown, which TensorBoard renders."""
    lines = [f"| {' | '.join(GOODPUT_COLUMNS)} |", "|---|---:|---:|"]
    return "\n".join(
        [*lines, *(f"| {part} | {seconds:.3f} | {share:.2%} |" for part, seconds, share in rows)]
    )
