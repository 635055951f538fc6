"""Decontamination: documents that share an n-gram of words with the files of an evaluation are left out.

As in Brown et al., "Language Models are Few-Shot Learners" (arXiv 2005.14165, appendix C), n is 13 and words are compared in lower case without what is no
letter or digit. Text without spaces between words is compared by as many letters as 13 words have (``phalanx.data.words``). Of the files, n-grams are kept as 64-bit hashes: some 3 in 10^19 comparisons with each of them are wrong, on the side of dropping.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import xxhash

from phalanx.data.errors import PreparationError
from phalanx.data.formats.document import Document, ReadOptions
from phalanx.data.formats.read import documents, spans
from phalanx.data.formats.recognize import recognize
from phalanx.data.steps.step import Dropped
from phalanx.data.words import words_of
from phalanx.run.fields import ValueRange

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Decontaminate:
    """Drops documents that share ``ngram`` words in a row with one of the files ``against``."""

    against: tuple[str, ...]
    """Files of an evaluation's texts, in any format that is read; every worker reads them at these paths."""
    use: str = "decontaminate"
    text_field: str = "text"
    ngram: Annotated[int, ValueRange(at_least=1)] = 13
    sha256: tuple[str, ...] = ()
    """Digests of the files, which the plan enters."""

    def __call__(self, document: Document) -> Document | Dropped:
        known = self._known
        shared = any(gram in known for gram in _ngrams(document.text, self.ngram))
        return Dropped("contaminated") if shared else document

    @cached_property
    def _known(self) -> frozenset[int]:
        grams: set[int] = set()
        options = ReadOptions(text_field=self.text_field)
        for name, sha256 in zip(self.against, self.sha256, strict=True):
            path = Path(name)
            if digest_of_file(path) != sha256:
                raise PreparationError(
                    f"{path} changed since the plan was made; plan again, with another --out"
                )
            form = recognize(path)
            for span in spans(path, form, 1 << 40, options):
                for found in documents(path, path.name, form, span, options):
                    if not isinstance(found, Document):
                        raise PreparationError(f"{found}; mend it: it is to be decontaminated against")
                    grams.update(_ngrams(found.text, self.ngram))
        return frozenset(grams)


def digest_of_file(path: Path) -> str:
    """SHA-256 of a file, in hex. Raises ``PreparationError`` if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PreparationError(f"cannot read {path}: {error.strerror}; correct step.against") from error


def _ngrams(text: str, n: int) -> Iterator[int]:
    for gram in words_of(text.lower(), _WORD).ngrams(n):
        yield xxhash.xxh3_64_intdigest(" ".join(gram).encode())
