"""A model folder as Llama 3 is published: a tokenizer that puts a token before each text, a chat template, two end tokens."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HfTokenizer
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from parity.hf_models import LLAMA3_ROPE, SMALL, hf_model

TEXT = [
    "def f(x):\n    return x + 1\n",
    "naïve 日本語 👩‍🚀",
    "the cat and the dog and the cat, 1234567 times",
]
SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
CHAT_TEMPLATE = (
    "{{- bos_token }}{% for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level_bpe() -> HfTokenizer:
    """A byte-level BPE of some 300 tokens, Llama 3's special ones last, without a post-processor."""
    return HfTokenizer.from_str(_trained())


@functools.cache
def _trained() -> str:
    hf = HfTokenizer(models.BPE(ignore_merges=True))
    hf.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    hf.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    hf.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    )
    hf.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return str(hf.to_str())


def begins_texts(hf: HfTokenizer, token: str = SPECIAL[0]) -> HfTokenizer:
    """The tokenizer, made to put ``token`` before each text as Llama 3's does."""
    template = processors.TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token} $B",
        special_tokens=[(token, hf.token_to_id(token))],
    )
    hf.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return hf


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Llama 3's kind of tokenizer with its chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=begins_texts(byte_level_bpe()),
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        pad_token="<|end_of_text|>",
        model_max_length=131072,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_llama3(folder: Path, shape: Mapping[str, int] | None = None) -> Any:
    """The whole folder, with the numbers of ``shape`` in the place of the smallest; returns the model of ``transformers``."""
    tokenizer = save_tokenizer(folder)
    end = [tokenizer.convert_tokens_to_ids(token) for token in ("<|end_of_text|>", "<|eot_id|>")]
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": end, "pad_token_id": end[0]}
    config = LlamaConfig(
        **{
            **SMALL,
            **ids,
            "vocab_size": len(tokenizer) + 5,
            "max_position_embeddings": 131072,
            "rope_parameters": LLAMA3_ROPE,
            **(shape or {}),
        }
    )
    model = hf_model(config)
    model.generation_config = GenerationConfig(**ids, do_sample=True, temperature=0.6, top_p=0.9)
    model.save_pretrained(folder)
    return model
