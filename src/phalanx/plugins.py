"""Plug-ins: commands, engines, sinks, observers of training, a planner and samples of text.

The core imports none of the packages beside it. ``load_plugin`` returns the object of a name in a group, or ``None``. The three packages of this
project stand in a table, so that a command starts without reading the metadata of everything that is installed, and a checkout
works that was never installed. Other projects declare commands, engines, sinks and observers as entry points in their ``pyproject.toml``::

    [project.entry-points."phalanx.sinks"]
    notebook = "my_package.sink:VENDOR"
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

_OWN: Mapping[str, Mapping[str, str]] = {
    "phalanx.planners": {"phalanx": "phalanx_plan.planner:PLANNER"},
    "phalanx.samplers": {"phalanx": "phalanx_serve.generate:sample_text"},
    "phalanx.export_checks": {"phalanx": "phalanx_serve.verify:export_check"},
    "phalanx.simulations": {"traffic": "phalanx_serve.cli.simulate_traffic:command"},
    "phalanx.engines": {
        "slurm": "phalanx.launch.engines.slurm_engine:ENGINE",
        "kubernetes": "phalanx.launch.kubernetes.engine:ENGINE",
        "ssh": "phalanx.launch.engines.hosts_engine:SSH",
        "local": "phalanx.launch.engines.hosts_engine:LOCAL",
    },
    "phalanx.sinks": {
        "tensorboard": "phalanx_watch.sinks.vendors:TENSORBOARD",
        "wandb": "phalanx_watch.sinks.vendors:WANDB",
        "mlflow": "phalanx_watch.sinks.vendors:MLFLOW",
        "trackio": "phalanx_watch.sinks.vendors:TRACKIO",
        "otel": "phalanx_watch.sinks.vendors:OTEL",
    },
}
"""Where the objects of this project stand, by group and name: ``module:attribute``."""


class PluginError(RuntimeError):
    """A plug-in of another project cannot be loaded; the message names its package and the reason."""


def load_plugin(group: str, name: str) -> Any | None:
    """Import and return the object of a name in a group: our own if its package is installed, else an entry
    point's.

    ``None`` where no installed package has it. Raises ``PluginError`` where another project's module cannot be
    imported, and what a module of ours raises at its import.
    """
    place = _OWN.get(group, {}).get(name)
    if place is not None and _is_installed(place):
        module, _, attribute = place.partition(":")
        return getattr(importlib.import_module(module), attribute)
    entry = next((entry for entry in _entry_points(group) if entry.name == name), None)
    if entry is None:
        return None
    try:
        return entry.load()
    except Exception as error:  # the other project's code may raise any error
        package = entry.dist.name if entry.dist else entry.value
        raise PluginError(
            f"{name!r} of the package {package} cannot be loaded ({entry.value}): {type(error).__name__}: {error}; mend or "
            "uninstall that package"
        ) from error


def plugin_names(group: str) -> list[str]:
    """Return the names in a group, sorted: those of installed packages of ours, and of entry points. Nothing is imported."""
    own = {name for name, place in _OWN.get(group, {}).items() if _is_installed(place)}
    return sorted(own | {entry.name for entry in _entry_points(group)})


def _is_installed(place: str) -> bool:
    """Return True if the outermost package of ``module:attribute`` is installed."""
    return find_spec(place.partition(".")[0]) is not None


def _entry_points(group: str) -> Any:
    """Return the entry points of other projects in a group."""
    # Its import and its search take a tenth of a second, which most commands do not need.
    from importlib.metadata import entry_points

    return entry_points(group=group)
