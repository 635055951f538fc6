"""``[precision]``, ``[memory]`` and ``[runtime]``: number formats, what memory is saved, and the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.run.fields import FLEET, FRACTION, LATER, LAYOUT, ValueRange


@dataclass(frozen=True)
class PrecisionSpec:
    """Number formats (mixed precision). Master weights, router, norms, loss and reductions are always fp32."""

    compute: Literal["auto", "fp32", "bf16"] = "auto"
    """Format of weights and activations in forward and backward; "auto" is bf16 on a GPU, fp32 on a CPU."""
    matmul: Literal["compute", "fp8-tensorwise", "fp8-rowwise", "mxfp8"] = "compute"
    """Format of the operands of the blocks' matrix products; 8-bit formats are emulated on hardware that lacks them."""
    rows: Annotated[Literal["any", "independent"], LATER] = "any"
    """If "independent", each expert's rows are padded to a multiple of 4, so that on a CPU a token's results do not depend on which
    others chose its expert: what serving needs to give a mixture's log-probabilities bit by bit."""


@dataclass(frozen=True)
class MemorySpec:
    """Activation recomputation and offload, to save an accelerator's memory. Nothing here changes a bit of the weights, but for
    recompute = "budget"."""

    recompute: Annotated[Literal["none", "full", "selective", "budget"], FLEET] = "none"
    """Activation checkpointing, per block: "none"; "full" recomputes all activations in backward; "selective" keeps the results
    of costly operations (not with runtime.compile); "budget" keeps what recompute_budget allows (needs runtime.compile). A budget belongs
    to the run: by it the compiler chooses what it fuses."""
    recompute_budget: Annotated[float, FLEET, FRACTION] = 0.5
    """Fraction of a block's activations that recompute = "budget" may keep."""
    offload_activations: Annotated[Literal["none", "host", "file"], FLEET] = "none"
    """Where the activations saved for backward are kept: on the accelerator ("none"), in host memory, or in a file."""
    offload_optimizer: Annotated[Literal["none", "host", "file"], FLEET] = "none"
    """Where the optimizer's state is kept between updates: on the accelerator ("none"), in host memory, or in a file."""
    offload_path: Annotated[str, FLEET] = ".cache/offload"
    """Folder for offload to files, on a fast local disk; each rank creates its own files in it and removes them."""


@dataclass(frozen=True)
class RuntimeSpec:
    """Settings of the machine that reach the bits of the weights."""

    seed: Annotated[int, ValueRange(at_least=0, at_most=2**63 - 1)] = 0
    """Random seed of the initial weights and of the order of the samples."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; "auto" takes a GPU if there is one."""
    threads: Annotated[int, ValueRange(at_least=1, at_most=1024)] = 1
    """CPU threads per rank. It belongs to the run, because a sum that is split over threads rounds differently."""
    compile: bool = False
    """If true, the transformer blocks are compiled with torch.compile."""
    numerics: Annotated[Literal["auto", "portable", "native"], LATER] = "auto"
    """Arithmetic of ranks on CPUs. With "portable" x86-64 processors with AVX2 and 64-bit Arm processors give the same bits, with any release of
    PyTorch ("auto" devices are then CPUs, and compilers of C and C++ are needed). "native" takes a processor's own kernels, whose bits are its own. "auto" is
    portable on CPUs where that is possible, native on GPUs; a run that has begun keeps its arithmetic."""
    mixed_machines: Annotated[bool, LAYOUT, LATER] = False
    """If true, ranks may compute on machines whose kernels round differently; the bits then depend on which of them computed what. If
    false, such machines are found by probes at the start, and refused."""
