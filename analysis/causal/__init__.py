"""What an edit of a layer or a neuron costs the model.

costs         results of the sweep and the attribution, saved beside a run
divergence    KL divergence and rise of the cross-entropy
edits         the edits, changes of some neurons and positions, and placebos
"""
