"""What an artifact folder holds beyond a checkpoint: quantized weights, the recipe, a report and a parity record.

    config.json        with `quantization_config` (compressed-tensors; int-quantized, with 4-bit weights pack-quantized)
    model.safetensors  the tensors of `core.runtime.quantized` for each quantized linear layer
    transform/         how layers were changed before they were rounded, see `core.artifact.transform`
    recipe.toml        what made it; `penjing compress recipe.toml` makes it again
    report.json        sizes, perplexities, errors a layer, steps; report.html shows the same
    parity.json        the same inputs through every implementation, and how far they are apart
    penjing.json       kind "artifact", SHA-256 of each file above

Whoever serves the artifact adds what its endpoint answered as `parity_NAME.json`: `add_answers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from penjing.core.artifact.base import PARITY_FILE, read_report_file
from penjing.core.artifact.parity import Difference, Parity, measured, parse_stored, read_parity
from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint
from penjing.core.config import Config
from penjing.core.errors import InputError
from penjing.core.manifest import Manifest, verify
from penjing.core.runtime.schemes import (
    ABOVE_FIELDS,
    ACTIVATION_FIELDS,
    EMBEDDING_MODULE,
    INT4_FORMAT,
    INT4_WEIGHT_FIELDS,
    INT8_FORMAT,
    KV_CACHE_FIELDS,
    MIXED_FORMAT,
    OFFSET_ACTIVATION_FIELDS,
    OFFSET_FORMAT,
    OFFSET_WEIGHT_FIELDS,
    STEPPED_FORMAT,
    STEPPED_WEIGHT_FIELDS,
    WEIGHT_FIELDS,
)
from penjing.kernels.int4_linear import FLOATING, ActivationBits

QUANT_METHOD = "compressed-tensors"
INT8_RUNTIME = "int8_runtime"
LAYER_OUTPUTS, LOGITS, LOGPROBS = "layer_outputs", "logits", "logprobs"
"""What is compared: the output of each layer when both get the same input, relative to the root mean square of what it
adds to the token's hidden state, and in exports that other programs load to that of the hidden state; the logits end to
end; the log-probabilities of the continuation's tokens up to the first that differs. Dynamic quantization is chaotic: a
difference of one float32 rounding turns into other INT8 roundings layer by layer, so two correct implementations agree
closely in every layer and only about as far as INT8 itself end to end.
"""


class Prompt(Config):
    """What every implementation continues greedily; `token_ids` is how this artifact's tokenizer encodes `text`."""

    text: str = Field(description="The prompt.")
    token_ids: tuple[int, ...] = Field(min_length=1, description="The text as this artifact's tokenizer encodes it.")


class Answer(Config):
    """A greedy continuation of one prompt and the natural log-probability of each of its tokens."""

    token_ids: tuple[int, ...] = Field(description="The continuation.")
    logprobs: tuple[float, ...] = Field(description="Natural log-probability of each of its tokens.")


class _Prompts(Config):
    prompts: tuple[Prompt, ...] = Field(min_length=1, description="What every implementation continues.")


class _Answers(Config):
    answers: tuple[Answer, ...] = Field(description="One continuation for each prompt.")


@dataclass(frozen=True)
class DecoderArtifact:
    """A verified artifact folder."""

    checkpoint: Checkpoint
    manifest: Manifest
    report: dict[str, Any]
    parity: Parity


def open_decoder_artifact(folder: Path) -> DecoderArtifact:
    """Open an artifact and check every hash.

    Raises:
        InputError: missing or damaged files, or a folder of another kind.
    """
    checkpoint, manifest = open_decoder_weights(folder)
    if not (folder / PARITY_FILE).is_file():
        raise InputError(
            f"{folder} has no parity record: it was imported with the integers of another program, and is served, or "
            "exported as gguf or compressed-tensors-weights. 'penjing import --dequantize' makes floating weights of "
            "its source, which 'penjing compress' takes"
        )
    return DecoderArtifact(checkpoint, manifest, read_report_file(folder), read_parity(folder))


def open_decoder_weights(folder: Path) -> tuple[Checkpoint, Manifest]:
    """Open an artifact, with records or without, and check every hash.

    Raises:
        InputError: missing or damaged files, or a folder of another kind.
    """
    checkpoint = open_checkpoint(folder)
    if checkpoint.manifest is None or checkpoint.manifest.kind != "artifact":
        raise InputError(f"{folder} is not an artifact; 'penjing compress' makes one from a checkpoint")
    return checkpoint, verify(folder)


def quantization_config(
    keep: list[str],
    *,
    kv_scales: bool = False,
    group: int = 0,
    eight: list[str] | None = None,
    offsets: bool = False,
    whole: bool = False,
    embedding: bool = False,
    above: list[str] | None = None,
    activation_bits: ActivationBits = 8,
) -> dict[str, Any]:
    """`quantization_config` of `config.json`: W8A8, W4A8 or W4A16 for every linear layer but the modules `keep`.

    Args:
        kv_scales: each layer has calibrated `self_attn.k_scale` and `self_attn.v_scale`.
        group: 0: W8A8; else W4A8 with a scale for each `group` inputs.
        eight: with groups, the modules that are W8A8 all the same.
        offsets: groups have offsets too, and activations a scale for each group.
        whole: scales and offsets of groups are whole numbers on top of a scale a channel.
        embedding: the embedding is in INT8, a scale a row.
        above: the modules whose activations have zero points; with groups, `whole` or in 8 bits.
        activation_bits: with groups, of the activations beside 4-bit weights; 16: bfloat16.
    """
    layout, weights, activations = INT8_FORMAT, WEIGHT_FIELDS, ACTIVATION_FIELDS
    eight, above = (eight or []) if group else [], above or []
    if group:
        size = {"group_size": group}
        layout, weights = (
            OFFSET_FORMAT if offsets else INT4_FORMAT,
            OFFSET_WEIGHT_FIELDS if offsets else INT4_WEIGHT_FIELDS,
        )
        if whole:
            layout, weights = STEPPED_FORMAT, STEPPED_WEIGHT_FIELDS
        weights = weights | size
        if offsets:
            activations = OFFSET_ACTIVATION_FIELDS | size
    kinds = [
        (["Linear"], weights, None if activation_bits == FLOATING else activations, layout),
        ([name for name in above if name not in eight], weights, ABOVE_FIELDS, layout),
        ([name for name in eight if name not in above], WEIGHT_FIELDS, ACTIVATION_FIELDS, INT8_FORMAT),
        ([name for name in eight if name in above], WEIGHT_FIELDS, ABOVE_FIELDS, INT8_FORMAT),
    ]
    kinds = [kind for kind in kinds if kind[0]]
    mixed = len({form for *_, form in kinds}) > 1
    groups = {}
    for number, (targets, stored, inputs, form) in enumerate(kinds):
        groups[f"group_{number}"] = _config_group(targets, stored, inputs) | ({"format": form} if mixed else {})
    if embedding:
        groups["group_table"] = _config_group([EMBEDDING_MODULE], WEIGHT_FIELDS, None) | {"format": INT8_FORMAT}
    return {
        "quant_method": QUANT_METHOD,
        "format": MIXED_FORMAT if mixed else layout,
        "quantization_status": "compressed",
        "kv_cache_scheme": KV_CACHE_FIELDS if kv_scales else None,
        "ignore": keep,
        "config_groups": groups,
    }


def _config_group(targets: list[str], weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }


def prompts_to_record(prompts: Iterable[Prompt]) -> dict[str, Any]:
    """Prompts as the inputs of a parity record."""
    return {"prompts": [prompt.model_dump(mode="json") for prompt in prompts]}


def answers_to_record(answers: Iterable[Answer]) -> list[dict[str, Any]]:
    """What one implementation answered, one answer a prompt, as an output of a parity record."""
    return [answer.model_dump(mode="json") for answer in answers]


def recorded_prompts(parity: Parity) -> tuple[Prompt, ...]:
    """The prompts of a parity record.

    Raises:
        InputError: the record is damaged.
    """
    return parse_stored(_Prompts, parity.inputs).prompts


def recorded_answers(parity: Parity, name: str) -> tuple[Answer, ...]:
    """What the implementation `name` answered, one answer a prompt.

    Raises:
        InputError: the record is damaged, or does not know `name`.
    """
    return parse_stored(_Answers, {"answers": parity.outputs.get(name)}).answers


def logprob_difference(between: tuple[str, str], first: tuple[Answer, ...], second: tuple[Answer, ...]) -> Difference:
    """Compare log-probabilities token by token, for each prompt as far as the continuations are the same; `same` is
    the share of tokens that are.

    Raises:
        InputError: NaN or infinity, or not as many answers on both sides.
    """
    if len(first) != len(second):
        raise InputError(f"{between[1]} gave {len(second)} answers where {between[0]} gave {len(first)}")
    gaps: list[float] = []
    same = total = 0
    for one, other in zip(first, second, strict=True):
        total += max(len(one.token_ids), len(other.token_ids))
        for index, (token, other_token) in enumerate(zip(one.token_ids, other.token_ids, strict=False)):
            if token != other_token:
                break
            same += 1
            if index < min(len(one.logprobs), len(other.logprobs)):
                gaps.append(abs(one.logprobs[index] - other.logprobs[index]))
    largest, mean = (max(gaps), sum(gaps) / len(gaps)) if gaps else (0.0, 0.0)
    return measured(between, LOGPROBS, len(gaps), largest, mean, same / total if total else 1.0)
