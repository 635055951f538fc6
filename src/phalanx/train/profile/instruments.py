"""Put our own ranges around the work of a rank, from outside, and take them away again.

While nobody records, nothing of this is there: no branch in a hot path, no hook on a module. While somebody does, the ledger, the stopwatches of
communication, backward passes, collectives and a few methods are wrapped in place, and modules get forward hooks. Autograd's graph stays as it
is (no backward hooks): an operation of the backward pass finds its layer by the sequence number that it shares with the forward one. None of this
touches a tensor, so no bit changes.

Collectives are wrapped where everybody calls them, as functions of ``torch.distributed``: FSDP's too.

The same ranges are shown by NVIDIA's profilers (``nvtx_ranges``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.model.custom import blocks_of
from phalanx.observe.ledger import Bucket
from phalanx.parallel.mesh import Mesh
from phalanx.train.step.slot import LoopRunner, PipelineRunner

if TYPE_CHECKING:
    from phalanx.parallel.pipeline import StageLinks
    from phalanx.parallel.pipeline_schedules import StageMessage
    from phalanx.train.assemble import Training
    from phalanx.train.step.step import Stepper, StepReport

COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_to_all_single"),
    *("reduce_scatter_tensor", "reduce_scatter_single", "broadcast", "reduce", "barrier", "send", "recv"),
)
AXIS_OF_CLOCK = {
    Bucket.COMM_EXPOSED_DP: "shard",
    Bucket.COMM_EXPOSED_TP: "tensor",
    Bucket.COMM_EXPOSED_CP: "context",
    Bucket.COMM_EXPOSED_EP: "expert",
    Bucket.STEP_BUBBLE: "pipeline",
}
_MOST_NAMED = 512
"""Ranks of a group that are listed."""


class Ranges(Protocol):
    """Where ranges are noted: the marks of a recording, or NVTX."""

    def around(self, kind: str, name: str, **more: object) -> AbstractContextManager[None]:
        """Note the time inside."""


Around = Callable[[], AbstractContextManager[None]]


@contextmanager
def instruments(training: Training, stepper: Stepper, marks: Ranges) -> Iterator[None]:
    """Context in which this rank's steps, waits, modules and collectives are marked in ``marks``, by methods that are replaced.

    Modules of compiled models are not marked. All is put back at the end.
    """
    built, inputs = training.built, training.inputs
    with ExitStack() as undo:

        def put(owner: object, method: str, kind: str, name: str) -> None:
            undo.enter_context(_wrapped(owner, method, lambda: marks.around(kind, name)))

        undo.enter_context(_ledger(inputs.ledger, marks))
        for bucket, clock in built.waits.items():
            if bucket is not Bucket.STEP_BUBBLE:
                put(clock, "measure", "wait", AXIS_OF_CLOCK[bucket])
        put(stepper, "_reduce_losses", "work", "losses of all ranks")
        put(stepper, "_gradient_norm", "work", "norm")
        put(stepper, "_balance_experts", "work", "expert balance")
        put(built.model, "computing", "work", "backward")
        put(training.saver, "save", "work", "save")
        put(inputs.guardian, "ended", "work", "snapshot")
        put(training.reporter, "emit", "work", "log")
        if isinstance(built.runner, LoopRunner):
            put(built.runner, "_slot", "work", "slot")
        if isinstance(built.runner, PipelineRunner):
            undo.enter_context(_links(built.runner.engine.links, training.mesh, marks))
        if not inputs.spec.runtime.compile:  # a hook would make the blocks compile again
            undo.enter_context(_modules(built.model.parts, marks))
        undo.enter_context(_collectives(training.mesh, marks))
        yield


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute on this object alone, and put back at the end what was there, also after an error."""
    space = vars(owner)
    had, before = name in space, space.get(name)
    space[name] = value
    try:
        yield
    finally:
        if had:
            space[name] = before
        else:
            space.pop(name, None)


def _wrapped(owner: object, method: str, around: Around) -> AbstractContextManager[None]:
    """Replace ``owner``'s method, until the context ends, so that each call is inside ``around()``. If the method
    returns a context manager, ``around()`` encloses the body of that context.
    """
    original = getattr(owner, method)

    def call(*args: object, **kwargs: object) -> object:
        with around():
            return original(*args, **kwargs)

    @contextmanager
    def enclose(*args: object, **kwargs: object) -> Iterator[None]:
        with around(), original(*args, **kwargs):
            yield

    encloses = hasattr(original, "__wrapped__")  # made by contextlib.contextmanager
    return replaced(owner, method, enclose if encloses else call)


def _ledger(ledger: object, marks: Ranges) -> AbstractContextManager[None]:
    """Replace the ledger's ``bucket`` by one that also marks its time."""
    original = vars(type(ledger))["bucket"]

    @contextmanager
    def bucket(kind: Bucket) -> Iterator[None]:
        with marks.around("bucket", kind.value), original(ledger, kind):
            yield

    return replaced(ledger, "bucket", bucket)


@contextmanager
def _modules(parts: Sequence[nn.Module], marks: Ranges) -> Iterator[None]:
    """Mark the forward passes of stages, blocks and their children by hooks, which are removed at the end. Modules
    outside of blocks are marked only at the top level.
    """
    with ExitStack() as attached:
        opened: dict[int, list[ExitStack]] = {}

        def watch(module: nn.Module, name: str) -> None:
            """Mark each forward call of ``module`` as a range ``name``, also one that ends early."""
            ranges = opened.setdefault(id(module), [])

            def begin(*_: object) -> None:
                ranges.append(ExitStack())
                ranges[-1].enter_context(marks.around("module", name))

            attached.callback(module.register_forward_pre_hook(begin, prepend=True).remove)
            # always_call: activation recomputation stops with an exception as soon as it has the tensors it needs.
            end = module.register_forward_hook(lambda *_: ranges.pop().close(), always_call=True)
            attached.callback(end.remove)

        for number, part in enumerate(parts):
            watch(part, "loss, head and the rest" if len(parts) == 1 else f"rest of stage part {number}")
            blocks = {id(block) for block in blocks_of(part)}
            for path, module in part.named_modules():
                name = _words(path)
                if id(module) in blocks:
                    watch(module, name)
                    for child, inner in module.named_children():
                        watch(inner, f"{name} {_words(child)}")
                elif path and "." not in path and not isinstance(module, nn.ModuleList | nn.ModuleDict):
                    watch(module, name)
        yield


def _words(path: str) -> str:
    path = path.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
    return re.sub(r"^blocks\.(\w+)", r"layer \1", path)


@contextmanager
def _collectives(mesh: Mesh, marks: Ranges) -> Iterator[None]:
    """Replace the collectives of ``torch.distributed`` by ones that mark each call of a group of several ranks.

    A mark has the group, the call's number in it, the bytes of the largest tensor, and whether the call waits.
    """
    axes = _axes(mesh)
    numbers: Counter[str] = Counter()

    def watched(name: str, original: Callable[..., object]) -> Callable[..., object]:
        """Return ``original`` with a mark around each call on a group of several ranks."""

        @wraps(original)
        def call(*args: object, **kwargs: object) -> object:
            """Call ``original``, marked with axis, group, its number among the group's calls, ranks, bytes of the
            largest tensor, and whether it waits. Groups of one rank are not marked.
            """
            group = kwargs.get("group") or next(
                (arg for arg in args if isinstance(arg, dist.ProcessGroup)), None
            )
            group = cast("dist.ProcessGroup", group or dist.group.WORLD)
            ranks = dist.get_process_group_ranks(group)
            if len(ranks) == 1:
                return original(*args, **kwargs)
            axis = axes.get(group.group_name, "all")
            key = f"{axis}/{ranks[0]}/{len(ranks)}"
            numbers[key] += 1
            moved = max(
                (arg.numel() * arg.element_size() for arg in args if isinstance(arg, Tensor)), default=0
            )
            with marks.around(
                "collective",
                name,
                axis=axis,
                group=key,
                ranks=ranks[:_MOST_NAMED],
                number=numbers[key],
                bytes=moved,
                waits=not kwargs.get("async_op", False) and name not in ("send", "recv"),
            ):
                return original(*args, **kwargs)

        return call

    with ExitStack() as undo:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                undo.enter_context(replaced(dist, name, watched(name, getattr(dist, name))))
        yield


def _axes(mesh: Mesh) -> dict[str, str]:
    """Return the axis of each process group by the group's name. Groups inside and across machines have axes of their own."""
    groups = {
        "stage": mesh.stage_group,
        "sequence": mesh.sequence_group,
        "expert_tensor": mesh.expert_tensor_group,
        "expert": mesh.expert_group,
        "expert_shard": mesh.expert_mesh.get_group("expert_shard"),
        "context": mesh.context_group,
        "tensor": mesh.tensor_group,
        "replicate": mesh.replicate_group,
        "shard": mesh.dense.get_group("fsdp"),
    }
    axes = {str(group.group_name): axis for axis, group in groups.items()}
    for axis, levels in (("shard", mesh.fsdp_levels), ("expert_shard", mesh.expert_levels)):
        if levels is not None:
            axes |= {str(levels.inside.group_name): f"{axis} (in a machine)"}
            axes |= {str(levels.across.group_name): f"{axis} (across)"}
    return axes


@contextmanager
def _links(links: StageLinks, mesh: Mesh, marks: Ranges) -> Iterator[None]:
    """Mark messages between stages, and the wait when links are closed. The n-th message of a link has the same number on both sides."""
    ranks = dist.get_process_group_ranks(mesh.pipeline_groups[0])
    numbers: Counter[tuple[str, int]] = Counter()
    receive, send = links.receive, links.send

    def key(kind: str, other: int) -> dict[str, object]:
        """Return axis, group, ranks (sender, receiver) and number of the next message of ``kind`` with the pipeline
        rank ``other``, which is counted.
        """
        numbers[kind, other] += 1
        ends = (ranks[other], mesh.rank) if kind == "receive" else (mesh.rank, ranks[other])
        return {
            "axis": "pipeline",
            "group": f"pipeline/{ends[0]}-{ends[1]}",
            "ranks": list(ends),
            "number": numbers[kind, other],
        }

    def received(source: int, message: StageMessage) -> Tensor:
        words = {"stage": message.stage, "micro_batch": message.micro_batch}
        with marks.around("receive", f"{message.kind} from a stage", **key("receive", source), **words):
            return receive(source, message)

    def sent(target: int, tensor: Tensor) -> None:
        moved = tensor.numel() * tensor.element_size()
        with marks.around("send", "to a stage", **key("send", target), bytes=moved):
            send(target, tensor)

    with (
        replaced(links, "receive", received),
        replaced(links, "send", sent),
        _wrapped(links, "close", lambda: marks.around("wait", "pipeline")),
    ):
        yield


# NVTX ranges for NVIDIA's profilers: steps, slots, layers and collectives appear by name on the time line of Nsight Systems.
#
# ``observe.nvtx`` turns them on for a complete attempt; otherwise nothing is installed. See https://nvidia.github.io/NVTX/ and
# ``nsys profile --trace=cuda,nvtx,nccl phalanx train RUN``.


class NvtxRanges:
    """Ranges by ``push(name)`` and ``pop()``; those of PyTorch's CUDA build if none are given."""

    def __init__(
        self,
        push: Callable[[str], object] = torch.cuda.nvtx.range_push,
        pop: Callable[[], object] = torch.cuda.nvtx.range_pop,
    ) -> None:
        """Use ``push`` and ``pop`` to open and close ranges."""
        self._push, self._pop = push, pop

    @contextmanager
    def around(self, kind: str, name: str, **more: object) -> Iterator[None]:
        """Show the time inside as an NVTX range of kind and name. Of ``more`` the axis of a collective is shown."""
        self._push(f"{kind} {name} ({more['axis']})" if "axis" in more else f"{kind} {name}")
        try:
            yield
        finally:
            self._pop()


@contextmanager
def nvtx_ranges(training: Training, stepper: Stepper, ranges: NvtxRanges) -> Iterator[None]:
    """Context in which this rank's work is in NVTX ranges, as ``instruments`` marks it, and each step in one of its
    own. All is put back at the end.
    """
    run = stepper.run

    def run_in_range(number: int, *args: Any, **options: Any) -> StepReport:
        with ranges.around("step", str(number)):
            return run(number, *args, **options)

    with instruments(training, stepper, ranges), replaced(stepper, "run", run_in_range):
        yield
