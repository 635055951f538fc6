"""Rules that span several fields of a run, with the remedy: the model, the batch, checkpoints, the fleet.

The rules of layouts (which degrees fit which model, batch and number of ranks) are in ``phalanx.run.layout``, and are
checked from here.
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.run.factory import is_factory_name
from phalanx.run.layout import divisors_near, layout_problems
from phalanx.run.problems import Problem
from phalanx.run.spec import FleetSpec, MlaSpec, ModelSpec, MoeSpec, RopeScalingSpec, RunSpec, TrainSpec


def check(spec: RunSpec) -> list[Problem]:
    """All combinations of fields in ``spec`` that are impossible, each with the fields concerned."""
    model = _custom_model(spec) if spec.model.factory else _model(spec.model)
    fleet = _fleet(spec.fleet)
    return [
        *_name(spec.name),
        *model,
        *_train(spec.train),
        *fleet,
        *layout_problems(spec, spec.parallel.ranks),
    ]


def _name(name: str) -> Iterator[Problem]:
    """The run directory is named after the run, below ``runs/``."""
    if name in ("", ".", "..") or "/" in name or not name.isprintable() or len(name) > 100:
        yield Problem(
            "name",
            f"{name[:100]!r} cannot be the name of a folder",
            "up to 100 characters, without slashes; for a run directory elsewhere, set run_dir",
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
    for path, wanted, remedy in (
        (
            "model.moe",
            model.moe is not None,
            "leave the table out; the model may hold experts of its own, whole on a rank",
        ),
        ("model.mla", model.mla is not None, "leave the table out"),
        ("model.mtp_depth", model.mtp_depth > 0, "set it to 0"),
        (
            "train.document_mask",
            spec.train.document_mask,
            "set it to false: blocks are called with hidden states alone",
        ),
        ("precision.matmul", spec.precision.matmul != "compute", 'set it to "compute"'),
    ):
        if wanted:
            found = f"this describes Phalanx's transformer, and {model.factory} is a model of your own"
            yield Problem(path, found, remedy, ("model.factory",))


def _model(model: ModelSpec) -> Iterator[Problem]:
    yield from _grouped_heads(model) if model.mla is None else _latent_heads(model, model.mla)
    if model.rope_scaling is not None:
        yield from _rope_scaling(model.rope_scaling, latent=model.mla is not None)
    if model.moe is not None:
        yield from _moe_layers(model, model.moe)
        yield from _routing(model.moe)


def _grouped_heads(model: ModelSpec) -> Iterator[Problem]:
    head_dim = model.head_dim or model.dim // model.heads
    if model.head_dim == 0 and model.dim % model.heads:
        yield Problem(
            "model.heads",
            f"dim {model.dim} is not divisible by {model.heads} heads",
            f"{divisors_near(model.dim, model.heads)} divide it; or give model.head_dim",
            ("model.dim", "model.head_dim"),
        )
    elif head_dim % 2:
        yield Problem(
            "model.head_dim",
            f"a head of {head_dim} elements cannot be rotated in pairs",
            "rotary embeddings need an even head_dim",
            ("model.dim", "model.heads"),
        )
    if model.kv_heads and model.heads % model.kv_heads:
        yield Problem(
            "model.kv_heads",
            f"{model.heads} heads cannot be shared out over {model.kv_heads} key/value heads",
            f"{divisors_near(model.heads, model.kv_heads)} divide {model.heads}",
            ("model.heads",),
        )


def _latent_heads(model: ModelSpec, mla: MlaSpec) -> Iterator[Problem]:
    head_dim = mla.nope_head_dim + mla.rope_head_dim
    if mla.rope_head_dim % 2:
        yield Problem(
            "model.mla.rope_head_dim",
            f"{mla.rope_head_dim} elements cannot be rotated in pairs",
            "it must be even",
        )
    if model.head_dim not in (0, head_dim):
        yield Problem(
            "model.head_dim",
            f"{model.head_dim} is not nope_head_dim + rope_head_dim = {head_dim}",
            "latent attention has widths of its own: set it to 0",
            ("model.mla.nope_head_dim", "model.mla.rope_head_dim"),
        )
    if model.kv_heads not in (0, model.heads):
        yield Problem(
            "model.kv_heads",
            f"latent attention has as many key heads as query heads, {model.heads}",
            "set it to 0",
            ("model.heads", "model.mla"),
        )
    for path, wanted in (("model.qk_norm", model.qk_norm), ("model.attention_bias", model.attention_bias)):
        if wanted:
            yield Problem(path, "latent attention has none", "set it to false", ("model.mla",))


def _rope_scaling(scaling: RopeScalingSpec, *, latent: bool) -> Iterator[Problem]:
    if scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield Problem(
            "model.rope_scaling.high_freq_factor",
            f"{scaling.high_freq_factor:g} is not above low_freq_factor {scaling.low_freq_factor:g}",
            "the band between the two is where frequencies are blended",
            ("model.rope_scaling.low_freq_factor", "model.rope_scaling"),
        )
    if scaling.kind == "yarn" and scaling.beta_fast < scaling.beta_slow:
        yield Problem(
            "model.rope_scaling.beta_fast",
            f"{scaling.beta_fast:g} is below beta_slow {scaling.beta_slow:g}",
            "the band between the two is where frequencies are blended",
            ("model.rope_scaling.beta_slow", "model.rope_scaling"),
        )
    if scaling.kind == "yarn" and scaling.mscale_all_dim and not latent:
        yield Problem(
            "model.rope_scaling.mscale_all_dim",
            "only latent attention has a temperature in its softmax",
            "set it to 0, or describe [model.mla]",
            ("model.mla", "model.rope_scaling"),
        )


_ALIGNED = 8  # elements: grouped matrix products take rows of whole 16 bytes, also in bf16


def _moe_layers(model: ModelSpec, moe: MoeSpec) -> Iterator[Problem]:
    if moe.first_dense + moe.every > model.layers:
        yield Problem(
            "model.moe.first_dense",
            f"of {model.layers} layers, {moe.first_dense} dense first and then one in {moe.every}: no layer is a mixture",
            f"first_dense + every must be at most {model.layers}",
            ("model.moe.every", "model.layers"),
        )
    if model.ffn_bias:
        yield Problem("model.ffn_bias", "experts have no biases", "set it to false", ("model.moe",))
    for path, width in (("model.dim", model.dim), ("model.moe.ffn_dim", moe.ffn_dim or model.ffn_dim)):
        if width % _ALIGNED:
            yield Problem(
                path,
                f"{width} elements of an expert's matrix are no whole number of 16 bytes",
                f"it must be a multiple of {_ALIGNED}",
                ("model.moe", "model.ffn_dim"),
            )


def _routing(moe: MoeSpec) -> Iterator[Problem]:
    if moe.experts % moe.groups:
        yield Problem(
            "model.moe.groups",
            f"{moe.experts} experts cannot be divided into {moe.groups} groups",
            f"{divisors_near(moe.experts, moe.groups)} divide {moe.experts}",
            ("model.moe.experts",),
        )
        return
    if moe.groups > 1 and moe.experts // moe.groups < 2:
        yield Problem(
            "model.moe.groups",
            "groups of one expert cannot be judged by their two best",
            f"at most {moe.experts // 2} groups",
            ("model.moe.experts",),
        )
    if moe.groups_per_token > moe.groups:
        yield Problem(
            "model.moe.groups_per_token",
            f"a token cannot choose {moe.groups_per_token} of only {moe.groups} groups",
            f"at most {moe.groups}",
            ("model.moe.groups",),
        )
        return
    open_experts = moe.experts // moe.groups * moe.groups_per_token
    if moe.per_token > open_experts:
        yield Problem(
            "model.moe.per_token",
            f"a token cannot be sent to {moe.per_token} of {open_experts} experts",
            f"at most {open_experts}" + (", or more groups_per_token" if moe.groups > 1 else ""),
            ("model.moe.experts", "model.moe.groups", "model.moe.groups_per_token"),
        )
    if moe.per_token == 1 and moe.normalize:
        yield Problem(
            "model.moe.normalize",
            "the score of a single expert, scaled to sum to one, is always one: the router would learn nothing",
            "set it to false, or per_token above 1",
            ("model.moe.per_token",),
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
