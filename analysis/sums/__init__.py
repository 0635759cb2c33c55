"""From activations to sums: everything that is computed while the model runs.

batch             windows, batches of them, and their tiles
compiled          the sums of a tile compiled by torch, and their check against eager ones
eager             the sums of a tile in eager torch
extremes          peaks of neurons, and tokens of largest energy
fused_reducer     the fast reducer for a CPU, and the choice of a reducer
kernel            the compiled loops over a tile, for a CPU (numba)
layout            which sums there are, in which rows, and the range of α
moments           the sums of a layer as a value that adds, and their accumulator
output_edits      the edits of all units of a layer whose effect on its output is measured
output_moments    the sums of what a layer writes, edited and not, and their accumulator
reducer           what a reducer is, and the running sums it adds to
tiled             the reducer in torch, for every device, precision and unit
token_histograms  measures token by token, and the tokens of largest energy, in bins
token_sample      a random sample of tokens that does not depend on the order of reading
"""
