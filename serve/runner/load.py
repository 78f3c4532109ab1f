"""An engine around a model: settings decided for this machine, weights where they run, the KV cache allocated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.draft import load_draft
from penjing.core.checkpoint.load import SEES, LoadedModel, load_model
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import family_of
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder, table_basis
from penjing.kernels.low_rank import Pairs
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.engine import LLMEngine, ModelRunner
from penjing.serve.engine.speculation import Speculation
from penjing.serve.runner.adapters import load_adapters
from penjing.serve.runner.costs import measure_costs
from penjing.serve.runner.device import find_device, free_device_memory, resolve_device
from penjing.serve.runner.key_blocks import allocate_summaries, check_key_blocks
from penjing.serve.runner.kv_pool import available_memory, resolve
from penjing.serve.runner.parallel_runner import ParallelRunner, cached_model, check_parallel, start_workers
from penjing.serve.runner.ranks import Workers
from penjing.serve.runner.runner import Runner
from penjing.serve.speculate.network import DraftNetwork, head_rows
from penjing.serve.speculate.rows import USUAL_COSTS


def load_engine(folder: Path, config: EngineConfig | None = None) -> LLMEngine:
    """Load a checkpoint or artifact and build an engine for it. With `longrope` a `max_model_len` that is set decides
    by which factors it rotates: those for the original context where it is within it.

    Raises:
        InputError: the folder is missing, damaged or of another kind.
        ConfigError: see `make_engine`.
    """
    if config is not None:
        find_device(config.device)  # before the weights are read
        if config.attention != "full" and family_of(folder) != SEES:
            check_key_blocks(config, open_checkpoint(folder).config)
        if config.tensor_parallel > 1:
            check_parallel(config, folder)
            workers = start_workers(folder, config)
            loaded = load_model(folder, share=(0, config.tensor_parallel), context=config.max_model_len)
            return make_engine(loaded, config, workers=workers)
    adapters = {} if config is None else load_adapters(folder, config)
    context = None if config is None else config.max_model_len
    return make_engine(load_model(folder, context=context), config, adapters)


def make_engine(
    loaded: LoadedModel,
    config: EngineConfig | None = None,
    adapters: Mapping[str, Pairs] | None = None,
    workers: Workers | None = None,
) -> LLMEngine:
    """Build an engine around a loaded model; "auto" settings are decided here, see `LLMEngine.config`.

    The model itself is not kept where its weights are packed for the C++ step: without `loaded` they are held once.

    Args:
        adapters: what `load_adapters` made of the settings' folders, or others.
        workers: the other processes of `config.tensor_parallel`, which load the same model.

    Raises:
        ConfigError: the settings contradict each other, the model or the memory.
        BrokenEngineError: a worker ended before it had loaded.
    """
    config = resolve_device(config or EngineConfig(), loaded.config, loaded.scheme != "fp32")
    check_taking(config, loaded.scheme != "fp32")
    if loaded.sight is not None and config.device != "cpu":
        raise ConfigError("a decoder that sees is served on a CPU only; take device=cpu")
    available = available_memory() if config.device == "cpu" else free_device_memory(loaded.model, config)
    config = resolve(config, cached_model(config, loaded.config), available)
    runner = make_runner(loaded.model, config, adapters, workers)
    network = None if config.draft is None else load_network(config.draft, loaded, runner)
    return LLMEngine(loaded, config, runner, _speculation(config, runner, network, loaded.config.vocab_size))


def check_same_factors(config: EngineConfig, model: DecoderConfig) -> None:
    """Refuse to take the weights of a run that rotates otherwise than this engine would.

    Args:
        model: of the folder, which a run that trains it goes by.

    Raises:
        ConfigError: `max_model_len` chooses other factors of `longrope`.
    """
    original = model.rope_scaling.original_max_position_embeddings
    is_long = model.rope_scaling.rope_type == "longrope" and model.max_position_embeddings > original
    if config.take_weights and is_long and (config.max_model_len or model.max_position_embeddings) <= original:
        raise ConfigError(
            f"max_model_len={config.max_model_len} makes this model rotate by the factors of its original {original} "
            f"tokens, and a run that trains it by those of its {model.max_position_embeddings}; leave it out, or take "
            f"more than {original}"
        )


def check_taking(config: EngineConfig, is_quantized: bool) -> None:
    """Refuse to take weights where those of the model are not what the engine computes with.

    Args:
        config: resolved.

    Raises:
        ConfigError: they are integers, or on a GPU.
    """
    if config.take_weights and is_quantized:
        raise ConfigError(
            "take_weights is for a checkpoint in floating point, and the weights of this one are integers; serve the "
            "checkpoint that is trained"
        )
    if config.take_weights and config.device != "cpu":
        raise ConfigError("take_weights is for a CPU so far; take device=cpu")


def _speculation(
    config: EngineConfig, runner: ModelRunner, network: DraftNetwork | None, vocab_size: int
) -> Speculation | None:
    if config.speculate in ("lookup", "draft"):
        return Speculation(measure_costs(runner, config, vocab_size), network)
    # On a device steps of one row an answer are replayed from a graph; whether others pay there is not known.
    return Speculation(USUAL_COSTS, lookup=False) if config.speculate == "forced" and config.device == "cpu" else None


def load_network(folder: Path, loaded: LoadedModel, runner: ModelRunner) -> DraftNetwork:
    """The network in `folder` that guesses for `loaded`, whose runner then tells it what it needs.

    Raises:
        InputError: it is missing, damaged, or was trained for another model.
        ConfigError: the model does not run in the C++ step.
    """
    if not isinstance(runner, Runner):
        raise ConfigError("speculate = draft runs on a CPU only; take device=cpu")
    stored = load_draft(folder)
    shape = stored.network.config
    if (shape.vocab_size, shape.hidden_size) != (loaded.config.vocab_size, loaded.config.hidden_size):
        raise InputError(
            f"draft = {folder} was trained for a model of {shape.vocab_size:,} tokens and {shape.hidden_size} "
            f"channels; this one has {loaded.config.vocab_size:,} and {loaded.config.hidden_size}"
        )
    rows = head_rows(loaded.model.lm_head, stored.anchor_ids_A)
    if rows is None:
        raise ConfigError("speculate = draft needs an LM head in floating point or INT8; take speculate = lookup")
    runner.keep_hidden()
    return DraftNetwork(stored, table_basis(rows, loaded.config))


def make_runner(
    model: Decoder,
    config: EngineConfig,
    adapters: Mapping[str, Pairs] | None = None,
    workers: Workers | None = None,
) -> ModelRunner:
    """The runner for a resolved `config`."""
    if config.take_weights and model.config.activation == "xielu":
        raise ConfigError("take_weights does not fit a model whose activation is xielu, whose numbers are not taken")
    if config.tensor_parallel > 1:
        if workers is None:
            raise ConfigError("tensor_parallel needs a folder, which other processes load too; leave tensor_parallel=1")
        return ParallelRunner(model, config, workers)
    if config.device == "cuda":
        if adapters:
            raise ConfigError("adapters are served on a CPU only; leave them out, or take device=cpu")
        from penjing.serve.runner.device_runner import DeviceRunner

        return DeviceRunner(model, config)
    assert config.num_blocks is not None
    assert config.max_model_len is not None
    return Runner(
        model,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_tokens=config.max_num_batched_tokens,
        max_sequences=config.max_num_sequences,
        max_model_len=config.max_model_len,
        kv_dtype=config.kv_dtype,
        adapters=adapters,
        key_blocks=allocate_summaries(config, model.config),
        take_weights=config.take_weights,
    )
