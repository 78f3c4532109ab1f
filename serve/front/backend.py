"""What stands behind the front: the models, which may change while it runs, and who of several versions answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence

from penjing.core.errors import PenjingError
from penjing.serve.client.protocol import DECODER, ENCODER, TOWERS
from penjing.serve.front.upstream import Upstream
from penjing.serve.front.versions import by_name, chosen, sharer
from penjing.serve.gate.config import FrontJob, FrontModel
from penjing.serve.gate.errors import ApiError, translated
from penjing.serve.gate.guard import Exchange
from penjing.serve.gate.usage import Usage

_LACKS = {DECODER: "writes no text", ENCODER: "makes no embeddings"}
_PATHS = {
    DECODER: "at /v1/chat/completions and /v1/completions",
    ENCODER: "at /v1/embeddings",
    TOWERS: "at /v1/embeddings",
}
_ALIKE = {ENCODER: (ENCODER, TOWERS)}

log = logging.getLogger("penjing.front")


class Backend:
    """The models, each on a Triton server; what they answer is timed in `usage`. Made inside the event loop that uses
    it."""

    def __init__(self, job: FrontJob, usage: Usage | None = None) -> None:
        self.usage = usage or Usage()
        self.started = int(time.time())
        self.timeout, self.max_prompts = job.front.limits.answer_timeout, job.front.limits.max_prompts
        self._upstreams: dict[str, Upstream] = {}
        self._group: asyncio.TaskGroup | None = None
        self._hidden: dict[str, str] = {}
        self.update(job.models)

    def update(self, models: Sequence[FrontModel]) -> None:
        """From now on these are the models. Answers of one that is left out go on to their end."""
        self.models = tuple(models)
        self._versions = by_name(models)
        keys = {model.key for model in models}
        for key in self._upstreams.keys() - keys:
            self._upstreams.pop(key).leave()
        for model in models:
            if model.key not in self._upstreams:
                self._upstreams[model.key] = upstream = Upstream(model)
                if self._group is not None:
                    self._group.create_task(upstream.watch())
            self._upstreams[model.key].model = model
            self._hidden |= {str(model.folder): model.id, f"{model.grpc}: ": "", model.grpc: "server"}

    @property
    def listed(self) -> list[str]:
        """What clients may ask for, without further names."""
        models = [each for model in self.models for each in (model, *model.adapted())]
        names = [name for model in models for name in (model.group, model.id) if name is not None]
        return list(dict.fromkeys(names))

    def model(self, name: str, exchange: Exchange, user: str | None = None) -> FrontModel:
        """The model that a client calls `name`. Of several versions, the one that this client's requests go to (see
        `sharer`); another one while that does not answer.

        Args:
            user: of the request's body.

        Raises:
            ApiError: there is none.
        """
        versions = self._versions.get(name)
        if versions is None:
            known = ", ".join(self.listed)
            raise ApiError(
                404, f"There is no model {name[:80]!r}; there is {known}.", code="model_not_found", param="model"
            )
        exchange.asked = name
        found = chosen(name, versions, sharer(exchange, user))
        return next((version for version in (found, *versions) if self.upstream(version).can_answer), found)

    def versions(self, name: str) -> tuple[FrontModel, ...]:
        """The models that may answer a client who asks for `name`, which is there."""
        return self._versions[name]

    def another(self, exchange: Exchange, tried: Collection[str]) -> FrontModel | None:
        """Another version that answers, where the client asked for none in particular.

        Args:
            tried: `key` of those that did not answer.
        """
        versions = self._versions.get(exchange.asked, ())
        left = [version for version in versions if version.key not in tried and self.upstream(version).can_answer]
        return max(left, key=lambda version: version.share, default=None)

    def upstream(self, model: FrontModel) -> Upstream:
        """Where `model` is asked; a model that has just been left out is there no more.

        Raises:
            ApiError: it is not there.
        """
        found = self._upstreams.get(model.key)
        if found is None:
            raise ApiError(503, "The model has just been taken away; ask again.", code="not_ready", retry_after=1)
        return found

    def decoder(self, name: str | None, exchange: Exchange, user: str | None = None) -> FrontModel:
        """The language model that a client calls `name`; None is the first one. See `model`.

        Raises:
            ApiError: there is none, or the model is of another kind; says where that one is asked.
        """
        if name is None:
            first = next((model for model in self.models if model.kind == DECODER), self.models[0])
            name = first.group or first.id
        return self._of_kind(name, DECODER, exchange, user)

    def encoder(self, name: str, exchange: Exchange, user: str | None = None) -> FrontModel:
        """The text encoder, or the two towers, that a client calls `name`; see `decoder`."""
        return self._of_kind(name, ENCODER, exchange, user)

    def _of_kind(self, name: str, kind: str, exchange: Exchange, user: str | None) -> FrontModel:
        found = self.model(name, exchange, user)
        if found.kind not in _ALIKE.get(kind, (kind,)):
            where = _PATHS.get(found.kind, "by gRPC alone")
            raise ApiError(400, f"{found.id} {_LACKS[kind]}; ask it {where}.", code="wrong_model", param="model")
        return found

    @property
    def ready(self) -> bool:
        """Whether every model has answered lately."""
        return all(self.upstream(model).is_ready for model in self.models)

    def error(self, error: PenjingError, upstream: Upstream) -> ApiError:
        """What a client is told of a failure of the model's."""
        found = translated(error, self._hidden)
        if found.status == 503:
            upstream.is_down = True
        if found.status == 500:
            log.error("%s: %s", type(error).__name__, error)
        return found

    async def watch(self) -> None:
        """Ask each model that nobody else has asked lately, for ever; one that does not answer holds no other up."""
        async with asyncio.TaskGroup() as self._group:
            for upstream in self._upstreams.values():
                self._group.create_task(upstream.watch())
            await asyncio.Event().wait()

    async def close(self) -> None:
        """End the connections; running answers are cancelled."""
        for upstream in self._upstreams.values():
            await upstream.client.close()
