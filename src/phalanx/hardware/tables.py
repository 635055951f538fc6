"""Reads typed values out of TOML tables, with errors that name the file, the table, the field and the remedy."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.hardware.cluster import Fact
from phalanx.hardware.errors import HardwareError


@dataclass(frozen=True)
class Table:
    """One table of a TOML file, and where it stands."""

    values: Mapping[str, Any]
    place: str

    def __contains__(self, field: str) -> bool:
        return field in self.values

    def check(self, known: tuple[str, ...]) -> None:
        """Raises ``HardwareError`` if there is a field that nobody would read."""
        unknown = [field for field in self.values if field not in known]
        if unknown:
            raise HardwareError(f"{self.place}: unknown field {unknown[0]!r}; there are {', '.join(known)}")

    def table(self, field: str, inherit: tuple[str, ...] = ()) -> Table:
        """The table ``field`` in this one, which takes over the fields ``inherit`` where it has none of its own."""
        found = self._get(field)
        if not isinstance(found, Mapping):
            raise HardwareError(f"{self.place}: {field!r} must be a table, such as [{field}]")
        passed = {name: self.values[name] for name in inherit if name in self.values}
        return Table({**passed, **found}, f"{self.place}, [{field}]")

    def rows(self, field: str) -> list[Table]:
        """The tables of the list ``field``."""
        found = self._get(field)
        if not isinstance(found, list) or not all(isinstance(row, Mapping) for row in found):
            raise HardwareError(f"{self.place}: {field!r} must be a list of tables, such as [{{...}}]")
        return [Table(row, f"{self.place}, {field}[{index}]") for index, row in enumerate(found)]

    def tables(self, field: str) -> dict[str, Table]:
        """The tables in the table ``field``, by name; none if it is absent."""
        if field not in self.values:
            return {}
        within = self.table(field)
        return {name: within.table(name) for name in within.values}

    def text(self, field: str, default: str | None = None) -> str:
        """The text ``field``."""
        found = self._get(field, default)
        if not isinstance(found, str):
            raise HardwareError(f"{self.place}: {field!r} must be text in quotes, not {found!r}")
        return found

    def texts(self, field: str) -> tuple[str, ...]:
        """The list of texts ``field``; none if it is absent."""
        found = self._get(field, ())
        if isinstance(found, str) or not all(isinstance(item, str) for item in found):
            raise HardwareError(f"{self.place}: {field!r} must be a list of texts, not {found!r}")
        return tuple(found)

    def flag(self, field: str, default: bool = False) -> bool:
        """The truth value ``field``."""
        found = self._get(field, default)
        if not isinstance(found, bool):
            raise HardwareError(f"{self.place}: {field!r} must be true or false, not {found!r}")
        return found

    def number(self, field: str, default: float | None = None, *, least: float = 0.0) -> float:
        """The number ``field``, not below ``least``."""
        found = self._get(field, default)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not found >= least:
            raise HardwareError(
                f"{self.place}: {field!r} must be a number of at least {least:g}, not {found!r}"
            )
        return float(found)

    def whole(self, field: str, default: int | None = None, *, least: int = 0) -> int:
        """The whole number ``field``, not below ``least``."""
        found = self.number(field, default, least=least)
        if found != int(found):
            raise HardwareError(f"{self.place}: {field!r} must be a whole number, not {found!r}")
        return int(found)

    def fact(self, field: str) -> Fact:
        """``field = 1.0`` with the table's ``source`` and ``date``, or ``{value = 1.0, source = "...", date = "..."}``."""
        found = self._get(field)
        if isinstance(found, Mapping):
            own = Table(found, f"{self.place}, {field}")
            own.check(("value", "source", "date"))
            return Fact(own.number("value"), own.text("source"), own.text("date", self.text("date", "")))
        return Fact(self.number(field), self.text("source"), self.text("date", ""))

    def facts(self, field: str) -> dict[str, Fact]:
        """The table ``field`` of facts, by name; none if it is absent."""
        if field not in self.values:
            return {}
        within = self.table(field, inherit=("source", "date"))
        return {name: within.fact(name) for name in within.values if name not in ("source", "date")}

    def _get(self, field: str, default: Any = None) -> Any:
        found = self.values.get(field, default)
        if found is None:
            raise HardwareError(f"{self.place}: the field {field!r} is missing; add it")
        return found


def read_tables(path: Path) -> Table:
    """The file at ``path``; raises ``HardwareError`` if it is not there or is not TOML."""
    try:
        return Table(tomllib.loads(path.read_text()), str(path))
    except OSError as error:
        raise HardwareError(f"cannot read {path}: {error.strerror}; name a TOML file that exists") from error
    except tomllib.TOMLDecodeError as error:
        raise HardwareError(f"{path} is not TOML: {error}") from error
