"""Memory of activations: offload to the host until the backward pass, or recomputation in it. Neither changes a bit.

*Offload*: a block's activations lie idle from its forward to its backward pass (as an optimizer's moments do from step to step,
which ``MomentStore`` offloads; ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857). PyTorch's saved-tensor hooks
hand them over; they are copied out while the next blocks compute, and prefetched one block ahead of the backward pass. Copies
are exact, and strides are kept, so no bit changes.

They wait in host memory, or in a file on a local disk. Files have no name, so the operating system frees them when the process ends,
however it ends. Space in them is reserved before it is used, so that a full disk is an error with a remedy and not a bus error.

*Recomputation* (activation checkpointing) keeps a block's input and computes the block again (Chen et al., arXiv 1604.06174).
"""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from phalanx.hardware.local.device import on_gpu
from phalanx.model.autograd import uncompiled
from phalanx.model.custom import blocks_of
from phalanx.parallel.reduction.data_parallel import local
from phalanx.parallel.torch_compat import (
    cuda_stream,
    keep_activations_within,
    keep_selected_tensors_from_hooks,
    leave_profiler_out_of_selective_checkpoints,
)
from phalanx.run.spec import MemorySpec, RunSpec

if TYPE_CHECKING:
    from torch._ops import OpOverload


SMALLEST_BYTES = 1 << 16
"""Smaller tensors are not offloaded: they would save nothing."""
_PAGE = 4096
_WRITES_AT_ONCE = 16  # tensors that may wait for the disk; each holds its memory until it is written


class OffloadError(RuntimeError):
    """There is no room for offloaded tensors."""


class Regions:
    """An allocator of regions in a nameless file in ``folder``."""

    def __init__(self, folder: Path) -> None:
        """Open an unnamed temporary file in ``folder``, which is made if it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  lives as long as this object
        self.fd = self._file.fileno()
        self.size = 0
        """The file's length in bytes."""
        self._free: dict[int, list[int]] = {}

    def take(self, length: int) -> int:
        """Return the offset of a region for ``length`` bytes, rounded up to a size class: a freed region of that class,
        else new room at the file's end. Raises ``OffloadError`` if the disk or quota is full; passes other ``OSError``
        on.
        """
        size = _rounded(length)
        if self._free.get(size):
            return self._free[size].pop()
        return self._extend(size)

    def give_back(self, offset: int, length: int) -> None:
        """Free the region that ``take(length)`` gave, for later use. The file does not shrink."""
        self._free.setdefault(_rounded(length), []).append(offset)

    def mapped(self, length: int) -> NDArray[np.uint8]:
        """A region of ``length`` bytes, all zero, for as long as the file lives, mapped into memory."""
        offset = self._extend(-(-length // _PAGE) * _PAGE)
        return np.memmap(self._file, dtype=np.uint8, mode="r+", offset=offset, shape=(length,))

    def _extend(self, size: int) -> int:
        """Reserve ``size`` bytes at the file's end and return their offset. Raises ``OffloadError`` if the disk or
        quota is full or the file would be too large; passes other ``OSError`` on.
        """
        offset = self.size
        try:
            os.posix_fallocate(self.fd, offset, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise OffloadError(
                f"{self.folder} has no room for {offset + size:,} bytes of offloaded tensors ({error.strerror}): free some "
                'space, point memory.offload_path to a larger disk, or offload to "host"'
            ) from error
        self.size += size
        return offset


def _rounded(length: int) -> int:
    """Return ``length`` rounded up to eighths of powers of two, a page at least: tensors of nearly the same size can reuse one region."""
    unit = max(_PAGE, 1 << max(0, length.bit_length() - 4))
    return -(-length // unit) * unit


class Waiting(Protocol):
    """The bytes of one offloaded tensor."""

    @abstractmethod
    def fetch(self) -> None:
        """Start to bring the bytes back (prefetch), unless that has been started."""

    @abstractmethod
    def get(self) -> Tensor:
        """The bytes ``(n,)``, uint8, on the device again."""


Store = Callable[[Tensor], Waiting]
"""Offloads the bytes ``(n,)``, uint8, of a tensor that will not be changed any more; returns at once."""


class HostStore:
    """Pinned host memory of a CUDA device, copied to and from on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.stream = cuda_stream(device)

    def __call__(self, source: Tensor) -> _OnHost:
        return _OnHost(self, source)


class _OnHost(Waiting):
    def __init__(self, store: HostStore, source: Tensor) -> None:
        """Start the copy of ``source`` into pinned host memory, on the store's stream."""
        self._store, self._device = store, source.device
        self._host = torch.empty(len(source), dtype=torch.uint8, pin_memory=True)
        self._back: Tensor | None = None
        store.stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(store.stream):
            self._host.copy_(source, non_blocking=True)
            self.copied = store.stream.record_event()
        # Without this the allocator could reuse the memory before the copy is made.
        source.record_stream(store.stream)

    def host(self) -> Tensor:
        """The bytes on the host, once they are all there."""
        self.copied.synchronize()
        return self._host

    def fetch(self) -> None:
        """Start the copy back to the device on the store's stream; later calls do nothing."""
        if self._back is not None:
            return
        self._back = torch.empty(len(self._host), dtype=torch.uint8, device=self._device)
        # The compute stream may still be using the memory of ``_back`` for the tensor that had it before.
        self._store.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._store.stream):
            self._back.copy_(self._host, non_blocking=True)
            self.copied = self._store.stream.record_event()
        self._back.record_stream(self._store.stream)

    def get(self) -> Tensor:
        self.fetch()
        torch.cuda.current_stream(self._device).wait_event(self.copied)
        return cast(Tensor, self._back)


class FileStore:
    """A file on a local disk, written and read by a few threads."""

    def __init__(self, folder: Path, device: torch.device, threads: int = 2) -> None:
        self.regions = Regions(folder)
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="offload")
        self._host = HostStore(device) if on_gpu(device) else None
        self._writes: deque[Future[None]] = deque()

    def __call__(self, source: Tensor) -> Waiting:
        """Start the write of ``source`` on a thread and return its handle. Wait first while too many writes are
        pending. A tensor on a GPU is copied to the host before. The region is freed once the handle is unreachable
        and the write is done. Raises ``OffloadError`` without room, and the error of an earlier write that failed.
        """
        self.flush(_WRITES_AT_ONCE - 1)
        offset = self.regions.take(len(source))
        on_host = self._host(source) if self._host else None
        write = self.pool.submit(self._write, source if on_host is None else on_host, offset)
        self._writes.append(write)
        waiting = _InFile(self, write, offset, len(source), source.device)
        # Backward may never come (an exception, an evaluation): the region is freed when the last reference to it is gone and
        # its write is done.
        weakref.finalize(waiting, _free_after, write, self.regions, offset, len(source)).atexit = False
        return waiting

    def flush(self, left: int = 0) -> None:
        """Wait until at most ``left`` writes are pending. Raise the error of a write that failed."""
        while len(self._writes) > left:
            self._writes.popleft().result()

    def _write(self, source: Tensor | _OnHost, offset: int) -> None:
        """Write all bytes of ``source`` at ``offset`` of the file; for a copy on its way from a GPU, wait for it first."""
        data = _bytes(source if isinstance(source, Tensor) else source.host())
        done = 0
        while done < len(data):
            done += os.pwrite(self.regions.fd, data[done:], offset + done)

    def read(self, write: Future[None], offset: int, length: int, *, pinned: bool) -> Tensor:
        """Wait for ``write``, then return the ``length`` bytes at ``offset`` as a uint8 tensor on the host. Raises
        the error of the write, and ``OSError`` if the file has become shorter.
        """
        write.result()
        host = torch.empty(length, dtype=torch.uint8, pin_memory=pinned)
        data, done = _bytes(host), 0
        while done < length:
            read = os.preadv(self.regions.fd, [data[done:]], offset + done)
            if not read:
                raise OSError(
                    f"offloaded tensors in {self.regions.folder} have become shorter: who truncates open files?"
                )
            done += read
        return host


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


def _free_after(write: Future[None], regions: Regions, offset: int, length: int) -> None:
    write.add_done_callback(lambda _: regions.give_back(offset, length))


class _InFile(Waiting):
    def __init__(
        self, store: FileStore, write: Future[None], offset: int, length: int, device: torch.device
    ) -> None:
        """Handle of ``length`` bytes of a tensor of ``device``, at ``offset`` of the file once ``write`` is done."""
        self._store, self._write, self._offset, self._length = store, write, offset, length
        self._device = device
        self._read: Future[Tensor] | None = None
        self._back: Tensor | None = None

    def fetch(self) -> None:
        """Start the read on a thread of the store, into pinned memory for a GPU; later calls do nothing."""
        if self._read is None:
            pinned = on_gpu(self._device)
            self._read = self._store.pool.submit(
                self._store.read, self._write, self._offset, self._length, pinned=pinned
            )

    def get(self) -> Tensor:
        """Return the bytes on the device; waits for the read, which is started if need be, and keeps the result."""
        self.fetch()
        if self._back is None:
            self._back = cast(Future[Tensor], self._read).result().to(self._device, non_blocking=True)
        return self._back


class _Item:
    """An offloaded storage, and the forward pass that it belongs to."""

    def __init__(self, waiting: Waiting, owner: _Pass) -> None:
        self.waiting, self.owner = waiting, owner


class _View:
    """A tensor that is a view of an offloaded storage; autograd keeps it in the tensor's place."""

    def __init__(self, item: _Item, tensor: Tensor) -> None:
        self._item, self._dtype = item, tensor.dtype
        self._place = (tensor.storage_offset(), tensor.size(), tensor.stride())

    def restore(self) -> Tensor:
        self._item.owner.coming_back()
        storage = self._item.waiting.get().untyped_storage()
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._place)


class _Pass:
    """One forward pass of one block: offloads what autograd saves for backward, each storage once."""

    def __init__(
        self, store: Store, smallest: int, staying: Iterable[Tensor], previous: _Pass | None
    ) -> None:
        """Begin a pass of a block. Storages below ``smallest`` bytes and those of ``staying`` are not offloaded;
        ``previous`` is prefetched with this pass.
        """
        self._store, self._smallest, self._previous = store, smallest, previous
        self._staying = {_address(tensor) for tensor in staying}
        self._away: dict[tuple[int, int], tuple[weakref.ref[torch.UntypedStorage], weakref.ref[_Item]]] = {}
        self._items: list[weakref.ref[_Item]] = []
        self._back = False

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Offload ``tensor``'s storage and return a view of it; return small tensors, and those in ``staying``, themselves."""
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._smallest or _address(tensor) in self._staying:
            return tensor
        return _View(self._item(tensor, storage), tensor)

    def _item(self, tensor: Tensor, storage: torch.UntypedStorage) -> _Item:
        """Return the offloaded item of ``storage``. Reuse the one of this pass if it has the same storage and version
        and is still referenced; else offload the whole storage.
        """
        key = (_address(tensor), tensor._version)
        # The address alone may be that of a freed storage whose memory was reused: the storage must be the same object.
        original, item = (ref() for ref in self._away.get(key, (lambda: None, lambda: None)))
        if item is None or original is not storage:
            content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            item = _Item(self._store(content), self)
            self._away[key] = (weakref.ref(storage), weakref.ref(item))
            self._items.append(weakref.ref(item))
        return cast(_Item, item)

    def coming_back(self) -> None:
        """Prefetch this pass, and the one that backward will reach next, once; called when backward reaches this one."""
        if not self._back:
            self._back = True
            self.fetch()
            if self._previous is not None:
                self._previous.fetch()

    def fetch(self) -> None:
        """Prefetch what was offloaded in this pass and is still needed, the last first."""
        for reference in reversed(self._items):
            item = reference()
            if item is not None:
                item.waiting.fetch()


def _address(tensor: Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()


def _unpack(saved: Tensor | _View) -> Tensor:
    return saved.restore() if isinstance(saved, _View) else saved


class _Offloading:
    """Wraps the blocks' forward functions, and links each pass to the one before it."""

    def __init__(self, store: Store, smallest: int) -> None:
        self._store, self._smallest = store, smallest
        self._last: _Pass | None = None

    def wrap(self, block: nn.Module, *, first: bool) -> Callable[..., Tensor]:
        """Return a forward function of ``block`` that offloads what backward needs, excluding the block's parameters
        and ``tables``. With ``first``, the chain of prefetches starts here. Without gradients it only calls the
        block's own forward.
        """
        inner = block.forward

        def forward(x: Tensor, *tables: Tensor | None) -> Tensor:
            """Call the block; with gradients enabled, under hooks that offload saved tensors."""
            if not torch.is_grad_enabled():
                return cast(Tensor, inner(x, *tables))
            # Not offloaded: weights, which live as long as the block, and tables that all blocks share.
            staying = (*block.parameters(), *(table for table in tables if isinstance(table, Tensor)))
            self._last = _Pass(self._store, self._smallest, staying, None if first else self._last)
            with saved_tensors_hooks(self._last.pack, _unpack):
                return cast(Tensor, inner(x, *tables))

        return uncompiled(forward, recursive=False)


def apply_activation_offload(
    module: nn.Module, spec: MemorySpec, device: torch.device, smallest: int = SMALLEST_BYTES
) -> None:
    """Offload the activations of each block of ``module`` that have at least ``smallest`` bytes to the place that
    ``spec.offload_activations`` names.

    Call it after recomputation is applied (then only the blocks' inputs are left to offload), and before blocks are
    sharded. On a CPU, activations are in host memory already: "host" changes nothing.
    """
    where = spec.offload_activations
    if where == "host" and on_gpu(device):
        offload_activations(module, HostStore(device), smallest)
    elif where == "file":
        offload_activations(module, FileStore(Path(spec.offload_path), device), smallest)


def offload_activations(module: nn.Module, store: Store, smallest: int = SMALLEST_BYTES) -> None:
    """Replace the forward function of each block of ``module``, to offload its activations of at least ``smallest`` bytes to
    ``store``."""
    offloading = _Offloading(store, smallest)
    for number, block in enumerate(blocks_of(module)):
        block.forward = offloading.wrap(block, first=number == 0)


# Recomputation of activations in the backward pass.
#
# Without it, a block keeps some dozen tensors for backward, each at least as wide as the model. ``full`` keeps only a block's
# input and computes the block twice. ``selective`` keeps the results with the most time per byte and recomputes the cheap
# others (Korthikanti et al., arXiv 2205.05198). ``budget`` leaves the choice to the compiler, which solves a knapsack problem
# for each block.
#
# Recomputation repeats the same operations on the same numbers, so no bit changes. This includes a router's choices, and
# collectives, which all ranks of a group repeat in the same order. PyTorch's non-reentrant checkpoint is put around a block's
# ``forward``, not around the block. So parameters keep their names, and the block's hooks, such as FSDP's gathering of weights,
# stay outside and run once. A compiled ``forward`` is recomputed as the same program. ``selective`` cannot select inside it, so
# ``phalanx.run.layout`` refuses the two together; ``budget`` is for compiled blocks.


ATTENTION = frozenset(
    {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    }
)
"""Attention in one kernel: quadratic time, a result as wide as its queries."""
PRODUCTS = frozenset({"mm", "bmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"})
"""Matrix products whose first argument is the left operand ``(..., m, k)`` and whose second is the right, ``(..., k, n)``."""
FUNCTIONAL_COLLECTIVES = "_c10d_functional"


def apply_recompute(module: nn.Module, spec: RunSpec) -> None:
    """Apply ``spec.memory.recompute`` to the blocks of ``module``. Call it after compilation and before sharding.

    "none" changes nothing; "budget" sets the process's limit for compiled blocks; "selective" and "full" replace the
    blocks' forward functions by checkpointed ones.
    """
    how = spec.memory.recompute
    if how == "none":
        return
    if how == "budget":
        keep_activations_within(spec.memory.recompute_budget)
        return
    if how == "selective":
        leave_profiler_out_of_selective_checkpoints()
    contexts = noop_context_fn if how == "full" else partial(create_selective_checkpoint_contexts, policy)
    for block in blocks_of(module):
        # A block draws no random numbers, so no generator's state need be kept.
        block.forward = partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=contexts,
            **keep_selected_tensors_from_hooks(),
        )


def policy(
    context: SelectiveCheckpointContext,  # noqa: ARG001  PyTorch's signature
    operation: OpOverload[..., object],
    *args: Tensor,
    **kwargs: object,  # noqa: ARG001
) -> CheckpointPolicy:
    """Return whether an operation's result is kept (``MUST_SAVE``): those of attention, of collectives, and of
    products that do not widen. Others are recomputed.

    A product's time per byte of its result is proportional to its inner dimension, which is the same for all products
    that read the residual stream; but the two that widen it to a feed-forward layer's inner width make up two thirds
    or more of the bytes that could be kept. Recomputing just these costs about as much time as recomputing every
    second product, and keeps a good deal less.
    """
    name = operation.overloadpacket.__name__
    if name in ATTENTION or operation.namespace == FUNCTIONAL_COLLECTIVES:
        return CheckpointPolicy.MUST_SAVE
    operands = args[1:3] if name == "addmm" else args[:2] if name in PRODUCTS else ()
    if operands and operands[1].shape[-1] <= operands[0].shape[-1]:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
