"""Sites: where in a model each gated unit is read.

A site is a candidate that has been proved (``hooks.locating.verify``): for each token that reaches it

    a = x qᵀ (+ bias)     what its gate gives
    b = x kᵀ (+ bias)     what its up gives
    h = g(a, b)           what its down projection is given
    y = h v (+ bias)      what its down projection gives

A mixture of experts is a layer of many sites, each of which some tokens reach.
"""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from analysis.theory.gated import GatedMLP
from analysis.units.registry import Unit
from analysis.weights.experts import SHARED
from hooks.loading.devices import device_of
from hooks.locating.expert_weights import FusedExperts
from hooks.locating.projections import Candidate, Weights

Points = tuple[nn.Module, ...]


@dataclass(frozen=True)
class Site:
    """Gated units that read one x: a layer's MLP, or an expert of it.

    Attributes:
        layer: index of the block.
        unit: g.
        weights: of the MLP, and the modules that hold them.
        gain: gain of the norm whose output the MLP reads, ones where there is none.
        gain_source: which norm that is, in words.
        value_gain: what is applied to the output before it reaches the residual stream, one factor a component.
        value_gain_source: the same in words.
        identity_error: relative error of h = g(a, b) on the probe.
        output_error: relative error of the MLP's output computed from q, k, v.
        expert: its number in a mixture of experts, ``SHARED`` for a shared one, None in a dense layer.
        token_gate: for a shared expert, what gives the logit of its weight for each token.
        hook_names: the names of x, a, b, h and y among the hooks of TransformerLens, where these see the same.
        bridge_points: TransformerLens hook points of a and b, where its pass calls other modules than the model's own.
        in_place: whether the model changes what its projections gave, so that a and b must be copied when they are
        captured.
    """

    layer: int
    unit: Unit
    weights: Weights
    gain: Float[Tensor, " d_model"]
    gain_source: str
    value_gain: Float[Tensor, " d_model"]
    value_gain_source: str
    identity_error: float
    output_error: float
    expert: int | None = None
    token_gate: nn.Linear | None = None
    hook_names: dict[str, str] = field(default_factory=dict)
    bridge_points: tuple[Points, Points] = ((), ())
    in_place: bool = False

    @property
    def q(self) -> Float[Tensor, "d_mlp d_model"]:
        """Queries, one row a neuron, as the model holds them: a view, not a copy, of weights in memory."""
        return self.weights.matrices[0]

    @property
    def k(self) -> Float[Tensor, "d_mlp d_model"]:
        """Keys, likewise."""
        return self.weights.matrices[1]

    @property
    def v(self) -> Float[Tensor, "d_mlp d_model"]:
        """Values, likewise."""
        return self.weights.matrices[2]

    @property
    def n_neurons(self) -> int:
        return self.weights.n_neurons

    @property
    def dtype(self) -> torch.dtype:
        return self.gain.dtype

    @property
    def device(self) -> torch.device:
        """Where its layer computes."""
        return device_of(self.weights.module)

    def gated_mlp(self) -> GatedMLP:
        """The MLP as a form of the family, on x after its norm, with the model's own weights."""
        return GatedMLP(self.unit, *self.weights.matrices, *self.weights.biases)

    @property
    def projections(self) -> Candidate:
        """The modules that it is read at."""
        if not isinstance(self.weights, Candidate):
            raise ValueError(f"expert {self.expert} of layer {self.layer} has no modules of its own")
        return self.weights

    @property
    def hook_x(self) -> str:
        return self.hook_names["x"]

    @property
    def hook_a(self) -> str:
        return self.hook_names["a"]

    @property
    def hook_b(self) -> str:
        return self.hook_names["b"]

    @property
    def hook_h(self) -> str:
        return self.hook_names["h"]


@dataclass(frozen=True)
class Mixture:
    """A layer of experts: each token is sent to some of them, and what they give is added up with its weights.

    Attributes:
        layer: index of the block.
        sites: the experts in order; a shared one, which sees every token, comes last.
        expert_weights: where they are in the model.
        reads: the module around them, which is given what a shared expert reads.
    """

    layer: int
    sites: tuple[Site, ...]
    expert_weights: FusedExperts
    reads: nn.Module

    @property
    def shared(self) -> Site | None:
        """The shared expert, if there is one."""
        return self.sites[-1] if self.sites[-1].expert == SHARED else None

    @property
    def routed(self) -> tuple[Site, ...]:
        """The experts that tokens are sent to."""
        return tuple(site for site in self.sites if site.expert != SHARED)

    @property
    def columns(self) -> tuple[slice, ...]:
        """Of every site the columns of its neurons among those of the layer."""
        ends = list(accumulate((site.n_neurons for site in self.sites), initial=0))
        return tuple(slice(first, last) for first, last in pairwise(ends))

    @property
    def unit(self) -> Unit:
        return self.sites[0].unit

    @property
    def device(self) -> torch.device:
        return self.sites[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.sites[0].dtype

    @property
    def n_neurons(self) -> int:
        return sum(site.n_neurons for site in self.sites)


@dataclass(frozen=True)
class LocatedLayers:
    """What a model has to be read.

    Attributes:
        sites: dense layers that proved themselves, by index.
        mixtures: layers of experts that did.
        skipped: for every other layer the reason why not.
        returns_tuple: blocks that give the residual stream in a tuple.
    """

    sites: dict[int, Site] = field(default_factory=dict)
    mixtures: dict[int, Mixture] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    returns_tuple: frozenset[int] = frozenset()
