"""Reward models on disk, as Hugging Face's sequence classifiers with one label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from penjing.core.checkpoint.decoder import save_checkpoint
from penjing.core.errors import InputError
from penjing.core.manifest import read_json_object, write_manifest
from penjing.core.models.hf_config import decoder_config_from_hf, decoder_config_to_hf
from penjing.core.models.reward import RewardModel

_CLASSIFIER = "ForSequenceClassification"
_LABELS = ("id2label", "label2id")  # in config.json beside what a language model has


def save_reward(folder: Path, model: RewardModel, tokenizer_from: Path, created_by: dict[str, Any]) -> None:
    """Write a reward model into `folder`, not yet published, complete with manifest.

    Raises:
        InputError: no token fills up a batch, by which readers find the last one of a text.
    """
    config = model.config
    if config.pad_token_id is None:
        if not config.eos_token_ids:
            raise InputError("the model has neither pad_token_id nor eos_token_id, and a classifier needs one of them")
        config = config.model_copy(update={"pad_token_id": config.eos_token_ids[-1]})
    (language_model,) = decoder_config_to_hf(config)["architectures"]
    classifier = {
        "architectures": [language_model.replace("ForCausalLM", _CLASSIFIER)],
        "id2label": {"0": "reward"},
        "label2id": {"reward": 0},
    }
    tensors = ((name, tensor.detach().cpu()) for name, tensor in model.state_dict().items())
    save_checkpoint(folder, config, tensors, tokenizer_from=tokenizer_from, extra_config=classifier)
    write_manifest(folder, "checkpoint", created_by)


def load_reward(folder: Path) -> RewardModel:
    """The reward model in `folder`, in float32.

    Raises:
        InputError: missing, damaged, or no sequence classifier with one label.
    """
    path = folder / "config.json"
    values = read_json_object(path)
    (architecture,) = values.get("architectures") or [""]
    labels = len(values.get("id2label") or {"0": "", "1": ""})
    if not architecture.endswith(_CLASSIFIER) or labels != 1:
        called = architecture or "no architecture"
        if architecture.endswith(_CLASSIFIER):
            called += f" with {labels} labels"
        raise InputError(
            f"{folder} is no reward model: its config.json names {called}, and a reward model is one of "
            f"…{_CLASSIFIER} with one label; train one with objective.kind = 'reward'"
        )
    values = {name: value for name, value in values.items() if name not in _LABELS}
    values["architectures"] = [architecture.replace(_CLASSIFIER, "ForCausalLM")]
    model = RewardModel(decoder_config_from_hf(values, str(path)))
    found: dict[str, torch.Tensor] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as reader:
                found |= {name: reader.get_tensor(name).to(torch.float32) for name in reader.keys()}  # noqa: SIM118
        model.load_state_dict(found)
    except (SafetensorError, RuntimeError) as error:
        raise InputError(f"{folder} is no complete reward model ({error}); get or make it again") from error
    return model
