"""The trackers that a run file may name, each imported only when it is opened.

A missing package or an unknown name is reported before training starts; everything else about a tracker happens on
its own thread (``background``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from phalanx.observe.sinks.background import CLOSE_TIMEOUT_S, Background
from phalanx.observe.sinks.base import Sink


class SinkError(Exception):
    """A sink was asked for that cannot be had; the message says what to install or to write."""


@dataclass(frozen=True)
class Vendor:
    """A supported tracker, and the module it needs, which has the name of its package."""

    module: str
    open_sink: Callable[[Path, str], Sink]


def _open_tensorboard(run_directory: Path, run: str) -> Sink:  # noqa: ARG001 (the folder names the run)
    from phalanx.observe.sinks.tensorboard import TensorBoardSink

    return TensorBoardSink(run_directory / "tensorboard")


def _open_wandb(run_directory: Path, run: str) -> Sink:
    from phalanx.observe.sinks.wandb import WandbSink

    return WandbSink(run_directory, run)


def _open_mlflow(run_directory: Path, run: str) -> Sink:
    from phalanx.observe.sinks.mlflow import MlflowSink

    return MlflowSink(run_directory, run)


VENDORS: Mapping[str, Vendor] = {
    "tensorboard": Vendor("tensorboardX", _open_tensorboard),
    "wandb": Vendor("wandb", _open_wandb),
    "mlflow": Vendor("mlflow", _open_mlflow),
}


def open_sinks(
    names: Sequence[str],
    run_directory: Path,
    run: str,
    vendors: Mapping[str, Vendor] = VENDORS,
    close_timeout_s: float = CLOSE_TIMEOUT_S,
) -> list[Background]:
    """The sinks called ``names``, each on its thread.

    Raises SinkError, before any is opened, if a name is unknown or a package is not installed.
    """
    require_sinks(names, vendors)
    return [
        Background(
            name,
            partial(vendors[name].open_sink, run_directory, run),
            close_timeout_s=close_timeout_s,
        )
        for name in names
    ]


def require_sinks(names: Sequence[str], vendors: Mapping[str, Vendor] = VENDORS) -> None:
    """Raises SinkError if a name is unknown or its package is not installed; nothing is imported."""
    for name in names:
        if name not in vendors:
            raise SinkError(f"there is no sink {name!r}; there are: {', '.join(sorted(vendors))}")
        module = vendors[name].module
        if find_spec(module) is None:
            raise SinkError(
                f"the sink {name!r} needs the package {module}, which is not installed: pip install {module}"
            )
