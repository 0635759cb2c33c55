"""Models, texts, and the hooks that capture a model's activations on a text.

tolerance  when two computations of the same quantity agree
loading    from the name of a model to a network in memory
locating   where its gated MLPs are, verified on a probe
corpus     a text as windows of tokens
models     a loaded model with its verified layers
reading    capture hooks and accumulators: one pass over a corpus
collect    from a model and a corpus to a run
patching   edits of activations and weights, and their costs
causal     from a model and its run to the costs of edits
measure    a whole analysis in one call
neuron     one neuron: its activations on a text, and its weights
"""

import analysis  # noqa: F401  it sets the threads' environment variables, which must be set before torch is imported
