"""Phalanx trains one model as one logical job on whatever fleet there is.

The bits belong to the run, not to the fleet: the weights after step *n* are a function of the run
file, the data and the seed. ``docs/design/reproducibility.md`` states the contract.

The names below are the public Python interface (``docs/reference/python-api.md``). They are imported when they are first used, so
that ``import phalanx`` and ``phalanx --help`` wait for nothing.
"""

from __future__ import annotations

from phalanx.version import __version__

TYPE_CHECKING = (
    False  # as type checkers understand it; importing ``typing`` for it takes longer than all of this file
)
if TYPE_CHECKING:
    from phalanx.api import (
        Run,
        RunStoppedError,
        load_weights,
        open_run,
        read_run_file,
        train_run,
        weights_sha256,
    )
    from phalanx.checkpoint.format.errors import CheckpointError
    from phalanx.data.errors import DataError
    from phalanx.model.custom import CustomModel, CustomModelError
    from phalanx.observe.events import Event
    from phalanx.run.directory.paths import RunDirectoryError, RunResult
    from phalanx.run.factory import FactoryError
    from phalanx.run.fields import RunFileError
    from phalanx.run.spec import ModelSpec, RunSpec
    from phalanx.train.lifecycle.ending import RunFailedError
    from phalanx_plan.api import plan_run
    from phalanx_serve.generate import generate_text

_HOMES = {
    "CheckpointError": "phalanx.checkpoint.format.errors",
    "CustomModel": "phalanx.model.custom",
    "CustomModelError": "phalanx.model.custom",
    "DataError": "phalanx.data.errors",
    "Event": "phalanx.observe.events",
    "FactoryError": "phalanx.run.factory",
    "ModelSpec": "phalanx.run.spec",
    "Run": "phalanx.api",
    "RunDirectoryError": "phalanx.run.directory.paths",
    "RunFailedError": "phalanx.train.lifecycle.ending",
    "RunFileError": "phalanx.run.fields",
    "RunResult": "phalanx.run.directory.paths",
    "RunSpec": "phalanx.run.spec",
    "RunStoppedError": "phalanx.api",
    "generate_text": "phalanx_serve.generate",
    "load_weights": "phalanx.api",
    "open_run": "phalanx.api",
    "plan_run": "phalanx_plan.api",
    "read_run_file": "phalanx.api",
    "train_run": "phalanx.api",
    "weights_sha256": "phalanx.api",
}
"""The module that each public name is imported from on first use."""

__all__ = [
    "CheckpointError",
    "CustomModel",
    "CustomModelError",
    "DataError",
    "Event",
    "FactoryError",
    "ModelSpec",
    "Run",
    "RunDirectoryError",
    "RunFailedError",
    "RunFileError",
    "RunResult",
    "RunSpec",
    "RunStoppedError",
    "__version__",
    "generate_text",
    "load_weights",
    "open_run",
    "plan_run",
    "read_run_file",
    "train_run",
    "weights_sha256",
]


def __getattr__(name: str) -> object:
    """Import a public name on its first use. Raises ``AttributeError`` for another name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
