"""What all ways of training a decoder share: its weights, what is looked at while it learns, and its export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from penjing.core.checkpoint.decoder import save_checkpoint
from penjing.core.errors import ConfigError, RequestError
from penjing.core.files import atomic_write_text
from penjing.core.manifest import write_manifest
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.models.hf_config import decoder_config_to_hf
from penjing.core.models.tensor_names import tensor_shapes
from penjing.core.progress import Progress
from penjing.core.text.tokenizer import Tokenizer
from penjing.train.adapter.lora import adapt, adapted_weights, check_adapter, merged
from penjing.train.adapter.peft import load_adapter, save_adapter
from penjing.train.chat.rows import RowError
from penjing.train.monitor.samples import Samples
from penjing.train.objective.balancing import Balanced, BalancingConfig
from penjing.train.objective.objective import CrossEntropy, TaskObjective
from penjing.train.processes.world import World
from penjing.train.recipe.recipe import RunRecipe
from penjing.train.state.initial import Weights, checkpoint_weights, fill_weights, without_data


class DecoderTask:
    """A decoder; what it learns from is added by its subclasses.

    Args:
        config: its architecture.
        tokenizer: the folder of its tokenizer, which goes on into what is exported.
        template: the text of a chat template that is exported in place of the tokenizer's.
    """

    unit = "tokens"
    _network: type[Decoder] = Decoder

    def __init__(
        self, recipe: RunRecipe, config: DecoderConfig, tokenizer: Path, progress: Progress, template: str | None = None
    ) -> None:
        self._recipe = recipe
        self._progress = progress
        self.config = config
        self._tokenizer, self._template = tokenizer, template
        decoder_config_to_hf(config)  # a model that no config.json can state is refused before the run
        self._adapter: dict[str, Tensor] | None = None  # that the run begins with
        if recipe.adapter is not None:
            _check_adapter(recipe)
            if recipe.adapter.initial is not None:
                assert recipe.initial is not None, "or there was no base"
                self._adapter = load_adapter(recipe.adapter.initial, recipe.adapter, recipe.initial)
                with without_data():
                    check_adapter(self._adapter, self.build_model())
        self._prompts = tuple((text, self._prompt_tokens(text)) for text in recipe.evaluation.prompts)
        self._balanced = _balanced(recipe, config)
        self.objective: TaskObjective = self._balanced or _cross_entropy(recipe)

    def build_model(self) -> nn.Module:
        """See `Task`."""
        model = self._network(self.config)
        if self._recipe.adapter is not None:
            adapt(model, self._recipe.adapter)
        return model

    def initialize(self, model: nn.Module) -> None:
        """See `Task`."""
        fill_weights(model, self.weights())

    def weights(self) -> Weights:
        """See `Task`: those of the checkpoint."""
        folder, adapter = self._recipe.initial, self._recipe.adapter
        assert folder is not None, "a ready model has `initial` weights"
        base = checkpoint_weights(folder)
        if adapter is None:
            return base
        return adapted_weights(base, self._recipe.seed, self._adapter)

    def prompt(self, text: str) -> Sequence[int]:
        """The tokens of a prompt of `evaluation.prompts`."""
        return Tokenizer.from_folder(self._tokenizer).encode(text)

    def _prompt_tokens(self, text: str) -> list[int]:
        """`prompt`, of which there is one, and which the model can see.

        Raises:
            ConfigError: it is empty, no text, or too long.
        """
        try:
            tokens = list(self.prompt(text))
        except (RowError, RequestError) as error:
            raise ConfigError(f"evaluation.prompts: {text!r:.60}: {error}; give another") from error
        if not tokens:
            raise ConfigError(f"evaluation.prompts: {text!r:.60} has no tokens to go on from; give a text")
        if len(tokens) > (most := self.config.max_position_embeddings):
            raise ConfigError(
                f"evaluation.prompts: {text!r:.60} has {len(tokens)} tokens, and the model sees {most}; shorten it"
            )
        return tokens

    def after_update(self, model: nn.Module, world: World) -> tuple[Callable[[int], None], ...]:
        """See `Task`: router biases."""
        if self._balanced is None:
            return ()
        self._balanced.world = world
        return (self._balanced.bias_update(model, world),) if self._balanced.config.bias_rate else ()

    def samples(self, model: nn.Module, world: World) -> Callable[[int], None] | None:
        """See `ShowingTask`: answers to `evaluation.prompts`."""
        evaluation = self._recipe.evaluation
        if not self._prompts:
            return None
        tokenizer, path = Tokenizer.from_folder(self._tokenizer), self._recipe.run_folder / "samples.jsonl"
        shown = Samples(self.config, tokenizer, self._prompts, evaluation.max_tokens, path, self._progress)
        return shown.hook(model, world)

    def export(self, model: nn.Module, folder: Path, created_by: dict[str, Any]) -> None:
        """See `Task`; an adapter is merged, and lies in the folder `adapter` too."""
        parameters, adapter = dict[str, Tensor](model.named_parameters()), self._recipe.adapter
        if adapter is not None:
            assert self._recipe.initial is not None
            save_adapter(folder / "adapter", parameters, adapter, self._recipe.initial)
            parameters = dict(merged(parameters, adapter.scale))
        tensors = ((name, parameters[name].detach().cpu()) for name in tensor_shapes(self.config))
        save_checkpoint(folder, self.config, tensors, tokenizer_from=self._tokenizer)
        if self._template is not None:
            atomic_write_text(folder / "chat_template.jinja", self._template)
        write_manifest(folder, "checkpoint", created_by)

    def next_command(self, folder: Path) -> str:
        """See `Task`."""
        return f'penjing generate {folder} "The import statement"'


def _check_adapter(recipe: RunRecipe) -> None:
    parallel = recipe.parallel
    if recipe.initial is None:
        raise ConfigError("[adapter] learns beside the weights of a checkpoint; name one by initial")
    if parallel.tp * parallel.pp * parallel.cp * parallel.ep > 1:
        raise ConfigError("[adapter] takes parallel.dp and zero; set parallel.tp, pp, cp and ep to 1")


def _cross_entropy(recipe: RunRecipe) -> CrossEntropy:
    return CrossEntropy("tokens", recipe.objective.label_smoothing)


def _balanced(recipe: RunRecipe, config: DecoderConfig) -> Balanced | None:
    """The objective of a decoder with experts; None for one without."""
    balancing = recipe.balancing
    if config.moe is None:
        if balancing != BalancingConfig():
            raise ConfigError("[balancing] is for experts, and the model has none; add [model.moe] or leave it out")
        return None
    if balancing.bias_rate and not config.moe.router_bias:
        raise ConfigError(
            f"balancing.bias_rate={balancing.bias_rate} moves router biases, and the model has none; set "
            "model.moe.router_bias = true, or use balancing.auxiliary_loss"
        )
    return Balanced(_cross_entropy(recipe), balancing)
