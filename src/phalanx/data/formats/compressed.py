"""Read compressed files as streams of bytes, and detect files that are truncated or damaged.

gzip, bzip2 and xz are read by Python's standard library, zstd by ``zstandard``. The stream reader of ``zstandard`` treats a truncated frame as
the end of the file, so frames are read one by one here.
"""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO

from phalanx.data.errors import MissingPackageError, optional_package
from phalanx.data.formats.document import OnBytes

if TYPE_CHECKING:
    import zstandard
    from typing_extensions import Buffer

_BLOCK_BYTES = 1 << 18
_LARGEST_ZSTD_WINDOW = 1 << 31
"""Maximum window of `zstd --long=31`, in bytes."""


class Compression(Enum):
    """Compression of a file; the value is the usual suffix of its name."""

    NONE = ""
    GZIP = "gz"
    ZSTD = "zst"
    XZ = "xz"
    BZ2 = "bz2"


class DamagedError(Exception):
    """Compressed bytes are truncated or corrupt."""


@contextmanager
def open_stream(
    path: Path, compression: Compression, on_bytes: OnBytes | None = None
) -> Iterator[io.BufferedReader]:
    """Yield the uncompressed bytes of a file.

    ``on_bytes`` is called after each read with the number of stored bytes read so far. Errors that show damage become
    ``DamagedError`` within the block. For zstd, raises ``MissingPackageError`` without ``zstandard``.
    """
    with path.open("rb", buffering=0) as raw:
        counted = _Counted(raw, on_bytes)
        try:
            yield io.BufferedReader(_uncompressed(counted, compression), _BLOCK_BYTES)
        except EOFError as error:
            raise DamagedError("it ends amid its compressed data") from error
        except (gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
            raise DamagedError(f"its compressed data are not what was written ({error})") from error
        except OSError as error:
            if error.errno is not None:
                raise
            # bz2 raises OSError without an errno for invalid data.
            raise DamagedError(f"its compressed data are not what was written ({error})") from error


def read_head(path: Path, compression: Compression, nbytes: int) -> bytes:
    """Return the first uncompressed bytes of a file, fewer if damage follows them. Raises as ``open_stream`` for damage at its beginning."""
    head = b""
    try:
        with open_stream(path, compression) as stream:
            while len(head) < nbytes and (block := stream.read1(nbytes - len(head))):
                head += block
    except DamagedError:
        if not head:
            raise
    return head


def _uncompressed(file: "_Counted", compression: Compression) -> io.RawIOBase:
    """Return a raw stream of the uncompressed bytes, which returns bytes before a damage first. Raises
    ``MissingPackageError`` for zstd without its package.
    """
    match compression:
        case Compression.NONE:
            return file
        case Compression.ZSTD:
            return _ZstdFrames(file)
        case Compression.GZIP:
            return _AsSoonAsRead(gzip.GzipFile(fileobj=io.BufferedReader(file, _BLOCK_BYTES), mode="rb"))
        case Compression.XZ:
            return _AsSoonAsRead(lzma.LZMAFile(io.BufferedReader(file, _BLOCK_BYTES)))
        case Compression.BZ2:
            return _AsSoonAsRead(bz2.BZ2File(io.BufferedReader(file, _BLOCK_BYTES)))


class _AsSoonAsRead(io.RawIOBase):
    """A decompressor's bytes in partial reads, so that the bytes before damage are still returned."""

    def __init__(self, stream: gzip.GzipFile | lzma.LZMAFile | bz2.BZ2File) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "Buffer") -> int:
        """Read what is there without waiting for more, and return the number of bytes; 0 at the end."""
        view = memoryview(buffer)
        data = self._stream.read1(len(view))
        view[: len(data)] = data
        return len(data)


class _Counted(io.RawIOBase):
    """A file that reports how many bytes have been read from it."""

    def __init__(self, raw: BinaryIO, on_bytes: OnBytes | None) -> None:
        self._raw = raw
        self._on_bytes = on_bytes
        self._bytes_read = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        return self._raw.tell()

    def readinto(self, buffer: "Buffer") -> int:
        """Read into ``buffer``, and call ``on_bytes`` with the total read so far; return the bytes read."""
        count: int = self._raw.readinto(buffer)  # type: ignore[attr-defined]
        self._bytes_read += count
        if self._on_bytes is not None:
            self._on_bytes(self._bytes_read)
        return count


class _ZstdFrames(io.RawIOBase):
    """All frames of a zstd file, in order; raises ``EOFError`` if the last one is truncated."""

    def __init__(self, file: io.RawIOBase) -> None:
        """Decompress ``file`` from its present position. Raises ``MissingPackageError`` without ``zstandard``."""
        self._zstandard = _zstandard()
        self._file = file
        self._context = self._zstandard.ZstdDecompressor(max_window_size=_LARGEST_ZSTD_WINDOW)
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def _dictionary(self) -> int:
        """Return the number of the dictionary of the frame that begins here; 0 if it has none, or its header cannot be
        read.
        """
        try:
            number: int = self._zstandard.get_frame_parameters(self._packed).dict_id
        except self._zstandard.ZstdError:
            return 0
        return number

    def readinto(self, buffer: "Buffer") -> int:
        """Decompress into ``buffer`` across frames, and return the bytes written; 0 at the end.

        Raises ``EOFError`` amid a frame, ``DamagedError`` for a frame that needs a dictionary, and ``zlib.error`` for
        other damage.
        """
        while not self._ready:
            if not self._packed:
                self._packed = self._file.read(_BLOCK_BYTES) or b""
                if not self._packed:
                    if self._frame is not None:
                        raise EOFError
                    return 0
            if self._frame is None:
                self._frame = self._context.decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(self._packed))
            except self._zstandard.ZstdError as error:
                if number := self._dictionary():
                    raise DamagedError(
                        f"it needs the zstd dictionary {number}, which is not read: compress it without one"
                    ) from error
                raise zlib.error(str(error)) from error
            self._packed = b""
            if self._frame.eof:
                self._packed = self._frame.unused_data
                self._frame = None
        view = memoryview(buffer)
        count = min(len(view), len(self._ready))
        view[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _zstandard() -> ModuleType:
    """Import and return ``zstandard``. Raises ``MissingPackageError`` with the command that installs it."""
    missing = "zstd files are read by the package zstandard, which is not installed"
    remedy = "pip install 'phalanx-train[prepare]', or pip install zstandard"
    return optional_package("zstandard", MissingPackageError(f"{missing}: {remedy}"))
