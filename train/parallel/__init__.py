"""One run on many processes: the same recipe, the same model code, the same numbers.

config.py     the recipe's [parallel], and what it demands of model and world
mesh.py       the processes as a grid (pipeline, replicate, shard, context, tensor), and its `World` for the loop
tensor.py     tensor and sequence parallelism of a decoder
context.py    stretches of a sequence: keys and values gathered
experts.py    experts of a layer in many processes: tokens travel to them
pipeline.py   stages of layers, run by torch.distributed.pipelining
launch.py     torchrun on this machine, as agent.py runs it
watch.py      processes that die or hang end all of them with one error; processes.py asks the system about them
shard.py      ZeRO and data parallelism by FSDP2
apply.py      all of it, applied to a model in order
"""
