"""PyTorch names that are private or were renamed, in one place, each with a test.

Supported: torch 2.11 and later. ``all_gather_single`` is 2.13's name for ``all_gather_into_tensor``, which 2.13 deprecates.
"""

from __future__ import annotations

import gc
import inspect
import json
import math
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils import flop_counter
from torch.utils.checkpoint import SAC_IGNORED_OPS, checkpoint

from phalanx.hardware.local.device import current_gpu
from phalanx.parallel.divisions import LocalSlice

__all__ = ["AllGather", "ReduceScatter"]  # imported here for others; all that is defined here is public too


def all_gather_single(output: Tensor, piece: Tensor, group: dist.ProcessGroup | None) -> None:
    """Concatenate every rank's ``piece`` ``(n,)`` in ``output`` ``(ranks * n,)``."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, piece, group=group)


def reduce_scatter_single(output: Tensor, pieces: Tensor, group: dist.ProcessGroup | None) -> None:
    """Write this rank's piece of the sum of every rank's ``pieces`` ``(ranks * n,)`` into ``output`` ``(n,)``."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, pieces, group=group)


def local_slice_of(tensor: Tensor) -> LocalSlice:
    """Return the slice of the full tensor that this rank holds; all of a tensor that is no DTensor. A rank without
    elements of a sharded dimension gets a shape with a zero.
    """
    if not isinstance(tensor, DTensor):
        return LocalSlice((0,) * tensor.ndim, tuple(tensor.shape))
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return LocalSlice(cast(tuple[int, ...], tuple(offset)), cast(tuple[int, ...], tuple(shape)))


def gather_along(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate every rank's ``x`` along ``dim``, by rank. A collective; can be traced by ``torch.compile``."""
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    ranks, gathered = group.size(), _waited(gather(x, 0, group))  # (ranks * n0, n1, ...)
    if _in_place(x, dim):
        # (n0, ..., ranks * n_dim, ...)
        return gathered.view(*x.shape[:dim], ranks * x.shape[dim], *x.shape[dim + 1 :])
    return torch.cat(gathered.chunk(ranks), dim)  # (n0, ..., ranks * n_dim, ...)


def sum_scatter_along(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's piece along ``dim`` of the sum of every rank's ``x``, in the library's order. A collective;
    can be traced by ``torch.compile``.
    """
    scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
    ranks, shape = group.size(), x.shape
    if dim and _in_place(x, dim):
        # (ranks * n0, ..., n_dim / ranks, ...)
        x = x.view(ranks * shape[0], *shape[1:dim], shape[dim] // ranks, *shape[dim + 1 :])
    elif dim:
        x = torch.cat(x.chunk(ranks, dim))  # (ranks * n0, ..., n_dim / ranks, ...)
    return _waited(scatter(x, "sum", 0, group))


def exchange_along(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's piece along ``dim`` of every rank's ``x``: ``(ranks, ...)``. Can be traced by ``torch.compile``."""
    sent = torch.stack(x.chunk(group.size(), dim))  # (ranks, ..., n_dim / ranks, ...)
    return _waited(functional.all_to_all_single(sent, None, None, group))


def _in_place(x: Tensor, dim: int) -> bool:
    """Return True if the pieces along ``dim`` are contiguous in memory, so that they need not be moved.

    While tracing, only for the first dimension: the compiler finds what to overlap by the moves.
    """
    return dim == 0 or (math.prod(x.shape[:dim]) == 1 and not torch.compiler.is_compiling())


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of every rank's ``x``, which stays unchanged. Can be traced by ``torch.compile``."""
    return _waited(functional.all_reduce(x, "sum", group))


def _waited(result: Tensor) -> Tensor:
    # While tracing, the result has been waited for already; a second wait would hide the pattern that the compiler overlaps.
    return result.wait() if isinstance(result, functional.AsyncCollectiveTensor) else result


def overlap_with_products(group: dist.ProcessGroup) -> None:
    """Allow the compiler to split gathers and scatters of ``group`` and overlap them with adjacent matrix products. For
    CUDA.

    Wang et al., "Overlap Communication with Dependent Computation", ASPLOS 2023. Sets a global option of the compiler.
    """
    from torch._inductor import config  # slow to import, and only compiled runs need it

    config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, but the compiler still requires it
        enable_symm_mem_for_group(group.group_name)


def cuda_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a new stream of ``device``."""
    make: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
    return make(device)


def device_of_messages(group: dist.ProcessGroup) -> torch.device:
    """Return the device on which ``group`` exchanges host data: the CPU if one of its backends supports it, else the GPU."""
    kinds = {kind.type for kind in group._device_types}
    return torch.device("cpu") if "cpu" in kinds else current_gpu()


def abort_nccl() -> None:
    """Abort every NCCL communicator of this process, from any thread. Operations that wait for them raise."""
    from torch.distributed.distributed_c10d import _abort_process_group

    _abort_process_group()


def finish_backward(module: FSDPModule) -> None:
    """Make FSDP take in gradients that were computed outside of a backward pass of ``module``, the root of its wrapping.

    Does what FSDP does at the end of a backward pass. It accumulates gradients in the reduction dtype, and reduces them if
    ``set_requires_gradient_sync`` is on. FSDP does not widen the gradients of a backward pass without synchronization, and needs one
    dtype within a group. So gradients that were added later are widened here.
    """
    for part in cast(nn.Module, module).modules():
        group = fully_shard.state(part)._fsdp_param_group if isinstance(part, FSDPModule) else None  # type: ignore[attr-defined]
        for parameter in group.fsdp_params if group is not None else ():
            if parameter.unsharded_accumulated_grad is None and hasattr(parameter, "_unsharded_param"):
                parameter.to_accumulated_grad_if_needed()
    fully_shard.state(module)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def set_gradient(module: FSDPModule, name: str, gradient: Tensor) -> None:
    """Set the unsharded gradient of the parameter ``name`` of ``module``'s own group, in the reduction dtype.

    Call it before FSDP takes in the gradients of a backward pass. Autograd can deliver gradients in the compute dtype only.
    """
    group = fully_shard.state(module)._fsdp_param_group  # type: ignore[attr-defined]
    (parameter,) = (param for param in group.fsdp_params if param._module_info.param_name == name)
    parameter.unsharded_accumulated_grad = gradient


def group_shapes(module: FSDPModule) -> list[torch.Size]:
    """Return the shapes of the parameters in ``module``'s FSDP group, in the order of its buffers."""
    group = fully_shard.state(module)._fsdp_param_group  # type: ignore[attr-defined]
    return [parameter.sharded_param.shape for parameter in group.fsdp_params] if group is not None else []


def measure_waits(module: FSDPModule, measure: Callable[[], AbstractContextManager[None]]) -> None:
    """Run in ``measure()`` all waits of the compute stream for gathers and reductions of ``module``'s own group.

    Replaces two methods of the group; does nothing if ``module`` has no parameters of its own.
    """
    group = fully_shard.state(module)._fsdp_param_group  # type: ignore[attr-defined]
    if group is None:
        return

    owner = weakref.ref(group)  # a cycle would keep the group alive, and its process group's threads

    def enclosed(wait: Callable[[object], None]) -> Callable[[], None]:
        def measured() -> None:
            with measure():
                wait(owner())

        return measured

    # The first waits for weights before each pass, the second for reduced gradients after the backward pass.
    for name in ("wait_for_unshard", "finalize_backward"):
        setattr(group, name, enclosed(getattr(type(group), name)))


def keep_activations_within(fraction: float) -> None:
    """Set the fraction of a block's activations that the compiler may keep, for all that this process compiles later."""
    from torch._functorch import config  # slow to import, and only compiled runs need it

    count_grouped_attention()
    config.activation_memory_budget = fraction


def count_grouped_attention() -> None:
    """Make PyTorch count the FLOP of attention with fewer key than query heads. The compiler's memory budget relies on
    it.

    Replaces two functions of PyTorch, unless they count them already (2.13).
    """
    heads, grouped = (1, 2, 1, 1), (1, 1, 1, 1)
    forward: Any = flop_counter.sdpa_flop_count
    backward: Any = flop_counter.sdpa_backward_flop_count
    try:
        forward(heads, grouped, grouped)
    except AssertionError:

        def all_heads(query: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
            return (shape[0], query[1], *shape[2:])

        def count_forward(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
            return int(forward(query, all_heads(query, key), all_heads(query, value)))

        def count_backward(
            grad: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int]
        ) -> int:
            return int(backward(grad, query, all_heads(query, key), all_heads(query, value)))

        flop_counter.sdpa_flop_count = count_forward
        flop_counter.sdpa_backward_flop_count = count_backward


def keep_selected_tensors_from_hooks() -> dict[str, Any]:
    """Return the option of ``checkpoint`` that makes selectively kept tensors bypass saved-tensor hooks.

    PyTorch 2.14 added the option and announces another default. Earlier releases always bypass the hooks.
    """
    option = "respect_saved_tensors_hooks"
    return {option: False} if option in inspect.signature(checkpoint).parameters else {}


def leave_profiler_out_of_selective_checkpoints() -> None:
    """Make selective checkpointing ignore the profiler's ranges, which it would count as results to keep.

    FSDP opens more of them when a unit within a block, such as its experts, is recomputed. The error is "encountered during backward
    but not found in storage".
    """
    profiler = torch.ops.profiler
    SAC_IGNORED_OPS.update(
        {
            profiler._record_function_enter_new.default,
            profiler._record_function_exit.default,
            profiler._record_function_exit._RecordFunction,
        }
    )


def join_fake(rank: int, ranks: int) -> None:
    """Make this process rank ``rank`` of ``ranks`` in a fake process group: collectives return at once, with undefined results."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # for dry runs alone

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)


def group_of(args: Sequence[object]) -> str:
    """Return the name of the process group among the arguments of an operation of ``c10d`` or ``_c10d_functional``:
    of the group object, else the last argument.
    """
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return str(dist.ProcessGroup.unbox(arg).group_name)
    return str(args[-1])


def forget_groups() -> None:
    """Remove all process groups of this process from PyTorch, complete or half made, without communication.

    Groups are numbered as they are made, and ranks meet under these numbers. A group whose creation fails, or whose ``shutdown``
    raises, leaves its number used up until the next successful ``destroy_process_group``. This process would then wait forever for
    ranks that have not failed (PyTorch 2.11 to 2.13).

    DTensor's caches are cleared too. Their results hold a mesh, and are looked up by an equal one. Meshes of the same ranks are equal
    even if this process had another rank when the mesh was made, so it would get its old coordinate. A mesh also keeps its groups
    alive, each with sockets and threads (three for gloo, one of which wakes a hundred times a second).

    PyTorch 2.11 leaks references to the arguments of DTensor's operations and never frees their meshes (fixed in 2.13). Their groups
    are released here, which takes some 40 ms for the search.
    """
    c10d = dist.distributed_c10d
    world = c10d._world
    c10d._update_default_pg(None)
    tables: tuple[dict[Any, Any], ...] = (
        *(world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config),
        *(world.pg_to_tag, world.tags_to_pg, world.pg_coalesce_state),
    )
    for table in tables:
        table.clear()
    c10d._unregister_all_process_groups()  # type: ignore[attr-defined]
    # Same as ``torch.distributed.tensor.debug._clear_sharding_prop_cache``, whose package imports the compiler.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
    torch._C._clear_DTensor_sharding_propagator_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    if torch.__version__ < "2.13":  # as versions compare
        for mesh in [item for item in gc.get_objects() if type(item) is DeviceMesh]:
            mesh._pg_registry.clear()
    world.group_count = 0


def group_timeout() -> timedelta | None:
    """Return the timeout of the default group, for its operations and for connecting; ``None`` if its backend does not expose it."""
    world = dist.group.WORLD
    if world is None:
        return None
    backend = world._get_backend(next(iter(world._device_types)))  # all backends have the same timeout
    return getattr(getattr(backend, "options", None), "_timeout", None)


def group_sizes() -> list[int]:
    """Return the number of ranks in each process group of this process, the default group first.

    With gloo this is also the number of sockets: a rank listens, and is connected with every other rank of the group.
    """
    return [len(ranks) for ranks in dist.distributed_c10d._world.pg_group_ranks.values()]


def set_group_timeouts(timeout_s: float) -> None:
    """Set the timeout of operations of all groups of this process; the timeout for connecting does not apply any more."""
    for group in dist.distributed_c10d._world.pg_map:
        for kind in group._device_types:
            group._get_backend(kind)._set_default_timeout(timedelta(seconds=timeout_s))


def flight_record(since_ns: int = 0) -> bytes:
    """Return the flight record as JSON: this rank's collectives since ``since_ns`` (Unix time, ns).

    Its fields: ``rank``, ``taken_ns`` (now), ``groups`` (name to ranks) and the dump of PyTorch's flight ``recorder``.

    Thread-safe, also while another thread hangs in a collective. The recorder outlives process groups, and group names recur, so pass
    the time at which the present groups were made. The entries are empty if recording is off (``TORCH_FR_BUFFER_SIZE`` was 0 when the
    process made its first group). Gloo's own dump does not name the groups' ranks.
    """
    world = dist.distributed_c10d._world
    groups = {
        world.pg_names[group]: sorted(ranks)
        for group, ranks in list(world.pg_group_ranks.items())
        if group in world.pg_names
    }
    recorder = torch._C._distributed_c10d._dump_fr_trace_json  # type: ignore[attr-defined]
    dump = json.loads(recorder(True, False))
    dump["entries"] = [entry for entry in dump.get("entries", []) if entry["time_created_ns"] >= since_ns]
    record = {"rank": dist.get_rank(), "taken_ns": time.time_ns(), "groups": groups, "recorder": dump}
    return json.dumps(record).encode()
