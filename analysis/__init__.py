"""The measures in pure torch: no model, no TransformerLens, no tables, no figures.

Rooms and the files beside them; each imports only from those listed before it:

    errors      the exception for a user's mistake
    checks      the result of one check: value, limit, verdict
    memory      main memory: what fits, and keeping what is freed
    noise       random numbers that depend only on what they are for
    storage     file names, atomic writes, progress of long work
    units       g(a, b) of every kind, and how exchange and scaling act on it
    weights     q, k, v: cosines, norms, experts, interaction tensor, vocabulary read-outs
    sums        activations of a batch → float64 sums that add
    theory      the paper's forms, symmetries and claims
    measures    asymmetries, nulls, intervals and controls, from sums
    run         the results for one model on one corpus: save, load, merge
    causal      edits of h, and what they cost
    full_run    a run, what edits cost, and the run with random weights, together
    compare     two runs layer by layer, and the excess over random weights
    neuron      one neuron in detail: sample, contexts, read-outs
"""

import os

# Idle threads of GNU OpenMP spin for milliseconds and occupy a core that other threads could use, our own included. This
# spin count covers work that follows immediately. It has an effect only if set before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

__version__ = "0.1.0"
