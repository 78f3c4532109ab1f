"""Sampling by Triton servers elsewhere, which are sent the weights that are being learnt.

A server computes as the engine in this process does, so that answers are those that would have been sampled here, bit
for bit where processors round alike. A process has servers of its own: no two send weights to the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from penjing.core.errors import InputError, PenjingError, RequestError, ServerError, UnavailableError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.remote.late import LATE_S, say, told_if_late
from penjing.serve.client.client import Client
from penjing.serve.client.protocol import OF_WEIGHTS
from penjing.train.align.prompts import Sampled
from penjing.train.align.sampler import learnt_weights
from penjing.train.processes.world import World

SECONDS = 600.0  # for one request
RETRIES = 8  # nearly half a minute: a server that has ended starts anew in seconds
_SERVED = "each serves the checkpoint that the run begins with, by --set take_weights=true"
_ROUNDS = 3  # of sending weights to a server that has lost them
_TOGETHER = 64  # answers that a server is asked for at once


def check_servers(servers: Sequence[str], config: DecoderConfig) -> None:
    """Ask all servers whether they would take the weights of such a model, before anything is done.

    Raises:
        ConfigError: one is not written as host:port.
        PenjingError: one does not answer, or takes no weights, or others.
    """
    for server in servers:
        late = told_if_late(f"data.servers: {server} has not answered for {LATE_S:g} s; it is waited for")
        with late, _named(server, _SERVED), Client(server, timeout=SECONDS, retries=1) as client:
            client.check_weights({name: tuple(shape) for name, shape in _shapes(config).items()})


@contextmanager
def _named(server: str, served: str = f"{_SERVED}; go on with --resume auto when it runs again") -> Iterator[None]:
    try:
        yield
    except PenjingError as error:
        where = "" if server in str(error) else f"{server}: "
        hint = f"; {served}" if isinstance(error, UnavailableError) else ""
        raise type(error)(f"data.servers: {where}{error}{hint}") from None


def _told(server: str, error: PenjingError) -> None:
    if isinstance(error, UnavailableError):
        say(f"data.servers: {server} does not answer, and is asked again for nearly half a minute")


def _shapes(config: DecoderConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in Decoder(config).named_parameters()}


class ServerSampler:
    """Samples from a model that is being trained, on servers.

    Args:
        model: see `Sampler`.
        config: its architecture, which is that of the served checkpoint.
        servers: host:port of the gRPC endpoints of all processes.
        world: who shares them.
        scale: of the adapters' products; None: there are none.

    Raises:
        ConfigError: one is not written as host:port.
    """

    def __init__(
        self, model: nn.Module, config: DecoderConfig, servers: Sequence[str], world: World, scale: float | None
    ) -> None:
        assert len(servers) >= world.size, "check_recipe refuses others"
        self.busy = threading.Lock()
        self._model, self._scale = model, scale
        self._weights = {name: torch.empty(shape) for name, shape in _shapes(config).items()}
        mine = servers[world.rank :: world.size]
        self._clients = [
            Client(server, timeout=SECONDS, retries=RETRIES, retrying=partial(_told, server)) for server in mine
        ]
        self._digests: dict[str, str] = {}  # by server

    @torch.no_grad()
    def refresh(self) -> None:
        """See `AnySampler`: the weights are copied, and sent to all servers at once.

        Raises:
            PenjingError: a server does not answer, or takes no such weights.
        """
        for name, tensor in learnt_weights(self._model, self._scale):
            if name in self._weights:  # no head for values
                self._weights[name].copy_(tensor)
        with ThreadPoolExecutor(len(self._clients)) as pool:
            list(pool.map(self._send, self._clients))  # raises what one of them raised

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], samples: int, max_tokens: int, temperature: float
    ) -> list[list[Sampled]]:
        """See `AnySampler`.

        Raises:
            PenjingError: a server does not answer.
        """

        found, clients, lost = dict[int, list[Sampled]](), self._clients, set[int]()

        def ask(place: int) -> list[Sampled]:
            client = clients[place % len(clients)]
            of_weights = self._digests[client.server]
            with _named(client.server):
                return _answers(
                    client, prompts[place], samples, of_weights,
                    seed=seeds[place], max_tokens=max_tokens, temperature=temperature,
                )  # fmt: skip

        with ThreadPoolExecutor(len(clients) * max(1, _TOGETHER // samples)) as pool:
            for _ in range(_ROUNDS):
                asked = {place: pool.submit(ask, place) for place in range(len(prompts)) if place not in found}
                lost.clear()
                for place, each in asked.items():
                    try:
                        found[place] = each.result()
                    except RequestError as error:
                        if OF_WEIGHTS not in str(error):
                            raise
                        lost.add(place % len(clients))
                if not lost:
                    return [found[place] for place in range(len(prompts))]
                for number in sorted(lost):
                    self._send(clients[number])
        raise ServerError(
            f"data.servers: {clients[min(lost)].server} lost the weights again and again; a run needs servers of its "
            "own: does another one send it weights?"
        )

    def _send(self, client: Client) -> None:
        """Give a server the weights of the last `refresh`."""
        weights = {name: tensor.numpy() for name, tensor in self._weights.items()}
        with _named(client.server):
            for left in reversed(range(_ROUNDS)):
                try:
                    self._digests[client.server] = client.send_weights(weights)
                    return
                except RequestError:  # it has started anew, and lost the pieces before
                    if not left:
                        raise


def _answers(client: Client, prompt: Sequence[int], samples: int, of_weights: str, **sampling: Any) -> list[Sampled]:
    found = [Sampled() for _ in range(samples)]
    with client.stream(list(prompt), n=samples, logprobs=0, of_weights=of_weights, whole=True, **sampling) as stream:
        for chunk in stream:
            if chunk.finish_reason == "error":
                raise InputError("no answer can be sampled: the logits are not finite; lower the learning rate")
            for scores in chunk.logprobs:
                token, score = next(iter(scores.items()))  # the one that was chosen comes first
                found[chunk.index].tokens.append(int(token))
                if sampling["temperature"]:
                    found[chunk.index].logprobs.append(score["logprob"])
            found[chunk.index].ended |= chunk.finish_reason == "stop"
    return found
