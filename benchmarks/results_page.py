"""Write docs/results.md, and the table of results in README.md, from benchmarks/results/*.jsonl.

    python benchmarks/results_page.py            # after rows were appended
    python benchmarks/results_page.py --check    # exits 1 where a page is not what the rows say

The README has its table between `<!-- results -->` and `<!-- /results -->`, docs/graphs.md between `<!-- zoo -->` and
`<!-- /zoo -->`. The newest measured row of each metric,
baseline and device counts. This file is also a hook of mkdocs: see `on_files`.
"""

from __future__ import annotations

import argparse
import math
import posixpath
import re
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

from lib.rows import RESULTS, Row, kind, read
from lib.zoo_table import counts, every_cell

from penjing.core.cli import guarded
from penjing.core.errors import InputError

ROOT = RESULTS.parents[1]
PAGE, README = ROOT / "docs" / "results.md", ROOT / "README.md"
BEGIN, END = "<!-- results -->", "<!-- /results -->"
ZOO = "<!-- zoo -->", "<!-- /zoo -->"
INTRO = """# Results
This page is made of the rows that the benchmarks append: `python benchmarks/results_page.py` writes it again.

- A value has three digits. Perplexity, accuracy and other measures of quality have up to four.
- *Beside* names the baseline. The factor is the value divided by what the baseline reached in the same run. Larger is
  better for speeds; smaller is better for times, sizes and losses.
- *Of limit* is the share of what the measured ceilings of the machine allow.
- *Runs* is the number of repetitions behind a value; some values were computed and not measured.
"""
SECTIONS = {  # a title and what "This measures"
    "engine": "Engine: tokens a second, beside other engines in the same rounds: SmolLM2-135M in INT8, and as named.",
    "server": "Server: the same engine through Triton server, beside the engine in process.",
    "front": "HTTP front: OpenAI's interface beside gRPC and the engine in process, and what the front's process uses.",
    "sharing": "Requests beside each other: what a long prompt, another key's crowd and sampling cost the others.",
    "adapters": "Adapters: what LoRA adapters cost 16 answers, in processor time of one thread, on a busy machine.",
    "adapter_quality": "Adapters beside INT8: an adapter of SmolLM2 beside its artifact, and merged before it.",
    "speculation": "Guessed tokens: `speculate=lookup` beside `off` in SmolLM2-135M; `_of_` are texts not tuned on.",
    "screen": "Half of an LM head: greedy steps by a copy of the head in 4 bits, beside steps that read all of it.",
    "kernels_cpu": "CPU kernels: speed beside torch and the memory. `64x576x960` is rows, inputs and outputs.",
    "levels": "AMX and AVX-VNNI: layers and steps of SmolLM2 beside AVX-512 and AVX2; one thread's processor time.",
    "int4": "4-bit weights: kernels, decoder steps, bytes and perplexity of SmolLM2 beside INT8.",
    "int4_quality": "Quality of 4-bit weights: how far perplexity rises, beside llama.cpp's own files of SmolLM2.",
    "kernels_gpu": "GPU kernels: the speed of the Triton-language kernels and of the engine on a GPU.",
    "tensor_parallel": "Several processes: one decoder in several processes beside one, in memory and processor time.",
    "kv_cache": "Key-value cache: the INT8 key-value cache beside the float32 one, in quality, bytes and speed.",
    "long_context": "Long contexts: a window and chosen blocks of keys beside full attention, in SmolLM2-135M.",
    "overhead": "Overhead: what the engine costs beside its kernels, in start-up, memory and time of a step.",
    "compress": "Compression of SmolLM2: INT8 by recipe, with 95 % intervals. `smollm2-int8` has no name before it.",
    "generalisation": "INT8 on other texts: the rise of SmolLM2's perplexity on texts unlike the calibration's, 95 %.",
    "calibration": "Time of calibration: SmolLM2 in INT8, with threads and the machine's load in each row.",
    "vllm_answers": "vLLM: how far its answers are from our engine's of the same integers, and from answers in FP32.",
    "gguf": "GGUF: how far INT8 answers are from llama.cpp's FP32 answers, in llama.cpp and in our engine.",
    "int8": "INT8 classifiers: image classifiers in INT8 beside FP32, in the same ONNX Runtime.",
    "int8_quality": "INT8 after pruning: what INT8 costs a pruned classifier, calibrated (`ptq`) or trained (`qat`).",
    "int8_peers": "INT8 quantizers: one classifier quantized by penjing, ONNX Runtime and NNCF.",
    "graph": "INT8 of imported networks: trained networks of other makers, quantized by penjing and two others.",
    "graph_chain": "The whole chain: imported networks pruned, taught from their own answers, in INT8 and served.",
    "teaching": "Teaching: a pruned network learns its own answers again, judged on pictures that no run saw.",
    "prune": "Pruning: time and memory of pruning a checkpoint, and how much faster the pruned network runs.",
    "prune_quality": "Quality after pruning: accuracy and perplexity of pruned networks, before and after healing.",
    "prune_decoder": "A tenth of a decoder: SmolLM2 on other texts, cut, healed and in INT8, on a busy machine.",
    "vocabulary": "Fewer tokens: decoders whose rarest tokens are spelled by others; `healed` is after training.",
    "encoder": "Text encoder: MiniLM in INT8 beside FP32 and beside ONNX Runtime's dynamic quantizer.",
    "vision_server": "Classifier server: a classifier through Triton server, beside ONNX Runtime in process.",
    "schema_fuzz": "Fuzzing by schema: what schemathesis found in a server by its own OpenAPI document.",
    "load_peer": "Load generators: `penjing bench server --openai` and aiperf, about known times and about a front.",
    "chaos": "Chaos: what faults, leaving clients and random requests did to a server. `Runs` is how many there were.",
    "train": "Training: training steps of penjing beside plain PyTorch loops.",
    "precision": "Precision of training: one recipe trained in each precision from the same start.",
    "search": "Search for settings: the learning rate that successive halving chose, beside a full grid's best.",
    "search_latency": "Latency of a search: how far predictions are off for networks that nothing was fitted to.",
    "joint_search": "Joint search: widths and bits chosen together, how predictions rank, and beside uniform ones.",
    "decoder_search": "Search over a decoder: its layers, widths and bits for each speed; not healed, busy machine.",
    "window_search": "How far back each layer sees: what windows save in a step behind each context; busy machine.",
    "recipes": "Recipes: what whole training runs reach on held-out data, how fast, and in how much memory.",
    "vision_language": "Images and text: what is answered of images never seen, and what images cost other answers.",
    "align": "Alignment: what SmolLM2 learns from conversations, pairs and its own answers, on unseen prompts.",
    "attention": "Attention: steps with sliding windows and LSH beside full attention. A name ends with its tokens.",
    "curate": "Curation of text: signatures, clusters of near duplicates, languages and rules, beside datatrove.",
    "media": "Images to train on: how many one core reads, turns, stores and hashes, beside Pillow. On a busy machine.",
    "it_helps": "Whether curation helps: perplexity of a small decoder after raw text and after what curation kept.",
    "mixing": "Mixtures of domains: perplexity of a small decoder on each domain, by the way that shares are chosen.",
    "semantic_dedup": "Deduplication by meaning: changed copies that are found, and documents taken for others.",
    "quality": "Quality and noise: areas under the ROC curve of the steps `quality` and `noise`, beside fastText.",
    "pii": "Personal data: planted values that are found, `bare` without a word before them, and finds in documents.",
    "remote": "Remote shards: how long a model waits for shards on a slow server; both sleep. On a busy machine.",
    "parallel": "Parallel training: cost and recovery of many processes, and the planner beside published runs.",
}
SHOWN = {  # metrics that are not folded, where not all are shown
    "kernels_cpu": "read_* *_rows *_64x* rms* swiglu* paged* decoder*",
    "int8_quality": "*accuracy *points*",
    "int8_peers": "*accuracy *agreement *kl *bytes *milliseconds",
    "prune_quality": "*_dense_* *healed* *points* smollm2*",
    "prune_decoder": "*worst* *decode published*",
    "attention": "*_16384",
    "parallel": "error* traffic* memory:*processes* step:*process step:*[0-9] bubble:*sleeping* overlap* recovery*",
}
HEADLINES = [  # of the README: title, benchmark, what the names of its metrics begin with, and the metrics
    ("SmolLM2-135M in INT8, prompt of 512 tokens", "engine", "", "prefill_512"),
    ("… one stream", "engine", "", "one_stream"),
    ("… 16 streams, prompts included", "engine", "", "streams_16"),
    ("… 16 streams with AVX2 alone", "engine", "avx2/", "streams_16"),
    ("… 16 streams through Triton server", "server", "", "streams_16"),
    ("SmolLM2-135M by `smollm2-int8-hadamard`: size", "compress", "smollm2-int8-hadamard/", "size"),
    ("… rise of perplexity (95 %)", "compress", "smollm2-int8-hadamard/perplexity_", "prose_rise code_rise"),
    ("… on the worst of four other kinds of text", "generalisation", "smollm2-int8-hadamard/", "worst_rise"),
    ("… by `smollm2-int8`, which other engines load too", "generalisation", "smollm2-int8/", "worst_rise"),
    (
        "Gemma 3 270M by `gemma3-int8`, on the worst of ten texts",
        "generalisation",
        "gemma3-int8/",
        "czech_rise",
    ),
    ("SmolLM2-135M in 4 bits, one stream", "engine", "int4/", "one_stream"),
    (
        "… off its published grid, by `smollm2-int4-qat`: rise of perplexity",
        "compress",
        "smollm2-int4-qat/perplexity_",
        "prose_rise code_rise",
    ),
    ("… on the worst of four other kinds of text", "generalisation", "smollm2-int4-qat/", "worst_rise"),
    ("SmolLM2-135M behind 16 384 tokens, chosen blocks of keys", "long_context", "", "decode_16384_float32_blocks"),
    ("ResNet-8 on Fashion-MNIST, pruned, in INT8", "int8", "fashion/recipe/", "accuracy size throughput"),
    ("MiniLM in INT8", "encoder", "onnxruntime-cpu/int8/", "cosine_mean throughput"),
    ("Training a decoder in BF16", "train", "", "decoder_bf16"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is not current")
    check = parser.parse_args().check
    stale = update(check=check)
    for path in stale:
        state = "is not what the rows say; run: python benchmarks/results_page.py" if check else "written"
        print(f"{path.relative_to(ROOT)} {state}", file=sys.stderr if check else sys.stdout)
    return int(check and bool(stale))


def update(folder: Path = RESULTS, page: Path = PAGE, readme: Path = README, check: bool = False) -> list[Path]:
    """The pages that are not what the rows of `folder` say, written unless `check`.

    Raises:
        ConfigError: a line is no row; names file and line.
        InputError: a row of the README's table is missing, or one of its two markers.
    """
    wanted = {page: results_page(folder)}
    tables = {readme: (BEGIN, END, readme_table), page.with_name("graphs.md"): (*ZOO, zoo_counts)}
    for path, (begin, end, table) in tables.items():
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if begin in text or end in text:
            before, _, rest = text.partition(begin)
            _, found, after = rest.partition(end)
            if not found:
                raise InputError(f"{path} needs {begin} and, after it, {end}")
            wanted[path] = f"{before}{begin}\n{table(folder)}\n{end}{after}"
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in [] if check else stale:
        path.write_text(wanted[path], encoding="utf-8")
    return stale


def results_page(folder: Path = RESULTS) -> str:
    """The Markdown of docs/results.md."""
    names = {path.stem for path in folder.glob("*.jsonl")}
    every = {name: read(name, folder) for name in [*SECTIONS, *sorted(names - SECTIONS.keys())] if name in names}
    zoo = every.pop("zoo", [])
    sections = [_section(name, rows) for name, rows in every.items() if any(row.value is not None for row in rows)]
    return "\n".join([INTRO, *sections, *_zoo_section(zoo), *_unmeasured(every)]).rstrip() + "\n"


def zoo_counts(folder: Path = RESULTS) -> str:
    """The table for docs/graphs.md, as Markdown."""
    return counts(read("zoo", folder))


def newest(rows: Sequence[Row]) -> list[Row]:
    """The newest measured row of each metric, kind of baseline and device; of equal dates the last.

    Where a command ran again, what it no longer appends (a baseline under an old name) does not count.
    """
    found: dict[tuple[Any, ...], Row] = {}
    last: dict[tuple[Any, ...], Row] = {}
    for row in sorted((row for row in rows if row.value is not None), key=lambda row: row.date):
        found[row.metric, kind(row.baseline), _device(row)] = row
        last[row.metric, row.command, _device(row)] = row
    kept = {id(row) for row in found.values() if row.date == last[row.metric, row.command, _device(row)].date}
    metrics = [row.metric for row in rows]
    return sorted((row for row in rows if id(row) in kept), key=lambda row: metrics.index(row.metric))


def number(value: float, digits: int = 3) -> str:
    """`value` with this many digits, thousands separated: 2129 → "2,130"."""
    if not 1e-4 <= abs(value) < 1e12:
        return f"{value:.{digits}g}"
    decimals = digits - 1 - math.floor(math.log10(abs(float(f"{value:.{digits}g}"))))
    return f"{round(value, decimals):,.{max(decimals, 0)}f}"


def amount(value: float, unit: str) -> str:
    """`value` and its unit as a reader likes them: 1.92e8 bytes → "192 MB", 0.9302 share → "93.02 %"."""
    if unit == "%" or unit.split()[0] == "share":
        value, of = (value, "") if unit == "%" else (100 * value, unit.removeprefix("share"))
        return f"{number(value, 4 if abs(value) >= 10 else 3)} %{of}"
    if unit == "s" and 0 < abs(value) < 0.1:
        value, unit = 1000 * value, "ms"
    scales = ["kB", "MB", "GB", "TB"] if unit in {"B", "bytes"} else ["", f"million {unit}", f"billion {unit}"]
    power = int(math.log10(max(abs(value), 1)) // 3)
    if unit in {"B", "bytes", "MACs", "parameters"} and power and scales[power - 1]:
        value, unit = value / 1000**power, scales[power - 1]
    return f"{number(value, 4 if unit in {'perplexity', 'cosine', 'nats'} else 3)} {unit}"


def times(row: Row) -> str:
    """A row's ratio; near 1, where a perplexity's rise would vanish, with all digits of the row."""
    return "" if row.ratio is None else f"{number(row.ratio, 4 if 0.95 < row.ratio < 1.05 else 3)} ×"


def table(rows: Sequence[Row], spreads: dict[int, str], places: bool = False) -> str:
    """A Markdown table, with device and date where the rows differ in it, or all over if `places`."""
    columns = {
        "Metric": [row.metric for row in rows],
        "Value": [amount(row.value or 0.0, row.unit) + spreads.get(id(row), "") for row in rows],
        "Beside": [" ".join(part for part in (times(row), row.baseline) if part) for row in rows],
        "Of limit": ["" if row.share_of_limit is None else f"{100 * row.share_of_limit:.0f} %" for row in rows],
        "Runs": [str(row.runs or "computed") for row in rows],
        "Device": [_device(row) for row in rows],
        "Date": [_day(row) for row in rows],
    }
    shown = [name for name, cells in columns.items() if any(cells)]
    shown = [name for name in shown if places or name not in {"Device", "Date"} or len(set(columns[name])) > 1]
    marks = ["--:" if name in {"Value", "Of limit", "Runs"} else "---" for name in shown]
    lines = [shown, marks, *zip(*(columns[name] for name in shown), strict=True)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def readme_table(folder: Path = RESULTS) -> str:
    """The headline figures for the README, as Markdown.

    Raises:
        InputError: one of them has no measured row of a processor.
    """
    used: list[Row] = []
    lines = ["| | penjing | beside, in the same run |", "|---|---|---|"]
    for title, name, start, metrics in HEADLINES:
        measured, spreads = _spreads([row for row in newest(read(name, folder)) if not _on_gpu(row)])
        values, beside = [], []
        for metric in metrics.split():
            rows = [row for row in measured if row.metric == start + metric]
            if not rows:
                raise InputError(f"the README's table needs a measured row {start + metric} in {folder / name}.jsonl")
            if metric.endswith("_rise"):  # what is lost is the processor's that loses most, not the newest's
                rows = [max(rows, key=lambda row: row.value or 0.0)]
            rows = [row for row in rows if row.date == max(row.date for row in rows)]
            said = amount(rows[0].value or 0.0, rows[0].unit) + spreads.get(id(rows[0]), "")
            values.append(f"{said} {metric.removesuffix('_rise')}" if metric.endswith("_rise") else said)
            rows = sorted((row for row in rows if row.ratio), key=lambda row: row.ratio or 0.0)
            beside += [f"{times(row)} {kind(row.baseline)}" for row in rows]
            used += rows
        lines.append(f"| {title} | {'; '.join(values)} | {'; '.join(beside)} |")
    days = sorted({_day(row) for row in used})
    where = "; ".join(dict.fromkeys(map(_device, used)))
    when = " to ".join(dict.fromkeys([days[0], days[-1]]))
    return "\n".join([*lines, "", f"Measured on {where}; {when}. All rows are on the [results page](docs/results.md)."])


def on_files(files: Any, config: Any) -> None:
    """Hook of mkdocs: a file of the repository that a page links to is copied into the site, under `repository/`."""
    mkdocs = import_module("mkdocs.structure.files")
    for page in files.documentation_pages():
        for target in re.findall(r"\]\((\.\.?/[^)#\s]+)", page.content_string):
            uri = posixpath.normpath(posixpath.join(posixpath.dirname(page.src_uri), target))
            path = (Path(config.docs_dir) / uri).resolve()
            if uri.startswith("../") and path.is_file() and path.is_relative_to(ROOT) and uri not in files.src_uris:
                copied = mkdocs.InclusionLevel.INCLUDED
                file = mkdocs.File.generated(config, uri, abs_src_path=str(path), inclusion=copied)
                file.dest_uri = f"repository/{path.relative_to(ROOT).as_posix()}"
                file.is_documentation_page = lambda: False  # a .md is copied as it is, too
                files.append(file)


def _section(name: str, rows: list[Row]) -> str:
    title, says = SECTIONS.get(name, f"{name}: what its script describes.").split(": ", 1)
    kept, spreads = _spreads(newest(rows))
    device = {(row.metric, _on_gpu(row)): _device(row) for row in sorted(kept, key=lambda row: row.date)}
    here = [row for row in kept if _device(row) == device[row.metric, _on_gpu(row)]]
    elsewhere = [row for row in kept if row not in here]
    shown = [row for row in here if any(fnmatch(row.metric, like) for like in SHOWN.get(name, "*").split())] or here
    commands = list(dict.fromkeys(f"`{row.command}`" for row in here))
    if len(commands) > 2:
        commands = list(dict.fromkeys(f"`{' '.join(row.command.split()[:2])}`" for row in here))
        commands[-1] += ", with the options that each row names,"
    lines = [
        f"## {title}",
        f"This measures {says}",
        f"{' and '.join(commands)} {'measure' + 's' * (len(commands) == 1)} it again.",
        "",
    ]
    devices, days = {_device(row) for row in shown}, {_day(row) for row in shown}
    same = [values.pop() for values in (devices, days) if len(values) == 1]
    lines += [f"It was measured on {', on '.join(same)}.", ""] if same else []
    lines += [table(shown, spreads), ""]
    more = [row for row in here if row not in shown]
    for folded, what in ((more, "Further metrics"), (elsewhere, "Earlier rows of other devices")):
        if folded:
            summary = f'<details markdown="1"><summary>{what}: {len(folded)}</summary>'
            lines += [summary, "", table(folded, spreads, folded is elsewhere), "", "</details>", ""]
    return "\n".join([*lines, f"All {len(rows)} rows are in [{name}.jsonl](../benchmarks/results/{name}.jsonl).", ""])


def _zoo_section(rows: list[Row]) -> list[str]:
    """✓ or a reason for each cell; a cell without a value is measured, too."""
    if not rows:
        return []
    return [
        "## Any network",
        "This counts which networks each tool takes. `python benchmarks/run_zoo.py` measures it again.",
        "",
        counts(rows),
        "",
        '<details markdown="1"><summary>Every cell</summary>',
        "",
        every_cell(rows),
        "",
        "</details>",
        "",
        f"All {len(rows)} rows are in [zoo.jsonl](../benchmarks/results/zoo.jsonl).",
        "",
    ]


def _spreads(rows: list[Row]) -> tuple[list[Row], dict[int, str]]:
    """Rows without those of a spread (`_sd`, `_low`, `_high`), and what these add to another row's value, by its id."""
    values = {(row.metric, _device(row)): number(row.value or 0.0) for row in rows}
    found, told = {}, set()
    for row in rows:
        names = [(f"{row.metric}_{end}", _device(row)) for end in ("sd", "low", "high")]
        sd, low, high = (values.get(name) for name in names)
        if sd or (low and high):
            found[id(row)] = f" ± {sd}" if sd else f" ({low} to {high})"
            told.update(names)
    return [row for row in rows if (row.metric, _device(row)) not in told], found


def _unmeasured(every: dict[str, list[Row]]) -> list[str]:
    """A table of the metrics that no device has a value of."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, rows in every.items():
        measured = {row.metric for row in rows if row.value is not None}
        for metric, reason in {row.metric: row.reason for row in rows if row.metric not in measured}.items():
            groups.setdefault((name, (reason or "").removeprefix("not measured: ")), []).append(f"`{metric}`")
    lines = ["## Not measured", "No device has a value of these metrics yet.", ""]
    lines += ["| Benchmark | Metrics | Reason |", "|---|---|---|"]
    for (name, reason), metrics in groups.items():
        rest = f" and {len(metrics) - 3} more" if len(metrics) > 3 else ""
        lines.append(f"| [{name}](../benchmarks/results/{name}.jsonl) | {', '.join(metrics[:3])}{rest} | {reason} |")
    return lines if groups else []


def _on_gpu(row: Row) -> bool:
    return "NVIDIA" in row.device


def _device(row: Row) -> str:
    return row.device if row.cores == 1 else f"{row.device}, {row.cores} cores"


def _day(row: Row) -> str:
    return f"{row.date:%Y-%m-%d}"


if __name__ == "__main__":
    sys.exit(guarded(main))
