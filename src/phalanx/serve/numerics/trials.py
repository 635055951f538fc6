"""Tells whoever waits for a server which of its machine's kernels are being tried: a first start takes up to a minute for that, and later ones nothing.

Probes are cached by what they try, in the process and in the user's cache folder, so a listener is no argument of theirs: it listens within a block, in its
own thread. ``phalanx.serve.numerics.exact`` says which part comes next; a part is told only when something of it is searched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Trial:
    """A part of what exact numerics rely on, as it is being tried."""

    part: str
    """Its name, for people."""
    number: int
    """Its place among all parts of the model, those that are known already too, from 1 on; """
    of: int
    """so many there are."""
    kept: str
    """The folder in which what is found is kept for the next start; empty if there is none."""

    def __str__(self) -> str:
        once = (
            f"once: what is found is kept in {self.kept}"
            if self.kept
            else "at each start: there is no home folder to keep what is found in"
        )
        return f"trying this machine's kernels for exact numerics, {once}"


@dataclass
class _Listener:
    tell: Callable[[Trial], None]
    part: str = ""
    number: int = 0
    of: int = 0
    told: bool = True
    """True once the present part has been told, and while there is none."""


_listening: ContextVar[_Listener | None] = ContextVar("listening", default=None)


@contextmanager
def trials_told(tell: Callable[[Trial], None]) -> Iterator[None]:
    """Calls ``tell`` for each part that is tried within the block, before it is."""
    token = _listening.set(_Listener(tell))
    try:
        yield
    finally:
        _listening.reset(token)


def first_told(say: Callable[[Trial], None]) -> Callable[[Trial], None]:
    """A listener that hands the first trial to ``say`` and no other: where many processes write to one place."""
    told: list[Trial] = []

    def tell(trial: Trial) -> None:
        if not told:
            told.append(trial)
            say(trial)

    return tell


def expect_parts(count: int) -> None:
    """Says that so many parts come, each of which is begun by ``begin_part``."""
    if (listener := _listening.get()) is not None:
        listener.number, listener.of, listener.told = 0, count, True


def begin_part(name: str) -> None:
    """Says which part comes next."""
    if (listener := _listening.get()) is not None:
        listener.part, listener.number, listener.told = name, listener.number + 1, False


def tell_search(kept: Path | None) -> None:
    """Says that something of the present part is not known, and is searched; what is found goes to the folder ``kept``."""
    listener = _listening.get()
    if listener is None or listener.told:
        return
    listener.told = True
    listener.tell(Trial(listener.part, listener.number, listener.of, "" if kept is None else str(kept)))
