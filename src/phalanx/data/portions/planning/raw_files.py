"""Raw files of a recipe's sources: listing, change detection and temporary copies.

Files are listed in order of path or URL, each with its size and a mark that changes with its content: the store's etag, or a local file's
modification time. Local files are read in place. The needed bytes of a remote object are copied into a sparse local file at the same offsets, so
the same readers work for both.
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
from phalanx.data.preparing.files import before_wildcard, below, local_path
from phalanx.run.directory.files import files_below
from phalanx.store.open_store import is_remote, open_store
from phalanx.store.store import MissingObjectError, Store

_BROUGHT_BYTES = 16 << 20
_WILDCARD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class RawFile:
    """A raw file at the time it was listed."""

    url: str
    """An absolute path, or the URL of an object."""
    name: str
    """Base of its documents' names: the path below the source's folder, or below the part before the first wildcard."""
    nbytes: int
    mark: str
    """Changes with the content: the store's etag, or a local file's modification time in ns."""
    source: int
    """Number of its ``[[source]]``."""


def list_raw_files(sources: Sequence[RawSource], folder: Path, out: str = "") -> list[RawFile]:
    """Return all non-empty files of the sources in the order of their URLs. Relative paths are below ``folder``.

    A file in several sources belongs to the first. Files below ``out``, the dataset's location, are not listed. Raises ``CorpusError`` for a source
    without files, and ``StoreError``.
    """
    files: dict[str, RawFile] = {}
    own = below(out)
    for number, source in enumerate(sources):
        listed = (
            _remote_files(source.url, number)
            if is_remote(source.url)
            else _local_files(source.url, number, folder)
        )
        kept_files = [file for file in listed if not (own and file.url.startswith(own))]
        if not kept_files:
            raise CorpusError(
                f"no file matches source.url {source.url!r}; check it (a folder counts its visible files, a relative path begins at the recipe)"
            )
        for file in kept_files:
            files.setdefault(file.url, file)
    return sorted((file for file in files.values() if file.nbytes), key=lambda file: file.url)


def _local_files(url: str, number: int, folder: Path) -> Iterable[RawFile]:
    """Yield the visible files of a file, folder or glob on this machine, named below the folder or the glob's first wildcard."""
    path = folder / os.path.expanduser(local_path(url))
    if path.is_file():
        entries = [(path.name, path)]
    elif path.is_dir():
        entries = [(file.relative_to(path).as_posix(), file) for file in files_below(path)]
    else:
        top = before_wildcard(path)
        entries = [
            (Path(m).relative_to(top).as_posix(), Path(m)) for m in glob.glob(str(path), recursive=True)
        ]
    for name, file in entries:
        if file.is_file() and not any(part.startswith(".") for part in name.split("/")):
            stat = file.stat()
            yield RawFile(str(file.resolve()), name, stat.st_size, str(stat.st_mtime_ns), number)


def _remote_files(url: str, number: int) -> Iterable[RawFile]:
    """Yield the visible objects of a key, prefix or glob in a store, named below the prefix or before the first
    wildcard. An object of exactly that key is the only one.
    """
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
    """Return the regular expression of a glob; ``*`` and ``?`` do not match "/", ``**`` does, and sets in brackets stay."""
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]*\])", pattern)
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile(
        "".join(
            meaning.get(piece) or (piece if piece.startswith("[") else re.escape(piece)) for piece in pieces
        ),
        re.DOTALL,
    )


def store_of(url: str) -> tuple[Store, str]:
    """Return the store of a remote URL's bucket, and the key in it."""
    scheme, _, location = url.partition(
        "://"
    )  # not parsed as a URL: keys may contain "?" and "#", and globs "?"
    bucket, _, key = location.partition("/")
    return open_store(f"{scheme}://{bucket}"), key.strip("/")


def require_unchanged(file: RawFile) -> None:
    """Raise ``PreparationError`` if the file is gone or has changed since it was listed.

    Its size is compared, and its time of modification or its etag.
    """
    try:
        if is_remote(file.url):
            store, key = store_of(file.url)
            info = store.info(key)
            nbytes, mark, mark_name = info.nbytes, info.etag, "etag"
        else:
            stat = os.stat(file.url)
            nbytes, mark, mark_name = stat.st_size, str(stat.st_mtime_ns), "time of modification"
    except (OSError, MissingObjectError):
        raise PreparationError(
            f"{file.url} is gone since the plan was made; bring it back, or plan again with another --out"
        ) from None
    if nbytes != file.nbytes:
        raise PreparationError(_changed(file, f"{nbytes:,} bytes, it had {file.nbytes:,}"))
    if mark != file.mark:
        raise PreparationError(_changed(file, f"{mark_name} {mark}, it was {file.mark}"))


def _changed(file: RawFile, how: str) -> str:
    return f"{file.url} changed since the plan was made ({how}); plan again, with another --out"


class LocalBytes:
    """The needed bytes of a raw file, in a local file at the same offsets."""

    def __init__(self, file: RawFile, scratch: Path) -> None:
        """Use a local file in place; for a remote one, create a sparse file of its size in ``scratch``, which ``bring`` fills."""
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
        """True if the bytes are copied from a store."""
        return self._store is not None

    def bring(self, start: int, stop: int) -> None:
        """Copy the bytes from ``start`` to ``stop``, at most to the file's end, into the local copy. Does nothing for a
        local file.

        Raises ``PreparationError`` if the remote file is gone or the copy cannot be written.
        """
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
                f"cannot copy pieces of {self._file.url} to {self.path.parent} ({error.strerror}): make room there, or set TMPDIR to a folder on "
                "another disk"
            ) from error

    def bring_line_end(self, start: int) -> None:
        """Copy the bytes from ``start`` to at least the end of its line into the local copy, 1 MiB at a time. Does
        nothing for a local file.
        """
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
        """Return a message about the local file with the raw file's name."""
        return message.replace(str(self.path), self._file.url) if self.is_copy else message


# A task's temporary folder. An error for a full disk names the folder.


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Context with a new temporary folder, which is removed at the end. Raises ``PreparationError`` if there is no
    room for it or the files written inside.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield Path(folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise PreparationError(
            f"no room in {tempfile.gettempdir()} ({error.strerror}): make room there, or set TMPDIR to a folder on another disk"
        ) from error
