"""``index.json``: the manifest of a prepared dataset.

It lies beside the token shards and holds everything needed to open them without reading them: dtype, counts and
checksums of each shard, how much text they stand for, the tokenizer, and how the dataset was made. Its fingerprint is
a SHA-256 over the token streams and the tokenizer: two datasets with one fingerprint train the same weights, however
each is cut into shards.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from phalanx.data.errors import DatasetError
from phalanx.run.directory.files import open_regular
from phalanx.run.fields import Problem, read_section, unknown_value

INDEX_FILE = "index.json"
VERSION = 1
"""A stream of documents joined end to end, cut to any length when it is read."""
PACKED_VERSION = 2
"""Records of one length, in which documents are whole (``phalanx.data.preparing.packing``)."""
CHAT_VERSION = 3
"""Records of conversations: the highest bit of a stored token says that there is a loss on it."""
VERSIONS = (VERSION, PACKED_VERSION, CHAT_VERSION)
TRAIN = "train"
HELD_OUT = "held_out"
SPLITS = (TRAIN, HELD_OUT)
_ITEM_BYTES = {"uint16": 2, "uint32": 4}
_MOST_TOKENS = 1 << 60
"""The most tokens of a split: more are on no disk, and places in their stream could not be counted in 64 bits."""


class ShardFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One flat file of little-endian token ids.

    A dataset may have a hundred thousand, and nothing is trained before they are read: to decode them into dataclasses takes three times as long.
    """

    file: str
    """Name within the dataset's directory."""
    tokens: Annotated[int, msgspec.Meta(ge=0)]
    xxh3_128: str
    """Checksum of the whole file, in hex."""
    sha256: str = ""
    """Digest of the whole file, in hex; only in datasets whose shards were written by many processes."""


@dataclass(frozen=True)
class Split:
    """One of the two token streams of a dataset, in its shards."""

    shards: tuple[ShardFile, ...]
    documents: int
    text_bytes: int
    """UTF-8 bytes of text that the tokens stand for."""
    sha256: str
    """Digest in hex of the token stream, all shards joined; where shards have digests of their own, of these (``digest_of_shards``)."""
    padding: int = 0
    """Tokens of packed records that fill them up."""
    learned: int = 0
    """Tokens with a loss, where the data are conversations."""
    left_out: int = 0
    """Conversations that were bad, or longer than a record."""

    @functools.cached_property
    def tokens(self) -> int:
        return sum([shard.tokens for shard in self.shards])


@dataclass(frozen=True)
class ChatRecipe:
    """What made tokens of conversations (``phalanx.data.chat``)."""

    template_sha256: str
    """Digest of the chat template and the special tokens that it names."""
    document_end: int
    """The token that ends a conversation, and fills records up."""
    too_long: str
    """"drop" or "cut": what became of conversations that a record does not hold."""


@dataclass(frozen=True)
class Recipe:
    """The input of dataset preparation; the same recipe gives the same dataset."""

    source_sha256: str
    """Digest of the names and texts of all documents, in order."""
    tokenizer: str
    """"bytes", "bpe", or "file:" and the fingerprint of the tokenizer given."""
    vocab_size: int | None
    """As asked for; the tokenizer's own may be smaller."""
    held_out_fraction: float
    shard_tokens: int
    document_start: tuple[int, ...] = ()
    """Ids that each document begins with: what the tokenizer puts before a text. Version 0.1.0 put none."""
    packed_seq_len: int = 0
    """Tokens of a record that documents are packed into; 0 means that they are joined end to end."""
    chat: ChatRecipe | None = None
    """How conversations were rendered; None for text."""
    hold_out_by: str = "name"
    """"name" or "text": what was hashed to choose a document's split. Version 0.1.0 knew names alone."""


@dataclass(frozen=True)
class DatasetIndex:
    """The content of ``index.json``."""

    dtype: str
    """"uint16" or "uint32", little-endian."""
    vocab_size: int
    tokenizer_kind: str
    tokenizer_fingerprint: str
    train: Split
    held_out: Split
    held_out_xz_bits_per_byte: float | None
    """Bits per byte that ``xz -9`` needs for the held-out text; None where there is none."""
    recipe: Recipe
    document_mask: bool = False
    """Runs keep attention within documents unless they say otherwise. So it is of all packed datasets, but for those prepared before this was said: runs on
    these go on as they began. The fingerprint does not cover it: the tokens are the same."""

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, over the token streams and the tokenizer."""
        # How the stream of a version 1 is cut into sequences is the run's; the records of a packed one are its own.
        parts = (
            str(self.version),
            self.dtype,
            self.tokenizer_fingerprint,
            self.train.sha256,
            self.held_out.sha256,
            *([str(self.packed_seq_len)] if self.packed_seq_len else []),
        )
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def version(self) -> int:
        """The version of the format."""
        if self.recipe.chat is not None:
            return CHAT_VERSION
        return PACKED_VERSION if self.packed_seq_len else VERSION

    @property
    def loss_bit(self) -> int:
        """The bit of a stored token that says that there is a loss on it, as a number; 0 where there is one on all."""
        return 0 if self.recipe.chat is None else loss_bit(self.dtype)

    @property
    def document_end(self) -> int | None:
        """The token that ends documents, if it is not the tokenizer's."""
        return None if self.recipe.chat is None else self.recipe.chat.document_end

    @property
    def packed_seq_len(self) -> int:
        """Tokens of a record; 0 for a stream."""
        return self.recipe.packed_seq_len

    def samples(self, split: str, seq_len: int) -> int:
        """Samples of ``seq_len`` inputs and their targets in a split. Raises ``DatasetError`` if its records have another length."""
        tokens = self.split(split).tokens
        if not self.packed_seq_len:
            return max(0, (tokens - 1) // seq_len)
        if self.packed_seq_len != seq_len:
            raise DatasetError(
                f"the dataset is packed for sequences of {self.packed_seq_len} tokens, and train.seq_len is {seq_len}: set it to "
                f"{self.packed_seq_len}, or prepare the text with --pack --seq-len {seq_len}"
            )
        return tokens // seq_len

    @property
    def train_tokens(self) -> int:
        return self.train.tokens

    @property
    def held_out_tokens(self) -> int:
        return self.held_out.tokens

    def split(self, name: str) -> Split:
        """The split called "train" or "held_out". Raises ``DatasetError`` for another name."""
        if name not in SPLITS:
            raise DatasetError(f"no split is called {name!r}; a dataset has {' and '.join(SPLITS)}")
        return self.train if name == TRAIN else self.held_out

    def to_json(self) -> str:
        """The text of ``index.json``."""
        content = asdict(self)
        for name in SPLITS:
            content[name]["shards"] = [msgspec.structs.asdict(shard) for shard in self.split(name).shards]
        if self.recipe.hold_out_by == "name":
            del content["recipe"]["hold_out_by"]
        if not self.document_mask:
            del content["document_mask"]
        if not self.packed_seq_len:  # as version 1 always was
            del content["recipe"]["packed_seq_len"]
            for name in SPLITS:
                del content[name]["padding"]
        if self.recipe.chat is None:
            del content["recipe"]["chat"]
            for name in SPLITS:
                del content[name]["learned"], content[name]["left_out"]
        for name in SPLITS:
            for shard in content[name]["shards"]:
                if not shard["sha256"]:
                    del shard["sha256"]
        return (
            json.dumps({"version": self.version, "fingerprint": self.fingerprint, **content}, indent=1) + "\n"
        )


def digest_of_shards(shards: Sequence[ShardFile]) -> str:
    """The digest of a split from those of its shards, in order: a hash over all bytes at once would have to be computed by one process."""
    return hashlib.sha256("\n".join(shard.sha256 for shard in shards).encode()).hexdigest()


def dtype_for(vocab_size: int, *, with_loss_bit: bool = False) -> str:
    """The smallest of the two dtypes that holds every token id below ``vocab_size``, and beside it the bit of the loss."""
    return "uint16" if vocab_size <= 1 << (15 if with_loss_bit else 16) else "uint32"


def loss_bit(dtype: str) -> int:
    """The highest bit of a dtype, as a number."""
    return 1 << (8 * _ITEM_BYTES[dtype] - 1)


def read_index(directory: Path) -> DatasetIndex:
    """Read ``directory/index.json`` and check that it is whole and of this version. Raises ``DatasetError``."""
    path = directory / INDEX_FILE
    try:
        with open_regular(path, follow=True) as file:
            text = file.read().decode()
    except FileNotFoundError as error:
        what = (
            f"{directory} holds no {INDEX_FILE}"
            if directory.is_dir()
            else f"there is no directory {directory}"
        )
        raise DatasetError(f"{what}; prepare the dataset there, or correct the path") from error
    except NotADirectoryError as error:
        raise DatasetError(
            f"{directory} is a file, and no dataset: prepare it with `phalanx data prepare {directory} --out DIR`, and give DIR"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(
            f"cannot read {path}: {error}; copy the dataset again, or prepare it again"
        ) from error
    return parse_index(text, path)


def parse_index(text: str, path: Path) -> DatasetIndex:
    """The index whose JSON ``text`` is; ``path`` is for messages. Raises ``DatasetError``."""
    problems: list[Problem] = []
    shards: dict[str, tuple[ShardFile, ...]] = {}
    try:
        parts = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        content: dict[str, object] = {
            name: msgspec.json.decode(part) for name, part in parts.items() if name not in SPLITS
        }
        for name in SPLITS:
            if name in parts:
                content[name] = _split_apart(name, parts[name], shards, problems)
        version = content["version"]
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise _damaged(path, repr(error)) from error
    if version not in VERSIONS:
        raise DatasetError(
            f"{path} has version {version!r} of the dataset format, this Phalanx reads versions {VERSION} to {CHAT_VERSION}; prepare the "
            "dataset again, or use the release that made it"
        )
    fields = {name: value for name, value in content.items() if name not in ("version", "fingerprint")}
    index = read_section(DatasetIndex, fields, problems)
    if index is not None:
        splits = {name: replace(index.split(name), shards=found) for name, found in shards.items()}
        index = replace(index, **splits)  # type: ignore[arg-type]
    if index is not None and index.dtype not in _ITEM_BYTES:
        problems.append(unknown_value("dtype", index.dtype, _ITEM_BYTES))
    if index is None or problems:
        raise _damaged(path, "; ".join(map(str, problems)))
    if index.version != version:
        raise _damaged(
            path, f"version {version} and packed_seq_len {index.packed_seq_len} contradict each other"
        )
    if content.get("fingerprint") != index.fingerprint:
        raise DatasetError(
            f"{path} was changed: its content has fingerprint {index.fingerprint}, it says {content.get('fingerprint')}"
            "; copy the dataset again, or prepare it again"
        )
    return index


def _split_apart(
    name: str, part: msgspec.Raw, shards: dict[str, tuple[ShardFile, ...]], problems: list[Problem]
) -> object:
    """A split without its shards, which are added to ``shards``; what is wrong with them is added to ``problems``. Raises ``DecodeError``."""
    try:
        fields = msgspec.json.decode(part, type=dict[str, msgspec.Raw])
        found = msgspec.json.decode(fields.get("shards", b"[]"), type=tuple[ShardFile, ...])
    except msgspec.ValidationError as error:
        problems.append(Problem(f"{name}.shards", str(error), "must be a list of files with their checksums"))
        split: object = msgspec.json.decode(part)
        return {**split, "shards": []} if isinstance(split, dict) else split
    if not _plain_names([shard.file for shard in found]):
        problems.append(
            Problem(
                f"{name}.shards", "names a file outside the dataset", "must be names of files in its folder"
            )
        )
    if sum([shard.tokens for shard in found]) > _MOST_TOKENS:
        problems.append(
            Problem(
                f"{name}.shards", "have more tokens than any disk holds", "must have those of their files"
            )
        )
    shards[name] = found
    return {field: [] if field == "shards" else msgspec.json.decode(value) for field, value in fields.items()}


def _plain_names(files: Sequence[str]) -> bool:
    """False if one leads out of the folder: whoever writes an index would choose the file that a cache of the dataset overwrites."""
    # Searched as one text: a look at each of a hundred thousand takes longer than to decode them.
    joined = "/".join(files)
    around = f"/{joined}/" if files else ""
    return joined.count("/") == max(0, len(files) - 1) and not any(
        bad in around for bad in ("\0", "//", "/./", "/../")
    )


def _damaged(path: Path, reason: str) -> DatasetError:
    return DatasetError(f"{path} is damaged ({reason}); copy the dataset again, or prepare it again")
