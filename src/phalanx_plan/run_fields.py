"""The planner's treatment of each field of a run file, so that no field is ignored silently.

Every field of ``RunSpec`` has one entry in ``RUN_FIELDS``:

- *used*: it enters the step, the memory, the search or the run as a whole; a test changes it and checks that the plan changes;
- *irrelevant*: it cannot change a plan, and the entry states the reason;
- *noted*: it matters and the planner does not model it, so that a plan shows a note if the field is set.

A used field can have a note too, for the part of its effect that is not modeled. A field of ``[model]`` is used unless it is
named here, and fails the test if it changes no plan; any other new field of the run file fails the test until it has an entry
here. The trainer and ``phalanx show`` have no such table: the trainer reads every field (a test looks
for the reads), and ``show`` counts the quantities that follow from the model, the batch and the layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import reduce
from typing import Any, Literal, get_args

from phalanx.hardware.cluster import Cluster
from phalanx.run.fields import field_types
from phalanx.run.kinds.latent_attention import is_absorbed
from phalanx.run.spec import ModelSpec, RunSpec

_NOTABLE_EVALUATION = 0.01
"""Share of evaluation in the training time from which it is worth a note; a plan leaves evaluation out."""
_FORWARD_SHARE = 1 / 3
"""Cost of evaluating a sequence over that of training on it: forward pass over forward and backward."""

Condition = Callable[[RunSpec, Cluster], bool]


@dataclass(frozen=True)
class FieldTreatment:
    """How the planner treats one field of the run file."""

    kind: Literal["used", "irrelevant", "noted"]
    reason: str
    """The part of the plan that a used field enters, or the reason that an irrelevant field changes nothing."""
    note: str = ""
    """Note in a plan to which it applies; ``{value}`` is replaced by the field's value."""
    applies: Condition | None = None
    """Condition of the note; ``None``: the field is not at its default."""
    of_own_stack: bool = False
    """True if the field configures this project's own stack, so that a plan for other software ignores it."""


def notes_of(
    spec: RunSpec, cluster: Cluster, other_stack: str = "", stated: Collection[str] | None = None
) -> tuple[str, ...]:
    """Return the notes on parts of ``spec`` on ``cluster`` that a plan does not model, in the order of the run file.

    Fields with the same note share one line. In a plan for the software ``other_stack``, one line lists all fields that it replaces and
    that are not at their defaults. With ``stated``, only fields at or below these paths are noted.
    """
    paths: dict[str, list[str]] = {}
    for path, treatment in RUN_FIELDS.items():
        if stated is not None and not any(f"{path}.".startswith(f"{stated_path}.") for stated_path in stated):
            continue
        if other_stack and treatment.of_own_stack:
            if value_at(spec, path) != _default(path):
                note = f"replaced by what the stack {other_stack!r} does; the run file's value is not planned"
                paths.setdefault(note, []).append(path)
        elif treatment.note and _applies(path, treatment, spec, cluster):
            note = treatment.note.format(value=value_at(spec, path))
            paths.setdefault(note, []).append(path)
    return tuple(f"{', '.join(fields_of_note)}: {note}" for note, fields_of_note in paths.items())


def _applies(path: str, treatment: FieldTreatment, spec: RunSpec, cluster: Cluster) -> bool:
    """Return True if a field's treatment applies: by its own rule, or if the field is not its default."""
    if treatment.applies is not None:
        return treatment.applies(spec, cluster)
    return bool(value_at(spec, path) != _default(path))


def value_at(spec: RunSpec, path: str) -> Any:
    """Return the value of a run file's field by its dotted path."""
    return reduce(getattr, path.split("."), spec)


def _default(path: str) -> object:
    """Return a field's default."""
    section, _, name = path.rpartition(".")
    owner = value_at(RunSpec(), section) if section else RunSpec()
    return next(field.default for field in fields(owner) if field.name == name)


def evaluation_share(spec: RunSpec) -> float:
    """Return the evaluations' time during a run over its training time: sequences, each at the cost of a forward
    pass.

    0 without evaluations.
    """
    evaluation = spec.evaluation
    if not evaluation.every_steps:
        return 0.0
    sequences = evaluation.sequences + _sampled_sequence_count(spec)
    return _FORWARD_SHARE * sequences / (evaluation.every_steps * spec.train.batch_size)


def _sampled_sequence_count(spec: RunSpec) -> int:
    """Return the number of sequences in all forward passes that write an evaluation's samples, each micro-batch in full once for each token
    of its longest sample; 0 without samples."""
    samples, train = spec.evaluation.samples, spec.train
    rows = max(1, train.micro_batch_size or train.batch_size // train.slots)
    return max((sample.tokens for sample in samples), default=0) * rows * math.ceil(len(samples) / rows)


def final_evaluation_share(spec: RunSpec) -> float:
    """Return the time of the evaluation after the last step over the run's training time, by their sequences.

    Infinite if it covers all held-out text, since a plan does not know its length.
    """
    sequences = spec.evaluation.final_sequences or math.inf
    return _FORWARD_SHARE * sequences / (spec.train.steps * spec.train.batch_size)


def _used(reason: str, note: str = "", applies: Condition | None = None) -> FieldTreatment:
    """A field that enters the plan as ``reason``. Its note is given if ``applies``; None: if it is not its default."""
    return FieldTreatment("used", reason, note, applies)


def _own(reason: str, note: str = "", applies: Condition | None = None) -> FieldTreatment:
    """A used field that sets this project's own stack."""
    return FieldTreatment("used", reason, note, applies, of_own_stack=True)


def _irrelevant(reason: str) -> FieldTreatment:
    """A field that changes nothing in a plan."""
    return FieldTreatment("irrelevant", reason)


def _noted(note: str, applies: Condition | None = None) -> FieldTreatment:
    """A field that a plan leaves out. Its note is given if ``applies``; None: if it is not its default."""
    return FieldTreatment("noted", "", note, applies)


def _in(section: str, entries: dict[str, FieldTreatment]) -> dict[str, FieldTreatment]:
    """Prefix the names of fields with their section."""
    return {f"{section}.{name}": treatment for name, treatment in entries.items()}


def _all(names: str, treatment: FieldTreatment) -> dict[str, FieldTreatment]:
    """Give several names, with blanks between them, the same treatment."""
    return dict.fromkeys(names.split(), treatment)


_SHAPE = _used("the model's parameters and operations")
_LAYOUT = _used("the layout of --layout, where that leaves it out; a search tries all that are legal")
_COEFFICIENT = _irrelevant("a coefficient: the operations and bytes do not depend on its value")
_WHERE = _irrelevant("a place or a name: nothing is computed differently")
_WATCHING = _irrelevant("what is logged, in the background")

_MODEL_EXCEPTIONS = {
    **_in(
        "model",
        {
            "preset": _irrelevant("the fields that it stands for are filled in when the file is read"),
            "lanes": _noted(
                "lanes are computed one after the other; the plan counts their products as if they were not divided, and so omits "
                "the cost of narrower products if a rank has several",
                lambda spec, _: spec.model.lanes > 0,
            ),
            "context_tiles": _noted(
                "context tiles are computed one after the other; the plan counts them as if a rank's were one piece, and leaves out "
                "the sums of weight gradients over context ranks",
                lambda spec, _: spec.model.context_tiles > 0,
            ),
            **_all("factory factory_sha256", _irrelevant("a plan of a user's own model is refused")),
            **_all(
                "norm_eps norm_offset scale_embeddings score_width swiglu_gain swiglu_limit rope_theta window_rope_theta mtp_loss init_std",
                _COEFFICIENT,
            ),
        },
    ),
    **_in(
        "model.rope_scaling",
        {
            "kind": _irrelevant("rotary tables are computed once, and have the same shape"),
            **_all("factor original_max_seq_len low_freq_factor high_freq_factor", _COEFFICIENT),
            **_all(
                "beta_fast beta_slow truncate short_factors long_factors temperature mscale mscale_all_dim",
                _COEFFICIENT,
            ),
        },
    ),
    **_in(
        "model.mla",
        {
            "norm_eps": _COEFFICIENT,
            "absorbed": _used(
                "the widths of attention and of what is kept for backward",
                "attention to latents is planned at the rate that was measured with expanded keys and values; where a kernel takes no heads so wide, it is slower",
                lambda spec, _: is_absorbed(spec.model),
            ),
        },
    ),
    **_in(
        "model.moe",
        {
            "balance_bias": _irrelevant("one number for each expert, moved once a step"),
            "score": _irrelevant("one number for each token and expert, for any function"),
            "normalize": _irrelevant("a few numbers for each token"),
            "groups": _irrelevant("each copy of a token is sent to its expert, in any group"),
            "groups_per_token": _irrelevant("each copy of a token is sent to its expert, in any group"),
            "group_score": _irrelevant("a few numbers for each token"),
            **_all("scale bias_speed", _COEFFICIENT),
            **_all("aux_loss z_loss", _irrelevant("a loss of the router's outputs, which are few")),
        },
    ),
}
"""Fields of the model that do not define its shape; all others do."""


def _fields_in(section: type, prefix: str) -> Iterator[str]:
    """Yield the dotted paths of all fields of a section that hold a value, not a section."""
    for name, declared in field_types(section).items():
        types = (declared.plain, *get_args(declared.plain))
        inner = next((each for each in types if isinstance(each, type) and is_dataclass(each)), None)
        yield from [f"{prefix}.{name}"] if inner is None else _fields_in(inner, f"{prefix}.{name}")


_MODEL = {**dict.fromkeys(_fields_in(ModelSpec, "model"), _SHAPE), **_MODEL_EXCEPTIONS}

_TRAINING = {
    **_in(
        "data",
        {
            **_all("path corpus", _WHERE),
            **_all(
                "cache cache_gib read_ahead_mib timeout_s",
                _irrelevant("how samples get to the ranks, which is not planned"),
            ),
            "tokenizer": _noted(
                "the tokenizer {value!r} has a vocabulary of its own, which a plan does not read: it takes "
                "data.vocab_size; set model.vocab_size",
                lambda spec, _: spec.data.tokenizer != "bpe" and not spec.model.vocab_size,
            ),
            "vocab_size": _used("the model's vocabulary where model.vocab_size is 0"),
            "held_out": _irrelevant("which documents are trained on, not how many tokens"),
            **_all(
                "stages sources.name sources.weights sources.use sources.epochs",
                _irrelevant("which tokens are trained on, not how many"),
            ),
            "sources.path": _WHERE,
        },
    ),
    **_in(
        "train",
        {
            "steps": _used("the tokens of the run, where --tokens is not given"),
            **_all("batch_size seq_len", _used("the work of a step")),
            "slots": _own("micro-batches of a reduction, and the most data-parallel ranks"),
            "micro_batch_size": _LAYOUT,
            "reduction": _own("gradients held in a tree, and how often they are reduced"),
            "expert_sums": _noted(
                'with "slot" a rank keeps a set of its experts\' gradients for each slot of a team, where slots have several '
                "micro-batches; the plan counts one set"
            ),
            **_all(
                "on_nonfinite max_skipped on_spike spike_window spike_deviations",
                _irrelevant("a step that is skipped is an exception"),
            ),
            "document_mask": _noted(
                "attention that stops at the ends of documents computes fewer scores; the plan counts those of "
                "whole sequences",
                lambda spec, _: bool(spec.train.document_mask),
            ),
            "end_of_document": _irrelevant("a token's number"),
            "targets_within_documents": _irrelevant("which targets count; logits are computed for all"),
            "loss_chunk": _own("memory of the logits"),
        },
    ),
    **_in(
        "spike",
        _all(
            "candidates fork_steps prefer base_every_steps rate_factor clip_factor most_forks",
            _irrelevant("a fork at a loss spike is an exception"),
        ),
    ),
    **_in(
        "optimizer",
        {
            "name": _own(
                "bytes of the optimizer's state, and the time of an update",
                "eigenvalues and QR decompositions of {value} are counted at the rate of matrix products, which they do not "
                "reach: an update takes longer than planned",
                lambda spec, _: spec.optimizer.name in ("shampoo", "soap"),
            ),
            "state": _own("bytes of the optimizer's state"),
            "beta1": _own("Adafactor's first moment, of which there is none at 0"),
            **_all("lr beta2 eps weight_decay", _COEFFICIENT),
            **_all("decay_norms decay_embeddings", _COEFFICIENT),
            "clip_norm": _irrelevant("the gradient's norm is computed anyway, for the log"),
            "newton_schulz_steps": _own("time of Muon's iterations"),
            "precondition_every": _own("time of new preconditioners of Shampoo and SOAP"),
            "block_size": _own("bytes and time of the preconditioners of Shampoo and SOAP"),
        },
    ),
    **_in("schedule", _all("kind warmup_steps decay_fraction floor", _COEFFICIENT)),
}

_MACHINE = {
    **_in(
        "precision",
        {
            "compute": _used("format of weights, activations and products"),
            "matmul": _used(
                "format of the blocks' products",
                "all 8-bit formats are planned in the same way, for any granularity of scales",
                lambda spec, _: spec.precision.matmul in ("fp8-tensorwise", "mxfp8"),
            ),
            "rows": _noted(
                "up to 3 rows of padding for each expert and slot are not planned",
                lambda spec, _: spec.precision.rows == "independent" and spec.model.moe is not None,
            ),
        },
    ),
    **_in(
        "memory",
        {
            "recompute": _used(
                "activations kept, and work done again",
                'which activations the compiler keeps within a budget is not planned: "budget" is planned as "none", '
                "which keeps all of them, so that memory is an upper bound and time a lower one",
                lambda spec, _: spec.memory.recompute == "budget",
            ),
            "recompute_budget": _noted(
                "a budget of {value} is not planned; compare memory.recompute = none with full",
                lambda spec, _: spec.memory.recompute == "budget",
            ),
            "offload_activations": _used(
                "activations on the accelerator, and their copies to the host",
                "files are planned as the host's memory: the disk must keep up with the link to the host",
                lambda spec, _: spec.memory.offload_activations == "file",
            ),
            "offload_optimizer": _used(
                "optimizer state on the accelerator, and its copies to the host",
                "files are planned as the host's memory: the disk must keep up with the link to the host",
                lambda spec, _: spec.memory.offload_optimizer == "file",
            ),
            "offload_path": _WHERE,
        },
    ),
    **_in(
        "runtime",
        {
            "seed": _irrelevant("which numbers are drawn, not how many"),
            "device": _noted(
                "the plan is for {value}, but the cluster's devices are others: it is the cluster that is planned for",
                lambda spec, cluster: (
                    spec.runtime.device == ("cuda" if cluster.accelerator.vendor == "any" else "cpu")
                ),
            ),
            "threads": _noted(
                "a CPU is planned with the speed that its calibration measured with one thread for each rank",
                lambda spec, cluster: spec.runtime.threads > 1 and cluster.accelerator.vendor == "any",
            ),
            "numerics": _noted(
                "portable numerics are for processors: on this cluster they are planned as native ones",
                lambda spec, cluster: (
                    spec.runtime.numerics == "portable" and cluster.accelerator.vendor != "any"
                ),
            ),
            "mixed_machines": _irrelevant("which machines are accepted; the plan's are all alike"),
            "compile": _own("fused pointwise operations, and which schedules are legal"),
        },
    ),
    **_in(
        "parallel",
        {
            **_all("ranks sharding shard_ranks tensor context pipeline expert expert_tensor", _LAYOUT),
            **_all("pipeline_schedule pipeline_stages", _LAYOUT),
            "async_tensor": _own("how much of the tensor axis's communication is hidden"),
            "context_mode": _own("how keys and values are exchanged"),
            "pipeline_split": _noted(
                "the plan balances stages by cost, and does not take the layers {value} for them"
            ),
        },
    ),
}

_WHOLE_RUN = {
    **_in(
        "checkpoint",
        {
            "every_steps": _used("seconds between saves to storage; 0 leaves them to the assumptions"),
            "hours_between_failures": _irrelevant(
                "the plan's own failure rates are of the cluster's hardware"
            ),
            **_all("keep_last keep_every", _used("checkpoints kept, and what storing them costs")),
            "timeout_s": _irrelevant("when a save counts as failed"),
            **_all(
                "store store_every_steps store_keep_last store_keep_every store_mib_s",
                _irrelevant("copies of checkpoints elsewhere, made beside training"),
            ),
            "init_from": _irrelevant("which weights a run starts from, read once"),
            "init_with": _irrelevant("what of a checkpoint a run starts with, read once"),
        },
    ),
    **_in(
        "evaluation",
        {
            **_all(
                "every_steps sequences",
                _noted(
                    "the time of evaluations during the run is not planned; it is over a hundredth of the training time",
                    lambda spec, _: evaluation_share(spec) > _NOTABLE_EVALUATION,
                ),
            ),
            "keep_best": _irrelevant("which checkpoint is kept"),
            "stop_after": _irrelevant("a plan is of all steps"),
            **_all(
                "tasks.name tasks.path tasks.kind tasks.items", _irrelevant("the time of tasks is in no plan")
            ),
            **_all(
                "samples.name samples.prompt samples.temperature",
                _irrelevant("the time of samples depends on samples.tokens alone"),
            ),
            "samples.tokens": _irrelevant("counted in the note on evaluation.sequences"),
            "final_sequences": _noted(
                "the time of the evaluation after the last step is not planned; it is over a hundredth of the training time, or "
                "of all held-out text, whose length a plan does not know",
                lambda spec, _: final_evaluation_share(spec) > _NOTABLE_EVALUATION,
            ),
        },
    ),
    **_in("sample", _all("prompt tokens temperature", _irrelevant("once, at the end"))),
    **_in("expect", _all("weights", _irrelevant("a comparison at the end"))),
    **_in(
        "observe",
        _all(
            "log_every_steps memory_at_step ranks_every_steps sinks observers log_mib log_files accelerator_hour_price nvtx metrics_port metrics_host",
            _WATCHING,
        ),
    ),
    **_in(
        "statistics",
        {
            "every_steps": _noted(
                "the time of statistics is not planned; with less than 50 steps in between it may be over a hundredth of the training time",
                lambda spec, _: 0 < spec.statistics.every_steps < 50,
            )
        },
    ),
    **_in(
        "fleet",
        {
            "nodes": _used(
                "whether failures are recovered from without a restart",
                "the run file describes no fleet; the cost of failures is planned by --assume recovery, and not as a "
                "manual restart",
                lambda spec, cluster: spec.fleet.nodes == 0 and cluster.accelerators > cluster.per_node,
            ),
            "spares": _used("the way of recovery, and what the spares cost"),
            "snapshot_every_steps": _used("seconds between copies in host memory; 0: recovery from storage"),
            "workers_per_node": _irrelevant("the cluster defines the accelerators of a node"),
            **_all(
                "least_tensor least_context",
                _noted(
                    "a plan does not count steps under a smaller degree, nor check that the larger shares of degree {value} fit"
                ),
            ),
            "halve_first": _irrelevant("which of two degrees falls first on a fleet with too few ranks"),
            "min_nodes": _noted("a plan does not count the time in which fewer than {value} nodes are left"),
            **_all(
                "heartbeat_s lease_s worker_lease_s confirm_s coordinator_lease_s succession_s stall_s",
                _noted(
                    "the time until a failure is noticed is planned from published fleets, not from {value} s"
                ),
            ),
            "audit_every_steps": _noted("the slot that is computed twice every {value} steps is not planned"),
            "health_checks": _irrelevant("before a node takes part"),
            "straggler_window_steps": _irrelevant("times that are measured anyway are compared"),
            "port": _WHERE,
        },
    ),
    **_in(
        "launch",
        {
            **_all(
                "engine hosts partition account qos time_limit constraint reservation exclude gpus_per_node exclusive grace_s container_image "
                "container_mounts pod_patch environment secrets prologue options namespace scheduler topology_label domain_labels resources gpu_resource tolerations "
                "service_account run_as",
                _WHERE,
            ),
            **_all(
                "cluster shares most_lost_ms",
                _irrelevant("`phalanx place` and the start of a job price the nodes that are given"),
            ),
            **_all(
                "unit order", _irrelevant("a plan assumes near nodes; `phalanx place` prices a placement")
            ),
        },
    ),
}

RUN_FIELDS: dict[str, FieldTreatment] = {
    **_all("name run_dir", _WHERE),
    "unfilled": _irrelevant("checked when training starts"),
    **_MODEL,
    **_TRAINING,
    **_MACHINE,
    **_WHOLE_RUN,
}
"""The treatment of every field of the run file, by its dotted path."""

SEARCHED = {
    "train.micro_batch_size": "mbs",
    "parallel.ranks": "gpus",
    "parallel.sharding": "zero",
    "parallel.shard_ranks": "fsdp",
    "parallel.tensor": "tp",
    "parallel.context": "cp",
    "parallel.pipeline": "pp",
    "parallel.pipeline_schedule": "schedule",
    "parallel.pipeline_stages": "vpp",
    "parallel.expert": "ep",
    "parallel.expert_tensor": "etp",
    "memory.recompute": "recompute",
    "memory.offload_activations": "offload_activations",
    "memory.offload_optimizer": "offload_optimizer",
}
"""Fields that a search replaces by its result, each with its name in a condition."""
