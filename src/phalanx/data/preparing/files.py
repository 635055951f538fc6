"""Corpora: user files, recognized and read in order of name with a report, and named corpora that every machine has.

Files may have any of the formats in ``phalanx.data.formats``, in any mix. A document's name does not depend on the files' location, because the
name decides the document's split. Bad content stops the reading with its location and a remedy, or is skipped, counted and named.
"""

import difflib
import glob
import itertools
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal
from urllib.parse import unquote, urlsplit

from phalanx.data.errors import CorpusError, FormatError
from phalanx.data.formats.document import BadDocument, Document, ReadOptions
from phalanx.data.formats.read import FileFormat, Kind, documents, recognize, require_text, spans
from phalanx.run.directory.files import files_below
from phalanx.store.open_store import is_remote, is_url

OnBad = Literal["stop", "skip"]
MOST_NAMED = 20
_SPAN_BYTES = 1 << 28
_BEGINS_ROWS = re.compile(rb"\s*\[\s*\{")
_LOOKED_AT_BYTES = 4096
_ABOUT_DATA = frozenset(
    {"readme", "readme.md", "readme.txt", "license", "license.md", "license.txt", "dataset_infos.json"}
)
"""Lower-case names of files that describe a dataset downloaded from a hub."""


@dataclass(frozen=True)
class CorpusFile:
    """A file of a corpus at the time the corpus was created."""

    name: str
    path: Path
    format: FileFormat
    bytes: int
    modified_ns: int


@dataclass
class ReadReport:
    """Progress of one reading of a corpus."""

    documents: Counter[str] = field(default_factory=Counter)
    """Number of documents with text, by format, for example "jsonl.zst"."""
    without_text: int = 0
    """Number of rows and files with empty text."""
    bad: list[BadDocument] = field(default_factory=list)
    """The first documents that were left out, at most ``MOST_NAMED``."""
    bad_count: int = 0
    bytes_done: int = 0
    """Stored bytes of files that have been read."""


class Files:
    """Files as a corpus that can be read several times; ``report`` describes the last reading."""

    def __init__(
        self,
        files: Sequence[CorpusFile],
        options: ReadOptions,
        on_bad: OnBad = "stop",
        *,
        left_out: Sequence[BadDocument] = (),
        aside: Sequence[Path] = (),
        linked: Sequence[Path] = (),
    ) -> None:
        """Describe the corpus of ``files``, read with ``options``; nothing is read yet. ``on_bad`` is the treatment
        of a bad document: "stop" the reading, or "skip" it.

        The other arguments are only kept: files that are ``left_out`` completely, those ``aside`` that describe data,
        and ``linked`` folders that are not followed.
        """
        self.files = tuple(files)
        self.options = options
        self.on_bad: OnBad = on_bad
        self.left_out = tuple(left_out)
        """Files that are left out completely."""
        self.aside = tuple(aside)
        """Files that describe data, and are left out."""
        self.linked = tuple(linked)
        """Links to folders, which are not followed."""
        self.bytes_in_all = sum(file.bytes for file in self.files)
        self.report = self._new_report()

    def __iter__(self) -> Iterator[Document]:
        """Read all files in order and yield their documents with text, counting in a new ``report``.

        Raises ``CorpusError`` if a file has changed, or for a bad document if ``on_bad`` is "stop".
        """
        report = self.report = self._new_report()
        before = 0

        def on_bytes(span_bytes: int) -> None:
            report.bytes_done = min(before + span_bytes, self.bytes_in_all)

        for file in self.files:
            _require_unchanged(file)
            kind = str(file.format)
            empty = file.bytes == 0
            span_before = before
            for span in spans(file.path, file.format, _SPAN_BYTES, self.options):
                for document in documents(file.path, file.name, file.format, span, self.options, on_bytes):
                    if isinstance(document, BadDocument):
                        _require_unchanged(file)
                        self._bad(document, report)
                    elif document.text:
                        report.documents[kind] += 1
                        yield document
                    else:
                        report.without_text += 1
                before += span.file_bytes
            _require_unchanged(file)
            before = span_before + file.bytes
            report.without_text += empty
            on_bytes(0)

    def arrays(self) -> list[Path]:
        """Return files read as text that are named ``.json`` and begin as an array of objects: probably rows, not text."""
        json_files = (
            file.path
            for file in self.files
            if file.format == FileFormat(Kind.TEXT) and file.path.suffix == ".json"
        )
        return [path for path in json_files if _begins_rows(path)]

    def _new_report(self) -> ReadReport:
        return ReadReport(bad=list(self.left_out[:MOST_NAMED]), bad_count=len(self.left_out))

    def _bad(self, bad: BadDocument, report: ReadReport) -> None:
        """Raise ``CorpusError`` if bad documents stop the reading; else count the document in the report, which names the first ones."""
        if self.on_bad == "stop":
            raise CorpusError(
                f"{bad}; mend it, or leave out all that is bad: `phalanx data prepare --on-bad skip`"
            )
        report.bad_count += 1
        if len(report.bad) < MOST_NAMED:
            report.bad.append(bad)


def files_of(
    patterns: Sequence[str | Path],
    options: ReadOptions = ReadOptions(),  # noqa: B008 - frozen
    *,
    on_bad: OnBad = "stop",
    json_as_text: bool = False,
    out: str | Path = "",
) -> Files:
    """Return the corpus of the files, folders (all visible files below) and globs in ``patterns``.

    A document is named by its path below the folder, or below the part of a glob before the first wildcard. In a folder
    saved by ``datasets``, the Arrow files are read. ``json_as_text`` reads JSON lines as text, including braces. Files
    below ``out``, the dataset's location, are not read.

    Raises ``CorpusError`` for a pattern without files, for files in two patterns, and for unreadable files unless
    ``on_bad`` is "skip". Unreadable files are otherwise listed in ``left_out``, files that only describe data in
    ``aside``.
    """
    entries, linked = _matching_files(patterns, below(out))
    readable: list[CorpusFile] = []
    bad: list[BadDocument] = []
    remedies: list[str] = []
    for name, path in entries:
        try:
            file = _corpus_file(name, path, options, on_bad, json_as_text=json_as_text)
        except FormatError as error:
            bad.append(BadDocument(error.path, "", error.reason))
            remedies.append(error.remedy)
        else:
            readable.append(file)
    if bad and (on_bad == "stop" or not readable):
        raise CorpusError(_cannot_be_read(bad, remedies, len(entries), on_bad))
    readable, aside = _without_descriptions(readable, {Path(pattern) for pattern in patterns})
    return Files(readable, options, on_bad, left_out=bad, aside=aside, linked=linked)


def below(out: str | Path) -> str:
    """Return the prefix of all resolved paths or URLs below the folder or store ``out``; empty if ``out`` is empty."""
    place = str(out)
    if not place or is_remote(place):
        return place and f"{place.rstrip('/')}/"
    return f"{Path(local_path(place)).expanduser().resolve()}/"


def local_path(place: str) -> str:
    """Return the local path of a path or ``file://`` URL."""
    return unquote(urlsplit(place).path) if is_url(place) else place


def _corpus_file(
    name: str, path: Path, options: ReadOptions, on_bad: OnBad, *, json_as_text: bool
) -> CorpusFile:
    """Return the file with its format, size and time. With ``on_bad`` "skip", JSON lines may be damaged later;
    ``json_as_text`` reads them as text. Raises ``FormatError`` if it cannot be read or has no text field.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise FormatError(Path(ascii(str(path))), "has a name that is not UTF-8", "rename it") from None
    form = recognize(path, may_be_damaged=on_bad == "skip")
    if json_as_text and form.kind is Kind.JSONL:
        form = FileFormat(Kind.TEXT, form.compression)
    state = path.stat()
    require_text(path, form, options)
    return CorpusFile(name, path, form, state.st_size, state.st_mtime_ns)


def _cannot_be_read(bad: list[BadDocument], remedies: list[str], of: int, on_bad: OnBad) -> str:
    """Return the message about ``bad`` files out of ``of``: the first one with its remedy, and how to continue without such files."""
    first = f"{bad[0].path} {bad[0].reason}; {remedies[0]}"
    skip = "`phalanx data prepare --on-bad skip` leaves such files out and names them"
    if on_bad == "skip":
        return f"none of {of:,} files can be read; the first: {first}"
    if len(bad) == 1:
        return f"{first} ({skip})"
    return (
        f"{len(bad):,} of {of:,} files cannot be read, of which the first: {first}; or name the others alone, with a glob such as "
        f"'folder/**/*.txt' ({skip})"
    )


def _without_descriptions(files: list[CorpusFile], named: set[Path]) -> tuple[list[CorpusFile], list[Path]]:
    """Return the files to read, and those left out because they only describe the data beside them, such as a README
    in a folder of Parquet files. If all files are text, or a file is in ``named``, it is read.
    """
    if all(file.format.kind is Kind.TEXT for file in files):
        return files, []
    data_files: list[CorpusFile] = []
    aside: list[CorpusFile] = []
    with_texts = {file.path.parent for file in files if file.format.kind is Kind.TEXT and not _is_facts(file)}
    for file in files:
        # A single JSON object in a folder of rows is usually written by a tool and describes them.
        describes = file.path.name.lower() in _ABOUT_DATA or (
            _is_facts(file) and file.path.parent not in with_texts
        )
        (aside if describes and file.path not in named else data_files).append(file)
    return data_files, [file.path for file in aside]


def _is_facts(file: CorpusFile) -> bool:
    return (
        file.format == FileFormat(Kind.TEXT) and file.path.suffix == ".json" and not _begins_rows(file.path)
    )


def _begins_rows(path: Path) -> bool:
    with path.open("rb") as file:
        return _BEGINS_ROWS.match(file.read(_LOOKED_AT_BYTES)) is not None


def _require_unchanged(file: CorpusFile) -> None:
    """Raise ``CorpusError`` if the file is gone, or its size or time of modification has changed."""
    try:
        state = file.path.stat()
    except OSError as error:
        raise CorpusError(f"cannot read {file.path}: {error.strerror}; prepare again without it") from error
    if (state.st_size, state.st_mtime_ns) != (file.bytes, file.modified_ns):
        raise CorpusError(f"{file.path} changed while it was being prepared; prepare again when it is whole")


def _matching_files(patterns: Sequence[str | Path], own: str) -> tuple[list[tuple[str, Path]], list[Path]]:
    """Return name and original path of all files, in order of name and resolved path; and links to folders.

    Files below ``own`` are left out. Raises ``CorpusError`` for a pattern without files, a file named twice, or no file
    outside ``own``.
    """
    linked: list[Path] = []
    names: dict[Path, tuple[str, Path]] = {}
    pattern_of: dict[Path, str] = {}
    duplicates: list[tuple[Path, str, str]] = []
    for pattern in map(str, patterns):
        entries = _expand(pattern, linked)
        if not entries:
            raise CorpusError(
                f"no file matches {pattern!r}; check the path (a folder counts its visible files)"
            )
        for name, path in entries:
            real = path.resolve()
            if own and str(real).startswith(own):
                continue
            if real in names and pattern_of[real] != pattern:
                duplicates.append((path, pattern_of[real], pattern))
            names.setdefault(real, (name, path))
            pattern_of.setdefault(real, pattern)
    if patterns and not names:
        raise CorpusError(
            f"all of the text is in {own}, where the dataset is to be, and files there are not read; give it another place: --out, or data.path"
        )
    if len(set(map(str, patterns))) < len(patterns):
        repeated = next(pattern for pattern, count in Counter(map(str, patterns)).items() if count > 1)
        raise CorpusError(f"{repeated!r} is named more than once; name it once, since a file is read once")
    if duplicates:
        path, first, second = duplicates[0]
        more = f" (and {len(duplicates) - 1:,} more)" if len(duplicates) > 1 else ""
        raise CorpusError(
            f"{path} is named twice, by {first!r} and by {second!r}{more}; name each file once, since it is read once"
        )
    return [names[real] for real in sorted(names, key=lambda real: (names[real][0], real))], linked


def _expand(pattern: str, linked: list[Path]) -> list[tuple[str, Path]]:
    """Return (name, path) of the files of one pattern: a folder, a file or a glob; none if nothing matches. Links to
    folders are added to ``linked``.
    """
    path = Path(pattern)
    if path.is_dir():
        return [(file.relative_to(path).as_posix(), file) for file in _below(path, linked)]
    if path.exists():
        return [(path.name, path)]
    root = before_wildcard(path)
    files = (Path(match) for match in sorted(glob.glob(pattern, recursive=True)))
    return [(file.relative_to(root).as_posix(), file) for file in files if file.is_file()]


def _below(folder: Path, linked: list[Path]) -> Iterator[Path]:
    """Yield all visible regular files below the folder; in folders saved by ``datasets``, only the Arrow files.

    Links to folders, which may be circular, are added to ``linked``. Hidden entries are left out. Raises
    ``CorpusError`` for a folder that cannot be read.
    """
    if (folder / "dataset_dict.json").is_file():
        folder = _only_split(folder)
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        yield from _saved_files(folder)
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise CorpusError(
            f"cannot read the folder {folder}: {error.strerror}; check its permissions"
        ) from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _below(Path(entry.path), linked)
        elif Path(entry.path).is_dir():
            linked.append(Path(entry.path))
        elif Path(entry.path).is_file():
            yield Path(entry.path)


def _only_split(folder: Path) -> Path:
    """Return the folder of a saved dataset's split. Raises ``CorpusError`` unless there is exactly one."""
    splits = _json(folder / "dataset_dict.json").get("splits")
    if not isinstance(splits, list) or not splits:
        raise CorpusError(f"{folder / 'dataset_dict.json'} names no splits; save the dataset again")
    if len(splits) > 1:
        choice = "train" if "train" in splits else splits[0]
        raise CorpusError(
            f"{folder} holds the splits {', '.join(map(str, splits))} of a dataset; name those to read, for example {folder / str(choice)}"
        )
    return folder / str(splits[0])


def _saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files that a saved dataset lists. Raises ``CorpusError`` for a selection of rows or an empty list."""
    state = _json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise CorpusError(
            f"{folder} was saved as a selection of rows; save it whole: dataset.flatten_indices().save_to_disk(...)"
        )
    listed = state.get("_data_files")
    names = (
        [item.get("filename") for item in listed if isinstance(item, dict)]
        if isinstance(listed, list)
        else []
    )
    if not names or not all(isinstance(name, str) for name in names):
        raise CorpusError(f"{folder / 'state.json'} names no data files; save the dataset again")
    return [folder / str(name) for name in names]


def _json(path: Path) -> dict[str, object]:
    """Return the object in a JSON file; empty if it is no object. Raises ``CorpusError`` if it cannot be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CorpusError(f"cannot read {path}: {error}; save the dataset again") from error
    return content if isinstance(content, dict) else {}


def before_wildcard(path: Path) -> Path:
    """Return the folder of a path's parts before the first with a wildcard."""
    return Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))


# Named corpora: training text that every machine has.
#
# A corpus has documents in a fixed order. A document's name does not depend on the files' location, because the name decides the split.


# Tests and bundled packages depend on how Python was installed, so they are left out.
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "_bundled", "__pycache__"}
)


def python_stdlib() -> list[Document]:
    """Return the source code of this Python's standard library: about 10 MB of text that every machine has.

    In order of file name, without tests, bundled packages, files written by the build, and files that are not UTF-8. The same Python release gives
    the same documents.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    sources = (path.relative_to(root) for path in files_below(root) if path.suffix == ".py")
    for relative in sorted(sources, key=Path.as_posix):
        if _NOT_LIBRARY & set(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        try:
            documents.append(
                Document(f"python_stdlib/{relative.as_posix()}", (root / relative).read_bytes().decode())
            )
        except UnicodeDecodeError:
            continue
    return documents


CORPORA: Mapping[str, Callable[[], list[Document]]] = MappingProxyType({"python-stdlib": python_stdlib})


def named_corpus(name: str) -> list[Document]:
    """Return the documents of a corpus by its name in ``CORPORA``. Raises ``CorpusError`` for an unknown name."""
    if name not in CORPORA:
        close = difflib.get_close_matches(name, CORPORA, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(CORPORA)}"
        raise CorpusError(
            f"no corpus is called {name!r}; {hint}. There is no such file or folder in {Path.cwd()} either: give the path from there"
        )
    return CORPORA[name]()
