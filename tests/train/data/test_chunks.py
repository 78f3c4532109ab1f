"""Windows that overlap: every token a target once, context of its own document alone, and transformers' recipe."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penjing.core.errors import ConfigError, InputError
from penjing.core.text.tokenizer import Tokenizer
from penjing.train.data.chunks import ChunkRows, cut, seams
from penjing.train.data.shards import ShardIndex, ShardWriter, TokenShards, read_index, write_index
from penjing.train.data.stream import one_pass, shuffled
from penjing.train.data.tokens import TokenRows
from penjing.train.objective.objective import IGNORED

END, LINE, STOP = 0, 1, 2
SEAMS = np.array([4, 2, 1] + [0] * 97, np.int8)


def shards_of(folder: Path, tokens: list[int], begin: tuple[int, ...] = ()) -> TokenShards:
    writer = ShardWriter(folder, "train", 100, shard_tokens=37)
    writer.add(tokens)
    splits = {"train": writer.close()}
    index = ShardIndex(dtype="uint16", vocab_size=100, end_of_text=END, begin_of_text=begin, splits=splits)
    write_index(folder, index)
    return TokenShards(folder, "train")


@given(
    tokens=st.lists(st.sampled_from([END, LINE, STOP, *range(3, 20)]), min_size=2, max_size=200),
    length=st.integers(1, 40),
    overlap=st.integers(0, 39),
    hybrid=st.booleans(),
    before=st.integers(0, 2),
)
@settings(max_examples=150, deadline=None)
def test_every_token_is_a_target_once(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int], length: int, overlap: int, hybrid: bool, before: int
) -> None:
    overlap = min(overlap, length - 1)
    shards = shards_of(tmp_path_factory.mktemp("s"), tokens, (50, 51)[:before])
    chunks = cut(shards, length, overlap, SEAMS if hybrid else None)
    whole = ChunkRows(shards, chunks, before + length, document_mask=True).read(range(len(chunks.begins)))
    assert whole["tokens"][:, :before].tolist() == [[50, 51][:before]] * len(chunks.begins)
    assert (whole["targets"][:, :before] == IGNORED).all()
    batch = {name: tensor[:, before:] for name, tensor in whole.items()}
    targets = batch["targets"]
    assert targets[targets != IGNORED].tolist() == tokens[1:]
    for row, (context, begin, end) in enumerate(zip(chunks.context, chunks.begins, chunks.ends, strict=True)):
        assert batch["tokens"][row, : end - 1 - context].tolist() == tokens[context : end - 1]
        known = tokens[context:begin]
        assert END not in known[1:] or overlap == 0 or known[0] == END  # nothing of an earlier document
        assert len(known) - 1 <= overlap
        assert len(known) - 1 == overlap or context == 0 or tokens[context] == END


def test_rows_begin_as_a_text_does(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, list(range(41)), (50, 51))
    rows = TokenRows(shards, 10, document_mask=True)
    assert len(rows) == 5
    batch = rows.read([0, 4])
    for name, more in (("tokens", 0), ("targets", 1)):
        before = [50, 51] if name == "tokens" else [IGNORED] * 2
        assert batch[name].tolist() == [[*before, *range(first + more, first + more + 8)] for first in (0, 32)]
    assert batch["documents"].shape == (2, 10)
    with pytest.raises(ConfigError, match=r"data\.sequence_length=2 has no room behind what begins a text"):
        TokenRows(shards, 2)
    text = (tmp_path / "index.json").read_text()
    for wrong in (-1, 100):
        (tmp_path / "index.json").write_text(text.replace("50,", f"{wrong},", 1))
        with pytest.raises(InputError, match=f"{wrong} is outside the vocabulary"):
            read_index(tmp_path)


def test_windows_end_at_the_best_seam(tmp_path: Path) -> None:
    text = [5] * 6 + [STOP] + [5] * 2 + [LINE] + [5] * 3 + [STOP] + [5] * 4 + [STOP] + [5] * 30
    chunks = cut(shards_of(tmp_path, text), 16, 4, SEAMS)
    assert chunks.ends[0] == 10  # behind the line, though a sentence ends later
    assert chunks.context[1] == 10 - 1 - 4
    assert chunks.ends[1] == 19  # a sentence in the second half of what fits
    assert chunks.ends[2] - chunks.begins[2] == 12  # nothing to cut at


def test_cost_is_window_over_window_less_overlap(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, [5] * 20_000)
    chunks = cut(shards, 64, 16, None)
    assert len(chunks.begins) * 64 / 20_000 == pytest.approx(64 / (64 - 16), rel=0.02)


def test_what_leaves_no_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.chunks.overlap=8 leaves a window of data.sequence_length=8 no target"):
        cut(shards_of(tmp_path, [5] * 20), 8, 8, None)


def test_strided_perplexity_is_that_of_transformers_recipe(tmp_path: Path) -> None:
    """https://huggingface.co/docs/transformers/perplexity, with max_length = 24 and stride = 10."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(1, 100, (1, 131))
    max_length, stride = 24, 10
    total, count, previous = 0.0, 0, 0
    with torch.no_grad():
        for begin in range(0, tokens.size(1), stride):
            end = min(begin + max_length, tokens.size(1))
            new = end - previous
            inputs = tokens[:, begin:end]
            targets = inputs.clone()
            targets[:, :-new] = -100
            valid = int((targets[:, 1:] != -100).sum())
            total += float(model(inputs, labels=targets).loss) * valid
            count, previous = count + valid, end
            if end == tokens.size(1):
                break
        shards = shards_of(tmp_path, tokens[0].tolist())
        chunks = cut(shards, max_length - 1, max_length - 1 - stride, None)
        ours, targets_seen = 0.0, 0
        for batch in one_pass(ChunkRows(shards, chunks, max_length - 1), 1000, micro_batch=3):
            logits = model(batch["tokens"]).logits
            flat = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED, reduction="sum"
            )
            ours, targets_seen = ours + float(flat), targets_seen + int((batch["targets"] != IGNORED).sum())
    assert targets_seen == count == 130
    assert ours / count == pytest.approx(total / count, abs=1e-5)


def test_streams_agree_over_processes(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, [5, 6, 7, LINE] * 100)
    rows = ChunkRows(shards, cut(shards, 16, 4, SEAMS), 16)
    one = shuffled(rows, batch_size=8, micro_batch=8, seed=2)
    two = [shuffled(rows, batch_size=8, micro_batch=4, rank=r, world_size=2, seed=2) for r in (0, 1)]
    for _ in range(3):
        assert torch.equal(next(one)["targets"], torch.cat([next(each)["targets"] for each in two]))


def test_seams_are_read_from_the_tokenizer(shards: Path) -> None:
    tokenizer = Tokenizer.from_folder(shards)
    found = seams(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids[0])
    assert found[tokenizer.eos_token_ids[0]] == 4
    assert found[tokenizer.encode("\n")[-1]] in (2, 3)
    assert found[tokenizer.encode(".")[-1]] == 1
    assert found[tokenizer.encode("a")[-1]] == 0


def test_a_run_takes_windows_that_overlap(recipe: Path, tmp_path: Path) -> None:
    from penjing.train.run import train

    changes = [f"output={tmp_path}/chunked", "data.chunks.overlap=8", "steps=2"]
    assert train(recipe, changes)["loss"] > 0
    with pytest.raises(ConfigError, match=r"data.mixing and data.chunks exclude each other"):
        train(recipe, [*changes, f"output={tmp_path}/both", "data.mixing.kind=fixed"])
    with pytest.raises(ConfigError, match=r"data.chunks.overlap=24 leaves a window"):
        train(recipe, [f"output={tmp_path}/none", "data.chunks.overlap=24"])
