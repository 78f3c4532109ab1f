"""Before anything is done: is the input a floating model that is whole, and do memory and disk suffice?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from pydantic import ValidationError

from penjing.compress.decoder.head import unties
from penjing.compress.decoder.layer import SAMPLE_ROWS
from penjing.compress.decoder.parts import is_routed, same_input
from penjing.compress.decoder.settings import Int8Settings, Transform
from penjing.core.artifact.transform import INPUTS
from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint
from penjing.core.checkpoint.dtypes import DTYPES
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import sha256_file
from penjing.core.manifest import verify
from penjing.core.models.config import DecoderConfig
from penjing.core.models.tensor_names import tensor_shapes
from penjing.core.progress import Progress
from penjing.kernels.hadamard import MAX_BLOCK

FLOATING = ("F32", "F16", "BF16", "F64")
_LAYERS = "model.layers."
DERIVED = ("rotary_emb.inv_freq",)  # older checkpoints store what config.json determines


@dataclass(frozen=True)
class Needed:
    """What making an artifact takes, in bytes: memory, its own size, and what lies on disk until it is complete."""

    memory: int
    artifact: int
    scratch: int


def check_model(checkpoint: Checkpoint) -> None:
    """Names, shapes and dtypes of all tensors, from the file headers alone.

    Raises:
        InputError: names the first tensor that is missing, has no place, or has another shape or dtype; or says that
            the model is quantized already, or of a kind that compression does not handle.
    """
    folder = checkpoint.folder
    _check_kind(checkpoint.config, folder)
    quantized = checkpoint.quantization
    if quantized is not None or (checkpoint.manifest is not None and checkpoint.manifest.kind == "artifact"):
        method = quantized.get("quant_method") if quantized is not None else "compressed"
        raise InputError(
            f"{folder} is quantized already ({method}); compress the checkpoint it was made from, "
            "or floating weights that 'penjing import --dequantize' makes"
        )
    expected = tensor_shapes(checkpoint.config)
    stored = set(checkpoint.tensor_names)
    for name, shape in expected.items():
        if name not in stored:
            raise InputError(f"{folder} lacks {name}, which config.json promises; import the model again")
        if checkpoint.shape(name) != shape:
            raise InputError(
                f"{folder}: {name} has shape {checkpoint.shape(name)}, config.json asks for {shape}; import it again"
            )
        if checkpoint.dtype(name) not in FLOATING:
            raise InputError(f"{folder}: {name} is {checkpoint.dtype(name)}; compression starts from floating weights")
    tied_copy = {"lm_head.weight"} if checkpoint.config.tie_word_embeddings else set()
    extra = sorted(name for name in stored - expected.keys() - tied_copy if not name.endswith(DERIVED))
    if extra:
        raise InputError(
            f"{folder}: {len(extra)} tensors have no place in the {checkpoint.config.model_type} decoder of "
            f"config.json, the first is {extra[0]}; import the model again"
        )


def _check_kind(config: DecoderConfig, folder: Path) -> None:
    kinds = {
        "latent attention": config.latent_attention is not None,
        "shared layers": config.shared_layers > 1,
        "a Hadamard transform": config.mlp_hadamard > 0 or config.table_hadamard > 0,
    }
    if found := [name for name, present in kinds.items() if present]:
        raise InputError(
            f"{folder} has {' and '.join(found)}, and compression handles plain decoder layers only; serve it in "
            f"float32 as it is ('penjing serve {folder}'), or compress a model without them"
        )


def refuse_experts(config: DecoderConfig, folder: Path, what: str) -> None:
    """Refuse a decoder with experts where `what` knows none.

    Raises:
        InputError: it has experts.
    """
    if config.moe is not None:
        raise InputError(
            f"{folder} has experts (moe), which {what} does not know; quantize it without training, or serve it as it "
            f"is ('penjing serve {folder}')"
        )


def check_finite(checkpoint: Checkpoint, progress: Progress) -> None:
    """Every weight is a number.

    Raises:
        InputError: names the first tensor with NaN or infinity.
    """
    names = list(tensor_shapes(checkpoint.config))
    progress.start("checking the weights", len(names))
    for name in names:
        # A sum is finite if all terms are, unless it overflows: then look at each.
        tensor = open_checkpoint(checkpoint.folder).get(name)  # opened anew: mapped pages count as memory
        if not math.isfinite(float(tensor.sum(dtype=torch.float64))):
            bad = int((~torch.isfinite(tensor)).sum())
            raise InputError(
                f"{checkpoint.folder}: {name} holds {bad} values that are NaN or infinite; "
                "the model is damaged or its training diverged: get another copy"
            )
        progress.advance()


def check_settings(settings: Int8Settings, config: DecoderConfig) -> None:
    """The settings fit the model.

    Raises:
        ConfigError: a pattern matches nothing, `group` does not divide a layer's inputs, or the MLPs are not as wide as
            `transform.hadamard_down` needs.
    """
    if settings.transform.rotate and not rotates(config):
        what = (
            "before their last matrix (inner_norms)" if config.inner_norms else f"behind them (norms={config.norms!r})"
        )
        raise ConfigError(
            f"transform.rotate: attention and MLP have a norm {what}, which does not let a rotation through; "
            "set rotate = false"
        )
    transformed(config, settings.transform)
    modules = linear_modules(config)
    for pattern in settings.keep:
        if not any(settings.model_copy(update={"keep": (pattern,)}).keeps(module) for module in modules):
            raise ConfigError(f"keep: {pattern!r} matches no linear layer; their names look like {modules[0]!r}")
    for pattern in settings.zero_points:
        if not any(fnmatchcase(module, pattern) for module in modules):
            raise ConfigError(f"zero_points: {pattern!r} matches no linear layer; their names look like {modules[0]!r}")
    for pattern in settings.keep_int8:
        if not any(fnmatchcase(module, pattern) for module in modules):
            raise ConfigError(f"keep_int8: {pattern!r} matches no linear layer; their names look like {modules[0]!r}")
    _check_zero_points(settings, modules)
    shapes = tensor_shapes(config)
    for module in modules[:-1]:
        inputs = shapes[f"{module}.weight"][1]
        if not settings.keeps(module) and settings.bits(module) == 4 and inputs % settings.group:
            fitting = [str(size) for size in range(32, 257, 32) if inputs % size == 0]
            advice = f"take group={' or '.join(fitting)}" if fitting else "name it in keep_int8"
            raise ConfigError(f"group={settings.group} does not divide the {inputs} inputs of {module}; {advice}")


def rotates(config: DecoderConfig) -> bool:
    """Whether the norms of a network let a rotation of the residual stream and of the value heads through."""
    return config.norms == "before" and not config.inner_norms


def _check_zero_points(settings: Int8Settings, modules: list[str]) -> None:
    """Layers that read the same input read the same integers: all in INT8 have zero points, or none."""
    readers: dict[str, set[bool]] = {}
    for module in modules[:-1]:
        block, _, name = module.rpartition(".")
        first = next(
            (first for first, layers in INPUTS.items() if any(f".{name}" in f".{one}" for one in layers)), name
        )
        if not settings.keeps(module):
            readers.setdefault(f"{block}.{first.rpartition('.')[2]}", set()).add(settings.above(module))
    for module, found in readers.items():
        if len(found) > 1:
            raise ConfigError(f"zero_points: name all layers that read what {module} reads, or none of them")


def transformed(config: DecoderConfig, transform: Transform) -> DecoderConfig:
    """The network that a recipe's transforms make of `config`: another one only where they cannot be absorbed.

    Raises:
        ConfigError: `hadamard_down` does not divide the width of every MLP, or `hadamard_table` that of the network.
    """
    widths = {
        "mlp_hadamard": config.intermediate_sizes or (config.intermediate_size,),
        "table_hadamard": (config.hidden_size,),
    }
    for name, setting in (("mlp_hadamard", "hadamard_down"), ("table_hadamard", "hadamard_table")):
        if not (block := getattr(transform, setting)):
            continue
        try:
            config = DecoderConfig.model_validate(config.model_dump() | {"model_type": "penjing", name: block})
        except ValidationError as error:
            why = error.errors()[0]["msg"].removeprefix("Value error, ")
            largest = min(size & -size for size in widths[name])
            plain = config.moe is None or name != "mlp_hadamard"
            fits = f"take {min(largest, MAX_BLOCK)}, or 0" if largest > 1 and plain else "leave it 0"
            raise ConfigError(f"{why.replace(name, f'transform.{setting}')}; {fits}") from None
    return config


def linear_modules(config: DecoderConfig) -> list[str]:
    """Names of all linear layers, the LM head last."""
    names = [name.removesuffix(".weight") for name in tensor_shapes(config) if name.endswith("_proj.weight")]
    return [*names, "lm_head"]


def checkpoint_hashes(checkpoint: Checkpoint) -> dict[str, str]:
    """SHA-256 of each file the result depends on, verified where the folder has a manifest.

    Raises:
        InputError: a file differs from its manifest.
    """
    if checkpoint.manifest is not None:
        return verify(checkpoint.folder).sha256
    patterns = ("config.json", "*.safetensors", "tokenizer*.json", "generation_config.json", "chat_template.jinja")
    files = sorted({path for pattern in patterns for path in checkpoint.folder.glob(pattern)})
    return {path.name: sha256_file(path) for path in files}


def four_bits(settings: Int8Settings, count: int, rows: int) -> int:
    """Bytes of `count` weights of 4 bits in so many rows, their scales and offsets."""
    scales = (4 if settings.offsets else 2) * count // settings.group
    return count // 2 + scales + (4 * rows if settings.scales == "whole" else 0)


def int8_needs(settings: Int8Settings, config: DecoderConfig, calibration_tokens: int) -> Needed:
    """Sizes from shapes alone."""
    shapes = tensor_shapes(config)
    numbers = {name: math.prod(shape) for name, shape in shapes.items()}
    table = config.vocab_size * config.hidden_size
    int8_table = settings.embedding_dtype == "int8"
    half = 1 if int8_table else DTYPES[settings.embedding_dtype].itemsize
    layers = head = 0
    for name, count in numbers.items():
        module = name.removesuffix(".weight")
        if ".layers." in name:
            if not name.endswith("_proj.weight") or settings.keeps(module):
                kept = name.endswith("_proj.weight") and DTYPES[settings.keep_dtype].itemsize
                layers += (kept or 4) * count
            else:
                rows = shapes[name][0]
                layers += count + 4 * rows if settings.bits(module) == 8 else four_bits(settings, count, rows)
    if not config.tie_word_embeddings or unties(settings):
        head = table * half if settings.keeps("lm_head") else table + 4 * config.vocab_size
    artifact = layers + head + table * half + (4 * config.vocab_size if int8_table else 0)
    calibration = 4 * calibration_tokens * config.hidden_size
    # A layer, or one table and its float64 blocks, or the artifact while its parity is measured.
    memory = calibration + max(layer_needs(settings, config, calibration_tokens), 6 * table, 2 * artifact)
    return Needed(memory, artifact, artifact + 2 * calibration)


def layer_needs(settings: Int8Settings, config: DecoderConfig, calibration_tokens: int) -> int:
    """Bytes of memory that the layer takes which needs most, beside the hidden states of the text; from shapes alone.

    Smoothing holds copies of its weights and of the activations that are kept, most of one group's. Compensated
    rounding of the weights that read K inputs has four tables of K × K at once (`compensate.error_spread`: the squares,
    their factor, its inverse, and the factor of that), and one more that stays for each further format. Deciding
    integers again (`descent.descend`) has three, and of the weights about as much as the fourth.
    """
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in tensor_shapes(config).items():
        if name.startswith(_LAYERS):
            layer, _, inside = name.removeprefix(_LAYERS).partition(".")
            layers.setdefault(layer, {})[inside] = shape
    rows, needs = min(calibration_tokens, SAMPLE_ROWS), 0
    for layer, shapes in layers.items():
        samples = largest = squares = 0
        for group, linears in same_input(shapes).items():
            inputs = shapes[f"{group}.weight"][1]
            share = 1.0
            if config.moe is not None and is_routed(group):
                share = config.moe.num_experts_per_tok / config.moe.num_experts
            kept = int(4 * share * rows * inputs)
            samples, largest = samples + kept, max(largest, kept)
            modules = [f"{_LAYERS}{layer}.{linear}" for linear in linears]
            formats = {settings.bits(module) for module in modules if not settings.keeps(module)}
            if formats and settings.rounding == "compensated":
                squares = max(squares, 4 * (3 + len(formats)) * inputs**2)
        floats = sum(4 * math.prod(shape) for shape in shapes.values())
        smoothing = 3 * floats + 2 * samples + 4 * largest
        needs = max(needs, smoothing, 2 * floats + 2 * samples + largest + squares)
    return needs
