"""Measure guessed tokens (`speculate=lookup`) beside none, for kinds of requests, in process; appends rows.

    python benchmarks/run_speculation.py                                # some minutes
    python benchmarks/run_speculation.py build/smollm2-int4 --rounds 5
    python benchmarks/run_speculation.py --draft build/smollm2-draft    # `speculate=draft`; rows begin with draft/
    python benchmarks/run_speculation.py --texts news essays            # summaries and questions of other texts

`one_stream_KIND_CHOICE` are tokens a second behind an answer's first token, beside an engine that guesses nothing;
`16_streams_…` ends with the last of 16 answers that begin together, and `each_of_16_…` is the speed of one of them,
which ends when it does. `tokens_a_step_…` counts tokens and not seconds, so that a busy machine does not change it.
Both engines get the same requests in turns, and their answers must be equal. The answers of an earlier turn are
forgotten before the next, or they would be guessed from themselves. Summaries, questions and code have their text from
Python's own help and library; chats have none.
"""

from __future__ import annotations

import argparse
import fnmatch
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from inspect import getsource
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any, NamedTuple

from lib.level import at_level
from lib.models import add_arguments, make_models, say, warn_if_busy
from lib.rows import RESULTS, Row, append, new_row
from lib.texts import SOURCES

from penjing.core.cli import guarded
from penjing.core.errors import ServerError
from penjing.core.text.chat import ChatTemplate
from penjing.serve.engine.config import EngineConfig, Speculate
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams

NEW_TOKENS = 96
LENGTH = 1400  # characters of a text that is asked about
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.7, "top_k": 40, "seed": 1},
}
FUNCTIONS: tuple[Callable[..., Any], ...] = (textwrap.dedent, textwrap.indent, fnmatch.filter, shutil.move)
CHATS = (
    "Tell me about your favourite season and why you like it.",
    "How do I learn to play the guitar as an adult?",
    "What should I cook tonight with rice, eggs and spinach?",
    "Write a short letter to a friend who moved to another country.",
)
FORM = {
    "type": "object",
    "properties": {
        "name_of_the_person": {"type": "string", "maxLength": 20},
        "is_a_registered_member": {"type": "boolean"},
        "preferred_language": {"enum": ["English", "German", "French"]},
        "number_of_orders": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name_of_the_person", "is_a_registered_member", "preferred_language", "number_of_orders"],
    "additionalProperties": False,
}
SPEEDS = tuple(
    prefix + name for prefix in ("", "draft/") for name in ("one_stream", "16_streams", "each_of_16")
)  # not tokens_a_step
OFF = "speculate=off"


class Run(NamedTuple):
    """Seconds from when all answers have begun until the last one ends, and the sum of those until each ends; tokens in
    that time, and all answers."""

    seconds: float
    seconds_of_each: float
    num_tokens: int
    answers: dict[str, list[int]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--draft", type=Path, help="a network that guesses too")
    parser.add_argument("--texts", nargs="+", choices=list(SOURCES), help="ask about these alone, by one stream")
    arguments = parser.parse_args()
    _, artifact = make_models(arguments.checkpoint, arguments.model)
    warn_if_busy()

    def engine(speculate: Speculate, draft: Path | None = None) -> LLMEngine:
        settings = {"enable_prefix_caching": False, "max_num_sequences": 16, "speculate": speculate, "draft": draft}
        return load_engine(artifact, EngineConfig.model_validate(settings))

    off, on = engine("off"), engine("draft" if arguments.draft else "lookup", arguments.draft)
    assert on.speculation is not None
    costs = on.speculation.costs
    say("a step of n rows costs " + ", ".join(f"{n}: {costs.of(n) / costs.of(1):.2f}" for n in costs.rows) + " of one")
    rows: list[Row] = []
    for name, requests in (cases(off) if arguments.texts is None else cases_of(off, arguments.texts)).items():
        measured = measure(name, requests, off, on, arguments.rounds)
        prefix = "draft/" if arguments.draft else ""
        rows += [row.model_copy(update={"metric": prefix + row.metric}) for row in measured]
    append("speculation", at_level(rows, SPEEDS), arguments.results)
    return 0


def cases(engine: LLMEngine) -> dict[str, list[list[Request]]]:
    """By metric the groups of requests that are answered one after the other."""
    texts = [" ".join(topics[name].split())[:LENGTH] for name in ("assert", "lambda", "pass", "global")]
    code = [f"Write this function again with a better docstring:\n\n{getsource(f)}" for f in FUNCTIONS]
    asked = requests_of(engine, asked_about(texts) | {"code": code, "chat": list(CHATS)})
    found = {f"one_stream_{name}": [[request] for request in requests] for name, requests in asked.items()}
    crowd = {
        choice: [each for name, requests in asked.items() if name.endswith(choice) for each in requests]
        for choice in CHOICES
    }
    template = template_of(engine)
    form = SamplingParams.from_json({"temperature": 0.7, "seed": 1, "guided": {"kind": "json_schema", "value": FORM}})
    text = template.render([{"role": "user", "content": "Invent a customer."}])
    found["one_stream_json_sampled"] = [[Request("form", text, form, add_special=False)]] * 4
    return found | {f"16_streams_mixed_{choice}": [requests] for choice, requests in crowd.items()}


def cases_of(engine: LLMEngine, names: list[str]) -> dict[str, list[list[Request]]]:
    """The same of other texts: what is asked of Python's help is asked of four passages of each."""
    prompts: dict[str, list[str]] = {}
    for name in names:
        words = SOURCES[name].text().split()
        passages = [" ".join(words[at : at + LENGTH])[:LENGTH] for at in range(LENGTH, 5 * LENGTH, LENGTH)]
        prompts |= {f"{kind}_of_{name}": questions for kind, questions in asked_about(passages).items()}
    return {f"one_stream_{name}": [[each] for each in asked] for name, asked in requests_of(engine, prompts).items()}


def asked_about(texts: list[str]) -> dict[str, list[str]]:
    return {
        "summary": [f"Summarize this text, keeping its own words:\n\n{text}" for text in texts],
        "question": [f"{text}\n\nWhich sentences of this text say what it is about? Quote them." for text in texts],
    }


def requests_of(engine: LLMEngine, prompts: dict[str, list[str]]) -> dict[str, list[Request]]:
    """Requests by kind and choice."""
    template, found = template_of(engine), dict[str, list[Request]]()
    for kind, questions in prompts.items():
        for choice, asked in CHOICES.items():
            params = SamplingParams.from_json({**asked, "max_tokens": NEW_TOKENS, "ignore_eos": True})
            found[f"{kind}_{choice}"] = [
                Request(f"{kind} {i}", template.render([{"role": "user", "content": text}]), params, add_special=False)
                for i, text in enumerate(questions)
            ]
    return found


def template_of(engine: LLMEngine) -> ChatTemplate:
    if engine.chat_template is None:
        raise ServerError("the model has no chat template; take an instruct model")
    return engine.chat_template


def measure(name: str, groups: list[list[Request]], off: LLMEngine, on: LLMEngine, rounds: int) -> list[Row]:
    speeds: dict[str, list[float]] = {"off": [], "on": []}
    of_each: dict[str, list[float]] = {"off": [], "on": []}
    before = on.stats()
    for turn in range(rounds + 1):
        runs = {"off": run_all(off, groups), "on": run_all(on, groups)}
        if [r.answers for r in runs["off"]] != [r.answers for r in runs["on"]]:
            raise ServerError(f"{name}: the answers differ with guesses and without")
        if turn > 0:  # the first turn warms up
            for which, timed in runs.items():
                num_tokens = sum(r.num_tokens for r in timed)
                speeds[which].append(num_tokens / sum(r.seconds for r in timed))
                of_each[which].append(num_tokens / sum(r.seconds_of_each for r in timed))
    after = on.stats()
    accepted = after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
    generated = after.generation_tokens - before.generation_tokens
    rows = [_speed_row(name, speeds, rounds)]
    if any(len(group) > 1 for group in groups):
        rows.append(_speed_row(name.replace("16_streams", "each_of_16"), of_each, rounds))
    each = name.replace("one_stream", "tokens_a_step").replace("16_streams", "tokens_a_step_16")
    rows.append(new_row("speculation", each, generated / (generated - accepted), "tokens", runs=1))
    times = ", ".join(f"{row.ratio:.2f} times" for row in rows[:-1])
    say(f"{name}: {times}, {rows[-1].value:.2f} tokens a row that was not guessed")
    return rows


def _speed_row(name: str, speeds: dict[str, list[float]], rounds: int) -> Row:
    # Of pairs that ran one after the other: a load that comes and goes meets both.
    ratio = median(a / b for a, b in zip(speeds["on"], speeds["off"], strict=True))
    value = median(speeds["on"])
    return new_row("speculation", name, value, "tok/s", runs=rounds, baseline=OFF, baseline_value=value / ratio)


def run_all(engine: LLMEngine, groups: list[list[Request]]) -> list[Run]:
    if engine.speculation is not None:
        engine.speculation.forget_told()
    return [run(engine, group) for group in groups]


def run(engine: LLMEngine, requests: list[Request]) -> Run:
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    begun, before, ended = None, 0, list[float]()
    while engine.has_work():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            answers[output.request_id] += output.token_ids
            if output.finish_reason:
                ended.append(now)
        if begun is None and all(answers.values()):
            begun, before = now, sum(map(len, answers.values()))
    assert begun is not None, "every answer has a first token"
    num_tokens = sum(map(len, answers.values())) - before
    return Run(ended[-1] - begun, sum(max(each - begun, 0.0) for each in ended), num_tokens, answers)


if __name__ == "__main__":
    sys.exit(guarded(main))
