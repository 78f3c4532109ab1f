"""The inputs that penjing and TRL compute the same numbers of: chats, batches of answers, what is learnt of them."""

from __future__ import annotations

from typing import Any

import numpy as np

_WORDS = ["tree", "root", "grows", "slowly", "über", "3", "17", "—", "moss,", "(pot)", "wire\n", "cut", "water", "é"]
VOCAB, PAD = 320, 2
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "smollm2": "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}"
    "{% endif %}" + CHATML,
    "inst": "{{ '<|endoftext|>' }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] }}"
    "{{ '<|im_end|>' }}{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}",
}


def chats(count: int) -> list[tuple[list[dict[str, str]], list[dict[str, str]]]]:
    """(prompt, completion) of conversations of one to five turns, some with a system prompt."""
    random = np.random.default_rng(0)

    def text() -> str:
        return " ".join(random.choice(_WORDS, int(random.integers(1, 9)))).strip() or "moss"

    found = []
    for _ in range(count):
        turns = [{"role": "system", "content": text()}] if random.random() < 0.3 else []
        said = range(2 * int(random.integers(0, 3)) + 1)
        turns += [{"role": "assistant" if place % 2 else "user", "content": text()} for place in said]
        found.append((turns, [{"role": "assistant", "content": text()}]))
    return found


def answers(rows: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) in tokens, of unequal lengths."""
    random = np.random.default_rng(seed)
    return [
        tuple(random.integers(3, VOCAB, int(random.integers(2, 12))).tolist() for _ in range(2))  # type: ignore[misc]
        for _ in range(rows)
    ]


def pairs() -> list[tuple[list[int], list[int], list[int]]]:
    """(prompt, chosen, rejected)."""
    first, second = answers(4, 1), answers(4, 2)
    return [(prompt, chosen, rejected) for (prompt, chosen), (_, rejected) in zip(first, second, strict=True)]


REFERENCE = [[-30.5, -41.25], [-60.0, -22.5], [-55.0, -70.0], [-18.0, -35.5]]
"""Log-probabilities that a reference may have given to both answers of `pairs`."""
DPO: dict[str, dict[str, Any]] = {
    "sigmoid": {"beta": 0.1},
    "sigmoid, beta 0.5": {"loss": "sigmoid", "beta": 0.5},
    "sigmoid_norm": {"beta": 2.0},
    "ipo": {"beta": 0.1},
    "hinge": {"beta": 0.05},
    "robust": {"beta": 0.1, "label_smoothing": 0.2},
    "apo_zero": {"beta": 0.1},
}
ADVANTAGES = [1.5, -0.5, 0.25, -1.25, 0.0, 2.0]
GRPO: dict[str, dict[str, Any]] = {
    "dapo": {"clip": (0.2, 0.28), "kl": 0.0},
    "dapo with KL": {"clip": (0.2, 0.2), "kl": 0.05},
    "dapo, dual clip": {"clip": (0.2, 0.2), "kl": 0.0, "dual": 1.5},
    "grpo": {"clip": (0.2, 0.2), "kl": 0.05, "aggregate": "answer"},
    "dr_grpo": {"clip": (0.2, 0.28), "kl": 0.0, "aggregate": "constant", "most": 16},
    "dapo, on policy": {"clip": (0.2, 0.2), "kl": 0.05, "old": None},
}
RLOO_CLIP = (0.2, 0.28)
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [-1.5, 2.0, 0.25, 0.0]]
"""Of three prompts with four answers each."""
MARGINS, CENTRING = [0.0, 0.5, 1.0, 0.25], 0.01


def old_logprobs(seed: int, sizes: list[int]) -> list[list[float]]:
    """What the policy that sampled, or a reference, may have given to each token of answers of these sizes."""
    random = np.random.default_rng(seed)
    return [(-6.0 + random.normal(0, 0.4, size)).tolist() for size in sizes]


def rloo_shifts(rows: int) -> list[float]:
    """By how much an answer has become likelier since it was sampled, in nats."""
    return np.random.default_rng(7).normal(0, 0.25, rows).tolist()


RANK, ALPHA = 4, 6.0


def adapter(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Values of the two matrices of each adapted layer, by their names."""
    random = np.random.default_rng(6)
    return {name: random.normal(0, 0.1, shapes[name]).astype(np.float32) for name in sorted(shapes)}


PPO: dict[str, dict[str, Any]] = {
    "plain": {"clip": (0.2, 0.2), "value_weight": 0.1},
    "all parts": {"clip": (0.2, 0.28), "dual": 1.5, "value_weight": 0.5, "value_clip": 0.1, "entropy": 0.01},
    "mean of answers": {"clip": (0.2, 0.2), "value_weight": 0.5, "aggregate": "answer"},
    "constant": {"clip": (0.1, 0.3), "value_weight": 1.0, "aggregate": "constant", "most": 16},
}
PPO_SIZES, PPO_VOCAB = [3, 1, 5, 2, 4, 5], 11
GAE = {"no discount": (1.0, 0.95), "both": (0.9, 0.8), "next value": (1.0, 0.0), "to the end": (1.0, 1.0)}
"""The discount and the trace."""


def ppo_tokens() -> dict[str, Any]:
    """Numbers of the tokens of `PPO_SIZES` answers: what the model says of them and what it said when they were
    sampled; each (R,), but "logits" (R, V)."""
    random, count = np.random.default_rng(8), sum(PPO_SIZES)
    numbers: dict[str, Any] = {
        name: random.normal(0, 1, count) for name in ("values", "old_values", "advantages", "returns")
    }
    numbers |= {"logits": random.normal(0, 1, (count, PPO_VOCAB)), "shift": random.normal(0, 0.25, count)}
    numbers["next"] = random.integers(0, PPO_VOCAB, count)
    return numbers


def gae() -> dict[str, Any]:
    """Of the same answers in rows of 5 tokens: "rewards" and "values"."""
    random = np.random.default_rng(9)
    return {name: random.normal(0, 1, (len(PPO_SIZES), max(PPO_SIZES))).tolist() for name in ("rewards", "values")}
