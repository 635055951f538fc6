"""The tables of the run file that training reads, from ``[train]`` to ``[expect]``, each with its fields: types, defaults, ranges,
owners, and a sentence for each.

``[model]`` is in ``phalanx.run.spec``, which puts the tables together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.run.fields import FLEET, FRACTION, LATER, LAYOUT, NOT_NEGATIVE, POSITIVE, ValueRange


@dataclass(frozen=True)
class TrainSpec:
    """The length of training, the global batch, and how it is divided for gradient accumulation."""

    steps: Annotated[int, ValueRange(at_least=1, at_most=10**9)] = 100
    """Number of optimizer steps."""
    batch_size: Annotated[int, POSITIVE] = 32
    """Global batch size: sequences per optimizer step, over all ranks."""
    seq_len: Annotated[int, POSITIVE] = 256
    """Tokens per sequence."""
    slots: Annotated[int, POSITIVE] = 8
    """Equal pieces that the global batch is divided into. Data-parallel ranks take slots, and a rank with several accumulates
    their gradients; at most this many data-parallel ranks have work."""
    micro_batch_size: Annotated[int, NOT_NEGATIVE] = 0
    """Sequences per forward and backward pass; a slot's micro-batches accumulate their gradients in order. 0 means the whole
    slot at once."""
    reduction: Literal["reproducible", "integer", "fast"] = "reproducible"
    """Sum of gradients over slots: "reproducible" adds them in a fixed binary tree, "integer" in whole numbers, which have no order:
    with either, the bits do not depend on the number of ranks, though they differ between the two; "fast" is a plain
    reduce-scatter, whose order the library chooses."""
    expert_sums: Annotated[Literal["micro-batch", "slot"], LATER] = "micro-batch"
    """Order of sums where ranks share experts and slots have several micro-batches. "micro-batch" first adds the slots of each micro-batch: a
    rank keeps one set of its experts' gradients. "slot" first adds the micro-batches of each slot: parallel.expert then changes no bit,
    and a rank keeps a set of gradients for each slot that the ranks compute at once."""
    on_nonfinite: Annotated[Literal["stop", "skip"], FLEET] = "stop"
    """Action when the loss or the gradient is infinite or NaN: stop the run, or skip the step."""
    max_skipped: Annotated[int, FLEET, POSITIVE] = 10
    """Consecutive skipped steps after which the run stops even if on_nonfinite or on_spike is "skip"."""
    on_spike: Annotated[Literal["continue", "stop", "skip", "fork"], LATER] = "continue"
    """Action when a step's loss or gradient norm is far above that of the steps before: continue with a warning; stop before the step, saved; skip
    the step, so that its samples are left out; or fork, by [spike]. The checkpoint before a spike is kept."""
    spike_window: Annotated[int, LATER, ValueRange(at_least=8, at_most=1024)] = 128
    """Number of last steps that define the usual loss and gradient norm; half of them must be done before any step can be a spike."""
    spike_deviations: Annotated[float, LATER, ValueRange(above=0)] = 8.0
    """Deviations above the window's median (1.4826 times its median absolute deviation) from which a step is a spike."""
    document_mask: bool | None = None
    """If true, attention does not cross the ends of documents; positions are not reset there. By default true for packed datasets whose index
    requires it, as all new ones do, and false otherwise; models of a user's own do without."""
    targets_within_documents: Annotated[bool, LATER] = False
    """If true, the token after the end of a document, the first of another one or padding, is no target. Always true for packed datasets."""
    end_of_document: Annotated[int, ValueRange(at_least=-1)] = -1
    """Token id that ends a document, for document_mask and targets_within_documents; -1 means the tokenizer's."""
    loss_chunk: Annotated[int, POSITIVE] = 2048
    """Tokens whose logits are in memory at once while the cross-entropy is computed (chunked loss)."""


@dataclass(frozen=True)
class OptimizerSpec:
    """The optimizer and gradient clipping."""

    name: Literal["adamw", "adafactor", "muon", "shampoo", "soap"] = "adamw"
    """AdamW (arXiv 1711.05101), Adafactor (arXiv 1804.04235), Muon (Jordan et al. 2024, arXiv 2502.16982), Shampoo
    (arXiv 1802.09568) or SOAP (arXiv 2409.11321). The last three take matrices; the rest of the model gets AdamW."""
    lr: Annotated[float, ValueRange(above=0)] = 1e-3
    """Peak learning rate."""
    beta1: Annotated[float, ValueRange(at_least=0, below=1)] = 0.9
    """Decay of the first moment, the running mean of gradients (for Muon, the momentum of matrices)."""
    beta2: Annotated[float, ValueRange(at_least=0, below=1)] = 0.95
    """Decay of the second moment, the running mean of squared gradients (for Shampoo and SOAP, of the statistics of
    matrices too)."""
    eps: Annotated[float, ValueRange(above=0)] = 1e-8
    """Epsilon, added to the root of the second moment."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.1
    """Decoupled weight decay: each step multiplies the weights by 1 - learning rate x weight_decay."""
    decay_norms: bool = False
    """If true, weight decay also applies to the gains of norms and to biases."""
    decay_embeddings: bool = False
    """If true, weight decay also applies to the token embedding."""
    clip_norm: Annotated[float, NOT_NEGATIVE] = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. 0 means no clipping."""
    state: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format of AdamW's moments: bf16 is rounded stochastically, int8 by blocks (arXiv 2110.02861)."""
    newton_schulz_steps: Annotated[int, ValueRange(at_least=1, at_most=20)] = 5
    """Muon: Newton-Schulz iterations that orthogonalize an update."""
    precondition_every: Annotated[int, POSITIVE] = 10
    """Shampoo and SOAP: steps between recomputations of the preconditioner's roots or bases."""
    block_size: Annotated[int, POSITIVE] = 1024
    """Shampoo and SOAP: larger matrices are preconditioned in blocks of at most this many rows and columns."""


@dataclass(frozen=True)
class ScheduleSpec:
    """The learning rate over time, as a multiple of optimizer.lr."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after warm-up: "cosine" to the floor; "wsd", stable and then a linear decay (warmup-stable-decay, arXiv
    2404.06395); or "constant"."""
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 10
    """Steps of linear warm-up from zero."""
    decay_fraction: Annotated[float, FRACTION] = 0.2
    """Fraction of the run, at its end, over which "wsd" decays."""
    floor: Annotated[float, FRACTION] = 0.1
    """Learning rate at the end of the decay, as a fraction of the peak."""


# ``[parallel]``: the mesh that holds the model.


@dataclass(frozen=True)
class ParallelSpec:
    """How the fleet holds the model: a mesh of pipeline x replicate x shard x context x tensor, with experts folded over
    shard x context x tensor. How many copies, shards and stages there are changes no bit of the weights; the other degrees
    decide how sums are split."""

    ranks: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Ranks (processes) to start on this machine; 0 means one per GPU, or cores / runtime.threads, but at least one replica."""
    sharding: Annotated[Literal["none", "zero1", "zero2", "zero3"], FLEET] = "zero3"
    """Data-parallel sharding: "none" replicates everything; "zero1" shards optimizer state, and gradients are exchanged once a step;
    "zero2" exchanges gradients after every slot and shards their sums; "zero3" shards the weights too (FSDP)."""
    shard_ranks: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Data-parallel ranks that one copy of the model is sharded over; fewer than all is hybrid sharding. 0 means all."""
    tensor: Annotated[int, LAYOUT, POSITIVE] = 1
    """Tensor-parallel degree: ranks that share each matrix, and the sequence between the matrices."""
    async_tensor: Annotated[bool, FLEET] = False
    """If true, tensor-parallel communication overlaps with the matrix products; needs a GPU and runtime.compile."""
    context: Annotated[int, LAYOUT, POSITIVE] = 1
    """Context-parallel degree: ranks that share each sequence in attention."""
    context_mode: Annotated[Literal["ring", "allgather"], LAYOUT] = "ring"
    """How a rank gets the keys and values of the other ranks: passed around a ring, or by one all-gather."""
    pipeline: Annotated[int, FLEET, POSITIVE] = 1
    """Pipeline-parallel degree: ranks that hold consecutive stages of the layers."""
    pipeline_schedule: Annotated[Literal["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"], FLEET] = "1f1b"
    """Pipeline schedule: the order in which a slot's micro-batches pass through the stages."""
    pipeline_stages: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Stages (model chunks) on each pipeline rank; 0 means one for gpipe and 1f1b, two for the others."""
    pipeline_split: Annotated[tuple[int, ...], FLEET] = ()
    """Number of layers of each stage, from first to last; empty balances the stages by cost."""
    expert: Annotated[int, LAYOUT, POSITIVE] = 1
    """Expert-parallel degree: ranks that share a layer's experts, folded over tensor, context and shard in that order."""
    expert_tensor: Annotated[int, LAYOUT, POSITIVE] = 1
    """Tensor-parallel degree of each expert's matrices: 1, or the same as tensor."""


# ``[data]`` and ``[[data.sources]]``: the training text, and the tokenizer.


@dataclass(frozen=True)
class SourceSpec:
    """A prepared dataset that a run draws from in proportion to its weight; [[data.sources]] once for each."""

    name: str = ""
    """Name of the source: letters, digits, "-" and "_". It is part of the key of the source's order, and `--set data.sources.NAME.FIELD=VALUE`
    takes it."""
    path: Annotated[str, FLEET] = ""
    """Folder of the prepared dataset. All sources have the same tokenizer."""
    weights: tuple[float, ...] = (1.0,)
    """Weight in each stage of the run: its share of the samples is its weight over the sum of all. Read as exact decimals."""
    use: tuple[float, ...] = (0.0, 1.0)
    """Part of the dataset's sequences that is used, as fractions [from, to]; the others are left for another source or run."""
    epochs: Annotated[float, FLEET, NOT_NEGATIVE] = 1.0
    """Most times that the part is read by the end of the run; a run that would read it more often is refused. 0 means no limit."""


@dataclass(frozen=True)
class DataSpec:
    """The training data and its tokenizer. The data's fingerprint, not its path, is part of the run's identity."""

    path: Annotated[str, FLEET] = ".cache/data/python-stdlib"
    """Prepared dataset (token shards): a folder, which is prepared from the corpus if it does not exist, or s3://, gs:// or az://."""
    corpus: Annotated[tuple[str, ...], FLEET] = ()
    """Text that the dataset is prepared from: files, folders, or the name of a known corpus ("python-stdlib"). On the command line,
    another data.path without another corpus leaves this one out."""
    tokenizer: Annotated[str, FLEET] = "bpe"
    """The tokenizer: "bpe" (trained on the corpus), "bytes", or the path of a tokenizer.json or of a sentencepiece tokenizer.model."""
    vocab_size: Annotated[int, FLEET, ValueRange(at_least=257)] = 4096
    """Vocabulary size of a tokenizer that is trained on the corpus."""
    held_out: Annotated[float, FLEET, ValueRange(above=0, below=0.5)] = 0.05
    """Fraction of the documents that is held out for evaluation and never trained on; of very few documents, the end of the largest."""
    stages: Annotated[tuple[int, ...], LATER] = ()
    """Numbers of steps after which the weights of data.sources change, 0 first: [0, 90000] are two stages. Empty means one stage."""
    sources: Annotated[tuple[SourceSpec, ...], LATER] = ()
    """Prepared datasets that the run draws from, instead of data.path; each is a table [[data.sources]]."""
    cache: Annotated[str, FLEET] = ""
    """Local folder of each machine that caches data of object stores for all its ranks and runs; empty means
    ~/.cache/phalanx/datasets."""
    cache_gib: Annotated[float, FLEET, ValueRange(above=0)] = 64.0
    """Largest size of this folder in GiB; the oldest data are deleted first, and fetched again if they are needed."""
    read_ahead_mib: Annotated[float, FLEET, NOT_NEGATIVE] = 64.0
    """MiB of blocks with future samples that each rank fetches ahead from object stores, so that training does not wait for slow responses; at most a quarter of the cache."""
    timeout_s: Annotated[float, FLEET, ValueRange(above=0)] = 1800.0
    """Seconds for which training waits for an object store that does not answer."""


# ``[checkpoint]``: the state that is saved, its time and place, and the state that a run starts from.


@dataclass(frozen=True)
class CheckpointSpec:
    """When checkpoints are saved, and how many are kept."""

    every_steps: Annotated[int, FLEET, NOT_NEGATIVE] = 50
    """Steps between checkpoints; the last step is always saved. 0 chooses the time between them while the run continues, by how long a save
    holds training up and how often machines fail (Daly 2006)."""
    hours_between_failures: Annotated[float, FLEET, NOT_NEGATIVE] = 0.0
    """Mean time between failures of the whole run, for every_steps = 0; 0 takes 50,675 hours of a rank (Llama 3, arXiv 2407.21783)."""
    keep_last: Annotated[int, FLEET, POSITIVE] = 2
    """Number of newest checkpoints that are kept."""
    keep_every: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Checkpoints at multiples of this step are never deleted; 0 means none."""
    timeout_s: Annotated[float, FLEET, ValueRange(above=0)] = 600.0
    """Seconds that the commit of a checkpoint waits for the files of all ranks."""
    store: Annotated[str, FLEET] = ""
    """URL of an object store (s3://, gs://, az://, file://) or path where checkpoints are copied in the background; a run whose disk is
    lost continues from there. Empty means none."""
    store_every_steps: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Saved steps divisible by this are copied, and the last one; 0 means all."""
    store_keep_last: Annotated[int, FLEET, POSITIVE] = 2
    """Number of newest checkpoints that are kept in the store."""
    store_keep_every: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Copies at multiples of this step are never deleted; 0 means none."""
    store_mib_s: Annotated[float, FLEET, NOT_NEGATIVE] = 0.0
    """Upper limit of each machine's upload in MiB/s; 0 means none."""
    init_from: str = ""
    """A run directory, checkpoint or URL of an object store whose weights the run starts from; empty means fresh weights. Resolved to one
    checkpoint when the run is first started."""
    init_with: Annotated[Literal["weights", "optimizer", "training"], LATER] = "weights"
    """The part of init_from that is taken over: the "weights" alone; weights and "optimizer" state; or all of the "training", with the
    number of steps and the place in the data."""


# ``[precision]``, ``[memory]`` and ``[runtime]``: number formats, ways to save memory, and the machine.


@dataclass(frozen=True)
class PrecisionSpec:
    """Number formats (mixed precision). Master weights, router, norms, loss and reductions are always fp32."""

    compute: Literal["auto", "fp32", "bf16"] = "auto"
    """Format of weights and activations in forward and backward; "auto" is bf16 on a GPU, fp32 on a CPU."""
    matmul: Literal["compute", "fp8-tensorwise", "fp8-rowwise", "mxfp8"] = "compute"
    """Format of the operands of the blocks' matrix products; 8-bit formats are emulated on hardware that lacks them."""
    rows: Annotated[Literal["any", "independent"], LATER] = "any"
    """If "independent", each expert's rows are padded to a multiple of 4, so that on a CPU a token's results do not depend on which
    others chose its expert: serving needs this for exact log-probabilities of a mixture."""


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
    false, probes at the start detect such machines, and the run is refused."""


# ``[sample]`` and ``[expect]``: generated text, and the published hash of the weights.


@dataclass(frozen=True)
class SampleSpec:
    """The text that is generated when the run has ended."""

    prompt: Annotated[str, FLEET] = ""
    """Prompt that the sample continues; empty means no sample."""
    tokens: Annotated[int, FLEET, POSITIVE] = 120
    """Number of tokens to generate."""
    temperature: Annotated[float, FLEET, NOT_NEGATIVE] = 0.8
    """Sampling temperature; 0 takes the most likely token (greedy)."""


@dataclass(frozen=True)
class ExpectSpec:
    """Hashes of the weights of the same run elsewhere, with which the result is compared."""

    weights: Annotated[tuple[str, ...], FLEET] = ()
    """Each "RUN SHA256": the first 8 digits or more of a run's key, as in its directory's name, and the SHA-256 of its weights at the end. The key is that
    of the run's own fields and its data, so a changed run or another dataset is not compared."""
