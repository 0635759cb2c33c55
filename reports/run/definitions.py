"""What each number of a report is: the formula and, where a reader may stumble, what it does not say."""

from dataclasses import dataclass

from analysis.storage.files import EXPERTS, EXTREMES, LAYERS, NEURONS
from reports.columns import meanings


@dataclass(frozen=True)
class Definition:
    """One entry of the section on method.

    Attributes:
        names: the columns it explains.
        formula: in the notation of ``NOTATION``.
        text: one or two sentences.
    """

    names: str
    formula: str
    text: str


NOTATION = (
    "x is the input of the MLP after its norm; neuron j has the query q (gate row), the key k (up row) and the value v "
    "(down column); a = ⟨q, x⟩, b = ⟨k, x⟩, plus biases where there are any; σ is the gate activation, h = g(a, b) the "
    "unit, which is σ(a)·b unless the acceptance block says otherwise, w = ‖v‖² the weight of a neuron. Σ runs over "
    "counted tokens; for a layer also over neurons, weighted by w, as one ratio of sums and never as a mean of ratios."
)
ASYMMETRY = Definition(
    "asymmetry of two versions f, f′",
    "A(f, f′) = Σ(f − f′)² / 2(Σf² + Σf′²)",
    "0: nothing changes. 0.5: as different as two unrelated signals of equal energy. 1: the sign turns.",
)
DEFINITIONS = (
    ASYMMETRY,
    Definition(
        "exchange",
        "A(g(a, b), g(b, a))",
        "Gate and up pre-activations change places. It depends on the length and side of k, which the model never sees.",
    ),
    Definition(
        "exchange_balanced",
        "A(g(a, βb)/β, g(βb, a)/β) with β = ±‖q‖/‖k‖",
        "Exchange after k is brought to the length of q and to its side (cos(q, k) ≥ 0): the same for every k → βk, "
        "v → v/β.",
    ),
    Definition(
        "scaling_half, scaling_double, scaling_flip",
        "A(g(a, b), g(αa, b/α)) at α = ½, 2, −1",
        "α → ∞ turns SiLU into ReLU, α → 0 into the bilinear ab/2; α = −1 flips both signs.",
    ),
    Definition(
        "euler_residual",
        "√( Σ(a ∂g/∂a − b ∂g/∂b)² / Σh² )",
        "Scaling by an infinitesimal amount; 0 where σ is homogeneous of degree 1, as ReLU is.",
    ),
    Definition(
        "bilinear_share, bilinear_coef",
        "(Σ h·ab)² / (Σh² Σ(ab)²), c = Σ h·ab / Σ(ab)²",
        "The share of the energy that c·ab explains, each neuron with its own best c.",
    ),
    Definition(
        "placement, placement_balanced",
        "A(σ(a)·b, σ(ab))",
        "Distance to the symmetric form that has the nonlinearity outside; balanced as above.",
    ),
    Definition("gate_positive", "share of tokens with a > 0", "A layer's number is the plain mean over its neurons."),
    Definition(
        "…_token_median, …_token_q1, …_token_q3",
        "median and quartiles over tokens of the token's own ratio",
        "One token with a massive activation can own a pooled number; it cannot own a median.",
    ),
    Definition(
        "…_trimmed, top_token_share, effective_tokens",
        "the number without the 0.1 % of tokens of largest energy; the share of the largest; (Σe)² / Σe² over energies e",
        "A layer is marked * where its energy sits in effectively under 1 % of the tokens, or where leaving out 0.1 % of "
        "them moves one of its measures by over a tenth of itself.",
    ),
    Definition(
        "effective_neurons",
        "(Σe)² / Σe² over neurons, e = w (Σh² + Σh′²) before and after balanced exchange",
        "By how many neurons a layer's balanced exchange is effectively made.",
    ),
    Definition(
        "…_null_gaussian",
        "the number if (a, b) were Gaussian with the neuron's own means and covariance",
        "A layer that equals it has no structure beyond two moments.",
    ),
    Definition(
        "…_null_repaired",
        "the number if a neuron's a met another neuron's b",
        "For scaling every other neuron in turn, for exchange random pairings.",
    ),
    Definition(
        "…_null_random",
        "the number of the same architecture with fresh random weights on the same tokens",
        "There only if the run was made with --null random-init.",
    ),
    Definition(
        "…_se, ±, 95 % intervals",
        "SE² = (K − 1)/K · Σₖ (R₍ₖ₎ − R̄)²",
        "A jackknife over K blocks of sequences: R₍ₖ₎ is the number without block k, an interval is ± t SE with K − 1 "
        "degrees of freedom. It is about this kind of text and says nothing about others.",
    ),
    Definition(
        "…_repaired_q, …_repaired_differs",
        "false discovery rate at which a neuron differs from its re-pairings, by layer",
        "True at 5 % or less.",
    ),
    Definition(
        "energy_share",
        "w Σh² over that of the layer",
        "How much of its layer's output energy a neuron has, cross terms aside.",
    ),
    Definition(
        "cos_qk, cos_qv, cos_kv, norm_q, norm_k, norm_v",
        "cosines and lengths of q, k and v",
        "From the weights, with the gain of the norm before the MLP folded into q and k, what is applied after it into v.",
    ),
    Definition(
        "score, score_max_ratio", "‖q‖‖k‖‖v‖, and the largest over the median", "The same for every k → βk, v → v/β."
    ),
    Definition(
        "interaction_antisymmetry",
        "½(1 − ⟨T, Tᵀ⟩/‖T‖²) of T = Σⱼ vⱼ⊗qⱼ⊗kⱼ, q and k exchanged in Tᵀ",
        "Weights only. 0: every q is parallel to its k; 0.5: unrelated.",
    ),
    Definition(
        "size (extreme neurons)",
        "max |h|·‖v‖ over all tokens fed",
        "The first positions, which are fed but not counted, are included: massive activations sit there.",
    ),
)
MIXTURE = Definition(
    "expert, token_share, few_tokens",
    "every Σ over tokens is Σ r² over the tokens routed to the expert, r the routing weight",
    "What an expert writes is r·h. A layer pools over the neurons of all its experts; a token's own number over those of "
    "the experts that it went to. Re-paired neurons are of one expert. The shared expert takes every token.",
)
CAUSAL = Definition(
    "kl_…, dce_…, …_placebo",
    "KL(base ‖ edited) and CE(edited) − CE(base), in nats per token",
    "One layer's units are edited in the running model; the placebo is a random change of the same size.",
)
LIMITS = (
    "Asymmetries are statements about activations, not about loss: a large one need not matter to the model. Errors are "
    "those of this text. Weights that were stored in few bits are measured as they were stored."
)
NEURON_COLUMNS = meanings(
    NEURONS,
    (
        "layer expert neuron n_tokens score energy_share exchange exchange_balanced exchange_balanced_se "
        "exchange_balanced_null_gaussian exchange_balanced_null_repaired exchange_balanced_repaired_q scaling_double "
        "scaling_flip euler_residual bilinear_share bilinear_coef placement gate_positive corr_ab std_a std_b cos_qk "
        "cos_qv cos_kv norm_q norm_k norm_v"
    ).split(),
)
"""The columns of neurons.parquet on the page, with their meanings."""
LAYER_COLUMNS = meanings(
    LAYERS,
    (
        "exchange exchange_balanced exchange_balanced_token_median exchange_balanced_null_gaussian "
        "exchange_balanced_null_repaired exchange_balanced_null_random n_exchange_balanced_differs scaling_half "
        "scaling_double scaling_flip euler_residual bilinear_share placement gate_positive top_token_share "
        "effective_tokens effective_neurons cos_qk_abs_mean score_max_ratio interaction_antisymmetry"
    ).split(),
)
"""The columns of layers.csv on the page."""
EXPERT_COLUMNS = meanings(
    EXPERTS,
    (
        "n_tokens token_share energy_share exchange exchange_balanced exchange_balanced_null_repaired scaling_double "
        "scaling_flip euler_residual bilinear_share gate_positive cos_qk_abs_mean"
    ).split(),
)
"""The columns of experts.csv on the page."""
EXTREME_COLUMNS = meanings(
    EXTREMES,
    ("size h a b window position cos_qk score_ratio").split(),
)
"""The numbers of extremes.csv on the page."""
