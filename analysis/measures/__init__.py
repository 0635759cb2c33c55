"""From sums to numbers: measures, their errors and their nulls.

asymmetry         the measures as functions of sums
controls          what must be zero, and what must not, on each layer
estimates         every number of a layer, through one value
excess            nulls of a measure, and the excess over them with its error
expert_numbers    the numbers of every expert
false_discovery   which neurons differ from the permutation null
gaussian_null     the null of jointly normal pre-activations
jackknife         standard errors over sequences
layer_numbers     the numbers of a layer, and its scaling curve
layer_sums        what every number is computed from, and the shared nulls
neuron_numbers    the numbers of every neuron, and the extreme neurons
output_numbers    the numbers of what a layer writes
output_ranks      in how many directions it writes, and where balanced exchange changes it
permutation_null  the variance of the permutation null
token_numbers     medians over tokens, trimmed values, massive-activation tokens
"""
