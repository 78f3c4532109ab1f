"""One run on many processes: the same recipe, the same model code, the same numbers.

config.py     the recipe's [parallel], and what it demands of model and world
mesh.py       the processes as a grid (pipeline, replicate, shard, context, tensor), and its `World` for the loop
tensor.py     tensor and sequence parallelism of a decoder
context.py    stretches of a sequence: keys and values gathered
pipeline.py   stages of layers, run by torch.distributed.pipelining
launch.py     torchrun on this machine
shard.py      ZeRO and data parallelism by FSDP2
apply.py      all of it, applied to a model in order
"""
