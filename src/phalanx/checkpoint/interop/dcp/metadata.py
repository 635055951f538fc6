"""The ``.metadata`` of a ``torch.distributed.checkpoint`` folder, read without running anything that it holds.

The file is a pickle, and a pickle can name any function to be called. Here it may name the classes of PyTorch's metadata alone
(as ``torch.load(weights_only=True)`` allows only what is listed), and these are stand-ins that keep attributes and do nothing.
Whatever else it names is refused by name; whatever it says is checked before a file is opened: places lie in the folder, pieces in
their tensors. Format: torch/distributed/checkpoint/metadata.py and filesystem.py of PyTorch 2.x.
"""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from phalanx.checkpoint.format.boxes import ITEMSIZE, Extent
from phalanx.checkpoint.format.errors import CheckpointError

_Kind = TypeVar("_Kind")

METADATA = ".metadata"
_LARGEST_BYTES = 1 << 30
"""A hundred bytes for each piece of each tensor: ten million pieces."""
_DTYPES = ("float32", "bfloat16", "float16")


class DcpError(CheckpointError):
    """A folder in PyTorch's distributed format cannot be read; the message says why and what to do."""


@dataclass(frozen=True)
class Piece:
    """A rectangular part of a tensor, and the bytes of a file that hold it as ``torch.save`` wrote it."""

    offset: Extent
    shape: Extent
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredShape:
    """A tensor of the folder."""

    shape: Extent
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class FolderIndex:
    """The contents of a folder."""

    tensors: Mapping[str, StoredShape]
    others: tuple[str, ...]
    """Names of what is no tensor of floating-point numbers."""


class _Kept:
    """An object of the pickle: its attributes, whatever they are."""

    def __setstate__(self, state: object) -> None:
        self.state = state

    def field(self, name: str) -> object:
        state = getattr(self, "state", None)
        return state.get(name) if isinstance(state, dict) else None


class _Metadata(_Kept): ...


class _Tensor(_Kept): ...


class _Bytes(_Kept): ...


class _Chunk(_Kept): ...


class _Properties(_Kept): ...


class _StorageMeta(_Kept): ...


class _StorageInfo(_Kept): ...


class _Index(_Kept):
    """A key of the table of places."""

    @property
    def key(self) -> tuple[str, Extent]:
        offset = self.field("offset")
        return str(self.field("fqn")), _extent(offset) if offset is not None else ()


class _Function:
    """A function that the pickle may call; a pickle can set attributes of whatever it names, but not of this."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *arguments: object) -> object:
        return self._call(*arguments)

    def __setstate__(self, state: object) -> None:
        raise DcpError(f"{METADATA} changes what it only may call; take the folder from whom you trust")


_nothing = _Function(lambda *_: None)
"""Stands for values that do not matter here, such as memory formats."""
_place = _Function(lambda *parts: "/".join(map(str, parts)))
"""Stands for the classes of paths: the real ones are of Python, and what a pickle did to them would be done to this process."""


_ALLOWED: Mapping[tuple[str, str], object] = {
    **{
        ("torch.distributed.checkpoint.metadata", name): stand_in
        for name, stand_in in {
            "Metadata": _Metadata,
            "TensorStorageMetadata": _Tensor,
            "BytesStorageMetadata": _Bytes,
            "ChunkStorageMetadata": _Chunk,
            "TensorProperties": _Properties,
            "MetadataIndex": _Index,
            "StorageMeta": _StorageMeta,
            "_MEM_FORMAT_ENCODING": _nothing,
        }.items()
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _nothing,
    ("torch._utils", "_get_layout"): _nothing,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): _place,
    ("pathlib", "PurePosixPath"): _place,
    ("pathlib._local", "PosixPath"): _place,
}


class _Unpickler(pickle.Unpickler):
    """Knows the names in ``_ALLOWED``, and PyTorch's dtypes."""

    def find_class(self, module: str, name: str) -> object:
        allowed = _ALLOWED.get((module, name))
        if allowed is not None:
            return allowed
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        raise DcpError(
            f"{METADATA} names {module}.{name}, which is no part of PyTorch's metadata and could do anything; nothing of "
            "it was run. Take the folder from whom you trust, or write it anew with torch.distributed.checkpoint"
        )


def read_index(directory: Path) -> FolderIndex:
    """The tensors of a folder, and the files that hold their pieces.

    Raises DcpError where the metadata is damaged, names anything but PyTorch's own classes, or places that are not in the folder.
    """
    path = directory / METADATA
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise DcpError(f"{path}: larger than {_LARGEST_BYTES >> 20} MiB; it is no metadata")
        with path.open("rb") as stream:
            metadata = _Unpickler(stream).load()
        return _index_of(directory, metadata)
    except OSError as error:
        raise DcpError(f"{path}: {error.strerror}; give a folder in PyTorch's distributed format") from error
    except DcpError:
        raise
    except Exception as error:  # an unpickler raises whatever a damaged file makes it
        raise DcpError(f"{path}: damaged ({type(error).__name__}); copy the folder again") from error


def _index_of(directory: Path, metadata: object) -> FolderIndex:
    top = _expected(_Metadata, metadata)
    described = _expected(dict, top.field("state_dict_metadata"))
    placed = _expected(dict, top.field("storage_data"))
    places = {index.key: info for index, info in placed.items() if isinstance(index, _Index)}
    tensors: dict[str, StoredShape] = {}
    others: list[str] = []
    for name, entry in described.items():
        dtype = _dtype_of(entry) if isinstance(entry, _Tensor) else ""
        if isinstance(entry, _Tensor) and dtype in _DTYPES:
            shape = _extent(entry.field("size"))
            tensors[str(name)] = StoredShape(
                shape, dtype, tuple(_pieces(directory, str(name), entry, shape, places))
            )
        else:
            others.append(str(name))
    return FolderIndex(tensors, tuple(others))


def _dtype_of(entry: _Tensor) -> str:
    properties = entry.field("properties")
    state = properties.state if isinstance(properties, _Properties) else ()
    return str(state[0]) if isinstance(state, tuple) else ""


def _pieces(
    directory: Path, name: str, entry: _Tensor, shape: Extent, places: Mapping[tuple[str, Extent], object]
) -> Iterator[Piece]:
    covered = 0
    for listed in _expected(list, entry.field("chunks")):
        chunk = _expected(_Chunk, listed)
        offset, sizes = _extent(chunk.field("offsets")), _extent(chunk.field("sizes"))
        inside = len(offset) == len(sizes) == len(shape) and all(
            begin + size <= whole for begin, size, whole in zip(offset, sizes, shape, strict=True)
        )
        info = places.get((name, offset))
        if not inside or not isinstance(info, _StorageInfo):
            raise DcpError(f"{directory}: {name}: a piece at {offset} is not in the tensor, or in no file")
        covered += math.prod(sizes)
        if math.prod(sizes):
            piece = _piece(directory, name, offset, sizes, info)
            # Before memory is taken for it: torch.save writes every element.
            if piece.length < math.prod(sizes) * ITEMSIZE[_dtype_of(entry)]:
                raise DcpError(
                    f"{directory / piece.file}: {piece.length} bytes cannot hold {sizes} of {name}; copy the folder again"
                )
            yield piece
    if covered != math.prod(shape):
        raise DcpError(
            f"{directory}: {name}: its pieces hold {covered} of {math.prod(shape)} elements; copy it again"
        )


def _piece(directory: Path, name: str, offset: Extent, sizes: Extent, info: _StorageInfo) -> Piece:
    file = _expected(str, info.field("relative_path"))
    start, length = _expected(int, info.field("offset")), _expected(int, info.field("length"))
    if info.field("transform_descriptors"):
        raise DcpError(f"{directory}: {name} is stored transformed (compressed, say), which is not read here")
    path = directory / file
    if file != path.name or file in ("", ".", "..") or path.is_symlink() or not path.is_file():
        raise DcpError(f"{directory}: {name} is said to lie in {file!r}, which is no file of the folder")
    if start < 0 or length < 0 or start + length > path.stat().st_size:
        raise DcpError(f"{path}: is shorter than {METADATA} says; copy the folder again")
    return Piece(offset, sizes, file, start, length)


def _extent(sizes: object) -> Extent:
    extent = _expected(tuple, sizes)
    if not all(type(size) is int and size >= 0 for size in extent):
        raise TypeError(f"{extent} is no extent")
    return extent


def _expected(kind: type[_Kind], value: object) -> _Kind:
    """The value, which must be of that kind; else a TypeError, which is told as damage."""
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    return value
