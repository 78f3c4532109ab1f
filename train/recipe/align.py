"""The sections of a recipe whose model learns from answers that it samples itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from penjing.core.config import Config
from penjing.train.objective.policy import Aggregate, Scale


class PromptConfig(Config):
    """What is asked."""

    sources: tuple[str, ...] = Field(
        min_length=1,
        description="Files .jsonl or .parquet of rows with `prompt` (a text, or messages) and, for a verifier, "
        "`answer`; folders of them; or 'builtin:sums', 512 small sums.",
    )
    template: Path | None = Field(
        default=None,
        description="A file with a chat template (Jinja) in place of the checkpoint's; it is exported too.",
    )
    most_damaged: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="Bad rows are left out, counted and told; a larger share of them stops.",
    )
    held_out: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Share of the prompts that is kept for evaluation; equal prompts stay together.",
    )


class AlgorithmConfig(Config):
    """How much an answer is learnt, from its reward and those of the other answers to its prompt."""

    kind: Literal["grpo", "rloo"] = Field(
        default="grpo",
        description='"grpo": each token is weighed by how far the reward is above the mean of its group; "rloo": the '
        "whole answer, above the mean of the others.",
    )
    scale: Scale | None = Field(
        default=None,
        validate_default=True,
        description='Advantages are divided by the deviation of their "group" (by default of grpo) or of the whole '
        '"batch", or by nothing, "none" (by default of rloo, which has no "group").',
    )
    aggregate: Aggregate = Field(
        default="token",
        description='Of grpo: the loss is a mean of all tokens ("token"), of the means of answers ("answer"), or of '
        'their sums over data.max_tokens ("constant").',
    )
    updates: int = Field(default=1, ge=1, description="Updates that are made from the answers to a batch of prompts.")
    clip: tuple[float, float] = Field(
        default=(0.2, 0.28),
        description="How far below and above 1 the ratio of a probability to the one before the first update counts; "
        "with updates above 1.",
    )
    dual: float | None = Field(
        default=None, gt=1, description="Of grpo: the largest ratio that counts for answers below the mean."
    )
    kl: float = Field(
        default=0.0,
        ge=0,
        description="Weight of a penalty for leaving the reference: of grpo for each token, of rloo for each answer. "
        "0: no reference is held in memory.",
    )
    reference: Path | None = Field(
        default=None, description="With kl: the checkpoint that the model is held to; by default `initial`."
    )

    @field_validator("scale", "aggregate", "dual", "reference")
    @classmethod
    def _belongs(cls, value: Any, info: ValidationInfo) -> Any:
        kind, name = info.data.get("kind", "grpo"), info.field_name or ""
        if name == "scale" and value is None:
            return {"grpo": "group", "rloo": "none"}[kind]
        if name == "scale" and (kind, value) == ("rloo", "group"):
            raise ValueError("of rloo is 'batch' or 'none'")
        if name in ("aggregate", "dual") and kind != "grpo" and value != cls.model_fields[name].default:
            raise ValueError(f"is of kind = 'grpo', not of {kind!r}; leave it out")
        if name == "reference" and value is not None and not info.data.get("kl"):
            raise ValueError("is what the penalty algorithm.kl is measured from; set that above 0, or leave it out")
        return value

    @field_validator("clip")
    @classmethod
    def _around_one(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not (0 < value[0] < 1 and value[1] > 0):
            raise ValueError("are two numbers above 0, the first below 1")
        return value


class RewardConfig(Config):
    """What an answer is worth."""

    kind: str = Field(
        description='"verifier": 1 for the answer that the prompt\'s row names, else 0; "model": the score of a reward '
        'model; or "file.py:function": a function of your own.'
    )
    check: Literal["number", "exact", "regex"] = Field(
        default="number",
        description="Of verifier: the last number of the answer is that of the row's `answer`; the texts are the same; "
        "or the answer matches it as a regular expression.",
    )
    folder: Path | None = Field(
        default=None, validate_default=True, description="Of model: the reward model's checkpoint."
    )
    timeout: float = Field(default=10.0, gt=0, description="Of a function: seconds that a call may take.")
    unended: float | Literal["scored"] = Field(
        default=0.0,
        description='The reward of every answer that does not end within data.max_tokens; "scored": that of the '
        "others. Where such answers are rewarded, they soon never end.",
    )

    @field_validator("kind")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ("verifier", "model") and not all(value.rpartition(".py:")[::2]):
            raise ValueError("is 'verifier', 'model', or a function of your own as 'file.py:function'")
        return value

    @field_validator("check", "folder", "timeout")
    @classmethod
    def _belongs(cls, value: Any, info: ValidationInfo) -> Any:
        kind, name = info.data.get("kind", ""), info.field_name or ""
        owner = {"check": "verifier", "folder": "model", "timeout": "function"}[name]
        mine = owner == (kind if kind in ("verifier", "model") else "function")
        if name == "folder" and mine and value is None:
            raise ValueError("is the reward model that kind = 'model' asks; name its checkpoint")
        if not mine and value != cls.model_fields[name].default:
            raise ValueError(f"is not of kind = {kind!r}; leave it out")
        return value
