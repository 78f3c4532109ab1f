"""Our GGUF in llama.cpp, where it is built: the artifact's answers; and how its own comparison is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import run_gguf
import torch

from penjing.compress.run import run_recipe
from penjing.core.checkpoint.load import load_model
from penjing.core.cli import _run
from penjing.core.errors import SetupError
from penjing.core.text.tokenizer import Tokenizer
from tests.compress.conftest import write_recipe
from tests.conftest import ROOT

SAID = """\
chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence
Mean PPL(Q)                   :  11.651345 ±   0.470086
Mean PPL(base)                :  11.587933 ±   0.467602
Mean ln(PPL(Q)/PPL(base))     :   0.005457 ±   0.001490
Mean PPL(Q)/PPL(base)         :   1.005472 ±   0.001498
Mean    KLD:   0.003974 ±   0.000058
"""


def test_llama_cpp_answers_as_the_artifact(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    if not run_gguf.TOOL.is_file():
        pytest.skip("llama.cpp is not built; benchmarks/peers/llama_cpp.sh CHECKPOINT builds it")
    out, path, saved = tmp_path / "model.gguf", tmp_path / "text.txt", tmp_path / "logits.bin"
    artifact = run_recipe(write_recipe(tmp_path, tiny_checkpoint, tmp_path / "int8"))
    assert _run(["export", str(artifact), str(out), "--to", "gguf"]) == 0
    text = "".join(f"Line {number}: the quick brown fox says “ö” {number**3} times\n" for number in range(40))
    path.write_text(text, encoding="utf-8")
    options = f"-f {path} -t 1 -c 32 -b 32 --chunks 6".split()
    run_gguf.run_llama(out, [*options, "--save-all-logits", str(saved)])
    found_WRV, tokens_WT = run_gguf.read_logits(saved)
    ids = Tokenizer.from_folder(artifact).encode(text)
    assert tokens_WT.flatten().tolist() == ids[: tokens_WT.numel()]
    with torch.no_grad():
        expected_WRV = load_model(artifact).model(tokens_WT)[:, 16:-1].log_softmax(-1)
    # llama.cpp rounds activations in blocks of 32, the artifact's runtime whole tokens
    assert (found_WRV - expected_WRV).square().mean().sqrt() < 0.1 * expected_WRV.std(-1).mean()
    assert (found_WRV.argmax(-1) == expected_WRV.argmax(-1)).float().mean() > 0.9
    divergence, ratio = run_gguf.of_engine(artifact, saved)
    assert 0 < divergence < 0.05
    assert ratio == pytest.approx(1, abs=0.05)
    with pytest.raises(SetupError, match=r"llama-perplexity failed on .*text\.txt"):
        run_gguf.run_llama(path, options)


def test_what_llama_cpp_says_of_a_comparison_is_read() -> None:
    assert run_gguf.parse_comparison(SAID) == (0.003974, 1.005472)
    with pytest.raises(SetupError, match="compared nothing: loading"):
        run_gguf.parse_comparison("loading")


@pytest.mark.parametrize("vocabulary", [5, 6])
def test_log_probabilities_are_unpacked(tmp_path: Path, vocabulary: int) -> None:
    """Written here as llama.cpp writes them: a step and the least, then 16-bit multiples, rows of an even length."""
    logs = torch.randn(2, 3, vocabulary, generator=torch.Generator().manual_seed(0)).log_softmax(-1).numpy()
    least = logs.min(-1, keepdims=True)
    step = (logs.max(-1, keepdims=True) - least) / 65535
    head = np.concatenate([step, least], -1).astype(np.float32).view(np.uint16)
    codes = np.pad(np.round((logs - least) / step).astype(np.uint16), ((0, 0), (0, 0), (0, vocabulary % 2)))
    sizes = np.array([8, vocabulary, 2], np.int32)
    path = tmp_path / "logits"
    tokens = np.arange(16, dtype=np.int32)
    path.write_bytes(b"_logits_" + sizes.tobytes() + tokens.tobytes() + np.concatenate([head, codes], -1).tobytes())
    found, ids = run_gguf.read_logits(path)
    assert ids.tolist() == tokens.reshape(2, 8).tolist()
    assert np.allclose(found, logs, atol=1e-4)


def test_rows_compare_with_llama_cpp_s_own_file() -> None:
    rows = {
        row.metric: row for row in run_gguf.text_rows("prose", {"llama_cpp": (0.004, 1.005), "ours": (0.002, 1.001)})
    }
    assert rows["prose/ours/divergence"].ratio == pytest.approx(0.5)
    assert rows["prose/llama_cpp/divergence"].ratio is None
    assert rows["prose/ours/perplexity_rise"].value == pytest.approx(0.1)
