"""One run on many processes: the same recipe, the same model code, the same numbers.

config.py     the recipe's [parallel], and what it demands of model and world
mesh.py       the processes as a grid (pipeline, replicate, shard, context, tensor), and its `World` for the loop
tensor.py     tensor and sequence parallelism of a decoder
context.py    stretches of a sequence: keys and values gathered
experts.py    experts of a layer in many processes: tokens travel to them
shard.py      ZeRO and data parallelism by FSDP2
probe.py      the links alone; traffic.py: what a trace says they carried; profile.py: both, for `--profile`

../parallelize.py applies all of it to a model in order, ../pipeline/ has stages of layers.
"""
