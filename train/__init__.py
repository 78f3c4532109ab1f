"""Training: a recipe in, a full-precision checkpoint out; one loop for every objective.

The seams, none of which knows the others, from below (a folder imports those above it in this list only):

numerics     a precision for each module pattern, a schedule over the run, recomputation; the gradients of a process
processes    the processes of a run: sums over them, replicas, the watch that ends all of them with one error
state        a tree of tensors and plain values ⇄ safetensors and JSON, whole or in parts
objective    a value, called as objective(model, batch): the sum of a loss and what it counts
optim        parameter groups, learning rate as a function of the step, clipping, loss scaling
data         an endless, deterministic iterator of batches with a state_dict
monitor      records to TensorBoard, JSONL and Prometheus; alarms
parallel     a mesh of processes, and what each of its dimensions does to a model
pipeline     stages of layers on a mesh; schedules, splits and their simulation
recipe       what a recipe says, of the settings of all those above
families     what a kind of network brings: its task, and the data that it learns from
plan         memory and time of a run before it runs; the search for the best mesh

loop.py wires them; parallelize.py spreads a model over a mesh; run.py builds all from a recipe; launch/ starts it in
many processes, search/ many times with other settings. Distillation and quantization-aware training bring another
objective, a pruned model another model, parallelism another world.
"""
