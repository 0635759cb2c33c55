"""Definitions for the report: the formula of each number, a note on how to read it, and the columns on the page."""

from dataclasses import dataclass

from analysis.storage.files import EXPERTS, EXTREMES, LAYERS, NEURONS
from reports.columns import meanings


@dataclass(frozen=True)
class Definition:
    """One entry of the section on method.

    Attributes:
        names: the columns that it defines.
        formula: in the notation of ``NOTATION``.
        text: one or two sentences.
    """

    names: str
    formula: str
    text: str


NOTATION = (
    "x is the input of the MLP after its norm; neuron j has the query q (gate row), the key k (up row) and the value v "
    "(down column); a = ⟨q, x⟩, b = ⟨k, x⟩, plus any biases; σ is the gate activation, h = g(a, b) the "
    "unit, which is σ(a)·b unless the acceptance checks state otherwise, w = ‖v‖² the weight of a neuron. Σ runs over "
    "counted tokens; for a layer also over neurons, weighted by w, as one ratio of sums rather than a mean of ratios. y is "
    "the vector that the layer adds to the residual stream, Σⱼ hⱼ vⱼ after whatever stands behind it, such as a norm; y′ "
    "is the same with all its neurons edited."
)
ASYMMETRY = Definition(
    "asymmetry between f and f′",
    "A(f, f′) = Σ(f − f′)² / 2(Σf² + Σf′²)",
    "0: nothing changes. 0.5: the two versions are orthogonal, E[f·f′] = 0, the most that one SiLU, GELU or ReLU neuron "
    "can reach; a layer's output may exceed it. 1: the sign is reversed. The root-mean-square change is about 2√A.",
)
DEFINITIONS = (
    ASYMMETRY,
    Definition(
        "output_…",
        "A(y, y′), a ratio of sums over tokens",
        "The asymmetry of what the layer writes, if all its neurons are edited at once; what a norm behind the MLP does to "
        "y′ is computed, not linearized. …_raw is before that norm, …_centred without each version's mean over tokens.",
    ),
    Definition(
        "output_…_coherence",
        "A(y, y′) over the same measure pooled over neurons",
        "The pooled number treats neurons as if they wrote in orthogonal directions: 1. Below 1 their changes cancel in y, "
        "above 1 they add up.",
    ),
    Definition(
        "output_symmetric_…, output_antisymmetric_…",
        "of (y + y′)/2 and (y − y′)/2 under balanced exchange; rank = (tr C)² / tr C² of the covariance C",
        "The ranks and the overlap with the ten directions in which y varies most come from a sample of tokens; pairs of "
        "tokens of one block are left out, and directions are judged on tokens on which they were not found.",
    ),
    Definition(
        "exchange (also in output_exchange)",
        "A(g(a, b), g(b, a))",
        "Gate and up pre-activations are swapped. It depends on the norm and sign of k, to which the model is blind.",
    ),
    Definition(
        "exchange_balanced",
        "A(g(a, βb)/β, g(βb, a)/β) with β = ±‖q‖/‖k‖",
        "Exchange after k is rescaled to the norm of q with cos(q, k) ≥ 0: unchanged by every k → βk, v → v/β.",
    ),
    Definition(
        "scaling_half, scaling_double, scaling_flip",
        "A(g(a, b), g(αa, b/α)) at α = ½, 2, −1",
        "α → ∞ turns SiLU into ReLU, α → 0 into the bilinear ab/2; α = −1 flips both signs.",
    ),
    Definition(
        "euler_residual",
        "√( Σ(a ∂g/∂a − b ∂g/∂b)² / Σh² )",
        "Response to infinitesimal scaling; 0 if σ is homogeneous of degree 1, like ReLU.",
    ),
    Definition(
        "bilinear_share, bilinear_coef",
        "(Σ h·ab)² / (Σh² Σ(ab)²), c = Σ h·ab / Σ(ab)²",
        "The share of the energy explained by c·ab, with the best c for each neuron.",
    ),
    Definition(
        "placement, placement_balanced",
        "A(σ(a)·b, σ(ab))",
        "Distance to the symmetric form with the nonlinearity applied to the product; balanced as above.",
    ),
    Definition("gate_positive", "share of tokens with a > 0", "A layer's number is the unweighted mean over its neurons."),
    Definition(
        "…_token_median, …_token_q1, …_token_q3",
        "median and quartiles over tokens of each token's own ratio",
        "A single token with a massive activation can dominate a pooled number, but not a median.",
    ),
    Definition(
        "…_trimmed, top_token_share, effective_tokens",
        "the number without the 0.1 % of tokens of largest energy; the share of the largest; (Σe)² / Σe² over energies e",
        "A layer is marked * if its effective number of tokens is below 1 % of all, or if leaving out 0.1 % of the tokens "
        "changes one of its measures by more than 10 %.",
    ),
    Definition(
        "effective_neurons",
        "(Σe)² / Σe² over neurons, e = w (Σh² + Σh′²) before and after balanced exchange",
        "The effective number of neurons that determine a layer's balanced exchange.",
    ),
    Definition(
        "…_null_gaussian",
        "the number if (a, b) were Gaussian with the neuron's own means and covariance",
        "A layer that equals it shows no structure beyond the first two moments.",
    ),
    Definition(
        "…_null_repaired",
        "the number if each neuron's a were paired with the b of another neuron",
        "A permutation null: for scaling over all other neurons, for exchange over random permutations.",
    ),
    Definition(
        "…_null_random",
        "the number of the same architecture with fresh random weights on the same tokens",
        "Only if the run was made with --null random-init.",
    ),
    Definition(
        "…_se, ±, 95 % intervals",
        "SE² = (K − 1)/K · Σₖ (R₍ₖ₎ − R̄)²",
        "A jackknife over K blocks of sequences: R₍ₖ₎ is the number without block k, an interval is ± t SE with K − 1 "
        "degrees of freedom. It covers sampling from this kind of text, not other kinds.",
    ),
    Definition(
        "…_repaired_q, …_repaired_differs",
        "false discovery rate at which a neuron differs from its permutation null, within its layer",
        "True if the rate is at most 5 %.",
    ),
    Definition(
        "energy_share",
        "w Σh² over the sum for the layer",
        "A neuron's share of its layer's output energy, cross terms ignored.",
    ),
    Definition(
        "cos_qk, cos_qv, cos_kv, norm_q, norm_k, norm_v",
        "cosines and norms of q, k and v",
        "From the weights, with the gain of the norm before the MLP folded into q and k, and that of what follows into v.",
    ),
    Definition(
        "score, score_max_ratio", "‖q‖‖k‖‖v‖, and the largest over the median", "Unchanged by every k → βk, v → v/β."
    ),
    Definition(
        "interaction_antisymmetry",
        "½(1 − ⟨T, Tᵀ⟩/‖T‖²) for T = Σⱼ vⱼ⊗qⱼ⊗kⱼ, with q and k exchanged in Tᵀ",
        "Weights only. 0: every q is parallel to its k; 0.5: unrelated.",
    ),
    Definition(
        "size (extreme neurons)",
        "max |h|·‖v‖ over all tokens fed to the model",
        "Includes the first positions, which are fed but not counted: massive activations occur there.",
    ),
)
MIXTURE = Definition(
    "expert, token_share, few_tokens",
    "every Σ over tokens is Σ r² over the tokens routed to the expert, r the routing weight",
    "An expert writes r·h. A layer pools over the neurons of all its experts, a token's own number over the experts "
    "it was routed to. The permutation null permutes within an expert. The shared expert receives every token.",
)
CAUSAL = Definition(
    "kl_…, dce_…, …_placebo",
    "KL(base ‖ edited) and CE(edited) − CE(base), in nats per token",
    "One layer's units are edited during the forward pass; the placebo is a random change of the same size.",
)
LIMITS = (
    "Asymmetries describe activations, not loss: a large one need not matter to the model. Standard errors cover only this "
    "text. Quantized weights are measured as stored."
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
        "output_exchange_balanced output_exchange_balanced_token_median output_exchange_balanced_null_random "
        "output_exchange_balanced_centred output_exchange_balanced_raw output_scaling_half "
        "output_scaling_double output_scaling_flip output_scaling_zero output_scaling_infinity "
        "output_exchange exchange_balanced output_exchange_balanced_coherence output_scaling_double_coherence "
        "output_mean_share output_symmetric_rank output_antisymmetric_rank output_antisymmetric_in_top10 "
        "exchange exchange_balanced_token_median exchange_balanced_null_gaussian "
        "exchange_balanced_null_repaired exchange_balanced_null_random n_exchange_balanced_differs "
        "scaling_half scaling_double scaling_flip euler_residual bilinear_share placement gate_positive "
        "top_token_share effective_tokens effective_neurons cos_qk_abs_mean score_max_ratio "
        "interaction_antisymmetry"
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
