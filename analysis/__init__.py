"""The measures in pure torch: no model, no TransformerLens, no tables, no figures.

checks     the result of one check: value, limit, verdict
compare    two runs layer by layer, and the excess over random weights
errors     the exception for mistakes of the user
memory     main memory: what fits, and keeping what is freed
neuron     one neuron in detail: sample, contexts, read-outs
noise      random numbers that depend only on their place
run        the results for one model on one corpus: save, load, merge
"""

import os

# Idle threads of GNU OpenMP spin for milliseconds and occupy a core that other threads could use, our own included. This
# spin count covers work that follows immediately. It has an effect only if set before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

__version__ = "0.1.0"
