"""Every number of a layer and of its neurons, each with what is needed to believe it.

Beside a measure stand its standard error, its median and quartiles over tokens, its value without the tokens of largest
energy, the nulls, and the excess over each null with an error of its own. An error of an excess is that of the difference,
not a sum of errors: measure and null are recomputed together without each block. Over re-paired neurons it also holds the
chance of pairing.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from analysis.measures import asymmetry as measures
from analysis.measures.asymmetry import LAYER_MEASURES, REPAIRED_NULLS, excess_over_repaired
from analysis.measures.false_discovery import false_discovery
from analysis.measures.gaussian_null import GaussianFit, Parts, gaussian_nulls
from analysis.measures.jackknife import (
    bilinear_share_replicates,
    filled_jackknife_blocks,
    gate_positive_error,
    group_pooled_replicates,
    jackknife,
    measure_replicates,
    neuron_error,
    neuron_replicates,
    pooled_error,
    quantile_error,
)
from analysis.measures.permutation_null import experts_permutation_variance
from analysis.sums.layout import MAIN_SCALES, QUADRANTS, Sums, scaling_name
from analysis.sums.moments import Moments
from analysis.units.registry import Unit
from analysis.weights.experts import Experts, expert_slices, index_within
from analysis.weights.geometry import Geometry

TRIMMED = 0.001
"""The share of tokens, those of largest energy, without which a robust number is taken."""
EXTREMES = 10
"""Neurons of each layer in the table of extreme ones."""
CHANGED = 0.1
"""A number that moves by more than this share of itself without those tokens depends on them."""
CONCENTRATED = 0.01
"""A layer whose energy sits in effectively fewer than this share of its tokens depends on them."""
FEW_EXPERT_TOKENS = 256
"""An expert with fewer tokens is marked. If tokens were independent, so many would leave balanced exchange, pooled, with an
error of 2 % of itself in the median layer of SmolLM2, and of more than 11 % in a tenth of its layers."""
ERROR_NODES = 24
"""Quadrature nodes for errors of the Gaussian null: only differences between replicates count, and they cancel the rest."""

TOKEN_MEASURES = {
    "exchange": "exchange",
    "exchange_balanced": "balanced_exchange",
    **{name: scaling_name(alpha) for name, alpha in MAIN_SCALES.items()},
    "euler_residual": "euler",
    "placement": "placement",
    "placement_balanced": "balanced_placement",
}
"""Measures that also exist token by token, with their names in a layout."""
GAUSSIAN_NULLS = {
    "exchange": "exchange",
    "exchange_balanced": "exchange_balanced",
    **{name: scaling_name(alpha) for name, alpha in MAIN_SCALES.items()},
}
"""Measures with a Gaussian null, with the null's name in ``gaussian_nulls``."""
DRAWS = {"exchange": measures.exchange_of_draws, "exchange_balanced": measures.exchange_balanced_of_draws}

Neurons = Float64[Tensor, " d_mlp"]


@dataclass(frozen=True)
class Estimates:
    """The numbers of one layer.

    Attributes:
        unit: g.
        moments: what was seen.
        geometry: the weights.
        partners: for each random pairing, the neuron whose b met each neuron's a.
        experts: the expert of each neuron in a mixture of experts, None in a dense layer. Only ``expert_numbers`` and the
            chance of pairing know of them: everything else pools over all neurons.
    """

    unit: Unit
    moments: Moments
    geometry: Geometry
    partners: Int64[Tensor, "draw d_mlp"]
    experts: Experts | None = None

    @cached_property
    def gaussian(self) -> dict[str, Parts]:
        """The Gaussian null of both exchanges and of scaling at every α, summed over the tokens that each neuron saw."""
        law, layout = GaussianFit.of(self.moments.neuron), self.moments.layout
        nulls = gaussian_nulls(law, self.unit, self.geometry.balance, layout.alphas)
        return {name: null.summed(self.moments.neuron["weight"]) for name, null in nulls.items()}

    @cached_property
    def _gaussian_replicates(self) -> dict[str, Float64[Tensor, "part d_mlp group"]]:
        """The two parts of every Gaussian null without each group of blocks."""
        layout = self.moments.layout.by_neuron_and_group

        def parts(sums: Sums) -> Float64[Tensor, "null part d_mlp"]:
            nulls = gaussian_nulls(GaussianFit.of(sums), self.unit, self.geometry.balance, layout.alphas, ERROR_NODES)
            summed = [null.summed(sums["weight"]) for null in nulls.values()]
            return torch.stack([torch.stack([null.gap, null.scale]) for null in summed])

        names = ("exchange", "exchange_balanced", *(scaling_name(alpha) for alpha in layout.alphas))
        return dict(zip(names, neuron_replicates(parts, self.moments), strict=True))

    def layer_numbers(self) -> dict[str, int | float]:
        """One row of the table of layers."""
        moments, weight = self.moments, self.geometry.value_weight
        numbers: dict[str, int | float] = {
            "n_neurons": len(weight),
            "n_tokens": moments.n_tokens,
            "n_blocks": filled_jackknife_blocks(moments),
        }
        for name in (*GAUSSIAN_NULLS, *(name for name in TOKEN_MEASURES if name not in GAUSSIAN_NULLS)):
            numbers |= self._pooled(name) | self._over_tokens(name)
            if name in GAUSSIAN_NULLS:
                numbers |= self.layer_nulls(name)
        for name, measure in (("exchange", measures.exchange), ("exchange_balanced", measures.exchange_balanced)):
            numbers |= self._neuron_median(name, measure)
        numbers |= self._pooled("exchange_relative_change")
        numbers |= self._bilinear()
        numbers["gate_positive"] = measures.layer_gate_positive(moments.neuron)
        numbers["gate_positive_se"] = gate_positive_error(moments)
        numbers["top_token_share"] = (
            moments.top_energy / energy if (energy := float(moments.by_energy[1].sum())) else math.nan
        )
        numbers["top_tokens_share"] = moments.top_share(TRIMMED)
        numbers["effective_tokens"] = moments.effective_tokens
        numbers["few_tokens"] = self.few_tokens
        by_neuron = weight * (moments.neuron["balanced_hh"] + moments.neuron["balanced_exchange"])
        numbers["effective_neurons"] = float(by_neuron.sum() ** 2 / by_neuron.square().sum())
        for name, found in self.discoveries.items():
            numbers[f"n_{name}_differs"] = int(found[2].sum())
        score = self.geometry.score
        numbers["cos_qk_abs_mean"] = float(self.geometry.cos_qk.abs().mean())
        numbers["score_max_ratio"] = float(score.max() / score.median())
        return numbers

    def neuron_numbers(self) -> dict[str, Tensor]:
        """The columns of the table of neurons, [d_mlp] each."""
        sums, weight = self.moments.neuron, self.geometry.value_weight
        columns: dict[str, Tensor] = {}
        for name, key in GAUSSIAN_NULLS.items():
            replicates = measure_replicates(LAYER_MEASURES[name], self.moments)
            columns[name] = LAYER_MEASURES[name](sums)
            columns[f"{name}_se"] = jackknife(replicates)
            columns |= self._neuron_nulls(name, key, columns[name], replicates)
            if name in self.discoveries:
                found = dict(zip(("p", "q", "differs"), self.discoveries[name], strict=True))
                columns |= {f"{name}_repaired_{part}": values for part, values in found.items()}
        columns |= {name: measure(sums) for name, measure in LAYER_MEASURES.items() if name not in columns}
        columns["gate_positive"] = measures.gate_positive(sums)
        columns["bilinear_share"] = measures.bilinear_share(sums)
        columns["bilinear_share_se"] = neuron_error(measures.bilinear_share, self.moments)
        columns["bilinear_coef"] = measures.bilinear_coefficient(sums)
        columns["energy_share"] = weight * sums["hh"] / (weight @ sums["hh"])
        columns |= vars(GaussianFit.of(sums))
        if self.experts is not None:
            columns["n_tokens"] = measures.tokens_seen(sums).long()
        for quadrant, tokens in zip(QUADRANTS, measures.quadrant_tokens(sums), strict=True):
            columns[f"quadrant_{quadrant}"] = tokens
        for quadrant, energy in zip(QUADRANTS, measures.quadrant_energy(sums), strict=True):
            columns[f"quadrant_energy_{quadrant}"] = energy
        return columns | {**self.geometry.tensors(), "score": self.geometry.score}

    def curve_numbers(self) -> dict[str, list[float]]:
        """The columns of the scaling curve, one value per α."""
        pooled, alphas = self._pooled_sums, self.moments.layout.alphas
        columns = {
            "asymmetry": measures.scaling(pooled)[:, 0],
            "asymmetry_se": pooled_error(measures.scaling, self.moments),
            "null_repaired": measures.scaling_null_repaired(pooled)[:, 0],
            "relative_change": measures.scaling_relative_change(pooled)[:, 0],
        }
        weight = self.geometry.value_weight
        return {
            "alpha": list(alphas),
            **{name: values.tolist() for name, values in columns.items()},
            "null_gaussian": [self.gaussian[scaling_name(alpha)].pooled(weight) for alpha in alphas],
            "token_median": [self.moments.token_quantile(scaling_name(alpha), 0.5) for alpha in alphas],
        }

    @cached_property
    def discoveries(self) -> dict[str, tuple[Neurons, Neurons, Tensor]]:
        """For both exchanges: p, q and whether a neuron differs from re-paired neurons."""
        sums = self.moments.neuron
        return {name: false_discovery(LAYER_MEASURES[name](sums), draws(sums)) for name, draws in DRAWS.items()}

    @cached_property
    def few_tokens(self) -> bool:
        """Whether some answer of this layer depends on a handful of tokens.

        It does if the energy sits in effectively fewer than 1 % of the tokens, or if leaving out the 0.1 % of largest
        energy moves one of the measures by more than a tenth of itself.
        """
        if self.moments.effective_tokens < CONCENTRATED * self.moments.n_tokens:
            return True
        values = {name: float(LAYER_MEASURES[name](self._pooled_sums)) for name in TOKEN_MEASURES}
        return any(abs(value - self._trimmed(name)) > CHANGED * value for name, value in values.items())

    def top_tokens(self) -> list[dict[str, int | float]]:
        """The tokens of largest energy among the 0.1 % left out, at most ``extremes.TOP_TOKENS``.

        Each with its place, its share of the layer's energy, and the neuron that holds most of it.
        """
        top, energy = self.moments.top_tokens, float(self.moments.by_energy[1].sum())
        taken = top.places[3] >= 0
        window, position, token, neuron = top.places[:, taken]
        columns = {
            "window": window,
            "position": position,
            "token": token,
            **self._neuron_places(neuron),
            "energy_share": top.energy[taken] / energy,
            "neuron_share": top.neuron_share[taken],
        }
        rows = zip(*(values.tolist() for values in columns.values()), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows][: math.ceil(TRIMMED * self.moments.n_tokens)]

    def extreme_neurons(self, count: int = EXTREMES) -> dict[str, Tensor]:
        """The neurons with the largest |h|·‖v‖ on any token fed, the uncounted first ones included, largest first.

        In a mixture of experts h is what the expert writes, routing weight included.
        """
        peaks, geometry = self.moments.peaks, self.geometry
        size = peaks.values[0].abs() * geometry.norm_v
        chosen = size.nan_to_num(nan=-1.0).argsort(descending=True)[:count]
        h, a, b = peaks.values[:, chosen]
        window, position, token, counted = peaks.places[:, chosen]
        return {
            **self._neuron_places(chosen),
            "size": size[chosen],
            "window": window,
            "position": position,
            "counted": counted.bool(),
            "token": token,
            "a": a,
            "b": b,
            "h": h,
            "cos_qk": geometry.cos_qk[chosen],
            "score": geometry.score[chosen],
            "score_ratio": geometry.score[chosen] / geometry.score.median(),
        }

    def expert_numbers(self) -> list[dict[str, int | float]]:
        """One row per expert, each pooled over its neurons as a layer is; nothing for a dense layer.

        NaN where an expert saw no counted token. An error comes from groups of blocks; some measures have none there.
        """
        if self.experts is None:
            return []
        of_layer = float((self.geometry.value_weight * self.moments.neuron["hh"]).sum())
        return [self._expert(expert, neurons, of_layer) for expert, neurons in expert_slices(self.experts).items()]

    def _expert(self, expert: int, neurons: slice, energy_of_layer: float) -> dict[str, int | float]:
        weight, sums = self.geometry.value_weight[neurons], self.moments.neuron.values[:, neurons]
        groups = self.moments.neuron_groups[..., neurons]
        moments = replace(self.moments, neuron=Sums(self.moments.layout, sums), neuron_groups=groups)
        pooled, n_tokens = moments.neuron.pool(weight), int(measures.tokens_seen(moments.neuron)[0])
        numbers: dict[str, int | float] = {
            "expert": expert,
            "n_neurons": len(weight),
            "n_tokens": n_tokens,
            "token_share": n_tokens / moments.n_tokens if moments.n_tokens else math.nan,
            "energy_share": float(pooled["hh"]) / energy_of_layer if energy_of_layer else math.nan,
            "few_tokens": n_tokens < FEW_EXPERT_TOKENS,
        }
        for name in TOKEN_MEASURES:
            measure = LAYER_MEASURES[name]
            numbers[name] = float(measure(pooled))
            if name in GAUSSIAN_NULLS:  # what is kept by groups of blocks
                numbers[f"{name}_se"] = float(jackknife(group_pooled_replicates(measure, weight, moments)))
                numbers[f"{name}_null_repaired"] = float(REPAIRED_NULLS[name](pooled))
        numbers["bilinear_share"] = measures.layer_bilinear_share(moments.neuron, weight)
        numbers["bilinear_share_se"] = float(jackknife(bilinear_share_replicates(weight, moments)))
        numbers["gate_positive"] = measures.layer_gate_positive(moments.neuron)
        numbers["cos_qk_abs_mean"] = float(self.geometry.cos_qk[neurons].abs().mean())
        return numbers

    @property
    def idle_experts(self) -> list[int]:
        """The experts to which no counted token was routed."""
        if self.experts is None:
            return []
        seen = measures.tokens_seen(self.moments.neuron)
        return [expert for expert, neurons in expert_slices(self.experts).items() if not bool(seen[neurons.start] > 0)]

    def _neuron_places(self, neurons: Int64[Tensor, " chosen"]) -> dict[str, Int64[Tensor, " chosen"]]:
        """The columns that say which neurons these are: where there are experts, the expert and the index within it."""
        if self.experts is None:
            return {"neuron": neurons}
        return {"expert": self.experts[neurons], "neuron": index_within(self.experts)[neurons]}

    @cached_property
    def _pooled_sums(self) -> Sums:
        """The sums pooled over the neurons, a table with one column."""
        return self.moments.neuron.pool(self.geometry.value_weight)

    def _pooled(self, name: str) -> dict[str, float]:
        measure = LAYER_MEASURES[name]
        value = float(measure(self._pooled_sums))
        return {name: value, f"{name}_se": float(pooled_error(measure, self.moments))}

    def _over_tokens(self, name: str) -> dict[str, float]:
        key = TOKEN_MEASURES[name]
        if key not in self.moments.layout.token_measures:
            parts = ("token_q1", "token_median", "token_median_se", "token_q3", "trimmed")
            return {f"{name}_{part}": math.nan for part in parts}

        median = self.moments.token_quantile(key, 0.5)
        error = quantile_error(key, 0.5, self.moments)
        if key == "euler":
            error *= 0.5 / math.sqrt(median * (1 - median) ** 3) if median else math.nan
        return {
            f"{name}_token_q1": _shown(key, self.moments.token_quantile(key, 0.25)),
            f"{name}_token_median": _shown(key, median),
            f"{name}_token_median_se": error,
            f"{name}_token_q3": _shown(key, self.moments.token_quantile(key, 0.75)),
            f"{name}_trimmed": self._trimmed(name),
        }

    def _trimmed(self, name: str) -> float:
        """A measure pooled without the tokens of largest energy; NaN for a scale that was not followed."""
        key = TOKEN_MEASURES[name]
        if key not in self.moments.layout.token_measures:
            return math.nan
        return _shown(key, self.moments.without_top_tokens(key, TRIMMED))

    def layer_nulls(self, name: str) -> dict[str, float]:
        """Nulls of a measure and the excess over each, with its error."""
        key, weight = GAUSSIAN_NULLS[name], self.geometry.value_weight
        value, repaired = (float(part[name](self._pooled_sums)) for part in (LAYER_MEASURES, REPAIRED_NULLS))
        gaussian = self.gaussian[key].pooled(weight) if key in self.gaussian else math.nan
        return {
            f"{name}_null_gaussian": gaussian,
            f"{name}_excess_gaussian": value - gaussian,
            f"{name}_excess_gaussian_se": self._excess_gaussian_error(name),
            f"{name}_null_repaired": repaired,
            f"{name}_excess_repaired": value - repaired,
            f"{name}_excess_repaired_se": self._excess_repaired_error(name),
        }

    def _excess_gaussian_error(self, name: str) -> float:
        parts = self._gaussian_replicates.get(GAUSSIAN_NULLS[name])
        if parts is None:
            return math.nan
        weight = self.geometry.value_weight
        gap, scale = (weight @ part for part in parts)
        own = group_pooled_replicates(LAYER_MEASURES[name], weight, self.moments)
        return float(jackknife(own - gap / scale))

    def _neuron_nulls(
        self, name: str, key: str, value: Neurons, replicates: Float64[Tensor, "d_mlp group"]
    ) -> dict[str, Neurons]:
        missing = torch.full_like(value, torch.nan)
        repaired = REPAIRED_NULLS[name](self.moments.neuron)
        gaussian, error = missing, missing
        if key in self.gaussian:
            gaussian = self.gaussian[key].by_neuron
            gap, scale = self._gaussian_replicates[key]
            error = jackknife(replicates - gap / scale)
        return {
            f"{name}_null_gaussian": gaussian,
            f"{name}_excess_gaussian": value - gaussian,
            f"{name}_excess_gaussian_se": error,
            f"{name}_null_repaired": repaired,
            f"{name}_excess_repaired": value - repaired,
            f"{name}_excess_repaired_se": self._neuron_excess_repaired_error(name),
        }

    def _excess_repaired_error(self, name: str) -> float:
        """The chance of tokens, by the jackknife, and of pairing: as if the own pairing were one more of those drawn."""
        gap, scale = (part * self.geometry.value_weight for part in self._draws(name))
        total = scale.sum() / len(scale)
        linear = (gap - gap.sum() / scale.sum() * scale) / total
        pairing = experts_permutation_variance(linear, self.partners, self.experts) * self._pairings_compared(name)
        return math.sqrt(float(pooled_error(excess_over_repaired(name), self.moments)) ** 2 + pairing)

    def _neuron_excess_repaired_error(self, name: str) -> Neurons:
        gap, scale = self._draws(name)
        pairing = (gap / scale).var(dim=0) if len(gap) > 1 else torch.full_like(gap[0], torch.nan)
        tokens = neuron_error(excess_over_repaired(name), self.moments)
        return (tokens.square() + pairing * self._pairings_compared(name)).sqrt()

    def _pairings_compared(self, name: str) -> float:
        """Variances of one pairing in an excess: of the own one, and of the mean over those drawn; scaling is over all."""
        return 1.0 if name in MAIN_SCALES else 1 + 1 / self.moments.layout.draws

    def _draws(self, name: str) -> tuple[Float64[Tensor, "draw d_mlp"], Float64[Tensor, "draw d_mlp"]]:
        """The two sums whose ratio is the number of each neuron in each random pairing; NaN for a scale not followed."""
        sums = self.moments.neuron
        if name not in MAIN_SCALES:
            kind = "" if name == "exchange" else "balanced_"
            parts = (f"repaired_{kind}exchange_gap", f"repaired_{kind}hh", f"repaired_{kind}exchange")
            gap, before, after = (sums[part] for part in parts)
            return gap, 2 * (before + after)
        before, alphas = sums["repaired_hh"], self.moments.layout.main_alphas
        if MAIN_SCALES[name] not in alphas:
            return torch.full_like(before, torch.nan), torch.full_like(before, torch.nan)
        which = slice(alphas.index(MAIN_SCALES[name]), None, len(alphas))
        after, product = sums["repaired_scaling"][which], sums["repaired_product"][which]
        length = self.geometry.norm_k if self.unit.up_is_linear else torch.ones_like(self.geometry.norm_k)
        as_own = (length / length[self.partners]).square().nan_to_num(nan=0.0, posinf=0.0)  # a partner without key gives 0
        return as_own * (before + after - 2 * product).clamp(min=0), as_own * 2 * (before + after)

    def _neuron_median(self, name: str, measure: measures.Measure) -> dict[str, float]:
        replicates = neuron_replicates(lambda sums: _median(measure(sums)), self.moments)
        return {
            f"{name}_neuron_median": float(_median(measure(self.moments.neuron))),
            f"{name}_neuron_median_se": float(jackknife(replicates)),
        }

    def _bilinear(self) -> dict[str, float]:
        weight = self.geometry.value_weight
        return {
            "bilinear_share": measures.layer_bilinear_share(self.moments.neuron, weight),
            "bilinear_share_se": float(jackknife(bilinear_share_replicates(weight, self.moments))),
        } | self._neuron_median("bilinear_share", measures.bilinear_share)


def _shown(key: str, ratio: float) -> float:
    """A token's number as it is shown: the Euler residual is kept as ρ²/(1 + ρ²)."""
    return math.sqrt(ratio / (1 - ratio)) if key == "euler" else ratio


def _median(values: Neurons) -> Float64[Tensor, ""]:
    """The median of those that are a number, the mean of the two middle ones if their count is even."""
    return torch.nanquantile(values, 0.5)
