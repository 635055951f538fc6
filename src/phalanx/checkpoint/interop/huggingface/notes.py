"""Notes on a ``config.json`` that is imported, or written: what it says and this project does not do, in a sentence each.

Whatever changes the logits is refused (``config.py``). The rest is read past, as ``transformers`` reads past what its
own class does not know, but never in silence: a publisher's own code might have used it.
"""

from phalanx.checkpoint.interop.huggingface.families.known import FAMILIES
from phalanx.checkpoint.interop.huggingface.layers import LATENT_EPS
from phalanx.run.fields import JsonObject
from phalanx.run.spec import ModelSpec

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
    "resid_pdrop",
    "embd_pdrop",
    "router_aux_loss_coef",
    "aux_loss_alpha",
    "seq_aux",
)
_KNOWN = frozenset((*_LAYER_CHOICE, *_ROTARY, *_CONTEXT, *TOKEN_FIELDS, *_STORAGE, *_RUNNING, *_NOTED))
_DERIVED = ("head_dim", "qk_head_dim", "num_key_value_heads", "num_local_experts", "num_mtp_layers")
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
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
        *("attention_factor", "truncate", "short_factor", "long_factor"),
    )
)


def import_notes(hf_config: JsonObject) -> tuple[str, ...]:
    """The parts of a ``config.json`` that the model read from it leaves aside."""
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
    by_layer = _LAYER_TYPES if "window_rope_theta" in family.said else frozenset[str]()
    strange = sorted(rope.keys() - _KNOWN_ROTARY - by_layer)
    if strange:
        notes.append(
            f"not known here of the rotary embedding's parameters, and left aside: {', '.join(strange)}"
        )
    if (
        "window" not in family.said
        and hf_config.get("sliding_window")
        and hf_config.get("use_sliding_window", True)
    ):
        notes.append(
            f"sliding_window = {hf_config['sliding_window']}: {family.model_type} has no window, in transformers neither; left aside"
        )
    for key in ("router_aux_loss_coef", "aux_loss_alpha"):
        if hf_config.get(key):
            notes.append(
                f"{key} = {hf_config[key]} weighs another loss than model.moe.aux_loss, which is 0 in the imported run: set it "
                "to train with a load-balancing loss"
            )
    for key in ("attention_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop"):
        if hf_config.get(key):
            notes.append(f"{key} = {hf_config[key]}: training here has no dropout")
    return tuple(notes)


def export_notes(spec: ModelSpec) -> tuple[str, ...]:
    """The differences between what readers of an exported model compute and what this project does."""
    eps = LATENT_EPS if spec.mla is None else spec.mla.norm_eps or spec.norm_eps
    if eps == LATENT_EPS:
        return ()
    return (
        f"the norms of attention's latents have an epsilon of {eps:g} here and {LATENT_EPS:g} in transformers: "
        "its logits differ a little, the more the smaller the latents are",
    )
