"""A model in several processes: every token, and every bit of a logit, is that of one process."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch

from penjing.core.checkpoint.load import LoadedModel, load_model
from penjing.core.errors import BrokenEngineError, ConfigError, SetupError
from penjing.core.runtime.tensor_parallel import Split
from penjing.kernels.cpu import extension
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.loop import EngineLoop
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine, make_engine
from penjing.serve.runner.parallel_runner import ParallelRunner, check_parallel
from penjing.serve.runner.ranks import Channel, GlooGather, Workers, c10d, decode_step, encode_step
from penjing.serve.runner.step_inputs import StepTensors
from penjing.serve.runner.worker import follow
from penjing.serve.sampling.params import SamplingParams
from tests.core.artifact.int4_artifact import quantization_config, write_int4_artifact
from tests.serve.tiny import DEFAULTS, run_all, tiny_config, tiny_engine, tiny_model

SECONDS = 20.0

pytestmark = pytest.mark.skipif(extension() is None, reason="the C++ kernels are not built")


class ThreadWorkers(Workers):
    """The other processes as threads of this one, over a real gloo group."""

    def __init__(self, make: Callable[[], LoadedModel], ranks: int) -> None:
        self.ranks, self._store, self._channels, self._processes = ranks, c10d.HashStore(), [], []
        for rank in range(1, ranks):
            ours, theirs = socket.socketpair()
            self._channels.append(Channel(ours))
            model = make().model
            split = Split(model.config, ranks)
            arguments = (Channel(theirs), model, split, rank, self._store)
            threading.Thread(target=follow, args=arguments, daemon=True).start()

    def begin(self, settings: bytes) -> GlooGather:
        for channel in self._channels:
            assert channel.receive() == b"loaded"
        self.send(settings)
        return GlooGather(self._store, 0, self.ranks, SECONDS)

    def end(self) -> None:  # type: ignore[override]
        for channel in self._channels:
            channel.close()


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    cpp = extension()
    assert cpp is not None
    before = cpp.num_threads
    yield
    cpp.set_num_threads(before)


def requests(seed: int, count: int = 12) -> list[Request]:
    """Prompts of several lengths, some with a beginning in common; greedy and sampled, some in several answers."""
    draw = random.Random(seed)
    common = [draw.randrange(256) for _ in range(20)]
    made = []
    for number in range(count):
        prompt = common[: draw.choice((0, 9, 20))] + [draw.randrange(256) for _ in range(draw.randrange(1, 40))]
        params = SamplingParams(
            temperature=draw.choice((0.0, 0.9)),
            seed=number,
            n=draw.choice((1, 1, 2)),
            max_tokens=draw.randrange(1, 30),
            ignore_eos=True,
            logprobs=3,
            prompt_logprobs=draw.choice((None, 0)),
        )
        made.append(Request(str(number), prompt, params))
    return made


def answers(engine: Any, given: list[Request]) -> dict[Any, Any]:
    made = run_all(engine, given)
    return {
        key: [(output.token_ids, output.logprobs, output.text) for output in outputs] for key, outputs in made.items()
    }


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "fp32 2": (2, {}, {}),
    "int8 2, cache in INT8, guesses": (2, {"int8": True}, {"kv_dtype": "int8", "speculate": "lookup"}),
    "uneven 2": (2, {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 50}, {}),
    "int8 4, one head twice": (4, {"int8": True, "attention_bias": True, "qk_norm": True}, {}),
    "fp32 4, windows": (
        4,
        {"sliding_window": 12, "num_key_value_heads": 4, "tie_word_embeddings": True},
        {"num_blocks": 24},
    ),
    "blocks of a transform": (2, {"model_type": "penjing", "mlp_hadamard": 16, "int8": True}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logprobs_are_those_of_one_process(case: str) -> None:
    """Also where the cache is so small that answers are put off and computed again."""
    ranks, changes, settings = CASES[case]
    settings = DEFAULTS | {"num_blocks": 36, "watermark": 0.0, "max_num_batched_tokens": 33} | settings
    given = requests(seed=len(case))
    expected = answers(tiny_engine(tiny_model(**changes), **settings), given)

    workers = ThreadWorkers(lambda: tiny_model(**changes), ranks)
    config = EngineConfig.model_validate(settings | {"tensor_parallel": ranks})
    engine = make_engine(tiny_model(**changes), config, workers=workers)
    assert answers(engine, given) == expected
    if "windows" not in case:  # whose blocks are given back
        assert engine.stats().num_preemptions > 0
    workers.end()


@pytest.mark.parametrize("half", [False, True])
def test_four_bits_in_two_processes(make_tiny_checkpoint: Callable[..., Path], tmp_path: Path, half: bool) -> None:
    checkpoint = make_tiny_checkpoint(hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16)
    quantization = quantization_config(["re:.*down_proj$"])
    if half:
        quantization["config_groups"]["group_0"]["input_activations"] = None
    folder = write_int4_artifact(checkpoint, tmp_path / "int4", eight=("down_proj",), quantization=quantization)
    given = [
        Request("0", list(range(3, 30)), SamplingParams(temperature=0, max_tokens=10, logprobs=2, ignore_eos=True))
    ]
    expected = answers(load_engine(folder, EngineConfig(num_blocks=20)), given)
    workers = ThreadWorkers(lambda: load_model(folder, share=(1, 2)), 2)
    config = EngineConfig(num_blocks=20, tensor_parallel=2)
    assert answers(make_engine(load_model(folder, share=(0, 2)), config, workers=workers), given) == expected
    workers.end()


def test_processes_hold_less_each_and_a_dead_one_is_told(make_tiny_checkpoint: Callable[..., Path]) -> None:
    """Real processes; the one test of them, since each takes seconds to start."""
    folder = make_tiny_checkpoint(num_attention_heads=4, num_key_value_heads=2)
    given = requests(seed=1, count=4)
    whole = load_engine(folder, EngineConfig(num_blocks=60))
    expected = answers(whole, given)
    engine = load_engine(folder, EngineConfig(num_blocks=60, tensor_parallel=2))
    assert answers(engine, given) == expected
    runner = engine.runner
    assert isinstance(runner, ParallelRunner)
    assert runner.cache.pool.numel() * 2 == whole.runner.cache.pool.numel()

    loop, replies = EngineLoop(engine), Queue[Any]()
    loop.start()
    loop.submit(
        Request("long", list(range(20)), SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)), replies.put
    )
    replies.get(timeout=SECONDS)
    (worker,) = runner.pids
    began = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    while not (last := replies.get(timeout=SECONDS)[-1]).finish_reason:
        pass
    assert time.monotonic() - began < 5
    assert last.finish_reason == "error"
    assert "process 1 of 2 was killed by signal 9" in str(last.error)
    assert "process 1 of 2" in str(loop.failure)
    loop.stop()
    with pytest.raises(BrokenEngineError, match="process 1 of 2"):
        run_all(engine, given[:1])


def test_a_process_that_cannot_load_is_told(make_tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    workers = Workers(tmp_path / "missing", 2, 1)
    with pytest.raises(BrokenEngineError, match="process 1 of 2 ended with status 1"):
        workers.begin(b"{}")


def test_a_machine_without_room_for_processes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(SetupError, match=r"no process can be started: .*; end other programs and run again"):
        Workers(tmp_path, 2, 1)


def test_a_part_of_a_half_precision_checkpoint_is_read(make_tiny_checkpoint: Callable[..., Path]) -> None:
    """The embedding, also a tied one, stays a view of the file in its own type; the rest is a part in float32."""
    folder = make_tiny_checkpoint(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    whole = load_model(folder).model
    part = load_model(folder, share=(1, 2)).model
    for name, value in whole.named_parameters():
        rows = Split(whole.config, 2).rows(name.rpartition(".")[0], 1)
        own = part.get_parameter(name)
        assert torch.equal(own, value if rows is None or "lm_head" in name else value[rows]), name
    assert part.lm_head.weight is part.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("changes", "ranks", "expected"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 4, "take one of 1, 2, 3, 6"),
        ({"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 3}, 4, "the narrowest MLP has 3"),
        ({"model_type": "penjing", "mlp_hadamard": 16, "num_key_value_heads": 4}, 4, "3 blocks of 16 channels"),
    ],
)
def test_what_does_not_divide_is_refused(changes: dict[str, Any], ranks: int, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Split(tiny_config(**changes), ranks).check()


def test_what_does_not_go_together_is_refused(make_tiny_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="does not go with attention=window"):
        EngineConfig(tensor_parallel=2, attention="window+blocks")
    moe = make_tiny_checkpoint(
        model_type="mixtral", moe={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    )
    with pytest.raises(ConfigError, match="has experts"):
        load_engine(moe, EngineConfig(tensor_parallel=2))
    apart = tiny_config(model_type="penjing", norms="around")
    with pytest.raises(ConfigError, match="norms=around"):
        Split(apart, 2).check()
    with pytest.raises(ConfigError, match="needs a folder"):
        make_engine(tiny_model(), EngineConfig(tensor_parallel=2))
    check_parallel(EngineConfig(tensor_parallel=2), make_tiny_checkpoint())


@pytest.mark.parametrize(("heads", "kv", "ranks"), [(4, 2, 2), (9, 3, 2), (8, 2, 8), (12, 4, 3), (7, 7, 4)])
def test_every_output_has_one_owner_and_a_query_its_keys(heads: int, kv: int, ranks: int) -> None:
    config = tiny_config(num_attention_heads=heads, num_key_value_heads=kv, vocab_size=259)
    split = Split(config, ranks)
    split.check()
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.layers.0.mlp.down_proj"):
        slices = [split.rows(name, rank) for rank in range(ranks)]
        taken = [row for own in slices if own is not None for row in range(own.start, own.stop)]
        assert taken == list(range(len(taken)))
    for rank in range(ranks):
        queries, keys = (split.rows(f"model.layers.0.self_attn.{part}_proj", rank) for part in "qk")
        assert queries is not None
        assert keys is not None
        first, last = queries.start // config.head_dim, (queries.stop - 1) // config.head_dim
        wanted = {head * kv // heads for head in range(first, last + 1)}
        assert wanted == set(range(keys.start // config.head_dim, keys.stop // config.head_dim))


def test_a_step_arrives_as_it_was_sent() -> None:
    whole = torch.arange(40, dtype=torch.int32).view(2, 20)
    numbers = [torch.tensor(values, dtype=torch.int32) for values in ([7, 8, 9], [0, 1, 5], [0, 2, 3], [2, 6], [2])]
    ids, positions, cu_query, lengths, rows = numbers
    tensors = StepTensors(ids, positions, torch.tensor([4, 2**40, -1]), cu_query, lengths, whole, rows)
    ours, theirs = socket.socketpair()
    Channel(ours).send(encode_step(tensors, block_size=4))
    message = Channel(theirs).receive()
    assert message is not None
    got = decode_step(message)
    assert torch.equal(got.block_table, whole[:, :2])
    for name in set(StepTensors._fields) - {"block_table"}:
        assert torch.equal(getattr(got, name), getattr(tensors, name)), name
    ours.close()
    assert Channel(theirs).receive() is None
