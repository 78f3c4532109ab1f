"""Settings of parts of a decoder: rotary scaling, experts, latent attention, hashing."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, Strict, model_validator

from penjing.core.config import Config

MAX_HEAD_DIM = 2**16  # no model comes near; the rotary frequencies are computed before any weight is looked at


MAX_SIZE = 2**31 - 1  # of any number of a network; no model has more
LEAST_TURNS = 1e-6  # of YaRN, whose published settings are 1 and 32


def _no_absurd_size(value: int) -> int:
    if abs(value) > MAX_SIZE:
        raise ValueError(f"no model has {value}; the file is damaged")
    return value


# Exact types: a "yes" for true or a "2048" for 2048 is damage, or another program's format.
Whole = Annotated[int, Strict(), AfterValidator(_no_absurd_size)]
Number = Annotated[float, Strict()]
Flag = Annotated[bool, Strict()]


class RopeScaling(Config):
    """Rotary frequency scaling: Llama 3 (`llama3`), `linear`, `yarn`, `longrope`, `dynamic`, or none (`default`).

    `dynamic` changes nothing within the context of training, beyond which nothing is computed.
    """

    rope_type: Literal["default", "linear", "llama3", "yarn", "longrope", "dynamic"] = Field(
        default="default", description="Kind of scaling."
    )
    factor: Number = Field(default=1.0, gt=0, le=MAX_SIZE, description="By how much the context grows.")
    low_freq_factor: Number = Field(
        default=1.0, gt=0, description="Of llama3: from the original context over this on, all is divided."
    )
    high_freq_factor: Number = Field(
        default=4.0, gt=0, description="Of llama3: up to the original context over this, nothing changes."
    )
    original_max_position_embeddings: Whole = Field(default=8192, gt=0, description="Context in tokens before scaling.")
    beta_fast: Number = Field(
        default=32.0,
        ge=LEAST_TURNS,
        le=MAX_SIZE,
        description="Of yarn: turns within the original context from which nothing changes.",
    )
    beta_slow: Number = Field(
        default=1.0,
        ge=LEAST_TURNS,
        le=MAX_SIZE,
        description="Of yarn: turns up to which all is divided by the factor.",
    )
    mscale: Number = Field(
        default=0.0, ge=0, le=MAX_SIZE, description="Of yarn: growth of rotated queries and keys with log(factor)."
    )
    mscale_all_dim: Number = Field(
        default=0.0, ge=0, le=MAX_SIZE, description="Of yarn: growth of the logits' scale with log(factor)."
    )
    attention_factor: Number | None = Field(
        default=None,
        ge=0,
        description="Of yarn, longrope: what rotated queries and keys are multiplied by. Left out: by factor; 1.",
    )
    truncate: Flag = Field(
        default=True, description="Of yarn: whether the pairs between which it blends are rounded to whole ones."
    )
    short_factor: tuple[Number, ...] = Field(default=(), description="Of longrope: divisors of the pairs' frequencies.")
    long_factor: tuple[Number, ...] = Field(
        default=(),
        description="Of longrope: those of a network whose max_position_embeddings are beyond "
        "original_max_position_embeddings. Left out: short_factor.",
    )


class MoEConfig(Config):
    """Routed experts in place of a layer's MLP.

    A router scores all experts for each token and sends it to `num_experts_per_tok` of them; the sum of their outputs
    is weighted by their scores. Mixtral: https://arxiv.org/abs/2401.04088, DeepSeek-V3: https://arxiv.org/abs/2412.19437.
    """

    num_experts: Whole = Field(gt=0, le=4096, description="Experts of a layer.")
    num_experts_per_tok: Whole = Field(gt=0, description="Experts that a token is sent to.")
    moe_intermediate_size: Whole = Field(gt=0, description="Inner width of one expert.")
    scoring_func: Literal["softmax", "sigmoid", "sparsemixer"] = Field(
        default="softmax",
        description="How the router's outputs become scores. sparsemixer (Phi-3.5-MoE) chooses two, each weighed among "
        "those that router_jitter_noise leaves, and the second without the first.",
    )
    router_jitter_noise: Number = Field(
        default=0.0,
        ge=0,
        description="Of sparsemixer: half of how far below the largest an output may lie, as a share of its size or of "
        "the largest, to be weighed against it.",
    )
    norm_topk_prob: Flag = Field(default=True, description="Whether the chosen scores are divided by their sum.")
    routed_scaling_factor: Number = Field(default=1.0, gt=0, description="Factor of the chosen scores.")
    n_group: Whole = Field(default=1, gt=0, description="Groups in which the experts stand.")
    topk_group: Whole = Field(default=1, gt=0, description="Groups that a token looks at.")
    shared_expert_intermediate_size: Whole = Field(
        default=0, ge=0, description="Inner width of an MLP that every token takes; 0: none."
    )
    shared_expert_gate: Flag = Field(
        default=False, description="Whether its output is multiplied by sigmoid(gate · x) (Qwen2-MoE)."
    )
    router_bias: Flag = Field(
        default=False,
        description="Whether a bias is added to scores for the choice alone; load balancing moves it (DeepSeek-V3).",
    )
    router_bias_of: Literal["scores", "logits"] = Field(
        default="scores",
        description="What router_bias is added to: scores, or the router's outputs before they are (Kolibri).",
    )
    biases: Flag = Field(default=False, description="Whether the router and the experts' layers have biases (gpt-oss).")
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] = Field(
        default="silu",
        description="Of an expert's gate; gelu_tanh is GELU by its tanh formula (Gemma 4), clamped_swiglu has "
        "min(gate, 7) × sigmoid(1.702 gate) × (up + 1), up within −7 and 7 (gpt-oss).",
    )
    output_norms: Flag = Field(
        default=False,
        description="Whether what the experts of a token give together, and what the MLP gives that every token takes, "
        "pass norms before they are added (Gemma 4).",
    )
    mlp_only_layers: tuple[Whole, ...] = Field(default=(), description="Layers that keep the plain MLP.")

    @model_validator(mode="after")
    def _choices_exist(self) -> MoEConfig:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(f"num_experts_per_tok={self.num_experts_per_tok} is above num_experts={self.num_experts}")
        if self.num_experts % self.n_group or self.topk_group > self.n_group:
            raise ValueError(
                f"n_group={self.n_group} must divide num_experts={self.num_experts}, and topk_group={self.topk_group} "
                "must not be above it"
            )
        in_group = self.num_experts // self.n_group
        if self.topk_group * in_group < self.num_experts_per_tok or (self.n_group > 1 and in_group < 2):
            raise ValueError(
                f"{self.topk_group} groups of {in_group} experts are too few to choose {self.num_experts_per_tok}; "
                "raise topk_group or lower n_group"
            )
        if self.scoring_func == "sparsemixer":
            if self.num_experts_per_tok != 2 or self.n_group > 1 or self.router_bias or self.norm_topk_prob:
                raise ValueError(
                    "scoring_func='sparsemixer' has num_experts_per_tok=2 and norm_topk_prob=false, no groups and no "
                    "router_bias"
                )
        elif self.router_jitter_noise:
            raise ValueError(f"router_jitter_noise={self.router_jitter_noise:g} is of scoring_func='sparsemixer'")
        if self.router_bias_of == "logits" and not self.router_bias:
            raise ValueError("router_bias_of='logits' needs router_bias")
        if self.output_norms and (self.shared_expert_gate or not self.shared_expert_intermediate_size):
            raise ValueError("output_norms needs a shared_expert_intermediate_size above 0, without shared_expert_gate")
        if self.shared_expert_gate and not self.shared_expert_intermediate_size:
            raise ValueError("shared_expert_gate needs a shared_expert_intermediate_size above 0")
        return self


class LatentAttentionConfig(Config):
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434): keys and values come from one small
    vector a token, and the position is carried by extra dimensions that all heads share."""

    kv_lora_rank: Whole = Field(gt=0, description="Size of the vector that keys and values come from.")
    q_lora_rank: Whole | None = Field(
        default=None,
        gt=0,
        description="Size of the vector that queries come from; none: from the hidden state directly.",
    )
    qk_nope_head_dim: Whole = Field(gt=0, description="Dimensions of a head's queries and keys that carry no position.")
    qk_rope_head_dim: Whole = Field(
        gt=0, le=MAX_HEAD_DIM, description="Dimensions of a head's queries and keys that carry the position."
    )
    v_head_dim: Whole = Field(gt=0, description="Dimensions of a head's values.")
    rope_interleave: Flag = Field(
        default=True, description="Whether dimensions 2i and 2i + 1 rotate together, not i and i + D/2."
    )


class LSH(Config):
    """Attention among tokens whose keys hash alike (`kernels/lsh_attention.py`)."""

    chunk_size: Whole = Field(default=64, gt=0, description="Tokens that attend together, and to the chunk before.")
    rounds: Whole = Field(default=2, gt=0, description="Hashings; a pair attends when one of them brings it together.")
    seed: Whole = Field(
        default=0,
        ge=0,
        lt=2**15,
        description="Of the random rotations, which differ from layer to layer and are fixed.",
    )
