"""What a recipe's [parallel] asks of its model, and the memory of one rank of its run, from the settings alone: before
anything is built or started."""

from __future__ import annotations

from dataclasses import replace

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.vision_language import vision_language_config
from penjing.core.errors import ConfigError
from penjing.core.models.config import DecoderConfig
from penjing.train.numerics.precision import GROUPS
from penjing.train.parallel.config import ParallelConfig, check_parallel
from penjing.train.pipeline.shape import decoder_shape
from penjing.train.plan.memory import STATE_PER_PARAMETER, ParallelMemory, Run, parallel_memory, show_bytes
from penjing.train.recipe.data import RolloutData, SightData, TextData
from penjing.train.recipe.model import VisionLanguageModel
from penjing.train.recipe.recipe import RunRecipe, TrainRecipe


def check_recipe(recipe: RunRecipe, world_size: int) -> None:
    """Refuse a recipe whose [parallel] does not fit its model, or `world_size` processes.

    Raises:
        ConfigError: see `check_parallel`; or there are fewer servers than processes that sample.
    """
    if isinstance(recipe.data, RolloutData) and 0 < len(recipe.data.servers) < world_size:
        raise ConfigError(
            f"data.servers names {len(recipe.data.servers)}, and {world_size} processes sample at once; name one for "
            "each at least"
        )
    evaluation = recipe.evaluation
    if (evaluation.best or evaluation.patience) and not evaluation.every:
        raise ConfigError("evaluation.best and evaluation.patience need evaluations; set evaluation.every above 0")
    if recipe.parallel == ParallelConfig():
        return
    if recipe.parallel.shares == "auto" and recipe.objective.kind in ("clip", "siglip"):
        raise ConfigError(
            f"objective.kind = {recipe.objective.kind!r} compares each sample with those of all processes, which needs "
            "equally many in each; set parallel.shares = 'equal'"
        )
    if recipe.parallel.shares == "auto" and recipe.data.kind == "rollouts":
        raise ConfigError(
            "data.kind = 'rollouts': the answers that the model samples are shared out equally; set parallel.shares = "
            "'equal'"
        )
    split = recipe.parallel.tp * recipe.parallel.pp * recipe.parallel.cp
    if evaluation.prompts and split > 1:
        raise ConfigError(
            "evaluation.prompts need a model that is whole in each process or spread by parallel.zero; leave them out, "
            "or set parallel.tp, pp and cp to 1"
        )
    if recipe.parallel.pp > 1 and recipe.freeze:
        raise ConfigError("freeze is not for pipelines; set parallel.pp = 1, or leave freeze out")
    length = getattr(recipe.data, "sequence_length", None)
    sees = isinstance(recipe.data, SightData)  # the image token makes its vocabulary odd
    check_parallel(recipe.parallel, _spread(recipe), world_size, length, recipe.compile, any_vocabulary=sees)
    if recipe.parallel.cp > 1 and getattr(recipe.data, "document_mask", False):
        raise ConfigError("data.document_mask = true is not for parallel.cp above 1; set one of them back")
    if recipe.optimizer.name == "muon" and not recipe.parallel.is_plain:
        raise ConfigError(
            "optimizer.name = 'muon' needs whole matrices, and this [parallel] splits them: use data parallelism alone "
            "(parallel.zero = 0, tp = pp = cp = ep = 1), or 'adamw'"
        )
    if recipe.compile and recipe.parallel.tp > 1 and recipe.precision.widens_softmax():
        raise ConfigError(
            "compile = true with parallel.tp above 1 cannot compute softmax alone in fp32, which torch's compiler does "
            "not get through; set precision.mode = 'bf16' (in precision.schedule too) and leave softmax out of "
            "precision.policy, or set compile = false"
        )
    groups = ", ".join(GROUPS)
    if recipe.parallel.pp * recipe.parallel.ep > 1 and any(
        rule.match not in GROUPS for rule in recipe.precision.policy
    ):
        raise ConfigError(
            f"precision.policy with parallel.pp or ep above 1 takes groups only, no module names: {groups}"
        )
    if recipe.parallel.splits_backward and recipe.memory.recompute != "none":
        raise ConfigError(
            f"parallel.schedule = {recipe.parallel.schedule!r} splits the backward pass, and would recompute twice; "
            "set memory.recompute = 'none', or use '1f1b' or 'interleaved'"
        )
    if not recipe.parallel.is_plain and recipe.data.micro_batch == "auto":
        raise ConfigError("data.micro_batch = 'auto' is measured on a whole model; give a number with this [parallel]")


def _spread(recipe: RunRecipe) -> object:
    """What [parallel] spreads: the recipe's model, or the decoder of one that sees."""
    model = getattr(recipe, "model", None)
    if not isinstance(recipe.data, SightData):
        return model
    if isinstance(model, VisionLanguageModel):
        return open_checkpoint(model.decoder).config
    return None if recipe.initial is None else vision_language_config(recipe.initial).decoder


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
    micro_batch = 1 if data.micro_batch == "auto" else data.micro_batch or parallel.default_micro_batch(share)
    if share % micro_batch:
        raise ConfigError(f"data.micro_batch={micro_batch} does not divide the {share} samples of a group")
    passes = parallel.micro_batches or share // micro_batch
    return Run(parallel, dp, micro_batch, passes, data.sequence_length, recipe.memory.recompute)


def check_run(recipe: RunRecipe, processes: int, limit: int) -> None:
    """`check_rank_memory` of a run in many processes, if it is of those that it counts: decoders on text, without
    shared layers and with one kind of recomputation.

    Raises:
        ConfigError: see `check_rank_memory`.
    """
    if processes == 1 or not isinstance(recipe, TrainRecipe) or not isinstance(recipe.model, DecoderConfig):
        return
    if not isinstance(recipe.data, TextData):
        return
    if recipe.model.shared_layers == 1 and not recipe.memory.recompute_rules:
        check_rank_memory(recipe, processes, limit)


def check_rank_memory(recipe: TrainRecipe, processes: int, limit: int) -> ParallelMemory:
    """The memory of the rank that needs most; averaged weights count as the optimiser's.

    Raises:
        ConfigError: more than `limit` bytes; says what to change first.
    """
    run = recipe_run(recipe, processes)
    need = parallel_memory(decoder_shape(recipe.model), run)
    states = STATE_PER_PARAMETER[recipe.optimizer.name] + (recipe.average is not None)
    need = replace(need, optimizer=need.optimizer * states / STATE_PER_PARAMETER["adamw"])
    if need.total <= limit:
        return need
    state = need.total - need.activations - need.logits
    if state > limit:
        advice = "the model's state alone is too large: raise parallel.zero, parallel.tp, parallel.pp or the processes"
    elif run.micro_batch > 1:
        advice = f"lower data.micro_batch to {(limit - state) / (need.total - state):.0%} of it, or recompute"
    else:
        advice = "set memory.recompute = 'full', or raise parallel.tp, parallel.cp or parallel.pp"
    raise ConfigError(
        f"a rank needs {need}, only {show_bytes(limit)} may be used (memory.limit); {advice} (penjing train plan "
        "searches)"
    )
