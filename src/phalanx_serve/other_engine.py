"""Greedy continuations by another engine, in a process and, if requested, an environment of its own: this file
imports nothing of phalanx.

    python other_engine.py < question.json

The request on standard input has ``engine`` (transformers, vllm), ``folder``, ``dtype``, ``prompts`` (lists of ids),
and ``tokens``. The response is the last line of standard output: ``{"version": ..., "texts": [[id, ...], ...]}``,
with the new ids only. The engines' own output goes to standard error, since vLLM prints on standard output after the
response.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any


def by_transformers(folder: str, dtype: str, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Return the version and the new tokens of ``AutoModelForCausalLM.generate`` for each prompt, greedily.

    Keeps the folder's end tokens and ignores its sampling settings. Loads the model on the CPU.
    """
    import torch

    # Neither engine has type hints, and vllm is not installed where types are checked.
    transformers: Any = import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ends = model.generation_config.eos_token_id
    model.generation_config = transformers.GenerationConfig(eos_token_id=ends, pad_token_id=0)
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            ids_with_prompt = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
            )
        texts.append(ids_with_prompt[0, len(prompt) :].tolist())
    return {"version": transformers.__version__, "texts": texts}


def by_vllm(folder: str, dtype: str, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Return the version and the new tokens of ``vllm.LLM.generate`` for each prompt at temperature 0."""
    vllm: Any = import_module("vllm")
    model = vllm.LLM(model=folder, dtype=dtype, enforce_eager=True, skip_tokenizer_init=True)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, detokenize=False)
    outputs = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    return {"version": vllm.__version__, "texts": [list(output.outputs[0].token_ids) for output in outputs]}


def main() -> None:
    """Read a request as JSON from standard input, compute it by the named engine, and print the texts as JSON.

    All other output goes to standard error.
    """
    question = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engines = {"transformers": by_transformers, "vllm": by_vllm}
    answer = engines[question["engine"]](
        question["folder"], question["dtype"], question["prompts"], question["tokens"]
    )
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
