"""Turn documents into a dataset in one process: tokenizer, token shards, and an index. A signal can interrupt it at any time.

The documents are read once for their digest, once to train a tokenizer if needed, and once to encode them. At most a few megabytes of
documents or tokens are in memory. A document's split depends only on a hash of its name or text, so it does not change when others are
added. If there are so few documents that a split would be empty, the end of the largest document is held out instead.

The dataset is written under a temporary name and renamed when it is complete. A second preparation with the same recipe reuses it; a different
dataset in the same place is an error. A killed preparation leaves a partial folder, which the next preparation for the same place removes.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import lzma
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from phalanx.data.chat.encode import BadConversationError, ChatEncoder, ChatLayout
from phalanx.data.chat.template import texts_of, untrained_chat
from phalanx.data.dedup import count_shared
from phalanx.data.errors import CorpusError, DataError, DatasetError, DatasetExistsError, NoRoomError
from phalanx.data.formats.document import Document
from phalanx.data.preparing import split_writer
from phalanx.data.preparing.files import Files
from phalanx.data.stored.index import (
    HELD_OUT,
    SPLITS,
    TRAIN,
    ChatRecipe,
    DatasetIndex,
    Recipe,
    read_index,
)
from phalanx.data.stored.shard_writer import ShardFolder, ShardWriter, commit
from phalanx.data.stored.shards import TokenShards
from phalanx.data.tokenizers.tokenizer import Tokenizer, load_tokenizer, train_bpe
from phalanx.process.background import settle
from phalanx.run.directory.files import held_folder

DEFAULT_BPE_VOCAB_SIZE = 32_768
DEFAULT_SHARD_TOKENS = 1 << 28
PREPARATION_FOLDER = "preparation"
"""Folder beside a dataset that was prepared in portions (``phalanx.data.portions``)."""
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

OnProgress = Callable[[str, int, int], None]
"""Called with (stage, documents done, total documents); the total is 0 while documents are being counted."""


@dataclass(frozen=True)
class PreparedDataset:
    """A prepared dataset."""

    place: str
    """Folder or URL of the dataset."""
    index: DatasetIndex
    reused: bool
    """True if the dataset existed already."""
    held_out_in_training: int | None = None
    """Number of held-out documents whose text is also in the training split. ``None`` if not counted, as for a reused dataset."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Numbers of documents read, kept and dropped, by reason. Only for a dataset prepared in portions."""


def prepare(
    documents: Iterable[Document],
    out: Path,
    *,
    tokenizer: str | Path = "bpe",
    vocab_size: int | None = None,
    held_out_fraction: float = 0.05,
    hold_out_by: Literal["name", "text"] = "name",
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    packed_seq_len: int = 0,
    chat: ChatLayout | None = None,
    on_progress: OnProgress | None = None,
) -> PreparedDataset:
    """Write the dataset of ``documents`` to ``out``, or reuse it there.

    ``documents`` must be the same in each iteration: a list or ``Files``, not a generator. ``tokenizer`` is "bpe" (trained on the training split, with
    at most ``vocab_size`` tokens, 32,768 if None), "bytes", or the path of a ``tokenizer.json`` or of sentencepiece's ``tokenizer.model``. For the last
    two, ``vocab_size`` is None or must match. Held-out text is also compressed with ``xz -9``, which takes up to about 700 MB of memory. With a
    ``packed_seq_len``, documents are packed into records of that length; otherwise they are joined end to end. With ``chat``, documents are
    conversations from ``conversation_text``. They are packed, with an existing tokenizer or one trained on them with the template's special tokens.

    Raises ``CorpusError`` (documents unfit or changing), ``TokenizerError``, ``DatasetExistsError`` (``out`` has other content, which is not changed),
    ``NoRoomError`` (disk full, output removed), and ``DatasetError``.
    """
    if not 0 <= held_out_fraction < 1:
        raise DatasetError(f"held_out_fraction = {held_out_fraction} is not in [0, 1)")
    if packed_seq_len and packed_seq_len < 2:
        raise DatasetError(f"packed_seq_len = {packed_seq_len} holds no token and its target; give 2 or more")
    source = _Source(
        documents, split_writer.SplitRule(held_out_fraction, hold_out_by), on_progress, divisible=chat is None
    )
    existing, untrained = split_writer.named_tokenizer(tokenizer), None
    if existing is not None and vocab_size not in (None, existing.vocab_size):
        raise DatasetError(
            f"vocab_size = {vocab_size}, but the tokenizer given has {existing.vocab_size}; leave it out"
        )
    if chat is not None:
        if not packed_seq_len:
            raise DatasetError("chats are packed into records: give packed_seq_len")
        if existing is None:
            untrained = untrained_chat(chat.template)
            chat = replace(chat, template=untrained.template)

    def encoding_in(tokenizer: Tokenizer) -> split_writer.Encoding:
        encoder = ChatEncoder(tokenizer, chat, packed_seq_len) if chat is not None else None
        return split_writer.Encoding(tokenizer, packed_seq_len, chat=encoder)

    def train() -> split_writer.Encoding:
        texts, special_tokens = source.train_texts(), untrained.special_tokens if untrained else ()
        if untrained is not None:
            texts = (text for line in texts for text in texts_of(line))
        size = vocab_size or DEFAULT_BPE_VOCAB_SIZE
        return encoding_in(train_bpe(texts, vocab_size=size, special_tokens=special_tokens))

    encoding = encoding_in(existing) if existing is not None else None
    end = untrained.end if untrained is not None else encoding.document_end if encoding is not None else 0
    recipe = Recipe(
        source.sha256,
        split_writer.description(existing),
        vocab_size if existing is not None else vocab_size or DEFAULT_BPE_VOCAB_SIZE,
        held_out_fraction,
        shard_tokens,
        existing.document_start if existing is not None and chat is None else (),
        packed_seq_len,
        None if chat is None else ChatRecipe(chat.template.sha256, end, chat.too_long),
        hold_out_by,
    )
    return _find(out, recipe) or _write(source, out, recipe, lambda: encoding or train())


class _Source:
    """The documents with text, which must be the same in each iteration."""

    def __init__(
        self,
        documents: Iterable[Document],
        rule: split_writer.SplitRule,
        on_progress: OnProgress | None,
        *,
        divisible: bool,
    ) -> None:
        """Read all documents once, to count and hash them and choose the held-out end. ``divisible``: a document may be
        cut for that.

        Raises ``CorpusError`` for a generator, or too little text.
        """
        if iter(documents) is documents:
            raise CorpusError(
                "documents are gone through several times: give a list or Files, not a generator"
            )
        self._documents, self._on_progress = documents, on_progress
        self.total = 0
        self.sha256 = ""
        numbered = self._numbered("read")
        files = [file.path for file in documents.files] if isinstance(documents, Files) else []
        end = split_writer.held_out_end(((0, *item) for item in numbered), rule, files, divisible=divisible)
        for _ in numbered:
            pass  # iterate to the end to compute the digest
        self._rule = replace(rule, end=end)

    def read(self, stage: str) -> Iterator[tuple[str, Document]]:
        """Yield (split, document) of each document. Raises ``CorpusError`` if documents have changed."""
        for number, document in self._numbered(stage):
            yield from self._rule.divide(document, 0, number)

    def train_texts(self) -> Iterator[str]:
        return (document.text for split, document in self.read("train tokenizer") if split == TRAIN)

    def _numbered(self, stage: str) -> Iterator[tuple[int, Document]]:
        """Yield (number, document) of the documents with text, and report progress with the number so far.

        At the end, notes their count and checksum; raises ``CorpusError`` if another pass had other content.
        """
        digest = hashlib.sha256()
        count = 0
        for document in self._documents:
            if not document.text:
                continue
            name, text = _utf8(document.name, document.name), _utf8(document.text, document.name)
            digest.update(len(name).to_bytes(8, "little") + name + len(text).to_bytes(8, "little"))
            digest.update(text)
            yield count, document
            count += 1
            if self._on_progress is not None:
                self._on_progress(stage, count, self.total)
        if self.sha256 not in ("", digest.hexdigest()):
            raise CorpusError("the documents changed while they were being prepared; prepare them again")
        self.total, self.sha256 = count, digest.hexdigest()


def _write(
    source: _Source, out: Path, recipe: Recipe, encode: Callable[[], split_writer.Encoding]
) -> PreparedDataset:
    """Encode the documents into a partial folder and rename it to ``out``. On a failure the folder is removed.
    ``encode`` returns the encoding, and may train its tokenizer.

    Raises ``NoRoomError`` for a full disk and ``DatasetError`` for other errors of the file system.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with held_folder(f".{out.name}.partial-", out.parent) as partial:
            encoding = interruptible(encode)
            encoding.save(partial)
            return _commit(partial, out, *_encode(source, partial, recipe, encoding))
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise NoRoomError(
                f"no room to write {out} ({error.strerror}): make room there, or choose a directory on another disk; "
                "what was half written is removed"
            ) from error
        raise DatasetError(f"cannot write {out}: {error}") from error


def _encode(
    source: _Source, partial: Path, recipe: Recipe, encoding: split_writer.Encoding
) -> tuple[DatasetIndex, int]:
    """Write the shards of both splits to ``partial``, and compress held-out text with xz for comparison.

    Return the index, and the number of held-out documents that are also in the training split. Raises ``CorpusError``
    if no conversation is left.
    """
    xz = None if encoding.chat is not None else lzma.LZMACompressor(preset=9)
    xz_bytes = 0
    skips = encoding.chat is not None and encoding.chat.layout.on_bad == "skip"
    on_bad = _leave_out if skips else _refuse
    with ExitStack() as stack:
        writers: dict[str, split_writer.SplitWriter[Document]] = {}
        for name in SPLITS:
            shards = ShardWriter(
                ShardFolder(partial, name), dtype=encoding.dtype, shard_tokens=recipe.shard_tokens
            )
            writers[name] = split_writer.SplitWriter(stack.enter_context(shards), encoding, on_bad)
        for split, document in source.read("encode"):
            writers[split].add(document)
            if split == HELD_OUT and xz is not None:
                xz_bytes += len(xz.compress(document.text.encode()))
        splits = {name: writer.close() for name, writer in writers.items()}
    if not splits[TRAIN].tokens and (left_out := sum(split.left_out for split in splits.values())):
        raise CorpusError(
            f"no conversation is left to train on: {left_out:,} are bad or longer than a record of {recipe.packed_seq_len:,} tokens; "
            "a larger --seq-len or --too-long cut keeps long ones"
        )
    held_out_bytes = splits[HELD_OUT].text_bytes
    ratio = 8 * (xz_bytes + len(xz.flush())) / held_out_bytes if xz is not None and held_out_bytes else None
    shared = count_shared(writers[HELD_OUT].text_hashes, [writers[TRAIN].text_hashes])
    return encoding.index(recipe, splits, ratio, shared), shared


def _refuse(document: Document, error: BadConversationError) -> None:
    """Raise ``CorpusError`` for a conversation that cannot be trained on."""
    raise CorpusError(
        f"{document.name}: {error}; mend it, or leave out all that is bad: `phalanx data prepare --on-bad skip`"
    ) from error


def _leave_out(_document: Document, _error: BadConversationError) -> None:
    pass


def _commit(partial: Path, out: Path, index: DatasetIndex, held_out_in_training: int) -> PreparedDataset:
    """Move ``partial`` to ``out``. If another process was first, return its dataset if that has the same recipe;
    raise ``DatasetExistsError`` if not.
    """
    try:
        commit(partial, out, index)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        # Another process prepared a dataset there in the meantime. If it is not the same one, this raises.
        existing = _find(out, index.recipe)
        if existing is None:
            raise
        return existing
    return PreparedDataset(str(out), index, False, held_out_in_training)


def _find(out: Path, recipe: Recipe) -> PreparedDataset | None:
    """Return the dataset in ``out`` if it has this recipe, None if there is nothing or an empty folder. Shards are
    opened to check them.

    Raises ``DatasetExistsError`` if there is something else, or if the dataset is damaged.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        index = read_index(out)
    except DatasetError as error:
        raise DatasetExistsError(
            f"{out} exists and is not a dataset that can be used ({error}); choose another directory, or remove it"
        ) from error
    if index.recipe != recipe:
        raise DatasetExistsError(
            f"{out} already holds another dataset ({_differences(index.recipe, recipe)}); choose another directory, "
            "or remove that one"
            + (
                "; it was prepared in portions, and is found again with --workers"
                if (out / PREPARATION_FOLDER).is_dir()
                else ""
            )
        )
    try:
        load_tokenizer(out)
        for split in (TRAIN, HELD_OUT):
            TokenShards.open(out, split)
    except DataError as error:
        raise DatasetExistsError(
            f"{out} holds this dataset, damaged ({error}); mend it, or remove the directory and prepare again"
        ) from error
    return PreparedDataset(str(out), index, reused=True)


def _differences(stored: Recipe, requested: Recipe) -> str:
    """Return in words the fields in which two recipes differ."""
    names = Recipe.__dataclass_fields__
    pairs = ((name, getattr(stored, name), getattr(requested, name)) for name in names)
    return ", ".join(f"{name} {old!r}, not {new!r}" for name, old, new in pairs if old != new)


def _utf8(text: str, name: str) -> bytes:
    """Return a text as UTF-8. Raises ``CorpusError`` with the document's name."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(
            f"document {name!a} cannot be written as UTF-8: {error}; mend or leave it out"
        ) from error


# Long calls of native code that a signal can interrupt. Python runs signal handlers only in the main thread, between its own instructions.


_LOOK_S = 0.2
_T = TypeVar("_T")


def interruptible(call: Callable[[], _T]) -> _T:
    """Return the result of ``call``. If this is the main thread, it runs in another one.

    Raises the exceptions of ``call``, or of a signal handler. After the latter, the call continues until the process ends.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    future: Future[_T] = Future()
    thread = threading.Thread(target=settle, args=(future, call), name="native call", daemon=True)
    try:
        thread.start()  # a signal may arrive while waiting here
        while not future.done():
            wait([future], _LOOK_S)
    except BaseException as error:
        atexit.register(_end_during, future, error)
        raise
    return future.result()


def _end_during(future: Future[_T], error: BaseException) -> None:
    """End the process if the call is still running: the interpreter would unwind its native frames, which makes Rust
    abort the process. Its exit code is that of a ``SystemExit``, otherwise 130.
    """
    if not future.done():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 130)
