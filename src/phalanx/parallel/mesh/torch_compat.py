"""Names that PyTorch keeps private or has renamed, in one place, each with a test.

Supported: torch 2.11 and later. ``all_gather_single`` is 2.13's name for ``all_gather_into_tensor``, which it warns
about.
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
from phalanx.parallel.mesh.local_slice import LocalSlice

__all__ = [
    "AllGather",
    "ReduceScatter",
    "abort_nccl",
    "all_gather_single",
    "cuda_stream",
    "device_of_messages",
    "exchange_along",
    "finish_backward",
    "flight_record",
    "gather_along",
    "give_gradient",
    "group_of",
    "group_shapes",
    "group_sizes",
    "join_fake",
    "local_slice_of",
    "measure_waits",
    "overlap_with_products",
    "reduce_scatter_single",
    "sum_over",
    "sum_scatter_along",
]


def all_gather_single(output: Tensor, piece: Tensor, group: dist.ProcessGroup | None) -> None:
    """Concatenates every rank's ``piece`` ``(n,)`` in ``output`` ``(ranks * n,)``."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, piece, group=group)


def reduce_scatter_single(output: Tensor, pieces: Tensor, group: dist.ProcessGroup | None) -> None:
    """Writes this rank's piece of the sum of every rank's ``pieces`` ``(ranks * n,)`` into ``output`` ``(n,)``."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, pieces, group=group)


def local_slice_of(tensor: Tensor) -> LocalSlice:
    """The part of a tensor that this rank holds.

    A rank that holds nothing of a sharded dimension gets a shape with a zero in it.
    """
    if not isinstance(tensor, DTensor):
        return LocalSlice((0,) * tensor.ndim, tuple(tensor.shape))
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return LocalSlice(cast(tuple[int, ...], tuple(offset)), cast(tuple[int, ...], tuple(shape)))


def gather_along(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank's ``x``, one after another along ``dim``. Can be traced by ``torch.compile``."""
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    ranks, whole = group.size(), _waited(gather(x, 0, group))
    if _in_place(x, dim):
        return whole.view(*x.shape[:dim], ranks * x.shape[dim], *x.shape[dim + 1 :])
    return torch.cat(whole.chunk(ranks), dim)


def sum_scatter_along(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's piece along ``dim`` of the sum of every rank's ``x``. Can be traced by ``torch.compile``."""
    scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
    ranks, shape = group.size(), x.shape
    if dim and _in_place(x, dim):
        x = x.view(ranks * shape[0], *shape[1:dim], shape[dim] // ranks, *shape[dim + 1 :])
    elif dim:
        x = torch.cat(x.chunk(ranks, dim))
    return _waited(scatter(x, "sum", 0, group))


def exchange_along(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's piece along ``dim`` of every rank's ``x``: ``(ranks, ...)``. Can be traced by ``torch.compile``."""
    sent = torch.stack(x.chunk(group.size(), dim))
    return _waited(functional.all_to_all_single(sent, None, None, group))


def _in_place(x: Tensor, dim: int) -> bool:
    """True if the pieces of a tensor divided along ``dim`` lie one after another in memory, so that none need be moved.

    While tracing that is ignored for all but the first dimension: the compiler knows what to overlap by the moves.
    """
    return dim == 0 or (math.prod(x.shape[:dim]) == 1 and not torch.compiler.is_compiling())


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of every rank's ``x``, which stays as it is. Can be traced by ``torch.compile``."""
    return _waited(functional.all_reduce(x, "sum", group))


def _waited(result: Tensor) -> Tensor:
    # While tracing, the result has been waited for already; a second wait would hide the pattern that is overlapped.
    return result.wait() if isinstance(result, functional.AsyncCollectiveTensor) else result


def overlap_with_products(group: dist.ProcessGroup) -> None:
    """Lets the compiler cut gathers and scatters of ``group`` into pieces that run beside the matrix products next to
    them (Wang et al., "Overlap Communication with Dependent Computation", ASPLOS 2023). For CUDA."""
    from torch._inductor import config  # slow to import, and only compiled runs need it

    config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, but the compiler still asks for it
        enable_symm_mem_for_group(group.group_name)


def cuda_stream(device: torch.device) -> torch.cuda.Stream:
    """A new stream of ``device``."""
    make: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
    return make(device)


def device_of_messages(group: dist.ProcessGroup) -> torch.device:
    """The device between which ``group`` sends what was never on an accelerator: the CPU if one of its backends can."""
    kinds = {kind.type for kind in group._device_types}
    return torch.device("cpu") if "cpu" in kinds else current_gpu()


def abort_nccl() -> None:
    """Aborts every NCCL communicator of this process, from any thread; what waits for them gets an error."""
    from torch.distributed.distributed_c10d import _abort_process_group

    _abort_process_group()


def finish_backward(module: FSDPModule) -> None:
    """Lets FSDP take in gradients that came outside of a backward pass through ``module``, the root of its wrapping.

    What FSDP does at the end of a backward pass: gradients are added in its accumulation format, and shared out if that
    was asked for (``set_requires_gradient_sync``).

    It widens the gradients of a backward pass that did not ask for that, and wants those of a group to have one dtype: those that
    came since are widened here.
    """
    for part in cast(nn.Module, module).modules():
        group = fully_shard.state(part)._fsdp_param_group if isinstance(part, FSDPModule) else None  # type: ignore[attr-defined]
        for parameter in group.fsdp_params if group is not None else ():
            if parameter.unsharded_accumulated_grad is None and hasattr(parameter, "_unsharded_param"):
                parameter.to_accumulated_grad_if_needed()
    fully_shard.state(module)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def give_gradient(module: FSDPModule, name: str, gradient: Tensor) -> None:
    """Makes ``gradient`` the whole gradient of the parameter ``name`` of ``module``'s own group, in the dtype of its reduction.

    To be called before FSDP takes in the gradients of a backward pass, in the place of autograd, which knows the dtype of compute alone.
    """
    group = fully_shard.state(module)._fsdp_param_group  # type: ignore[attr-defined]
    (parameter,) = (each for each in group.fsdp_params if each._module_info.param_name == name)
    parameter.unsharded_accumulated_grad = gradient


def group_shapes(module: FSDPModule) -> list[torch.Size]:
    """The shapes of the parameters that FSDP gathers and reduces together with ``module``, in the order of its buffers."""
    group = fully_shard.state(module)._fsdp_param_group  # type: ignore[attr-defined]
    return [parameter.sharded_param.shape for parameter in group.fsdp_params] if group is not None else []


def measure_waits(module: FSDPModule, measure: Callable[[], AbstractContextManager[None]]) -> None:
    """Encloses in ``measure()`` all that makes the stream of the computation wait for gathers and reductions of ``module``'s own group."""
    group = fully_shard.state(module)._fsdp_param_group  # type: ignore[attr-defined]
    if group is None:
        return

    owner = weakref.ref(group)  # which must not hold itself, and with it its process group's threads

    def enclosed(wait: Callable[[object], None]) -> Callable[[], None]:
        def measured() -> None:
            with measure():
                wait(owner())

        return measured

    # For weights, before each pass; for the sums of gradients, when the backward pass is over.
    for name in ("wait_for_unshard", "finalize_backward"):
        setattr(group, name, enclosed(getattr(type(group), name)))


def keep_activations_within(fraction: float) -> None:
    """Tells the compiler what fraction of a block's activations it may keep, in all that this process compiles later."""
    from torch._functorch import config  # slow to import, and only compiled runs need it

    count_grouped_attention()
    config.activation_memory_budget = fraction


def count_grouped_attention() -> None:
    """Have PyTorch count the FLOP of attention with fewer key than query heads, on which the compiler's budget relies. 2.13 does by itself."""
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
    """Return the option of ``checkpoint`` with which tensors that selective checkpointing keeps bypass saved-tensor hooks.

    PyTorch 2.14 added the option and announces another default. Earlier releases always bypass the hooks.
    """
    option = "respect_saved_tensors_hooks"
    return {option: False} if option in inspect.signature(checkpoint).parameters else {}


def leave_profiler_out_of_selective_checkpoints() -> None:
    """Lets selective checkpointing pass over the profiler's ranges, which it otherwise counts as results to be kept.

    FSDP opens more of them when a unit within a block, such as its experts, is computed again ("encountered during backward but
    not found in storage").
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
    """Makes this process rank ``rank`` of ``ranks`` that do not exist: collectives return at once, with any result."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # for dry runs alone

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)


def group_of(args: Sequence[object]) -> str:
    """The name of the process group among the arguments of an operation of ``c10d`` or ``_c10d_functional``."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return str(dist.ProcessGroup.unbox(arg).group_name)
    return str(args[-1])


def forget_groups() -> None:
    """Makes PyTorch forget all process groups of this process, whole or half made; nothing is said to other ranks.

    Groups are numbered as they are made, and the numbers are part of where ranks look for each other. A group whose making
    fails leaves its number used up, until the next ``destroy_process_group`` that has something to destroy: this process would
    then wait for ever for one that has not failed (PyTorch 2.11 to 2.13). So would one whose ``shutdown`` raised.

    DTensor's caches go too. Their results hold a mesh, found again by an equal one: and meshes of the same ranks are equal,
    whichever of them this process was when the mesh was made, so that as another rank it would get its old place. Whoever holds
    a mesh also holds its groups, each with threads (three of gloo's, one of which wakes a hundred times a second) and sockets.
    PyTorch 2.11 loses count of references to the arguments of DTensor's operations, and never frees their meshes (2.13 does): they
    let go of their groups here, which takes some 40 ms for the search.
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
    # What ``torch.distributed.tensor.debug._clear_sharding_prop_cache`` does, whose package imports the compiler.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
    torch._C._clear_DTensor_sharding_propagator_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    if torch.__version__ < "2.13":  # as versions compare
        for mesh in [found for found in gc.get_objects() if type(found) is DeviceMesh]:
            mesh._pg_registry.clear()
    world.group_count = 0


def group_timeout() -> timedelta | None:
    """The timeout of the default group, for its operations and for its ranks to connect; ``None`` if its backend does not say."""
    world = dist.group.WORLD
    if world is None:
        return None
    backend = world._get_backend(
        next(iter(world._device_types))
    )  # each of them has one, and all have one timeout
    return getattr(getattr(backend, "options", None), "_timeout", None)


def group_sizes() -> list[int]:
    """The number of ranks in each process group of this process, the default one first.

    On gloo this is also the number of sockets: a rank listens, and is connected with every other rank of the group.
    """
    return [len(ranks) for ranks in dist.distributed_c10d._world.pg_group_ranks.values()]


def set_group_timeouts(timeout_s: float) -> None:
    """Sets the timeout of operations of all groups of this process, whatever their ranks had to connect."""
    for group in dist.distributed_c10d._world.pg_map:
        for kind in group._device_types:
            group._get_backend(kind)._set_default_timeout(timedelta(seconds=timeout_s))


def flight_record(since_ns: int = 0) -> bytes:
    """The flight record: this rank's collectives since ``since_ns`` (Unix time, ns), as JSON.

    Its fields: ``rank``, ``taken_ns`` (now), ``groups`` (name to ranks) and the dump of PyTorch's flight ``recorder``.

    From any thread, also while another hangs in a collective. The recorder outlives process groups, and names come again:
    give the time when the present groups were made. Without entries where recording is off (``TORCH_FR_BUFFER_SIZE`` was 0
    when the process made its first group). Gloo's own dump does not name the groups' ranks.
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
