"""The engine on another device than the CPU: nothing of a step is anywhere else, and the host waits once for what it says.

There is no GPU here. So the whole engine runs on PyTorch's device without numbers ("meta"), and, where PyTorch is built with CUDA, on fake tensors that say they are
a GPU's; each operation is looked at, and what the host would read is made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import phalanx_serve.engine.sampler as sampling_module
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec, RopeScalingSpec, RunSpec, TrainSpec
from phalanx.train.score import Scorer
from phalanx_serve.engine.engine import Engine
from phalanx_serve.engine.sampler import BatchedSamplerOutput, LazySamplerOutput, SamplingRequest, sample_rows
from phalanx_serve.kv_cache.layer_cache import LayerKVCache, Rule
from phalanx_serve.kv_cache.memory import RowSpan, TextKV
from phalanx_serve.traffic.events import Request, Sampling, ServeError, Token
from phalanx_serve.traffic.scheduler import page_names
from serve.engine.test_engine import DENSE, KINDS, MLA, prompt, run

GREEDY, PLAIN = Sampling(temperature=0), Sampling(seed=3)
CUT = Sampling(seed=5, top_k=20, top_p=0.9, min_p=0.01)
WIDE_MLA = replace(MLA, kv_rank=32, rope_head_dim=32)
MODELS: dict[str, tuple[ModelSpec, dict[str, object]]] = {
    "dense": (DENSE, {}),
    "windows and sinks": (replace(KINDS["window"], sinks=True), {}),
    "latent": (KINDS["latent"], {}),
    "mixture": (KINDS["gated shared experts"], {"dtype": torch.bfloat16}),
    "caps": (replace(KINDS["tied and capped"], score_cap=5.0, scale_embeddings=True), {}),
    "int8 kept": (replace(DENSE, head_dim=32), {"kept": "int8"}),
    "fp8 kept": (replace(KINDS["latent"], mla=WIDE_MLA), {"kept": "fp8"}),
    "drafts": (replace(DENSE, mtp_depth=2), {"drafts": 2}),
    "LongRoPE": (
        replace(
            DENSE,
            rope_scaling=RopeScalingSpec(
                kind="longrope",
                original_max_seq_len=100,
                short_factors=(1.0,) * 8,
                long_factors=(2.0,) * 8,
            ),
        ),
        {},
    ),
}


class MixedDevicesError(AssertionError):
    """An operation on tensors of two devices."""


@dataclass(eq=False)
class Seen(TorchDispatchMode):
    """Refuses operations on tensors of two devices, and counts the copies from the host and those to it."""

    brought: int = 0
    fetched: int = 0
    operations: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        devices = {one.device.type for one in given}
        if len(devices) > 1:
            raise MixedDevicesError(f"{func} of tensors on {sorted(devices)}")
        made = func(*args, **(kwargs or {}))
        if devices == {"cpu"} and isinstance(made, Tensor) and made.device.type != "cpu":
            self.brought += 1
        self.operations.add(str(func))
        return made

    def fetch(self, tensor: Tensor) -> NDArray[Any]:
        """A copy to the host, which finds ones."""
        self.fetched += 1
        kind = {torch.int64: np.int64, torch.uint8: np.uint8, torch.float32: np.float32}[tensor.dtype]
        return np.ones(tuple(tensor.shape), kind)


@contextmanager
def elsewhere(device: str) -> Iterator[tuple[torch.device, Seen]]:
    """Makes ``device`` one that can be computed on as far as tensors have no numbers."""
    seen, fake = Seen(), device == "cuda"
    mode: AbstractContextManager[object] = (
        FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        for place in ("engine.sampler", "kv_cache.memory"):
            patch.setattr(f"phalanx_serve.{place}.fetched", seen.fetch)
        patch.setattr("phalanx_serve.numerics.make_current", lambda _: None)
        patch.setattr("phalanx_serve.numerics.device_name", lambda _: "made up")
        for place in ("model_runner", "drafts"):  # fake tensors have no addresses
            patch.setattr(f"phalanx_serve.engine.{place}.batched_attention", lambda *_: None)
        sampling_module._on.cache_clear()
        try:
            with mode, seen:
                yield torch.device(device), seen
        finally:
            sampling_module._on.cache_clear()


@pytest.fixture(
    params=[
        "meta",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a PyTorch with CUDA"),
        ),
    ]
)
def other(request: pytest.FixtureRequest) -> Iterator[tuple[torch.device, Seen]]:
    with elsewhere(request.param) as found:
        yield found


def model_on(device: torch.device, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Transformer:
    torch.set_default_dtype(dtype)  # fake tensors refuse to become others in their module
    try:
        with device:
            return Transformer(resolve(spec)).requires_grad_(False).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def requests(count: int, length: int, tokens: int, *options: Sampling) -> list[Request]:
    return [
        Request(
            f"r{number}",
            tuple((7 * number + 13 * i) % 160 for i in range(length + number)),
            tokens,
            options[number % len(options)],
            top_logprobs=number % 3 - 1,
            prompt_logprobs=number % 2 == 0,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("kind", MODELS)
def test_a_whole_engine_computes_on_one_device(kind: str, other: tuple[torch.device, Seen]) -> None:
    (device, seen), (spec, options) = other, dict(MODELS)[kind]
    options = dict(options)
    model = model_on(device, spec, options.pop("dtype", torch.float32))  # type: ignore[arg-type]
    texts = requests(3, 97, 3, GREEDY, PLAIN, CUT)  # which LongRoPE turns by other factors on the way
    served = Engine(model, model.spec, numerics="fast", pages=4, rows=90, weights_id="w", **options)  # type: ignore[arg-type]
    told = run(served, texts)
    assert all(len([one for one in all_told if isinstance(one, Token)]) == 3 for all_told in told.values())
    assert served.statistics().preempted > 0, "pages run out on the way"
    assert served.device == model.projection().device
    assert any("scaled_dot_product" in name or "matmul" in name or "bmm" in name for name in seen.operations)
    # A page goes to the host and comes back.
    names = [name for one in texts for name in page_names(one.prompt, served.root)]
    (name, *_) = served.held_pages(names)
    content = served.read_page(name)
    assert len(content) == served.page_bytes
    served.forget_pages()
    assert served.held_pages([name]) == []
    assert served.write_page(name, content)
    assert served.held_pages([name]) == [name]


def test_the_host_waits_once_a_step_however_many_texts_there_are(other: tuple[torch.device, Seen]) -> None:
    device, seen = other
    model = model_on(device, DENSE)
    waits: dict[int, int] = {}
    for count in (1, 12):
        served = Engine(model, model.spec, numerics="fast", pages=48, weights_id="w")
        for request in requests(count, 20, 2, GREEDY, PLAIN, CUT):
            served.submit(request)
        before, steps = seen.fetched, 0
        while served.busy:
            served.step()
            steps += 1
        waits[count] = seen.fetched - before - steps
    assert waits[12] <= waits[1] <= 0, "a step that draws nothing waits for nothing"


def test_drafts_cost_a_wait_for_each_depth(other: tuple[torch.device, Seen]) -> None:
    device, seen = other
    model = model_on(device, replace(DENSE, mtp_depth=2))
    served = Engine(model, model.spec, numerics="fast", pages=48, drafts=2, weights_id="w")
    for request in requests(3, 20, 4, PLAIN):
        served.submit(request)
    steps = 0
    while served.busy:
        served.step()
        steps += 1
    assert seen.fetched <= 3 * steps


def test_a_mixture_of_devices_is_noticed(other: tuple[torch.device, Seen]) -> None:
    device, _ = other
    model = model_on(device, DENSE)
    assert model.embedding is not None
    piece = TextKV(model.spec, torch.float32)  # left in the host's memory
    piece.grow(8)
    rows = LayerKVCache(0, [RowSpan(piece, 0, 4)], Rule(False), {})
    of_heads = [torch.zeros(1, heads, 4, 16, device=device) for heads in (4, 2, 2)]
    block = model.blocks["0"]
    with pytest.raises((MixedDevicesError, RuntimeError)):
        rows.mix(block.attention.core, *of_heads)  # type: ignore[union-attr, arg-type]


def test_exact_numerics_are_refused_elsewhere_than_on_a_cpu(other: tuple[torch.device, Seen]) -> None:
    model = model_on(other[0], DENSE)
    with pytest.raises(ServeError, match=r"kernels for CPUs: serve with --numerics fast, or"):
        Engine(model, model.spec, pages=4, weights_id="w")


def test_a_score_is_computed_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    train = TrainSpec(steps=1, batch_size=4, slots=2, seq_len=64, micro_batch_size=2)
    with elsewhere("meta") as (device, seen):
        monkeypatch.setattr("phalanx.train.score.fetched", seen.fetch)
        scorer = Scorer(RunSpec(model=resolve(DENSE), train=train), model_on(device, DENSE))
        found = scorer.score([prompt(1, 64), prompt(2, 20), prompt(3, 2)])
    assert [len(one) for one in found] == [63, 19, 1]
    assert all(one.device.type == "cpu" for one in found)


# The same numbers


@pytest.mark.parametrize("vocab_size", [0, 100])
def test_rows_read_together_are_those_read_one_by_one(vocab_size: int) -> None:
    torch.manual_seed(0)
    scores = torch.randn(12, 160) * 4
    scores[3, 7] = torch.nan
    log_probs = scores.log_softmax(-1)
    samplings = [replace(one, vocab_size=vocab_size) for one in (GREEDY, PLAIN, CUT)]
    asks = [
        SamplingRequest(
            row,
            row + 5,
            row + 95 if row % 4 in (1, 2) else -1,
            samplings[row % 3],
            (-1, 0, 3, 100)[row % 4],
        )
        for row in range(12)
    ]
    together, alone = (
        BatchedSamplerOutput(asks, scores, log_probs),
        LazySamplerOutput(asks, scores, log_probs),
    )
    assert [together[i] for i in range(12)] == [alone[i] for i in range(12)]
    assert isinstance(sample_rows(asks, scores, log_probs), LazySamplerOutput), (
        "a CPU reads what is asked for"
    )
