"""Text cut before the first of some strings, although tokens end anywhere within one.

Text that could still become a stop string is held back until it cannot: the longest end of what was seen that begins one. What comes
out is, for any cut of the text into pieces, exactly the full text up to where a naive search finds the first stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on up to the first stop string; where two begin at one place, either ends the text there."""

    def __init__(self, stops: Sequence[str]) -> None:
        """``stops``: none of them empty. Raises ValueError."""
        if not all(stops):
            raise ValueError("stop: an empty string would end every text; leave it out")
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is certain after more of it, and whether a stop string was found; from then on there is no more."""
        if self._stopped:
            return "", True
        if not self._stops:
            return text, False
        seen = self._held + text
        found = min((place for stop in self._stops if (place := seen.find(stop)) >= 0), default=-1)
        begun = len(seen) - self._hopeful(seen)
        if found >= 0 and found <= begun:
            self._held, self._stopped = "", True
            return seen[:found], True
        # A stop string that began earlier than one that was found may still be on its way.
        self._held = seen[begun:]
        return seen[:begun], False

    def flush(self) -> str:
        """The text that is held back, at the end of all text."""
        # A found string may have waited for a longer one, begun before it, that never came.
        held, self._held = self._held, ""
        places = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        self._stopped = self._stopped or bool(places)
        return held[: min(places)] if places else held

    @property
    def stopped(self) -> bool:
        """True once a stop string was found, at the latest by ``flush``."""
        return self._stopped

    def _hopeful(self, seen: str) -> int:
        """The length of the longest end of ``seen`` that begins a stop string without being one."""
        for length in range(min(len(seen), max(map(len, self._stops), default=1) - 1), 0, -1):
            end = seen[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
