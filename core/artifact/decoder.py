"""What an artifact folder holds beyond a checkpoint: INT8 weights, the recipe, a report and a parity record.

    config.json        with `quantization_config` (compressed-tensors, int-quantized)
    model.safetensors  X.weight int8 and X.weight_scale for each quantized linear layer X
    recipe.toml        what made it; `penjing compress recipe.toml` makes it again
    report.json        sizes, perplexities, errors a layer, steps; report.html shows the same
    parity.json        the same inputs through every implementation, and how far they are apart
    penjing.json       kind "artifact", SHA-256 of each file above

Whoever serves the artifact adds what its endpoint answered as `parity_NAME.json`: `add_parity_outputs`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint
from penjing.core.config import Config, parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text
from penjing.core.manifest import Manifest, read_json_object, verify
from penjing.core.runtime.quantized import ACTIVATION_FIELDS, KV_CACHE_FIELDS, WEIGHT_FIELDS

RECIPE_FILE, REPORT_FILE, REPORT_PAGE, PARITY_FILE = "recipe.toml", "report.json", "report.html", "parity.json"
FAKE_QUANTIZED, INT8_RUNTIME, SERVED = "fake_quantized", "int8_runtime", "served_endpoint"


class ParityInput(Config):
    """A prompt; `token_ids` is how this artifact's tokenizer encodes `text`."""

    text: str
    token_ids: tuple[int, ...] = Field(min_length=1)


class ParityOutput(Config):
    """A greedy continuation of one prompt and the natural log-probability of each of its tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class ParityDifference(Config):
    """How far two implementations are apart over all inputs.

    Quantities: "layer_outputs" of each layer when both get the same input, relative to the root mean square of the
    token's hidden state; "logits" end to end; "logprobs" of the continuation's tokens up to the first that differs.
    Dynamic quantization is chaotic: a difference of one float32 rounding turns into other INT8 roundings layer by
    layer, so two correct implementations agree closely in every layer and only about as far as INT8 itself end to end.
    """

    between: tuple[str, str]
    quantity: Literal["layer_outputs", "logits", "logprobs"]
    num_values: int
    largest: float
    mean: float
    same_tokens: float | None = Field(default=None, ge=0, le=1)  # share of continuation tokens that are alike


class Parity(Config):
    """`parity.json`. Every implementation continues `inputs` greedily by the same number of tokens."""

    schema_version: Literal[1] = 1
    inputs: tuple[ParityInput, ...] = Field(min_length=1)
    outputs: dict[str, tuple[ParityOutput, ...]]  # implementation → one output an input
    differences: tuple[ParityDifference, ...]


@dataclass(frozen=True)
class Artifact:
    """A verified artifact folder."""

    checkpoint: Checkpoint
    manifest: Manifest
    report: dict[str, Any]
    parity: Parity


def open_artifact(folder: Path) -> Artifact:
    """Open an artifact and check every hash.

    Raises:
        InputError: missing or damaged files, or a folder of another kind.
    """
    checkpoint = open_checkpoint(folder)
    if checkpoint.manifest is None or checkpoint.manifest.kind != "artifact":
        raise InputError(f"{folder} is not an artifact; 'penjing compress' makes one from a checkpoint")
    manifest = verify(folder)
    return Artifact(checkpoint, manifest, read_json_object(folder / REPORT_FILE), read_parity(folder))


def quantization_config(keep: list[str], *, kv_scales: bool = False) -> dict[str, Any]:
    """`quantization_config` of `config.json`: W8A8 for every linear layer but the modules `keep`.

    Args:
        kv_scales: each layer has calibrated `self_attn.k_scale` and `self_attn.v_scale`.
    """
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": KV_CACHE_FIELDS if kv_scales else None,
        "ignore": keep,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": WEIGHT_FIELDS,
                "input_activations": ACTIVATION_FIELDS,
                "output_activations": None,
            }
        },
    }


def read_parity(folder: Path) -> Parity:
    """The parity record of an artifact with everything that was added to it.

    Raises:
        InputError: missing or malformed.
    """
    parity = _parse(folder / PARITY_FILE)
    for path in sorted(folder.glob("parity_*.json")):
        added = _parse(path)
        parity = parity.model_copy(
            update={
                "outputs": parity.outputs | added.outputs,
                "differences": parity.differences + added.differences,
            }
        )
    return parity


def add_parity_outputs(folder: Path, name: str, outputs: list[ParityOutput]) -> ParityDifference:
    """Add what implementation `name` (a plain word such as "served_endpoint") answered to the record's inputs.

    It goes into a file of its own beside the hashed ones, and replaces what `name` answered before.

    Args:
        outputs: one for each input of `read_parity(folder)`, in order.

    Returns:
        The difference from the INT8 runtime.

    Raises:
        InputError: the record is missing, or `outputs` does not fit it.
    """
    parity = _parse(folder / PARITY_FILE)
    if len(outputs) != len(parity.inputs):
        raise InputError(f"{name} gave {len(outputs)} outputs for the {len(parity.inputs)} inputs of {PARITY_FILE}")
    difference = logprob_difference((INT8_RUNTIME, name), parity.outputs[INT8_RUNTIME], tuple(outputs))
    added = Parity(inputs=parity.inputs, outputs={name: tuple(outputs)}, differences=(difference,))
    atomic_write_text(folder / f"parity_{name}.json", json.dumps(added.model_dump(), indent=2) + "\n")
    return difference


def logprob_difference(
    between: tuple[str, str], first: tuple[ParityOutput, ...], second: tuple[ParityOutput, ...]
) -> ParityDifference:
    """Compare log-probabilities token by token, for each input as far as the continuations are the same."""
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
    return ParityDifference(
        between=between,
        quantity="logprobs",
        num_values=len(gaps),
        largest=max(gaps, default=0.0),
        mean=sum(gaps) / len(gaps) if gaps else 0.0,
        same_tokens=same / total if total else 1.0,
    )


def _parse(path: Path) -> Parity:
    try:
        return parse_config(Parity, read_json_object(path), str(path))
    except ConfigError as error:
        raise InputError(f"{error}; the file is damaged: compress the model again") from None
