"""Sources of training text: named corpora that every machine has, and the user's own files.

A corpus is documents in a fixed order, each with a name that does not depend on where the files lie, since the name
decides which split a document falls into. Files are read when a document is asked for, so that a corpus may be
larger than memory, and may be gone through several times.
"""

import codecs
import difflib
import glob
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from phalanx.data.errors import CorpusError
from phalanx.data.formats.document import DOCUMENT_BYTES, Document
from phalanx.data.formats.text import pieces

# Tests and other people's bundled packages vary with how a Python was installed; what is left is the library itself.
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "_bundled", "__pycache__"}
)


@dataclass(frozen=True)
class TextFiles:
    """UTF-8 files as a corpus, in order of name; going through it reads them anew.

    A file of more than ``document_bytes`` becomes several documents, cut after a line: ``name#0``, ``name#1``, ...
    """

    files: tuple[tuple[str, Path], ...]
    document_bytes: int = DOCUMENT_BYTES

    def __iter__(self) -> Iterator[Document]:
        for name, path in self.files:
            yield from _read_documents(name, path, self.document_bytes)


@dataclass(frozen=True)
class BadFile:
    """A file that is no text that can be read, and why."""

    path: Path
    reason: str


def without_bad_files(
    corpus: TextFiles, on_progress: Callable[[int, int], None] = lambda _done, _total: None
) -> tuple[TextFiles, list[BadFile]]:
    """The corpus without the files that cannot be read as UTF-8, and those files. Reads every file once.

    A file that is bad anywhere is left out as a whole. ``on_progress`` is given the files read, and all. Raises ``CorpusError`` if
    no file is left.
    """
    good, bad = [], []
    for number, (name, path) in enumerate(corpus.files, 1):
        reason = _what_is_bad(path)
        if reason:
            bad.append(BadFile(path, reason))
        else:
            good.append((name, path))
        on_progress(number, len(corpus.files))
    if not good:
        raise CorpusError(
            f"none of {len(bad)} files can be read as text; the first: {bad[0].path}: {bad[0].reason}"
        )
    return replace(corpus, files=tuple(good)), bad


def _what_is_bad(path: Path) -> str:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            while block := file.read(DOCUMENT_BYTES):
                decoder.decode(block)
        decoder.decode(b"", final=True)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        return f"is not UTF-8 text (byte {error.object[error.start]:#04x}: {error.reason})"
    return ""


def python_stdlib() -> list[Document]:
    """The source code of this Python's own standard library: some 10 MB of text that every machine has.

    In order of file name, without tests, bundled packages, files written by the build, and files that are not UTF-8.
    The same Python release gives the same documents.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if _NOT_LIBRARY & set(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        try:
            documents.append(Document(f"python_stdlib/{relative.as_posix()}", path.read_bytes().decode()))
        except UnicodeDecodeError:
            continue
    return documents


CORPORA: Mapping[str, Callable[[], list[Document]]] = MappingProxyType({"python-stdlib": python_stdlib})


def named_corpus(name: str) -> list[Document]:
    """The documents of a corpus by its name in ``CORPORA``. Raises ``CorpusError`` for an unknown one."""
    if name not in CORPORA:
        close = difflib.get_close_matches(name, CORPORA, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(CORPORA)}"
        raise CorpusError(
            f"no corpus is called {name!r}; {hint}. There is no such file or folder in {Path.cwd()} either: give the path from there"
        )
    return CORPORA[name]()


def text_files(patterns: Sequence[str | Path], *, document_bytes: int = DOCUMENT_BYTES) -> TextFiles:
    """The corpus of the files that ``patterns`` name: files, folders (all files below, hidden ones left out), globs.

    A document is named by its path below the folder, or below the part of a glob before the first wildcard. A file
    reached twice is taken once. Raises ``CorpusError`` for a pattern without any file; a file that is not UTF-8
    raises when it is read.
    """
    if document_bytes < 4:
        raise CorpusError(f"document_bytes = {document_bytes} cannot hold every character; give 4 or more")
    names: dict[Path, str] = {}
    for pattern in patterns:
        found = _expand(str(pattern))
        if not found:
            raise CorpusError(
                f"no file matches {str(pattern)!r}; check the path (a folder counts its visible files)"
            )
        for name, path in found:
            names.setdefault(path.resolve(), name)
    return TextFiles(tuple(sorted((name, path) for path, name in names.items())), document_bytes)


def _expand(pattern: str) -> list[tuple[str, Path]]:
    path = Path(pattern)
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        below = [(file.relative_to(path), file) for file in path.rglob("*") if file.is_file()]
        return [
            (name.as_posix(), file) for name, file in below if not any(p.startswith(".") for p in name.parts)
        ]
    root = Path(*_parts_before_wildcard(path))
    files = (Path(match) for match in glob.glob(pattern, recursive=True))
    return [(file.relative_to(root).as_posix(), file) for file in files if file.is_file()]


def _parts_before_wildcard(path: Path) -> list[str]:
    parts: list[str] = []
    for part in path.parts:
        if glob.has_magic(part):
            break
        parts.append(part)
    return parts


def _read_documents(name: str, path: Path, document_bytes: int) -> Iterator[Document]:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size <= document_bytes:
                yield Document(name, file.read().decode())
                return
            for number, piece in enumerate(pieces(file, document_bytes)):
                yield Document(f"{name}#{number}", piece.decode())
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path} is not UTF-8 text (byte {error.object[error.start]:#04x}: {error.reason}); convert it, for "
            "example with iconv, or leave it out: with a glob such as 'folder/**/*.txt', or with all others that are bad by "
            "`phalanx data prepare --skip-bad`"
        ) from error
