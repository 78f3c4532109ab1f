"""Where the parts of a decoder that sees lie in Hugging Face's folders, by `model_type`: Idefics3's, which SmolVLM's
are by another name, LLaVA's, whose tensors have had several names, and penjing's own; without torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any

from penjing.core.errors import InputError
from penjing.core.family import OWN_SEEING


@dataclass(frozen=True)
class Names:
    """What the names of tensors begin with."""

    vision: str
    projector: str
    decoder: str
    head: str

    def stored(self, name: str) -> str:
        """The name in the file of the parameter `name` of a `VisionLanguage`."""
        ours = {
            "vision.": self.vision, "projector.": self.projector, "decoder.model.": self.decoder,
            "decoder.lm_head.": self.head,
        }  # fmt: skip
        part = next((prefix for prefix in ours if name.startswith(prefix)), "")
        return ours.get(part, "") + name.removeprefix(part)


_IDEFICS3 = Names("model.vision_model.", "model.connector.modality_projection.proj.", "model.text_model.", "lm_head.")
_LLAVA = Names(
    "vision_tower.vision_model.", "multi_modal_projector.", "language_model.model.", "language_model.lm_head."
)
_OWN = Names("vision.", "projector.", "model.text_model.", "lm_head.")
_WRITTEN = {"idefics3": _IDEFICS3, "smolvlm": _IDEFICS3, "llava": _LLAVA, OWN_SEEING: _OWN}
# Of LLaVA's tensors, the names in files of transformers before 4.52, and of several versions since.
_ALSO = {
    "vision": ("model.vision_tower.vision_model.", "vision_tower.", "model.vision_tower."),
    "projector": ("model.multi_modal_projector.",),
    "decoder": ("model.language_model.",),
    "head": ("lm_head.",),
}
# What transformers' LlamaConfig takes where a text_config leaves a field out, as LLaVA 1.5's does.
_LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32,
}  # fmt: skip


def names_written(model_type: str) -> Names:
    """Those of a folder that is written."""
    return _WRITTEN[model_type]


def names_found(model_type: str, tensors: Collection[str]) -> Names:
    """Those of a folder that has these tensors; of a part that has none, those that are written."""
    names = _WRITTEN[model_type]
    if model_type != "llava":
        return names
    chosen = {}
    for field in fields(names):
        known = (getattr(names, field.name), *_ALSO[field.name])
        chosen[field.name] = next((each for each in known if any(t.startswith(each) for t in tensors)), known[0])
    return replace(names, **chosen)


def text_config(values: dict[str, Any], source: str) -> dict[str, Any]:
    """The decoder's part of `config.json`, complete.

    Raises:
        InputError: there is none.
    """
    text = values.get("text_config")
    if not isinstance(text, dict):
        raise InputError(f"{source} needs the objects text_config and vision_config; get the model again")
    text = {"tie_word_embeddings": values.get("tie_word_embeddings", False)} | text
    return _LLAMA | {"model_type": "llama"} | text if values.get("model_type") == "llava" else text
