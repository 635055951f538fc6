"""The report of ``bench.gpu``: verdicts on the findings, and a Markdown page. Functions on values alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class PartResult:
    """The findings of one part, and how it ended."""

    name: str
    ended: str = "not run"
    """"ok", "time over", "exit code 1", "not run: no time left"."""
    seconds: float = 0.0
    findings: dict[str, object] = field(default_factory=dict)
    output: str = ""
    """The end of its output, if it did not end well."""


@dataclass(frozen=True)
class Verdict:
    """A statement that should be true, and its verdict."""

    statement: str
    holds: bool | None
    """``None``: the findings do not decide it."""
    detail: str = ""


@dataclass(frozen=True)
class Comparison:
    """One predicted quantity of a step beside its measurement."""

    run: str
    quantity: str
    predicted: float
    measured: float

    @property
    def error(self) -> float | None:
        """``predicted`` over ``measured``, minus 1; ``None`` if nothing was measured."""
        return self.predicted / self.measured - 1 if self.measured else None


def verdicts(parts: Mapping[str, PartResult]) -> list[Verdict]:
    """Judge the promise about bits, statement by statement."""
    hashes = {
        name: value
        for part in parts.values()
        if part.name.startswith("hashes")
        for name, value in part.findings.items()
    }
    judged = [
        _one_hash("eager steps have one hash, however they are computed", hashes, "eager"),
        _one_hash("compiled steps have one hash, however they are computed", hashes, "compiled"),
    ]
    for part, statement in (
        ("kinds", "computes in deterministic mode, with one hash in two runs"),
        ("kernels", "depends on nothing beside it"),
    ):
        if part in parts:
            judged += [_true(f"{name}: {statement}", value) for name, value in parts[part].findings.items()]
    return judged


def _one_hash(statement: str, hashes: Mapping[str, object], kind: str) -> Verdict:
    mine = {name: value for name, value in hashes.items() if name.split(",")[0] == kind}
    good = {name: value for name, value in mine.items() if isinstance(value, str)}
    failed = [f"{name}: {value}" for name, value in mine.items() if name not in good]
    reference = good.get(kind)
    others = [f"{name} differs" for name, value in good.items() if value != reference]
    detail = "; ".join([*others, *failed])
    if others:
        return Verdict(statement, False, detail)
    return Verdict(statement, True if len(good) > 1 and not failed else None, detail)


def _true(statement: str, value: object) -> Verdict:
    if isinstance(value, bool):
        return Verdict(statement, value)
    return Verdict(statement, None, str(value))


def page(
    environment: Mapping[str, object],
    parts: Mapping[str, PartResult],
    comparisons: Sequence[Comparison] = (),
) -> str:
    """Return the report as Markdown."""
    lines = ["# A GPU, first run", ""]
    lines += _table(("", ""), [(name, _shown(value)) for name, value in environment.items()])
    lines += ["## What should hold", ""]
    words = {True: "yes", False: "**NO**", None: "not known"}
    lines += _table(
        ("statement", "holds", ""), [(v.statement, words[v.holds], v.detail) for v in verdicts(parts)]
    )
    lines += _compared(comparisons)
    for part in parts.values():
        lines += [f"## {part.name}", "", f"{part.ended}, {part.seconds:.0f} s", ""]
        lines += _findings(part.findings)
        if part.output:
            lines += ["```", part.output.replace("```", "'''"), "```", ""]
    return "\n".join(lines)


def _compared(comparisons: Sequence[Comparison]) -> list[str]:
    if not comparisons:
        return []
    rows = [
        (
            row.run,
            row.quantity,
            _shown(row.predicted),
            _shown(row.measured),
            "" if row.error is None else f"{row.error:+.1%}",
        )
        for row in comparisons
    ]
    return [
        "## Prediction beside measurement",
        "",
        *_table(("a step of", "", "predicted", "measured", "error"), rows),
    ]


def _findings(findings: Mapping[str, object]) -> list[str]:
    """Return tables of the findings: records with the same fields in columns, others by name and value."""
    lines: list[str] = []
    flat = {name: value for name, value in findings.items() if not _is_record(value)}
    lines += _table(("", ""), [(name, _shown(value)) for name, value in flat.items()])
    records = {
        name: value for name, value in findings.items() if isinstance(value, Mapping) and name not in flat
    }
    columns = list(
        dict.fromkeys(
            key for value in records.values() for key, inner in value.items() if not _is_record(inner)
        )
    )
    if columns:
        rows = [(name, *(_shown(value.get(key, "")) for key in columns)) for name, value in records.items()]
        lines += _table(("", *columns), rows)
    for name, value in records.items():
        for key, inner in value.items():
            if _is_record(inner) and isinstance(inner, Mapping):
                lines += [f"{name}, {key}:", "", *_findings(inner)]
    return lines


def _is_record(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    cells = [head, ("---",) * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells] + [""]


def _shown(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.4e}"
