"""Offenses against the language rules, and the rules themselves with the advice that the check prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

ADVICE = {
    "vague-name": "name the value by what it is: `layout`, `message`, `request`, `param`, `is_known`, `reason`; "
    "name a loop variable by the singular of its collection",
    "docstring-start": "begin with an imperative or a noun phrase: `Return the layouts that fit in memory.`",
    "comment-start": "begin with an imperative or a noun phrase: `# Ranks of one machine meet in a file.`",
    "test-name": "name what the code does: programs return, raise, send, receive, log, print, request or record",
    "duplicate-class": "give the class a name that states its role and is unique in the package: `KVBlock`, `RankPlacement`",
    "speech-verb": "programs return, raise, send, receive, log, print, request or record",
    "matched-text": "match on the kind and the fields of an event (`IncidentKind`), not on the English beside it; "
    "give the event a field if it has none",
    "long-sentence": "split the sentence, one fact in each; the limit is 35 words",
    "mean-sentence": "shorten sentences until their mean is 20 words or fewer",
    "long-paragraph": "split the paragraph or use a list; the limit is 110 words",
    "date": "move the date, and the result it belongs to, to docs/evidence/ and link it",
}
"""Each rule with what to write instead."""


@dataclass(frozen=True)
class Finding:
    """One offense: path relative to the repository, line, rule, and the offending text."""

    path: str
    line: int
    rule: str
    text: str
    count: int = 1
    """How much the finding adds to the file's count; surplus words for `mean-sentence`, 1 for all other rules."""


@dataclass(frozen=True)
class Words:
    """Number of words in a text, and of the units that a rule relates them to (sentences, speech verbs)."""

    words: int = 0
    units: int = 0

    def __add__(self, other: Words) -> Words:
        return Words(self.words + other.words, self.units + other.units)


Counts = dict[str, dict[str, int]]
"""Path -> rule -> count. Zero counts are left out."""


def count(findings: Iterable[Finding]) -> Counts:
    """Sum the findings by path and rule."""
    sums: Counter[tuple[str, str]] = Counter()
    for finding in findings:
        sums[finding.path, finding.rule] += finding.count
    counts: Counts = {}
    for (path, rule), number in sorted(sums.items()):
        counts.setdefault(path, {})[rule] = number
    return counts
