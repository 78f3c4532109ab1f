"""Measure what requests cost each other in one engine, in process; appends rows.

    python benchmarks/run_sharing.py          # some minutes

`gap_…` is the time between two tokens of 15 running answers while a prompt of 1 900 tokens comes in, with steps of a
time target and with steps of 512 tokens. `first_token_…` is what one request waits for its first token while another
key has 500 requests, beside the same request alone. `decode_…` are tokens a second of 16 answers by what they ask of
sampling: nucleus, scores, a JSON schema, and 16 schemas that nobody wrote by hand, after prompts that ask for records.
Contestants are interleaved; rows are medians of the rounds. With `--processor-time` these alone are measured, by the
processor time of the whole process, which other work on the machine disturbs less; masks, which are computed beside the
step, count in full then. Threads that wait for each other use processor time too, so give it one: `OMP_NUM_THREADS=1`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from lib.front_schemas import make_schema
from lib.models import add_arguments, make_models, say, warn_if_busy
from lib.rows import RESULTS, Row, append, new_row

from penjing.core.cli import guarded
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams

LONG_PROMPT, NUM_ANSWERS, NEW_TOKENS = 1900, 15, 48
CROWD, PROBES = 500, 5
SCHEMA = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}
FORM = {"kind": "json_schema", "value": SCHEMA}


def record_prompt(number: int) -> str:
    """A prompt after which a model may write a record."""
    return f"Invent {number + 2} records of trees in a garden, as JSON:\n"


def other_form(number: int) -> dict[str, Any]:
    """A long list by a schema that nobody wrote by hand, another for each number."""
    plain = (schema for seed in count(1000 * (number + 1)) if "$defs" not in (schema := make_schema(seed)))
    return {"kind": "json_schema", "value": {"type": "array", "minItems": 100, "items": next(plain)}}


# Of each answer; what is a function gets the answer's number.
DECODE: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "top_p": 0.9},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "free": {"temperature": 0.8},
    "json_schema": {"temperature": 0.8, "guided": FORM},
    "json_schema_top_p": {"temperature": 0.8, "top_p": 0.9, "guided": FORM},
    "free_records": {"temperature": 0.8, "prompt": record_prompt},
    "other_schemas": {"temperature": 0.8, "prompt": record_prompt, "guided": other_form},
}
BESIDE = {"json_schema": "free", "json_schema_top_p": "top_p", "other_schemas": "free_records"}  # others: greedy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--processor-time", action="store_true", help="tokens a second of processor time; see above")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    _, artifact = make_models(arguments.checkpoint, arguments.model)
    warn_if_busy()

    def engine(**settings: Any) -> LLMEngine:
        return load_engine(artifact, EngineConfig(enable_prefix_caching=False, **settings))

    if arguments.processor_time:
        alone = engine(max_num_sequences=16)
        medians = measured(
            {name: lambda asked=asked: decode(alone, asked, time.process_time) for name, asked in DECODE.items()},
            arguments.rounds,
        )
        append("sharing", decode_rows(medians, arguments.rounds, "processor_16_"), arguments.results)
        return 0
    paced, unpaced = engine(max_num_sequences=16), engine(max_num_sequences=16, max_step_seconds=0.0)
    crowded = engine(max_num_sequences=16)
    contestants: dict[str, Callable[[], float]] = {
        "gap_paced": lambda: gap(paced, LONG_PROMPT),
        "gap_unpaced": lambda: gap(unpaced, LONG_PROMPT),
        "gap_without": lambda: gap(paced, 0),
        "first_alone": lambda: first_token(crowded, 0),
        "first_beside": lambda: first_token(crowded, CROWD),
    }
    contestants |= {f"decode_{name}": lambda asked=asked: decode(paced, asked) for name, asked in DECODE.items()}
    medians = measured(contestants, arguments.rounds)
    append("sharing", sharing_rows(medians, arguments.rounds), arguments.results)
    return 0


def measured(contestants: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Medians of interleaved rounds."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, measure in contestants.items():
            value = measure()
            if turn > 0:  # the first turn warms up, and the pace learns
                found[name].append(value)
        say(f"round {turn}/{rounds}")
    return {name: median(values) for name, values in found.items()}


def prompt_of(number: int, length: int) -> list[int]:
    return [100 + (7919 * number + 31 * position) % 40_000 for position in range(length)]


def gap(engine: LLMEngine, long_prompt: int) -> float:
    """The 99th percentile of seconds between two tokens of answers that run when a prompt of so many tokens comes."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for number in range(NUM_ANSWERS):
        engine.add(Request(f"{number}", prompt_of(number, 32), params))
    for _ in range(8):
        engine.step()
    if long_prompt:
        short = params.model_copy(update={"max_tokens": 1})
        engine.add(Request("long", prompt_of(99, long_prompt), short))
    gaps, last = [], time.perf_counter()
    while engine.has_work():
        outputs = engine.step()
        now = time.perf_counter()
        gaps += [now - last for output in outputs if output.request_id != "long"]
        last = now
    return sorted(gaps)[len(gaps) * 99 // 100]


def first_token(engine: LLMEngine, crowd: int) -> float:
    """Median seconds that requests of one key wait for their first token, one after the other."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for number in range(crowd):
        engine.add(Request(f"crowd {number}", prompt_of(number, 64), params, key="crowd"))
    for _ in range(30 if crowd else 0):
        engine.step()
    waits = []
    for probe in range(PROBES):
        name, started = f"probe {probe}", time.perf_counter()
        engine.add(Request(name, prompt_of(1000 + probe, 64), params, key="other"))
        while not any(output.request_id == name for output in engine.step()):
            pass
        waits.append(time.perf_counter() - started)
        while engine.is_active(name):
            engine.step()
    engine.abort_all()
    return median(waits)


def decode(engine: LLMEngine, asked: dict[str, Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Tokens of 16 answers a second of `clock`, prompts left out."""
    for number in range(16):
        own: dict[str, Any] = {name: value(number) if callable(value) else value for name, value in asked.items()}
        prompt = own.pop("prompt", prompt_of(number, 32))
        params = SamplingParams.from_json({"seed": 1, "max_tokens": NEW_TOKENS, "ignore_eos": True, **own})
        engine.add(Request(f"{number}", prompt, params))
    engine.step()
    started, tokens = clock(), 0
    while engine.has_work():
        tokens += sum(len(output.token_ids) for output in engine.step())
    return tokens / (clock() - started)


def sharing_rows(values: dict[str, float], runs: int) -> list[Row]:
    """Rows from the medians; see the top of this file."""
    gap_rows = [
        new_row(
            "sharing", "gap_p99_beside_1900_tokens", 1000 * values["gap_paced"], "ms", runs=runs,
            baseline="steps of 512 tokens", baseline_value=1000 * values["gap_unpaced"],
        ),
        new_row(
            "sharing", "gap_p99_alone", 1000 * values["gap_without"], "ms", runs=runs,
        ),
        new_row(
            "sharing", "first_token_beside_500_of_a_key", 1000 * values["first_beside"], "ms", runs=runs,
            baseline="alone", baseline_value=1000 * values["first_alone"],
        ),
    ]  # fmt: skip
    decoded = {name: values[f"decode_{name}"] for name in DECODE}
    return gap_rows + decode_rows(decoded, runs, "decode_16_")


def decode_rows(values: dict[str, float], runs: int, prefix: str) -> list[Row]:
    """Rows of tokens a second, each beside what asks for nothing of the kind."""
    alone = ("greedy", "free", "free_records")
    pairs = {name: BESIDE.get(name, "greedy") for name in DECODE if name not in alone}
    return [
        new_row(
            "sharing", f"{prefix}{name}", values[name], "tok/s", runs=runs,
            baseline=beside, baseline_value=values[beside],
        )
        for name, beside in pairs.items()
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(guarded(main))
