"""`python -m lint.language`: the language rules as a ratchet.

Each file's offenses are counted by rule and compared with `lint/language_baseline.toml`. A count above the recorded one
fails, and so does a count below it until `--update` records the lower number. So the numbers can only fall. A file without an
entry may have none.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import click

from lint.code_rules import check_classes, check_source
from lint.findings import ADVICE, Counts, Finding, Words, count
from lint.matched_text import check_matched_text
from lint.prose_rules import check_page

ROOT = Path(__file__).parents[1]
BESIDE = ("tests", "bench", "validation", "examples", "deploy", "docs/hooks", "lint", "tools", "requirements")
"""Folders of Python files that no user imports."""
BASELINE = "lint/language_baseline.toml"
HEAD = """\
# Offenses against the language rules by file and rule. Counts only fall: `python -m lint.language --update` lowers them.
# Two branches that both lowered a count conflict here: keep either line, then run the command. If a file moves, move its line.
"""


@click.command()
@click.option("--update", is_flag=True, help="Record counts that have fallen. Refuses to raise any.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--root", type=click.Path(exists=True, file_okay=False, path_type=Path), default=ROOT, hidden=True
)
def command(update: bool, as_json: bool, root: Path) -> None:
    """Check names, docstrings and comments of all Python files, and the prose of README.md and docs/ (docs/evidence/ is exempt).

    Class names and matched text are checked in src/ only.

    Exits with 1 if a file has more offenses than lint/language_baseline.toml records, or fewer. CONTRIBUTING.md has the
    rules with examples.

    \b
      python -m lint.language
      python -m lint.language --update
      python -m lint.language --json
    """
    findings, docstrings, prose = check(root)
    counts, recorded = count(findings), read_baseline(root)
    raised = {entry: now for entry, now, before in changes(counts, recorded) if now > before}
    fallen = {entry: (now, before) for entry, now, before in changes(counts, recorded) if now < before}
    if update and not raised:
        (root / BASELINE).write_text(baseline_text(counts), encoding="utf-8")
        fallen = {}
    if as_json:
        over = [vars(item) for item in findings if (item.path, item.rule) in raised]
        lowered = [f"{path}: {rule}" for path, rule in fallen]
        totals = {
            "rules": _totals(counts),
            "docstrings": {"words": docstrings.words, "speech_verbs": docstrings.units},
            "prose": {"words": prose.words, "sentences": prose.units},
        }
        click.echo(json.dumps({"raised": over, "fallen": lowered, "counts": counts, **totals}))
    else:
        _print(findings, raised, fallen, recorded)
        verbs = 1000 * docstrings.units / max(docstrings.words, 1)
        rules = ", ".join(f"{rule} {number}" for rule, number in _totals(counts).items()) or "none"
        click.echo(f"offenses: {rules}")
        click.echo(f"speech verbs: {verbs:.2f} per 1,000 words of docstring, goal 0.2", nl=False)
        click.echo(f"; mean sentence: {prose.words / max(prose.units, 1):.1f} words, goal 20")
        click.echo(f"language: {len(raised)} counts above the baseline, {len(fallen)} below it")
    raise SystemExit(bool(raised or fallen))


def check(root: Path) -> tuple[list[Finding], Words, Words]:
    """Return all findings, the totals of the docstrings, and the totals of the prose."""
    sources = _read(root, lambda path: path.startswith("src/phalanx"), "src/phalanx*/**/*.py")
    pages = _read(root, lambda path: not path.startswith("docs/evidence/"), "README.md", "docs/**/*.md")
    beside = _read(root, lambda _: True, *(f"{folder}/**/*.py" for folder in BESIDE))
    code = [check_source(path, source) for path, source in (sources | beside).items()]
    prose = [check_page(path, page) for path, page in pages.items()]
    findings = [finding for part, _ in (*code, *prose) for finding in part] + check_classes(sources)
    findings += check_matched_text(sources)
    findings.sort(key=lambda finding: (finding.path, finding.line))
    return findings, sum((words for _, words in code), Words()), sum((words for _, words in prose), Words())


def changes(counts: Counts, recorded: Counts) -> list[tuple[tuple[str, str], int, int]]:
    """List each path and rule whose count differs from the recorded one, with the count and the record."""
    flat, before = (
        {(path, rule): number for path, rules in table.items() for rule, number in rules.items()}
        for table in (counts, recorded)
    )
    entries = sorted(flat.keys() | before.keys())
    pairs = [(entry, flat.get(entry, 0), before.get(entry, 0)) for entry in entries]
    return [pair for pair in pairs if pair[1] != pair[2]]


def read_baseline(root: Path) -> Counts:
    """Return the recorded counts; none if there is no file."""
    file = root / BASELINE
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def baseline_text(counts: Counts) -> str:
    """Write the counts as TOML, one line per file, so that branches seldom conflict."""
    lines = [
        f'"{path}" = {{ {", ".join(f"{rule} = {number}" for rule, number in sorted(rules.items()))} }}\n'
        for path, rules in sorted(counts.items())
    ]
    return HEAD + "".join(lines)


def _read(root: Path, keep: Callable[[str], bool], *patterns: str) -> dict[str, str]:
    paths = {path for pattern in patterns for path in root.glob(pattern)}
    texts = {path.relative_to(root).as_posix(): path for path in sorted(paths)}
    return {name: path.read_text(encoding="utf-8") for name, path in texts.items() if keep(name)}


def _totals(counts: Counts) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for rules in counts.values():
        totals.update(rules)
    return {rule: totals[rule] for rule in ADVICE if rule in totals}


def _print(
    findings: list[Finding],
    raised: dict[tuple[str, str], int],
    fallen: dict[tuple[str, str], tuple[int, int]],
    recorded: Counts,
) -> None:
    for (path, rule), number in raised.items():
        allowed = recorded.get(path, {}).get(rule, 0)
        click.echo(f"{path}: {rule}: {number}, of which {allowed} are recorded. {ADVICE[rule]}")
        for finding in findings:
            if (finding.path, finding.rule) == (path, rule):
                click.echo(f"  {path}:{finding.line}: {finding.text}")
    for (path, rule), (number, before) in fallen.items():
        click.echo(f"{path}: {rule}: {number}, recorded are {before}. Run: python -m lint.language --update")


if __name__ == "__main__":
    command(prog_name="python -m lint.language")
