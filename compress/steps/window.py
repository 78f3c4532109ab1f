"""The step `window`: layers of a decoder see fewer tokens back (sliding-window attention; Beltagy et al., Longformer,
arXiv:2004.05150). No weight changes; what a step reads of the key-value cache does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from penjing.compress.decoder.check import check_model
from penjing.compress.steps.base import Context, Step
from penjing.core.checkpoint.decoder import open_checkpoint, save_checkpoint
from penjing.core.errors import ConfigError
from penjing.core.manifest import verify, write_manifest
from penjing.core.models.config import DecoderConfig
from penjing.core.models.hf_config import with_windows
from penjing.core.models.tensor_names import tensor_shapes
from penjing.core.progress import plural
from penjing.core.work import Places


class Window(Step):
    """Sliding windows for layers of a decoder: each query sees so many tokens, and none before."""

    remedy: ClassVar[str] = "take longer windows"

    kind: Literal["window"] = Field(default="window", description="Let layers of a decoder see fewer tokens back.")
    windows: tuple[int, ...] = Field(
        min_length=1,
        description="Tokens that a query of each layer sees, its own included; 0 leaves a layer as it is. A shorter "
        "list repeats: [512, 512, 512, 0] gives three layers of four a window. Layers are "
        "numbered as the step finds them.",
    )

    def check(self, context: Context) -> None:
        """See `Step`."""
        if context.family.name != "decoder":
            raise ConfigError(
                f"steps of kind 'window' are for decoders, {context.model} is {context.family.said}; leave it out"
            )

    def run(self, places: Places, context: Context) -> dict[str, Any]:
        """See `Step`; the record has the window of each layer, None where it sees everything."""
        checkpoint = open_checkpoint(places.source)
        check_model(checkpoint)
        if checkpoint.manifest is not None:
            verify(places.source)
        config = narrowed(checkpoint.config, self.windows)

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name in tensor_shapes(config):
                yield name, open_checkpoint(places.source).get(name)  # opened anew: mapped pages count as memory

        dtype = str(checkpoint.get("model.embed_tokens.weight").dtype).removeprefix("torch.")
        save_checkpoint(places.partial, config, tensors(), tokenizer_from=places.source, dtype=dtype)
        made = {"command": "penjing compress", "penjing": version("penjing"), "step": self.model_dump(mode="json")}
        write_manifest(places.partial, "checkpoint", made)
        return {
            "kind": self.kind,
            "windows": [config.layer_window(layer) for layer in range(config.num_hidden_layers)],
            "model_type": config.model_type,
        }


def narrowed(config: DecoderConfig, windows: Sequence[int]) -> DecoderConfig:
    """`config` with windows; see `Window.windows`.

    Raises:
        ConfigError: a list that fits no layers, a layer that sees no more than that already, one with LSH attention, or
            a network with latent attention.
    """
    count = config.num_hidden_layers
    if len(windows) > count:
        raise ConfigError(
            f"windows has {plural(len(windows), 'number')}, and the network {plural(count, 'layer')}; give one for each"
        )
    if config.latent_attention is not None:
        raise ConfigError("a network with latent_attention has no windows; leave out the step of kind 'window'")
    made: list[int | None] = []
    for layer in range(count):
        asked, own = windows[layer % len(windows)], config.layer_window(layer)
        sees = own or config.max_position_embeddings
        if asked >= sees:
            raise ConfigError(f"windows: layer {layer} sees {sees} tokens as it is; give fewer than {asked}, or 0")
        if asked < 0:
            raise ConfigError(f"windows: {asked} of layer {layer} is negative; give the tokens that it sees, or 0")
        if asked and config.is_conv(layer):
            raise ConfigError(f"windows: layer {layer} has a short convolution, which has no window; give it 0")
        if asked and config.layer_type(layer) == "lsh_attention":
            raise ConfigError(f"windows: layer {layer} has lsh_attention, which no window limits; give it 0")
        made.append(asked or own)
    return with_windows(config, made)
