"""Rules that span several fields of a run, with the remedy: the model, the batch, checkpoints, the fleet.

The rules of each kind of layer are in its file in ``phalanx.run.kinds``, those of layouts (which degrees fit which model,
batch and number of ranks) in ``phalanx.run.layout``; both are checked from here.
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.run.degrees.smaller import problems_on, smaller_degree_problems
from phalanx.run.factory import is_factory_name
from phalanx.run.kinds import latent_attention, whole_model
from phalanx.run.peers.addresses import AddressError, read_host
from phalanx.run.problems import Problem, divisors_near
from phalanx.run.rules import expected_weights, independent_rows, mixture_rules, portable
from phalanx.run.spec import CheckpointSpec, FleetSpec, ModelSpec, RopeScalingSpec, RunSpec, TrainSpec


def check(spec: RunSpec) -> list[Problem]:
    """All combinations of fields in ``spec`` that are impossible, each with the fields concerned."""
    model = _custom_model(spec) if spec.model.factory else _model(spec.model)
    fleet = _fleet(spec.fleet)
    return [
        *_name(spec.name),
        *_run_dir(spec.run_dir),
        *model,
        *independent_rows.problems(spec),
        *portable.problems(spec),
        *expected_weights.problems(spec),
        *_absorbed(spec),
        *mixture_rules.problems(spec.data),
        *_train(spec.train),
        *_origin(spec.checkpoint),
        *_store(spec.checkpoint),
        *_interval(spec.checkpoint, spec.fleet),
        *_metrics_host(spec.observe.metrics_host),
        *fleet,
        *smaller_degree_problems(spec),
        *problems_on(spec, spec.parallel.ranks),
    ]


def _absorbed(spec: RunSpec) -> Iterator[Problem]:
    """Heads multiply with their own parts of a matrix, which no 8-bit product does."""
    if latent_attention.is_absorbed(spec.model) and spec.precision.matmul != "compute":
        yield Problem(
            "model.mla.absorbed",
            f"absorbed latent attention has no products of 8-bit operands, which precision.matmul = {spec.precision.matmul!r} asks for",
            'set precision.matmul = "compute", or leave this out, so that keys and values are expanded',
            ("precision.matmul",),
        )


def _name(name: str) -> Iterator[Problem]:
    """The run directory is named after the run, below ``runs/``."""
    if name in ("", ".", "..") or "/" in name or not name.isprintable() or len(name) > 100:
        yield Problem(
            "name",
            f"{name[:100]!r} cannot be the name of a folder",
            "up to 100 characters, without slashes; for a run directory elsewhere, set run_dir",
        )


def _run_dir(run_dir: str) -> Iterator[Problem]:
    if "://" in run_dir:
        yield Problem(
            "run_dir",
            f"{run_dir} is a URL, and a run directory is a folder",
            "give a folder, which may be empty, and name the store in checkpoint.store: the run goes on from the newest checkpoint there",
            ("checkpoint.store",),
        )


def _metrics_host(host: str) -> Iterator[Problem]:
    try:
        read_host(host or "::")
    except AddressError as error:
        yield Problem(
            "observe.metrics_host", str(error), "the port is observe.metrics_port", ("observe.metrics_port",)
        )


def _origin(checkpoint: CheckpointSpec) -> Iterator[Problem]:
    if checkpoint.init_with != "weights" and not checkpoint.init_from:
        yield Problem(
            "checkpoint.init_with",
            f'"{checkpoint.init_with}" of no checkpoint',
            "name a run directory or a checkpoint in checkpoint.init_from",
            ("checkpoint.init_from",),
        )


def _interval(checkpoint: CheckpointSpec, fleet: FleetSpec) -> Iterator[Problem]:
    if fleet.audit_every_steps and not checkpoint.every_steps:
        yield Problem(
            "checkpoint.every_steps",
            f"0 chooses steps that need not be audited, and fleet.audit_every_steps = {fleet.audit_every_steps} can go back to audited ones only",
            f"a multiple of {fleet.audit_every_steps}",
            ("fleet.audit_every_steps",),
        )
    if checkpoint.hours_between_failures and checkpoint.every_steps:
        yield Problem(
            "checkpoint.hours_between_failures",
            f"has no part in saving every {checkpoint.every_steps} steps",
            "set checkpoint.every_steps = 0, which chooses the interval by it, or leave it out",
            ("checkpoint.every_steps",),
        )


def _store(checkpoint: CheckpointSpec) -> Iterator[Problem]:
    default = CheckpointSpec()
    for name in ("store_every_steps", "store_keep_last", "store_keep_every", "store_mib_s"):
        if not checkpoint.store and getattr(checkpoint, name) != getattr(default, name):
            yield Problem(
                f"checkpoint.{name}",
                "there is no store that it could be said of",
                "name one in checkpoint.store, or leave this out",
                ("checkpoint.store",),
            )


def _fleet(fleet: FleetSpec) -> Iterator[Problem]:
    """A lease must outlast one heartbeat that is lost, or every node would be declared lost again and again."""
    if fleet.lease_s < 2 * fleet.heartbeat_s:
        yield Problem(
            "fleet.lease_s",
            f"{fleet.lease_s:g} s without a heartbeat, which comes every {fleet.heartbeat_s:g} s, would end a healthy node",
            f"at least {2 * fleet.heartbeat_s:g}, or a smaller fleet.heartbeat_s",
            ("fleet.heartbeat_s",),
        )


def _custom_model(spec: RunSpec) -> Iterator[Problem]:
    """Refuses what a user's own model does not say: Phalanx knows its blocks, but not how they could be divided."""
    model, parallel = spec.model, spec.parallel
    if not is_factory_name(model.factory):
        yield Problem("model.factory", f"{model.factory!r} names no factory", 'write "package.module:name"')
    for path, degree in (
        ("parallel.tensor", parallel.tensor),
        ("parallel.context", parallel.context),
        ("parallel.expert", parallel.expert),
        ("parallel.expert_tensor", parallel.expert_tensor),
    ):
        if degree > 1:
            yield Problem(
                path,
                f"{model.factory} does not say how its blocks are divided over {degree} ranks",
                "set it to 1; a model of your own can be divided over shards and over a pipeline of its blocks",
                ("model.factory",),
            )
    refused = list(whole_model.described_layers(model))
    if spec.train.document_mask:
        refused.append(("train.document_mask", "set it to false: blocks are called with hidden states alone"))
    if spec.precision.matmul != "compute":
        refused.append(("precision.matmul", 'set it to "compute"'))
    for path, remedy in refused:
        found = f"this describes Phalanx's transformer, and {model.factory} is a model of your own"
        yield Problem(path, found, remedy, ("model.factory",))


def _model(model: ModelSpec) -> Iterator[Problem]:
    yield from whole_model.problems(model)
    if model.rope_scaling is not None:
        yield from _rope_scaling(model.rope_scaling)


def _rope_scaling(scaling: RopeScalingSpec) -> Iterator[Problem]:
    if scaling.kind == "llama3" and scaling.high_freq_factor < scaling.low_freq_factor:
        yield Problem(
            "model.rope_scaling.high_freq_factor",
            f"{scaling.high_freq_factor:g} is below low_freq_factor {scaling.low_freq_factor:g}",
            "the band between the two is where frequencies are blended",
            ("model.rope_scaling.low_freq_factor", "model.rope_scaling"),
        )
    if scaling.kind == "longrope" and scaling.original_max_seq_len < 2 and not scaling.temperature:
        yield Problem(
            "model.rope_scaling.original_max_seq_len",
            f"{scaling.original_max_seq_len} gives no temperature",
            "at least 2, or set model.rope_scaling.temperature",
            ("model.rope_scaling.temperature", "model.rope_scaling"),
        )
    if scaling.kind == "yarn" and scaling.beta_fast < scaling.beta_slow:
        yield Problem(
            "model.rope_scaling.beta_fast",
            f"{scaling.beta_fast:g} is below beta_slow {scaling.beta_slow:g}",
            "the band between the two is where frequencies are blended",
            ("model.rope_scaling.beta_slow", "model.rope_scaling"),
        )


def _train(train: TrainSpec) -> Iterator[Problem]:
    if train.batch_size % train.slots:
        yield Problem(
            "train.slots",
            f"a batch of {train.batch_size} sequences cannot be divided into {train.slots} equal slots",
            f"{divisors_near(train.batch_size, train.slots)} divide {train.batch_size}",
            ("train.batch_size",),
        )
        return
    per_slot = train.batch_size // train.slots
    if train.micro_batch_size and per_slot % train.micro_batch_size:
        yield Problem(
            "train.micro_batch_size",
            f"a slot of {per_slot} sequences cannot be divided into micro-batches of {train.micro_batch_size}",
            f"{divisors_near(per_slot, train.micro_batch_size)} divide {per_slot}",
            ("train.slots", "train.batch_size"),
        )
