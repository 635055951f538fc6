"""A user's own model: called as its parts state, known to the trainer as it is, and refused where it would be trained wrongly."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples import mixer as mixers
from examples.mixer import GatedConvolution, Mixer
from torch import Tensor, nn

from phalanx.model.custom import Chain, CustomModelError, blocks_of, custom_facts, gradient_notes
from phalanx.model.transformer import Transformer
from phalanx.run.spec import ModelSpec

SPEC = ModelSpec(factory="examples.mixer:Mixer", layers=3, dim=16, vocab_size=50)


class WithoutForward(Mixer):
    """States its parts and nothing else."""

    forward = nn.Module.forward


class Scaled(Mixer):
    """Does something between embedding and blocks that training would leave out."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * 4
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


class Capped(Mixer):
    """Does something after the head."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).tanh()


class Skipping(Mixer):
    """Leaves the last block out."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks[:-1]:
            hidden = block(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


class ScaledInPlace(Mixer):
    """Writes into what came out of the embedding, which stays the same tensor."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens).mul_(2)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


class DividedInPlace(Mixer):
    """Writes into the logits."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).div_(3)


class Halved(nn.Linear):
    """A head that does more than multiply with its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def changed(change: Any) -> type[Mixer]:
    """A ``Mixer`` that has been changed after it was built."""

    class Changed(Mixer):
        def __init__(self, spec: ModelSpec) -> None:
            super().__init__(spec)
            change(self)

    return Changed


def tie_blocks(model: Mixer) -> None:
    model.blocks[1].gate = model.blocks[0].gate


def keep_a_table(model: Mixer) -> None:
    model.blocks[0].table = torch.arange(4)


class Unfinished(Mixer):
    """Raises when it is made."""

    def __init__(self, spec: ModelSpec) -> None:
        raise TypeError(f"{spec.layers} layers")


class Exits(Mixer):
    """Ends the program when it is made."""

    def __init__(self, spec: ModelSpec) -> None:
        raise SystemExit(spec.layers)


class HasNoKind(Mixer):
    """Raises when its parameters are read."""

    def parameter_kind(self, name: str) -> str:
        return {"head.weight": "output"}[name]


def use_no_norm(model: Mixer) -> None:
    model.blocks[1].norm.forward = lambda x: x


def through(function: Callable[[Tensor], Tensor]) -> type[Mixer]:
    """A ``Mixer`` whose second block's input goes through a function first."""

    class Through(GatedConvolution):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(function(x))

    return changed(lambda model: model.blocks.__setitem__(1, Through(16)))


def backwards(factor: float) -> Callable[[Tensor], Tensor]:
    """A function that leaves its argument alone, and multiplies its gradient."""

    def hooked(y: Tensor) -> Tensor:
        if y.requires_grad:
            y.register_hook(lambda gradient: factor * gradient)
        return y

    return hooked


class Hooked(GatedConvolution):
    """Has a gradient that is not its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x + backwards(-0.1)(super().forward(x) - x)


class SwitchedOff(GatedConvolution):
    """A product of two factors that both begin at zero."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.first_bias = nn.ParameterDict({"bias": nn.Parameter(torch.empty(dim))})
        self.second_bias = nn.ParameterDict({"bias": nn.Parameter(torch.empty(dim))})

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x * self.first_bias["bias"] * self.second_bias["bias"]


class Attention(nn.Module):
    """Causal attention whose keys have a bias. It changes no result: softmax does not depend on it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)


class Experts(nn.Module):
    """Sends each token to one of many experts, so that some get none, and a small change of the router sends it elsewhere."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(dim), nn.Linear(dim, 64, bias=False)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weight, chosen = self.router(y).softmax(-1).max(-1, keepdim=True)
        outputs = (expert(y) * (chosen == number) for number, expert in enumerate(self.experts))
        return x + weight * sum(outputs)


def with_block(block: type[nn.Module]) -> type[Mixer]:
    """A ``Mixer`` with another last block."""
    return changed(lambda model: model.blocks.__setitem__(2, block(16)))


REFUSED = {
    "exits": (Exits, r"model\.factory: .* section: SystemExit\(3\) \(.*test_custom\.py, line \d+\); mend it"),
    "has_no_kind": (
        HasNoKind,
        r"parameter_kind\('.*'\) fails: KeyError\('.*'\) \(.*test_custom\.py, line \d+\); mend it",
    ),
    "unfinished": (
        Unfinished,
        r"cannot be made from the run's \[model\] section: TypeError\('3 layers'\) \(.*test_custom\.py, line \d+\)",
    ),
    "unused": (
        changed(use_no_norm),
        "the logits do not depend on blocks.1.norm.weight, so it cannot be trained",
    ),
    "no_blocks": (
        changed(lambda model: delattr(model, "blocks")),
        "no attribute blocks; give it an nn.ModuleList",
    ),
    "no_norm": (changed(lambda model: delattr(model, "norm")), "no attribute norm"),
    "no_head": (
        changed(lambda model: delattr(model, "head")),
        r"head; give it an nn.Linear\(dim, vocab_size",
    ),
    "list": (changed(lambda model: setattr(model, "blocks", nn.Identity())), "Identity as attribute blocks"),
    "fewer": (
        changed(lambda model: model.blocks.pop(0)),
        r"it has 2 blocks; model\.layers = 3 must be equal",
    ),
    "headless": (
        changed(lambda model: setattr(model, "head", None)),
        "it has no head; model.tie_embeddings = false",
    ),
    "biased": (changed(lambda model: setattr(model, "head", nn.Linear(16, 50))), "nn.Linear without bias"),
    "narrow": (
        changed(lambda model: setattr(model, "head", nn.Linear(16, 49, bias=False))),
        r"it must be \(vocab_size",
    ),
    "more": (changed(lambda model: setattr(model, "extra", nn.Linear(2, 2))), "extra would never be called"),
    "buffer": (
        changed(lambda model: model.norm.register_buffer("mean", torch.zeros(1))),
        "norm.mean is a buffer",
    ),
    "plain": (changed(keep_a_table), "blocks.0.table is a plain tensor"),
    "dropout": (changed(lambda model: model.blocks.__setitem__(1, nn.Dropout(0.1))), "draws random numbers"),
    "shared": (changed(tie_blocks), "blocks.1.gate.weight is the same parameter as blocks.0.gate.weight"),
    "frozen": (changed(lambda model: model.norm.requires_grad_(False)), "norm.weight is frozen"),
    "half": (
        changed(lambda model: model.norm.to(torch.bfloat16)),
        "is torch.bfloat16; make it torch.float32",
    ),
    "scalar": (
        changed(lambda m: setattr(m.norm, "scale", nn.Parameter(torch.ones(())))),
        "norm.scale has no dimension",
    ),
    "wide": (changed(lambda m: m.blocks.__setitem__(2, nn.Linear(16, 8))), r"blocks\.2 gives \(1, 8, 8\)"),
    "tuple": (changed(lambda m: m.blocks.__setitem__(2, nn.LSTM(16, 16))), r"blocks\.2 gives tuple"),
    "scaled": (Scaled, "does not pass the output before blocks.0 to blocks.0 unchanged"),
    "capped": (Capped, "does more than embedding, blocks, norm and head"),
    "scaled_in_place": (ScaledInPlace, "does not pass the output before blocks.0 to blocks.0 unchanged"),
    "divided_in_place": (DividedInPlace, "does more than embedding, blocks, norm and head"),
    "halved": (
        changed(lambda m: setattr(m, "head", Halved(16, 50, bias=False))),
        "more than a matrix product",
    ),
    "hooked_head": (
        changed(lambda m: m.head.register_forward_hook(lambda *_: None)),
        "more than a matrix product",
    ),
    "hooked": (changed(lambda m: m.register_forward_hook(lambda *_: None)), "has forward hooks"),
    "top": (
        changed(lambda m: m.register_parameter("position", nn.Parameter(torch.ones(8, 16)))),
        "the parameter position would never be used; put it inside",
    ),
    "of_the_list": (
        changed(lambda m: m.blocks.register_parameter("alpha", nn.Parameter(torch.ones(3)))),
        "the parameter blocks.alpha would never be used",
    ),
    "attention_dropout": (
        changed(
            lambda m: setattr(m.blocks[1], "attention", nn.MultiheadAttention(16, 2, dropout=0.1, bias=False))
        ),
        "set its dropout to 0",
    ),
    "looks_ahead": (
        through(lambda x: x + F.pad(x[:, 1:], (0, 0, 0, 1))),
        r"blocks\.1 is not causal: .* changes with tokens 1 or more later",
    ),
    "looks_far_ahead": (through(lambda x: x - x.mean(1, keepdim=True)), r"blocks\.1 is not causal"),
    "mixes_sequences": (
        through(lambda x: x - x.mean(0)),
        r"blocks\.1 computes a sequence otherwise beside other sequences",
    ),
    "drops": (
        through(lambda x: F.dropout(x, 0.1)),
        r"blocks\.1 gives another result for the same input the second time",
    ),
    "skipping": (Skipping, "the output before blocks.2"),
    "function": (lambda _spec: GatedConvolution, "object of type type; it must return an nn.Module"),
}


@pytest.fixture(autouse=True)
def _factories(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models of this file can be named like those of the module ``mixers``."""
    for name, (factory, _) in REFUSED.items():
        monkeypatch.setattr(mixers, name, factory, raising=False)
    monkeypatch.setattr(mixers, WithoutForward.__name__, WithoutForward, raising=False)


def named(factory: str) -> ModelSpec:
    return dataclasses.replace(SPEC, factory=f"examples.mixer:{factory}")


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_be_trained_wrongly_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(CustomModelError, match=REFUSED[name][1]):
        custom_facts(named(name), seq_len=8)


def test_a_check_of_blocks_leaves_random_numbers_as_they_were() -> None:
    before = torch.get_rng_state()
    custom_facts(SPEC, seq_len=8)
    assert list(gradient_notes(SPEC)) == []
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("block", "notes"),
    [
        (Hooked, r"the gradient of blocks\.2\..* is not the slope"),
        (SwitchedOff, r"no gradient reaches blocks\.2\.first_bias\.bias, blocks\.2\.second_bias\.bias"),
        (GatedConvolution, None),
        (Attention, None),
        (Experts, None),
    ],
)
def test_gradients_that_are_not_the_blocks_own_and_parameters_that_get_none_are_noted(
    monkeypatch: pytest.MonkeyPatch, block: type[nn.Module], notes: str | None
) -> None:
    monkeypatch.setattr(mixers, "Other", with_block(block), raising=False)
    texts = list(gradient_notes(named("Other")))
    assert bool(texts) == bool(notes)
    assert all(re.search(notes, text) for text in texts if notes)


@pytest.mark.parametrize("tied", [False, True])
def test_the_chain_computes_what_the_model_computes_under_the_same_names(tied: bool) -> None:
    torch.manual_seed(0)
    spec = dataclasses.replace(SPEC, tie_embeddings=tied)
    model = Mixer(spec)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    chain = Chain(spec)
    chain.load_state_dict(model.state_dict())
    tokens = torch.randint(50, (2, 9))
    assert torch.equal(chain(tokens), model(tokens))
    assert len(custom_facts(spec, seq_len=8).parameters) == len(list(model.parameters()))


@pytest.mark.parametrize(
    "last",
    [
        lambda logits: logits / 2,
        lambda logits: logits.div_(2),
        lambda logits: 30 * torch.tanh(logits / 30),
        lambda logits: logits.roll(1, dims=-1),
    ],
    ids=["scaled", "in place", "capped", "rolled"],
)
def test_a_tied_model_whose_forward_changes_the_logits_is_refused(
    monkeypatch: pytest.MonkeyPatch, last: Callable[[Tensor], Tensor]
) -> None:
    plain = Mixer.forward
    monkeypatch.setattr(Mixer, "forward", lambda self, tokens: last(plain(self, tokens)))
    with pytest.raises(CustomModelError, match="does more than embedding, blocks, norm and head"):
        custom_facts(dataclasses.replace(SPEC, tie_embeddings=True), seq_len=8)


def test_stages_one_after_another_are_the_whole_chain() -> None:
    full_chain = Chain(SPEC)
    for parameter in full_chain.parameters():
        nn.init.normal_(parameter, std=0.1)
    hidden = torch.randint(50, (2, 9))
    expected = full_chain(hidden)
    for stage, layers in enumerate((range(1), range(1, 3))):
        part = Chain(SPEC)
        part.load_state_dict(full_chain.state_dict())
        part.keep(layers, first=stage == 0, last=stage == 1)
        hidden = part(hidden)
    assert torch.equal(hidden, expected)


def test_the_facts_are_those_of_the_module() -> None:
    facts = custom_facts(named("WithoutForward"), seq_len=8)
    kinds = {parameter.name: parameter.kind for parameter in facts.parameters}
    assert {name: tuple(p.shape) for name, p in Mixer(SPEC).named_parameters()} == {
        parameter.name: parameter.shape for parameter in facts.parameters
    }
    assert kinds["embedding.weight"] == "embedding"
    assert kinds["blocks.0.filter"] == "filter"
    assert (kinds["blocks.0.gate.weight"], kinds["blocks.0.gate.bias"]) == ("matrix", "bias")
    assert kinds["norm.weight"] == "norm"
    # Two matrices of 16 x 16 and filters of 4 x 16 for each block, the head of 50 x 16: 6 FLOP per weight.
    block, head = 6 * (2 * 16 * 16 + 4 * 16), 6 * 50 * 16
    assert facts.layer_costs == pytest.approx((block, block, block + head))
    assert facts.flops_per_token == 3 * block + head


def test_a_model_may_state_the_kinds_of_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = {"blocks.0.out.weight": "output", "blocks.0.filter": "bias"}
    monkeypatch.setattr(Mixer, "parameter_kind", lambda _self, name: stated.get(name), raising=False)
    kinds = {parameter.name: parameter.kind for parameter in custom_facts(SPEC, seq_len=8).parameters}
    assert (kinds["blocks.0.out.weight"], kinds["blocks.0.filter"]) == ("output", "bias")
    assert kinds["blocks.1.out.weight"] == "matrix"
    stated["norm.weight"] = "matrix"
    with pytest.raises(CustomModelError, match=r"norm\.weight has 1 dimensions"):
        custom_facts(SPEC, seq_len=8)


def test_the_blocks_of_any_model_are_found() -> None:
    plain = ModelSpec(layers=2, dim=16, heads=2, kv_heads=2, head_dim=8, ffn_dim=32, vocab_size=50)
    with torch.device("meta"):
        assert len(blocks_of(Transformer(plain))) == 2
        assert [type(block) for block in blocks_of(Chain(SPEC))] == [GatedConvolution] * 3
