"""Raw files of the sources of a recipe: what exists, whether it is still what was planned, and temporary copies of it.

Files are listed by path or URL in its order, each with its size and a mark that changes with its content: the store's etag, or a local
file's time of modification. A local file is read where it is. Of an object, the bytes that a portion needs are brought into a sparse local
file, at the places where they lie in the object, so that the same readers serve both.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from phalanx.data.errors import CorpusError, PreparationError
from phalanx.data.portions.planning.recipe import RawSource
from phalanx.data.preparing.files import below, local_path
from phalanx.run.directory.files import files_below
from phalanx.store.open_store import is_remote, open_store
from phalanx.store.store import MissingObjectError, Store

_BROUGHT_BYTES = 16 << 20
_WILDCARD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class RawFile:
    """A raw file as it was listed."""

    url: str
    """An absolute path, or the URL of an object."""
    name: str
    """What its documents are called after: the path below the source's folder, or below the part before the first wildcard."""
    nbytes: int
    mark: str
    """Changes when the content does: the store's etag, or the time of modification of a local file in ns."""
    source: int
    """Number of its ``[[source]]``."""


def list_raw_files(sources: Sequence[RawSource], folder: Path, out: str = "") -> list[RawFile]:
    """All files of the sources with a byte in them, in the order of their URLs; relative paths are below ``folder``.

    A file that several sources name belongs to the first. Nothing below ``out``, where the dataset is written, is listed. Raises ``CorpusError`` for a source without any file, and ``StoreError``.
    """
    files: dict[str, RawFile] = {}
    own = below(out)
    for number, source in enumerate(sources):
        listed = (
            _remote_files(source.url, number)
            if is_remote(source.url)
            else _local_files(source.url, number, folder)
        )
        found = [file for file in listed if not (own and file.url.startswith(own))]
        if not found:
            raise CorpusError(
                f"no file matches source.url {source.url!r}; check it (a folder counts its visible files, a relative path begins at the recipe)"
            )
        for file in found:
            files.setdefault(file.url, file)
    return sorted((file for file in files.values() if file.nbytes), key=lambda file: file.url)


def _local_files(url: str, number: int, folder: Path) -> Iterable[RawFile]:
    path = folder / os.path.expanduser(local_path(url))
    if path.is_file():
        named = [(path.name, path)]
    elif path.is_dir():
        named = [(file.relative_to(path).as_posix(), file) for file in files_below(path)]
    else:
        parts = path.parts
        first = next((i for i, part in enumerate(parts) if _WILDCARD.search(part)), len(parts))
        top = Path(*parts[:first])
        named = [(Path(m).relative_to(top).as_posix(), Path(m)) for m in glob.glob(str(path), recursive=True)]
    for name, file in named:
        if file.is_file() and not any(part.startswith(".") for part in name.split("/")):
            stat = file.stat()
            yield RawFile(str(file.resolve()), name, stat.st_size, str(stat.st_mtime_ns), number)


def _remote_files(url: str, number: int) -> Iterable[RawFile]:
    store, pattern = store_of(url.rstrip("/"))
    wild = _WILDCARD.search(pattern)
    if wild is None:
        try:
            info = store.info(pattern)
        except MissingObjectError:
            top, matches = pattern, re.compile(".*", re.DOTALL)
        else:
            yield RawFile(
                f"{store.url}/{pattern}", pattern.rpartition("/")[2], info.nbytes, info.etag, number
            )
            return
    else:
        top, matches = pattern[: wild.start()].rpartition("/")[0], _glob_pattern(pattern)
    for info in store.list(top):
        name = info.key.removeprefix(f"{top}/") if top else info.key
        hidden = any(part.startswith(".") for part in name.split("/"))
        if not hidden and (wild is None or matches.fullmatch(info.key)):
            yield RawFile(f"{store.url}/{info.key}", name, info.nbytes, info.etag, number)


def _glob_pattern(pattern: str) -> re.Pattern[str]:
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]*\])", pattern)
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile(
        "".join(
            meaning.get(piece) or (piece if piece.startswith("[") else re.escape(piece)) for piece in pieces
        ),
        re.DOTALL,
    )


def store_of(url: str) -> tuple[Store, str]:
    """The store of a remote URL's bucket, and the key in it."""
    scheme, _, rest = url.partition("://")  # not as a URL: "?" and "#" may stand in a key, and "?" in a glob
    bucket, _, key = rest.partition("/")
    return open_store(f"{scheme}://{bucket}"), key.strip("/")


def require_unchanged(file: RawFile) -> None:
    """Raises ``PreparationError`` if the file is not the one that was listed."""
    try:
        if is_remote(file.url):
            store, key = store_of(file.url)
            info = store.info(key)
            nbytes, mark, what = info.nbytes, info.etag, "etag"
        else:
            stat = os.stat(file.url)
            nbytes, mark, what = stat.st_size, str(stat.st_mtime_ns), "time of modification"
    except (OSError, MissingObjectError):
        raise PreparationError(
            f"{file.url} is gone since the plan was made; bring it back, or plan again with another --out"
        ) from None
    if nbytes != file.nbytes:
        raise PreparationError(_changed(file, f"{nbytes:,} bytes, it had {file.nbytes:,}"))
    if mark != file.mark:
        raise PreparationError(_changed(file, f"{what} {mark}, it was {file.mark}"))


def _changed(file: RawFile, how: str) -> str:
    return f"{file.url} changed since the plan was made ({how}); plan again, with another --out"


class LocalBytes:
    """The bytes of a raw file that a reader needs, in a local file at the same places."""

    def __init__(self, file: RawFile, scratch: Path) -> None:
        self._file = file
        self._store: Store | None = None
        self.path = Path(file.url)
        if is_remote(file.url):
            self._store, self._key = store_of(file.url)
            self.path = scratch / (file.url.rpartition("/")[2])
            self.path.touch()
            os.truncate(self.path, file.nbytes)

    @property
    def is_copy(self) -> bool:
        """True if the bytes had to be brought here."""
        return self._store is not None

    def bring(self, start: int, stop: int) -> None:
        """Have the bytes from ``start`` up to ``stop`` in the local file."""
        if self._store is None:
            return
        stop = min(stop, self._file.nbytes)
        try:
            with self.path.open("r+b") as copy:
                copy.seek(start)
                for at in range(start, stop, _BROUGHT_BYTES):
                    copy.write(self._store.ranges(self._key, [(at, min(at + _BROUGHT_BYTES, stop))])[0])
        except MissingObjectError:
            raise PreparationError(
                f"{self._file.url} is gone since the plan was made; bring it back, or plan again with another --out"
            ) from None
        except OSError as error:
            raise PreparationError(
                f"no room for the pieces of {self._file.url} in {self.path.parent}: {error.strerror}"
            ) from error

    def bring_line_end(self, start: int) -> None:
        """Have the rest of the line that ``start`` lies in."""
        if self._store is None:
            return
        at = start
        while at < self._file.nbytes:
            stop = min(at + (1 << 20), self._file.nbytes)
            self.bring(at, stop)
            with self.path.open("rb") as copy:
                copy.seek(at)
                if b"\n" in copy.read(stop - at):
                    return
            at = stop

    def named(self, message: str) -> str:
        """A message about the local file as one about the raw file."""
        return message.replace(str(self.path), self._file.url) if self.is_copy else message


# A temporary folder of a task, whose full disk is an error that names it.


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A folder that is removed at the end. Raises ``PreparationError`` if there is no room for it, or for what is written to it."""
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield Path(folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise PreparationError(
            f"no room in {tempfile.gettempdir()} ({error.strerror}): make room there, or set TMPDIR to a folder on another disk"
        ) from error
