"""bench_trl_align.py JOB: TRL's trainers on the steps that JOB, a JSON file, describes; prints one JSON line.

JOB has "kind" (grpo or sft), "checkpoint", "batch" (prompts or texts of a step), "steps", "threads", "clock" (processor
or wall) and "precision" (fp32 or bf16); of grpo "prompts" (a list of messages each), "samples" and "max_tokens"; of sft
"texts" (a prompt and a completion each) and "length", tokens of a text at most. `trl.sh` makes the environment. Printed
are the seconds of each step behind the first, from the end of one to the end of the next, and of grpo the mean length
of the answers.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": str(job["threads"])}
    import datasets.fingerprint  # pyright: ignore[reportMissingImports]
    import torch
    import trl  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(job["threads"])
    # datasets 5.2 cannot hash its own tables on this torch; nothing here is read from its cache.
    datasets.fingerprint.Hasher.hash = staticmethod(lambda value: uuid.uuid4().hex)
    clock = time.process_time if job["clock"] == "processor" else time.perf_counter
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            ends.append(clock())

    tokenizer = AutoTokenizer.from_pretrained(job["checkpoint"])
    model = AutoModelForCausalLM.from_pretrained(job["checkpoint"], dtype=torch.float32)
    lengths: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        common = {
            "output_dir": folder,
            "max_steps": job["steps"],
            "learning_rate": 1e-6,
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": False,
            "bf16": job["precision"] == "bf16",
            "use_cpu": True,
            "seed": 1,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
        }
        make = sft if job["kind"] == "sft" else grpo
        make(job, common, model, tokenizer, [Clock()], lengths).train()
    seconds = [after - before for before, after in pairwise(ends)]
    found: dict[str, Any] = {"name": f"TRL {trl.__version__} {job['precision']}", "seconds": seconds}
    if lengths:
        found["length"] = sum(lengths) / len(lengths)
    print(json.dumps(found), flush=True)


def grpo(job: dict[str, Any], common: dict[str, Any], model: Any, tokenizer: Any, calls: Any, lengths: Any) -> Any:
    import datasets  # pyright: ignore[reportMissingImports]
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    config = GRPOConfig(
        **common,
        per_device_train_batch_size=job["batch"] * job["samples"],
        num_generations=job["samples"],
        max_completion_length=job["max_tokens"],
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        mask_truncated_completions=False,
    )

    def reward(completion_ids: list[list[int]], **more: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [float(place % 2) for place in range(len(completion_ids))]

    rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in job["prompts"]])
    return GRPOTrainer(
        model=model, reward_funcs=reward, args=config, train_dataset=rows, processing_class=tokenizer, callbacks=calls
    )


def sft(job: dict[str, Any], common: dict[str, Any], model: Any, tokenizer: Any, calls: Any, lengths: Any) -> Any:
    import datasets  # pyright: ignore[reportMissingImports]
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

    config = SFTConfig(**common, per_device_train_batch_size=job["batch"], max_length=job["length"], packing=False)
    rows = datasets.Dataset.from_list(job["texts"])
    return SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer, callbacks=calls)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
