"""The engine as a model of Triton server's Python backend; `model_repository/llm/1/model.py` calls this."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penjing.core.config import parse_config
from penjing.core.errors import OverloadedError, PenjingError, RequestError, ServerError, UnavailableError
from penjing.serve.client.errors import code_of
from penjing.serve.client.protocol import ADAPTERS_VARIABLE, OF_WEIGHTS, PING, PULSE_VARIABLE, SIGHT, WEIGHTS
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.loop import EngineLoop
from penjing.serve.engine.request import Request, RequestOutput
from penjing.serve.runner.load import load_engine
from penjing.serve.runner.runner import Runner
from penjing.serve.runner.weights import ServedWeights
from penjing.serve.sampling.params import SamplingParams
from penjing.serve.sight.wire import with_places
from penjing.serve.triton.adapter_watch import AdapterWatch, reachable_folders
from penjing.serve.triton.eyes import RemoteEyes
from penjing.serve.triton.intake import WAITING_THREADS, Intake
from penjing.serve.triton.journal import client_id, log_request, log_to_server
from penjing.serve.triton.metrics import EngineMetrics, Refusals, registered
from penjing.serve.triton.pulse import Command, Phase, Pulse
from penjing.serve.triton.reply import Outbox, Reply, send_error
from penjing.serve.triton.settings import parameter, read_settings
from penjing.serve.triton.strings import bound_strings
from penjing.serve.triton.tensors import MAX_TEXT_BYTES, most_bytes, read_call

BEAT_SECONDS = 0.05
POLL_SECONDS = 0.01  # between two looks for clients that left; a step of a real model takes longer
METRICS_SECONDS = 0.25
ADAPTERS_SECONDS = 0.25
WORK_SHARE = 0.1  # of a thread's time: a look costs 30 to 100 µs a request, an observation 20 µs
MAX_PAUSE_SECONDS = 0.5
CANARY_SECONDS = 120.0
MAX_LIVE = 100_000  # requests that are unanswered; what waits in the engine is bounded far below

log = logging.getLogger(__name__)


class LLMAdapter:
    """Serves one model: `execute` queues requests and returns, threads do the rest: the engine, the sender of answers,
    the watch for clients that left, the metrics, and the pulse, which never waits for the server.

    The model's folder and the engine's settings (JSON) come from the parameters `model` and `engine` of the model's
    configuration, else from the environment variables PENJING_MODEL and PENJING_ENGINE.

    Raises:
        PenjingError: the model cannot be loaded, or does not generate.
    """

    def __init__(self, args: dict[str, str], pb_utils: Any) -> None:
        log_to_server()
        self._pb_utils = pb_utils
        self._parent = os.getppid()
        self._phase = Phase.LOADING
        self._refusing = False
        self._loop: EngineLoop | None = None
        self._metrics: EngineMetrics | None = None
        self._refusals = Refusals()
        self._live: dict[str, Reply] = {}
        self._num_requests = 0
        self._intake = Intake()
        self._eyes: RemoteEyes | None = None
        self._adapters: AdapterWatch | None = None
        self._weights: ServedWeights | None = None
        self._stopping = threading.Event()
        pulse = os.environ.get(PULSE_VARIABLE)
        self._pulse = Pulse(Path(pulse)) if pulse else None
        self._threads = [
            threading.Thread(target=self._repeat, args=(work, pause), name=f"penjing-{name}", daemon=True)
            for name, work, pause in (
                ("pulse", self._beat, BEAT_SECONDS),
                ("watch", self._drop_ended, POLL_SECONDS),
                ("metrics", self._show_metrics, METRICS_SECONDS),
                ("adapters", self._watch_adapters, ADAPTERS_SECONDS),
            )
        ]
        for thread in self._threads:
            thread.start()
        try:
            self._load(args)
        except BaseException:
            self._phase = Phase.FAILED
            self._stop_threads()
            self._beat()  # a last word to the supervisor: Triton server can take long to give up
            raise

    def _load(self, args: dict[str, str]) -> None:
        folder, values = read_settings(args)
        config = parse_config(EngineConfig, values, "engine settings")
        listed = os.environ.get(ADAPTERS_VARIABLE)
        wanted = Path(listed) if listed else None
        has_list = wanted is not None and wanted.exists()  # a restart: the list counts, and not what was asked at first
        given = {} if has_list else reachable_folders(config.adapters)
        engine = load_engine(folder, config.model_copy(update={"adapters": given}))
        images = engine.preparer.images
        if images.token is not None and (name := parameter(args, SIGHT)) is not None:
            self._eyes = RemoteEyes(self._pb_utils, name, config.image_batch)
            images.elsewhere(self._eyes)
            self._intake.widen(WAITING_THREADS)
        most = most_bytes(engine.preparer.max_prompt_bytes)
        bound_strings(self._pb_utils, max(most, 2 * config.max_image_bytes if images.token else 0))
        self._chat_template = engine.chat_template
        loop = EngineLoop(engine)
        if isinstance(engine.runner, Runner) and engine.runner.parameters is not None:
            self._weights = ServedWeights(engine.runner.parameters, loop)
        loop.start()
        _generate_one_token(loop)
        loop.take_samples()
        if wanted is not None:
            begun = config.model_copy(update={"adapters": {} if has_list else config.adapters})
            self._adapters = AdapterWatch(wanted, folder, begun, loop)
            self._adapters.look()
        self._outbox = Outbox(self._pb_utils, self._ended, engine.config.stream_interval)
        assert engine.config.max_model_len is not None, "resolved"
        values = args["model_name"], loop.stats(), engine.config.max_model_len
        make_metrics = partial(EngineMetrics, self._pb_utils, *values)
        self._metrics = registered(self._pb_utils, make_metrics)
        self._loop = loop
        self._phase = Phase.SERVING
        log.info("serving %s with %s", folder, engine.config)

    def execute(self, requests: list[Any]) -> None:
        """Queue each request; whatever is wrong with one becomes its error response."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except Exception as error:
                log_request({"request": client_id(request), "refused": code_of(error).name})
                self._refuse(sender, error)

    def _refuse(self, sender: Any, error: Exception) -> None:
        if not isinstance(error, PenjingError):  # a defect of ours, in one request
            log.error("a request could not be read", exc_info=error)
            error = ServerError(f"{type(error).__name__}: {error}")
        elif isinstance(error, ServerError):  # it drains or has failed: another server, or this one later, can answer
            error = UnavailableError(str(error))
        self._refusals.count(error)
        send_error(self._pb_utils, sender, error)

    def finalize(self) -> None:
        """Called when the model is unloaded; Triton server has then waited for the running answers."""
        self._intake.stop()
        if self._loop is not None:
            self._loop.stop()
            self._outbox.stop()
            self._phase = Phase.DRAINED
        self._stop_threads()
        self._beat()

    def _accept(self, request: Any, sender: Any) -> None:
        # Tensors live in memory that the server takes back when `execute` returns: everything is read here.
        assert self._loop is not None, "execute is called after __init__"
        parameters = request.parameters()
        if len(parameters) > MAX_TEXT_BYTES:
            raise RequestError(f"the parameters have {len(parameters)} bytes, at most {MAX_TEXT_BYTES} are read")
        facts = json.loads(parameters) if parameters else {}
        if facts.get(PING) is True:
            return self._answer_ping(sender)
        inputs = {tensor.name(): np.asarray(tensor.as_numpy()) for tensor in request.inputs()}
        if WEIGHTS in facts:
            return self._send_text(sender, self._weights_of(facts).answer(facts[WEIGHTS], inputs.get(WEIGHTS)))
        if OF_WEIGHTS in facts:
            self._weights_of(facts).check(facts[OF_WEIGHTS])
        call = read_call(inputs, parameters, self._loop.engine.preparer.max_prompt_bytes)
        if call.messages is not None and self._chat_template is None:
            raise RequestError(
                "this model has no chat template, which messages need; send it a prompt (text_input, by HTTP "
                "/v1/completions), or serve a model that chats"
            )
        if len(self._live) >= MAX_LIVE:
            raise OverloadedError(f"{len(self._live)} requests are unanswered, at most {MAX_LIVE} may be; retry in 1 s")
        self._num_requests += 1
        reply = Reply(str(self._num_requests), call, sender, request.timeout(), client_id(request))
        self._live[reply.request_id] = reply
        try:
            self._intake.run(call.num_bytes, lambda: self._submit(reply), quick=call.is_quick)
        except OverloadedError as error:
            self._end_unsubmitted(reply, error)

    def _submit(self, reply: Reply) -> None:
        """Hand a request to the engine, on any thread; what is wrong with it becomes its answer."""
        call, loop = reply.call, self._loop
        assert loop is not None, "there is one as long as requests come"
        try:
            if call.messages is not None:
                assert self._chat_template is not None, "looked at in _accept"
                messages = with_places(call.messages, loop.engine.preparer.images.token, self._chat_template.form)
                prompt = reply.prompt = self._chat_template.render(messages, **call.template)
            else:
                prompt = call.prompt or ""
                reply.prompt = prompt if isinstance(prompt, str) else loop.engine.tokenizer.decode(prompt)
            loop.submit(
                Request(
                    reply.request_id,
                    prompt,
                    call.params,
                    add_special=call.messages is None,
                    key=call.key,
                    priority=call.priority,
                    images=call.images,
                ),
                lambda outputs: self._outbox.put(reply, outputs),
            )
        except Exception as error:
            self._end_unsubmitted(reply, error)
            return
        if reply.client_left or reply.ended_by is not None:  # while the prompt was read, when the engine knew nothing
            loop.cancel(reply.request_id)

    def _end_unsubmitted(self, reply: Reply, error: Exception) -> None:
        reply.close()
        sender, reply.sender = reply.sender, None
        del self._live[reply.request_id]
        log_request(reply.journal.facts(reply.client_id, code_of(reply.ended_by or error).name))
        if reply.client_left:
            send_error(self._pb_utils, sender, None)
        elif reply.ended_by is not None:  # counted when that was found
            send_error(self._pb_utils, sender, reply.ended_by)
        else:
            self._refuse(sender, error)

    def _answer_ping(self, sender: Any) -> None:
        assert self._loop is not None
        reason = self._loop.failure or self._loop.paused
        if self._refusing or reason:
            raise UnavailableError(f"the engine takes no requests: {reason or 'it is shutting down'}")
        self._send_text(sender, "")

    def _weights_of(self, facts: dict[str, Any]) -> ServedWeights:
        if self._weights is None:
            (name,) = facts.keys() & {WEIGHTS, OF_WEIGHTS}
            raise RequestError(f"{name}: this server takes no weights; start it with --set take_weights=true")
        return self._weights

    def _send_text(self, sender: Any, text: str) -> None:
        tensor = self._pb_utils.Tensor("text_output", np.array([text.encode()], dtype=np.object_))
        response = self._pb_utils.InferenceResponse(output_tensors=[tensor])
        sender.send(response, flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _ended(self, reply: Reply) -> None:
        del self._live[reply.request_id]
        log_request(reply.journal.facts(reply.client_id))

    def _stop_threads(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(2)

    def _repeat(self, work: Callable[[], None], pause: float) -> None:
        """Do `work` again and again, with a pause of at least `pause` seconds and nine times what it took."""
        while not self._stopping.is_set():
            started = time.monotonic()
            try:
                work()
            except Exception:  # one failed look or observation must not be the last
                log.exception("%s failed", work.__name__)
            self._stopping.wait(max(pause, min((time.monotonic() - started) / WORK_SHARE, MAX_PAUSE_SECONDS)))

    def _beat(self) -> None:
        """Tell the supervisor that this process lives, and do as it says."""
        if os.getppid() != self._parent:
            os._exit(1)  # Triton server is gone; the stub alone would notice only after minutes
        loop, pulse = self._loop, self._pulse
        if loop is not None and loop.failure:
            self._phase = Phase.FAILED
        if pulse is None:
            return
        command = pulse.command
        if loop is not None and command is not Command.SERVE and self._phase is not Phase.FAILED:
            self._refusing = True
            if command is Command.ABORT:
                loop.stop(timeout=0)
            else:
                loop.drain(timeout=0)
            if not self._live:
                self._phase = Phase.DRAINED
        beat = time.monotonic() if loop is None else loop.heartbeat
        unseen = 0 if self._eyes is None else self._intake.num_slow
        pulse.beat(loop_beat=beat, phase=self._phase, unanswered=len(self._live), unseen=unseen)

    def _show_metrics(self) -> None:
        # From a drain on nothing is asked of the server: while it unloads the model, a call would never return.
        if self._metrics is not None and self._loop is not None and not self._refusing:
            self._metrics.update(self._loop.stats(), self._loop.take_samples(), self._refusals.snapshot())

    def _watch_adapters(self) -> None:
        if self._adapters is not None and self._phase is Phase.SERVING and not self._refusing:
            self._adapters.look()

    def _drop_ended(self) -> None:
        """Cancel the requests whose client has left or whose time is up."""
        loop = self._loop
        if loop is None:
            return
        for reply in list(self._live.values()):
            if reply.client_left or reply.ended_by is not None:
                continue
            if reply.is_cancelled():
                reply.client_left = True
                loop.cancel(reply.request_id)
            elif reply.deadline is not None and time.monotonic() > reply.deadline:
                reply.ended_by = OverloadedError("the request's timeout passed before the answer was complete")
                self._refusals.count(None)
                loop.cancel(reply.request_id)


def _generate_one_token(loop: EngineLoop) -> None:
    """Prove that the engine generates, before Triton server calls the model ready."""
    outputs: list[RequestOutput] = []
    done = threading.Event()

    def take(group: list[RequestOutput]) -> None:
        outputs.extend(group)
        if any(output.finish_reason for output in group):
            done.set()

    loop.submit(Request("canary", [0], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)), take)
    if not done.wait(CANARY_SECONDS):
        raise ServerError(f"the model gave no token within {CANARY_SECONDS:.0f} s of being loaded")
    if outputs[-1].finish_reason == "error":
        raise ServerError(f"the model does not generate: {outputs[-1].error}")
