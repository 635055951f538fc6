"""Rules of ``[[data.sources]]`` and ``data.stages`` that can be checked without looking at a dataset."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

from phalanx.run.problems import Problem
from phalanx.run.spec import DataSpec, SourceSpec

_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
MOST_SOURCES = 4096
"""More are likelier a mistake than a mixture; each is opened by every rank."""


def stages_of(data: DataSpec) -> tuple[int, ...]:
    """The numbers of steps after which each stage begins."""
    return data.stages or (0,)


def problems(data: DataSpec) -> Iterator[Problem]:
    """All that is impossible in a run's sources and stages."""
    yield from _cache_problems(data)
    if not data.sources:
        if data.stages:
            remedy = "add [[data.sources]], or leave data.stages out"
            yield Problem("data.stages", "there are no sources whose weights could change", remedy)
        return
    if data.path != DataSpec().path:
        yield Problem(
            "data.path",
            "the run has data.sources, and would read one or the other",
            "leave out one of the two",
            ("data.sources",),
        )
    if data.corpus:
        remedy = "prepare each source with `phalanx data prepare`, and leave data.corpus out"
        yield Problem(
            "data.corpus", "text is prepared for data.path, not for data.sources", remedy, ("data.sources",)
        )
    if len(data.sources) > MOST_SOURCES:
        found = f"{len(data.sources)} sources are too many"
        yield Problem("data.sources", found, f"at most {MOST_SOURCES}; prepare some of them together")
        return
    stages = stages_of(data)
    if stages[0] != 0 or any(a >= b for a, b in itertools.pairwise(stages)):
        remedy = "steps in rising order, 0 first, such as [0, 90000]"
        yield Problem("data.stages", f"{list(stages)} are no stages of one run", remedy)
    names = [source.name for source in data.sources]
    for number, source in enumerate(data.sources):
        yield from _source(source, f"data.sources[{number}]", len(stages))
        if source.name in names[:number]:
            found = f"two sources are called {source.name!r}"
            yield Problem(f"data.sources[{number}].name", found, "give each a name of its own")
    if all(len(source.weights) == len(stages) for source in data.sources):
        for number, step in enumerate(stages):
            if not any(source.weights[number] for source in data.sources):
                found = f"all weights of the stage that begins after step {step} are 0"
                yield Problem("data.sources", found, "give a source a weight there")


def _cache_problems(data: DataSpec) -> Iterator[Problem]:
    places = [source.path for source in data.sources] or [data.path]
    if any("://" in place for place in places):
        return
    for name in ("cache", "cache_gib", "read_ahead_mib", "timeout_s"):
        if getattr(data, name) != getattr(DataSpec(), name):
            found = "is about datasets in object stores, and the run reads folders"
            yield Problem(f"data.{name}", found, "leave it out", ("data.path",))


def _source(source: SourceSpec, where: str, stages: int) -> Iterator[Problem]:
    if not _NAME.fullmatch(source.name):
        found = f"{source.name[:100]!r} is no name of a source"
        yield Problem(f"{where}.name", found, 'letters, digits, "-" and "_", such as "web"')
    if not source.path:
        yield Problem(f"{where}.path", "is missing", "the folder of a prepared dataset")
    if len(source.weights) != stages:
        has, are = _count(len(source.weights), "entry", "entries"), _count(stages, "stage", "stages")
        found = f"weights of {source.name!r} has {has}, and there {'is' if stages == 1 else 'are'} {are}"
        yield Problem(f"{where}.weights", found, "one for each step of data.stages", ("data.stages",))
    elif not all(math.isfinite(weight) and weight >= 0 for weight in source.weights):
        yield Problem(f"{where}.weights", f"{list(source.weights)} are no weights", "numbers of at least 0")
    if len(source.use) != 2 or not 0 <= source.use[0] < source.use[1] <= 1:
        found = f"{list(source.use)} is no part of a dataset"
        yield Problem(f"{where}.use", found, "two fractions, such as [0.0, 0.95]")


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
