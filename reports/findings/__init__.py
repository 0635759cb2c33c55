"""The tables and the figure of docs/findings.md.

__main__     the command that writes them into the document
runs         the saved runs of each model
activations  tables of activations and weights
causal       tables of costs of edits
figure       all models by relative depth
"""
