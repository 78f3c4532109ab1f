"""How good the answers of a model are to prompts that were held out: the likeliest one, and the best of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from penjing.core.errors import ConfigError, InputError
from penjing.core.progress import Progress
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams
from penjing.train.align.prompts import Answer, Prompt, Sampled, answer_seed, read_prompts
from penjing.train.align.reasoning import ReasoningTasks
from penjing.train.align.rewards import Rewards, make_rewards
from penjing.train.chat.held_out import held_out_places, judged_places
from penjing.train.chat.tokens import ChatTokens
from penjing.train.recipe.data import RolloutData
from penjing.train.recipe.load import load_train_recipe

_TOGETHER = 32  # sequences that the engine computes at once
_NORMAL = 1.96  # deviations of a mean that hold it in 95 of 100 cases


def evaluate_answers(
    recipe_path: Path, overrides: list[str] | None, model: Path, samples: int, progress: Progress
) -> dict[str, float]:
    """Answer the prompts that a recipe of rollouts holds out, by any checkpoint or artifact of its tokenizer.

    Args:
        samples: answers to each prompt, sampled at the recipe's temperature.

    Returns:
        "prompts" and "samples"; the mean reward of the likeliest answer, "greedy", and for k = 1, 2, 4 … `samples` the
        mean of the best reward among k answers, "best_of_k", each with "…_error", half of its 95 % interval over the
        prompts; and "ended", the share of sampled answers that end. With rewards of 0 and 1, best_of_k is pass@k.

    Raises:
        ConfigError: the recipe learns from no rewards, or holds no prompt out.
        InputError: the model or the prompts cannot be read, or no answer can be sampled.
    """
    recipe = load_train_recipe(recipe_path, overrides or [])
    if not isinstance(recipe.data, RolloutData) or recipe.prompts is None or recipe.reward is None:
        raise ConfigError(f"{recipe_path} has no prompts with a reward; name a recipe with [prompts] and [reward]")
    data, asked = recipe.data, recipe.prompts
    writer = ChatTokens.from_folder(model, asked.template, setting="prompts.template")
    tasks = ReasoningTasks(asked) if asked.kind == "reasoning-gym" else None
    rewards = make_rewards(recipe.reward, model, torch.device("cpu"), tasks)
    given = asked.sources if tasks is None else tasks.rows()
    engine = load_engine(model, EngineConfig(max_num_sequences=_TOGETHER))
    assert engine.config.max_model_len is not None, "the engine resolves it"
    room = engine.config.max_model_len - data.max_tokens
    found = read_prompts(given, writer, room, asked.most_damaged, rewards.wrong, progress)
    held = held_out_places([each.key for each in found], asked.held_out)
    places = judged_places(held, recipe.evaluation.samples)
    if not places:
        raise ConfigError("prompts.held_out = 0 leaves no prompt that was not learnt from; raise it")
    prompts = [found[place] for place in places]
    for place, prompt in enumerate(prompts):
        greedy = SamplingParams(temperature=0.0, max_tokens=data.max_tokens)
        tried = SamplingParams(
            n=samples, temperature=data.temperature, max_tokens=data.max_tokens, seed=answer_seed(recipe.seed, place)
        )
        engine.add(Request(f"greedy {place}", prompt.tokens, greedy))
        engine.add(Request(f"sampled {place}", prompt.tokens, tried))
    answers = {f"greedy {place}": [Sampled()] for place in range(len(prompts))}
    answers |= {f"sampled {place}": [Sampled() for _ in range(samples)] for place in range(len(prompts))}
    progress.start("answering", len(prompts) * (1 + samples))
    while engine.has_work():
        for output in engine.step():
            if output.finish_reason == "error":
                raise InputError(f"no answer can be sampled: {output.error}")
            answer = answers[output.request_id][output.index]
            answer.tokens += output.token_ids
            answer.ended |= output.finish_reason == "stop"
            progress.advance(int(output.finish_reason is not None))
    likeliest, several = (
        _judged(rewards, writer, prompts, [answers[f"{kind} {place}"] for place in range(len(prompts))])
        for kind in ("greedy", "sampled")
    )
    result = {"prompts": float(len(prompts)), "samples": float(samples)} | _mean("greedy", likeliest[:, 0])
    for tries in sorted({*(2**power for power in range(samples.bit_length())), samples}):
        result |= _mean(f"best_of_{tries}", best_of(several, tries))
    ended = [each.ended for name, some in answers.items() if name.startswith("sampled") for each in some]
    return result | {"ended": sum(ended) / len(ended)}


def best_of(rewards_PS: Tensor, tries: int) -> Tensor:
    """(P,), the best reward to be expected among `tries` of the S answers to each prompt: the mean over all choices of
    so many, which for rewards of 0 and 1 is the unbiased pass@k of https://arxiv.org/abs/2107.03374.

    Args:
        rewards_PS: floating.
        tries: from 1 to S.
    """
    samples = rewards_PS.shape[1]
    # An answer is the best of so many as can be chosen with it from those that are no better.
    weights = [math.comb(worse, tries - 1) / math.comb(samples, tries) for worse in range(samples)]
    return rewards_PS.sort(1).values @ torch.tensor(weights, dtype=rewards_PS.dtype)


def _judged(
    rewards: Rewards, writer: ChatTokens, prompts: Sequence[Prompt], answers: Sequence[Sequence[Sampled]]
) -> Tensor:
    """The reward of each answer, (P, S) float64."""
    found = [
        rewards(prompt, [Answer(each, writer.tokenizer.decode(each.tokens)) for each in some])
        for prompt, some in zip(prompts, answers, strict=True)
    ]
    return torch.tensor(found, dtype=torch.float64)


def _mean(name: str, values_P: Tensor) -> dict[str, float]:
    count = len(values_P)
    error = float(values_P.std()) / math.sqrt(count) if count > 1 else math.nan
    return {name: float(values_P.mean()), f"{name}_error": _NORMAL * error}
