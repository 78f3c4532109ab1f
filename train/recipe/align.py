"""The sections of a recipe whose model learns from answers that it samples itself."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from penjing.core.config import Config
from penjing.train.objective.on_policy import Divergence
from penjing.train.objective.policy import Aggregate, Scale
from penjing.train.recipe.rows import WrittenConfig

_OF_PPO = ("discount", "trace", "value_weight", "value_clip")
_OF_DRAFT = ("guesses", "layers", "intermediate_size", "known_tokens", "answers")
_OWNERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_OF_PPO, ("ppo",)),
    **dict.fromkeys(_OF_DRAFT, ("draft",)),
    "aggregate": ("grpo", "ppo", "distill"),
    "dual": ("grpo", "ppo"),
    "entropy": ("grpo", "ppo"),
    "redraws": ("grpo", "rloo"),
    "kl": ("grpo", "rloo", "ppo"),
    "teacher": ("distill",),
    "divergence": ("distill",),
}


class PromptConfig(WrittenConfig):
    """What is asked: rows with `prompt` (a text, or messages) and, for a verifier, `answer`; or computed problems."""

    kind: Literal["rows", "reasoning-gym"] = Field(
        default="rows",
        description='Your own rows, or problems that the package reasoning-gym computes, "reasoning-gym".',
    )
    sources: tuple[str, ...] = Field(
        default=(),
        validate_default=True,
        description="Of rows: files .jsonl or .parquet, and folders of them; or 'builtin:sums', 512 small sums, "
        "'builtin:large-sums', 512 of numbers of three digits, or 'builtin:questions', a thousand without answers.",
    )
    tasks: dict[str, float] = Field(
        default={},
        validate_default=True,
        description="Of reasoning-gym: its tasks with the share of the problems that each has, {chain_sum = 1.0}.",
    )
    settings: dict[str, dict[str, Any]] = Field(
        default={},
        description="Of reasoning-gym: settings of single tasks, {chain_sum = {max_terms = 2, max_digits = 1}}.",
    )
    count: int = Field(
        default=1000, ge=2, le=1_000_000, description="Of reasoning-gym: problems, with those that are held out."
    )
    held_out: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Share of the prompts that is kept for evaluation; equal prompts stay together.",
    )

    @field_validator("sources", "tasks", "settings", "count")
    @classmethod
    def _of_kind(cls, value: Any, info: ValidationInfo) -> Any:
        kind, name = info.data.get("kind", "rows"), info.field_name or ""
        owner = "rows" if name == "sources" else "reasoning-gym"
        if kind != owner and value != cls.model_fields[name].default:
            raise ValueError(f"is of kind = {owner!r}, not of {kind!r}; leave it out")
        if kind == owner and name == "sources" and not value:
            raise ValueError("names what is asked: files, folders or 'builtin:sums'")
        if kind == owner and name == "tasks" and not (value and all(0 < share < inf for share in value.values())):
            raise ValueError("names at least one task, with a share above 0: {chain_sum = 1.0}")
        if name == "settings" and (unknown := set(value) - set(info.data.get("tasks", value))):
            raise ValueError(f"has {min(unknown)!r}, which tasks does not name")
        return value


class AlgorithmConfig(Config):
    """How much an answer is learnt, from its reward and those of the other answers to its prompt."""

    kind: Literal["grpo", "rloo", "ppo", "distill", "draft"] = Field(
        default="grpo",
        description='"grpo": each token is weighed by how far the reward is above the mean of its group; "rloo": the '
        'whole answer, above the mean of the others; "ppo": each token, above what a learnt value expected there; '
        '"distill": each token as a teacher would have gone on, whatever it is worth. "draft": the model stays as it '
        "is, and a small network learns to guess what it says.",
    )
    scale: Scale | None = Field(
        default=None,
        validate_default=True,
        description='Advantages are divided by the deviation of their "group" (by default of grpo) or of the whole '
        '"batch" (by default of ppo), or by nothing, "none" (by default of rloo). Only grpo has a "group".',
    )
    aggregate: Aggregate = Field(
        default="token",
        description='Of grpo and ppo: the loss is a mean of all tokens ("token"), of the means of answers ("answer"), '
        'or of their sums over data.max_tokens ("constant").',
    )
    updates: int = Field(default=1, ge=1, description="Updates that are made from the answers to a batch of prompts.")
    clip: tuple[float, float] = Field(
        default=(0.2, 0.28),
        description="How far below and above 1 the ratio of a probability to the one before the first update counts; "
        "with updates above 1.",
    )
    dual: float | None = Field(
        default=None, gt=1, description="Of grpo and ppo: the largest ratio that counts for answers below the mean."
    )
    kl: float = Field(
        default=0.0,
        ge=0,
        description="Weight of a penalty for leaving the reference: of grpo a part of the loss, of rloo taken off the "
        "reward of an answer, of ppo off that of each token. 0: no reference is held in memory.",
    )
    reference: Path | None = Field(
        default=None, description="With kl: the checkpoint that the model is held to; by default `initial`."
    )
    discount: float = Field(
        default=1.0, gt=0, le=1, description="Of ppo: what a reward is worth a token earlier (gamma)."
    )
    trace: float = Field(
        default=0.95,
        ge=0,
        le=1,
        description="Of ppo: how far advantages look ahead (lambda of GAE). 0: to the next value; 1: to the end.",
    )
    value_weight: float = Field(default=0.1, gt=0, description="Of ppo: weight of the value's loss.")
    value_clip: float = Field(
        default=0.2, gt=0, description="Of ppo: how far a value may move in the updates from one batch of answers."
    )
    entropy: float = Field(
        default=0.0,
        ge=0,
        description="Of grpo and ppo: weight of a reward for the entropy of the next token, so that it tries.",
    )
    redraws: int = Field(
        default=0,
        ge=0,
        le=16,
        description="Of grpo and rloo: how often a prompt whose answers are all worth the same, so that nothing is "
        "learnt of them, is replaced by another before the update (dynamic sampling).",
    )

    teacher: Path | None = Field(
        default=None, validate_default=True, description="Of distill: the checkpoint that is learnt from."
    )
    divergence: Divergence = Field(
        default="reverse",
        description='Of distill: "reverse", KL(model ‖ teacher), or "forward", KL(teacher ‖ model), of each token.',
    )

    guesses: int = Field(default=3, ge=1, le=8, description="Of draft: how many tokens ahead it learns to guess.")
    layers: int = Field(default=1, ge=1, le=16, description="Of draft: layers of the network.")
    intermediate_size: int | None = Field(
        default=None, ge=1, description="Of draft: inner size of a layer; by default that of the model's."
    )
    known_tokens: int = Field(
        default=8192,
        ge=1,
        description="Of draft: tokens that can be guessed, those of the prompts first and then the first ones of the "
        "vocabulary, which are the most frequent ones of a tokenizer that was learnt by merging pairs.",
    )

    answers: Path | None = Field(
        default=None,
        description="Of draft: the artifact that will be served, such as the model in INT8, which answers in place of "
        "the model: as it will then, and sooner.",
    )

    @field_validator("scale", "reference", *_OWNERS)
    @classmethod
    def _belongs(cls, value: Any, info: ValidationInfo) -> Any:
        kind, name = info.data.get("kind", "grpo"), info.field_name or ""
        if name == "scale" and value is None:
            return {"grpo": "group", "ppo": "batch"}.get(kind, "none")
        if name == "scale" and kind in ("distill", "draft") and value != "none":
            raise ValueError(f"divides advantages, which kind = {kind!r} has none of; leave it out")
        if name == "scale" and kind != "grpo" and value == "group":
            raise ValueError(f"of {kind} is 'batch' or 'none'")
        owners = _OWNERS.get(name, (kind,))
        if kind not in owners and value != cls.model_fields[name].default:
            raise ValueError(f"is of kind = {' or '.join(map(repr, owners))}, not of {kind!r}; leave it out")
        if name == "teacher" and kind == "distill" and value is None:
            raise ValueError("is the checkpoint that kind = 'distill' learns from; name one")
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
    check: Literal["number", "exact", "regex", "task"] | None = Field(
        default=None,
        description="Of verifier: the last number of the answer is that of the row's `answer`, and the answer does "
        "not only say numbers of the prompt again; the texts are the same; the answer matches it as a regular "
        "expression; or the scorer of reasoning-gym's task decides. By default the number, of reasoning-gym the task.",
    )
    folder: Path | None = Field(
        default=None, validate_default=True, description="Of model: the reward model's checkpoint."
    )
    timeout: float = Field(default=10.0, gt=0, description="Of a function: seconds that a call may take.")
    gold: Literal["number", "exact", "regex"] | None = Field(
        default=None,
        description="Of model or a function: whether an answer is the row's `answer` is recorded too, as `check` of a "
        "verifier says, and never learnt: it tells when a reward is gamed.",
    )
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

    @field_validator("check", "folder", "timeout", "gold")
    @classmethod
    def _belongs(cls, value: Any, info: ValidationInfo) -> Any:
        kind, name = info.data.get("kind", ""), info.field_name or ""
        if name == "gold":
            if value is not None and kind == "verifier":
                raise ValueError("is what is learnt with kind = 'verifier'; leave it out")
            return value
        owner = {"check": "verifier", "folder": "model", "timeout": "function"}[name]
        mine = owner == (kind if kind in ("verifier", "model") else "function")
        if name == "folder" and mine and value is None:
            raise ValueError("is the reward model that kind = 'model' asks; name its checkpoint")
        if not mine and value != cls.model_fields[name].default:
            raise ValueError(f"is not of kind = {kind!r}; leave it out")
        return value
