"""How a decoder becomes INT8 or INT4: changes of its weights that integers fit better, and what is rounded how."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from penjing.core.config import Config
from penjing.kernels.cpu.packing import LARGEST_STEPPED_GROUP
from penjing.kernels.quantize import ABOVE_INPUTS


class Transform(Config):
    """Changes of the weights that leave the function as it is; each alpha of 0 switches its smoothing off."""

    rotate: bool = Field(
        default=True, description="Spread outlier channels evenly over the residual stream and inside the value heads."
    )
    rotate_seed: int = Field(default=0, ge=0, lt=2**31, description="Seed of the rotations.")
    smooth_norm: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="SmoothQuant's alpha behind the norms; 0 leaves it out.",
    )
    smooth_down: float = Field(
        default=0.6, ge=0, le=1, description="Alpha from up_proj into down_proj; nothing in an MLP without a gate."
    )
    smooth_output: float = Field(default=0.6, ge=0, le=1, description="Alpha from v_proj into o_proj.")
    hadamard_down: int = Field(
        default=0,
        ge=0,
        description="Block of channels, such as 64, that is transformed before down_proj while the network runs; 0 for "
        "none. It cannot be absorbed: only penjing and its ONNX files compute it.",
    )
    hadamard_table: int = Field(
        default=0,
        ge=0,
        description="Block of channels, such as 128, that is transformed behind the embedding and before the LM head "
        "while the network runs, whose rows then round better; 0 for none. Only penjing computes it. Where `rotate` "
        "spreads outliers it gains nothing.",
    )
    search_steps: int = Field(
        default=60,
        ge=0,
        le=10_000,
        description="Steps of the search for each channel's scale where an alpha is not 0; 0 takes the alphas.",
    )


class Int8Settings(Config):
    """What becomes integers. Embeddings are looked up, not multiplied, and stay floating."""

    transform: Transform = Field(default=Transform(), description="Changes of the weights before they are rounded.")
    lm_head: Literal["int8", "keep"] = Field(
        default="int8", description='"keep" leaves the LM head in embedding_dtype, as vLLM\'s loader wants it.'
    )
    embedding_dtype: Literal["float32", "bfloat16", "float16", "int8"] = Field(
        default="float16",
        description='Of the embedding, and of a head that is kept. "int8" has a scale a row; an embedding that is tied '
        "to the LM head stays one table with it unless the weights are rotated.",
    )
    weights_bits: Literal[8, 4] = Field(
        default=8,
        description="Of a weight of a layer's linear layers; with 4 each `group` of inputs has a scale of its own, and "
        "the LM head stays in 8.",
    )
    group: int = Field(
        default=64,
        ge=32,
        le=1024,
        multiple_of=32,
        description="Inputs that share a scale where weights have 4 bits; it divides the inputs of each such layer.",
    )
    scales: Literal["float", "whole"] = Field(
        default="float",
        description='Of groups of 4-bit weights. "whole": whole numbers on top of one float scale a row, and an offset '
        "likewise, so that the weights are INT8 weights in half of the bytes, and prompts are about as fast as with "
        "weights_bits=8. Activations then have one scale a token, which a rotation makes fit, or what `zero_points` "
        "says. Groups have at most 256 inputs, and `offsets` stays false.",
    )
    offsets: bool | Literal["whole"] = Field(
        default=False,
        description="A group of 4-bit weights also has an offset, and activations have a scale for each group: "
        'Q4_1\'s weights, exact where a model lies on such a grid already. "whole" takes offsets of whole steps, which '
        "compressed-tensors has as zero points: `penjing export --to compressed-tensors-weights` writes them.",
    )
    activations_bits: Literal[8, 16] = Field(
        default=8,
        description="Of what layers of 4-bit weights read; 16 is bfloat16, as other engines compute with such weights. "
        "Layers in 8 bits, and the LM head, always read 8.",
    )
    keep_int8: tuple[str, ...] = Field(
        default=(),
        description='Shell patterns of linear layers that stay in 8 bits where others get 4, such as "*.down_proj".',
    )
    rounding: Literal["compensated", "nearest"] = Field(
        default="compensated", description="Of weights: errors of columns make up for each other (GPTQ), or not."
    )
    kv_cache: Literal["none", "int8"] = Field(
        default="none", description='"int8" also stores a calibrated scale of keys and values for each layer.'
    )
    effective_bits: float | None = Field(
        default=None, ge=8, le=32, description="Bits of a weight on average: the most sensitive layers stay floating."
    )
    budget_mb: float | None = Field(
        default=None,
        gt=0,
        description="Megabytes (10⁶) that the artifact's weights may take where layers have 4 bits: those for which 4 "
        "bits cost most get 8.",
    )
    sensitivity: Path | None = Field(
        default=None,
        description="What `penjing compress sensitivity --bits` made; effective_bits and budget_mb need it.",
    )
    zero_points: tuple[str, ...] = Field(
        default=(),
        description='Shell patterns of linear layers, such as "*.down_proj", whose activations have a scale '
        "and a zero point for each 256 inputs of a token: what sticks out makes the steps of its neighbours coarser, "
        "not those of the whole token, and half as coarse where it lies on one side of 0. The artifact says that a "
        "token has one of each, which is how other engines compute it. The LM head has none. Beside 4-bit weights they "
        'need scales="whole", and groups of 32, 64, 128 or 256 inputs.',
    )
    keep: tuple[str, ...] = Field(
        default=(), description='Shell patterns of linear layers that stay floating, such as "*.down_proj".'
    )

    keep_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Of the linear layers that `keep` names."
    )

    @model_validator(mode="after")
    def _budget(self) -> Int8Settings:
        if (self.effective_bits is None and self.budget_mb is None) != (self.sensitivity is None):
            raise ValueError(
                "effective_bits or budget_mb and sensitivity go together: a budget, and whom to spend it on"
            )
        if self.weights_bits == 8 and self.budget_mb is not None:
            raise ValueError("budget_mb is for weights_bits=4; where layers have 8 bits take effective_bits")
        if self.weights_bits == 4 and self.effective_bits is not None:
            raise ValueError("effective_bits is a budget above 8 bits: leave it out where weights_bits is 4")
        if self.embedding_dtype == "int8" and self.keeps("lm_head"):
            raise ValueError('embedding_dtype="int8" needs lm_head="int8" and no pattern in keep that names the head')
        if self.weights_bits == 8 and self.offsets:
            raise ValueError("offsets are of groups of 4-bit weights: leave them out, or take weights_bits=4")
        if self.scales == "whole" and self.weights_bits == 8:
            raise ValueError('scales="whole" is of groups of 4-bit weights: leave it out, or take weights_bits=4')
        if self.scales == "whole" and (self.offsets or self.activations_bits == 16):
            raise ValueError(
                'scales="whole" has offsets of its own and activations of 8 bits: set offsets=false and '
                "activations_bits=8"
            )
        if self.scales == "whole" and self.group > LARGEST_STEPPED_GROUP:
            raise ValueError(f'scales="whole" has groups of up to {LARGEST_STEPPED_GROUP} inputs, not {self.group}')
        if self.weights_bits == 8 and self.activations_bits == 16:
            raise ValueError("activations_bits=16 is of layers of 4-bit weights: leave it out, or take weights_bits=4")
        if self.weights_bits == 4 and self.zero_points and self.scales == "float":
            raise ValueError('zero_points need scales="whole" where weights_bits is 4: take it, or leave them out')
        if self.weights_bits == 4 and self.zero_points and ABOVE_INPUTS % self.group:
            raise ValueError(f"group={self.group}: with zero_points take one that divides {ABOVE_INPUTS}")
        if self.weights_bits == 8 and self.keep_int8:
            raise ValueError("keep_int8 says what stays in 8 bits where weights_bits is 4; here all layers have 8")
        return self

    def bits(self, module: str) -> Literal[8, 4]:
        """Bits of a weight of the quantized linear layer `module`."""
        if self.weights_bits == 8 or module == "lm_head":
            return 8
        return 8 if any(fnmatchcase(module, pattern) for pattern in self.keep_int8) else 4

    def activation_group(self, bits: int) -> int | None:
        """Inputs that share a scale of the activations beside weights of so many bits; 0: all of a token; None:
        activations are bfloat16."""
        if bits == 8:
            return 0
        if self.activations_bits == 16:
            return None
        return self.group if self.offsets else 0

    def above(self, module: str) -> bool:
        """Whether the activations of the quantized linear layer `module` have zero points."""
        return module != "lm_head" and any(fnmatchcase(module, pattern) for pattern in self.zero_points)

    def keeps(self, module: str) -> bool:
        """Whether the linear layer `module` stays in floating point."""
        if module == "lm_head" and self.lm_head == "keep":
            return True
        return any(fnmatchcase(module, pattern) for pattern in self.keep)
