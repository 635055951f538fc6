"""Published scaling laws: the loss of a model by parameters and training tokens, as typed constants with their sources.

A law predicts nats a token on the text of its own paper, with the paper's tokenizer. Losses of one law compare with each other; losses of
two laws do not, while their optimal sizes and tokens do. Constants marked "checked" were read in the paper's text or in
two independent transcriptions of its table on 2026-11-23; "recalled" ones are from memory, without a source.

Two things are called N. Dense laws here count all parameters, embedding included (Kaplan et al.: without it). Laws of mixtures
count the active parameters of a token.

``RepeatedData`` is a loss surface on ``unique_tokens`` of text that is read again when it ends.
Muennighoff et al. 2023 (arXiv:2305.16264), equations 5 and 6: the n-th reading of a token is worth less, and so is a parameter beyond
those that the unique text can fill. Both decay exponentially; the constants (R*_D, R*_N of appendix A) were checked on 2026-11-23.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

PF_DAY_FLOPS = 8.64e19
"""FLOP of a petaflop-day, the unit of compute of Kaplan et al."""


@dataclass(frozen=True)
class PowerLaw:
    """Loss L(N, D) = floor + a / N^alpha + b / D^beta (Hoffmann et al. 2022, arXiv:2203.15556, equation 2), in nats a token."""

    floor: float
    a: float
    alpha: float
    b: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the predicted loss; infinite without parameters or tokens."""
        if parameters <= 0 or tokens <= 0:
            return math.inf
        return float(self.floor + self.a * parameters**-self.alpha + self.b * tokens**-self.beta)

    def optimum(self, flops: float) -> tuple[float, float]:
        """Return the parameters and tokens of the least loss with 6ND = ``flops``, in closed form (Hoffmann et al., equation 4)."""
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        parameters = ratio * (flops / 6) ** (self.beta / (self.alpha + self.beta))
        return parameters, flops / 6 / parameters

    def optimal_size(self, tokens: float) -> float:
        """Return the number of parameters whose optimal training takes ``tokens``: both terms have equal slopes along 6ND there."""
        return float(
            (self.alpha * self.a / (self.beta * self.b)) ** (1 / self.alpha)
            * tokens ** (self.beta / self.alpha)
        )


@dataclass(frozen=True)
class StandardErrors:
    """Published standard errors of a power law, and the run around which its terms turn.

    ``a`` and ``alpha`` are not independent: both come from the same term, which the runs determine at their middle. Published errors of
    ``a`` alone mean little, and the correlation is not published. As this project's choice, ``alpha`` turns the term about the middle run.
    """

    floor: float
    alpha: float
    beta: float
    middle_parameters: float
    middle_tokens: float

    def of_loss(self, law: PowerLaw, parameters: float, tokens: float) -> float:
        """Return the standard error of the loss, to first order, with independent errors of the three terms."""
        size = law.a * parameters**-law.alpha * math.log(parameters / self.middle_parameters)
        data = law.b * tokens**-law.beta * math.log(tokens / self.middle_tokens)
        return math.hypot(self.floor, self.alpha * size, self.beta * data)

    def turned(self, law: PowerLaw, alpha_errors: float, beta_errors: float) -> PowerLaw:
        """Return the law with its exponents changed by so many standard errors; it keeps its values at the middle of the fitted runs."""
        alpha, beta = law.alpha + alpha_errors * self.alpha, law.beta + beta_errors * self.beta
        return replace(
            law,
            alpha=alpha,
            beta=beta,
            a=law.a * self.middle_parameters ** (alpha - law.alpha),
            b=law.b * self.middle_tokens ** (beta - law.beta),
        )


class LossSurface(Protocol):
    """A law that gives a loss for every size and number of tokens."""

    def loss(self, parameters: float, tokens: float) -> float:
        """Return nats a token."""


@dataclass(frozen=True)
class Source:
    """The origin of a law's constants."""

    citation: str
    constants: str
    """The table or equation, and whether the constants were checked or are recalled."""
    largest_flops: float
    """Approximate 6ND of the largest run that the law was fitted to."""


SurfaceT = TypeVar("SurfaceT", bound=LossSurface, covariant=True)


@dataclass(frozen=True)
class PublishedLaw(Generic[SurfaceT]):
    """A published law of dense models, or of mixtures at one number of experts."""

    key: str
    law: SurfaceT
    source: Source

    def loss(self, parameters: float, tokens: float) -> float:
        """Return nats a token; of mixtures by active parameters."""
        return self.law.loss(parameters, tokens)


_LARGEST_HOFFMANN = 3e22
"""Recalled: the largest curves of Hoffmann et al. are of about 10^22 FLOP, and single runs (16 B parameters) somewhat beyond."""

CHINCHILLA = PublishedLaw(
    "chinchilla-refit",
    PowerLaw(floor=1.8172, a=482.01, alpha=0.3478, b=2085.43, beta=0.3658),
    Source(
        "Besiroglu et al. 2024 (arXiv:2404.10102), a refit of Hoffmann et al.'s runs",
        "table 1, with standard errors: checked",
        _LARGEST_HOFFMANN,
    ),
)
"""The default: the corrected fit of Chinchilla's third approach, which agrees with its first two."""
# Runs of 70 M to 16 B parameters and 5 B to 500 B tokens: their geometric means.
CHINCHILLA_ERRORS = StandardErrors(
    floor=0.03, alpha=0.02, beta=0.02, middle_parameters=1.06e9, middle_tokens=5e10
)
"""The standard errors of ``CHINCHILLA``; the other papers state no usable ones."""

HOFFMANN = PublishedLaw(
    "chinchilla-printed",
    PowerLaw(floor=1.6934, a=406.4, alpha=0.3392, b=410.7, beta=0.2849),
    Source(
        "Hoffmann et al. 2022 (arXiv:2203.15556), approach 3",
        "equation 10, exponents unrounded as in the paper's TeX source: checked; its fit had not converged (arXiv:2404.10102)",
        _LARGEST_HOFFMANN,
    ),
)

MUENNIGHOFF = PublishedLaw(
    "c4",
    PowerLaw(math.exp(0.6254804), math.exp(6.255414), 0.3526596, math.exp(7.3049974), 0.3526596),
    Source(
        "Muennighoff et al. 2023 (arXiv:2305.16264), the one-epoch law on C4",
        "appendix A, equation 17: checked",
        5e21,
    ),
)

DENSE_LAWS = (CHINCHILLA, HOFFMANN, MUENNIGHOFF)


@dataclass(frozen=True)
class Allocation:
    """Kaplan et al.'s optimal size for compute: a fit of the optimum alone, with no surface around it."""

    key: str
    source: Source

    def optimum(self, flops: float) -> tuple[float, float]:
        """Return the parameters without the embedding, and the tokens that use up ``flops`` at 6ND."""
        parameters = 1.3e9 * (flops / PF_DAY_FLOPS) ** 0.73
        return parameters, flops / 6 / parameters


KAPLAN = Allocation(
    "kaplan",
    Source(
        "Kaplan et al. 2020 (arXiv:2001.08361)",
        "table 6, N = 1.3e9 C^0.73 with C in PF-days: checked; superseded by Hoffmann et al., whose sizes are smaller",
        1e3 * PF_DAY_FLOPS,
    ),
)


def transformed_experts(experts: float, start: float, most: float) -> float:
    """Return Clark et al.'s saturating number of experts (arXiv:2202.01169, equation 4): ``start`` for a dense model, at most ``most``."""
    return 1 / (1 / (experts - 1 + 1 / (1 / start - 1 / most)) + 1 / most)


def joint_power_law(experts: float) -> PowerLaw:
    """Return the law of Ludziejewski et al. 2025 (arXiv:2502.05172), equation 6 and table 4: dense models and mixtures in one law, by active
    parameters and tokens.

    ``experts`` is the ratio of all feed-forward parameters to a token's: 32 if each token uses 8 of 256 experts. 1 is a dense model.
    """
    log_experts = math.log(transformed_experts(experts, 2.0732, 290.4521))
    return PowerLaw(
        floor=1.3637,
        a=35.91 * math.exp(-0.2285 * log_experts),
        alpha=0.1889 - 0.0098 * log_experts,
        b=35.98 * math.exp(0.5529 * log_experts),
        beta=0.1775 + 0.0259 * log_experts,
    )


@dataclass(frozen=True)
class RoutedLaw:
    """Clark et al. 2022 (arXiv:2202.01169), equation 1 and table 3 (S-BASE), joined to a dense law's term of tokens.

    All runs of the paper used 130 B tokens, so that it has no optimum. A mixture is as good as a dense model of its *effective* size;
    that size is put into ``dense``. Joining the two is this project's choice.
    """

    experts: float
    dense: PowerLaw = CHINCHILLA.law

    def effective_parameters(self, parameters: float) -> float:
        """Return the size of the equally good dense model, by equation 11; never less than ``parameters``, since the law has no gain beyond 10^12."""
        start, most = 1.847, 314.478
        of_dense = math.log10(transformed_experts(1, start, most))
        of_mixture = math.log10(transformed_experts(self.experts, start, most))
        size = math.log10(parameters)
        slope = -0.082 + 0.009 * of_dense
        effective = ((-0.082 + 0.009 * of_mixture) * size - 0.108 * (of_mixture - of_dense)) / slope
        return float(10 ** max(effective, size))

    def loss(self, parameters: float, tokens: float) -> float:
        """Return nats a token by active parameters."""
        return self.dense.loss(self.effective_parameters(parameters), tokens)


def joint_law(experts: float) -> PublishedLaw[PowerLaw]:
    """Return the joint law of dense models (``experts`` 1) and mixtures; fitted up to 32 experts, one for each token."""
    source = Source(
        "Ludziejewski et al. 2025 (arXiv:2502.05172)",
        "tables 3 and 4: checked; of experts as large as a dense layer, at most 32, at most 2.7 B active parameters",
        6.0e20,
    )
    return PublishedLaw("joint", joint_power_law(experts), source)


def routed_law(experts: float) -> PublishedLaw[RoutedLaw]:
    """Return the default law of mixtures: the gain of experts by Clark et al., in the dense law that was fitted to the largest runs."""
    source = Source(
        "Clark et al. 2022 (arXiv:2202.01169), effective size in the dense law",
        "table 3, S-BASE: checked in a transcription; all its runs saw 130 B tokens; largest run recalled",
        1e21,
    )
    return PublishedLaw("routed", RoutedLaw(experts), source)


# The paper's N is all parameters without the embedding; a token of its models uses one in 43 of them (12 of 516 squares of the width in
# each layer, its section on parameters: recalled). The term here is of active parameters.
FINE_GRAINED = PublishedLaw(
    "fine-grained",
    PowerLaw(floor=0.47, a=(18.1 + 2.1 * 8.0**-0.58) * (516 / 12) ** -0.115, alpha=0.115, b=30.8, beta=0.147),
    Source(
        "Krajewski et al. 2024 (arXiv:2402.07871)",
        "the fit of its main table, at granularity 8 and 64 experts whatever the model has: checked in a transcription",
        1e21,
    ),
)
"""Mixtures of 64 times the feed-forward parameters, cut into eight parts (the paper's granularity)."""


def mixture_laws(experts: float) -> tuple[PublishedLaw[LossSurface], ...]:
    """Return the laws of mixtures with ``experts`` times a token's feed-forward parameters; the first is the default.

    None was fitted to runs of more than about 10^21 FLOP. The smallest runs decide the exponents of the joint and the fine-grained law. Far
    beyond, they give far larger models on far fewer tokens than current practice: they are for comparison.
    """
    return routed_law(experts), joint_law(experts), FINE_GRAINED


# Repeated data.


REPEATS = 15.387756
"""R*_D: after so many repetitions a further one is worth 1/e of a first reading."""
EXCESS = 5.309743
"""R*_N: the same for parameters, in multiples of those that the unique text fills."""


def effective(unique: float, amount: float, decay: float) -> float:
    """Return the worth of ``amount``, of which ``unique`` is new: all of it up to ``unique``, at most ``(1 + decay) * unique``."""
    if amount <= unique:
        return amount
    return unique * (1 + decay * -math.expm1(-(amount / unique - 1) / decay))


@dataclass(frozen=True)
class RepeatedData:
    """A law on limited text. For the available tokens, and the size that suits them, it is the law itself."""

    surface: LossSurface
    unique_tokens: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Return nats a token after ``tokens`` tokens, of which at most ``unique_tokens`` are new.

        Repeated tokens, and parameters beyond the optimum of the unique ones, count less (Muennighoff et al. 2023).
        """
        # The size that the unique text fills is that of the law that the constants were fitted with.
        filled = MUENNIGHOFF.law.optimal_size(self.unique_tokens)
        worth = effective(filled, parameters, EXCESS)
        return self.surface.loss(worth, effective(self.unique_tokens, tokens, REPEATS))
