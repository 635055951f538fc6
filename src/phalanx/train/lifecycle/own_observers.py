"""Observers of other packages: tasks, statistics and alerts of a user's own, by entry points of the group ``phalanx.observers``.

Only a rank that trains imports their code. An observer that fails ends the run, since the other ranks may be in a collective of
its hook. So does one that changes a weight in place.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from phalanx.observe.ledger import Bucket
from phalanx.parallel.reduction.data_parallel import local, named_parameters
from phalanx.plugins import PluginError, load_plugin, plugin_names
from phalanx.run.factory import own_line
from phalanx.run.fields import unknown_value
from phalanx.train.assemble import Training
from phalanx.train.evaluation.scoring import EvaluationStoppedError
from phalanx.train.lifecycle.ending import RunFailedError
from phalanx.train.lifecycle.observers import Observer, StepEnd

GROUP = "phalanx.observers"
_REMEDY = "mend it, or leave it out of observe.observers; the same command resumes from the newest checkpoint"


class ObserverError(RunFailedError):
    """An observer of another package cannot be made, failed, or changed a weight; the message has its name."""


def open_observers(names: Sequence[str], training: Training) -> list[Observer]:
    """Make the observers called ``names``, each by its entry point from ``training``. Raises ``ObserverError``."""
    return [NamedObserver(name, training) for name in names]


def maker_of(name: str) -> Callable[[Training], Observer]:
    """Return what makes the observer called ``name``. Imports its package. Raises ``ObserverError`` if this machine cannot."""
    try:
        make: Callable[[Training], Observer] | None = load_plugin(GROUP, name)
    except PluginError as error:
        raise ObserverError(f"the observer {error}; {_REMEDY}", _REMEDY) from error
    if make is None:
        problem = unknown_value("observe.observers", name, plugin_names(GROUP))
        raise ObserverError(
            f"the observer {problem.finding} on this machine: {problem.remedy}; {_REMEDY}", _REMEDY
        )
    return make


class NamedObserver(Observer):
    """An observer of another package. Its errors get its name."""

    def __init__(self, name: str, training: Training) -> None:
        """Load and construct the plugin ``name``. Raises ``ObserverError`` if there is none, it fails, or it makes no ``Observer``."""
        self._name, self._training = name, training
        self._parameters = list(named_parameters(training.built.model.parts).values())
        make = maker_of(name)
        self._maker = f"{make.__module__}:{name}"
        with self._guarded("its construction"):
            self._observer: Observer = make(training)
        if not isinstance(self._observer, Observer):
            made = type(self._observer).__name__
            raise ObserverError(
                f"the observer {name!r} is of type {made}, and must be a phalanx.train.lifecycle.observers.Observer; {_REMEDY}",
                _REMEDY,
            )

    def before_step(self, step: int) -> None:
        with self._guarded(f"before_step of step {step:,}"):
            self._observer.before_step(step)

    def after_step(self, end: StepEnd) -> None:
        with self._guarded(f"after_step of step {end.step:,}"):
            self._observer.after_step(end)

    def after_save(self, end: StepEnd) -> None:
        # A request to stop may end an evaluation of the observer's own.
        with self._guarded(f"after_save of step {end.step:,}", EvaluationStoppedError):
            self._observer.after_save(end)

    def at_end(self) -> None:
        with self._guarded("at_end"):
            self._observer.at_end()

    @contextmanager
    def _guarded(self, hook: str, *passed: type[Exception]) -> Iterator[None]:
        """Context of a call of the observer's code, booked as evaluation. Raises ``ObserverError`` if it fails or has changed a
        weight.

        Its traceback is printed. Errors of the types ``passed`` are raised as they are.
        """
        before = self._versions()
        try:
            with self._training.inputs.ledger.bucket(Bucket.EVAL):
                yield
        except passed:
            raise
        except (Exception, SystemExit) as error:  # of any kind: it is the other package's
            traceback.print_exception(error, file=sys.stderr)
            cause = f"{type(error).__name__}: {error}{own_line(error, self._maker)}"
            raise ObserverError(
                f"the observer {self._name!r} failed in {hook}: {cause}; {_REMEDY}", _REMEDY
            ) from error
        # Gathering weights and waiting for stages here was no step's.
        for clock in self._training.built.waits.values():
            clock.forget()
        if self._versions() != before:
            raise ObserverError(
                f"the observer {self._name!r} changed a weight in {hook}: it may only read them, for example as "
                f"parameter.detach().clone(); {_REMEDY}",
                _REMEDY,
            )

    def _versions(self) -> int:
        # PyTorch counts the operations that write into a tensor, of a divided one also those into this rank's part.
        return sum(parameter._version + local(parameter)._version for parameter in self._parameters)
