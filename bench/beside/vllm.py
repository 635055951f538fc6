"""The serving engine's tokens/s over vLLM's, for a Llama of one shape, in one run.

    python -m bench.beside.vllm --vllm-python /venvs/vllm/bin/python [--dim 768 --layers 12] [--row 16,32] [--rounds 3]

Both hold random weights (vLLM's own ``load_format="dummy"``) and write greedy texts of a fixed length behind random prompts, with as many threads, in paired rounds; one
waits while the other computes. vLLM is in a process of its own environment: it needs nothing of Phalanx. It does not compile (``enforce_eager``), although it would on a CPU by
default, and has none of the libraries that it recommends. Rows: one and sixteen texts, a prompt alone (prefill) and
with 32 tokens; exact and fast numerics. The goal is 0.9.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT, VOCABULARY, REST_S = 256, 4096, 0.5


def prompts(count: int, turn: int) -> list[list[int]]:
    """Return prompts that no cache has seen, the same for both."""
    return [
        [2 + (7919 * (turn * 64 + n + 1) * (i + 1)) % (VOCABULARY - 2) for i in range(PROMPT)]
        for n in range(count)
    ]


def theirs() -> None:
    """Run the other side: for each line ``[texts, tokens, turn]``, write the seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to stdout too
    from importlib import import_module

    vllm: Any = import_module("vllm")
    model = vllm.LLM(
        model=sys.argv[2],
        load_format="dummy",
        dtype=sys.argv[3],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
    )
    print(json.dumps(vllm.__version__), file=answers, flush=True)
    for line in sys.stdin:
        count, tokens, turn = json.loads(line)
        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts(count, turn)]
        began = time.perf_counter()
        completions = model.generate(requests, sampling, use_tqdm=False)
        taken = time.perf_counter() - began
        assert all(len(completion.outputs[0].token_ids) == tokens for completion in completions)
        print(json.dumps(taken), file=answers, flush=True)


def main() -> None:
    import torch

    from bench.beside.load import ROWS, add_load_options, models_of
    from bench.running import require_catalog_peer
    from bench.serve.engine import GREEDY, engine, finish
    from phalanx_serve.traffic.events import Request

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", default="", help="a Python that has vLLM")
    add_load_options(parser)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    require_catalog_peer(shutil.which(arguments.vllm_python), "beside.vllm")
    models = models_of(arguments.dim, arguments.layers, getattr(torch, arguments.dtype))
    spec = models["fast"].spec
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": spec.dim,
        "intermediate_size": spec.ffn_dim,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(config))
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": "1"}
        environment.pop("PYTHONPATH", None)
        peer = subprocess.Popen(
            [arguments.vllm_python, "-P", __file__, "--theirs", name, arguments.dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert peer.stdin is not None
        assert peer.stdout is not None

        def measure_peer(*request: int) -> float:
            print(json.dumps(request), file=peer.stdin, flush=True)
            seconds = float(json.loads(peer.stdout.readline()))  # type: ignore[union-attr]
            time.sleep(REST_S)  # idle threads of the other side may spin for a while
            return seconds

        print(f"vLLM {json.loads(peer.stdout.readline())}, {threads} threads, {arguments.dtype}", flush=True)
        turn = 0
        for count, tokens in arguments.row or ROWS:
            taken: dict[str, list[float]] = {"exact": [], "fast": [], "vLLM": []}
            for warm in range(arguments.rounds + 1):
                turn += 1
                taken["vLLM"].append(measure_peer(count, tokens, turn))
                for numerics, model in models.items():
                    served = engine(model, numerics)
                    began = time.perf_counter()
                    for number, prompt in enumerate(prompts(count, turn)):
                        served.submit(Request(str(number), tuple(prompt), tokens, GREEDY))
                    finish(served)
                    taken[numerics].append(time.perf_counter() - began)
                    time.sleep(REST_S)
                if not warm:
                    taken = {side: [] for side in taken}
            pairs = {
                numerics: statistics.median(
                    a / b for a, b in zip(taken["vLLM"], taken[numerics], strict=True)
                )
                for numerics in ("exact", "fast")
            }
            workload = f"{count} x ({PROMPT} in, {tokens} out)"
            print(
                f"{workload}: vLLM {statistics.median(taken['vLLM']):.2f} s; ours over vLLM {pairs['exact']:.2f} exact, {pairs['fast']:.2f} fast",
                flush=True,
            )
        peer.stdin.close()
        peer.wait(60)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--theirs"]:
        theirs()
    else:
        from bench.running import run_bench

        run_bench(main)
