"""Numbers of a layer that depend on its weights alone.

experts       which neurons of a mixture of experts belong to which expert
geometry      norms and cosines of q, k and v, and the permuted pairs of the null
interactions  the interaction tensor of a layer, and groups of parallel values
readouts      vectors projected onto the vocabulary, and similar neurons
"""
