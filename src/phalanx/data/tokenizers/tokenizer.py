"""Lossless conversion of text to token ids and back.

There are three kinds with one interface. ``BytesTokenizer`` maps each UTF-8 byte to a token; it needs no training and suits tests and tiny models.
``BpeTokenizer`` is byte-level byte-pair encoding (Sennrich et al. 2016; on bytes, Radford et al. 2019) by Hugging Face's ``tokenizers``, trained here or
loaded from any byte-level ``tokenizer.json``. BPE with byte fallback can only be loaded (``published``).

All kinds have the number of text bytes of each token. So a loss in bits per byte can be compared between tokenizers and with a general
compressor, unlike a loss per token. A document's text never yields the end-of-document token, even if it spells the token's name. If a tokenizer begins
each text with a special token (as Llama 3's does), documents and prompts begin with it, but ``encode`` returns only the text. All are saved as a
Hugging Face ``tokenizer.json`` and ``tokenizer_config.json``.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers import other_formats, published
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError

END_OF_DOCUMENT = "<|endoftext|>"
BYTES_VOCAB_SIZE = 257
SENTENCEPIECE_FILE = "tokenizer.model"

# The split of GPT-4's tokenizer (also Llama 3's): words with the space before them, up to three digits, punctuation.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LONGEST_WORD = 1_024
"""Maximum characters of a word for training, which takes quadratic time in a word's length. DNA, hex and rulers have no spaces."""
_LONG_WORDS = re.compile(
    rf"[^\W\d_]{{{_LONGEST_WORD + 1},}}|\s{{{_LONGEST_WORD + 1},}}|(?:[^\w\s]|_){{{_LONGEST_WORD + 1},}}"
)


class Tokenizer(Protocol):
    """The tokenizer interface that the data pipeline uses."""

    @property
    def kind(self) -> str: ...  # "bytes" or "bpe"
    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_document(self) -> int: ...
    @property
    def document_start(self) -> tuple[int, ...]: ...  # put before each document and prompt; mostly none
    @property
    def prefix_bytes(self) -> int: ...  # 1 if ids of a text begin with a space that is not the text's, else 0
    @property
    def fingerprint(self) -> str: ...  # sha256, in hex, of all that decides how text is encoded
    @property
    def byte_lengths(
        self,
    ) -> NDArray[np.int64]: ...  # (vocab_size,): bytes of text per token; 0 for special tokens
    @property
    def longest_token(self) -> int: ...  # bytes of the longest token, special ones by their names

    def token_bytes(self, token: int) -> bytes:
        """Return the text bytes of a token; empty for a special one."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return only the token ids of ``text``, without ``document_start`` and ``end_of_document``."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Encode each text like ``encode``, on all cores if possible."""
        ...

    def decode(self, ids: Sequence[int], *, at_start: bool = True) -> str:
        """Return the text without special tokens; bytes of an incomplete character become U+FFFD.

        The ids are from the start of a text, or from the middle if ``at_start`` is false.
        """
        ...

    def save(self, directory: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``, which ``load_tokenizer`` reads."""
        ...


@dataclass(frozen=True)
class BytesTokenizer:
    """Maps each UTF-8 byte to the token of its value; 256 ends a document."""

    kind: str = field(default="bytes", init=False)
    vocab_size: int = field(default=BYTES_VOCAB_SIZE, init=False)
    end_of_document: int = field(default=256, init=False)
    document_start: tuple[int, ...] = field(default=(), init=False)
    prefix_bytes: int = field(default=0, init=False)
    longest_token: int = field(default=1, init=False)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(b"phalanx bytes tokenizer, end of document 256").hexdigest()

    @cached_property
    def byte_lengths(self) -> NDArray[np.int64]:
        """Bytes that each id stands for: one, and none for the end of a document; read-only."""
        lengths = np.ones(self.vocab_size, dtype=np.int64)
        lengths[self.end_of_document] = 0
        lengths.flags.writeable = False
        return lengths

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.end_of_document else bytes([token])

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int], *, at_start: bool = True) -> str:  # noqa: ARG002 - the same anywhere
        published.require_known_ids(ids, self.vocab_size)
        return bytes(token for token in ids if token != self.end_of_document).decode(errors="replace")

    def save(self, directory: Path) -> None:
        """Write an equivalent ``tokenizer.json`` and its configuration to ``directory``."""
        # Saved as a BPE without merges, so that other tools can load it.
        byte_of_char = _byte_of_char()
        hf = HfTokenizer(models.BPE(vocab=byte_of_char, merges=[]))
        hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        hf.decoder = decoders.ByteLevel()
        hf.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
        published.save_tokenizer(directory, hf.to_str(), END_OF_DOCUMENT, self.kind)


@dataclass(frozen=True)
class BpeTokenizer(published.PublishedTokenizer):
    """A byte-level BPE stored as the text of its ``tokenizer.json``. Create it with ``train_bpe`` or ``tokenizer_from_file``."""

    prefix_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Load the tokenizer and set ``end_of_document``.

        Raises ``TokenizerError`` if this is not a byte-level tokenizer, normalization is unbounded, there is no end
        token, text can spell it, or encoding and decoding change a text.
        """
        hf = _parse(published.without_stripping(self.serialized))
        published.require_bounded(hf)
        end_of_document = hf.token_to_id(self.end_token)
        if end_of_document is None:
            raise TokenizerError(f"the tokenizer has no token {self.end_token!r} to end documents with")
        object.__setattr__(self, "_hf", hf)
        object.__setattr__(self, "end_of_document", end_of_document)
        if end_of_document in self.encode(self.end_token):
            raise TokenizerError(
                f"text that spells {self.end_token!r} would end its document: mark that token as special, or name "
                f'another as "eos_token" in {published.CONFIG_FILE}'
            )
        published.require_lossless(
            hf,
            self.encode_batch,
            self.decode,
            lambda ids: int(self.byte_lengths[ids].sum()),
            "only byte-level BPE, which gives every text back as it was, can be used: choose such a tokenizer.json, or train one "
            "('bpe')",
        )

    @cached_property
    def document_start(self) -> tuple[int, ...]:
        """Return the special tokens that the tokenizer adds before a text; empty if none."""
        # Tokens added by the post-processor have no sequence id. (Transformers 5 and later ignore add_bos_token beside a
        # tokenizer.json.)
        encoded = self._hf.encode("a", add_special_tokens=True)
        first = next(index for index, sequence in enumerate(encoded.sequence_ids) if sequence is not None)
        return tuple(encoded.ids[:first])

    @cached_property
    def _spelled(self) -> list[bytes]:
        """Return the text bytes of each token, by id; empty for special tokens, unused ids and the end of document."""
        # Each character of a byte-level token is one byte. Added tokens are their own text, and special ones have no text.
        byte_of = _byte_of_char()
        spelled = [b""] * self.vocab_size
        for token, number in self._hf.get_vocab(with_added_tokens=False).items():
            bytes_of_token = [byte_of.get(char, -1) for char in token]
            spelled[number] = token.encode() if -1 in bytes_of_token else bytes(bytes_of_token)
        for number, added in self._hf.get_added_tokens_decoder().items():
            spelled[number] = b"" if added.special else added.content.encode()
        spelled[self.end_of_document] = b""
        return spelled

    def encode(self, text: str) -> list[int]:
        return list(self._hf.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        encodings = self._hf.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int], *, at_start: bool = True) -> str:  # noqa: ARG002 - the same anywhere
        published.require_known_ids(ids, self.vocab_size)
        # The library's decoder would treat the letters of an added token as bytes.
        return b"".join(self._spelled[token] for token in ids).decode(errors="replace")


def train_bpe(texts: Iterable[str], *, vocab_size: int, special_tokens: Sequence[str] = ()) -> BpeTokenizer:
    """Train a byte-level BPE of at most ``vocab_size`` tokens (fewer if the text has too few distinct pairs).

    The same texts give the same tokenizer for any number of threads. Memory grows only with the number of distinct
    words. ``vocab_size`` includes the 256 bytes, the end-of-document token with id 0, and ``special_tokens``, which
    have the next ids. Words that are very long are cut. Raises ``TokenizerError`` if ``vocab_size`` is too small.
    """
    least = BYTES_VOCAB_SIZE + len(special_tokens)
    if vocab_size < least:
        further = f" and {len(special_tokens)} special tokens" if special_tokens else ""
        raise TokenizerError(
            f"vocab_size = {vocab_size} is too small: 256 bytes and the end-of-document token{further} need {least}"
        )
    hf = HfTokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    hf.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    hf.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in (END_OF_DOCUMENT, *special_tokens)
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    hf.train_from_iterator((piece for text in texts for piece in _without_long_words(text)), trainer)
    return BpeTokenizer(hf.to_str(), END_OF_DOCUMENT)


def _without_long_words(text: str) -> Iterator[str]:
    """Yield ``text`` in pieces, cut within words of more than ``_LONGEST_WORD`` characters."""
    start = 0
    for word in _LONG_WORDS.finditer(text):
        for cut in range(word.start() + _LONGEST_WORD, word.end(), _LONGEST_WORD):
            yield text[start:cut]
            start = cut
    yield text[start:]


def tokenizer_from_file(path: Path) -> BpeTokenizer | published.FallbackTokenizer:
    """Load a published tokenizer from its file or from the directory of its model.

    The content determines the format: a ``tokenizer.json`` with a byte-level BPE or a BPE with byte fallback, sentencepiece's ``tokenizer.model``, or tiktoken's
    ranks. Documents end with the ``eos_token`` in the ``tokenizer_config.json`` beside it, or else with sentencepiece's end token, or the first
    well-known end token in the vocabulary. ``add_bos_token`` there specifies whether texts begin with sentencepiece's first token; by default they do if it
    has one. Raises ``TokenizerError``.
    """
    file = path
    if path.is_dir():
        names = (published.TOKENIZER_FILE, SENTENCEPIECE_FILE)
        file = next(
            (path / name for name in names if (path / name).is_file()), path / published.TOKENIZER_FILE
        )
    content = published.read_bytes(file)
    config = published.read_config(file.parent)
    end_token = published.named_token(config, "eos_token")
    try:
        if content.startswith(b"\n") and not content.lstrip().startswith(b"{"):
            add_bos = config.get("add_bos_token")
            serialized, model_end_token = other_formats.to_tokenizer_json(
                other_formats.read_model(content), add_bos=add_bos if isinstance(add_bos, bool) else None
            )
            end_token = end_token or model_end_token
        elif other_formats.is_ranks(content):
            ranks = other_formats.read_ranks(content)
            serialized = other_formats.ranks_to_tokenizer_json(
                ranks, other_formats.splitting_of(ranks, config)
            )
        else:
            serialized = published.decoded(content, file)
        if end_token is None:
            end_token = _guess_end_token(serialized)
        if published.is_byte_fallback(_model_of(serialized)):
            return published.FallbackTokenizer(serialized, end_token)
        return BpeTokenizer(serialized, end_token)
    except TokenizerError as error:
        raise TokenizerError(f"{file}: {error}") from error


def load_tokenizer(directory: Path) -> Tokenizer:
    """Return the tokenizer saved in ``directory``. Raises ``TokenizerError``."""
    if published.read_config(directory).get("phalanx_kind") == "bytes":
        return BytesTokenizer()
    return tokenizer_from_file(directory)


def load_own_tokenizer(run: RunDirectory) -> Tokenizer:
    """Return the tokenizer in a run directory.

    Raises ``TokenizerError``, also if it is not the one that the run was started with, or the run's record is damaged.
    """
    tokenizer = load_tokenizer(run.tokenizer)
    try:
        recorded = run.read_record().get("tokenizer_fingerprint") or tokenizer.fingerprint
    except RunDirectoryError as error:
        raise TokenizerError(str(error)) from error
    if tokenizer.fingerprint != recorded:
        raise TokenizerError(
            f"{run.tokenizer} is not the tokenizer that the run was started with ({tokenizer.fingerprint[:12]}, not {recorded[:12]}): "
            "copy tokenizer.json and tokenizer_config.json of the run's dataset there"
        )
    return tokenizer


def saved_fingerprint(files: Mapping[str, bytes]) -> str:
    """Return the fingerprint of a saved tokenizer from its files' names and contents, without loading it, which takes a second for many tokens.

    Empty if a file is missing or damaged, or the configuration names no end token. ``Tokenizer.save`` always writes both.
    """
    try:
        config, serialized = (
            json.loads(files[published.CONFIG_FILE]),
            files[published.TOKENIZER_FILE].decode(),
        )
    except (KeyError, ValueError, RecursionError):
        return ""
    if not isinstance(config, dict):
        return ""
    if config.get("phalanx_kind") == "bytes":
        return BytesTokenizer().fingerprint
    end_token = published.named_token(config, "eos_token")
    return "" if end_token is None else published.fingerprint_of(serialized, end_token)


def same_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    """Return True if both encode text to the same ids, judged by their vocabularies and a sample of text. End tokens
    and document starts must be the same too.

    Fingerprints only compare files: a tokenizer that was exported to other software and read back has another file.
    """
    if first.fingerprint == second.fingerprint:
        return True
    if (first.vocab_size, first.end_of_document, first.document_start) != (
        second.vocab_size,
        second.end_of_document,
        second.document_start,
    ):
        return False
    return first.encode(published.PROBE) == second.encode(published.PROBE) and all(
        first.decode([token]) == second.decode([token]) for token in range(first.vocab_size)
    )


def _model_of(serialized: str) -> dict[str, object]:
    """Return the ``model`` of a ``tokenizer.json``, after checking that the library can read it."""
    _read_by_library(serialized)
    model = json.loads(serialized)["model"]
    return model if isinstance(model, dict) else {}


def _read_by_library(serialized: str) -> HfTokenizer:
    """Parse the text of a ``tokenizer.json``. Raises ``TokenizerError`` if the library cannot."""
    try:
        return HfTokenizer.from_str(serialized)
    except Exception as error:  # the library raises bare Exception for a file that it cannot parse
        raise TokenizerError(
            f"neither a tokenizer.json ({error}), nor a tokenizer.model of sentencepiece or ranks of tiktoken; copy it again from where it came"
        ) from error


def _parse(serialized: str) -> HfTokenizer:
    """Return the library's tokenizer, which encodes without truncation and padding, and names of special tokens as
    text. Raises ``TokenizerError`` if it is no byte-level BPE.
    """
    hf = _read_by_library(serialized)
    model = json.loads(serialized)["model"]
    vocab = model["vocab"]
    if (
        model.get("type", "BPE") != "BPE"
        or not isinstance(vocab, dict)
        or not vocab.keys() >= _byte_of_char().keys()
    ):
        raise TokenizerError(
            "neither a byte-level BPE nor one that falls back to bytes, the only sorts that can spell every text: choose such "
            "a tokenizer, or train one ('bpe')"
        )
    # A tokenizer saved after training often truncates or pads, which would silently drop text.
    hf.no_truncation()
    hf.no_padding()
    hf.encode_special_tokens = True
    return hf


def _guess_end_token(serialized: str) -> str:
    """Return the first well-known end token in the vocabulary; raises ``TokenizerError`` if there is none."""
    hf = _read_by_library(serialized)
    for token in published.COMMON_END_TOKENS:
        if hf.token_to_id(token) is not None:
            return token
    special = [added.content for added in hf.get_added_tokens_decoder().values() if added.special]
    raise TokenizerError(
        f'which token ends a document? Name it as "eos_token" in a {published.CONFIG_FILE} beside the file; '
        f"its special tokens are {special[:10]}"
    )


def _byte_of_char() -> dict[str, int]:
    return {char: byte for byte, char in enumerate(other_formats.bytes_spelling())}
