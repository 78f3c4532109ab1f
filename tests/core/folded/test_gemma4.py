"""Gemma 4: what the engine says of it, in floats and rounded, what is pruned and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from penjing.compress.prune_decoder.subject import DecoderSubject
from penjing.compress.run import run_recipe
from penjing.compress.verify import verify_artifact
from penjing.compress.vocabulary.smaller import open_whole
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.folded.families import fold_from_hf
from penjing.core.folded.fold import Stretched
from penjing.core.imports.importer import import_model
from penjing.core.runtime.fused import fuse_decoder
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams
from tests.compress.conftest import write_recipe
from tests.compress.decoder.test_families import FOUR
from tests.core.folded.gemma4_cases import GEMMA4_CASES
from tests.core.folded.served import close, of_transformers, served
from tests.core.folded.test_families import save
from tests.core.imports.test_importer import Recorder
from tests.kernels.cpu import needs_extension
from tests.serve.tiny import run_all

TEXT = torch.randint(0, 320, (1, 60), generator=torch.Generator().manual_seed(2))
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "global_head_dim": 32}
WIDE |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
MIXED = WIDE | {"moe_intermediate_size": 32}
SMALL = WIDE | {"hidden_size_per_layer_input": 32, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
SMALL |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
MIMO = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48}
_THETA, _HALF = {"rope_theta": 1e4}, {"partial_rotary_factor": 0.5}
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
SERVED = ("gemma4", "gemma4_scaled", "gemma4_experts", "gemma4_small", "mimo_v2_flash")


@needs_extension
@pytest.mark.parametrize("case", SERVED)
def test_the_engine_says_what_transformers_does(case: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    reference = save(tmp_path / "hf", tiny_checkpoint, *GEMMA4_CASES[case][:2])
    folder = import_model(str(tmp_path / "hf"), tmp_path / "out")
    assert fuse_decoder(load_model(folder).model) is not None
    close(served(folder, TEXT), of_transformers(reference, TEXT))


@needs_extension
def test_answers_are_those_of_transformers(tmp_path: Path, tiny_checkpoint: Path) -> None:
    reference = save(tmp_path / "hf", tiny_checkpoint, *GEMMA4_CASES["gemma4_small"][:2])
    folder = import_model(str(tmp_path / "hf"), tmp_path / "out")
    expected = reference.generate(TEXT[:, :30], max_new_tokens=20, do_sample=False, eos_token_id=None)[0, 30:]
    settings: dict[str, Any] = {"num_blocks": 40, "max_num_sequences": 4, "max_num_batched_tokens": 16}
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    request = Request("a", TEXT[0, :30].tolist(), params)
    (outputs,) = run_all(load_engine(folder, EngineConfig(**settings)), [request]).values()
    assert [token for output in outputs for token in output.token_ids] == expected.tolist()


@needs_extension
@pytest.mark.parametrize(
    ("case", "bits", "bound"),
    [
        ("gemma4", 8, 0.1),
        ("gemma4", 4, 0.7),
        ("gemma4_experts", 8, 0.2),
        ("mimo_v2_flash", 8, 0.2),
        ("gemma4_small", 8, 0.1),
    ],
)
def test_rounded_it_says_nearly_that(case: str, bits: int, bound: float, tmp_path: Path, tiny_checkpoint: Path) -> None:
    kind, changes, _ = GEMMA4_CASES[case]
    wide = MIMO if "mimo" in case else MIXED if "experts" in case else SMALL if "small" in case else WIDE
    reference = save(tmp_path / "hf", tiny_checkpoint, kind, changes | wide)
    folder = import_model(str(tmp_path / "hf"), tmp_path / "out")
    settings = FOUR if bits == 4 else ["steps.0.transform.rotate=false", "steps.0.transform.search_steps=4"]
    artifact = run_recipe(write_recipe(tmp_path, folder, tmp_path / "int"), [*settings, "guard.perplexity_ratio=9"])
    verify_artifact(artifact)
    model = load_model(artifact).model
    assert fuse_decoder(model) is not None
    with torch.no_grad():
        whole, rounded = reference(TEXT).logits, model(TEXT)
    # Of most tokens: for some a router chooses another expert.
    error_T = (whole - rounded).square().mean(-1).sqrt()
    assert float(error_T.median()) < bound * float(whole.std())


def test_smaller_heads_get_zeros_and_fewer_are_repeated(tmp_path: Path, tiny_checkpoint: Path) -> None:
    reference = save(tmp_path / "hf", tiny_checkpoint, *GEMMA4_CASES["gemma4"][:2])
    out = open_checkpoint(import_model(str(tmp_path / "hf"), tmp_path / "out"))
    assert (out.config.head_dim, out.config.num_key_value_heads) == (24, 2)
    near, far = (reference.model.layers[layer].self_attn for layer in (0, 1))
    whole = out.get("model.layers.0.self_attn.v_proj.weight").unflatten(0, (2, 2, 2, 6))
    assert not whole[:, :, 1].any()
    torch.testing.assert_close(whole[:, :, 0].flatten(0, 2), near.v_proj.weight * 2**0.5)
    keys, values = (out.get(f"model.layers.1.self_attn.{part}_proj.weight") for part in "kv")
    assert torch.equal(keys, far.k_proj.weight.repeat(2, 1))
    assert torch.equal(values, keys)


def test_heads_that_stand_along_a_dimension_are_stretched_there() -> None:
    x = torch.arange(1.0, 9.0)
    assert Stretched(0, 4, 8, 2).added(x).tolist() == [
        *([1, 2, 0, 0, 3, 4, 0, 0] * 2),
        *([5, 6, 0, 0, 7, 8, 0, 0] * 2),
    ]
    assert Stretched(1, 4, 6).added(x[None].expand(3, 8)).shape == (3, 12)
    assert Stretched(1, 4, 6).size((3, 8)) == (3, 12)
    assert Stretched(1, 4, 6).size((3, 7)) == (3, 7)  # no such heads: the error says what is stored
    assert Stretched(1, 4, 6).size((3,)) == (3,)


def test_a_norm_without_some_channels_hides_them_from_experts_alone(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """The MLP beside them reads the same norm here."""
    kind, changes, _ = GEMMA4_CASES["gemma4_experts"]
    reference = save(tmp_path / "hf", tiny_checkpoint, kind, changes)
    with torch.no_grad():
        reference.model.layers[1].pre_feedforward_layernorm_2.weight[::5] = 0
    reference.save_pretrained(tmp_path / "hf")
    model = load_model(import_model(str(tmp_path / "hf"), tmp_path / "out")).model
    with torch.no_grad():
        close(model(TEXT), reference(TEXT).logits)


def test_what_sees_is_left_out_and_said(tmp_path: Path, tiny_checkpoint: Path) -> None:
    save(tmp_path / "hf", tiny_checkpoint, *GEMMA4_CASES["gemma4_seeing"][:2])
    progress = Recorder()
    import_model(str(tmp_path / "hf"), tmp_path / "out", progress=progress)
    assert any("what sees and hears is left out" in note for note in progress.notes)


@pytest.mark.parametrize("kind", ["gemma4_text", "gemma4_unified_text"])
def test_what_the_file_leaves_out_is_what_transformers_assumes(kind: str) -> None:
    config, theirs = (
        fold_from_hf({"model_type": kind, "hidden_size_per_layer_input": 0}, "it").config,
        AutoConfig.for_model(kind),
    )
    for name in (*SIZES, "rms_norm_eps", "tie_word_embeddings", "sliding_window"):
        assert getattr(config, name) == getattr(theirs, name), name
    assert (config.head_dim, config.num_key_value_heads) == (512, 4)
    assert [config.layer_type(layer) for layer in range(30)] == theirs.layer_types
    assert (config.rotary_pairs, config.rotary_local_pairs) == (64, 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
        ({"per_layer_config": {"29": {"head_dim": 64, "sliding_window": 3}}}, "sliding_window in per_layer_config"),
        ({"per_layer_config": [4]}, "per_layer_config must have settings by numbers of layers"),
        ({"per_layer_config": {"1": {"head_dim": 64}}}, "head_dim differs among layers of one kind"),
        ({"per_layer_config": {"29": {"num_key_value_heads": 3}}}, "num_key_value_heads of the layers do not divide 4"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "for each kind of layer"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_type": "yarn"}}},
            "rotary scaling of sliding layers is not supported",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {"rope_theta": 1e4}}},
            "rotary scaling 'yarn' is not supported; proportional and default are",
        ),
        ({"enable_moe_block": True, "num_experts": 8}, "top_k_experts must be a positive whole number"),
        ({"hidden_activation": "silu"}, "the activation 'silu' of gemma4_text is not supported"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fold_from_hf({"model_type": "gemma4_text", "hidden_size_per_layer_input": 0} | changes, "it")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_head_dim": 9}, "v_head_dim=9 must be even, and no more than head_dim=192"),
        ({"v_head_dim": 200}, "v_head_dim=200 must be even, and no more than head_dim=192"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "must have plain rotary settings for each kind",
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": _THETA,
                    "sliding_attention": _THETA | _HALF,
                }
            },
            r"partial_rotary_factor \[0.334, 0.5\] of 192 dimensions is no even number",
        ),
    ],
)
def test_what_is_wrong_in_mimo_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fold_from_hf({"model_type": "mimo_v2_flash"} | changes, "it")


@pytest.mark.parametrize("kind", ["prune", "vocabulary"])
def test_what_knows_no_tokens_says_so(kind: str, make_tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(model_type="penjing", token_inputs=8, shared_keys=1)
    refused = pytest.raises(InputError, match=r"\(token_inputs, shared_keys\), which .* does not know; quantize it")
    with refused:
        if kind == "prune":
            DecoderSubject(folder, ["ffn"], (), Recorder())
        else:
            open_whole(folder)
