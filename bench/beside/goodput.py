"""Goodput of ``phalanx serve`` over vLLM's under one load whose requests arrive at random, in one run.

    python -m bench.beside.goodput --vllm-python /venvs/vllm/bin/python [--rate 0.6 --rate 0.9] [--requests 64] [--rounds 1] [--numerics exact]

Both serve the same random Llama (fp32) over HTTP with as many threads. ``vllm bench serve``, vLLM's own load program, sends both the same prompts with Poisson arrivals of the
same seed, one server after the other. Counted are the requests that are answered within both objectives: the first token within ``--ttft-s``, and the mean of
the others within ``--tpot-s``. Goodput is such requests a second; the goal is 0.9 of vLLM's. With ``--guidellm-python``, GuideLLM sends the load instead. Both programs are in environments of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.running import require_catalog_peer, run_bench
from bench.serve.faults import free_port

PROMPT_TOKENS, NEW_TOKENS, VOCABULARY, CONTEXT = 256, 32, 4096, 1024
START_S, REST_S = 300.0, 5.0
LOAD = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
"""The command ``vllm bench serve`` of the CPU package ends with an error, so its module is called."""


@dataclass(frozen=True)
class Load:
    """One load: Poisson arrivals at ``rate`` requests a second, and what counts as good."""

    rate: float
    requests: int
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class Found:
    """The times of the requests that a load program sent to one server."""

    answered: list[tuple[float, float]]
    """Seconds to the first token, and in the mean from one to the next, of each request that was answered."""
    failed: int
    seconds: float

    def goodput(self, load: Load) -> float:
        """Requests a second that were answered within both objectives."""
        good = sum(ttft_s <= load.ttft_s and tpot_s <= load.tpot_s for ttft_s, tpot_s in self.answered)
        return good / self.seconds


def write_model(folder: Path, dim: int, layers: int) -> None:
    """Writes a random Llama with a byte-level tokenizer of ``VOCABULARY`` tokens, as both sides read it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [path.read_text() for path in sorted(Path("docs").glob("*.md"))]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    words.train_from_iterator(texts, trainer)
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=dim,
        intermediate_size=dim * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=dim // 64,
        num_key_value_heads=dim // 128,
        max_position_embeddings=CONTEXT,
        eos_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def our_command(run: Path, numerics: str) -> list[str]:
    """``phalanx serve``, but for its port."""
    options = {"--numerics": numerics, "--name": "model", "--context": str(CONTEXT)}
    given = [word for option in options.items() for word in option]
    return [sys.executable, "-m", "phalanx", "serve", str(run), *given]


def their_command(python: str, folder: Path) -> list[str]:
    """vLLM's server, but for its port; no prompt comes twice, so it keeps no prefixes."""
    options = {
        "--model": str(folder),
        "--served-model-name": "model",
        "--dtype": "float32",
        "--max-model-len": str(CONTEXT),
    }
    given = [word for option in options.items() for word in option]
    module = "vllm.entrypoints.openai.api_server"
    return [python, "-P", "-m", module, *given, "--enforce-eager", "--no-enable-prefix-caching"]


@contextmanager
def server(name: str, command: Sequence[str], port: int, log: Path, threads: int) -> Iterator[str]:
    """The URL of a server that answers ``/health``, until the end of the block."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": "1"}
    if name == "vLLM":
        environment.pop("PYTHONPATH", None)
    with log.open("w") as written:
        process = subprocess.Popen(
            command, stdout=written, stderr=written, env=environment, start_new_session=True
        )
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        try:
            while not is_healthy(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{name} did not start; it said:\n{log.read_text()[-3000:]}")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with suppress(ProcessLookupError):  # vLLM computes in a process of its own, which may outlive it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def by_vllm(python: str, url: str, model: Path, load: Load, seed: int) -> Found:
    """Has ``vllm bench serve`` send ``load`` to a server, and reads its results. Raises SystemExit where it ended with an error."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "backend": "openai",
            "base-url": url,
            "model": "model",
            "tokenizer": model,
            "dataset-name": "random",
            "random-input-len": PROMPT_TOKENS,
            "random-output-len": NEW_TOKENS,
            "num-prompts": load.requests,
            "request-rate": load.rate,
            "seed": seed,
            "num-warmups": 2,
            "temperature": 0,
            "result-dir": folder,
            "result-filename": "found.json",
        }
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        switches = ["--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]
        run_program([python, "-c", LOAD, *given, *switches], Path(folder))
        return of_vllm(json.loads((Path(folder) / "found.json").read_text()), load)


def of_vllm(found: Mapping[str, Any], load: Load) -> Found:
    """The results that ``vllm bench serve`` writes (``vllm/benchmarks/serve.py``). Raises SystemExit for answers of another length."""
    require_lengths(
        [length for length, error in zip(found["output_lens"], found["errors"], strict=True) if not error]
    )
    # A request that failed has no first token.
    tpot_s = [statistics.fmean(gaps) if gaps else 0.0 for gaps in found["itls"]]
    answered = [
        pair
        for pair, error in zip(zip(found["ttfts"], tpot_s, strict=True), found["errors"], strict=True)
        if not error
    ]
    return Found(answered, load.requests - len(answered), found["duration"])


def by_guidellm(python: str, url: str, model: Path, load: Load, seed: int) -> Found:
    """Has GuideLLM send ``load`` to a server, and reads its results. Raises SystemExit where it ended with an error."""
    from transformers import AutoTokenizer

    words, numbers = AutoTokenizer.from_pretrained(model), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        prompts, found_at = Path(folder) / "prompts.jsonl", Path(folder) / "found.json"
        with prompts.open("w") as file:
            for _ in range(load.requests):
                ids = [numbers.randrange(300, VOCABULARY) for _ in range(PROMPT_TOKENS)]
                print(json.dumps({"prompt": words.decode(ids), "output_tokens_count": NEW_TOKENS}), file=file)
        options = {
            "backend": f"kind=openai_http,target={url},request_format=/v1/completions",
            "profile": f"kind=poisson,rate={load.rate}",
            "constraint": f"kind=max_requests,count={load.requests}",
            "data": f"kind=json_file,path={prompts}",
            "data-loader": f"kind=pytorch,prefetch_factor=2,samples={load.requests}",
            "tokenizer": f"kind=hf_auto,model={model}",
            "seed": f"kind=static,value={seed}",
            "output": f"kind=json,path={found_at}",
        }
        given = [word for name, value in options.items() for word in (f"--{name}", value)]
        run_program([python, "-m", "guidellm", "run", *given, "--disable-console"], Path(folder))
        (found,) = json.loads(found_at.read_text())["benchmarks"]
    return of_guidellm(found)


def of_guidellm(found: Mapping[str, Any]) -> Found:
    """The results that GuideLLM writes (``GenerativeRequestStats`` in ``guidellm/schemas``). Raises SystemExit for answers of another length."""
    told = found["requests"]
    require_lengths([one["output_tokens"] for one in told["successful"]])
    answered = [
        (one["time_to_first_token_ms"] / 1e3, one["inter_token_latency_ms"] / 1e3)
        for one in told["successful"]
    ]
    return Found(answered, len(told["errored"]) + len(told["incomplete"]), found["duration"])


def require_lengths(lengths: Sequence[int | None]) -> None:
    """Raises SystemExit unless all answers have as many tokens as were asked for: what ends early costs its server less."""
    wrong = [length for length in lengths if length != NEW_TOKENS]
    if wrong:
        raise SystemExit(
            f"{len(wrong)} of {len(lengths)} answers have not the {NEW_TOKENS} tokens that were asked for, but {sorted(set(map(str, wrong)))[:5]}: "
            "nothing can be said of this load; see that the server takes ignore_eos and tells its usage"
        )


def run_program(command: Sequence[str], folder: Path) -> None:
    """Runs a load program in ``folder``, away from our modules. Raises SystemExit with the last it said, where it ended with an error."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command,
        env={**environment, "HF_HUB_OFFLINE": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the load program ended with {done.returncode}:\n{done.stdout[-3000:]}")


def line(name: str, found: Found, load: Load) -> str:
    """One side's result, for people."""
    if not found.answered:
        return f"  {name}: goodput 0, none answered, {found.failed} failed"
    ttft_ms, tpot_ms = (
        sorted(1e3 * value for value in values) for values in zip(*found.answered, strict=True)
    )
    last = -(-99 * len(ttft_ms) // 100) - 1
    return (
        f"  {name}: goodput {found.goodput(load):.3f} of {len(found.answered) / found.seconds:.3f} requests/s, {len(found.answered)} answered, "
        f"{found.failed} failed; TTFT {statistics.median(ttft_ms):.0f} ms (99 %: {ttft_ms[last]:.0f}), "
        f"{statistics.median(tpot_ms):.0f} ms a token (99 %: {tpot_ms[last]:.0f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-python", default="", help="a Python that has vLLM")
    parser.add_argument("--guidellm-python", help="have GuideLLM send the load")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--rate", type=float, action="append", help="requests a second; may be repeated (0.5 and 0.9)"
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1, help="each with arrivals and prompts of its own")
    parser.add_argument("--ttft-s", type=float, default=4.0)
    parser.add_argument("--tpot-s", type=float, default=0.4)
    parser.add_argument("--numerics", choices=["exact", "fast"], default="exact")
    given = parser.parse_args()
    require_catalog_peer(shutil.which(given.vllm_python), "beside.goodput")
    threads = torch.get_num_threads()
    send = (
        partial(by_guidellm, given.guidellm_python)
        if given.guidellm_python
        else partial(by_vllm, given.vllm_python)
    )
    with tempfile.TemporaryDirectory() as name:
        folder, run = Path(name) / "model", Path(name) / "run"
        write_model(folder, given.dim, given.layers)
        subprocess.run(
            [sys.executable, "-m", "phalanx", "import", str(folder), "--out", str(run)],
            check=True,
            stdout=sys.stderr,
        )
        ports = {"ours": free_port(), "vLLM": free_port()}
        commands = {
            "ours": our_command(run, given.numerics),
            "vLLM": their_command(given.vllm_python, folder),
        }
        print(
            f"{given.requests} requests of {PROMPT_TOKENS} and {NEW_TOKENS} tokens, width {given.dim}, {given.layers} layers, fp32, {threads} threads each, "
            f"{given.numerics} numerics; good: first token within {given.ttft_s:g} s and {given.tpot_s:g} s a token",
            flush=True,
        )
        for rate in given.rate or (0.5, 0.9):
            load = Load(rate, given.requests, given.ttft_s, given.tpot_s)
            ratios = []
            for seed in range(given.rounds):
                found = {}
                for side, command in commands.items():
                    log = Path(name) / f"{side}.log"
                    with server(
                        side, [*command, "--port", str(ports[side])], ports[side], log, threads
                    ) as url:
                        time.sleep(REST_S)
                        found[side] = send(url, folder, load, seed)
                    print(line(side, found[side], load), flush=True)
                ratios.append(found["ours"].goodput(load) / max(found["vLLM"].goodput(load), 1e-9))
            print(
                f"{rate:g} requests a second: ours over vLLM {statistics.median(ratios):.2f}",
                flush=True,
            )


if __name__ == "__main__":
    run_bench(main)
