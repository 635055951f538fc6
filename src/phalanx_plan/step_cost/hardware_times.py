"""Seconds of one kernel on an accelerator, and of one collective among the accelerators of a cluster.

All functions take scalars or arrays and broadcast. A matrix product is timed by a law with five fitted constants,

    t = launch + (compute^4 + memory^4)^(1/4)
    compute = 2 M' N' (K + K0) waste / (e P),     memory = bytes / (e_b W)

where M' and N' are M and N rounded up to tiles of 128, and ``waste`` is what the last, partly filled wave of tiles over
the multiprocessors loses. The power of four joins the two limits smoothly (their maximum is the roofline of Williams et al.,
2009; tile and wave quantization as in NVIDIA's "Matrix Multiplication Background User's Guide"). The constants come from
measurements (``phalanx.hardware.profile``), the peaks from the accelerator.

Collectives are timed by the placement of a group's members in the cluster. A group is (size, stride): members are
``stride`` ranks apart, with the rank order of ``phalanx.run.layout``. Of the ``size`` members ``inner`` share a
scale-up domain, and ``outer`` domains hold them all. The sibling groups run the same collective at the same time, so an
accelerator has only its own share of network and domain.

* Inside one domain: ``a(n) + g sqrt(a S / B) + k(n) S / (e(n) B)``, fitted to NCCL's measured times. The square root is the
  cost of chunking at the best chunk size. ``k`` is the algorithm's volume: (n - 1)/n for all-gather,
  reduce-scatter and all-to-all, 2 (n - 1)/n for a ring's all-reduce, 1 if the switch adds (NVLink SHARP).
* Across domains: the volumes of the hierarchical decomposition, S (outer - 1)/(outer inner) over the network and
  S (inner - 1)/inner inside (Thakur et al. 2005; NCCL's rings and trees do the same). The two overlap, so the slower counts.
* Latency: a flat ring pays every hop; trees and the parallel aggregated trees (PAT, NCCL >= 2.23, one rank a domain) pay
  log2(outer) hops. The cheapest algorithm is used, as NCCL's tuner does.
* The fabric: level *i* carries the traffic between blocks of the reach below it. A ring along the ranks has few edges that leave a
  large block, so oversubscription costs it little; all-to-all sends nearly everything across.

Their ``bytes`` is the full gathered or reduced tensor, except in the all-to-all and the dispatch, which define it themselves.
A group of one takes no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from phalanx.hardware.cluster import Cluster, Domain, HardwareError
from phalanx.hardware.profile import CollectiveFit, Constants, Profile, profile_of

Numbers: TypeAlias = npt.ArrayLike
Seconds: TypeAlias = npt.NDArray[np.float64]

_TILE = 128
_POWER_HEADROOM = 0.975
"""Share of the power limit at which large products settle: 1.17 of 1.2 kW on GB200 (ai-dynamo/aiconfigurator's data)."""
_USUAL_WIDTHS, _LATENT_WIDTHS = 2 * 128, 192 + 128
"""Widths of a head's query and value together, in the measurements of attention."""
_OPERAND_BYTES = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5625}
"""Bytes of one number as a product reads it; four bits have a scale of one byte for every sixteen numbers (NVFP4)."""
_RESULT_BYTES = {"fp32": 4.0, "tf32": 4.0}


def matmul_s(
    profile: Profile,
    format: str,  # noqa: A002
    m: Numbers,
    n: Numbers,
    k: Numbers,
    batch: Numbers = 1,
    result_bytes: float = 0.0,
) -> Seconds:
    """Seconds of ``batch`` equal products (m, k) x (k, n) in one kernel; an empty product takes none.

    The time is the launch, and a smooth maximum of computing whole tiles and moving operands. ``result_bytes`` are
    moved for each element of the result; 0 means that it is written in the usual format, while an fp32 sum that is
    read and written takes eight. Raises ``HardwareError`` if the accelerator does not multiply in ``format``.
    """
    rate = sustained_flops(profile, format)
    fit = profile.constants.matmul[fitted_format(profile, format)]
    m, n, k, batch = (np.asarray(size, dtype=np.float64) for size in (m, n, k, batch))
    tiles = batch * np.ceil(m / _TILE) * np.ceil(n / _TILE)
    waste = _wave_waste(tiles, profile.accelerator.multiprocessors, fit.wave_share)
    compute = 2 * tiles * _TILE**2 * (k + fit.k_half) * waste / rate
    written = result_bytes or _RESULT_BYTES.get(format, 2.0)
    moved = batch * (_OPERAND_BYTES[format] * (m + n) * k + written * m * n)
    memory = moved / (fit.memory_efficiency * profile.accelerator.memory_bytes_per_s.value)
    return np.where(batch * m * n * k > 0, fit.launch_s + np.sqrt(np.hypot(compute**2, memory**2)), 0.0)


def grouped_matmul_s(
    profile: Profile,
    format: str,  # noqa: A002
    groups: Numbers,
    m: Numbers,
    n: Numbers,
    k: Numbers,
    result_bytes: float = 0.0,
    streams: int = 0,
) -> Seconds:
    """Seconds of ``groups`` products (m, k) x (k, n), as a rank's experts take them: in one kernel, or one each on
    ``streams``.

    ``m`` is the mean of the groups' rows on the rank that is waited for: the caller multiplies its imbalance in.
    ``streams`` of 0 is one kernel.
    """
    single = matmul_s(profile, format, m, n, k, batch=groups, result_bytes=result_bytes)
    launch = profile.constants.matmul[fitted_format(profile, format)].launch_s
    starts = np.maximum(np.asarray(groups, dtype=np.float64) / streams, 1) if streams else 1.0
    seconds = launch * starts + (single - launch) / profile.constants.grouped_efficiency
    return np.where(single > 0, seconds, 0.0)


def attention_s(
    profile: Profile,
    format: str,  # noqa: A002
    flops: Numbers,
    backward: bool,
    widths: int = 0,
    latent: bool = False,
    tokens: Numbers = np.inf,
) -> Seconds:
    """Seconds of fused attention that does ``flops`` in this direction.

    Forward 4 s_q s_kv a d_h (half if causal); backward 2.5 times that, because it recomputes the scores (Dao 2023,
    arXiv 2307.08691, section 4.1). Each score takes an exponential in either direction, whatever the heads' width: where the
    special function units' rate is known, that part of the measured time is theirs, and the rest scales with width and format
    (arXiv 2603.05451, section 3: on Blackwell the two limits are alike at a width of 128). All of it takes
    (1 + half_tokens / tokens) times as long: what a block of queries begins and ends with does not shrink with the sequence.

    Args:
        profile: The accelerator and its constants.
        format: Format of the operands.
        flops: Floating-point operations.
        backward: True for the backward pass.
        widths: Widths of a head's query and value together; 0 means those that were measured.
        latent: True if queries are wider than values (latent attention).
        tokens: Length of the sequence, or of the piece of it that one kernel attends to.
    """
    fit = profile.constants.attention
    flops = np.asarray(flops, dtype=np.float64)
    measured = _LATENT_WIDTHS if latent else _USUAL_WIDTHS
    products_of_a_score = 5 if backward else 2
    exponential_rate = profile.accelerator.exponentials_per_s
    wide = "bf16" if "bf16" in profile.accelerator.flops and format != "fp32" else format
    each = 1 / min(fit.share(backward, latent) * _peak(profile, wide), _power_limited(profile, wide))
    softmax = 0.0
    if fit.exponentials_per_s and exponential_rate:
        waited = 1.0 if backward else fit.exponentials_forward
        each = max(each - waited / (products_of_a_score * measured * fit.exponentials_per_s), 0.0)
        softmax = waited / (products_of_a_score * (widths or measured) * exponential_rate.value)
    seconds = flops * (each * _peak(profile, wide) / _peak(profile, format) + softmax)
    seconds = seconds * (1 + fit.half_tokens / np.asarray(tokens, dtype=np.float64))
    return np.where(flops > 0, fit.launch_s + seconds, 0.0)


def memory_bound_s(profile: Profile, bytes: Numbers, kernels: Numbers = 1) -> Seconds:  # noqa: A002
    """Seconds of ``kernels`` kernels that read and write ``bytes`` in all."""
    rate = profile.constants.memory.efficiency * profile.accelerator.memory_bytes_per_s.value
    return (
        np.asarray(bytes, dtype=np.float64) / rate + np.asarray(kernels) * profile.constants.memory.kernel_s
    )


def host_copy_s(profile: Profile, bytes: Numbers) -> Seconds:  # noqa: A002
    """Seconds to copy ``bytes`` to or from the host's memory."""
    return np.asarray(bytes, dtype=np.float64) / profile.accelerator.host_bytes_per_s.value


def sustained_flops(profile: Profile, format: str) -> float:  # noqa: A002
    """FLOP/s that a large matrix product sustains: the fitted share of the peak, within the power limit."""
    fit = profile.constants.matmul[fitted_format(profile, format)]
    return min(fit.efficiency * _peak(profile, format), _power_limited(profile, format))


def fitted_format(profile: Profile, format: str) -> str:  # noqa: A002
    """Return the format whose fit is used for ``format``: itself if measured, else the first measured one of similar
    formats.

    Raises ``HardwareError`` if none of these was measured.
    """
    near = {"fp16": ("bf16",), "tf32": ("bf16", "fp32"), "fp32": ("tf32", "bf16"), "int8": ("fp8", "bf16")}
    options = (format, *near.get(format, ("bf16", "fp16", "fp32")))
    fitted = next((option for option in options if option in profile.constants.matmul), None)
    if fitted is None:
        raise HardwareError(
            f"profile {profile.constants.name!r} has no constants for {format!r}: it has {', '.join(profile.constants.matmul)}; "
            "calibrate the accelerator in this format"
        )
    return fitted


def _peak(profile: Profile, format: str) -> float:  # noqa: A002
    """Return peak operations per second in a format. Raises ``HardwareError`` if the accelerator lacks it."""
    peak = profile.accelerator.flops.get(format)
    if peak is None:
        formats = ", ".join(profile.accelerator.flops)
        raise HardwareError(
            f"{profile.accelerator.name} does not multiply in {format!r}: choose a precision among {formats}"
        )
    return peak.value


def _power_limited(profile: Profile, format: str) -> float:  # noqa: A002
    """Peak FLOP/s, or the rate at which the power limit is reached if that is lower; 0 W is a limit that is not known."""
    peak, joules = _peak(profile, format), profile.constants.joules_per_flop.get(format)
    power_w = profile.accelerator.power_w.value
    return min(peak, _POWER_HEADROOM * power_w / joules) if joules and power_w else peak


def _wave_waste(tiles: Seconds, multiprocessors: int, share: float) -> Seconds:
    """Time over that of tiles dealt evenly to multiprocessors, since the last, partly filled wave takes as long as a full one.

    Only the fraction ``share`` of that waste counts; 1 if ``multiprocessors`` or ``share`` is 0.
    """
    if multiprocessors == 0 or share == 0:
        return np.ones_like(tiles)
    waves = np.maximum(tiles, 1) / multiprocessors
    return 1 + share * (np.ceil(waves) / waves - 1)


# Collectives.


Array: TypeAlias = npt.NDArray[np.float64]


_NO_NETWORK = 1e-3
"""Bytes per second where there is no network, so low that no plan crosses it."""


@dataclass(frozen=True)
class _Path:
    """Placement of a group in the cluster."""

    cluster: Cluster
    constants: Constants
    size: Array
    inner: Array
    """Members in one domain."""
    outer: Array
    """Domains."""
    span: Array
    """Ranks from the first member to behind the last."""
    hop: Array
    """Ranks between neighbors of the ring that each member runs across domains."""


def all_gather_s(cluster: Cluster, size: Numbers, stride: Numbers, bytes: Numbers) -> Array:  # noqa: A002
    """Seconds until every member has the tensor of ``bytes``, of which each held 1/size."""
    return _gather(cluster, size, stride, bytes, "all_gather")


def reduce_scatter_s(cluster: Cluster, size: Numbers, stride: Numbers, bytes: Numbers) -> Array:  # noqa: A002
    """Seconds until every member has 1/size of the sum of the members' tensors of ``bytes``."""
    return _gather(cluster, size, stride, bytes, "reduce_scatter")


def all_reduce_s(cluster: Cluster, size: Numbers, stride: Numbers, bytes: Numbers) -> Array:  # noqa: A002
    """Seconds until every member has the sum of the members' tensors of ``bytes``: the best of ring, tree and
    in-switch.

    In-switch sums count only where the network, or the domain, has them.
    """
    path, volume = _path(cluster, size, stride), np.asarray(bytes, dtype=np.float64)
    inside = _reduce_inside(path, volume)
    share_s = volume / path.inner / _ring_rate(path, path.hop)
    tree_s = 2 * share_s / path.constants.network.tree_efficiency
    best = np.minimum(
        _ring(path, 2 * _ring_latency(path), 2 * share_s * (path.outer - 1) / path.outer, inside),
        _tree(2 * np.log2(path.outer) * _latency(path, path.span), tree_s, inside),
    )
    if cluster.fabric.in_switch_reduction:
        best = np.minimum(best, _tree(2 * _latency(path, path.span), share_s, inside))
    return _choose(path, inside, best)


def all_to_all_s(cluster: Cluster, size: Numbers, stride: Numbers, bytes_per_rank: Numbers) -> Array:
    """Seconds until every member has sent 1/size of its ``bytes_per_rank`` to each member (itself included)."""
    path, volume = _path(cluster, size, stride), np.asarray(bytes_per_rank, dtype=np.float64)
    inside = _inside(path, "all_to_all", volume * path.inner / path.size)
    network = volume * (path.size - path.inner) / path.size / _spread_rate(path)
    latency = _latency(path, path.span) + path.constants.network.message_s * (path.size - path.inner)
    return _choose(path, inside, latency + np.maximum(network, inside))


def dispatch_s(
    cluster: Cluster,
    size: Numbers,
    stride: Numbers,
    tokens: Numbers,
    bytes_per_token: Numbers,
    per_token: Numbers,
    domain_limit: Numbers = np.inf,
    law: Literal["dispatch", "all_to_all"] = "dispatch",
) -> Array:
    """Seconds until every token of every rank is at its experts; the way back takes the same with its own bytes.

    ``tokens`` of each rank go to ``per_token`` experts each, spread evenly over the group. A token crosses the
    network once for each other domain that holds one of its experts, and continues to the ranks there over the domain's
    links (DeepEP, github.com/deepseek-ai/DeepEP; DeepSeek-V3, arXiv 2412.19437, section 3.2.2). Both ways overlap:
    the slower counts. ``domain_limit`` is the most domains that the router lets a token go to. ``law`` names the
    constants for the way inside a domain: those of DeepEP's kernels, or those of an all-to-all that has as much to
    carry (HybridEP, which copies by the links' own engines).
    """
    path = _path(cluster, size, stride)
    sent = np.asarray(tokens, dtype=np.float64) * np.asarray(bytes_per_token, dtype=np.float64)
    domains = np.minimum(_reached(path.outer, per_token), domain_limit)
    network = sent * domains * (path.outer - 1) / path.outer / _spread_rate(path)
    inside = _inside(path, law, sent * _reached(path.size, per_token))
    latency = _latency(path, path.span) + path.constants.network.message_s * (path.outer - 1)
    return _choose(path, inside, latency + np.maximum(network, inside))


def point_to_point_s(cluster: Cluster, stride: Numbers, bytes: Numbers, size: Numbers = 2) -> Array:  # noqa: A002
    """Seconds to send ``bytes`` to the rank ``stride`` further on, for the worst neighbors of a chain of ``size``.

    Inside the domain only if the complete chain is in one.
    """
    path, volume = _path(cluster, size, stride), np.asarray(bytes, dtype=np.float64)
    inside = inside_s(
        path.cluster.domain,
        path.constants.collectives["point_to_point"],
        volume,
        1.0,
        np.minimum(path.size, 2),
    )
    stride = np.asarray(stride, dtype=np.float64)
    return _choose(path, inside, _latency(path, 2 * stride) + volume / _ring_rate(path, stride))


def _gather(cluster: Cluster, size: Numbers, stride: Numbers, bytes: Numbers, name: str) -> Array:  # noqa: A002
    """Seconds of a gather or a reduce-scatter of ``bytes`` in total; ``name`` is that of its constants.

    A ring, or trees if each member is in a domain of its own and they are faster.
    """
    path, volume = _path(cluster, size, stride), np.asarray(bytes, dtype=np.float64)
    inside = _inside(path, name, volume)
    network = volume / path.inner * (path.outer - 1) / path.outer / _ring_rate(path, path.hop)
    ring = _ring(path, _ring_latency(path), network, inside)
    hops_s = np.ceil(np.log2(path.outer)) * _latency(path, path.span)
    trees = _tree(hops_s, network / path.constants.network.tree_efficiency, inside)
    return _choose(path, inside, np.where(path.inner == 1, np.minimum(ring, trees), ring))


def _path(cluster: Cluster, size: Numbers, stride: Numbers) -> _Path:
    """Return how a group of ``size`` ranks, ``stride`` apart, divides into domains and the network between them."""
    size, stride = np.asarray(size, dtype=np.float64), np.asarray(stride, dtype=np.float64)
    inner = np.minimum(size, np.maximum(1, cluster.domain.size // stride))
    constants = profile_of(cluster.accelerator).constants
    return _Path(cluster, constants, size, inner, np.ceil(size / inner), size * stride, stride * inner)


def _choose(path: _Path, inside: Array, across: Array) -> Array:
    """Return 0 for one rank, ``inside`` for a group within a domain, else ``across``."""
    return np.where(path.size <= 1, 0.0, np.where(path.outer > 1, across, inside))


def _ring(path: _Path, latency_s: Array, network_s: Array, inside_s: Array) -> Array:
    """Seconds of a ring whose domain and network work on different blocks at once; the first block has nothing to overlap with."""
    return latency_s + np.maximum(network_s, inside_s) + np.minimum(network_s, inside_s) / path.outer


def _tree(latency_s: Array, network_s: Array, inside_s: Array) -> Array:
    """Seconds of a tree, a pipeline of chunks: at the best chunk size they cost the root of latency times volume."""
    return latency_s + np.sqrt(latency_s * network_s) + np.maximum(network_s, inside_s)


def _inside(path: _Path, name: str, volume: Array) -> Array:
    """Seconds of a collective of ``volume`` bytes on the part of the group in one domain; on a torus, all-to-alls pay its bisection."""
    members = path.inner
    k = (members - 1) / members
    if path.cluster.domain.torus_axes and name in ("all_to_all", "dispatch"):
        # Mean number of links that a byte crosses: a quarter of the ring, on each axis ("How to Scale Your Model", 2025).
        axes = _torus_axes(path.cluster.domain, members)
        k = np.maximum(k, members ** (1 / axes) * axes / 4)
    return inside_s(path.cluster.domain, path.constants.collectives[name], volume, k, members)


def _reduce_inside(path: _Path, volume: Array) -> Array:
    """Seconds of an all-reduce in one domain: the best of ring and in-switch."""
    members = path.inner
    ring = path.constants.collectives["all_reduce"]
    best = inside_s(path.cluster.domain, ring, volume, 2 * (members - 1) / members, members)
    if path.cluster.domain.in_switch_reduction:
        adding = path.constants.collectives["all_reduce_in_switch"]
        best = np.minimum(best, inside_s(path.cluster.domain, adding, volume, 1.0, members))
    return best


def inside_s(domain: Domain, fit: CollectiveFit, volume: Array, k: Array | float, members: Array) -> Array:
    """Seconds of a collective that stays in ``domain``: ``volume`` bytes, of which a member's links carry ``k``-fold. 0
    for a group of one.
    """
    step = fit.base_s + fit.hops * domain.latency_s * (members - 1)
    axes = domain.torus_axes
    rate = domain.bytes_per_s.value * (_torus_axes(domain, members) / axes if axes else 1.0)
    reached = fit.efficiency * rate / (1 + fit.small_group / np.maximum(members - 1, 1))
    seconds = step + fit.pipelining * np.sqrt(step * volume / rate) + k * volume / reached
    return np.where(members > 1, seconds, 0.0)


def _torus_axes(domain: Domain, members: Array) -> Array:
    """Axes of the torus that a group of ``members`` neighbors fills, each to the torus's full length."""
    side = domain.size ** (1 / domain.torus_axes)
    needed = np.ceil(np.log(np.maximum(members, 2)) / np.log(side) - 1e-9)
    axes: Array = np.clip(needed, 1, domain.torus_axes)
    return axes


def _latency(path: _Path, ranks: Array) -> Array:
    """Seconds one way between members at most ``ranks`` apart: that of the level that joins them, and the cost of a call."""
    levels = path.cluster.fabric.levels
    if not levels:
        return np.full(np.shape(ranks), path.constants.network.base_s)
    level_index = np.searchsorted([level.reach for level in levels], ranks).clip(max=len(levels) - 1)
    latency_s: Array = np.array([level.latency_s for level in levels])[level_index]
    return path.constants.network.base_s + latency_s


def _ring_latency(path: _Path) -> Array:
    """Seconds of all hops of a flat ring, one after the other: between domains, and inside."""
    base_s = path.constants.network.base_s
    across = (path.outer - 1) * (_latency(path, 2 * path.hop) - base_s)
    return base_s + across + (path.size - path.outer) * path.cluster.domain.latency_s


def _ring_rate(path: _Path, hop: Array) -> Array:
    """Bytes per second of each member where rings with edges of ``hop`` ranks run side by side over the fabric.

    Of the ``reach`` ranks of a block, ``hop`` have an edge that leaves it, so a level whose capacity is a share of all of
    them limits the ring only if that share is below ``hop / reach``.
    """
    load = np.ones(np.broadcast_shapes(np.shape(path.span), np.shape(hop)))
    for below, share in _crossings(path.cluster):
        load = np.maximum(load, np.where(path.span > below, np.minimum(1, hop / below) / share, 0))
    return _network_rate(path) / load


def _spread_rate(path: _Path) -> Array:
    """Bytes per second that each member sends out of its domain where every member sends evenly to all others."""
    leaving = np.maximum(1 - path.inner / path.size, 1e-12)
    load = np.ones(np.shape(path.span))
    for below, share in _crossings(path.cluster):
        load = np.maximum(load, np.minimum(1, np.maximum(0, 1 - below / path.span) / leaving) / share)
    return _network_rate(path) / load


def _crossings(cluster: Cluster) -> Iterator[tuple[int, float]]:
    """Yield, for each level of the fabric, the ranks of the block below it that traffic must leave, and the share of
    the rate it carries.
    """
    below = cluster.domain.size
    for level in cluster.fabric.levels:
        yield below, level.share
        below = level.reach


def _network_rate(path: _Path) -> float:
    """Return a member's bytes per second over the fabric; almost 0 without one."""
    return path.cluster.fabric.bytes_per_s.value * path.constants.network.efficiency or _NO_NETWORK


def _reached(places: Array, per_token: Numbers) -> Array:
    """Mean number of places that hold at least one of ``per_token`` experts, each drawn uniformly over the places."""
    return places * (1 - (1 - 1 / places) ** np.asarray(per_token, dtype=np.float64))
