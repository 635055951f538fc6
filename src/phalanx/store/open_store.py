"""Open a store by its URL: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``, ``file:///folder`` or a path.

Credentials and endpoints come from where each vendor's own tools find them (``obstore_adapter.py``), never from the URL, which stands in
run files, logs and messages. The client library is loaded here, by the first remote URL, so that no other command pays for it.
"""

import errno
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit

from phalanx.run.directory.files import files_below, sync
from phalanx.store import store

# A folder as an object store, atomic and durable, so that a path can be used wherever a store's URL can.
#
# An object is a file. It is written under a temporary name, fsynced, and then renamed to its key, or linked to it for
# ``create``: a link fails if the name exists, on every POSIX file system with links, including NFS. The folder is fsynced last,
# so that an object that was reported as written survives a power cut. (Rust ``object_store`` has a local store with the same
# calls; it does not fsync.)

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}\.writing")
_MOST_RACES = 1_000  # with deletes that remove the folder that an object is to be written to
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class LocalFolder:
    """The objects in the folder ``root``, which was opened as ``url``."""

    def __init__(self, root: Path, url: str) -> None:
        self._root = root
        self.url = url

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with self._errors(key, "get"):
            return path.read_bytes()

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """As ``Store.ranges``, each span read by itself."""
        path = self._path(key)
        with self._errors(key, "ranges"):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                parts = [_read(descriptor, start, stop) for start, stop in spans]
            finally:
                os.close(descriptor)
        for (start, stop), data in zip(spans, parts, strict=True):
            if len(data) != stop - start:
                where, size = self._where(key), start + len(data)
                message = f"{where}: ends at byte {size:,}; byte {stop:,} was requested"
                raise store.ShortObjectError(message, where, "ranges")
        return [memoryview(data) for data in parts]

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.put_blocks(key, [data], len(data))

    def put_blocks(self, key: str, blocks: Iterable[bytes | memoryview], nbytes: int) -> None:  # noqa: ARG002
        with self._written(key, blocks, "put") as (temporary, path):
            os.rename(temporary, path)

    def create(self, key: str, data: bytes) -> None:
        """As ``Store.create``, by a hard link; a file that has these bytes already is no error. Raises
        UnconditionalStoreError if the file system has no links, and ValueError for more than ``MOST_CREATED_BYTES``.
        """
        if len(data) > store.MOST_CREATED_BYTES:
            raise ValueError(f"{self._where(key)}: {len(data):,} bytes are too many to create at once")
        with self._written(key, [data], "create") as (temporary, path):
            try:
                os.link(temporary, path)
            except FileExistsError:
                if path.read_bytes() != data:
                    raise store.ExistsError(
                        f"create of {self._where(key)}: it is there already; nothing was changed",
                        self._where(key),
                        "create",
                    ) from None
            except OSError as error:
                if error.errno in _NO_LINKS:
                    raise store.UnconditionalStoreError(
                        f"{self.url}: this file system has no links ({error.strerror}), so two attempts could both "
                        "commit; use another folder",
                        self.url,
                        "create",
                    ) from None
                raise
            os.unlink(temporary)

    def list(self, prefix: str = "") -> Iterator[store.Info]:
        """As ``Store.list``; temporary files, and files deleted meanwhile, are left out."""
        store.require_prefix(prefix, self.url)
        top = self._root / prefix
        with self._errors(prefix, "list"):
            for folder, _, names in os.walk(top, onerror=_raise_unless_missing):
                for name in names:
                    path = Path(folder, name)
                    if _TEMPORARY.fullmatch(name):
                        continue
                    try:
                        yield self._info(path)
                    except FileNotFoundError:
                        continue  # deleted meanwhile

    def info(self, key: str) -> store.Info:
        """As ``Store.info``; a folder counts as missing."""
        path = self._path(key)
        with self._errors(key, "info"):
            if path.is_dir():
                raise IsADirectoryError
            return self._info(path)

    def _info(self, path: Path) -> store.Info:
        """Return the listing of a file; its etag is made of inode, time and size. Raises ``OSError``."""
        stat = path.stat()
        return store.Info(
            path.relative_to(self._root).as_posix(),
            stat.st_size,
            f"{stat.st_ino:x}-{stat.st_mtime_ns:x}-{stat.st_size:x}",
            "",
            datetime.fromtimestamp(stat.st_mtime, UTC),
        )

    def delete(self, keys: Iterable[str]) -> None:
        """As ``Store.delete``; folders that become empty are removed too."""
        parents: set[Path] = set()
        for key in keys:
            path = self._path(key)
            with self._errors(key, "delete"):
                path.unlink(missing_ok=True)
            parents.add(path.parent)
        # Deepest first: a folder that is empty now does not exist for a store.
        for parent in sorted(parents, key=lambda path: -len(path.parts)):
            self._prune(parent)

    def remove_unfinished(self) -> None:
        with self._errors("", "delete"):
            for path in files_below(self._root):
                if _TEMPORARY.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def _prune(self, folder: Path) -> None:
        """Remove ``folder`` and its parents below the root while they are empty, and make the removal durable."""
        while folder != self._root:
            try:
                folder.rmdir()
            except OSError:
                break  # not empty, or a writer has just begun
            folder = folder.parent
        with self._errors("", "delete"), suppress(FileNotFoundError):  # another delete emptied it further
            sync(folder)

    @contextmanager
    def _written(
        self, key: str, blocks: Iterable[bytes | memoryview], operation: str
    ) -> Iterator[tuple[Path, Path]]:
        """Context with a durable temporary file of the content, and the path that the body should move or link it
        to.

        After a body without an error the folder is synced. The temporary file is removed in any case. Raises
        StoreError, also for an ``OSError`` of the body.
        """
        path = self._path(key)
        with self._errors(key, operation):
            descriptor, temporary = self._new_file(path)
            try:
                with open(descriptor, "wb") as file:
                    for block in blocks:
                        file.write(block)
                    file.flush()
                    os.fsync(file.fileno())
                yield temporary, path
                with suppress(FileNotFoundError):  # others have deleted the object, and its empty folder
                    sync(path.parent)
            finally:
                temporary.unlink(missing_ok=True)

    def _new_file(self, path: Path) -> tuple[int, Path]:
        """Create a temporary file beside ``path``, with its parents, and return descriptor and path.

        Retried up to 1,000 times if a parent was pruned meanwhile; then raises ``OSError``.
        """
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.writing")
        races = 0
        while True:
            try:
                _make_durable(path.parent)
                return os.open(
                    temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644
                ), temporary
            except (FileNotFoundError, FileExistsError):
                # A delete removed the empty folder between two system calls. If it happens every time, the working folder was
                # removed, or a file has the name of a folder.
                races += 1
                if races > _MOST_RACES:
                    raise

    def _path(self, key: str) -> Path:
        """Return the file of a key. Raises BadUrlError for a bad key, or a name of temporary files."""
        store.require_key(key, self.url)
        if _TEMPORARY.fullmatch(key.rpartition("/")[2]):
            raise store.BadUrlError(
                f"{self._where(key)}: such names are for files being written", self.url, "open"
            )
        return self._root / key

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    @contextmanager
    def _errors(self, key: str, operation: str) -> Iterator[None]:
        """Context that turns ``OSError`` into StoreError with the operation and key.

        A missing file, or a path that is no file, is MissingObjectError for get, ranges and info, else a plain
        StoreError. Other errors become what ``_explained`` returns.
        """
        try:
            yield
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            where = self._where(key)
            if operation in ("get", "ranges", "info"):
                raise store.MissingObjectError(
                    f"{operation} of {where}: there is no such object", where, operation
                ) from error
            raise store.StoreError(f"{operation} of {where}: {error.strerror}", where, operation) from error
        except OSError as error:
            raise _explained(error, self._where(key), operation) from error


def _explained(error: OSError, where: str, operation: str) -> store.StoreError:
    """Return the StoreError for an ``OSError``: FullError, DeniedError, or a plain one with the errno's name."""
    kind, text = (
        store.StoreError,
        f"{error.strerror} ({errno.errorcode.get(error.errno or 0, '?')}); check the disk or mount",
    )
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        kind, text = store.FullError, f"no room ({error.strerror}); free space or raise the quota"
    elif isinstance(error, PermissionError):
        kind, text = (
            store.DeniedError,
            "permission denied; give this user the right to it, or name another folder",
        )
    return kind(f"{operation} of {where}: {text}", where, operation)


def _read(descriptor: int, start: int, stop: int) -> bytearray:
    """Return the bytes from ``start`` to ``stop``; fewer if the file ends before."""
    data = bytearray(stop - start)
    view, done = memoryview(data), 0
    while done < len(data):
        count = os.preadv(descriptor, [view[done:]], start + done)
        if not count:
            return data[:done]
        done += count
    return data


def _make_durable(folder: Path) -> None:
    """Make a folder with its parents; the names of new ones are on the disk when this returns."""
    if folder.is_dir():
        return
    _make_durable(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


REMOTE_SCHEMES = ("s3", "gs", "az")


def is_url(place: str) -> bool:
    """True if ``place`` is a URL rather than a path."""
    return "://" in place


def is_remote(place: str) -> bool:
    """True if ``place`` is the URL of an object store rather than a folder."""
    return is_url(place) and urlsplit(place).scheme in REMOTE_SCHEMES


def check_url(url: str) -> str:
    """Return the URL or path without slashes at its end. Touches neither disk nor network.

    Raises BadUrlError if it is empty, of another scheme, without a bucket, or has a user, query or fragment;
    also for a file URL with a host, or without a path.
    """
    if not is_url(url):
        if not url:
            raise store.BadUrlError("an empty path names no store; give a folder or a URL", url, "open")
        return url.rstrip("/") or "/"
    parts = urlsplit(url)
    # The part before "@" and the part after "?" may be secrets, so the message shows neither.
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if parts.username is not None or parts.query or parts.fragment:
        raise store.BadUrlError(
            f"{shown}: a URL of a store has no user, query or fragment; credentials come from the environment",
            shown,
            "open",
        )
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise store.BadUrlError(
                f"{shown}: a file URL has three slashes and a full path: file:///folder", shown, "open"
            )
    elif parts.scheme not in REMOTE_SCHEMES:
        raise store.BadUrlError(
            f"{shown}: no such kind of store; there are s3://, gs://, az:// and file://", shown, "open"
        )
    elif not parts.netloc:
        raise store.BadUrlError(
            f"{shown}: names no bucket; write {parts.scheme}://BUCKET/PREFIX", shown, "open"
        )
    return shown.rstrip("/")


def open_store(url: str, retry: store.RetryPolicy | None = None) -> store.Store:
    """Open the store at ``url``; no request is sent yet. A folder is made when the first object is written.

    Raises BadUrlError, and MissingSupportError where a package is missing.
    """
    url = check_url(url)
    retry = retry or store.RetryPolicy()
    if is_remote(url):
        from phalanx.store.obstore_adapter import RemoteStore

        return RemoteStore(url, retry)

    path = unquote(urlsplit(url).path) if is_url(url) else os.path.expanduser(url)
    return LocalFolder(Path(path), url)


def joined(url: str, *names: str) -> str:
    """A place below a URL or path."""
    return "/".join((url.rstrip("/"), *(name.strip("/") for name in names if name)))
