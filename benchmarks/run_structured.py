"""Ask a served model for JSON by many schemas through OpenAI's own package, and count what parses; appends rows.

    python benchmarks/run_structured.py                 # ten minutes
    python benchmarks/run_structured.py --schemas 20    # one

Each of the schemas of `lib/front_schemas.py` is asked for with five seeds at temperature 1, as `response_format`,
strict, 16 at a time. `structured/valid` is the share of all answers that `json` parses and `jsonschema` finds valid,
formats included. `structured/cut` are answers that met `max_tokens`, of which nothing is promised; they are not valid.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import Counter
from pathlib import Path
from statistics import median

from lib.chaos_server import Patient, served
from lib.front_schemas import fault, make_schema
from lib.models import add_arguments, make_models, say
from lib.rows import RESULTS, append, new_row
from openai import APIError, AsyncOpenAI

from penjing.core.cli import guarded

SEEDS = 5
STREAMS = 16
MAX_TOKENS = 1024
PROMPT = "Invent a record of a tree in a garden, as JSON."
SHOWN = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--schemas", type=int, default=200, help="how many of them")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    _, artifact = make_models(arguments.checkpoint, arguments.model)
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    with served(artifact, f"max_num_sequences={STREAMS}") as patient:
        ends, tokens = asyncio.run(ask_all(patient, arguments.schemas))
    count = sum(ends.values())
    rows = [new_row("front", "structured/valid", 100 * ends["valid"] / count, "%", runs=count)]
    for name, end in {"cut": "cut", "not_json": "not json", "not_valid": "not valid", "errors": "error"}.items():
        rows.append(new_row("front", f"structured/{name}", ends[end], "answers", runs=count))
    rows.append(new_row("front", "structured/length", median(tokens), "tokens", runs=count))
    append("front", rows, arguments.results)
    return 0


async def ask_all(patient: Patient, schemas: int) -> tuple[Counter[str], list[int]]:
    """How the answers ended, and how many tokens each has."""
    ends: Counter[str] = Counter()
    tokens: list[int] = []
    places = asyncio.Semaphore(STREAMS)

    async def ask(client: AsyncOpenAI, number: int, seed: int) -> None:
        async with places:
            end, length, text = await one(client, patient.model, number, seed)
        ends[end] += 1
        tokens.append(length)
        if end != "valid":
            say(f"schema {number}, seed {seed}: {end}: {text[:SHOWN]}")
        if sum(ends.values()) % 100 == 0:
            say(f"{sum(ends.values())}/{SEEDS * schemas}: {dict(ends)}")

    address = f"http://127.0.0.1:{patient.front_port}/v1"
    async with AsyncOpenAI(base_url=address, api_key="none", max_retries=0, timeout=600) as client:
        await asyncio.gather(*(ask(client, number, seed) for number in range(schemas) for seed in range(SEEDS)))
    return ends, tokens


async def one(client: AsyncOpenAI, model: str, number: int, seed: int) -> tuple[str, int, str]:
    """One answer: how it ended, its tokens, and what there is to show of it."""
    schema = make_schema(number)
    try:
        answer = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": PROMPT}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": f"record{number}", "strict": True, "schema": schema},
            },
            temperature=1.0,
            seed=seed,
            max_tokens=MAX_TOKENS,
        )
    except APIError as error:
        return "error", 0, str(error)
    choice, usage = answer.choices[0], answer.usage
    text, length = choice.message.content or "", 0 if usage is None else usage.completion_tokens
    if choice.finish_reason == "length":
        return "cut", length, text
    try:
        wrong = fault(text, schema)
    except ValueError as error:
        return "not json", length, f"{error}: {text}"
    return ("valid", length, text) if wrong is None else ("not valid", length, wrong)


if __name__ == "__main__":
    sys.exit(guarded(main))
