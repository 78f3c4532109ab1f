"""The engine: schedule, run, sample, append; one thread calls it."""

from __future__ import annotations

import logging
import math
import secrets
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from penjing.core.errors import BrokenEngineError, OverloadedError, PenjingError, RequestError, ServerError
from penjing.serve.engine.adapters import AdapterRunner, Adapters
from penjing.serve.engine.answer import Answer
from penjing.serve.engine.blocks import BlockManager
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.invariants import Snapshot, check_invariants
from penjing.serve.engine.pace import Pace
from penjing.serve.engine.prepare import PreparedRequest, Preparer, overload_reason
from penjing.serve.engine.request import FinishReason, Request, RequestOutput
from penjing.serve.engine.scheduler import Scheduler, largest_window
from penjing.serve.engine.sequence import Batch, Sequence, SequenceChunk
from penjing.serve.engine.speculation import Speculation, without_drafts
from penjing.serve.engine.stats import EngineStats, Samples
from penjing.serve.sampling.choice import Choice, StepScores, Wanted, choose_rows
from penjing.serve.sampling.constraint import Constraints
from penjing.serve.sight.images import Images

if TYPE_CHECKING:
    from penjing.core.checkpoint.load import LoadedModel

MAX_RETRY_SECONDS = 60

log = logging.getLogger(__name__)


class ModelRunner(AdapterRunner, Protocol):
    """A model with its KV cache: all that the engine knows of tensors."""

    cache: Any

    def run(self, batch: Batch, largest: bool = False) -> tuple[StepScores, list[Sequence]]:
        """Compute the tokens of `batch` into the KV cache; see `penjing.serve.runner.runner.Runner.run`."""
        ...


class LLMEngine:
    """Continuous batching over a paged KV cache.

    Deterministic: what a request gets depends on its prompt, parameters and seed alone, bit by bit, not on what else
    runs, on cache hits, chunking or preemption.

    Everything but `prepare`, `check_admission` and `stats` belongs to one thread (`EngineLoop` provides it). A request
    that fails ends with an output whose `finish_reason` is "error"; the others go on.
    """

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, runner: ModelRunner, speculation: Speculation | None = None
    ) -> None:
        """`penjing.serve.runner.load` builds one around a model or a folder.

        Args:
            loaded: of it the architecture and the tokenizer are kept, not the model.
            config: resolved: nothing in it is "auto" or None.
            runner: holds the model, and a KV cache of `config.num_blocks` blocks.
            speculation: guesses, where `config.speculate` is not "off".
        """
        self.config, self.runner = config, runner
        assert config.num_blocks is not None and config.max_model_len is not None  # noqa: PT018
        self.model_config, self.scheme = loaded.config, loaded.scheme
        types = map(loaded.config.layer_type, range(loaded.config.num_hidden_layers))
        if hashed := ", ".join(str(layer) for layer, kind in enumerate(types) if kind == "lsh_attention"):
            log.warning("layers %s were trained with LSH attention; they are served with full attention", hashed)
        self.tokenizer, self.chat_template = loaded.tokenizer, loaded.chat_template
        self.max_model_len: int = config.max_model_len
        self.samples = Samples()
        self._pace = Pace(config.max_step_seconds, config.max_num_batched_tokens)
        self.scheduler = self._new_scheduler()
        self.constraints = Constraints(loaded.tokenizer, loaded.config.vocab_size)
        self.adapters = Adapters(runner)
        images = Images(loaded.sight, loaded.tokenizer, config)
        self.preparer = Preparer(
            loaded.tokenizer, loaded.config.vocab_size, self.max_model_len, self.constraints, self.adapters, images
        )
        self._answers: dict[Sequence, Answer] = {}
        self._active: dict[str, list[Sequence]] = {}  # unfinished sequences of each request
        self._num_prompt_tokens = self._num_generated_tokens = self._num_steps = 0
        self._num_draft_tokens = self._num_accepted_tokens = 0
        self.speculation = speculation
        self._finished: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._tokens_per_second = 0.0  # a running mean, for the back-off hint

    def prepare(self, request: Request) -> PreparedRequest:
        """Tokenize and validate; see `Preparer.prepare`. Any thread may call it."""
        return self.preparer.prepare(request)

    def check_admission(self, prepared: PreparedRequest, pending_requests: int = 0, pending_tokens: int = 0) -> None:
        """Raise OverloadedError if too much waits; `pending_…` is what waits outside the engine. A request counts once
        for each of its `n` sequences."""
        reason = overload_reason(self.scheduler, self.config, prepared, pending_requests, pending_tokens)
        if reason is None:
            return
        tokens = self.scheduler.num_waiting_tokens + pending_tokens
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
        self.add_prepared(self.preparer.see(prepared))

    def add_prepared(self, prepared: PreparedRequest) -> None:
        """Queue a request that `prepare` and `check_admission` have passed."""
        request, params = prepared.request, prepared.request.params
        assert request.request_id not in self._active, "the caller checks that ids are new"
        origin: dict[str, Any] = {"key": request.key, "priority": request.priority, "images": prepared.images}
        origin |= self.adapters.hold(request.request_id, prepared.adapter)
        first = Sequence(request.request_id, prepared.prompt_ids, **origin)
        first.forks = [
            Sequence(request.request_id, prepared.prompt_ids, index, fork_of=first, **origin)
            for index in range(1, params.n)
        ]
        if params.prompt_logprobs is not None:
            first.score_from = 1
        sequences = [first, *first.forks]
        seed = secrets.randbits(63) if params.seed is None else params.seed
        for sequence in sequences:
            constraint = prepared.constraint
            if constraint is not None and sequence.index:
                constraint = constraint.fork()
            self._answers[sequence] = Answer(
                sequence, params, seed, self.tokenizer, self.max_model_len, request.arrival_time, constraint
            )
        self._active[request.request_id] = sequences
        self._num_prompt_tokens += len(prepared.prompt_ids)
        self.scheduler.add(first)

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request now; its blocks are free. The last outputs of its sequences; none if it is unknown."""
        return self._end_all(list(self._active.get(request_id, ())))

    def abort_all(self, error: PenjingError | None = None) -> list[RequestOutput]:
        """End every request. After an error the scheduler starts afresh: its state is not to be trusted."""
        if error is not None:
            self.forget()
            for sequence in self._answers:  # what they hold belongs to the old one
                sequence.block_table, sequence.forks = [], []
        return self._end_all([s for sequences in self._active.values() for s in sequences], error)

    def forget(self) -> None:
        """Start with a fresh scheduler, which keeps no prefix of earlier prompts; its figures go on."""
        old, new = self.scheduler, self._new_scheduler()
        for figure in ("num_preemptions", "prefix_queries", "prefix_hits"):
            setattr(new, figure, getattr(old, figure))
        self.scheduler = new

    def is_active(self, request_id: str) -> bool:
        """Whether the request still has a sequence that waits or runs."""
        return request_id in self._active

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> list[RequestOutput]:
        """Compute one batch; what it adds to each of its answers. After a BrokenEngineError no step can succeed."""
        started = time.monotonic()
        num_answers = self.scheduler.num_answering()
        drafts = self.speculation.propose(self.scheduler.running, self._answers) if self.speculation else None
        batch = self.scheduler.schedule(self._pace.prompt_tokens(num_answers), drafts)
        self._num_draft_tokens += (num_drafted := sum(len(chunk.sequence.draft) for chunk in batch.chunks))
        if not batch.chunks:
            assert not self.scheduler.has_work(), "work, but nothing can be scheduled"
            return []
        self.samples.begin((self._answers[chunk.sequence] for chunk in batch.chunks), started)
        try:
            outputs = self._compute(batch)
        except BrokenEngineError:
            raise
        except Exception as error:
            log.exception("a batch of %d sequences failed; each is tried alone", len(batch.chunks))
            outputs = self._compute_separately(batch, error)
        self._num_steps += 1
        self.samples.iteration_tokens_total.append(batch.num_tokens)
        seconds = max(time.monotonic() - started, 1e-6)
        num_own = batch.num_tokens - num_drafted
        self._pace.observe(max(num_own - num_answers, 0), num_answers, seconds)
        self._tokens_per_second += 0.1 * (num_own / seconds - self._tokens_per_second)
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
            spec_decode_num_draft_tokens=self._num_draft_tokens,
            spec_decode_num_accepted_tokens=self._num_accepted_tokens,
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

    def _compute(self, batch: Batch) -> list[RequestOutput]:
        held, masks = self._start_masks(batch)
        try:
            scores, ready = self.runner.run(batch, self._largest_suffices(batch))
        finally:
            errors = dict(zip(held, masks.result(), strict=True)) if masks is not None else {}
        numbers, checked = without_drafts(ready)
        ready = [ready[number] for number in numbers]
        choices = choose_rows(self._wanted(ready), scores, numbers)
        outputs: list[RequestOutput] = []
        failed: dict[Sequence, PenjingError] = {each: error for each, error in errors.items() if error is not None}
        failed |= {each: error for each, choice in zip(ready, choices, strict=True) if (error := choice.error)}
        for sequence, error in failed.items():
            # They end before their blocks are published: nobody else shall find keys and values that may be wrong.
            outputs += self._end_all([sequence], error)
        if failed:
            chunks = [chunk for chunk in batch.chunks if chunk.sequence not in failed]
            batch = Batch(chunks, sum(chunk.num_tokens for chunk in chunks))
        self.scheduler.advance(batch)
        now = time.monotonic()
        for number, sequence, choice in zip(numbers, ready, choices, strict=True):
            if sequence in failed:
                continue
            if sequence.scores_prompt:  # its rows come in order, that of its last token behind them
                self._answers[sequence].push_score(choice)
            else:
                if self.speculation is not None:
                    self.speculation.saw(sequence, scores.hidden_RE, number)
                outputs.append(self._take_token(sequence, choice, now))
        return [*outputs, *self._check_drafts(checked, scores, now)] if checked else outputs

    def _check_drafts(self, rows: dict[Sequence, int], scores: StepScores, now: float) -> list[RequestOutput]:
        """Take the tokens behind guesses that came, each as it would have been taken in a step of its own.

        Args:
            rows: the first row of each sequence with a draft, whose token has been taken; those of its draft follow.
        """
        outputs: list[RequestOutput] = []
        going, depth = dict(rows), 0
        while going:
            going = {
                sequence: row
                for sequence, row in going.items()
                if sequence in self._answers
                and depth < len(sequence.draft)
                and sequence.token_ids[-1] == sequence.draft[depth]
            }
            depth += 1
            for sequence in list(going):
                constraint = self._answers[sequence].masked_by()
                try:
                    if constraint is not None:
                        constraint.fill()
                except RequestError as error:
                    del going[sequence]
                    outputs += self._end_all([sequence], error)
            wanted = [self._answers[sequence].wanted() for sequence in going]
            choices = choose_rows(wanted, scores, [row + depth for row in going.values()])
            for sequence, choice in zip(going, choices, strict=True):
                if error := choice.error:
                    outputs += self._end_all([sequence], error)
                    continue
                self._num_accepted_tokens += 1
                if self.speculation is not None:
                    self.speculation.saw(sequence, scores.hidden_RE, going[sequence] + depth)
                self.scheduler.advance(Batch([SequenceChunk(sequence, 1)], 1))
                outputs.append(self._take_token(sequence, choice, now))
        for sequence in rows:
            if sequence in self._answers:
                self.scheduler.settle(sequence)
        return outputs

    def _wanted(self, ready: list[Sequence]) -> list[Wanted]:
        """What each row of logits is for."""
        wanted: list[Wanted] = []
        scored: dict[Sequence, int] = {}
        for sequence in ready:
            answer, position = self._answers[sequence], scored.get(sequence, sequence.score_from)
            if position < sequence.num_prompt_tokens:
                wanted.append(answer.wanted_score(position))
                scored[sequence] = position + 1
            else:
                wanted.append(answer.wanted())
        return wanted

    def _start_masks(self, batch: Batch) -> tuple[list[Sequence], Future[list[RequestError | None]] | None]:
        """The sequences of `batch` whose next token is chosen by a mask, which is computed on another thread."""
        wanted = {
            sequence: constraint
            for sequence, num_tokens in batch.chunks
            if (constraint := self._answers[sequence].masked_by()) is not None
            and sequence.num_computed_tokens + num_tokens == len(sequence.token_ids)
        }
        return list(wanted), self.constraints.start(list(wanted.values())) if wanted else None

    def _largest_suffices(self, batch: Batch) -> bool:
        """Whether the largest logit of each row is all that `batch` needs."""
        return not any(
            sequence.scores_prompt
            or (
                sequence.num_computed_tokens + num_tokens == len(sequence.token_ids)
                and not self._answers[sequence].largest_suffices()
            )
            for sequence, num_tokens in batch.chunks
        )

    def _compute_separately(self, batch: Batch, error: Exception) -> list[RequestOutput]:
        """Find whose fault a failed batch was: what fails alone too ends with an error."""
        outputs: list[RequestOutput] = []
        for chunk in batch.chunks:
            self.scheduler.settle(chunk.sequence)
            try:
                outputs += self._compute(Batch([chunk], chunk.num_tokens))
            except BrokenEngineError:
                raise
            except Exception as own_error:
                message = f"the model failed on this request: {type(own_error).__name__}: {own_error}"
                outputs += self._end_all([chunk.sequence], ServerError(message))
        if all(output.finish_reason == "error" for output in outputs):
            log.error("no sequence of the batch could be computed alone; the first failure was: %s", error)
        return outputs

    def _take_token(self, sequence: Sequence, choice: Choice, now: float) -> RequestOutput:
        answer = self._answers[sequence]
        try:
            output = answer.push(choice)
        except PenjingError as error:  # the answer cannot be held to its form
            return self._end_all([sequence], error)[0]
        except Exception as error:  # sampling or detokenizing one answer must not end the others
            log.exception("sampling for request %s failed", sequence.request_id)
            return self._end_all([sequence], ServerError(f"sampling failed: {type(error).__name__}: {error}"))[0]
        self._num_generated_tokens += 1
        if answer.last_token_time is None:
            self.samples.time_to_first_token_seconds.append(now - answer.arrival_time)
        else:
            self.samples.time_per_output_token_seconds.append(now - answer.last_token_time)
        answer.took_token(now)
        if output.finish_reason is not None:
            output.stages = answer.stages(now)
            self._forget(sequence, output.finish_reason)
        return output

    def _end_all(self, sequences: list[Sequence], error: PenjingError | None = None) -> list[RequestOutput]:
        reason: FinishReason = "abort" if error is None else "error"
        outputs = [self._answers[sequence].end(reason, error) for sequence in sequences]
        for sequence in sequences:
            self._forget(sequence, reason)
        return outputs

    def _forget(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(sequence)
        if self.speculation is not None:
            self.speculation.forget(sequence)
        del self._answers[sequence]
        self._finished[reason] += 1
        siblings = self._active[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._active[sequence.request_id]
            self.adapters.release(sequence.request_id)
