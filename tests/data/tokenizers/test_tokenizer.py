"""Tokenizers: nothing is lost on the way to ids and back, and every byte is accounted for."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HfTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from parity.llama3_folder import begins_texts, byte_level_bpe
from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.tokenizer import (
    END_OF_DOCUMENT,
    BpeTokenizer,
    BytesTokenizer,
    Tokenizer,
    load_tokenizer,
    same_tokens,
    tokenizer_from_file,
    train_bpe,
)

TEXTS = [f"def f{i}(x):\n    return x ** {i}  # naïve 日本 <|endoftext|>\n" for i in range(50)]
BPE = train_bpe(TEXTS, vocab_size=300)
TOKENIZERS: list[Tokenizer] = [BytesTokenizer(), BPE]
EITHER = pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "bpe"])
# Plain unicode, and text that is likely to trip a tokenizer: its own end token, runs of blanks, combining characters.
TEXT = st.one_of(
    st.text(),
    st.lists(
        st.sampled_from([END_OF_DOCUMENT, "</s>", " ", "\n", "\t", "\r\n", "é", "\u0301", "Ġ", "👩‍🚀", "x1"])
    ).map("".join),
)
TRAIN_AND_PRINT = """
from phalanx.data.tokenizers.tokenizer import train_bpe
print(train_bpe(["the cat sat on the mat %d" % (i * i) for i in range(500)], vocab_size=500).fingerprint)
"""


@EITHER
@given(text=TEXT)
def test_any_text_comes_back_exactly(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@EITHER
@given(text=TEXT)
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.byte_lengths[np.array(tokenizer.encode(text), dtype=np.int64)].sum() == len(
        text.encode()
    )


@EITHER
@given(texts=st.lists(TEXT, max_size=5))
def test_a_batch_is_encoded_like_its_texts_one_by_one(tokenizer: Tokenizer, texts: list[str]) -> None:
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == [
        tokenizer.encode(text) for text in texts
    ]


@EITHER
def test_text_that_spells_the_end_token_does_not_end_the_document(tokenizer: Tokenizer) -> None:
    assert tokenizer.end_of_document not in tokenizer.encode(f"a{END_OF_DOCUMENT}b")


@EITHER
def test_the_end_of_a_document_has_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.byte_lengths[tokenizer.end_of_document] == 0
    assert tokenizer.decode([tokenizer.end_of_document]) == ""


@EITHER
def test_a_saved_tokenizer_is_loaded_as_it_was(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded, loaded.kind, loaded.fingerprint) == (tokenizer, tokenizer.kind, tokenizer.fingerprint)


@EITHER
def test_transformers_loads_a_saved_tokenizer_and_agrees(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "def f7(x):\n\n  return  naïve 日本 👩‍🚀"
    assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text)
    assert (len(theirs), theirs.eos_token_id) == (tokenizer.vocab_size, tokenizer.end_of_document)


@EITHER
def test_an_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=f"token id {tokenizer.vocab_size} is outside"):
        tokenizer.decode([0, tokenizer.vocab_size])


def test_each_byte_is_its_own_token() -> None:
    assert BytesTokenizer().encode("aé") == [0x61, 0xC3, 0xA9]


def test_a_character_cut_in_two_is_shown_as_a_replacement() -> None:
    assert BytesTokenizer().decode([0x61, 0xC3]) == "a\ufffd"


def test_training_gives_the_same_tokenizer_in_any_process_on_any_number_of_threads() -> None:
    fingerprints = set()
    for threads, hash_seed in (("true", "1"), ("false", "2"), ("true", "3")):
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": threads, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", TRAIN_AND_PRINT]
        fingerprints.add(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert len(fingerprints) == 1


def test_a_trained_vocabulary_has_the_requested_size() -> None:
    assert BPE.vocab_size == 300
    assert len(BPE.byte_lengths) == 300


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(TokenizerError, match="vocab_size = 256 is too small"):
        train_bpe(TEXTS, vocab_size=256)


def test_a_tokenizer_that_cuts_long_text_is_made_not_to(tmp_path: Path) -> None:
    content = json.loads(BPE.serialized)
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
    }
    content["padding"] |= {"pad_type_id": 0, "pad_token": END_OF_DOCUMENT}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert tokenizer_from_file(tmp_path / "tokenizer.json").encode(TEXTS[0]) == BPE.encode(TEXTS[0])


def test_added_tokens_have_their_text_and_special_ones_have_none() -> None:
    hf = HfTokenizer.from_str(BPE.serialized)
    hf.add_special_tokens(["<|pad|>"])
    hf.add_tokens(["    ", "日本"])
    tokenizer = BpeTokenizer(hf.to_str(), END_OF_DOCUMENT)
    text = "    x <|pad|> 日本"
    ids = tokenizer.encode(text)
    assert tokenizer.byte_lengths[-3:].tolist() == [0, 4, 6]
    assert {301, 302} <= set(ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


FLAGS = [
    {"rstrip": True},
    {"lstrip": True},
    {"lstrip": True, "rstrip": True, "normalized": True},
    {"single_word": True},
    {"normalized": False},
]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_an_added_token_with_any_flags_changes_no_text_beside_it(flags: dict[str, bool]) -> None:
    hf = HfTokenizer.from_str(BPE.serialized)
    hf.add_tokens([AddedToken("<note>", **flags), AddedToken("café", **flags)])
    tokenizer = BpeTokenizer(hf.to_str(), END_OF_DOCUMENT)
    text = "a <note>  b<note>\n c  café d<note> "
    ids = tokenizer.encode(text)
    assert {BPE.vocab_size, BPE.vocab_size + 1} <= {*ids}
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert [ids.tolist() for ids in tokenizer.encode_batch([text])] == [ids]


def test_an_added_token_for_other_text_than_its_own_is_refused_by_its_name() -> None:
    content = json.loads(BPE.serialized)
    content["normalizer"] = {"type": "NFC"}
    hf = HfTokenizer.from_str(json.dumps(content))
    hf.add_tokens([AddedToken("<A\u0301>", normalized=True)])
    with pytest.raises(TokenizerError, match="<\u00c1>"):
        BpeTokenizer(hf.to_str(), END_OF_DOCUMENT)


def test_the_end_token_is_that_of_the_config_beside_the_file(tmp_path: Path) -> None:
    renamed = BPE.serialized.replace(END_OF_DOCUMENT, "[EOD]")
    (tmp_path / "tokenizer.json").write_text(renamed)
    with pytest.raises(TokenizerError, match=r'which token ends a document\? Name it as "eos_token"'):
        tokenizer_from_file(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "[EOD]"}}))
    assert tokenizer_from_file(tmp_path).end_of_document == BPE.end_of_document


BOS = "<|begin_of_text|>"
POST_PROCESSORS = {
    "none": None,
    "bytes": processors.ByteLevel(trim_offsets=False),
    "before": processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, 290)]),
    "before and after": processors.TemplateProcessing(
        f"{BOS} {BOS} $A <|eot_id|>", special_tokens=[(BOS, 290), ("<|eot_id|>", 294)]
    ),
    "after": processors.TemplateProcessing("$A <|eot_id|>", special_tokens=[("<|eot_id|>", 294)]),
    "as Llama 3's": begins_texts(byte_level_bpe()).post_processor,
    "as BERT's": processors.BertProcessing(("<|eot_id|>", 294), (BOS, 290)),
}


@pytest.mark.parametrize("processor", POST_PROCESSORS.values(), ids=POST_PROCESSORS.keys())
@pytest.mark.parametrize("add_bos_token", [None, True, False])
@pytest.mark.parametrize("bos_token", [None, BOS])
@pytest.mark.parametrize("of_class", ["PreTrainedTokenizerFast", "LlamaTokenizerFast"])
def test_documents_begin_with_what_transformers_puts_before_a_text(
    processor: Any, add_bos_token: bool | None, bos_token: str | None, of_class: str, tmp_path: Path
) -> None:
    hf = byte_level_bpe()
    if processor is not None:
        hf.post_processor = processor
    hf.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": of_class, "eos_token": "<|eot_id|>", "bos_token": bos_token}
    config |= {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = tokenizer_from_file(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)("the cat")["input_ids"]
    expected = [*ours.document_start, *ours.encode("the cat")]
    assert theirs[: len(expected)] == expected
    assert theirs[len(expected) :] in (
        [],
        [294],
        [290],
    )  # tokens behind a text are no part of a document's start
    (tmp_path / "saved").mkdir()
    ours.save(tmp_path / "saved")
    assert tokenizer_from_file(tmp_path / "saved").document_start == ours.document_start
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("the cat")["input_ids"] == theirs


def test_tokenizers_with_different_tokens_before_a_text_are_different() -> None:
    with_start, without = (
        BpeTokenizer(hf.to_str(), "<|eot_id|>") for hf in (begins_texts(byte_level_bpe()), byte_level_bpe())
    )
    assert with_start.document_start == (290,)
    assert (with_start.byte_lengths[290], with_start.decode([290])) == (0, "")
    assert without.document_start == BytesTokenizer().document_start == ()
    assert not same_tokens(with_start, without)


def test_the_text_of_a_template_may_spell_special_tokens() -> None:
    tokenizer = BpeTokenizer(byte_level_bpe().to_str(), "<|eot_id|>")
    assert tokenizer.encode_template("<|eot_id|>cat") == [294, *tokenizer.encode("cat")]
    assert 294 not in tokenizer.encode("<|eot_id|>cat")


def test_a_configuration_that_is_no_table_is_named(tmp_path: Path) -> None:
    BPE.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('"x"')
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json is damaged: not a JSON object"):
        load_tokenizer(tmp_path)


def test_an_end_token_that_text_can_spell_is_refused() -> None:
    with pytest.raises(TokenizerError, match="text that spells 'x' would end its document"):
        BpeTokenizer(BPE.serialized, "x")


def test_a_tokenizer_that_loses_text_is_refused() -> None:
    content = json.loads(BPE.serialized)
    content["normalizer"] = {"type": "Lowercase"}
    with pytest.raises(TokenizerError, match="every text back as it was"):
        BpeTokenizer(json.dumps(content), END_OF_DOCUMENT)


def test_a_normalizer_that_makes_a_text_ever_longer_is_refused_before_it_has_taken_all_memory() -> None:
    content = json.loads(BPE.serialized)
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    content["normalizer"] = {"type": "Sequence", "normalizers": [step] * 4}
    with pytest.raises(TokenizerError, match="its normalizer makes"):
        BpeTokenizer(json.dumps(content), END_OF_DOCUMENT)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_what_is_no_file_in_the_place_of_a_tokenizers_file_is_named(name: str, tmp_path: Path) -> None:
    BPE.save(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(TokenizerError, match=f"{name}: it is no file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b'{"a":', b"!!!! 0\n"])
def test_a_file_that_is_no_tokenizer_is_refused_with_the_kinds_that_are_read(
    content: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "mine.tiktoken"
    file.write_bytes(content)
    with pytest.raises(
        TokenizerError,
        match=r"mine\.tiktoken: neither a tokenizer\.json .*sentencepiece or ranks of tiktoken",
    ):
        tokenizer_from_file(file)


def test_a_configuration_that_is_nested_without_end_is_named(tmp_path: Path) -> None:
    BPE.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"a":' * 100_000)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is damaged"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    hf = HfTokenizer(models.WordPiece(unk_token="[UNK]"))
    hf.pre_tokenizer = pre_tokenizers.Whitespace()
    hf.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(special_tokens=["[UNK]", "</s>"], show_progress=False)
    )
    hf.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="neither a byte-level BPE"):
        tokenizer_from_file(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("content", [b"", b"{", b'{"model": 3}', b"\xff\xfe"])
def test_a_damaged_tokenizer_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_missing_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"cannot read .*nowhere.json"):
        tokenizer_from_file(tmp_path / "nowhere.json")


def test_training_on_a_word_of_any_length_takes_time_in_proportion_to_it() -> None:
    """A word without spaces is cut for training: its pairs are those of its pieces."""
    word = "".join(random.Random(0).choices("ACGT", k=5000))
    pieces = [word[start : start + 1024] for start in range(0, len(word), 1024)]
    assert train_bpe([word], vocab_size=300).fingerprint == train_bpe(pieces, vocab_size=300).fingerprint


@pytest.mark.parametrize("word", ["ж" * 3000, "=" * 3000, " " * 3000, "a" * 1024])
def test_text_with_a_long_word_comes_back_as_it_was(word: str) -> None:
    tokenizer = train_bpe([f"before {word} after"], vocab_size=300)
    assert tokenizer.decode(tokenizer.encode(f"x {word} y")) == f"x {word} y"
