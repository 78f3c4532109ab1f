"""`penjing bench ab`: two served decoders on the same prompts, in turns. How far they agree, which predicts text better
and which is faster, each with an interval from the pairs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penjing.core.errors import ConfigError, InputError, ServerError
from penjing.core.progress import Progress, Silent
from penjing.serve.bench.intervals import bootstrap
from penjing.serve.client.client import Client
from penjing.serve.fleet.state import running_fleets
from penjing.serve.supervisor.state import read_state, served_name

PROMPT_CHARS = 400
MIN_PROMPTS = 8
REQUEST_SECONDS = 600.0


@dataclass(frozen=True)
class Tried:
    """What one contestant made of one prompt."""

    text: str
    seconds: float
    num_tokens: int
    bits: float
    """Of the prompt, its first token left out."""
    num_scored: int
    """Tokens that `bits` are of."""


def bench_ab(
    first: str,
    second: str,
    *,
    prompts: list[str] | None = None,
    num_prompts: int = 64,
    num_new_tokens: int = 32,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compare two served decoders: each is asked every prompt, in turns, the one that begins changing each time.

    Args:
        first: the name of a model that runs on this machine, such as llm:1, or host:port of a gRPC endpoint.
        second: likewise; ratios and differences are its figures against `first`'s.
        prompts: texts; None takes paragraphs of Python's help.
        num_prompts: how many, at most.

    Returns:
        Each figure with its value, and the bounds of its 95 % interval: `same_answers`, the share of prompts with equal
        greedy answers; `agreement`, the mean share of an answer before the first difference;
        `bits_per_byte_difference` of the prompts' texts; `speed_ratio` of whole answers of one stream.

    Raises:
        ConfigError: too few prompts.
        ServerError: no such model, or it does not answer.
    """
    progress = progress or Silent()
    texts = (paragraphs(num_prompts) if prompts is None else [text for text in prompts if text.strip()])[:num_prompts]
    if len(texts) < MIN_PROMPTS:
        raise ConfigError(f"{len(texts)} prompts say nothing about two models; give {MIN_PROMPTS} or more")
    with _client(first) as one, _client(second) as other:
        for client in (one, other):
            _try(client, texts[0], num_new_tokens)  # caches and connections are warm for both
        progress.start("benchmark", len(texts))
        pairs: list[tuple[Tried, Tried]] = []
        for index, text in enumerate(texts):
            order = (one, other) if index % 2 == 0 else (other, one)
            tried = [_try(client, text, num_new_tokens) for client in order]
            pairs.append((tried[0], tried[1]) if index % 2 == 0 else (tried[1], tried[0]))
            progress.advance()
    return {"first": first, "second": second, **compared(pairs, texts), "prompts": len(texts)}


def compared(pairs: list[tuple[Tried, Tried]], texts: list[str]) -> dict[str, Any]:
    """The figures of `bench_ab`."""
    count = len(pairs)
    same = np.array([one.text == other.text for one, other in pairs], np.float64)
    agreement = np.array([_agreement(one.text, other.text) for one, other in pairs])
    bits = np.array([(one.bits, other.bits) for one, other in pairs])
    sizes = np.array([len(text.encode()) for text in texts], np.float64)
    speeds = np.array([[tried.num_tokens / tried.seconds for tried in pair] for pair in pairs])
    logs = np.log(speeds[:, 1] / speeds[:, 0])
    differences = bits[:, 1] - bits[:, 0]
    return {
        "same_answers": bootstrap(lambda at: float(same[at].mean()), count).shown(),
        "agreement": bootstrap(lambda at: float(agreement[at].mean()), count).shown(),
        "bits_per_byte_difference": bootstrap(lambda at: float(differences[at].sum() / sizes[at].sum()), count).shown(),
        "speed_ratio": bootstrap(lambda at: math.exp(np.median(logs[at])), count).shown(),
        "bits_per_byte": {"first": bits[:, 0].sum() / sizes.sum(), "second": bits[:, 1].sum() / sizes.sum()},
        "perplexity": {name: _perplexity([pair[at] for pair in pairs]) for at, name in enumerate(("first", "second"))},
        "tokens_per_second": {name: float(np.median(speeds[:, at])) for at, name in enumerate(("first", "second"))},
    }


def paragraphs(count: int) -> list[str]:
    """The first `count` long paragraphs of Python's help that nothing was calibrated with, each on a line."""
    from penjing.core.text.corpus import TOPIC_GAP, heldout_text

    lines = (" ".join(paragraph.split())[:PROMPT_CHARS] for paragraph in heldout_text().split(TOPIC_GAP))
    return [line for line in lines if len(line) == PROMPT_CHARS][:count]


def read_prompts(path: Path) -> list[str]:
    """A prompt a line.

    Raises:
        InputError: the file cannot be read as text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as a file of prompts: {error}") from None
    return text.removesuffix("\n").split("\n") if text else []  # `splitlines` would end lines at U+2028, too


def _client(name: str) -> Client:
    for fleet in running_fleets():
        if name in fleet.models and (found := read_state(fleet.models[name]["grpc_port"])) is not None:
            return Client(found.grpc, model=name.partition(":")[0], timeout=REQUEST_SECONDS)
    _, colon, port = name.rpartition(":")
    if not colon or not port.isdigit() or int(port) < 1024:
        known = ", ".join(model for fleet in running_fleets() for model in fleet.models) or "none runs under a name"
        raise ServerError(f"no model {name!r} runs here ({known}); name one of these, or give host:port of its gRPC")
    return Client(name, model=served_name(name), timeout=REQUEST_SECONDS)


def _try(client: Client, text: str, num_new_tokens: int) -> Tried:
    greedy = {"temperature": 0.0, "ignore_eos": True}
    started = time.perf_counter()
    answer = client.generate(text, max_tokens=num_new_tokens, **greedy)
    seconds = time.perf_counter() - started
    scored = client.generate(text, max_tokens=1, prompt_logprobs=0, **greedy).prompt_logprobs or []
    logprobs = [next(iter(entry.values()))["logprob"] for entry in scored if entry is not None]
    return Tried(answer.text, seconds, answer.num_output_tokens, -sum(logprobs) / math.log(2), len(logprobs))


def _agreement(one: str, other: str) -> float:
    """The share of the longer text that both begin with; 1 where they are equal."""
    if one == other:
        return 1.0
    apart = (index for index, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(apart, min(len(one), len(other))) / max(len(one), len(other))


def _perplexity(tried: list[Tried]) -> float:
    return 2 ** (sum(each.bits for each in tried) / max(1, sum(each.num_scored for each in tried)))
