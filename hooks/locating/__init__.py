"""Where the gated MLPs of a model are: candidates by the shapes of weights, each verified on a short probe.

sites           the result: sites, mixtures of experts, and skipped layers
projections     candidates for gate, up and down among linear modules
expert_weights  candidates for the fused weights of experts
expected        what is known before a layer runs: configuration, modules shared by layers
recording       inputs and outputs of the modules of one block
routing         tokens, experts and routing weights
norm_gains      the gain of the norm before a gated MLP, and the factor on its output
output_path     what turns an MLP's output into what is added to the residual stream
verify          which layers of a model are verified, and the reasons of the others
verify_dense    verifies gated MLPs made of linear modules
verify_experts  verifies mixtures of experts
ends            embedding, unembedding and the gain of the last norm
bridge          the same model in TransformerLens, if it computes the same
"""
