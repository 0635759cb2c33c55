"""The family of MLPs, its symmetries, and the predictions of theory beside measurements.

actions        the symmetries as actions on weights
claims         predictions of theory beside measurements
conversions    from one form to another
forms          the family of MLPs, from key-value memory to bilinear attention
gated          the gated forms, and the list of all forms
properties     which symmetries a unit has, by derivation
"""
