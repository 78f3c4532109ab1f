"""How much of prompts a step may compute, so that running answers get their next token in time."""

from __future__ import annotations

LEAST_TOKENS = 16  # of prompts in a step, however slow it is: a prompt must come to its end
SHARE = 0.2  # of a new observation in the running means
MOST_RISE = 2.0  # of a mean at one observation: a step that the machine held up says little


class Pace:
    """Learns from steps what a token of a prompt costs, and what the running answers cost by themselves.

    Args:
        target_seconds: that a step should take at most while answers run; 0: no matter how long.
        max_tokens: that a step can take at all.
    """

    def __init__(self, target_seconds: float, max_tokens: int) -> None:
        self._target, self._max_tokens = target_seconds, max_tokens
        self._answers_seconds = 0.0
        self._token_seconds = 0.0

    def prompt_tokens(self, num_answers: int) -> int:
        """Tokens of prompts for a step beside the next tokens of `num_answers` answers: any number where nobody waits
        for one."""
        room = self._max_tokens - num_answers
        if num_answers == 0 or self._target == 0 or self._token_seconds == 0:
            return max(room, 1)
        tokens = int((self._target - self._answers_seconds) / self._token_seconds)
        return max(min(max(tokens, LEAST_TOKENS), room), 1)

    def observe(self, num_prompt_tokens: int, num_answers: int, seconds: float) -> None:
        """A step has taken `seconds`."""
        if num_prompt_tokens == 0:
            self._answers_seconds = _mean(self._answers_seconds, seconds)
            return
        rest = seconds - (self._answers_seconds if num_answers else 0.0)
        # Of a step that was faster than answers alone nothing follows but that tokens are cheap.
        self._token_seconds = _mean(self._token_seconds, max(rest, 0.1 * seconds) / num_prompt_tokens)


def _mean(mean: float, value: float) -> float:
    if mean == 0:
        return value
    return mean + SHARE * (min(value, MOST_RISE * mean) - mean)
