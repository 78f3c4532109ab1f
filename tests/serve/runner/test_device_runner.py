"""The engine's device path, its kernels interpreted on the CPU where there is no GPU: against the C++ path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from penjing.core.checkpoint.load import LoadedModel
from penjing.core.cli import main
from penjing.core.errors import ConfigError
from penjing.core.runtime.quantized import Int4Linear, Int8Linear
from penjing.kernels.dispatch import force_triton_language
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.engine.request import Request
from penjing.serve.runner.decode_graphs import Captured, DecodeGraphs, GraphMemory, Tensors, bucket_sizes
from penjing.serve.runner.device import resolve_device
from penjing.serve.runner.device_runner import DeviceRunner, _scores
from penjing.serve.sampling.choice import NOT_FINITE, choose_rows
from penjing.serve.sampling.params import SamplingParams
from penjing.serve.speculate.rows import StepCosts
from tests.kernels.cpu import needs_extension
from tests.kernels.gpu.conftest import repair_interpreter
from tests.serve.tiny import CONVOLUTIONS, ids_of, run_all, tiny_engine, tiny_int4_model, tiny_model

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS: dict[str, Any] = {"block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 16, "max_num_sequences": 4}
SETTINGS["kv_dtype"] = "float32"  # as the device keeps them here


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """The Triton language's kernels, interpreted where there is no GPU."""
    if DEVICE == "cuda":
        yield
        return
    repair_interpreter()
    with force_triton_language():
        yield


def device_engine(loaded: LoadedModel, **settings: Any) -> LLMEngine:
    """An engine on the device's path, in float32 (the interpreter's bfloat16 is wrong), without graphs."""
    engine = tiny_engine(loaded, **SETTINGS | settings)
    engine.runner = DeviceRunner(loaded.model, engine.config.model_copy(update={"cuda_graphs": False}), DEVICE)
    return engine


def answers(engine: LLMEngine, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 2, "ignore_eos": True} | params)
    outputs = run_all(engine, [Request(str(i), prompt, sampling) for i, prompt in enumerate(prompts)])
    return [ids_of(outputs[str(i), 0]) for i in range(len(prompts))]


def record(engine: LLMEngine) -> list[torch.Tensor]:
    """Logits of every row that is asked for, in order; makes the engine ask for all of them."""
    found: list[torch.Tensor] = []
    run = engine.runner.run

    def recorded(batch: Any, largest: bool = False) -> Any:
        scores, ready = run(batch, False)
        assert scores.logits_RV is not None
        found.extend(torch.from_numpy(scores.logits_RV.copy()))
        return scores, ready

    engine.runner.run = recorded  # type: ignore[method-assign]
    return found


PROMPTS = [list(range(40, 61)), [7]]  # the first takes two chunks


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"int8": True, "qk_norm": True, "attention_bias": True}, {"kv_dtype": "int8"}),
        ({"sliding_window": 6, "tie_word_embeddings": True}, {}),
        ({"int8": True, "model_type": "penjing", "mlp_hadamard": 16}, {}),
    ],
    ids=["int8 weights and cache, head norms, biases", "float, window, tied", "a Hadamard transform"],
)
def test_logits_are_those_of_the_cpu_path(changes: dict[str, Any], settings: dict[str, Any]) -> None:
    loaded = tiny_model(**changes)
    expected_engine = tiny_engine(loaded, **SETTINGS | settings)
    expected = record(expected_engine)
    tokens = answers(expected_engine, PROMPTS)
    engine = device_engine(loaded, **settings)
    found = record(engine)
    assert answers(engine, PROMPTS) == tokens
    # A sum in another order may move a value across a rounding of INT8: one code of 127.
    atol = 0.05 if changes.get("int8") else 1e-4
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=0, atol=atol)


class FakeGraph:
    """Stands for a CUDA graph: what is captured runs at once, and again into the same tensors at each replay."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def capture(self, run: Callable[[], Tensors]) -> Captured:
        self.captures += 1
        results = run()

        def replay() -> None:
            self.replays += 1
            for kept, new in zip(results, run(), strict=True):
                kept.copy_(new)

        return Captured(replay, results)


def test_bits_depend_on_nothing_else_and_graphs_change_none() -> None:
    """Alone or together, whole or in chunks, launched or replayed in a padded batch: equal logits, bit by bit."""
    loaded = tiny_model(int8=True, num_hidden_layers=1)
    prompts = [PROMPTS[0][:18], [7], [200, 201]]
    alone: list[torch.Tensor] = []
    for prompt in prompts:
        engine = device_engine(loaded, max_num_batched_tokens=32)
        found = record(engine)
        answers(engine, [prompt], max_tokens=3)
        alone.append(torch.stack(found))
    engine = device_engine(loaded)
    assert isinstance(engine.runner, DeviceRunner)
    fake = FakeGraph()
    engine.runner.capture_decode(4, fake.capture)
    assert fake.captures == 3  # 1, 2 and 4
    found = record(engine)
    answers(engine, prompts, max_tokens=3)
    assert fake.replays == 2  # three sequences in a batch of four, twice
    unmatched = [row for rows in alone for row in rows]
    assert len(found) == len(unmatched)
    for row in found:
        matching = [i for i, other in enumerate(unmatched) if torch.equal(row, other)]
        assert matching, "a row's bits depend on its batch"
        del unmatched[matching[0]]


def test_half_precision_is_near() -> None:
    loaded = tiny_model(int8=True, num_hidden_layers=1)
    expected_engine = tiny_engine(loaded, **SETTINGS)
    expected = record(expected_engine)
    answers(expected_engine, PROMPTS[1:2], max_tokens=1)
    engine = tiny_engine(loaded, **SETTINGS)
    config = engine.config.model_copy(update={"dtype": "float16", "kv_dtype": "float16"})
    engine.runner = DeviceRunner(loaded.model, config.model_copy(update={"cuda_graphs": False}), DEVICE)
    assert engine.runner.cache.pool.dtype == torch.float16
    found = record(engine)
    answers(engine, PROMPTS[1:2], max_tokens=1)
    assert (found[0] - expected[0]).abs().max() < 0.1 * expected[0].abs().max()


def test_greedy_answers_take_the_largest_logits_alone() -> None:
    loaded = tiny_model(int8=True, num_hidden_layers=1)
    engine, asked = device_engine(loaded), list[bool]()
    run = engine.runner.run
    engine.runner.run = lambda batch, largest=False: (asked.append(largest), run(batch, largest))[1]  # type: ignore[method-assign]
    for params, suffices in (({"temperature": 0.0}, True), ({"temperature": 1.0, "top_k": 5, "seed": 3}, False)):
        params |= {"max_tokens": 2}
        assert answers(engine, PROMPTS[1:], **params) == answers(tiny_engine(loaded, **SETTINGS), PROMPTS[1:], **params)
        assert set(asked) == {suffices}
        asked.clear()


@pytest.mark.parametrize(
    "changes",
    [
        {"moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}, "num_hidden_layers": 1},
        CONVOLUTIONS | {"num_hidden_layers": 2, "layer_types": ("short_conv", "full_attention")},
    ],
    ids=["experts", "convolutions"],
)
def test_other_models_run_layer_by_layer(changes: dict[str, Any]) -> None:
    loaded = tiny_model(**changes)
    expected_engine = tiny_engine(loaded, **SETTINGS)
    expected = record(expected_engine)
    answers(expected_engine, PROMPTS[1:2], max_tokens=2)
    engine = device_engine(loaded)
    found = record(engine)
    answers(engine, PROMPTS[1:2], max_tokens=2)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=0, atol=1e-4)


def test_the_first_of_equals_is_the_largest_and_nan_above_all() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 5.0, torch.nan, 5.0]])
    ids = logits.argmax(1, keepdim=True)
    values = logits.gather(1, ids)
    found = _scores(logits, values, ids, largest=True)
    assert found.logits_RV is None
    assert found.ids_R is not None
    assert found.ids_R.tolist() == [1, 2]
    assert [choice.token for choice in choose_rows([cast(Any, None)] * 2, found)] == [1, NOT_FINITE]
    assert _scores(logits, values, ids, largest=False).logits_RV is not None
    assert _scores(logits[:0], values[:0], ids[:0], largest=True).ids_R is not None


def test_buckets() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(6) == [1, 2, 4, 6]
    assert bucket_sizes(1000) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    order: list[int] = []

    def decode(size: int) -> Tensors:
        order.append(size)
        return (torch.zeros(size),)

    graphs = DecodeGraphs(decode, 6, FakeGraph().capture)
    assert order == [6, 4, 2, 1]
    assert [graphs.bucket(n) for n in (1, 3, 4, 5, 6, 7)] == [1, 4, 4, 6, 6, None]
    assert len(graphs.replay(4)[0]) == 4


def test_capture_warms_up_on_a_side_stream_and_shares_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls that torch documents for capture; torch.cuda itself cannot run here."""
    calls: list[str] = []

    class Stream:
        def wait_stream(self, other: Stream) -> None:
            calls.append("wait")

    class Graph:
        def replay(self) -> None:
            calls.append("replay")

    @contextmanager
    def within(name: str) -> Iterator[None]:
        calls.append(name)
        yield
        calls.append(f"end {name}")

    current = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: within("side"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: within(f"capture in {pool}"))
    memory = GraphMemory()
    captured = memory.capture(lambda: (calls.append("run"), (torch.ones(1),))[1])
    captured.replay()
    side = ["wait", "side", "run", "run", "end side", "wait"]
    assert calls == [*side, "capture in pool", "run", "end capture in pool", "replay"]


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda"}, r"device=cuda cannot run here: no CUDA device; set device=cpu"),
        ({"dtype": "bfloat16"}, r"dtype=bfloat16 with device=cpu"),
    ],
)
def test_settings_that_do_not_fit_the_machine(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_engine(**settings)


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_auto_is_the_cpu_without_a_gpu() -> None:
    config: EngineConfig = tiny_engine(device="auto").config
    assert (config.device, config.dtype, config.kv_dtype) == ("cpu", "float32", "float32")
    of_integers: EngineConfig = tiny_engine(tiny_model(int8=True), device="auto").config
    assert (of_integers.device, of_integers.dtype, of_integers.kv_dtype) == ("cpu", "float32", "float16")


@needs_extension
@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
@pytest.mark.parametrize(
    ("isa", "head_dim", "kept"), [("amx", 32, "bfloat16"), ("amx", 16, "float16"), ("avx512_bf16", 32, "float16")]
)
def test_integers_keep_what_tiles_read(isa: str, head_dim: int, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penjing.kernels.cpu.functions.CpuExtension.isa", isa)
    model = tiny_model(int8=True, head_dim=head_dim)
    assert resolve_device(EngineConfig(), model.config, is_quantized=True).kv_dtype == kept


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
@pytest.mark.parametrize("command", [["generate", "MODEL", "hi"], ["bench", "engine", "MODEL"], ["serve", "MODEL"]])
def test_the_command_line_says_that_there_is_no_gpu(
    command: list[str], tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(tiny_checkpoint) if word == "MODEL" else word for word in command]
    monkeypatch.setattr(sys, "argv", ["penjing", *words, "--device", "cuda"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code not in (0, None)
    error = capsys.readouterr().err
    assert error.startswith("error: device=cuda cannot run here: no CUDA device")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("how", "settings"),
    [
        ({"num_hidden_layers": 1}, {"kv_dtype": "int8"}),
        ({"offsets": True, "attention_bias": True, "qk_norm": True, "num_hidden_layers": 1}, {}),
        ({"offsets": True, "eight": ("v_proj", "down_proj"), "num_hidden_layers": 1}, {}),
        ({"offsets": True, "activation_bits": 16, "attention_bias": True, "num_hidden_layers": 1}, {}),
    ],
    ids=["a scale a token", "offsets, biases, head norms", "some layers in 8 bits", "activations in bfloat16"],
)
def test_four_bit_weights_answer_as_on_the_processor(how: dict[str, Any], settings: dict[str, Any]) -> None:
    loaded = tiny_int4_model(**how)
    expected_engine = tiny_engine(loaded, **SETTINGS | settings)
    expected = record(expected_engine)
    tokens = answers(expected_engine, PROMPTS)
    engine = device_engine(loaded, **settings)
    assert isinstance(engine.runner, DeviceRunner)
    assert engine.runner._fused is not None
    found = record(engine)
    assert answers(engine, PROMPTS) == tokens
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=0, atol=0.05)  # see INT8 above


def test_zero_points_of_eight_bits_are_kept() -> None:
    loaded = tiny_model(int8=True, num_hidden_layers=1)
    down = loaded.model.get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(down, Int8Linear)
    down.packed = replace(down.packed, zero_points=True)
    runner = device_engine(loaded).runner
    assert isinstance(runner, DeviceRunner)
    assert runner._fused is not None
    assert cast(Any, runner._fused._layers[0].down).packed.zero_points


def test_integers_go_where_their_model_goes() -> None:
    """Where no fused step takes a model, its own layers are moved: what they hold goes along."""
    for loaded in (tiny_model(int8=True), tiny_int4_model(offsets=True)):
        moved = loaded.model.to("meta")
        packed = [module.packed for module in moved.modules() if isinstance(module, (Int8Linear, Int4Linear))]
        tensors = [value for each in packed for value in vars(each).values() if isinstance(value, torch.Tensor)]
        assert len(packed) == 15
        assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize("four", [False, True])
def test_guessed_tokens_change_nothing(four: bool) -> None:
    """Guesses are rows of a step, which no graph takes; what is right is accepted, what is wrong is forgotten."""
    loaded = tiny_int4_model(num_hidden_layers=1) if four else tiny_model(int8=True, num_hidden_layers=1)
    params = {"logit_bias": {8: 40.0, 9: 40.0}, "temperature": 0.8, "seed": 3, "max_tokens": 8}
    prompt = [8, 9, 8, 8, 9, 9]
    expected = answers(device_engine(loaded), [prompt], **params)
    engine = device_engine(loaded, speculate="lookup")
    assert engine.speculation is not None
    engine.speculation.costs = StepCosts({1: 1.01, 64: 1.64})
    assert answers(engine, [prompt], **params) == expected
    stats = engine.stats()
    assert 0 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens
