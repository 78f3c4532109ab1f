"""Training: a recipe in, a full-precision checkpoint out; one loop for every objective.

The seams, each one file, none of which knows the others:

model       any nn.Module (penjing.core.models); knows no precision and no other process
objective   objective.py: a value, called as objective(model, batch): the sum of a loss and what it counts
stream      data/: an endless, deterministic iterator of batches with a state_dict
precision   precision.py: a policy per module pattern, a schedule over the run, applied from outside
gradients   gradients.py, loss_scale.py: norm, clipping, loss scaling
optimiser   optimizer.py, schedule.py: parameter groups, learning rate as a function of the step
state       state.py, checkpoint.py: a tree of tensors and plain values ⇄ safetensors and JSON
monitor     monitor.py, sinks.py, alarms.py: records to TensorBoard, JSONL and Prometheus
world       world.py: the processes of a run: sums over them, replicas

loop.py wires them; run.py builds them from a recipe. Distillation and quantization-aware training bring another
objective, a pruned model another model, parallelism another world.
"""
