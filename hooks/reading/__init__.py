"""Capturing activations: one pass over a corpus, with hooks on the model's modules and an accumulator per layer.

capture              one forward pass with capture hooks
capture_points       the modules at which a layer is captured
batches              one pass over a corpus in batches that fit into memory
accumulators         from a layer's activations to its moments
outputs              from a layer's activations to what it writes, edited and not
neuron_accumulators  from a layer's activations to the samples and contexts of one neuron
first_window         controls and verification on the first window of the text
acceptance           the acceptance block of a run
"""
