"""TensorBoard event files, written by tensorboardX: scalars by step, messages as text.

``tensorboard --logdir RUN_DIRECTORY`` shows them. A step done again after a restart is written again
with the same number; the value is the same, so TensorBoard's curve is too.
"""

from pathlib import Path

from tensorboardX import SummaryWriter

from phalanx.observe.events import EpochLeft, Event, Message
from phalanx.observe.sinks.base import scalars, step_of


class TensorBoardSink:
    def __init__(self, directory: Path) -> None:
        self._writer = SummaryWriter(logdir=str(directory))
        self._step = 0

    def write(self, event: Event) -> None:
        self._step = step_of(event) or self._step
        for tag, value in scalars(event).items():
            self._writer.add_scalar(tag, value, self._step, walltime=event.t)
        match event.body:
            case Message(level=level, text=text):
                self._writer.add_text("messages", f"{level}: {text}", self._step, walltime=event.t)
            case EpochLeft(text=text):
                self._writer.add_text("messages", f"warning: {text}", self._step, walltime=event.t)

    def close(self) -> None:
        self._writer.close()
