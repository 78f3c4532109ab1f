"""The task of training a draft network on what a decoder answers, which itself stays as it is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.draft import save_draft
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError
from penjing.core.models.decoder import table_basis
from penjing.core.progress import Progress, typed
from penjing.core.runtime.draft import DraftConfig
from penjing.train.align.drafted import Drafted
from penjing.train.align.sampler import AnySampler, EngineSampler
from penjing.train.families.rollouts import RolloutTuning
from penjing.train.objective.draft import DraftDistillation
from penjing.train.processes.world import World
from penjing.train.recipe.data import RolloutData
from penjing.train.recipe.recipe import RunRecipe
from penjing.train.state.initial import Constant, Given, Normal, Values, Weights

_DEVIATION = 0.02  # of first weights
_PREFIX = "draft."


class DraftTuning(RolloutTuning):
    """The decoder in `folder`, and a draft network that learns from its answers."""

    def __init__(self, folder: Path, recipe: RunRecipe, data: RolloutData, progress: Progress) -> None:
        if recipe.adapter is not None:
            raise ConfigError("algorithm.kind = 'draft' changes nothing of the model; leave [adapter] out")
        super().__init__(folder, recipe, data, progress)
        algorithm = self._algorithm
        if algorithm.kl:
            raise ConfigError("algorithm.kl holds a model that learns; leave it out with kind = 'draft'")
        if algorithm.answers is not None:
            self._check_other(algorithm.answers, "algorithm.answers")
        wanted = algorithm.known_tokens
        self._token_ids = known_tokens(self._learnt_tokens(), self.config.eos_token_ids, wanted, self.config.vocab_size)
        self._shape = DraftConfig(
            hidden_size=self.config.hidden_size,
            intermediate_size=algorithm.intermediate_size or self.config.intermediate_size,
            num_layers=algorithm.layers,
            vocab_size=self.config.vocab_size,
            num_known=len(self._token_ids),
        )
        self.unit = "tokens"
        self.objective = DraftDistillation(algorithm.guesses, data.temperature)

    def _learnt_tokens(self) -> list[int]:
        return [token for prompt in self._learnt for token in prompt.tokens]

    def build_model(self) -> nn.Module:
        """See `Task`."""
        model = Drafted(self.config, self._shape, self._token_ids)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(_PREFIX))
        return model

    def weights(self) -> Weights:
        """See `Task`: the decoder's are those of the checkpoint. The draft network begins with the decoder's rows of
        the known tokens, and guesses that nearly the same state follows."""
        known, seed = super().weights(), self._recipe.seed

        def weights(name: str, shape: tuple[int, ...]) -> Values:
            if not name.startswith(_PREFIX):
                return known(name, shape)
            if name == "draft.norm.weight":  # the decoder's state has passed its own last norm
                return Constant(float(self._of_decoder("model.norm.weight").pow(2).mean().sqrt()))
            if name == "draft.lm_head.weight":
                return Given(self._known_rows(self._head))
            if name == "draft.embed_tokens.weight":
                rows = self._known_rows("model.embed_tokens.weight")
                return Given(torch.cat([rows, rows.mean(0, keepdim=True)]))
            if name.endswith("down_proj.weight"):
                return Constant(0.0)
            return Constant(1.0) if len(shape) < 2 else Normal(shape, _DEVIATION, seed, name)

        return weights

    @property
    def _head(self) -> str:
        return "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"

    def _of_decoder(self, name: str) -> Tensor:
        return open_checkpoint(self._tokenizer).get(name).float()

    def _known_rows(self, name: str) -> Tensor:
        """The rows of the known tokens of a table of the decoder's, in the basis of its layers."""
        return table_basis(self._of_decoder(name)[self._token_ids], self.config)

    def _copied_bytes(self, world: World) -> int:
        answers = self._algorithm.answers
        if answers is None:
            return super()._copied_bytes(world)
        return sum(path.stat().st_size for path in answers.rglob("*.safetensors"))

    def _sampler(self, model: nn.Module, longest: int, world: World) -> AnySampler:
        answers = self._algorithm.answers
        if answers is None:
            return super()._sampler(model, longest, world)
        return EngineSampler(load_model(answers), longest)

    def export(self, model: nn.Module, folder: Path, created_by: dict[str, Any]) -> None:
        """See `Task`: the draft network alone."""
        assert isinstance(model, Drafted)
        save_draft(folder, model.draft, self._token_ids, self._of_decoder(self._head), created_by)

    def next_command(self, folder: Path) -> str:
        """See `Task`."""
        model = typed(self._algorithm.answers or self._tokenizer)
        return f"penjing serve {model} --set speculate=draft --set draft={typed(folder)}"


def known_tokens(seen: list[int], ends: tuple[int, ...] | list[int], count: int, vocab_size: int) -> Tensor:
    """(count,) int64 in ascending order: tokens that end a text, the most frequent ones of `seen`, and the first ones
    of the vocabulary."""
    frequent = [token for token, _ in Counter(seen).most_common()]
    ordered = dict.fromkeys([*ends, *frequent, *range(min(count, vocab_size))])
    return torch.tensor(sorted([token for token in ordered if token < vocab_size][:count]), dtype=torch.int64)
