"""The serving engine's tokens/s over llama.cpp's, for a Llama of one shape and the same fp32 weights, in one run.

    python3.11 -m venv llama && llama/bin/pip install --no-deps xllamacpp==2026.10.11549 gguf==0.19.0 numpy pyyaml
    python -m bench.beside.llama --llama-python llama/bin/python [--dim 768 --layers 12] [--row 16,32] [--rounds 3]

llama.cpp comes compiled in the package ``xllamacpp`` and runs in a process of its own environment. Both write greedy texts of a fixed length behind random prompts,
with as many threads, in paired rounds; one waits while the other computes. The goal is 0.8. It also prints how many of the first text's tokens are the same:
kernels differ, so ties of random weights may break differently.
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
from importlib import import_module
from pathlib import Path
from typing import Any

PROMPT, VOCABULARY, REST_S = 256, 4096, 0.5


def prompts(count: int, turn: int) -> list[list[int]]:
    """Return prompts that no cache has seen, the same for both."""
    return [
        [3 + (7919 * (turn * 64 + n + 1) * (i + 1)) % (VOCABULARY - 3) for i in range(PROMPT)]
        for n in range(count)
    ]


def write_gguf(folder: Path, shape: dict[str, Any]) -> Path:
    """Write the weights of ``weights.npz`` as llama.cpp reads them: rotated pairs beside each other."""
    gguf: Any = import_module("gguf")
    numpy: Any = import_module("numpy")
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(shape["dim"])
    writer.add_block_count(shape["layers"])
    writer.add_feed_forward_length(shape["inner"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kept"])
    writer.add_layer_norm_rms_eps(shape["eps"])
    writer.add_rope_freq_base(shape["theta"])
    writer.add_rope_dimension_count(shape["width"])
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("llama")
    words = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(3, VOCABULARY))]
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([2, 3, 3, *([1] * (VOCABULARY - 3))])
    names = {"attention.query": "attn_q", "attention.key": "attn_k", "attention.value": "attn_v"}
    names |= {"attention.output": "attn_output", "attention_norm": "attn_norm", "ffn_norm": "ffn_norm"}
    names |= {"ffn.gate": "ffn_gate", "ffn.up": "ffn_up", "ffn.down": "ffn_down"}
    outer = {"embedding": "token_embd", "norm": "output_norm", "head": "output"}
    for name, array in numpy.load(folder / "weights.npz").items():
        part = name.removesuffix(".weight")
        if part.startswith("blocks."):
            _, layer, part = part.split(".", 2)
            if part in ("attention.query", "attention.key"):
                pairs = array.reshape(-1, 2, shape["width"] // 2, array.shape[1])
                array = numpy.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))
            writer.add_tensor(f"blk.{layer}.{names[part]}.weight", array)
        else:
            writer.add_tensor(f"{outer[part]}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def theirs() -> None:
    """Run the other side: for each line ``[texts, tokens, turn]``, write the seconds and the first text's tokens."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp prints to stdout too
    folder, threads = Path(sys.argv[2]), int(sys.argv[3])
    llama: Any = import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path = str(write_gguf(folder, json.loads((folder / "shape.json").read_text())))
    params.n_parallel, params.n_ctx, params.n_batch, params.n_ubatch = 16, 16 * 512, 4096, 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    server = llama.Server(params)
    print(json.dumps(llama.BUILD_INFO), file=answers, flush=True)
    for line in sys.stdin:
        count, tokens, turn = json.loads(line)
        request = {
            "prompt": prompts(count, turn) if count > 1 else prompts(1, turn)[0],
            "n_predict": tokens,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        began = time.perf_counter()
        response = server.handle_completions(request)
        taken = time.perf_counter() - began
        words = response["choices"][0]["text"].split("w")[1:]
        print(json.dumps([taken, [int(word) for word in words]]), file=answers, flush=True)


def save(model: Any, folder: Path) -> None:
    """Write weights and shape for the other side."""
    numpy: Any = import_module("numpy")
    numpy.savez(folder / "weights.npz", **{name: w.numpy() for name, w in model.state_dict().items()})
    spec = model.spec
    shape = {"dim": spec.dim, "layers": spec.layers, "inner": spec.ffn_dim, "heads": spec.heads}
    shape |= {"kept": spec.kv_heads, "eps": spec.norm_eps, "theta": spec.rope_theta, "width": spec.head_dim}
    (folder / "shape.json").write_text(json.dumps(shape))


def main() -> None:
    """Print a line for each shape of the load."""
    import torch

    from bench.beside.load import ROWS, add_load_options, models_of
    from bench.running import require_catalog_peer
    from bench.serve.engine import GREEDY, engine
    from phalanx_serve.traffic.events import Request, Token

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-python", default="", help="a Python that has llama.cpp")
    add_load_options(parser)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    require_catalog_peer(shutil.which(arguments.llama_python), "beside.llama")
    torch.set_num_threads(arguments.threads)
    models = models_of(arguments.dim, arguments.layers, torch.float32)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as name:
        save(models["fast"], Path(name))
        peer = subprocess.Popen(
            [arguments.llama_python, "-P", __file__, "--theirs", name, str(arguments.threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert peer.stdin is not None
        assert peer.stdout is not None

        def measure_peer(*request: int) -> tuple[float, list[int]]:
            print(json.dumps(request), file=peer.stdin, flush=True)
            seconds, tokens = json.loads(peer.stdout.readline())  # type: ignore[union-attr]
            time.sleep(REST_S)  # idle threads of the other side may spin for a while
            return float(seconds), tokens

        def ours(numerics: Any, count: int, tokens: int, turn: int) -> tuple[float, list[int]]:
            served = engine(models[numerics], numerics)
            for number, prompt in enumerate(prompts(count, turn)):
                served.submit(Request(str(number), tuple(prompt), tokens, GREEDY))
            text: list[int] = []
            began = time.perf_counter()
            while served.busy:
                events = served.step()
                text += [event.id for event in events if isinstance(event, Token) and event.request == "0"]
            taken = time.perf_counter() - began
            time.sleep(REST_S)
            return taken, text

        print(
            f"llama.cpp {json.loads(peer.stdout.readline())}, {arguments.threads} threads, fp32", flush=True
        )
        turn = 0
        for count, tokens in arguments.row or ROWS:
            taken: dict[str, list[float]] = {"exact": [], "fast": [], "llama.cpp": []}
            same = 0
            for warm in range(arguments.rounds + 1):
                turn += 1
                seconds, their_text = measure_peer(count, tokens, turn)
                taken["llama.cpp"].append(seconds)
                for numerics in ("exact", "fast"):
                    seconds, text = ours(numerics, count, tokens, turn)
                    taken[numerics].append(seconds)
                same += sum(
                    token == their_token for token, their_token in zip(text, their_text, strict=False)
                )
                if not warm:
                    taken = {side: [] for side in taken}
            ratios = {
                numerics: statistics.median(
                    a / b for a, b in zip(taken["llama.cpp"], taken[numerics], strict=True)
                )
                for numerics in ("exact", "fast")
            }
            print(
                f"{count} x ({PROMPT} in, {tokens} out): llama.cpp {statistics.median(taken['llama.cpp']):.2f} s; ours over llama.cpp "
                f"{ratios['exact']:.2f} exact, {ratios['fast']:.2f} fast; {same} of {(arguments.rounds + 1) * tokens} tokens of the first text the same",
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
