"""Sites: the gated MLPs of a model, and the modules at which they are captured.

A site is a candidate that has been verified (``hooks.locating.verify``): for each token that reaches it

    a = x qᵀ (+ bias)     output of the gate projection
    b = x kᵀ (+ bias)     output of the up projection
    h = g(a, b)           input of the down projection
    y = h v (+ bias)      output of the down projection

A mixture of experts is a layer of many sites, each reached by some of the tokens.
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
from hooks.locating.output_path import OutputPath
from hooks.locating.projections import Candidate, Weights

Points = tuple[nn.Module, ...]


@dataclass(frozen=True)
class Site:
    """The gated units that read the same x: a layer's MLP, or one of its experts.

    Attributes:
        layer: index of the transformer block.
        unit: g.
        weights: q, k, v and the biases, and the modules that contain them.
        gain: gain of the norm whose output the MLP reads, ones if there is none.
        gain_source: which norm that is, in words.
        value_gain: factor of each component of y before it is added to the residual stream.
        value_gain_source: where this factor comes from, in words.
        output_path: what turns y into what is added to the residual stream, a norm included; None if it was not verified.
        identity_error: relative error of h = g(a, b) on the probe.
        output_error: relative error of the MLP's output computed from q, k, v.
        expert: its number in a mixture of experts, ``SHARED`` for a shared one, None in a dense layer.
        token_gate: of a shared expert with a weight for each token, the module that gives the weight's logit.
        hook_names: TransformerLens's hook names of x, a, b, h and y, empty if its hooks do not carry the same.
        bridge_points: TransformerLens hook points of a and b, where its pass calls other modules than the model's own.
        in_place: whether the model overwrites the outputs of its projections, so that a and b must be copied on capture.
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
    output_path: OutputPath | None = None
    expert: int | None = None
    token_gate: nn.Linear | None = None
    hook_names: dict[str, str] = field(default_factory=dict)
    bridge_points: tuple[Points, Points] = ((), ())
    in_place: bool = False

    @property
    def q(self) -> Float[Tensor, "d_mlp d_model"]:
        """Queries, one row per neuron: a view of the model's weights if these are in memory, without norm gains."""
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
        """The device on which its layer computes."""
        return device_of(self.weights.module)

    def gated_mlp(self) -> GatedMLP:
        """The MLP as a ``GatedMLP`` that maps x, after the norm, to y; it shares the model's weights."""
        return GatedMLP(self.unit, *self.weights.matrices, *self.weights.biases)

    @property
    def projections(self) -> Candidate:
        """The modules at which it is captured; ValueError for a routed expert, which has none."""
        if not isinstance(self.weights, Candidate):
            raise ValueError(f"expert {self.expert} of layer {self.layer} has no projection modules of its own")
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
    """A layer of experts: each token is routed to some of them, whose outputs are summed with its routing weights.

    Attributes:
        layer: index of the transformer block.
        sites: the experts in order; a shared expert, which every token reaches, comes last.
        expert_weights: the fused weights of the routed experts, and their module.
        parent: the module that contains them; its input is that of a shared expert.
    """

    layer: int
    sites: tuple[Site, ...]
    expert_weights: FusedExperts
    parent: nn.Module

    @property
    def shared(self) -> Site | None:
        """The shared expert, if there is one."""
        return self.sites[-1] if self.sites[-1].expert == SHARED else None

    @property
    def routed(self) -> tuple[Site, ...]:
        """The experts that the router chooses from."""
        return tuple(site for site in self.sites if site.expert != SHARED)

    @property
    def output_paths(self) -> tuple[OutputPath | None, ...]:
        """That of the routed experts' sum, and that of the shared expert's output if there is one."""
        return self.sites[0].output_path, *(() if self.shared is None else (self.shared.output_path,))

    @property
    def columns(self) -> tuple[slice, ...]:
        """For every site, the columns of its neurons in a table of all neurons of the layer."""
        bounds = list(accumulate((site.n_neurons for site in self.sites), initial=0))
        return tuple(slice(first, last) for first, last in pairwise(bounds))

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
    """The layers of a model.

    Attributes:
        sites: verified dense layers, by index.
        mixtures: verified layers of experts, by index.
        skipped: for every other layer, the reason.
        returns_tuple: the blocks whose output is a tuple with the residual stream first.
    """

    sites: dict[int, Site] = field(default_factory=dict)
    mixtures: dict[int, Mixture] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    returns_tuple: frozenset[int] = frozenset()
