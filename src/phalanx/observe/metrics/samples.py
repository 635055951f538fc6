"""What a metric is, and what a sample of it is: the values that sources give and formats write.

The names follow Prometheus' conventions (prometheus.io/docs/practices/naming): the prefix ``phalanx_``, base units in the name, ``_total`` for
counters. The labels are the run and the node, and beside them only words from short fixed lists (a bucket of the ledger, a phase, the index of an
accelerator): a label with an attempt, a rank or a job in it would make new series with every restart, and a store of series grows by them for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

Kind = Literal["gauge", "counter", "info"]


@dataclass(frozen=True)
class Metric:
    """One metric: what its series are called and mean."""

    name: str
    kind: Kind
    """``info`` is a gauge that is always 1, and whose labels are the fact."""
    help: str
    """One sentence."""
    source: str
    """Where its numbers come from, in the words of the documentation."""
    labels: tuple[str, ...] = ()
    """The labels beside ``run`` and ``node``, each of a short list of values."""


class Labels:
    """The labels of a series, written once: many series have the same."""

    __slots__ = ("pairs", "text")

    def __init__(self, **pairs: str) -> None:
        """Labels whose value is empty are left out, as Prometheus itself would do."""
        self.pairs: Mapping[str, str] = {name: value for name, value in pairs.items() if value}
        self.text = _written(self.pairs)

    def __or__(self, more: Mapping[str, str]) -> Labels:
        return Labels(**{**self.pairs, **more})


def _written(pairs: Mapping[str, str]) -> str:
    if not pairs:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs.items()) + "}"


def _escaped(value: str) -> str:
    """A label's value in double quotes; what is no text in UTF-8 (a lone surrogate, of a file's name) becomes ``?``."""
    plain = value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return plain.encode(errors="replace").decode()


class Sample(NamedTuple):
    """One number of one series."""

    metric: Metric
    labels: Labels
    value: float


Facts = TypeVar("Facts")
Found = float | None | Iterable[tuple[Mapping[str, str], float]]
"""What is computed of a metric: one number, or none, or numbers with the labels that tell them apart."""


@dataclass(frozen=True)
class Derived(Generic[Facts]):
    """A metric and how its numbers follow from the facts of its source."""

    metric: Metric
    compute: Callable[[Facts], Found]


def collect(
    derived: Sequence[Derived[Facts]],
    facts: Facts,
    labels: Labels,
    failed: Callable[[Metric, Exception], None],
) -> list[Sample]:
    """All samples of ``derived``; a metric that cannot be computed is left out and passed to ``failed``, and costs only itself."""
    samples: list[Sample] = []
    for one in derived:
        try:
            samples += _samples(one, facts, labels)
        except Exception as error:
            failed(one.metric, error)
    return samples


def _samples(derived: Derived[Facts], facts: Facts, labels: Labels) -> list[Sample]:
    found = derived.compute(facts)
    if found is None:
        return []
    if isinstance(found, (int, float)):
        return [Sample(derived.metric, labels, found)]
    return [Sample(derived.metric, labels | more, value) for more, value in found]
