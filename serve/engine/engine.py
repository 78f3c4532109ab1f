"""The engine: schedule, run, sample, append; one thread calls it."""

from __future__ import annotations

import logging
import math
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penjing.core.errors import OverloadedError, RequestError
from penjing.serve.engine.answer import Answer
from penjing.serve.engine.blocks import BlockManager
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.invariants import Snapshot, check_invariants
from penjing.serve.engine.request import FinishReason, Request, RequestOutput
from penjing.serve.engine.sampler import Scores
from penjing.serve.engine.scheduler import Scheduler, largest_window
from penjing.serve.engine.sequence import Batch, Sequence
from penjing.serve.engine.stats import EngineStats, Samples

if TYPE_CHECKING:
    from penjing.core.checkpoint.load import LoadedModel

MAX_RETRY_SECONDS = 60
NOT_FINITE = "the model's logits are not finite numbers for this input (an overflow or damaged weights)"

log = logging.getLogger(__name__)


class ModelRunner(Protocol):
    """A model with its KV cache: all that the engine knows of tensors."""

    kv_pool: Any
    kv_scale: Any

    def run(self, batch: Batch, top: int = 0) -> tuple[Scores, list[Sequence]]:
        """Compute the tokens of `batch` into the KV cache; see `penjing.serve.runner.runner.Runner.run`."""
        ...


@dataclass(frozen=True)
class PreparedRequest:
    """A request that is valid for this engine, tokenized."""

    request: Request
    prompt_ids: list[int]


class LLMEngine:
    """Continuous batching over a paged KV cache.

    Deterministic: what a request gets depends on its prompt, parameters and seed alone, bit by bit, not on what else
    runs, on cache hits, chunking or preemption.

    Everything but `prepare`, `check_admission` and `stats` belongs to one thread (`EngineLoop` provides it). A request
    that fails ends with an output whose `finish_reason` is "error"; the others go on.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, runner: ModelRunner) -> None:
        """`penjing.serve.runner.load` builds one around a model or a folder.

        Args:
            loaded: of it the architecture and the tokenizer are kept, not the model.
            config: resolved: nothing in it is "auto" or None.
            runner: holds the model, and a KV cache of `config.num_blocks` blocks.
        """
        self.config, self.runner = config, runner
        assert self.config.num_blocks is not None
        assert self.config.max_model_len is not None
        self.model_config, self.scheme = loaded.config, loaded.scheme
        types = [loaded.config.layer_type(layer) for layer in range(loaded.config.num_hidden_layers)]
        if hashed := [str(layer) for layer, kind in enumerate(types) if kind == "lsh_attention"]:
            log.warning(
                "layers %s were trained with LSH attention; they are served with full attention, which sees all that "
                "LSH attention would find and more",
                ", ".join(hashed),
            )
        self.tokenizer, self.chat_template = loaded.tokenizer, loaded.chat_template
        self.max_model_len: int = self.config.max_model_len
        self.samples = Samples()
        self.scheduler = self._new_scheduler()
        # No token is longer; Unicode normalization may shrink a text, hardly to a quarter.
        self._max_prompt_chars = 4 * self.max_model_len * loaded.tokenizer.longest_token
        self._answers: dict[Sequence, Answer] = {}
        self._active: dict[str, list[Sequence]] = {}  # unfinished sequences of each request
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_steps = 0
        self._finished: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._tokens_per_second = 0.0  # a running mean, for the back-off hint

    def prepare(self, request: Request) -> PreparedRequest:
        """Tokenize and validate; changes nothing, any thread may call it.

        Raises:
            RequestError: an empty, too long or wrongly typed prompt, or parameters that do not fit the model.
        """
        prompt_ids = self._tokenize(request.prompt, request.add_special)
        if len(prompt_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens; with a context of {self.max_model_len} at most "
                f"{self.max_model_len - 1} leave room for an answer: shorten it"
            )
        params, last_id = request.params, self.model_config.vocab_size - 1
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
            if any(token_id > last_id for token_id in ids):
                raise RequestError(f"sampling parameter {name} has token id {max(ids)}; ids go from 0 to {last_id}")
        room = self.max_model_len - len(prompt_ids)
        if params.min_tokens > room:
            raise RequestError(
                f"sampling parameter min_tokens must be at most {room}, which the context of {self.max_model_len} "
                f"leaves after a prompt of {len(prompt_ids)} tokens, got {params.min_tokens}"
            )
        return PreparedRequest(request, prompt_ids)

    def check_admission(self, prepared: PreparedRequest, pending_requests: int = 0, pending_tokens: int = 0) -> None:
        """Raise OverloadedError if too much waits; `pending_…` is what waits outside the engine. A request counts once
        for each of its `n` sequences."""
        waiting = self.scheduler.num_waiting + pending_requests
        tokens = self.scheduler.num_waiting_tokens + pending_tokens
        if waiting == 0:
            return
        limits = self.config
        if waiting + prepared.request.params.n > limits.max_waiting_requests:
            reason = f"{waiting} sequences wait and max_waiting_requests={limits.max_waiting_requests}"
        elif tokens + len(prepared.prompt_ids) > limits.max_waiting_tokens:
            reason = f"{tokens} tokens wait and max_waiting_tokens={limits.max_waiting_tokens}"
        else:
            return
        seconds = tokens / self._tokens_per_second if self._tokens_per_second else 1.0
        raise OverloadedError(
            f"the engine is overloaded: {reason}; retry in {min(max(1, math.ceil(seconds)), MAX_RETRY_SECONDS)} s"
        )

    def add(self, request: Request) -> None:
        """Validate and queue `request`.

        Raises:
            RequestError: it is invalid, or its id is in use.
            OverloadedError: too many requests or tokens wait.
        """
        if request.request_id in self._active:
            raise RequestError(f"request_id {request.request_id!r} is in use; choose another")
        prepared = self.prepare(request)
        self.check_admission(prepared)
        self.add_prepared(prepared)

    def add_prepared(self, prepared: PreparedRequest) -> None:
        """Queue a request that `prepare` and `check_admission` have passed."""
        request, params = prepared.request, prepared.request.params
        assert request.request_id not in self._active, "the caller checks that ids are new"
        first = Sequence(request.request_id, prepared.prompt_ids)
        first.forks = [
            Sequence(request.request_id, prepared.prompt_ids, index, fork_of=first) for index in range(1, params.n)
        ]
        sequences = [first, *first.forks]
        seed = secrets.randbits(63) if params.seed is None else params.seed
        for sequence in sequences:
            self._answers[sequence] = Answer(
                sequence, params, seed, self.tokenizer, self.max_model_len, request.arrival_time
            )
        self._active[request.request_id] = sequences
        self._num_prompt_tokens += len(prepared.prompt_ids)
        self.scheduler.add(first)

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request now; its blocks are free. The last outputs of its unfinished sequences; none if it is
        unknown."""
        return self._end_all(list(self._active.get(request_id, ())), "abort", None)

    def abort_all(self, reason: FinishReason, error: str | None = None) -> list[RequestOutput]:
        """End every request. After an error the scheduler starts afresh: its state is not to be trusted."""
        if reason == "error":
            broken, self.scheduler = self.scheduler, self._new_scheduler()
            self.scheduler.num_preemptions = broken.num_preemptions
            self.scheduler.prefix_queries, self.scheduler.prefix_hits = broken.prefix_queries, broken.prefix_hits
            for sequence in self._answers:  # what they hold belongs to the old one
                sequence.block_table, sequence.forks = [], []
        return self._end_all([s for sequences in self._active.values() for s in sequences], reason, error)

    def is_active(self, request_id: str) -> bool:
        """Whether the request still has a sequence that waits or runs."""
        return request_id in self._active

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> list[RequestOutput]:
        """Compute one batch; what it adds to each of its answers."""
        started = time.monotonic()
        batch = self.scheduler.schedule()
        if not batch.chunks:
            assert not self.scheduler.has_work(), "work, but nothing can be scheduled"
            return []
        try:
            outputs = self._compute(batch)
        except Exception as error:
            log.exception("a batch of %d sequences failed; each is tried alone", len(batch.chunks))
            outputs = self._compute_separately(batch, error)
        self._num_steps += 1
        self.samples.iteration_tokens_total.append(batch.num_tokens)
        rate = batch.num_tokens / max(time.monotonic() - started, 1e-6)
        self._tokens_per_second += 0.1 * (rate - self._tokens_per_second)
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot; any thread may ask."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        used = blocks.num_usable - blocks.num_free
        return EngineStats(
            num_requests_running=len(scheduler.running),
            num_requests_waiting=scheduler.num_waiting,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            kv_cache_usage_perc=used / blocks.num_usable,
            num_blocks=blocks.num_usable,
            num_blocks_used=used,
            prefix_cache_queries=scheduler.prefix_queries,
            prefix_cache_hits=scheduler.prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=self._num_prompt_tokens,
            generation_tokens=self._num_generated_tokens,
            num_steps=self._num_steps,
            request_success={str(reason): count for reason, count in self._finished.items()},
        )

    def broken_invariants(self) -> list[str]:
        """What is wrong with the scheduler's state, in words; empty when all is well. Costs milliseconds."""
        return check_invariants(Snapshot.of(self.scheduler))

    def _new_scheduler(self) -> Scheduler:
        config = self.config
        assert config.num_blocks is not None
        return Scheduler(
            BlockManager(config.num_blocks, config.block_size, config.enable_prefix_caching),
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_sequences=config.max_num_sequences,
            watermark=config.watermark,
            window=largest_window(self.model_config),
        )

    def _tokenize(self, prompt: object, add_special: bool) -> list[int]:
        if isinstance(prompt, str):
            if len(prompt) > self._max_prompt_chars:  # tokenizing it would take seconds, in vain
                raise RequestError(
                    f"the prompt has {len(prompt)} characters, more than the context of {self.max_model_len} tokens "
                    "can hold: shorten it"
                )
            try:
                prompt.encode("utf-8")
            except UnicodeEncodeError as error:
                raise RequestError(f"the prompt is not valid Unicode text: {error}") from None
            prompt_ids = self.tokenizer.encode(prompt, add_special=add_special)
        elif isinstance(prompt, list | tuple):
            vocab_size = self.model_config.vocab_size
            for token_id in prompt:
                if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
                    raise RequestError(
                        f"the prompt has token id {token_id!r}; ids are integers from 0 to {vocab_size - 1}"
                    )
            prompt_ids = list(prompt)
        else:
            raise RequestError(f"the prompt must be text or a list of token ids, got {type(prompt).__name__}")
        if not prompt_ids:
            raise RequestError("the prompt is empty; give at least one token")
        return prompt_ids

    def _compute(self, batch: Batch) -> list[RequestOutput]:
        top = self._num_largest(batch)
        scores, ready = self.runner.run(batch, top)
        answers = [self._answers[sequence] for sequence in ready]
        rows = zip(answers, scores.values_RK, scores.ids_RK, strict=True)
        if scores.logits_RV is None and top > 1 and not all(answer.is_settled(*row) for answer, *row in rows):
            scores, ready = self.runner.run(batch, 0)  # the same keys and values again, and all logits
        finite_R = scores.finite_rows()
        outputs: list[RequestOutput] = []
        if not all(finite_R):
            failed = {sequence for sequence, finite in zip(ready, finite_R, strict=True) if not finite}
            # They end before their blocks are published: nobody else shall find these keys and values.
            outputs += self._end_all(list(failed), "error", NOT_FINITE)
            chunks = [chunk for chunk in batch.chunks if chunk.sequence not in failed]
            batch = Batch(chunks, sum(chunk.num_tokens for chunk in chunks))
        self.scheduler.advance(batch)
        now = time.monotonic()
        for row, sequence in enumerate(ready):
            if finite_R[row]:
                logits_V = None if scores.logits_RV is None else scores.logits_RV[row]
                outputs.append(self._take_token(sequence, logits_V, scores.values_RK[row], scores.ids_RK[row], now))
        return outputs

    def _num_largest(self, batch: Batch) -> int:
        """How many of the largest logits of each row suffice for all of `batch`; 0: all are needed."""
        most = 1
        for sequence, num_tokens in batch.chunks:
            if sequence.num_computed_tokens + num_tokens == len(sequence.token_ids):
                wanted = self._answers[sequence].num_largest()
                if wanted == 0:
                    return 0
                most = max(most, wanted)
        return most

    def _compute_separately(self, batch: Batch, error: Exception) -> list[RequestOutput]:
        """Find whose fault a failed batch was: what fails alone too ends with an error."""
        outputs: list[RequestOutput] = []
        for chunk in batch.chunks:
            try:
                outputs += self._compute(Batch([chunk], chunk.num_tokens))
            except Exception as own_error:
                message = f"the model failed on this request: {type(own_error).__name__}: {own_error}"
                outputs += self._end_all([chunk.sequence], "error", message)
        if all(output.finish_reason == "error" for output in outputs):
            log.error("no sequence of the batch could be computed alone; the first failure was: %s", error)
        return outputs

    def _take_token(
        self, sequence: Sequence, logits_V: np.ndarray | None, values_K: np.ndarray, ids_K: np.ndarray, now: float
    ) -> RequestOutput:
        answer = self._answers[sequence]
        try:
            output = answer.push(answer.choose(logits_V, values_K, ids_K), logits_V)
        except Exception as error:  # sampling or detokenizing one answer must not end the others
            log.exception("sampling for request %s failed", sequence.request_id)
            return self._end_all([sequence], "error", f"sampling failed: {type(error).__name__}: {error}")[0]
        self._num_generated_tokens += 1
        if answer.last_token_time is None:
            self.samples.time_to_first_token_seconds.append(now - answer.arrival_time)
        else:
            self.samples.time_per_output_token_seconds.append(now - answer.last_token_time)
        answer.last_token_time = now
        if output.finish_reason is not None:
            self._forget(sequence, output.finish_reason)
        return output

    def _end_all(self, sequences: list[Sequence], reason: FinishReason, error: str | None) -> list[RequestOutput]:
        outputs = []
        for sequence in sequences:
            outputs.append(self._answers[sequence].end(reason, error))
            self._forget(sequence, reason)
        return outputs

    def _forget(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(sequence)
        del self._answers[sequence]
        self._finished[reason] += 1
        siblings = self._active[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._active[sequence.request_id]
