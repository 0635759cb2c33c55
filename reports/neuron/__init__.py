"""The page of one neuron.

summary  its numbers, rank, scaling curve, costs and sentences
figures  its response surface and scaling curve
page     the page itself, for a file or a notebook
"""
