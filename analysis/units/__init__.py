"""Gated units g(a, b): activations, the units of real models, and their names.

activations  gate activations σ with their limiting slopes
base         the gated unit g(a, b) = gate(a)·up(b), and exchange and scaling of it
names        names with parameters, like clamped(silu,7): writing and parsing them
registry     all units by name, and which unit a layer has
variants     units that are not σ(a)·b: clamped, soft-capped, gpt-oss, top-k
"""
