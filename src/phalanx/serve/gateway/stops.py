"""Text that ends before one of several strings, which may lie over the borders of tokens.

What could be the beginning of such a string is held back until it is one, or cannot become one.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Passes text on up to the first of the strings."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = tuple(stops), ""

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is certain, and whether a string has been found, behind which nothing is passed on."""
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self._held = ""
            return text[: min(places)], True
        keep = max(
            (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text
