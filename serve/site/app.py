"""The front's application: its paths, and what their answers have in common."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penjing.serve.dialects.message_body import CountBody, MessageBody
from penjing.serve.dialects.messages import answer_message, count_tokens
from penjing.serve.dialects.response_body import ResponseBody
from penjing.serve.dialects.responses import answer_response
from penjing.serve.front.backend import Backend
from penjing.serve.front.bodies import ChatBody, CompletionBody
from penjing.serve.front.chat import answer_chat
from penjing.serve.front.completions import complete
from penjing.serve.front.embeddings import EmbeddingBody, answer_embeddings
from penjing.serve.front.figures import context, figures
from penjing.serve.front.texts import DetokenizeBody, TokenizeBody, detokenize, tokenize
from penjing.serve.gate.config import FrontJob, FrontModel
from penjing.serve.gate.errors import START_SECONDS, ApiError, failed
from penjing.serve.gate.guard import Exchange, Guard, Message
from penjing.serve.gate.log import log_exchange
from penjing.serve.gate.traces import Traces, are_wanted
from penjing.serve.gate.usage import Usage
from penjing.serve.site.openapi import EVENTS_TYPE, JSON_TYPE, TEXT_TYPE, Described, describe
from penjing.serve.site.page import show_page
from penjing.serve.site.report import stages

STREAMED = (JSON_TYPE, EVENTS_TYPE)
POSTS = {
    Described("/v1/completions", "Texts after prompts.", CompletionBody, STREAMED): complete,
    Described("/v1/chat/completions", "The next message of a chat.", ChatBody, STREAMED): answer_chat,
    Described("/v1/responses", "The next items of a conversation.", ResponseBody, STREAMED): answer_response,
    Described("/v1/messages", "The next message, in Anthropic's words.", MessageBody, STREAMED): answer_message,
    Described("/v1/messages/count_tokens", "The length of a message's prompt.", CountBody): count_tokens,
    Described("/v1/embeddings", "Vectors of texts and images.", EmbeddingBody): answer_embeddings,
    Described("/tokenize", "Token ids of a text.", TokenizeBody): tokenize,
    Described("/detokenize", "The text of token ids.", DetokenizeBody): detokenize,
}


class Front:
    """All of the front but the sockets. `application` is what uvicorn runs."""

    def __init__(self, job: FrontJob) -> None:
        self.job = job
        self.backend: Backend
        self._traces = Traces() if are_wanted() else None
        self._backend_made = False
        self._paths = {
            Described("/health/live", "Whether the front runs.", is_open=True): self._live,
            Described("/health/ready", "Whether every model answers.", is_open=True): self._ready,
            Described("/metrics", "Figures for Prometheus.", types=(TEXT_TYPE,)): self._figures,
            Described("/openapi.json", "This document."): self._openapi,
            Described("/v1/models", "What is served."): self._models,
            Described("/v1/models/{name:path}", "One of these."): self._model,
            Described("/reports/{name:path}", "What compression did to one of these."): self._report,
        } | {path: self._with_backend(endpoint) for path, endpoint in POSTS.items()}
        routes = [
            Route(path.path, endpoint, methods=["GET" if path.body is None else "POST"])
            for path, endpoint in self._paths.items()
        ]
        self.usage = Usage(frozenset(route.path for route in routes) | {"/"})
        routes.append(Route("/", show_page, methods=["GET"]))
        app = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={  # type: ignore[dict-item]
                ApiError: _tell,
                HTTPException: self._tell_http,
                Exception: _tell_failure,
            },
        )
        app.router.redirect_slashes = False
        self.guard = Guard(app, job.front, self._ended, self._sees, traced=self._traces is not None)
        self.guard.draining = job.draining

    async def application(self, scope: Message, receive: Any, send: Any) -> None:
        """The ASGI application."""
        if scope["type"] == "http":
            await self.guard(scope, receive, send)
        else:
            await self.guard.app(scope, receive, send)

    def _with_backend(
        self, endpoint: Callable[[Backend, Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def called(request: Request) -> Response:
            return await endpoint(self.backend, request)

        return called

    @property
    def ready(self) -> bool:
        """Whether every model has just answered, and none is about to go."""
        return self._backend_made and self.backend.ready and not self.guard.draining

    def show(self, models: tuple[FrontModel, ...]) -> None:
        """From now on these are the models."""
        self.job = self.job.model_copy(update={"models": models})
        if self._backend_made:
            self.backend.update(models)

    def drain(self) -> None:
        """Refuse requests from now on."""
        self.guard.draining = True

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.backend, self._backend_made = Backend(self.job, self.usage), True
        watch = asyncio.create_task(self.backend.watch())
        try:
            yield
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            await self.backend.close()
            if self._traces is not None:
                await asyncio.to_thread(self._traces.close)

    def _sees(self) -> bool:
        return any(model.sees for model in self.job.models)

    def _ended(self, scope: Message, exchange: Exchange) -> None:
        self.usage.ended(exchange)
        if self._traces is not None:
            self._traces.ended(scope, exchange)
        log_exchange(scope, exchange)

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def _figures(self, request: Request) -> Response:
        page = await figures(self.backend) + self.usage.page(self.guard.num_running)
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(describe(self._paths, keys=self.job.front.keys is not None))

    async def _ready(self, request: Request) -> Response:
        if self.guard.draining:
            return _not_ready("draining")
        return JSONResponse({"status": "ready"}) if self.backend.ready else _not_ready("not ready")

    async def _models(self, request: Request) -> Response:
        described = await asyncio.gather(*map(self._described, self.backend.listed))
        return JSONResponse({"object": "list", "data": described})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not name.strip("/"):
            raise self._not_there(request.url.path)
        found = self.backend.model(name, request.scope["state"]["exchange"])
        return JSONResponse(await self._described(name if name in self.backend.listed else found.id))

    async def _report(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = self.backend.model(name, request.scope["state"]["exchange"])
        return JSONResponse(await asyncio.to_thread(stages, found.folder, name[:80]))

    async def _described(self, name: str) -> dict[str, Any]:
        longest = await context(self.backend, name)
        facts = {} if longest is None else {"max_model_len": longest}
        return {"id": name, "object": "model", "created": self.backend.started, "owned_by": "penjing"} | facts

    async def _tell_http(self, request: Request, error: HTTPException) -> Response:
        """Starlette's own errors: a path that is not there, a method that a path does not take."""
        if error.status_code != 405:
            return await _tell(request, self._not_there(request.url.path))
        allowed = (error.headers or {}).get("Allow", "")
        said = f"{request.url.path[:80]} takes {allowed}."
        return await _tell(request, ApiError(405, said, code="method_not_allowed", headers={"allow": allowed}))

    def _not_there(self, path: str) -> ApiError:
        """Names the path that was meant, where one differs by slashes, by /v1, or by a letter or two."""
        plain = "/" + "/".join(part for part in path[:80].split("/") if part)
        known = [each.path for each in self._paths if "{" not in each.path]
        alike = [each for each in (plain, f"/v1{plain}", plain.removeprefix("/v1")) if each in known]
        alike += difflib.get_close_matches(plain, known, 1, 0.85)
        hint = f"did you mean {alike[0]}?" if alike else "/openapi.json lists the paths."
        return ApiError(404, f"There is no {path[:80]} here; {hint}", code="not_found")


def _not_ready(status: str) -> Response:
    return JSONResponse({"status": status}, 503, {"retry-after": str(START_SECONDS)})


async def _tell(request: Request, error: ApiError) -> Response:
    exchange: Exchange = request.scope["state"]["exchange"]
    exchange.reason = error.code or ""
    return Response(error.told(exchange.path, exchange.request_id), error.status, error.headers, "application/json")


async def _tell_failure(request: Request, error: Exception) -> Response:
    """Of a defect, which is raised on to whoever logs it: without this the answer would be none of ours."""
    return await _tell(request, failed())
