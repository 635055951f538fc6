"""tiktoken's files: the ids are tiktoken's, every text comes back, and a missing pattern is requested."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tiktoken._educational import bpe_train
from tiktoken_ext import openai_public

from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.other_formats import KNOWN, Splitting, ranks_to_tokenizer_json
from phalanx.data.tokenizers.tokenizer import BpeTokenizer, load_tokenizer, tokenizer_from_file

CORPUS = (
    "the cats sat on the mats, aaaa aaaaaa naïve 日本語 x = 12345 def f(x):\n    return\r\n\n DON'T don't "
    * 30
)
WORDS = [
    *CORPUS.split(" ")[:20],
    " ",
    "\n",
    "\r\n",
    "  ",
    "'S",
    "'ll",
    "aaaaaaa",
    "<|endoftext|>",
    "\u2028",
    "ǅ",
    "1234",
    "/",
]
TEXT = st.one_of(st.text(), st.lists(st.sampled_from(WORDS)).map("".join))


def official(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, int]]:
    """Pattern and special tokens of an encoding, by tiktoken's own module, whose ranks would be downloaded."""
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
    encoding = getattr(openai_public, name)()
    return encoding["pat_str"], encoding["special_tokens"]


@pytest.fixture(
    scope="module",
    params=[("r50k_base", 50_256), ("cl100k_base", 100_256), ("o200k_base", 199_998)],
    ids=lambda p: p[0],
)
def pair(request: pytest.FixtureRequest) -> tuple[BpeTokenizer, tiktoken.Encoding]:
    name, size = request.param
    with pytest.MonkeyPatch.context() as monkeypatch:
        pattern, special = official(name, monkeypatch)
    ranks = bpe_train(CORPUS, 300, pattern, visualise=None)
    ours = ranks_to_tokenizer_json(ranks, Splitting(KNOWN[size].pattern, {"<|endoftext|>": 300}))
    theirs = tiktoken.Encoding(
        "small", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 300}
    )
    assert KNOWN[size].special_tokens == special
    return BpeTokenizer(ours, "<|endoftext|>"), theirs


@given(text=TEXT)
def test_ids_are_tiktokens_and_any_text_comes_back(
    pair: tuple[BpeTokenizer, tiktoken.Encoding], text: str
) -> None:
    ours, theirs = pair
    ids = ours.encode(text)
    assert ids == theirs.encode(text, disallowed_special=())
    assert ours.decode(ids) == text
    assert ours.byte_lengths[np.array(ids, dtype=np.int64)].sum() == len(text.encode())


def as_file(folder: Path, ranks: dict[bytes, int], **config: object) -> Path:
    path = folder / "small.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return path


BYTES = {bytes([byte]): byte for byte in range(256)}


def test_a_file_with_its_pattern_beside_it_is_read_and_kept(tmp_path: Path) -> None:
    special = {"<|endoftext|>": 260, "<|pad|>": 258}
    path = as_file(tmp_path, BYTES | {b"ab": 256}, pat_str=r"\p{L}+|\P{L}+", special_tokens=special)
    tokenizer = tokenizer_from_file(path)
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (261, 260)
    assert tokenizer.encode("abc ab") == [256, ord("c"), ord(" "), 256]
    (tmp_path / "kept").mkdir()
    tokenizer.save(tmp_path / "kept")
    assert load_tokenizer(tmp_path / "kept") == tokenizer


def test_a_file_of_an_unknown_encoding_is_refused_with_a_request_for_its_pattern(tmp_path: Path) -> None:
    with pytest.raises(
        TokenizerError, match=r"of 256 ranks split text\? Give the model's tokenizer\.json .* pat_str"
    ):
        tokenizer_from_file(as_file(tmp_path, BYTES))


@pytest.mark.parametrize("pattern", [r"\p{N}{1,3}+|.", r"\s+$|."])
def test_a_pattern_that_means_something_else_here_is_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(TokenizerError, match="means something else"):
        tokenizer_from_file(as_file(tmp_path, BYTES, pat_str=pattern))


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = as_file(tmp_path, BYTES)
    path.write_bytes(path.read_bytes() + b"not base64\n")
    with pytest.raises(TokenizerError, match="line 257 is no token and rank"):
        tokenizer_from_file(path)


def test_ranks_without_every_byte_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="each of the 256 bytes"):
        tokenizer_from_file(as_file(tmp_path, dict(list(BYTES.items())[1:])))
