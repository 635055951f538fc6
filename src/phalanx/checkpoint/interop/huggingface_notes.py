"""Notes on a ``config.json`` that is imported, or written: what it says and this project does not do, in a sentence each.

Whatever changes the logits is refused (``huggingface_config.py``). The rest is read past, as ``transformers`` reads past what its
own class does not know, but never in silence: a publisher's own code might have used it.
"""

from phalanx.checkpoint.interop.huggingface_families import FAMILIES
from phalanx.run.section_reader import JsonObject
from phalanx.run.spec import ModelSpec

LATENT_EPS = 1e-6
"""The epsilon of the norms of attention's latents in ``transformers``, whatever ``rms_norm_eps`` is."""

_LAYER_CHOICE = ("decoder_sparse_step", "mlp_only_layers", "layer_types", "max_window_layers")
_ROTARY = ("rope_parameters", "rope_scaling", "rope_theta", "rope_interleave", "partial_rotary_factor")
_CONTEXT = ("max_position_embeddings", "original_max_position_embeddings")
TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_STORAGE = (
    "dtype",
    "torch_dtype",
    "quantization_config",
    "transformers_version",
    "architectures",
    "model_type",
)
# How transformers runs any model, and what it writes into every config.json; it says nothing of the mathematics.
_RUNNING = (
    *(
        "use_cache",
        "pretraining_tp",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
    ),
    *(
        "output_router_logits",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "id2label",
        "label2id",
        "ep_size",
    ),
    *("hidden_act", "use_sliding_window", "sliding_window", "attn_implementation", "tokenizer_class"),
)
_NOTED = (
    "auto_map",
    "attention_dropout",
    "residual_dropout",
    "router_aux_loss_coef",
    "aux_loss_alpha",
    "seq_aux",
)
_KNOWN = frozenset((*_LAYER_CHOICE, *_ROTARY, *_CONTEXT, *TOKEN_FIELDS, *_STORAGE, *_RUNNING, *_NOTED))
_DERIVED = ("head_dim", "qk_head_dim", "num_key_value_heads", "num_local_experts", "num_mtp_layers")
_KNOWN_ROTARY = frozenset(
    (
        *(
            "rope_type",
            "type",
            "rope_theta",
            "factor",
            "original_max_position_embeddings",
            "partial_rotary_factor",
        ),
        *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        *("attention_factor", "truncate"),
    )
)


def import_notes(hf_config: JsonObject, spec: ModelSpec) -> tuple[str, ...]:
    """The parts of a ``config.json`` that the model ``spec``, read from it, leaves aside."""
    family = FAMILIES[str(hf_config["model_type"])]
    known = _KNOWN | {*family.fields.values(), *family.aliases.values(), *family.constants, *family.own}
    if "mla" in family.sections:
        known |= {*_DERIVED}
    notes = []
    if hf_config.get("auto_map"):
        notes.append(
            f"auto_map: the publisher's own code is not run; the model is computed as {family.model_type}"
        )
    unknown = sorted(key for key in hf_config if key not in known and not key.startswith("_"))
    if unknown:
        notes.append(f"not known here, and left aside: {', '.join(unknown)}")
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    strange = sorted(key for key in rope if key not in _KNOWN_ROTARY)
    if strange:
        notes.append(
            f"not known here of the rotary embedding's parameters, and left aside: {', '.join(strange)}"
        )
    for key in ("router_aux_loss_coef", "aux_loss_alpha"):
        if hf_config.get(key):
            notes.append(
                f"{key} = {hf_config[key]} weighs another loss than model.moe.aux_loss, which is 0 in the imported run: set it "
                "to train with a load-balancing loss"
            )
    for key in ("attention_dropout", "residual_dropout"):
        if hf_config.get(key):
            notes.append(f"{key} = {hf_config[key]}: training here has no dropout")
    if spec.mla is not None and spec.norm_eps != LATENT_EPS:
        notes.append(
            f"rms_norm_eps = {spec.norm_eps:g} holds for the norms of attention's latents too; transformers has "
            f"{LATENT_EPS:g} there whatever config.json says"
        )
    return tuple(notes)


def export_notes(spec: ModelSpec) -> tuple[str, ...]:
    """The differences between what readers of an exported model compute and what this project does."""
    if spec.mla is None or spec.norm_eps == LATENT_EPS:
        return ()
    return (
        f"the norms of attention's latents have model.norm_eps = {spec.norm_eps:g} here and {LATENT_EPS:g} in transformers: "
        "its logits differ a little, the more the smaller the latents are",
    )
