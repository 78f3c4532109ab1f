"""answers_vllm.py FOLDER ASKED ANSWERED THREADS: what vLLM for CPU answers, in JSON; `run_vllm_answers.py` reads it.

ASKED has `prompts` and `texts`, lists of token ids, and `new`. ANSWERED has `name`; `answers`, `new` tokens behind each
prompt, greedily; and `read`, of each text a list of [log-probability, rank] of every token but the first.
"""

# pyright: reportMissingImports=false

import json
import sys
from pathlib import Path

from vllm_engine import full_name, preload, start


def main(folder: str, asked: Path, answered: Path, threads: int) -> None:
    model = start(folder, threads, enforce_eager=True)  # starts in a quarter of the time; nothing is timed
    from vllm import SamplingParams

    wanted = json.loads(asked.read_text())

    def generate(batch, **params):
        settings = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **params)
        return model.generate([{"prompt_token_ids": ids} for ids in batch], settings, use_tqdm=False)

    answers = [list(found.outputs[0].token_ids) for found in generate(wanted["prompts"], max_tokens=wanted["new"])]
    read = []
    for ids, found in zip(wanted["texts"], generate(wanted["texts"], max_tokens=1, prompt_logprobs=1), strict=True):
        known = [row[token] for token, row in zip(ids[1:], found.prompt_logprobs[1:], strict=True)]
        read.append([[each.logprob, each.rank] for each in known])
    answered.write_text(json.dumps({"name": full_name(folder), "answers": answers, "read": read}))


if __name__ == "__main__":
    preload()
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
