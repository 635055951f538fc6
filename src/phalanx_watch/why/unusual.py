"""Fields of the run file and text that are far from what runs have, and clipping that decides the size of each step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from phalanx.observe.events import Evaluated, Step
from phalanx.run.fields import ValueRange
from phalanx.run.identity import all_fields
from phalanx.run.spec import RunSpec
from phalanx_watch.why import observed as o
from phalanx_watch.why.numbers import diverged, not_learning, spike

_SYMPTOMS = (diverged, not_learning, spike)


@dataclass(frozen=True)
class UsualField:
    """The values of a field in published runs, with a wide margin."""

    path: str
    values: ValueRange
    outside: str
    """Consequence of a value outside of them."""
    off: float | None = None
    """Value that switches it off."""
    needs: tuple[str, object] | None = None
    """Field and value without which it has no effect."""

    def is_outside(self, values: Mapping[str, object], factor: float = 1.0) -> bool:
        """Return True if the field is more than ``factor`` times outside of its usual values, and has an effect."""
        value = values.get(self.path)
        if not isinstance(value, int | float) or value == self.off:
            return False
        if self.needs is not None and values.get(self.needs[0]) != self.needs[1]:
            return False
        least, most = self.values.at_least, self.values.at_most
        return (least is not None and value * factor < least) or (most is not None and value > most * factor)

    def sentence(self, values: Mapping[str, object]) -> str:
        """Return the value, the usual ones and the consequence."""
        return f"{self.path} = {values[self.path]:g}, where {self.values} is usual: {self.outside}"


_RATE = "updates of this size suit another implementation, whose optimizer scales them otherwise"
_WSD = ("schedule.kind", "wsd")
USUAL_FIELDS = (
    UsualField("optimizer.lr", ValueRange(at_least=1e-7, at_most=1e-2), _RATE),
    UsualField(
        "optimizer.eps",
        ValueRange(at_most=1e-5),
        "it outweighs the root of the second moment, so that updates shrink with the gradients as in plain gradient descent",
    ),
    UsualField("optimizer.beta1", ValueRange(at_most=0.99), "the update is a mean of hundreds of steps"),
    UsualField(
        "optimizer.weight_decay",
        ValueRange(at_most=2),
        "a step multiplies the weights by 1 - lr x weight_decay: they shrink faster than gradients build them",
    ),
    UsualField("optimizer.clip_norm", ValueRange(at_least=0.1), "every gradient is scaled down to it", off=0),
    UsualField(
        "schedule.decay_fraction",
        ValueRange(at_least=0.02),
        "the rate never decays, and the last fall of the loss is missing",
        needs=_WSD,
    ),
    UsualField("schedule.floor", ValueRange(at_most=0.5), "the rate hardly decays"),
    UsualField(
        "model.init_std",
        ValueRange(at_least=5e-4, at_most=0.15),
        "the first logits are far from even, or all layers begin alike",
    ),
    UsualField(
        "model.logit_cap",
        ValueRange(at_least=10),
        "no token can get a probability near 1, which bounds the loss from below",
        off=0,
    ),
    UsualField("model.score_cap", ValueRange(at_least=10), "attention cannot pick out a single token", off=0),
    UsualField("model.norm_eps", ValueRange(at_most=1e-3), "small activations are not normalized"),
    UsualField(
        "model.rope_theta",
        ValueRange(at_least=500, at_most=1e9),
        "positions are hardly told apart",
    ),
    UsualField("model.mtp_loss", ValueRange(at_most=1), "predictions ahead outweigh the next token"),
    UsualField(
        "model.moe.aux_loss",
        ValueRange(at_most=0.2),
        "it outweighs the loss of the text: routing becomes even, and means nothing",
    ),
    UsualField("model.moe.z_loss", ValueRange(at_most=0.1), "it outweighs the loss of the text"),
    UsualField(
        "model.moe.bias_speed",
        ValueRange(at_most=0.05),
        "the bias overshoots: the busiest expert changes with each step",
        needs=("model.moe.balance_bias", True),
    ),
)
"""``optimizer.eps`` of RoBERTa is 1e-6 and of Llama 1e-5; Gemma 2 caps scores at 50 and logits at 30; the Switch Transformer has an auxiliary
loss of 0.01, ST-MoE a z-loss of 0.001, DeepSeek-V3 a bias speed of 0.001. BERT's and GPT-2's initial weights have 0.02, DeepSeek-V3's 0.006."""


def unusual_fields(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield one reason for all fields that no usual run has: info, or a warning if one is ``FAR_OFF``, each step is clipped, or the loss shows it.

    Also of a finished run.
    """
    if observed.spec is None or observed.last_step is None:
        return
    values = {path: value for path, (value, _) in all_fields(observed.spec)}
    outside = [field for field in USUAL_FIELDS if field.is_outside(values)]
    lines = {field.path: field.sentence(values) for field in outside} | _short_sight(observed.spec)
    clipped = _clipped(observed, observed.spec)
    if clipped:
        lines["optimizer.clip_norm"] = clipped
    if not lines:
        return
    is_harmful = (
        bool(clipped)
        or any(field.is_outside(values, o.FAR_OFF) for field in outside)
        or any(reason.severity != "info" for rule in _SYMPTOMS for reason in rule(observed))
    )
    defaults = {path: value for path, (value, _) in all_fields(RunSpec())}
    listed = list(lines)[: o.MOST_UNUSUAL]
    changes = " ".join(f"--set {path}={defaults.get(path, '...')}" for path in listed)
    yield o.Reason(
        code="unusual-fields",
        severity="warning" if is_harmful else "info",
        title=f"Unusual in this run: {', '.join(lines)}",
        where="the run file",
        since=observed.began_at,
        evidence=tuple(lines[path] for path in listed),
        doing=observed.doing("training continues with them"),
        next=f"if they are not meant, the defaults in a run of its own: phalanx train RUN_FILE {changes}",
    )


_OTHER_ROLES = frozenset({"user", "human", "prompter", "system"})


def unusual_text(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield one reason for all that is unusual in the first samples, as the newest start recorded them: text that repeats itself, a loss on the
    wrong tokens, markup, or another encoding or language than the tokenizer's. Also of a finished run."""
    facts = observed.started.environment.get("first_samples") if observed.started else None
    lines = [*_unusual_samples(facts if isinstance(facts, dict) else {}), *_unfit_tokenizer(observed)]
    if not lines:
        return
    yield o.Reason(
        code="unusual-text",
        title=f"Unusual in the training text: {'; '.join(title for title, _ in lines)}",
        where="the training data",
        since=observed.began_at,
        evidence=tuple(sentence for _, sentence in lines),
        doing=observed.doing("training continues"),
        next=f"phalanx data show {observed.run} --step 1 (are these the texts that you mean?); prepare them again: phalanx data prepare",
    )


def _unusual_samples(facts: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield title and sentence of each unusual figure of the first samples."""

    def share(name: str) -> float:
        value = facts.get(name)
        return float(value) if isinstance(value, int | float) else math.nan

    first = f"of the first {facts.get('samples')} samples"
    if share("repeated") >= o.REPEATED_SHARE:
        yield (
            "it repeats itself",
            f"{share('repeated'):.0%} of the stretches of 32 tokens {first} are in an earlier one too: a small source that is read again, or copies of "
            "documents, perhaps with other headers, which the held-out text may have as well ([dedup] of a recipe removes near copies)",
        )
    if share("held_out_repeated") >= o.REPEATED_SHARE:
        yield (
            "held-out text is trained on",
            f"{share('held_out_repeated'):.0%} of the stretches of 32 tokens in the first held-out samples are in the first {facts.get('samples')} of training "
            "too: the held-out loss measures memory (near copies; --hold-out-by text, or [dedup])",
        )
    if share("ends_learned") <= o.FEW_SPANS and share("next_special") >= o.MOST_SPANS:
        yield (
            "the end of an answer is not learned",
            f"{share('next_special'):.0%} of the learned spans are followed by a special token without a loss, and none ends with one: the model never "
            "learns to stop; put the end token inside of {% generation %} in the chat template",
        )
    if facts.get("role") in _OTHER_ROLES and share("role_share") >= o.MOST_SPANS:
        yield (
            "the loss is on the wrong side",
            f"{share('role_share'):.0%} of the learned spans follow the word {facts.get('role')!r}: put {{% generation %}} of the chat template around the "
            "answers of the assistant",
        )
    if share("json_lines") >= o.JSON_SHARE:
        yield (
            "it is JSON",
            f"{share('json_lines'):.0%} of the lines {first} begin with an object of JSON: keys and escapes are learned (--text-field names the text)",
        )
    if share("doubly_encoded") >= o.DOUBLY_ENCODED:
        yield (
            "it is encoded twice",
            f"{share('doubly_encoded'):.0%} of the characters beyond ASCII {first} are UTF-8 that was read as Latin-1 (such as \u00c3\u00a9 for \u00e9)",
        )


def _unfit_tokenizer(observed: o.Observed) -> Iterator[tuple[str, str]]:
    """Yield title and sentence on a tokenizer with a large vocabulary whose tokens have hardly more than a byte of this text."""
    evaluated = observed.newest(Evaluated)
    vocabulary = observed.spec.model.vocab_size if observed.spec else 0
    if evaluated is None or not evaluated[1].bits_per_byte or vocabulary < o.LARGE_VOCABULARY:
        return
    per_token = evaluated[1].loss / math.log(2) / evaluated[1].bits_per_byte
    if per_token < o.BYTES_PER_TOKEN:
        yield (
            "the tokenizer does not suit it",
            f"a token has {per_token:.2g} bytes of text, with a vocabulary of {vocabulary:,}: it was trained on another language or kind of text; a loss "
            "per token looks low, bits per byte do not",
        )


def _short_sight(spec: RunSpec) -> dict[str, str]:
    """Return a sentence on windows of attention that hide most of each sequence in all layers, by path; empty without."""
    model = spec.model
    reach = model.layers * model.window
    if set(model.attention_pattern) != {"window"} or reach >= spec.train.seq_len:
        return {}
    return {
        "model.window": f"model.window = {model.window} in all {model.layers} layers: no token sees farther back than {reach:,} of the "
        f"{spec.train.seq_len:,} tokens of a sequence"
    }


def _clipped(observed: o.Observed, spec: RunSpec) -> str:
    """Return a sentence on a limit of the gradient norm that every logged step after the warmup exceeds, most by far; empty if there is none."""
    limit, warmup = spec.optimizer.clip_norm, spec.schedule.warmup_steps
    norms = [step.grad_norm for _, step in o.of_kind(Step, observed.all_events) if step.step > warmup]
    if len(norms) < o.RECENT_STEPS or not 0 < limit < min(norms) or median(norms) < o.CLIPPED * limit:
        return ""
    return (
        f"optimizer.clip_norm = {limit:g}, and all of {len(norms):,} logged steps after the warmup were clipped: their gradient norm is {median(norms):.3g} "
        f"in the median, {median(norms) / limit:.0f} times as large, so that each batch weighs alike and optimizer.eps counts"
    )
