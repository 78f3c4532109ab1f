"""What all ways of training a decoder share: its weights, what is looked at while it learns, and its export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from penjing.core.checkpoint.decoder import open_checkpoint, save_checkpoint
from penjing.core.errors import ConfigError, RequestError
from penjing.core.files import atomic_write_text
from penjing.core.manifest import write_manifest
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.models.hf_config import decoder_config_to_hf
from penjing.core.models.tensor_names import tensor_shapes
from penjing.core.progress import Progress, typed
from penjing.core.text.chat import ChatTemplate
from penjing.core.text.tokenizer import Tokenizer
from penjing.train.adapter.int8 import Int8Base, read_int8_base
from penjing.train.adapter.lora import adapt, adapted_weights, check_adapter, merge
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
        self._int8: Int8Base | None = None  # what the adapter learns beside, if not floating-point numbers
        if recipe.adapter is not None:
            folder = _check_adapter(recipe)
            if recipe.adapter.base == "int8":
                self._int8 = read_int8_base(folder, config)
            if recipe.adapter.initial is not None:
                self._adapter = load_adapter(recipe.adapter.initial, recipe.adapter, folder)
                with without_data():
                    check_adapter(self._adapter, self.build_model())
        self._prompts = tuple((text, self._prompt_tokens(text)) for text in recipe.evaluation.prompts)
        self._balanced = _balanced(recipe, config)
        self.objective: TaskObjective = self._balanced or _cross_entropy(recipe)

    def build_model(self) -> nn.Module:
        """See `Task`."""
        model = self._network(self.config)
        if self._int8 is not None:
            self._int8.apply(model)
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
        base = checkpoint_weights(folder) if self._int8 is None else self._int8.weights()
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
        """See `Task`; an adapter is merged, one tensor at a time, and lies in the folder `adapter` too. Beside an
        artifact, whose integers would have to be made anew, it is written alone."""
        parameters, adapter = dict[str, Tensor](model.named_parameters()), self._recipe.adapter
        if adapter is not None:
            base = self._recipe.initial
            assert base is not None
            if self._int8 is not None and self._int8.is_artifact:
                save_adapter(folder, parameters, adapter, base)
                write_manifest(folder, "adapter", created_by)
                return
            (folder / "adapter").mkdir()
            save_adapter(folder / "adapter", parameters, adapter, base)
        save_checkpoint(folder, self.config, self._exported(parameters), tokenizer_from=self._tokenizer)
        if self._template is not None:
            atomic_write_text(folder / "chat_template.jinja", self._template)
        write_manifest(folder, "checkpoint", created_by)

    def _exported(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(Name, tensor) of the whole network, each made when it is asked for. An adapter is merged with what was
        rounded, not with the integers."""
        adapter = self._recipe.adapter
        for name in tensor_shapes(self.config):
            # Opened for each: what was read of a mapped file counts as memory of the process until it is closed.
            tensor = parameters[name] if self._int8 is None else open_checkpoint(self._int8.folder).get(name).float()
            if adapter is not None:
                tensor = merge(name, tensor, parameters, adapter.scale)
            yield name, tensor.detach().cpu()

    def next_command(self, folder: Path) -> str:
        """See `Task`."""
        return self._served_beside(folder) or _gone_on(folder)

    def _asked(self, folder: Path) -> str:
        """What `next_command` says of a model that learnt to answer: it chats where there is a template to chat by."""
        if ChatTemplate.from_folder(folder) is None:
            return _gone_on(folder)
        return f"penjing serve {typed(folder)}, then penjing chat"

    def _served_beside(self, folder: Path) -> str:
        """How to serve an adapter that was written alone; empty where a whole network was."""
        if self._int8 is None or not self._int8.is_artifact:
            return ""
        beside = f"{folder.name}={folder}"
        return f"penjing serve {typed(self._int8.folder)} --openai 8080 --adapter {typed(beside)}"


def _gone_on(folder: Path) -> str:
    return f'penjing generate {typed(folder)} "The import statement"'


def _check_adapter(recipe: RunRecipe) -> Path:
    """The folder that the adapter is trained beside."""
    parallel = recipe.parallel
    assert recipe.adapter is not None
    if recipe.initial is None:
        raise ConfigError("[adapter] learns beside the weights of a checkpoint; name one by initial")
    if parallel.pp * parallel.cp * parallel.ep > 1:
        raise ConfigError("[adapter] takes parallel.dp, zero and tp; set parallel.pp, cp and ep to 1")
    if parallel.tp > 1 and recipe.adapter.base == "int8":
        raise ConfigError("adapter.base = 'int8' takes parallel.dp and zero; set parallel.tp to 1")
    if recipe.adapter.base == "float" and open_checkpoint(recipe.initial).quantization is not None:
        raise ConfigError(
            f"initial = {recipe.initial} is quantized; set adapter.base = 'int8' to learn beside its integers, or give "
            "the checkpoint that it was made from"
        )
    return recipe.initial


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
