"""What `penjing compress` is told: the model, the transforms, the quantization, the texts to measure on."""

from __future__ import annotations

import hashlib
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from penjing.core.config import Config


class Transform(Config):
    """Changes of the weights that leave the function as it is; each alpha of 0 switches its smoothing off.

    `hadamard_down` alone cannot be absorbed: the network gets `mlp_hadamard`, which penjing and its ONNX files compute.
    """

    rotate: bool = True
    rotate_seed: int = Field(default=0, ge=0, lt=2**31)
    smooth_norm: float = Field(default=0.0, ge=0, le=1)  # norm → q, k, v and gate, up; last norm → head
    smooth_down: float = Field(default=0.6, ge=0, le=1)  # up_proj → down_proj
    smooth_output: float = Field(default=0.6, ge=0, le=1)  # v_proj → o_proj
    hadamard_down: int = Field(default=0, ge=0)  # block that is transformed before down_proj, e.g. 64; 0: none
    search_steps: int = Field(default=60, ge=0, le=10_000)  # for each channel's scale (smooth_search.py); 0: the alphas


class Quantize(Config):
    """What becomes INT8. Embeddings are looked up, not multiplied, and stay floating."""

    lm_head: Literal["int8", "keep"] = "int8"
    embedding_dtype: Literal["float32", "bfloat16", "float16"] = "float16"  # also of a head that is kept
    rounding: Literal["compensated", "nearest"] = "compensated"  # of weights, see compensate.py
    kv_cache: Literal["none", "int8"] = "none"  # int8: also store a calibrated scale of keys and values for each layer
    effective_bits: float | None = Field(
        default=None, ge=8, le=32
    )  # a weight, on average: the most sensitive stay float
    sensitivity: Path | None = None  # what `penjing compress sensitivity --bits` made, for effective_bits
    keep: tuple[str, ...] = ()  # shell patterns of module names, such as "*.down_proj" or "model.layers.0.*"

    @model_validator(mode="after")
    def _budget(self) -> Quantize:
        if (self.effective_bits is None) != (self.sensitivity is None):
            raise ValueError("effective_bits and sensitivity go together: a budget, and whom to spend it on")
        return self

    def keeps(self, module: str) -> bool:
        """Whether the linear layer `module` stays in floating point."""
        if module == "lm_head" and self.lm_head == "keep":
            return True
        return any(fnmatchcase(module, pattern) for pattern in self.keep)


class Calibration(Config):
    """Text that shows which activation channels are large; never text that is evaluated on.

    `code`: share of the windows that are source code, the others are prose.
    """

    num_tokens: int = Field(default=4096, ge=64)
    window: int = Field(default=512, ge=16)
    code: float = Field(default=0.5, ge=0, le=1)

    @model_validator(mode="after")
    def _whole_windows(self) -> Calibration:
        if self.num_tokens % self.window:
            raise ValueError(f"num_tokens={self.num_tokens} is not a multiple of window={self.window}")
        return self


class Evaluate(Config):
    """Held-out text for perplexity before and after, in windows that start afresh."""

    prose_tokens: int = Field(default=8192, ge=64)
    code_tokens: int = Field(default=4096, ge=0)  # 0: prose alone
    window: int = Field(default=512, ge=16)

    @model_validator(mode="after")
    def _whole_windows(self) -> Evaluate:
        for name in ("prose_tokens", "code_tokens"):
            if getattr(self, name) % self.window:
                raise ValueError(f"{name}={getattr(self, name)} is not a multiple of window={self.window}")
        return self


class Recipe(Config):
    """A whole compression run."""

    model: Path
    output: Path
    transform: Transform = Transform()
    quantize: Quantize = Quantize()
    calibration: Calibration = Calibration()
    evaluate: Evaluate = Evaluate()

    def settings(self) -> dict[str, Any]:
        """Everything that decides the result: all but where it is read from and written to."""
        return self.model_dump(mode="json", exclude={"model", "output"})


def run_key(recipe: Recipe, input_hashes: dict[str, str], code_version: str) -> str:
    """Hexadecimal SHA-256 that is the same for two runs exactly if they must give the same artifact."""
    what = {"settings": recipe.settings(), "input": input_hashes, "code": code_version}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def recipe_toml(recipe: Config) -> str:
    """A recipe without steps, every default and override written out, as TOML that `penjing compress` reads again."""
    values = recipe.model_dump(mode="json", exclude_none=True)
    lines = [f"{key} = {_toml(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for section, content in values.items():
        if isinstance(content, dict):
            lines += ["", f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in content.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    # JSON's strings, numbers, booleans and arrays are TOML as they stand.
    return json.dumps(value)
