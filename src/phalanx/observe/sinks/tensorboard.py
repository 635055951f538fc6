"""TensorBoard event files, written by tensorboardX: scalars by step, messages as text, the resolved run
file as hyperparameters.

``tensorboard --logdir RUN_DIRECTORY`` shows them. A step done again after a restart is written again
with the same number; the value is the same, so TensorBoard's curve is too.
"""

from pathlib import Path

from tensorboardX import SummaryWriter
from tensorboardX.summary import hparams

from phalanx.observe.events import EpochLeft, Event, Message
from phalanx.observe.sinks.base import hyperparameters, scalars, step_of


class TensorBoardSink:
    def __init__(self, run_directory: Path) -> None:
        """Writes into the folder ``tensorboard`` of the run directory."""
        self._writer = SummaryWriter(logdir=str(run_directory / "tensorboard"))
        self._step = 0
        settings = hyperparameters(run_directory)
        if settings:
            # Not add_hparams, which would make a second, empty run of them.
            for summary in hparams(settings, dict.fromkeys(("train/loss", "eval/loss"), 0.0))[:2]:
                self._writer.file_writer.add_summary(summary)

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
