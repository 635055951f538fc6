"""Probes of a machine's arithmetic: small computations whose bits show which kernels it has.

Another processor, GPU, library or instruction set may choose other kernels, which round differently, and a run whose ranks differ in that has
bits that depend on who computed what. So every rank computes the same probes, from inputs made in integers: products of the
run's own shapes in its format (of a lane and a context tile, where the run computes by these), forward and both backward, and the functions that a transformer
is made of; where latent attention is absorbed, each head's own products too, which are another call of the library, and attention as wide as latents. Ranks whose results differ in a bit are named, with the probes. Equal probes are evidence, not proof: shapes of large models are cut down, so that all probes take a tenth of a second.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phalanx.hardware.portable import operations
from phalanx.model.facts.shape import numbered_parameters
from phalanx.model.layers.attention.attention import CausalCore
from phalanx.model.layers.attention.mla import AbsorbedUp, latents_as_keys
from phalanx.model.layers.dense import RMSNorm
from phalanx.parallel.process_group.typed_gather import gather_typed
from phalanx.process.this_process import host_name
from phalanx.run.directory.files import create_once
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.kinds.operations import Parameter
from phalanx.run.spec import MlaSpec, RunSpec
from phalanx.train.compose import compute_dtype

_MOST_ROWS = 64
_MOST_OUTPUTS = 256
_MOST_INPUTS = 4096
_MOST_PRODUCTS = 6
_MOST_HEADS = 4
_DIGEST_BYTES = 7
"""56 bits of a hash fit a signed 64-bit number, either sign."""
_NAMED = 4


class MixedMachinesError(RuntimeError):
    """Machines of one run compute with kernels that round differently; the message names them, and the probes."""


@dataclass(frozen=True)
class Numerics:
    """The hashes of a machine's probes."""

    machine: str
    """Its name, for people."""
    probes: Mapping[str, str] = field(default_factory=dict)
    """By name of the probe, a hash of its results: 14 hexadecimal digits."""


def probe(spec: RunSpec, device: torch.device) -> Numerics:
    """Return this machine's hash of each probe of a resolved run on ``device``, in about a tenth of a second.

    With portable numerics nothing is computed: the process has checked its bits already, and the hashes are constants.
    """
    if spec.runtime.numerics == "portable":
        return Numerics(host_name(), operations.DIGESTS)
    dtype = compute_dtype(spec)
    with torch.enable_grad(), torch.device(device):
        hashes = {name: _hash(compute()) for name, compute in _probes(spec, dtype)}
    return Numerics(host_name(), hashes)


def differing(first: Numerics, other: Numerics) -> list[str]:
    """The names of the probes whose results differ, of those that both have: another release may have others."""
    return [name for name, value in first.probes.items() if other.probes.get(name, value) != value]


def require_equal(mine: Numerics, device: torch.device) -> None:
    """Check that all ranks' probes have the same hashes. A collective call: one all-reduce of 16 bytes a probe if
    they do.

    Raises ``MixedMachinesError`` on every rank, which names the first ranks that differ from rank 0, with the probes.
    """
    digests = torch.tensor([int(value, 16) for value in mine.probes.values()], device=device)
    highest = torch.cat((digests, -digests))  # (2 probes,)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    most, least = highest.chunk(2)  # (probes,) each
    if torch.equal(most, -least):
        return
    everyone = gather_typed(mine, Numerics)
    odd = {rank: differing(everyone[0], other) for rank, other in enumerate(everyone)}
    listed = [
        f"rank {rank} ({everyone[rank].machine}) computes {_listed(probes)} with other bits than rank 0 ({everyone[0].machine})"
        for rank, probes in odd.items()
        if probes
    ]
    more = [f"and {len(listed) - _NAMED} ranks more"] if len(listed) > _NAMED else []
    raise MixedMachinesError(_explained("\n  ".join([*listed[:_NAMED], *more])))


def require_first(mine: Numerics, directory: RunDirectory, name: str) -> None:
    """Compare this process's probes with those of the first process of this start of the run, which writes its own
    into the run directory.

    For a fleet, whose workers join one by one. ``name`` is the node's. Raises ``MixedMachinesError`` if they differ.
    """
    own = Numerics(f"{name}, {mine.machine}", mine.probes)
    reference = directory.named_log(directory.newest_attempt(), "numerics").with_suffix(".json")
    data = create_once(reference, msgspec.json.encode(own))
    first = msgspec.json.decode(data, type=Numerics)
    probes = differing(first, own)
    if probes:
        raise MixedMachinesError(
            _explained(
                f"this machine ({own.machine}) computes {_listed(probes)} with other bits than the first of this start ({first.machine})"
            )
        )


def _explained(text: str) -> str:
    return (
        f"machines of different kinds: {text}\nthe bits of the weights would depend on which of them computed what: use machines of one "
        "kind, with the same libraries, or set runtime.mixed_machines = true"
    )


def _listed(probes: list[str]) -> str:
    return ", ".join(probes[:_NAMED]) + (f" and {len(probes) - _NAMED} more" if len(probes) > _NAMED else "")


def _hash(results: tuple[Tensor, ...]) -> str:
    """Return the first ``_DIGEST_BYTES`` bytes of the SHA-256 over the bytes of all ``results``, in hexadecimal."""
    digest = hashlib.sha256()
    for tensor in results:
        digest.update(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)  # (bytes,)
    return digest.hexdigest()[: 2 * _DIGEST_BYTES]


def _numbers(*shape: int, salt: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of ``shape`` and ``dtype`` with pseudo-random numbers in [-1, 1), seeded by ``salt``. They are
    made in integers: the same on every machine.
    """
    count = torch.Size(shape).numel()
    index = torch.arange(count, dtype=torch.int64) + 7_919 * salt
    mixed = (index * 2_654_435_761 + salt) & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 15)) * 2_246_822_519 & 0xFFFFFFFF
    return ((mixed >> 8) * math.ldexp(1.0, -23) - 1.0).to(torch.float32).view(shape).to(dtype)  # (*shape,)


def _probes(spec: RunSpec, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], tuple[Tensor, ...]]]]:
    """Yield the probes by name, each a function that computes the hashed tensors: products in the run's shapes,
    elementwise functions, softmax, sums, norm, attention, and products of absorbed latent attention if the run has
    it.
    """
    sequences = spec.train.micro_batch_size or spec.train.batch_size // spec.train.slots
    tile = spec.train.seq_len // (spec.model.context_tiles or 1)
    rows = min(sequences * tile, _MOST_ROWS)
    for outputs, inputs in _shapes(spec):
        yield (
            f"product {rows}x{inputs}x{outputs}",
            lambda outputs=outputs, inputs=inputs: _product(rows, inputs, outputs, dtype),  # type: ignore[misc]
        )
    long = _numbers(33, 513, salt=1, dtype=dtype)  # lengths that leave a tail in vectors of any width
    for name, function in _ELEMENTWISE.items():
        yield name, lambda function=function: (function(long), function(long.float()))  # type: ignore[misc]
    yield (
        "softmax",
        lambda: (F.softmax(long, -1), F.log_softmax(long.float(), -1), long.float().logsumexp(-1)),
    )
    yield "sum", lambda: (long.sum(), long.float().sum(0), long.float().square().mean(-1))
    yield "norm", lambda: _norm(spec, dtype)
    yield "attention", lambda: _attention(spec, dtype)
    mla = spec.model.mla
    if mla is not None and mla.absorbed:
        # A library chooses its way by the number of heads, which are those of a lane where the run computes by lanes.
        heads = max(1, min(spec.model.heads // (spec.model.lanes or 1), _MOST_HEADS))
        shape = f"{heads}x{rows}x{mla.kv_rank}"
        yield f"heads' products {shape}", lambda: _head_products(mla, heads, rows, dtype)
        yield f"attention to latents {shape}", lambda: _latent_attention(spec, mla, heads, dtype)


_ELEMENTWISE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "square root": lambda x: torch.cat((x.abs().sqrt(), (x.abs() + 0.5).rsqrt())),  # (2 rows, columns)
    "sine": lambda x: torch.cat(((x * 100).sin(), (x * 100).cos())),  # (2 rows, columns)
    "division": lambda x: x / (x.abs() + 0.3),
    # (3 rows, columns)
    "activation": lambda x: torch.cat((F.silu(x), F.gelu(x, approximate="tanh"), torch.tanh(x))),
}


def _shapes(spec: RunSpec) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of up to ``_MOST_PRODUCTS`` of the run's matrices but gates, with lanes those of one
    lane, each cut down to a limit. Different numbers of inputs come first, since inputs are what a product sums over.
    Of a user's own model, only ``dim`` is known.
    """
    model = spec.model
    if model.factory:  # its matrices are known only once it is built
        return [(min(model.dim, _MOST_OUTPUTS), min(model.dim, _MOST_INPUTS))]
    shapes: dict[tuple[int, int], None] = {}
    for parameter, _ in numbered_parameters(model):
        shape = parameter.shape[1:] if parameter.stacked else _of_lane(parameter, model.lanes)
        if len(shape) == 2 and parameter.kind != "gate":
            shapes[min(shape[0], _MOST_OUTPUTS), min(shape[1], _MOST_INPUTS)] = None
    # Inputs are what a product sums over: one shape for each number of them first.
    by_inputs = {inputs: (outputs, inputs) for outputs, inputs in shapes}
    chosen = dict.fromkeys([*by_inputs.values(), *shapes])
    return list(chosen)[:_MOST_PRODUCTS]


def _of_lane(parameter: Parameter, lanes: int) -> tuple[int, ...]:
    """Return the shape of the first lane's share of a parameter, rounded up; with 0 ``lanes``, the full shape."""
    shape = list(parameter.shape)
    if lanes and parameter.tensor_dim is not None:
        shape[parameter.tensor_dim] = -(-shape[parameter.tensor_dim] // parameter.parts_over(lanes))
    return tuple(shape)


def _product(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the output ``(rows, outputs)`` of a linear layer on deterministic numbers, and the gradients of its input and weight."""
    x = _numbers(rows, inputs, salt=2, dtype=dtype).requires_grad_()
    weight = _numbers(outputs, inputs, salt=3, dtype=dtype).requires_grad_()
    y = F.linear(x, weight)
    return y, *torch.autograd.grad(y, (x, weight), _numbers(rows, outputs, salt=4, dtype=dtype))


def _norm(spec: RunSpec, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return an RMSNorm's output on 17 rows of deterministic numbers, and the gradients of its input and weight."""
    width = min(spec.model.dim, _MOST_INPUTS)
    module = RMSNorm(width, spec.model.norm_eps).to(dtype)
    with torch.no_grad():
        module.weight.copy_(_numbers(width, salt=5, dtype=dtype))
    x = _numbers(17, width, salt=6, dtype=dtype).requires_grad_()
    y = module(x)
    return y, *torch.autograd.grad(y, (x, module.weight), _numbers(17, width, salt=7, dtype=dtype))


def _head_products(mla: MlaSpec, heads: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the products by each head's own matrix before and after absorbed latent attention, and the gradients of
    weight, queries and mixed latents, on deterministic numbers.
    """
    nope, rope, rank, value = mla.nope_head_dim, mla.rope_head_dim, mla.kv_rank, mla.value_head_dim
    weight = _numbers(heads * (nope + value), rank, salt=12, dtype=dtype).requires_grad_()
    query = _numbers(1, heads, rows, nope + rope, salt=13, dtype=dtype).requires_grad_()
    mixed = _numbers(1, heads, rows, rank + rope, salt=14, dtype=dtype).requires_grad_()
    up = AbsorbedUp(weight, mla)
    latent_queries, valued = up.latent_queries(query), up.values(mixed)
    upstream = [
        _numbers(*y.shape, salt=salt, dtype=dtype) for salt, y in ((15, latent_queries), (16, valued))
    ]
    return (
        latent_queries,
        valued,
        *torch.autograd.grad((latent_queries, valued), (weight, query, mixed), upstream),
    )


def _latent_attention(spec: RunSpec, mla: MlaSpec, heads: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the output of causal attention of ``heads`` heads to the latents of one sequence (at most 128 tokens),
    and the gradients of queries, latents and shared keys. Inputs are deterministic numbers.
    """
    seq = min(spec.train.seq_len, 128)
    query = _numbers(1, heads, seq, mla.kv_rank + mla.rope_head_dim, salt=17, dtype=dtype).requires_grad_()
    latent = _numbers(1, 1, seq, mla.kv_rank, salt=18, dtype=dtype).requires_grad_()
    shared = _numbers(1, 1, seq, mla.rope_head_dim, salt=19, dtype=dtype).requires_grad_()
    key, value = latents_as_keys(latent, shared)
    y = CausalCore(1 / math.sqrt(mla.nope_head_dim + mla.rope_head_dim))(query, key, value)
    upstream = _numbers(*y.shape, salt=20, dtype=dtype)
    return y, *torch.autograd.grad(y, (query, latent, shared), upstream)


def _attention(spec: RunSpec, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the output of causal attention of one sequence (at most 128 tokens) with 4 query heads and 2 key heads,
    and the gradients of query, key and value. Inputs are deterministic numbers.
    """
    width, seq = max(8, min(spec.model.head_dim or 64, 128)), min(spec.train.seq_len, 128)
    query, key, value = (
        _numbers(1, heads, seq, width, salt=salt, dtype=dtype).requires_grad_()
        for heads, salt in ((4, 8), (2, 9), (2, 10))
    )
    y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    upstream = _numbers(1, 4, seq, width, salt=11, dtype=dtype)
    return y, *torch.autograd.grad(y, (query, key, value), upstream)
