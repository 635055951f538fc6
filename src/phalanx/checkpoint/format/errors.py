"""Exceptions of checkpoints; each message has the cause and the remedy."""

from collections.abc import Iterable


class CheckpointError(Exception):
    """Any failure to write, find or read a checkpoint."""


class NoSuchStepError(CheckpointError):
    """The requested step is not committed in this tier."""


class NotCoveredError(CheckpointError):
    """No tier has some of the needed elements. ``names`` are their tensors."""

    def __init__(self, message: str, names: Iterable[str]) -> None:
        super().__init__(message)
        self.names = tuple(names)


class MismatchError(CheckpointError):
    """A tensor is stored with another global shape or dtype. ``names`` are the tensors."""

    def __init__(self, message: str, names: Iterable[str]) -> None:
        super().__init__(message)
        self.names = tuple(names)


class CorruptError(CheckpointError):
    """Bytes do not match their checksum, size or format."""


class FormatVersionError(CheckpointError):
    """The file has a format version that this code does not read."""


class MissingFileError(CheckpointError):
    """A file that the checkpoint's index names does not exist."""


class StorageFullError(CheckpointError):
    """The storage has no room (ENOSPC, EDQUOT, a file size limit)."""


class StorageError(CheckpointError):
    """The storage refused: EIO, permission, a stale handle."""


class AbandonedError(CheckpointError):
    """A save was abandoned before its commit: a rank failed or was too late, or the save was cancelled."""


class SavesHeldError(CheckpointError):
    """The fleet holds saves back: without a coordinator, a node cannot determine whether its epoch is the newest."""
