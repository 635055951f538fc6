"""tiktoken's files, lines of a token in base64 and its rank, brought into a ``tokenizer.json``.

Such a file says neither how text is split into words nor which special tokens there are. Of OpenAI's own encodings, which their
numbers of ranks tell apart, both are known here (``tiktoken_ext/openai_public.py`` of https://github.com/openai/tiktoken). For others
a ``tokenizer_config.json`` beside the file says them: ``pat_str`` and ``special_tokens``, as in ``tiktoken.Encoding``.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.published.files import CONFIG_FILE

_FIRST_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|$)")
_NOT_TRANSLATED = re.compile(r"\{\d+(,\d*)?\}\+|(?<!\\)\$|\(\?P<")
"""What the two libraries' regular expressions take for different things: possessive counts, the end of text, named groups."""
_END = "<|endoftext|>"


@dataclass(frozen=True)
class Splitting:
    """How text is split into words, and the tokens that no text spells, with their ids."""

    pattern: str
    special_tokens: Mapping[str, int]


# The patterns in the form without possessive quantifiers, which its authors give as equal for GPT-2's, and which cl100k_base had before.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN: Mapping[int, Splitting] = {
    50_256: Splitting(_GPT2, {_END: 50_256}),
    50_280: Splitting(_GPT2, {_END: 50_256}),
    100_256: Splitting(
        _CL100K,
        {
            _END: 100_257,
            "<|fim_prefix|>": 100_258,
            "<|fim_middle|>": 100_259,
            "<|fim_suffix|>": 100_260,
            "<|endofprompt|>": 100_276,
        },
    ),
    199_998: Splitting(_O200K, {_END: 199_999, "<|endofprompt|>": 200_018}),
}
"""By the number of ranks: r50k_base, p50k_base, cl100k_base, o200k_base."""


def is_ranks(content: bytes) -> bool:
    """True if the first line is a token in base64 and a rank."""
    return _FIRST_LINE.match(content) is not None


def read_ranks(content: bytes) -> dict[bytes, int]:
    """The rank of each token. Raises ``TokenizerError`` if a line is damaged or a byte has no token."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(
                f"line {number:,} is no token and rank; copy the file again from where it came"
            ) from error
    if len(set(ranks.values())) < len(ranks) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise TokenizerError(
            "the file has not a rank of its own for each of the 256 bytes; copy it again from where it came"
        )
    return ranks


def splitting_of(ranks: Mapping[bytes, int], config: Mapping[str, object]) -> Splitting:
    """How the tokenizer with these ranks splits text: as its configuration says, or as is known of its encoding.

    Raises ``TokenizerError`` if neither tells.
    """
    pattern, special = config.get("pat_str"), config.get("special_tokens", {})
    if pattern is None and len(ranks) in KNOWN:
        return KNOWN[len(ranks)]
    if not isinstance(pattern, str) or not isinstance(special, dict):
        raise TokenizerError(
            f"how does this tokenizer of {len(ranks):,} ranks split text? Give the model's tokenizer.json instead, or write pat_str and "
            f"special_tokens into a {CONFIG_FILE} beside the file, as in tiktoken.Encoding"
        )
    if found := _NOT_TRANSLATED.search(pattern):
        raise TokenizerError(
            f"pat_str has {found[0]!r}, which means something else in the library that splits text here; give the model's tokenizer.json"
        )
    return Splitting(pattern, {str(token): int(number) for token, number in special.items()})


def ranks_to_tokenizer_json(ranks: Mapping[bytes, int], splitting: Splitting) -> str:
    """The text of the ``tokenizer.json`` that encodes as tiktoken does with these ranks."""
    taken = set(ranks.values()) & set(splitting.special_tokens.values())
    if taken:
        raise TokenizerError(
            f"special tokens have ids of other tokens: {sorted(taken)[:5]}; mend special_tokens"
        )
    spelling = bytes_spelling()
    spelled = {token: "".join(spelling[byte] for byte in token) for token in ranks}
    vocab = {spelled[token]: rank for token, rank in ranks.items()} | dict(splitting.special_tokens)
    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        merges += [
            (spelled[a], spelled[b])
            for a, b in sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        ]
    hf = HfTokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    hf.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(splitting.pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in splitting.special_tokens]
    )
    return str(hf.to_str())


def bytes_spelling() -> list[str]:
    """Byte-level BPE's spelling of each byte: printable ones as themselves, the others from U+0100 on, in order."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
