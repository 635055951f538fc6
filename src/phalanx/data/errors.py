"""The errors of the data pipeline, from text on a disk to tokens in a batch.

Each message names the file or value at fault and says what to do about it, so that a caller has only to print it.
"""

from pathlib import Path


class DataError(Exception):
    """Anything wrong with text, tokenizer or prepared dataset; catch this to catch them all."""


class CorpusError(DataError):
    """The text asked for is missing, unreadable, not UTF-8, or changed while it was read."""


class FormatError(CorpusError):
    """A file is of no format that can be read, or has not the field asked for, or cannot be opened."""

    def __init__(self, path: Path, reason: str, remedy: str) -> None:
        super().__init__(f"{path} {reason}; {remedy}")
        self.path = path
        self.reason = reason
        self.remedy = remedy


class MissingPackageError(CorpusError):
    """A file is of a format that is read by a package which is not installed."""


class TokenizerError(DataError):
    """A tokenizer file is missing, damaged, or of a kind that cannot be used."""


class DatasetError(DataError):
    """A prepared dataset is missing, damaged, of another version, or too small for what is asked of it."""


class DatasetExistsError(DatasetError):
    """The output directory already holds something else; nothing in it was touched."""


class NoRoomError(DatasetError):
    """The disk, the quota or the file-size limit was reached while writing; what was half written is removed."""


class PreparationError(DataError):
    """A preparation from a recipe cannot go on as planned; what is done so far is kept."""
