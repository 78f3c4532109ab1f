"""Load a checkpoint or a quantized artifact as a decoder that is ready to run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint
from penjing.core.checkpoint.sight import load_sight, read_sight_config
from penjing.core.checkpoint.vision_language import load_vision_language, vision_language_config
from penjing.core.errors import InputError
from penjing.core.family import family_of
from penjing.core.manifest import MANIFEST_NAME, Manifest, read_manifest, verify
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.models.rope import at_context, inverse_frequencies
from penjing.core.models.tensor_names import TOKEN_INPUTS
from penjing.core.runtime.batch_invariant import apply_batch_invariance, apply_image_invariance
from penjing.core.runtime.embedding import Int8Embedding, stored_table, tied_name
from penjing.core.runtime.quantized import apply_quantized
from penjing.core.runtime.schemes import EMBEDDING_MODULE, has_int8_embedding, quantized_modules
from penjing.core.runtime.tensor_parallel import Split
from penjing.core.text.chat import ChatTemplate
from penjing.core.text.tokenizer import Tokenizer
from penjing.core.vision.sight import Sight, SightConfig
from penjing.core.vision.vision_language import VisionLanguage

SEES = "vision_language"
EMBEDDING = "model.embed_tokens.weight"
SchemeName = Literal["fp32", "int8", "int4"]
# Older Hugging Face checkpoints store the rotary frequencies, which follow from config.json.
DERIVED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class LoadedModel:
    """A model and what came with it."""

    model: Decoder
    config: DecoderConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    manifest: Manifest | None  # None: a plain Hugging Face folder
    scheme: SchemeName
    sight: Sight | None = None  # of a decoder that sees


def load_model(
    folder: Path,
    device: str | torch.device = "cpu",
    share: tuple[int, int] | None = None,
    context: int | None = None,
) -> LoadedModel:
    """Load `folder`, a checkpoint or an artifact, for inference.

    Hashes are checked meanwhile where there is a manifest; nothing is returned before they are. Tensors are taken one
    at a time, on the CPU as views of the mapped file where no conversion is needed: peak memory is about that of the
    model. Quantized weights are views of a mapping of their own, which ends with the last of them. Everything
    runs in float32 except quantized layers; an embedding that is not tied to the LM head stays in its stored type.

    Args:
        folder: where it lies.
        device: where tensors go.
        share: (rank, ranks): of float layers the part of that process is kept, see `core.runtime.tensor_parallel`.
        context: tokens of a text at most, where a smaller context than the folder's is another function (`longrope`).

    Raises:
        InputError: a missing, damaged or unknown file, a missing or unexpected tensor, a scheme penjing does not run.
    """
    if (folder / "config.json").is_file() and family_of(folder) == SEES:
        return _load_seeing(folder)
    checkpoint = open_checkpoint(folder)
    checkpoint.config = _within(checkpoint.config, context)
    with ThreadPoolExecutor(1) as thread:
        verified = None if checkpoint.manifest is None else thread.submit(verify, folder)
        try:
            model, scheme = _build(checkpoint, torch.device(device), share)
            loaded = LoadedModel(
                model=model,
                config=checkpoint.config,
                tokenizer=Tokenizer.from_folder(folder),
                chat_template=ChatTemplate.from_folder(folder),
                manifest=checkpoint.manifest,
                scheme=scheme,
                sight=load_sight(folder, checkpoint.config),
            )
        finally:
            if verified is not None:
                verified.result()  # a damaged file explains whatever else went wrong with it
    return loaded


def _within(config: DecoderConfig, context: int | None) -> DecoderConfig:
    if config.rope_scaling.rope_type != "longrope" or context is None or context >= config.max_position_embeddings:
        return config
    return at_context(config, context)


def _load_seeing(folder: Path) -> LoadedModel:
    """A decoder that sees, as `penjing train` and `penjing import` write it: in float32."""
    model = load_vision_language(folder).requires_grad_(False)
    apply_batch_invariance(model.decoder)
    config, tokenizer = model.config.decoder, Tokenizer.from_folder(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"{folder}: its tokenizer has {tokenizer.vocab_size} tokens, its embedding only {config.vocab_size} rows; "
            "the files do not belong together"
        )
    return LoadedModel(
        model=model.decoder,
        config=config,
        # What ends a text stands in the decoder's part of config.json, where the tokenizer does not look.
        tokenizer=Tokenizer(
            tokenizer.backend, [*tokenizer.eos_token_ids, *config.eos_token_ids], tokenizer.bos_token_id
        ),
        chat_template=ChatTemplate.from_folder(folder),
        manifest=read_manifest(folder) if (folder / MANIFEST_NAME).exists() else None,
        scheme="fp32",
        sight=_sight_of(model),
    )


def load_sight_of(folder: Path) -> Sight:
    """What the decoder in `folder`, a checkpoint or an artifact, sees with; hashes are checked where there is a
    manifest.

    Raises:
        InputError: damaged, or it sees nothing.
    """
    if family_of(folder) == SEES:
        return _sight_of(load_vision_language(folder).requires_grad_(False))
    verify(folder)
    sight = load_sight(folder, open_checkpoint(folder).config)
    if sight is None:
        raise InputError(f"{folder} takes no images")
    return sight


def sight_config_of(folder: Path) -> SightConfig:
    """The configuration of the same; no weights are read.

    Raises:
        InputError: damaged, or it sees nothing.
    """
    if family_of(folder) == SEES:
        return SightConfig.of(vision_language_config(folder))
    return read_sight_config(folder)


def _sight_of(model: VisionLanguage) -> Sight:
    sight = Sight.of(model)
    apply_image_invariance(sight)
    return sight


class _NoRandomWeights(TorchFunctionMode):
    """Leaves out random fills of the weights that are about to be replaced: on the meta device torch runs them through
    Python decompositions, whose imports take 1.5 s."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            return named["tensor"] if "tensor" in named else args[0]
        return func(*args, **named)


def _check_kv_scale(scale: Tensor, where: str) -> None:
    """Calibrated scales are for other engines: ours takes one for each token and head as it writes the cache."""
    if scale.numel() != 1 or not scale.is_floating_point() or not 0 < float(scale) < float("inf"):
        raise InputError(f"{where} has shape {tuple(scale.shape)}, {scale.dtype}: one positive number is needed")


def _set_table(model: Decoder, checkpoint: Checkpoint, tensor: Callable[[str], Tensor]) -> None:
    config = checkpoint.config
    try:
        table = stored_table(tensor, config.tie_word_embeddings)
    except ValueError as error:
        raise InputError(f"{checkpoint.folder}: {EMBEDDING_MODULE}: {error}") from None
    if table.weight_VE.shape != (config.vocab_size, config.hidden_size):
        raise InputError(
            f"{checkpoint.folder}: {EMBEDDING} has shape {tuple(table.weight_VE.shape)}; config.json asks for "
            f"({config.vocab_size}, {config.hidden_size})"
        )
    model.set_submodule("model.embed_tokens", Int8Embedding(table))


def _build(checkpoint: Checkpoint, device: torch.device, share: tuple[int, int] | None) -> tuple[Decoder, SchemeName]:
    config, available = checkpoint.config, set(checkpoint.tensor_names)
    taken: set[str] = set()
    scheme: SchemeName = "fp32"

    int8_table = False

    def take(name: str, source: Checkpoint = checkpoint) -> Tensor:
        name = tied_name(name) if int8_table and config.tie_word_embeddings else name
        if name not in available:
            raise InputError(f"{checkpoint.folder}: tensor {name} is missing; config.json promises it. Import it again")
        taken.add(name)
        return source.get(name).to(device)

    with torch.device("meta"), _NoRandomWeights():
        model = Decoder(config)
    quantization = checkpoint.quantization
    if quantization is not None:
        linear_names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
        quantized = quantized_modules(quantization, linear_names)
        int8_table = has_int8_embedding(quantization)
        if config.tie_word_embeddings and ("lm_head" in quantized) != int8_table:
            which = "lm_head is quantized but tied to the embedding; list it under quantization_config.ignore"
            if int8_table:
                which = "the embedding is quantized but tied to lm_head; take lm_head out of quantization_config.ignore"
            raise InputError(f"{checkpoint.folder}: {which} or set tie_word_embeddings to false")
        scheme = "int4" if any(each.bits == 4 for each in quantized.values()) else "int8"
        mapping = open_checkpoint(checkpoint.folder)
        apply_quantized(model, quantized, lambda name: take(name, mapping))
        if int8_table:
            _set_table(model, checkpoint, lambda name: take(name, mapping))

        if quantization.get("kv_cache_scheme") is not None:
            for layer in config.attention_layers:
                for scale in ("k_scale", "v_scale"):
                    _check_kv_scale(take(f"model.layers.{layer}.self_attn.{scale}"), f"{checkpoint.folder}: {scale}")

    for name, parameter in list(model.named_parameters()):
        value = take(name)
        if value.shape != parameter.shape or not value.is_floating_point():
            raise InputError(
                f"{checkpoint.folder}: {name} has shape {tuple(value.shape)} and {value.dtype}; "
                f"config.json asks for floating {tuple(parameter.shape)}"
            )
        if share is not None:
            rank, ranks = share
            value = Split(config, ranks).cut(rank, name, value)
        elif name != TOKEN_INPUTS and (name != EMBEDDING or config.tie_word_embeddings):
            value = value.to(torch.float32)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    model.tie_weights()
    if config.tie_word_embeddings:
        taken.add("lm_head.weight")  # some writers store the tied copy too
    model.model.inverse_frequency = inverse_frequencies(config).to(device)

    unexpected = sorted(name for name in available - taken if not name.endswith(DERIVED))
    if unexpected:
        raise InputError(
            f"{checkpoint.folder}: {len(unexpected)} tensors have no place in a {config.model_type} decoder as "
            f"config.json describes it, the first is {unexpected[0]}"
        )
    apply_batch_invariance(model)
    return model.eval(), scheme
