"""Goodput of ``phalanx serve`` over vLLM's under one load whose requests arrive at random, in one run.

    python -m bench.beside.goodput --vllm-python /venvs/vllm/bin/python [--rate 0.6 --rate 0.9] [--requests 64] [--rounds 1] [--numerics exact]

Both serve the same random Llama (fp32) over HTTP with as many threads. ``vllm bench serve``, vLLM's own load program, sends both the same prompts with Poisson arrivals of the
same seed, one server after the other. A request counts if it is answered within both objectives: the first token within ``--ttft-s``, and the mean of
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
    """One load: Poisson arrivals at ``rate`` requests a second, and the objectives of a good answer."""

    rate: float
    requests: int
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class LoadResult:
    """The times of the requests that a load program sent to one server."""

    answered: list[tuple[float, float]]
    """Seconds to the first token, and in the mean from one to the next, of each request that was answered."""
    failed: int
    seconds: float

    def goodput(self, load: Load) -> float:
        """Return the requests a second that were answered within both objectives."""
        good = sum(ttft_s <= load.ttft_s and tpot_s <= load.tpot_s for ttft_s, tpot_s in self.answered)
        return good / self.seconds


def write_model(folder: Path, dim: int, layers: int) -> None:
    """Write a random Llama with a byte-level tokenizer of ``VOCABULARY`` tokens, as both sides read it."""
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
    """Return the command of ``phalanx serve`` without its port."""
    options = {"--numerics": numerics, "--name": "model", "--context": str(CONTEXT)}
    arguments = [word for option in options.items() for word in option]
    return [sys.executable, "-m", "phalanx", "serve", str(run), *arguments]


def their_command(python: str, folder: Path) -> list[str]:
    """Return the command of vLLM's server without its port. No prompt comes twice, so it keeps no prefixes."""
    options = {
        "--model": str(folder),
        "--served-model-name": "model",
        "--dtype": "float32",
        "--max-model-len": str(CONTEXT),
    }
    arguments = [word for option in options.items() for word in option]
    module = "vllm.entrypoints.openai.api_server"
    return [python, "-P", "-m", module, *arguments, "--enforce-eager", "--no-enable-prefix-caching"]


@contextmanager
def server(name: str, command: Sequence[str], port: int, log: Path, threads: int) -> Iterator[str]:
    """Start a server, yield its URL once ``/health`` answers 200, and end it after the block."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": "1"}
    if name == "vLLM":
        environment.pop("PYTHONPATH", None)
    with log.open("w") as log_file:
        process = subprocess.Popen(
            command, stdout=log_file, stderr=log_file, env=environment, start_new_session=True
        )
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        try:
            while not is_healthy(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{name} did not start; its log ends with:\n{log.read_text()[-3000:]}")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with suppress(ProcessLookupError):  # vLLM's engine process may outlive its server
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def by_vllm(python: str, url: str, model: Path, load: Load, seed: int) -> LoadResult:
    """Send ``load`` to a server with ``vllm bench serve``, and return its results. Raises SystemExit if that fails."""
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
            "result-filename": "results.json",
        }
        arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        switches = ["--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]
        run_program([python, "-c", LOAD, *arguments, *switches], Path(folder))
        return of_vllm(json.loads((Path(folder) / "results.json").read_text()), load)


def of_vllm(report: Mapping[str, Any], load: Load) -> LoadResult:
    """Read the results that ``vllm bench serve`` writes (``vllm/benchmarks/serve.py``). Raises SystemExit for answers of another length."""
    require_lengths(
        [length for length, error in zip(report["output_lens"], report["errors"], strict=True) if not error]
    )
    # A request that failed has no first token.
    tpot_s = [statistics.fmean(gaps) if gaps else 0.0 for gaps in report["itls"]]
    answered = [
        pair
        for pair, error in zip(zip(report["ttfts"], tpot_s, strict=True), report["errors"], strict=True)
        if not error
    ]
    return LoadResult(answered, load.requests - len(answered), report["duration"])


def by_guidellm(python: str, url: str, model: Path, load: Load, seed: int) -> LoadResult:
    """Send ``load`` to a server with GuideLLM, and return its results. Raises SystemExit if that fails."""
    from transformers import AutoTokenizer

    words, numbers = AutoTokenizer.from_pretrained(model), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        prompts, report_path = Path(folder) / "prompts.jsonl", Path(folder) / "results.json"
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
            "output": f"kind=json,path={report_path}",
        }
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        run_program([python, "-m", "guidellm", "run", *arguments, "--disable-console"], Path(folder))
        (report,) = json.loads(report_path.read_text())["benchmarks"]
    return of_guidellm(report)


def of_guidellm(report: Mapping[str, Any]) -> LoadResult:
    """Read the results that GuideLLM writes (``GenerativeRequestStats`` in ``guidellm/schemas``). Raises SystemExit for answers of another length."""
    requests = report["requests"]
    require_lengths([request["output_tokens"] for request in requests["successful"]])
    answered = [
        (request["time_to_first_token_ms"] / 1e3, request["inter_token_latency_ms"] / 1e3)
        for request in requests["successful"]
    ]
    return LoadResult(answered, len(requests["errored"]) + len(requests["incomplete"]), report["duration"])


def require_lengths(lengths: Sequence[int | None]) -> None:
    """Raise SystemExit unless all answers have as many tokens as were requested: a shorter answer costs its server less."""
    wrong = [length for length in lengths if length != NEW_TOKENS]
    if wrong:
        raise SystemExit(
            f"{len(wrong)} of {len(lengths)} answers have not the {NEW_TOKENS} tokens that were requested, but {sorted(set(map(str, wrong)))[:5]}: "
            "this load has no result; make sure that the server takes ignore_eos and reports its usage"
        )


def run_program(command: Sequence[str], folder: Path) -> None:
    """Run a load program in ``folder``, away from our modules. Raises SystemExit with the end of its output if it fails."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.run(
        command,
        env={**environment, "HF_HUB_OFFLINE": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if process.returncode:
        raise SystemExit(f"the load program ended with {process.returncode}:\n{process.stdout[-3000:]}")


def line(name: str, result: LoadResult, load: Load) -> str:
    """Return one side's result as a line of text."""
    if not result.answered:
        return f"  {name}: goodput 0, none answered, {result.failed} failed"
    ttft_ms, tpot_ms = (
        sorted(1e3 * value for value in values) for values in zip(*result.answered, strict=True)
    )
    last = -(-99 * len(ttft_ms) // 100) - 1
    return (
        f"  {name}: goodput {result.goodput(load):.3f} of {len(result.answered) / result.seconds:.3f} requests/s, {len(result.answered)} answered, "
        f"{result.failed} failed; TTFT {statistics.median(ttft_ms):.0f} ms (99 %: {ttft_ms[last]:.0f}), "
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
    arguments = parser.parse_args()
    require_catalog_peer(shutil.which(arguments.vllm_python), "beside.goodput")
    threads = torch.get_num_threads()
    send = (
        partial(by_guidellm, arguments.guidellm_python)
        if arguments.guidellm_python
        else partial(by_vllm, arguments.vllm_python)
    )
    with tempfile.TemporaryDirectory() as name:
        folder, run = Path(name) / "model", Path(name) / "run"
        write_model(folder, arguments.dim, arguments.layers)
        subprocess.run(
            [sys.executable, "-m", "phalanx", "import", str(folder), "--out", str(run)],
            check=True,
            stdout=sys.stderr,
        )
        ports = {"ours": free_port(), "vLLM": free_port()}
        commands = {
            "ours": our_command(run, arguments.numerics),
            "vLLM": their_command(arguments.vllm_python, folder),
        }
        print(
            f"{arguments.requests} requests of {PROMPT_TOKENS} and {NEW_TOKENS} tokens, width {arguments.dim}, {arguments.layers} layers, fp32, {threads} threads each, "
            f"{arguments.numerics} numerics; good: first token within {arguments.ttft_s:g} s and {arguments.tpot_s:g} s a token",
            flush=True,
        )
        for rate in arguments.rate or (0.5, 0.9):
            load = Load(rate, arguments.requests, arguments.ttft_s, arguments.tpot_s)
            ratios = []
            for seed in range(arguments.rounds):
                results = {}
                for side, command in commands.items():
                    log = Path(name) / f"{side}.log"
                    with server(
                        side, [*command, "--port", str(ports[side])], ports[side], log, threads
                    ) as url:
                        time.sleep(REST_S)
                        results[side] = send(url, folder, load, seed)
                    print(line(side, results[side], load), flush=True)
                ratios.append(results["ours"].goodput(load) / max(results["vLLM"].goodput(load), 1e-9))
            print(
                f"{rate:g} requests a second: ours over vLLM {statistics.median(ratios):.2f}",
                flush=True,
            )


if __name__ == "__main__":
    run_bench(main)
