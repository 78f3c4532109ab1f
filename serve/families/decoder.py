"""Decoders behind a server: penjing's own engine, which queues and streams by itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penjing.core.artifact.parity import SERVED
from penjing.core.errors import ConfigError
from penjing.core.manifest import verify
from penjing.serve.client.protocol import DECODER
from penjing.serve.engine.config import EngineConfig
from penjing.serve.families.base import Entry, Family, Form, Served
from penjing.serve.families.sight import decoder_entry, repository

if TYPE_CHECKING:
    from penjing.serve.client.client import Client


def _check(folder: Path, settings: EngineConfig) -> Path:
    from penjing.core.checkpoint.decoder import open_checkpoint

    checkpoint = open_checkpoint(folder)
    if settings.take_weights:
        from penjing.serve.runner.load import check_same_factors, check_taking

        check_taking(settings, checkpoint.quantization is not None)
        check_same_factors(settings, checkpoint.config)
    if settings.device != "cpu" or settings.dtype != "auto":
        from penjing.serve.runner.device import resolve_device

        resolve_device(settings, checkpoint.config)
    if settings.device == "cpu" and (settings.max_model_len or settings.num_blocks or settings.kv_cache_bytes):
        from penjing.serve.runner.kv_pool import available_memory, resolve
        from penjing.serve.runner.parallel_runner import cached_model

        cached = cached_model(settings, checkpoint.config)
        resolve(settings, cached, available_memory(), checkpoint.quantization is not None)
    if settings.attention != "full":
        from penjing.serve.runner.key_blocks import check_key_blocks

        check_key_blocks(settings, checkpoint.config)
    if settings.tensor_parallel > 1:
        from penjing.serve.runner.parallel_runner import check_parallel

        check_parallel(settings, folder)
    if settings.adapters:
        from penjing.serve.runner.adapters import open_adapters

        open_adapters(checkpoint, settings)
    if settings.draft is not None:
        from penjing.core.checkpoint.draft import load_draft

        load_draft(settings.draft)
    return checkpoint.folder.absolute()


def _entry(folder: Path, settings: EngineConfig, form: Form | None) -> Entry:
    if form == "onnxruntime":
        raise ConfigError(f"{folder} is a decoder, which runs in penjing's own engine: leave --form out or take python")
    if settings.adapters:
        raise ConfigError("a model repository has no adapters so far: leave them out, or serve them with penjing serve")
    if settings.take_weights:
        raise ConfigError("a model repository takes no weights so far: leave that out, or use it with penjing serve")
    if settings.draft is not None:
        raise ConfigError("a model repository has no draft network so far: leave it out, or use it with penjing serve")
    verify(folder)
    return decoder_entry(folder, settings)


def _ask(client: Client, seconds: float) -> None:
    client.generate("a", max_tokens=1, temperature=0.0, ignore_eos=True, timeout=seconds)


def _parity(folder: Path, client: Client) -> Served:
    from penjing.core.artifact.decoder import (
        INT8_RUNTIME,
        Answer,
        answers_to_record,
        logprob_difference,
        open_decoder_artifact,
        recorded_answers,
        recorded_prompts,
    )

    record = open_decoder_artifact(folder).parity
    expected, answers = recorded_answers(record, INT8_RUNTIME), []
    for given, known in zip(recorded_prompts(record), expected, strict=True):
        length = len(known.token_ids)
        answer = client.generate(given.text, max_tokens=length, temperature=0.0, ignore_eos=True, logprobs=0)
        chosen = [next(iter(entry.items())) for entry in answer.logprobs]
        answers.append(
            Answer(
                token_ids=tuple(int(token) for token, _ in chosen),
                logprobs=tuple(entry["logprob"] for _, entry in chosen),
            )
        )
    difference = logprob_difference((INT8_RUNTIME, SERVED), expected, tuple(answers))
    return Served(answers_to_record(answers), (difference,))


FAMILY = Family(
    name=DECODER,
    settings=EngineConfig,
    queued_by_server=False,
    check=_check,
    repository=repository,
    entry=_entry,
    ask=_ask,
    parity=_parity,
    as_recorded=("kv_dtype=float32",),
)
