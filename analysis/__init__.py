"""The measures, in plain torch: no model, no TransformerLens, no tables, no figures."""

__version__ = "0.1.0"
