"""What images cost other answers: the time between the tokens of a stream while another client sends pictures.

Through a real Triton server, in three phases that take turns. Beside `images` another client asks about one new picture
after another, each as soon as it has the answer to the one before. Beside `texts` it sends as many requests of as many
prompt tokens at the same times, so that what differs is the picture. Beside `nothing` the stream is alone. Of an answer
to the other client there is one token. The stream goes on until its last one has come.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lib.models import say
from lib.processor_time import below, seconds
from lib.rows import Row, new_row
from penjing.core.checkpoint.load import sight_config_of
from penjing.core.errors import SetupError
from penjing.core.text.corpus import heldout_text
from penjing.core.text.tokenizer import Tokenizer
from penjing.serve.client.calls import Prompt
from penjing.serve.client.client import AsyncClient
from penjing.serve.supervisor.state import read_state
from penjing.serve.supervisor.temporary import temporary_server


@dataclass(frozen=True)
class Answered:
    """A request of the other client: when it was sent, how many seconds its answer took, and its prompt's tokens."""

    sent: float
    took: float
    prompt_tokens: int


Send = Callable[[AsyncClient, float, float], Awaitable[Answered | None]]
"""Sends a request and waits for its answer; None: there is none left. Is given when the phase began and ends."""
SETTINGS = ["stream_interval=0", "num_blocks=1024"]  # each token is sent at once, and memory is taken for a few answers
WARM_SECONDS = 1.0
STREAM_TOKENS = 128  # of an answer of the stream, behind which the next one begins
QUESTION = "What is left of the bag?"
TIMEOUT = 120.0
BESIDE = {"images": "as many texts of as many tokens", "texts": "the stream alone"}
FIGURES: dict[str, Callable[[Sequence[float]], float]] = {
    "gap_p50": lambda gaps: float(np.quantile(gaps, 0.5)),
    "gap_p95": lambda gaps: float(np.quantile(gaps, 0.95)),
    "gap_longest": max,
}
_GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True)
class Phase:
    """What was seen: milliseconds between tokens of the stream, how long after the start each request of the other
    client was sent, how long its answer took, and how long all lasted, in seconds, the tokens of its last prompt, and
    the seconds of processor of each of the server's processes: `llm`, `sight`, and `server` for all others."""

    gaps: tuple[float, ...]
    sent: tuple[float, ...]
    answered: tuple[float, ...]
    lasted: float
    prompt_tokens: int
    spent: Mapping[str, float]


def measure(model: Path, side: int, length: float, rounds: int) -> list[dict[str, Phase]]:
    """`rounds` of the three phases of `length` seconds each, behind one that warms caches and threads up.

    Args:
        model: an artifact or a checkpoint of a decoder that sees.
        side: pixels of a picture's sides.

    Raises:
        SetupError: a prompt was longer than the other, or a phase is too short for two tokens.
    """
    tokenizer, stands = Tokenizer.from_folder(model), sight_config_of(model).image_token_id
    text = [token for token in tokenizer.encode(heldout_text()) if token != stands]
    pictures = Pictures(side, f"{tokenizer.id_to_token(stands)}{QUESTION}")
    found = list[dict[str, Phase]]()
    with temporary_server(model, SETTINGS) as server:
        processes = named_processes(int(server.rpartition(":")[2]))
        for turn in range(rounds + 1):
            phases = _round(server, processes, pictures, text, length if turn else WARM_SECONDS, turn % 2 == 1)
            if turn:
                found.append(phases)
                figures = ", ".join(
                    f"beside {name} {FIGURES['gap_p50'](phase.gaps):.1f} and {FIGURES['gap_p95'](phase.gaps):.1f} ms"
                    for name, phase in phases.items()
                )
                say(f"round {turn}, {len(phases['images'].sent)} pictures: half and 95 % of the gaps {figures}")
    return found


def _round(
    server: str, processes: dict[int, str], pictures: Pictures, text: Sequence[int], length: float, alone_first: bool
) -> dict[str, Phase]:
    """The three phases; the one without company stands before the others, or behind them."""

    def phase(send: Send | None, length: float) -> Phase:
        return asyncio.run(_phase(server, send, length, processes))

    pictures.make(int(20 * length))
    alone = phase(None, length) if alone_first else None
    images = phase(pictures.ask, length)
    texts = phase(Texts(text, images).ask, images.lasted)
    if images.prompt_tokens != texts.prompt_tokens:
        raise SetupError(
            f"prompts with pictures had {images.prompt_tokens} tokens, and those without {texts.prompt_tokens}: they "
            "cannot be compared"
        )
    return {"images": images, "texts": texts, "nothing": alone or phase(None, images.lasted)}


class Pictures:
    """One new picture after another, each when the one before is answered."""

    def __init__(self, side: int, prompt: str) -> None:
        self._side, self._prompt, self._made = side, prompt, 0
        self._waiting = list[bytes]()

    def make(self, count: int) -> None:
        """Have so many at hand: making one takes time, which the phases shall not see."""
        while len(self._waiting) < count:
            self._made += 1
            self._waiting.append(picture(self._made, self._side))

    async def ask(self, client: AsyncClient, _: float, until: float) -> Answered | None:
        """See `Send`."""
        if time.perf_counter() > until:
            return None
        self.make(1)
        file = self._waiting.pop()
        return await _ask(client, self._prompt, images=[file])


class Texts:
    """As many texts that were never seen, at the times and of the length that pictures had."""

    def __init__(self, text: Sequence[int], images: Phase) -> None:
        self._text, self._times, self._length = text, iter(images.sent), images.prompt_tokens

    async def ask(self, client: AsyncClient, begun: float, _: float) -> Answered | None:
        """See `Send`."""
        at = next(self._times, None)
        if at is None:
            return None
        await asyncio.sleep(begun + at - time.perf_counter())
        start = int(np.random.default_rng(int(at * 1e6)).integers(0, len(self._text) - self._length))
        prompt = self._text[start : start + self._length]
        return await _ask(client, prompt)


async def _ask(client: AsyncClient, prompt: Prompt, **more: Any) -> Answered:
    """Ask for one token."""
    sent = time.perf_counter()
    result = await client.generate(prompt, max_tokens=1, timeout=TIMEOUT, **_GREEDY, **more)
    return Answered(sent, time.perf_counter() - sent, result.num_input_tokens)


async def _phase(server: str, send: Send | None, length: float, processes: dict[int, str]) -> Phase:
    """Stream while `send` is awaited again and again, for `length` seconds at least."""
    async with AsyncClient(server) as streaming, AsyncClient(server) as other:
        before, begun = seconds(processes), time.perf_counter()
        sent, answered, prompt_tokens = list[float](), list[float](), 0

        async def ask() -> None:
            nonlocal prompt_tokens
            while send is not None and (result := await send(other, begun, begun + length)) is not None:
                sent.append(result.sent - begun)
                answered.append(result.took)
                prompt_tokens = result.prompt_tokens

        asking = asyncio.create_task(ask())
        gaps = await _stream(streaming, lambda: asking.done() and time.perf_counter() >= begun + length)
        lasted = time.perf_counter() - begun
        spent = {name: value - before[name] for name, value in seconds(processes).items()}
        await asking
    return Phase(tuple(gaps), tuple(sent), tuple(answered), lasted, prompt_tokens, spent)


async def _stream(client: AsyncClient, is_over: Callable[[], bool]) -> list[float]:
    """Milliseconds between the tokens of answers one after the other; what comes in one message comes at once.

    Raises:
        SetupError: there were no two tokens.
    """
    gaps = list[float]()
    while not is_over():
        last = None
        async with aclosing(
            client.stream("A story of a tree:", max_tokens=STREAM_TOKENS, timeout=TIMEOUT, **_GREEDY)
        ) as answer:
            async for chunk in answer:
                now = time.perf_counter()
                if chunk.num_tokens:
                    gaps += [] if last is None else [1e3 * (now - last)]
                    gaps += [0.0] * (chunk.num_tokens - 1)
                    last = now
                if is_over():
                    break
    if not gaps:
        raise SetupError("no two tokens came in a phase: give it more seconds")
    return gaps


def named_processes(grpc_port: int) -> dict[int, str]:
    """Those of the server at a port: which one is the decoder's, `llm`, and the eyes', `sight`.

    Raises:
        SetupError: there is no such server, or its eyes are not a model of their own.
    """
    state = read_state(grpc_port)
    if state is None:
        raise SetupError(f"no server of this machine has gRPC port {grpc_port}")
    models = {"triton_python_b": "sight"}
    named = {pid: models.get(name, "server") for pid, name in below(state.supervisor_pid).items()}
    named[state.stub_pid] = "llm"
    if list(named.values()).count("sight") != 1:
        raise SetupError("what the served model sees with is not one process beside it; take a decoder that sees")
    return named


def picture(seed: int, side: int) -> bytes:
    """A JPEG of coarse noise, which is about as large as a photo of that size."""
    noise = np.random.default_rng(seed).integers(0, 256, (max(1, side // 8),) * 2 + (3,), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def cost_rows(named: str, rounds: Sequence[Mapping[str, Phase]]) -> list[Row]:
    """Figures of each round's gaps, medians over the rounds; what the other client waits for a token; processor time of
    the decoder's process for each token of the stream, and of the eyes' for a picture."""
    count = len(rounds)

    def middle(value: Callable[[Mapping[str, Phase]], float]) -> float:
        return float(np.median([value(each) for each in rounds]))

    def of_phases(figure: Callable[[Phase], float]) -> dict[str, float]:
        return {name: middle(lambda each, name=name: figure(each[name])) for name in ("images", "texts", "nothing")}

    figures = {
        what: (of_phases(lambda phase, figure=figure: figure(phase.gaps)), "ms") for what, figure in FIGURES.items()
    }
    figures["decoder_a_token"] = (
        of_phases(lambda phase: 1e3 * phase.spent["llm"] / len(phase.gaps)), "ms of processor",
    )  # fmt: skip
    others = {"images": "texts", "texts": "nothing"}
    rows = [
        new_row(
            "vision_language", f"{named}/beside_{name}/{what}", values[name], unit, runs=count, baseline=BESIDE[name],
            baseline_value=values[other],
        )
        for what, (values, unit) in figures.items()
        for name, other in others.items()
    ]  # fmt: skip
    waited = of_phases(lambda phase: 1e3 * float(np.median(phase.answered or (0.0,))))
    pictures = sum(len(each["images"].sent) for each in rounds)
    spent = middle(lambda each: 1e3 * each["images"].spent["sight"] / len(each["images"].sent))
    return [
        *rows,
        new_row(
            "vision_language", f"{named}/beside_images/first_token", waited["images"], "ms", runs=count,
            baseline=BESIDE["images"], baseline_value=waited["texts"],
        ),
        new_row("vision_language", f"{named}/beside_images/pictures", pictures, "pictures", runs=count),
        new_row("vision_language", f"{named}/beside_images/eyes_a_picture", spent, "ms of processor", runs=count),
    ]  # fmt: skip
