"""Memory of one rank of a recipe's run, from its settings alone: before anything is built or started."""

from __future__ import annotations

from penjing.core.errors import ConfigError
from penjing.train.parallel.config import check_parallel
from penjing.train.plan.memory import ParallelMemory, Run, parallel_memory
from penjing.train.plan.shape import decoder_shape
from penjing.train.recipe import TextData, TrainRecipe


def recipe_run(recipe: TrainRecipe, processes: int) -> Run:
    """How `processes` processes would run the recipe; micro_batch "auto" counts as 1, the least it can become.

    Raises:
        ConfigError: no decoder on text, a mesh that does not fit, or a batch that does not divide.
    """
    if not isinstance(recipe.data, TextData):
        raise ConfigError("memory of a rank is counted for decoders on text; give a recipe with data.kind = 'text'")
    data, parallel = recipe.data, recipe.parallel
    check_parallel(parallel, recipe.model, processes, data.sequence_length, recipe.compile)
    dp = parallel.data_size(processes)
    if data.batch_size % dp:
        raise ConfigError(f"data.batch_size={data.batch_size} is not divisible by the {dp} data-parallel groups")
    share = data.batch_size // dp
    micro_batch = 1 if data.micro_batch == "auto" else data.micro_batch or share
    if share % micro_batch:
        raise ConfigError(f"data.micro_batch={micro_batch} does not divide the {share} samples of a group")
    passes = parallel.micro_batches or share // micro_batch
    return Run(parallel, dp, micro_batch, passes, data.sequence_length, recipe.memory.recompute)


def check_rank_memory(recipe: TrainRecipe, processes: int, limit: int) -> ParallelMemory:
    """The memory of the rank that needs most.

    Raises:
        ConfigError: more than `limit` bytes; says what to change first.
    """
    need = parallel_memory(decoder_shape(recipe.model), recipe_run(recipe, processes))
    if need.total <= limit:
        return need
    state = need.model_state + need.gathered
    if state > limit:
        advice = "the model's state alone is too large: raise parallel.zero, parallel.tp, parallel.pp or the processes"
    else:
        advice = f"lower data.micro_batch to {max((limit - state) / (need.total - state), 0):.0%} of it, or recompute"
    raise ConfigError(
        f"a rank needs {need}, only {limit / 2**30:.1f} GiB may be used; {advice} (penjing train plan searches)"
    )
