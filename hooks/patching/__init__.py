"""Edits of a model's activations and weights, and what they cost in KL divergence and cross-entropy.

interventions      rewrites activations or weights within a ``with`` block
partial_pass       forward passes that start at a layer
patched_runs       costs of many edited runs of one window, batched
attribution        first-order costs of every neuron
single_neurons     exact costs of single neurons, next to their attribution
edit_coefficients  coefficients of the fitted edits
sweep              exact costs of every edit in every layer
"""
