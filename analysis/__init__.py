"""The measures, in plain torch: no model, no TransformerLens, no tables, no figures."""

import os

# Threads of GNU OpenMP that wait for work spin for milliseconds, and so take a core from whoever else would use it, our own
# threads among them. This is long enough for what follows at once; it has an effect only before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

__version__ = "0.1.0"
