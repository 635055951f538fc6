"""A user's own model: its contract, and its form inside the trainer.

Data parallelism, sharding, pipelines, recomputation, checkpoints and recovery need the parts of a model: an embedding, blocks, a
norm, a head. They do not depend on the contents of these. So a custom model is any module with these four attributes
(``CustomModel``). ``Chain`` calls them in order in place of ``phalanx.model.transformer.Transformer``, under the parameter names of
the user's module.

A model that cannot be trained correctly is refused when it is built, with the remedy (``CustomModelError``):

- buffers and tensors that a build on the meta device leaves without values;
- random numbers in the forward pass, which would differ between ranks;
- parameters that are shared, frozen or not fp32;
- a ``forward`` that computes something other than the chain. Both are called on the meta device, at no cost in memory or FLOP. The
  input of each part must be the very tensor that the previous part returned, without writes in between;
- a block that reads later tokens or other sequences, or gives two results for one input. The first blocks are computed once, on the CPU.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.flop_counter import FlopCounterMode

from phalanx.model.autograd import DispatchMode
from phalanx.model.layers.attention.attention import Documents
from phalanx.model.transformer import Block, Readout, logits
from phalanx.run.factory import describe_error, load_factory
from phalanx.run.kinds.operations import Parameter, ParameterKind
from phalanx.run.spec import ModelSpec


class CustomModelError(ValueError):
    """A user's model cannot be trained; the message has the cause and the remedy."""


class CustomModel(Protocol):
    """Contract of a user's ``nn.Module``. Shapes: ``b`` batch, ``s`` sequence, ``d`` = ``model.dim``.

    It is built by ``factory(model_spec)`` on the meta device. Parameters get their values afterwards; each element is a function of the
    seed, the parameter's name and its index. Matrices, filters and embeddings are drawn from a normal distribution with
    ``model.init_std``. Parameters of one dimension start at one, those named ``bias`` at zero. A method
    ``parameter_kind(name) -> str | None`` can override this: "matrix", "output" (a matrix that writes into the residual stream, and
    starts smaller), "filter", "embedding", "norm" (ones) or "bias" (zeros).
    """

    @property
    def embedding(self) -> nn.Module:
        """Tokens ``(b, s)``, int64, to hidden states ``(b, s, d)``."""

    @property
    def blocks(self) -> nn.ModuleList:
        """``model.layers`` modules, each from hidden states ``(b, s, d)`` to hidden states ``(b, s, d)``.

        A block must be causal, and compute each sequence by itself.
        """

    @property
    def norm(self) -> nn.Module:
        """Hidden states to the input of the head; ``nn.Identity()`` if there is no norm."""

    @property
    def head(self) -> nn.Linear | None:
        """Output projection without bias, ``(vocab_size, d)``.

        ``None`` with ``model.tie_embeddings``: then the weight of ``embedding``, an ``nn.Embedding``, is used.
        """


class Chain(nn.Module):
    """A user's model as the trainer calls it: embedding, blocks, norm, head; or a stage of a pipeline."""

    def __init__(self, spec: ModelSpec) -> None:
        """Build the model of a resolved ``spec`` on the current default device, by calling the user's factory. Raises
        ``CustomModelError``, or ``FactoryError`` if the factory cannot be imported or has another source than
        ``spec`` names.
        """
        super().__init__()
        self.spec = spec
        model = _require_parts(_build(load_factory(spec.factory, spec.factory_sha256), spec), spec)
        self.embedding: nn.Module | None = model.embedding
        self.blocks = nn.ModuleDict({str(layer): block for layer, block in enumerate(model.blocks)})
        self.norm: nn.Module | None = model.norm
        self.head = model.head

    def keep(self, layers: range, *, first: bool, last: bool) -> None:
        """Reduce the model in place to a stage of a pipeline: the blocks numbered ``layers``. Only the first stage
        has the embedding; only the last has norm and head.
        """
        self.blocks = nn.ModuleDict(
            {name: block for name, block in self.blocks.items() if int(name) in layers}
        )
        if not first:
            self.embedding = None
        if not last:
            self.norm, self.head = None, None

    def forward(
        self,
        x: Tensor,
        readout: Readout = logits,
        *,
        positions: Tensor | None = None,  # noqa: ARG002  blocks take hidden states only
        documents: Documents | None = None,
        ahead: object = None,
        further: object = None,
    ) -> Tensor:
        """Return ``readout`` of the last hidden states, by default logits; a stage without norm returns its hidden states.

        Args:
            x: Tokens ``(b, s)``, int64; hidden states ``(b, s, d)`` for a stage without embedding.
            readout: Called with hidden states ``(b, s, d)`` and the output projection ``(vocab, d)``.
            positions: Not used: each rank has full sequences.
            documents: Must be ``None``, as must ``ahead`` and ``further``.
        """
        assert documents is None, "refused by phalanx.run.rules"
        assert ahead is None, "refused by phalanx.run.rules"
        assert further is None, "a custom model has no predictions ahead"
        hidden = x if self.embedding is None else self.embedding(x)
        for block in self.blocks.values():
            hidden = block(hidden)
        if self.norm is None:
            return cast(Tensor, hidden)
        hidden = self.norm(hidden)
        owner = self.embedding if self.head is None else self.head
        return readout(hidden, cast(nn.Embedding | nn.Linear, owner).weight)


def blocks_of(part: nn.Module) -> list[nn.Module]:
    """Return the layers of a stage of any model: the units of gathering, recomputation and offloading."""
    if isinstance(part, Chain):
        return list(part.blocks.values())
    return [module for module in part.modules() if isinstance(module, Block)]


@dataclass(frozen=True)
class CustomFacts:
    """Facts of a user's model that the trainer needs, taken from a build on the meta device."""

    parameters: tuple[Parameter, ...]
    """All parameters, in the order in which the module registers them."""
    layer_costs: tuple[float, ...]
    """Training FLOP per token of each block; the last one includes the head."""

    @property
    def flops_per_token(self) -> int:
        """Training FLOP per token: three times those of a forward pass's matrix products, convolutions and attention."""
        return round(sum(self.layer_costs))


def custom_facts(spec: ModelSpec, seq_len: int, dtype: torch.dtype = torch.float32) -> CustomFacts:
    """Build a user's model on the meta device, check that it can be trained, and return its parameters and the training
    FLOP per token of each block: three times those of its forward pass.

    Args:
        spec: Resolved.
        seq_len: Tokens of a sequence.
        dtype: Dtype of weights and hidden states in the forward pass.

    Raises:
        CustomModelError: The model cannot be trained.
        FactoryError: The factory cannot be imported, or has another source than ``spec`` names.
    """
    with torch.device("meta"):
        chain = Chain(spec)
        model = cast(nn.Module, _build(load_factory(spec.factory), spec))
    parameters = tuple(_parameters(chain, model))
    chain, model = chain.to(dtype), model.to(dtype)
    tokens = torch.zeros((1, seq_len), dtype=torch.int64, device="meta")
    costs = _forward_costs(chain, tokens)
    _require_gradients(chain, tokens)
    _require_same_forward(model, spec, tokens)
    _require_sound_blocks(load_factory(spec.factory), spec, parameters)
    return CustomFacts(parameters, tuple(3 * cost / seq_len for cost in costs))


def _build(factory: Callable[..., Any], spec: ModelSpec) -> Any:
    """Call the user's factory with ``spec`` and return its result. Any error in it, an exit included, is raised as
    ``CustomModelError`` with the line.
    """
    try:
        return factory(spec)
    except (Exception, SystemExit) as error:
        raise CustomModelError(
            f"model.factory: {spec.factory} cannot be made from the run's [model] section: {describe_error(error, spec.factory)}; "
            "mend it, or correct that section"
        ) from error


def _require_parts(model: Any, spec: ModelSpec) -> CustomModel:
    """Return the model if it has embedding, ``spec.layers`` blocks, norm and head, each of the required type.

    Raise ``CustomModelError`` otherwise; for modules, parameters or forward hooks outside these parts; and for what
    ``_require_head`` and ``_require_trainable`` refuse.
    """

    def refuse(cause: str, remedy: str) -> CustomModelError:
        return CustomModelError(f"{spec.factory}: {cause}; {remedy}")

    if not isinstance(model, nn.Module):
        raise refuse(f"it made an object of type {type(model).__name__}", "it must return an nn.Module")
    for name, kind in (("embedding", nn.Module), ("blocks", nn.ModuleList), ("norm", nn.Module)):
        part = getattr(model, name, None)
        if not isinstance(part, kind):
            has = "no attribute" if part is None else f"{type(part).__name__} as attribute"
            remedy = "give it an nn.Module" if kind is nn.Module else "give it an nn.ModuleList of its layers"
            raise refuse(f"the model has {has} {name}", remedy)
    if len(model.blocks) != spec.layers:  # type: ignore[arg-type]
        raise refuse(f"it has {len(model.blocks)} blocks", f"model.layers = {spec.layers} must be equal")  # type: ignore[arg-type]
    _require_head(model, spec, refuse)
    others = {name for name, _ in model.named_children()} - {"embedding", "blocks", "norm", "head"}
    if others:
        raise refuse(
            f"{', '.join(sorted(others))} would never be called", "put it inside embedding, a block or norm"
        )
    for name, _ in model.named_parameters():
        if not _OF_A_PART.match(name):
            raise refuse(
                f"the parameter {name} would never be used", "put it inside embedding, a block, norm or head"
            )
    if _has_hooks(model):
        raise refuse("it has forward hooks, which training would not call", "put what they do into a part")
    _require_trainable(model, refuse)
    return cast(CustomModel, model)


_Refusal = Callable[[str, str], CustomModelError]

_OF_A_PART = re.compile(r"(embedding|norm|head|blocks\.\d+)\.")
"""Matches names of parameters that belong to the chain."""


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _require_head(model: nn.Module, spec: ModelSpec, refuse: _Refusal) -> None:
    """Raise the error of ``refuse`` unless the head is an ``nn.Linear`` of ``(vocab, dim)`` without bias and hooks;
    or None, if and only if the spec ties it to such an embedding.
    """
    if not hasattr(model, "head"):
        raise refuse(
            "the model has no attribute head",
            "give it an nn.Linear(dim, vocab_size, bias=False), or None for the embedding's weight",
        )
    if (model.head is None) != spec.tie_embeddings:
        has = "no head" if model.head is None else "a head of its own"
        tied = str(spec.tie_embeddings).lower()
        raise refuse(f"it has {has}", f"model.tie_embeddings = {tied} must agree (None ties the head)")
    owner, name = (model.embedding, "embedding") if model.head is None else (model.head, "head")
    if not isinstance(owner, nn.Embedding | nn.Linear) or getattr(owner, "bias", None) is not None:
        remedy = "it must be an nn.Linear without bias, or None with an nn.Embedding as embedding"
        raise refuse(f"the head is read from {name}, of type {type(owner).__name__}", remedy)
    if model.head is not None and (type(owner).forward is not nn.Linear.forward or _has_hooks(owner)):
        raise refuse(
            "its head does more than a matrix product, but training reads its weight alone",
            "use a plain nn.Linear, and move everything else into norm",
        )
    if tuple(owner.weight.shape) != (spec.vocab_size, spec.dim):
        raise refuse(
            f"{name}.weight has the shape {tuple(owner.weight.shape)}",
            f"it must be (vocab_size, dim) = ({spec.vocab_size}, {spec.dim})",
        )


def _require_trainable(model: nn.Module, refuse: _Refusal) -> None:
    """Raise the error of ``refuse`` for the first buffer, plain tensor or dropout above 0, or for a shared or frozen
    parameter, one that is not fp32, or one without dimensions.
    """
    for name, _ in model.named_buffers():
        raise refuse(
            f"{name} is a buffer, whose values are neither initialized nor saved",
            "compute it in the forward pass, or make it a parameter",
        )
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                raise refuse(
                    f"{f'{name}.{key}'.lstrip('.')} is a plain tensor, without values after a build on the meta device",
                    "compute it in the forward pass, on the device of its input, or make it a parameter",
                )
        drops = isinstance(module, _DropoutNd) and module.p > 0
        if drops or (isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0):
            raise refuse(
                f"{name} draws random numbers, which would differ from rank to rank",
                f"set its {'p' if drops else 'dropout'} to 0: the weights are to be the same on any number of ranks",
            )
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in names:
            raise refuse(
                f"{name} is the same parameter as {names[parameter]}",
                "give each its own; to tie the head to the embedding, set head = None and model.tie_embeddings = true",
            )
        names[parameter] = name
        if not parameter.requires_grad:
            raise refuse(f"{name} is frozen", "every parameter must take part in training")
        if parameter.dtype != torch.float32:
            raise refuse(f"{name} is {parameter.dtype}", "make it torch.float32; precision.compute casts it")
        if parameter.ndim == 0:
            raise refuse(f"{name} has no dimension", "make its shape (1,), so that it can be sharded")


def _parameters(chain: Chain, model: nn.Module) -> Iterator[Parameter]:
    """Yield the model's parameters with their kinds: as its ``parameter_kind`` states, or by shape if that is missing
    or returns None.

    Raises ``CustomModelError`` if it fails or returns another kind, or a matrix kind for a parameter that is not
    2-dimensional.
    """
    stated = getattr(model, "parameter_kind", lambda _name: None)
    for name, parameter in chain.named_parameters():
        try:
            kind = stated(name) or _kind_by_shape(name, parameter.ndim)
        except Exception as error:
            raise CustomModelError(
                f"{chain.spec.factory}: parameter_kind({name!r}) fails: {describe_error(error, chain.spec.factory)}; mend it"
            ) from error
        if kind not in get_args(ParameterKind) or kind in ("router", "gate", "balance"):
            raise CustomModelError(
                f"{chain.spec.factory}: parameter_kind({name!r}) is {kind!r}; it must be one of matrix, output, filter, "
                "embedding, norm, bias, or None"
            )
        if kind in ("matrix", "output") and parameter.ndim != 2:
            raise CustomModelError(
                f"{chain.spec.factory}: {name} has {parameter.ndim} dimensions; parameter_kind must not return {kind!r} for it"
            )
        yield Parameter(name, tuple(parameter.shape), cast(ParameterKind, kind))


def _kind_by_shape(name: str, dimensions: int) -> ParameterKind:
    """Return the kind of a parameter that the model does not state. One dimension is a "bias" or else "norm", by
    name; the embedding's is "embedding"; two is "matrix", more "filter".
    """
    if dimensions == 1:
        return "bias" if name.rpartition(".")[2] == "bias" else "norm"
    if name.startswith("embedding."):
        return "embedding"
    return "matrix" if dimensions == 2 else "filter"


def _forward_costs(chain: Chain, tokens: Tensor) -> list[float]:
    """Return the forward FLOP of each block on ``tokens`` ``(b, s)``. The first includes the embedding, the last also
    norm and head.

    Raises ``CustomModelError`` if a part fails, or returns anything but hidden states ``(b, s, dim)``.
    """
    spec = chain.spec
    expected_shape = (*tokens.shape, spec.dim)
    parts = [
        ("embedding", chain.embedding),
        *((f"blocks.{name}", block) for name, block in chain.blocks.items()),
    ]
    x, costs = tokens, []
    for name, part in [*parts, ("norm", chain.norm)]:
        assert part is not None, "a complete model has all parts"
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            y = _on_meta(spec, name, part, x)
        if not isinstance(y, Tensor) or tuple(y.shape) != expected_shape:
            shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise CustomModelError(
                f"{spec.factory}: {name} gives {shape} for tokens {tuple(tokens.shape)}; it must give hidden states {expected_shape}"
            )
        x = y
        costs.append(float(counter.get_total_flops()))
    before, *blocks, after = costs
    blocks[0] += before
    blocks[-1] += after + 2.0 * tokens.numel() * spec.dim * spec.vocab_size
    return blocks


def _on_meta(spec: ModelSpec, name: str, module: nn.Module, x: Tensor) -> Any:
    """Return ``module(x)`` on the meta device. Any error is raised as ``CustomModelError`` with the ``name`` of the part and the line."""
    try:
        return module(x)
    except Exception as error:
        raise CustomModelError(
            f"{spec.factory}: {name} cannot be called with one tensor {tuple(x.shape)} on the meta device: {describe_error(error, spec.factory)}; new "
            "tensors must be made on the device of the input, and no value may decide what is computed"
        ) from error


def _require_gradients(chain: Chain, tokens: Tensor) -> None:
    """Refuse parameters that the logits do not depend on: they would get no gradient and no optimizer step.

    Raises ``CustomModelError``. A model whose backward pass fails on the meta device is not checked.
    """
    named = dict(chain.named_parameters())
    try:
        gradients = torch.autograd.grad(chain(tokens).sum(), list(named.values()), allow_unused=True)
    except Exception:  # an operation without a backward pass on the meta device may have one on other devices
        return
    for name, gradient in zip(named, gradients, strict=True):
        if gradient is None:
            raise CustomModelError(
                f"{chain.spec.factory}: the logits do not depend on {name}, so it cannot be trained; use it in the "
                "forward pass of its part, or remove it"
            )


@dataclass(frozen=True)
class _TensorVersion:
    """A tensor at one moment; every in-place write raises its ``version``."""

    tensor: Tensor
    version: int

    def __eq__(self, other: object) -> bool:
        """Return True if both are one tensor object without a write in between."""
        return (
            isinstance(other, _TensorVersion)
            and self.tensor is other.tensor
            and self.version == other.version
        )


@dataclass
class _PartCall:
    """One call of a part during the model's own ``forward``."""

    part: str
    input: _TensorVersion | None
    output: _TensorVersion | None = None


def _first_tensor(values: tuple[object, ...]) -> _TensorVersion | None:
    return _TensorVersion(values[0], values[0]._version) if values and isinstance(values[0], Tensor) else None


class _Operations(DispatchMode):
    """Records the tensor operations called under it since the last ``clear``."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[str, list[Tensor]]] = []

    def clear(self) -> None:
        """Discard the recorded operations."""
        self._calls = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._calls.append((func.overloadpacket.__name__, [x for x in args if isinstance(x, Tensor)]))
        return func(*args, **(kwargs or {}))

    def are_one_product(self, hidden: _TensorVersion | None, weight: Tensor, result: Any) -> bool:
        """Return True if the recorded operations are one product of ``hidden`` and ``weight``, and otherwise only
        views. False for no ``hidden``, a ``hidden`` written since, or a ``result`` that is no tensor.
        """
        products = [operands for name, operands in self._calls if name in ("mm", "bmm", "matmul", "linear")]
        other_names = {name for name, _ in self._calls} - {"mm", "bmm", "matmul", "linear"}
        if hidden is None or len(products) != 1 or other_names - _VIEWS or not isinstance(result, Tensor):
            return False
        operands_of_head = {_storage(hidden.tensor), _storage(weight)}
        is_unwritten = hidden == _first_tensor((hidden.tensor,))
        return {_storage(operand) for operand in products[0]} == operands_of_head and is_unwritten


_VIEWS = frozenset(
    (
        *("t", "transpose", "permute", "view", "_unsafe_view", "reshape"),
        *("expand", "unsqueeze", "squeeze", "alias", "detach"),
    )
)


def _storage(tensor: Tensor) -> int:
    """Return the identity of the storage that a tensor is a view of."""
    return int(tensor.untyped_storage()._cdata)


def _require_same_forward(model: nn.Module, spec: ModelSpec, tokens: Tensor) -> None:
    """If the model defines ``forward``, call it once and check that it passes each part's unchanged output to the
    next, and returns the head's.

    Raises ``CustomModelError`` otherwise. Its parts keep the hooks that record the calls.
    """
    if type(model).forward is nn.Module.forward:
        return
    calls: list[_PartCall] = []
    named = cast(CustomModel, model)
    parts = [
        ("embedding", named.embedding),
        *((f"blocks.{n}", block) for n, block in enumerate(named.blocks)),
        ("norm", named.norm),
        *([("head", cast(nn.Module, named.head))] if named.head is not None else []),
    ]
    for name, part in parts:
        part.register_forward_pre_hook(
            lambda _part, args, name=name: calls.append(_PartCall(name, _first_tensor(args[:1])))
        )
        part.register_forward_hook(lambda _part, _args, y: setattr(calls[-1], "output", _first_tensor((y,))))
    previous = _first_tensor((tokens,))
    with torch.no_grad(), _Operations() as operations:
        named.norm.register_forward_hook(lambda *_: operations.clear())
        result = _on_meta(spec, "forward", model, tokens)
    for (name, _), call in zip(parts, [*calls, *[_PartCall("nothing", None)] * len(parts)], strict=False):
        if call.part != name or call.input != previous:
            raise CustomModelError(
                f"{spec.factory}: its forward does not pass the output before {name} to {name} unchanged, but training "
                "calls embedding, blocks, norm and head one after another; move the operations in between into one of them, "
                "or remove forward"
            )
        previous = call.output
    if named.head is None:
        same = operations.are_one_product(previous, cast(nn.Embedding, named.embedding).weight, result)
    else:
        same = _first_tensor((result,)) == previous
    if len(calls) > len(parts) or not same:
        raise CustomModelError(
            f"{spec.factory}: its forward does more than embedding, blocks, norm and head, and training would leave that "
            "out; move it into one of them, or remove forward"
        )


# Blocks as functions, computed once on a few random vectors on the CPU: what a build on the meta device cannot show.


_PROBED = 1 << 24
"""Parameters of the blocks that are computed, the first ones: some tenths of a second. Later blocks are usually of the same classes."""
_SEQUENCES, _TOKENS = 2, 16
_DIFFERENT = 1e-5
"""Part of the size of a result from which two differ by more than rounding; fp32 rounds to 1e-7."""
_NUDGES = 1e-2, 1e-4
"""Lengths of steps along a gradient, in sizes of the parameter. The error of the central difference falls with their square."""
_WRONG_SLOPE = 2.0
"""Factor between a measured slope and a gradient from which the gradient is wrong."""
_SAME_SLOPE = 0.1
"""Part by which the slopes of both steps may differ. They differ by more where routing switches between experts, or by rounding."""
_NO_CHANGE = 1e-9
"""Part of the size of a result below which a change is rounding: a bias of attention's keys has a gradient of 1e-17 instead of 0."""
_UNZERO = 1e-6
"""Size of the values that replace zeros: too small to switch routing between experts."""

_Probe = tuple[str, nn.Module, Tensor]
"""Name of a block, the block, and hidden states for it."""


# Cached, since a worker builds its model again in each epoch. Another source has another factory.
@functools.lru_cache(maxsize=1)
def _require_sound_blocks(
    factory: Callable[..., Any],  # noqa: ARG001
    spec: ModelSpec,
    parameters: tuple[Parameter, ...],
) -> None:
    """Raise ``CustomModelError`` for the first block that reads later tokens or other sequences, or gives two results for one input.

    Blocks that cannot be computed on a CPU, and those after ``_PROBED`` parameters, are not checked.
    """
    for name, block, x in _probes(spec, parameters):
        changed = x.clone()
        changed[:, _TOKENS // 2 :] += 1
        try:
            with torch.no_grad():
                y, again = block(x), block(x)
                with_other_tokens, alone = block(changed), block(x[:1])
        except Exception:  # kernels of a GPU, or of a fixed length
            continue
        size = _DIFFERENT * float(y.square().mean().sqrt())
        seen = (with_other_tokens - y).abs().amax(dim=(0, 2))[: _TOKENS // 2] > size  # (tokens,)
        refusals = (
            (
                bool((again - y).abs().max() > size),
                "gives another result for the same input the second time",
                "random numbers and state between calls differ from rank to rank; remove them (F.dropout, attributes that change)",
            ),
            (
                bool(seen.any()),
                f"is not causal: the result at a position changes with tokens {_TOKENS // 2 - int(seen.nonzero().min()) if seen.any() else 0} or more later",
                "a loss with such a block is a leak, and no generation has it; pad convolutions on the left alone, or mask attention (is_causal=True)",
            ),
            (
                bool((alone - y[:1]).abs().max() > size),
                "computes a sequence otherwise beside other sequences than alone",
                "evaluation and the division into slots would change it; take no mean over the batch",
            ),
        )
        for is_refused, cause, remedy in refusals:
            if is_refused:
                raise CustomModelError(f"{spec.factory}: {name} {cause}; {remedy}")


def gradient_notes(spec: ModelSpec) -> tuple[str, ...]:
    """Return a sentence for each parameter of a user's blocks whose gradient is not the slope of the block's result, and for those whose gradient
    is zero before and after a first step because they and a factor of theirs begin at zero.

    Not judged are gradients at the size of rounding, and slopes that depend on the length of the step, as with routing to experts. Straight-through
    gradients, of rounded weights for example, are such on purpose. Blocks that cannot be computed on a CPU, and those after ``_PROBED`` parameters,
    are not checked.
    """
    return _gradient_notes(load_factory(spec.factory), spec)


@functools.lru_cache(maxsize=1)
def _gradient_notes(factory: Callable[..., Any], spec: ModelSpec) -> tuple[str, ...]:
    with torch.device("meta"):
        kinds = tuple(_parameters(Chain(spec), cast(nn.Module, _build(factory, spec))))
    notes: list[str] = []
    for name, block, x in _probes(spec, kinds):
        with suppress(Exception):  # kernels of a GPU, or of a fixed length
            notes += _wrong_gradients(name, block, x)
    return tuple(notes)


def _wrong_gradients(name: str, block: nn.Module, x: Tensor) -> Iterator[str]:
    """Yield the sentences of ``gradient_notes`` on one block, which is changed."""
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)

    def result() -> Tensor:
        return cast(Tensor, (block(x) * weights).sum())

    named = dict(block.named_parameters())
    gradients = torch.autograd.grad(result(), list(named.values()), allow_unused=True)
    with torch.no_grad():
        size = float((block(x) * weights).norm())
    for key, parameter, gradient in zip(named, named.values(), gradients, strict=True):
        norm = 0.0 if gradient is None else float(gradient.norm())
        length = float(parameter.detach().norm()) or 1.0
        if gradient is None or norm * _NUDGES[0] * length <= _NO_CHANGE * size:
            continue
        far, near = (_slope(parameter, nudge * length * gradient / norm, result) for nudge in _NUDGES)
        is_wrong = not 1 / _WRONG_SLOPE < near / norm < _WRONG_SLOPE
        if is_wrong and abs(far - near) <= _SAME_SLOPE * abs(near):
            yield (
                f"the gradient of {name}.{key} is not the slope of what its block computes: along it the result changes by {near / norm:.2g} times as "
                "much; look at the block's autograd.Function or hooks on tensors (a straight-through gradient is such on purpose)"
            )
    with torch.no_grad():
        for parameter, gradient in zip(named.values(), gradients, strict=True):
            if gradient is not None:
                parameter.sub_(0.1 * gradient)
    second = torch.autograd.grad(result(), list(named.values()), allow_unused=True)
    dead = [
        key
        for key, parameter, before, after in zip(named, named.values(), gradients, second, strict=True)
        if before is not None and after is not None and not (before.any() or after.any() or parameter.any())
    ]
    # Biases of experts that get no token stay without a gradient, whatever their values are.
    with torch.no_grad():
        for key in dead:
            named[key].add_(_UNZERO)
    third = torch.autograd.grad(result(), [named[key] for key in dead], allow_unused=True) if dead else ()
    dead = [key for key, gradient in zip(dead, third, strict=True) if gradient is not None and gradient.any()]
    if dead:
        yield (
            f"no gradient reaches {', '.join(f'{name}.{key}' for key in dead)} from its initial values, also after a step: they would never learn; two "
            "factors of a product that both begin at zero do that (parameter_kind)"
        )


def _slope(parameter: Tensor, nudge: Tensor, result: Callable[[], Tensor]) -> float:
    """Return the slope of ``result`` along ``nudge``, by a central difference; the parameter is then as before."""
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter.add_(nudge)
        above = float(result())
        parameter.copy_(before - nudge)
        below = float(result())
        parameter.copy_(before)
    return (above - below) / (2 * float(nudge.norm()))


def _probes(spec: ModelSpec, parameters: Sequence[Parameter]) -> Iterator[_Probe]:
    """Yield blocks in fp64 on the CPU, with initial values by the kinds of ``parameters``, until they have ``_PROBED`` parameters; each with
    hidden states ``(b, s, d)``. The state of PyTorch's random numbers is as before."""
    generator = torch.Generator().manual_seed(0)
    kinds = {parameter.name: parameter.kind for parameter in parameters}
    with torch.device("meta"):
        chain = Chain(spec)
    remaining = _PROBED
    for name, block in chain.blocks.items():
        remaining -= sum(parameter.numel() for parameter in block.parameters())
        if remaining < 0:
            return
        filled = block.to_empty(device="cpu").double()
        with torch.no_grad():
            for key, parameter in filled.named_parameters():
                kind = kinds[f"blocks.{name}.{key}"]
                if kind in ("norm", "bias"):
                    parameter.fill_(float(kind == "norm"))
                else:
                    parameter.normal_(std=spec.init_std, generator=generator)
        x = torch.randn((_SEQUENCES, _TOKENS, spec.dim), generator=generator, dtype=torch.float64)
        with torch.random.fork_rng(devices=[]):
            yield f"blocks.{name}", filled, x
