"""The tasks that learn from pairs of answers: a decoder that prefers the better one, or a model of rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from penjing.core.checkpoint.reward import save_reward
from penjing.core.errors import ConfigError
from penjing.core.models.reward import RewardModel
from penjing.core.progress import Progress, typed
from penjing.train.chat.preferences import Pairs, pair_batch
from penjing.train.chat.reference import reference_logprobs
from penjing.train.chat.rows import Row, TooLongError, take_rows
from penjing.train.chat.tokens import ChatTokens, Pair
from penjing.train.families.rows import RowTask, ready_config
from penjing.train.objective.balancing import BalancingConfig
from penjing.train.objective.objective import Batch, TaskObjective
from penjing.train.objective.preference import DirectPreference, RewardModeling
from penjing.train.processes.devices import choose_device
from penjing.train.recipe.data import PreferenceData
from penjing.train.recipe.recipe import RunRecipe
from penjing.train.state.initial import Normal, Values, Weights, checkpoint_weights


class PreferenceTuning(RowTask[PreferenceData, Pairs]):
    """The decoder in `folder` on pairs of answers, by direct preference optimisation."""

    unit = "pairs"

    def __init__(self, folder: Path, recipe: RunRecipe, data: PreferenceData, progress: Progress) -> None:
        _check_run(recipe)
        config = ready_config(folder, data)
        self._writer = ChatTokens.from_folder(folder, data.template)
        template = None if data.template is None or self._writer.template is None else self._writer.template.text
        super().__init__(recipe, config, folder, progress, template)
        self._data = data

        def take(row: Row) -> Pair:
            found = self._writer.pair(row)
            if len(found.prompt) + max(len(found.chosen), len(found.rejected)) > data.sequence_length:
                raise TooLongError
            return found

        pairs, _ = take_rows(data.sources, take, data.most_damaged, progress)
        keys = [pair.prompt.tobytes() for pair in pairs]
        held, judged = self._held_places(keys)
        known = self._reference(folder, pairs, progress)
        learnt = [place for place in range(len(pairs)) if place not in held]
        pad = next(iter(config.eos_token_ids), 0) if config.pad_token_id is None else config.pad_token_id
        self._learnt, self._held = (
            Pairs([pairs[place] for place in places], None if known is None else known[places], pad)
            for places in (learnt, judged)
        )
        wanted = recipe.objective
        self.objective: TaskObjective = DirectPreference(wanted.loss, wanted.beta, wanted.label_smoothing, wanted.sft)

    def _reference(self, folder: Path, pairs: list[Pair], progress: Progress) -> Tensor | None:
        wanted = self._recipe.objective.reference or folder
        return reference_logprobs(wanted, folder, pairs, choose_device(self._recipe.device), progress)

    def prompt(self, text: str) -> list[int]:
        """See `DecoderTask`: a turn of the user, where there is a template."""
        return self._writer.prompt({"prompt": text})

    def example(self, micro_batch: int) -> Batch:
        """See `Task`: the pairs with the longest answers, at full length."""
        learnt = self._learnt
        longest = max(learnt.pairs, key=lambda pair: len(pair.chosen) + len(pair.rejected))
        known = None if learnt.reference is None else learnt.reference[:1].expand(micro_batch, 2).contiguous()
        return pair_batch([longest] * micro_batch, learnt.pad, length=self._data.sequence_length, reference=known)


class RewardTraining(PreferenceTuning):
    """The decoder in `folder`, with a score in place of its head, on pairs of answers."""

    def __init__(self, folder: Path, recipe: RunRecipe, data: PreferenceData, progress: Progress) -> None:
        if recipe.adapter is not None:
            raise ConfigError("[adapter] is not for reward models, whose score has none; leave it out")
        if recipe.evaluation.prompts:
            raise ConfigError(
                "evaluation.prompts are for models that answer, and a reward model scores; leave them out"
            )
        super().__init__(folder, recipe, data, progress)
        self.objective = RewardModeling(recipe.objective.centring)

    def _reference(self, folder: Path, pairs: list[Pair], progress: Progress) -> None:
        return None

    def build_model(self) -> nn.Module:
        """See `Task`."""
        return RewardModel(self.config)

    def weights(self) -> Weights:
        """See `Task`: those of the checkpoint, and a score of deviation 1 / √(E + 1)."""
        assert self._recipe.initial is not None
        backbone, deviation = checkpoint_weights(self._recipe.initial), (self.config.hidden_size + 1) ** -0.5

        def weights(name: str, shape: tuple[int, ...]) -> Values:
            if name == "score.weight":
                return Normal(shape, deviation, self._recipe.seed, name)
            return backbone(name, shape)

        return weights

    def export(self, model: nn.Module, folder: Path, created_by: dict[str, Any]) -> None:
        """See `Task`: as Hugging Face's sequence classifier."""
        assert isinstance(model, RewardModel)
        save_reward(folder, model, self._tokenizer, created_by)

    def next_command(self, folder: Path) -> str:
        """See `Task`: a model that scores is asked by the runs that learn from it."""
        return f"penjing train smollm2-ppo --set initial={typed(self._tokenizer)} --set reward.folder={typed(folder)}"


def preference_task(folder: Path, recipe: RunRecipe, data: PreferenceData, progress: Progress) -> PreferenceTuning:
    """The task that the recipe's objective asks for.

    Raises:
        ConfigError: cross-entropy has no pairs.
    """
    tasks = {"dpo": PreferenceTuning, "reward": RewardTraining}
    if recipe.objective.kind not in tasks:
        raise ConfigError(
            f"data.kind = 'preference' has pairs of answers, which objective.kind = {recipe.objective.kind!r} does not "
            "compare; set objective.kind = 'dpo' or 'reward'"
        )
    return tasks[recipe.objective.kind](folder, recipe, data, progress)


def _check_run(recipe: RunRecipe) -> None:
    if recipe.balancing != BalancingConfig():
        raise ConfigError(
            "[balancing] is not for data.kind = 'preference', where nobody counts the load of experts; leave it out"
        )
    parallel = recipe.parallel
    if parallel.pp * parallel.cp * parallel.ep > 1 or parallel.sequence:
        raise ConfigError(
            "data.kind = 'preference' takes parallel.dp, zero and tp; set parallel.pp, cp and ep to 1 and "
            "parallel.sequence to false"
        )
    if recipe.compile:
        raise ConfigError(
            "compile = true is not for data.kind = 'preference': every batch has answers of other lengths; set it to "
            "false"
        )
