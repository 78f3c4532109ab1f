"""longrope and dynamic scaling: an imported network rotates by the context that it is taken for, as transformers does
in texts of that length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penjing.compress.run import run_recipe
from penjing.compress.verify import verify_artifact
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError
from penjing.core.imports.importer import import_model
from penjing.core.models.hf_config import decoder_config_from_hf
from penjing.core.models.rope import at_context, inverse_frequencies, usual_context
from penjing.serve.engine.config import EngineConfig
from penjing.serve.families.decoder import FAMILY
from tests.compress.conftest import write_recipe
from tests.core.folded.served import close, of_transformers, served
from tests.core.folded.test_families import CASES, LONGROPE, save

TEXT = torch.randint(0, 320, (1, 100), generator=torch.Generator().manual_seed(2))
SHORT = TEXT[:, :60]  # of 64, the original context
HF: dict[str, Any] = {  # of a config.json
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("case", ["phi3_longrope", "phi3_longrope_partial"])
def test_each_regime_is_that_of_transformers(case: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    reference = save(tmp_path / "hf", tiny_checkpoint, *CASES[case][:2])
    usual = import_model(str(tmp_path / "hf"), tmp_path / "usual")
    beyond = import_model(str(tmp_path / "hf"), tmp_path / "beyond", context=256)
    assert [open_checkpoint(folder).config.max_position_embeddings for folder in (usual, beyond)] == [64, 256]
    with torch.no_grad():
        close(load_model(usual).model(SHORT), reference(SHORT).logits)
        close(load_model(beyond).model(TEXT), reference(TEXT).logits)
        assert not torch.allclose(load_model(beyond).model(SHORT), reference(SHORT).logits, atol=1e-3)


def test_the_engine_rotates_by_the_context_that_it_is_given(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """Keys that were cached before the original context was exceeded included."""
    reference = save(tmp_path / "hf", tiny_checkpoint, *CASES["phi3_longrope"][:2])
    folder = import_model(str(tmp_path / "hf"), tmp_path / "out", context=512)
    close(served(folder, TEXT), of_transformers(reference, TEXT))
    close(served(folder, TEXT, max_model_len=128), of_transformers(reference, TEXT))
    close(served(folder, SHORT, max_model_len=64), of_transformers(reference, SHORT))
    assert not torch.allclose(served(folder, SHORT), of_transformers(reference, SHORT), atol=1e-3)
    two = {"tensor_parallel": 2, "max_model_len": 64}
    close(served(folder, SHORT, **two), of_transformers(reference, SHORT))


def test_an_artifact_of_a_long_context_answers_nearly_as_its_network(tmp_path: Path, tiny_checkpoint: Path) -> None:
    reference = save(tmp_path / "hf", tiny_checkpoint, *CASES["phi3_longrope"][:2])
    folder = import_model(str(tmp_path / "hf"), tmp_path / "out", context=512)
    artifact = run_recipe(write_recipe(tmp_path, folder, tmp_path / "int8"), ["steps.0.transform.rotate=false"])
    verify_artifact(artifact)
    expected = of_transformers(reference, TEXT)
    assert float((served(artifact, TEXT) - expected).abs().mean()) < 0.05 * float(expected.std())


def test_what_transformers_reads_of_an_imported_folder_is_the_same(tmp_path: Path, tiny_checkpoint: Path) -> None:
    reference = save(tmp_path / "hf", tiny_checkpoint, *CASES["phi3_longrope"][:2])
    out = import_model(str(tmp_path / "hf"), tmp_path / "out")
    again: Any = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    for tokens in (SHORT, TEXT):
        close(of_transformers(again, tokens), of_transformers(reference, tokens))


@pytest.mark.parametrize(
    ("outside", "inside", "factor"),
    [({}, {}, 1.2247448), ({"original_max_position_embeddings": 256}, {}, 1.0606602), ({}, {"factor": 4.0}, 1.1547005)],
)
def test_the_factor_of_rotated_queries_is_that_of_transformers(
    outside: dict[str, Any], inside: dict[str, Any], factor: float
) -> None:
    """By the published context over the original one, which transformers takes from outside the settings first, or by
    a factor that is given."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = LONGROPE | inside
    sizes: dict[str, Any] = {"vocab_size": 320, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 1}
    values: dict[str, Any] = sizes | {
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "model_type": "llama",
        **outside,
    }
    config = decoder_config_from_hf(values | {"rope_parameters": rope}, "config.json")
    theirs = AutoConfig.for_model(**values, rope_parameters=dict(rope))
    frequencies, growth = ROPE_INIT_FUNCTIONS["longrope"](theirs, torch.device("cpu"), seq_len=512)
    assert config.rope_scaling.attention_factor == growth == pytest.approx(factor, rel=1e-6)
    torch.testing.assert_close(inverse_frequencies(config), frequencies, rtol=1e-6, atol=0)


@pytest.mark.parametrize("context", [512, 1024, 2048])
def test_dynamic_scaling_is_that_of_a_text_as_long_as_the_context(context: int) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config = decoder_config_from_hf(HF | {"rope_parameters": rope}, "config.json")
    assert usual_context(config) == 512
    theirs = AutoConfig.for_model(**HF, rope_parameters=dict(rope))
    frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, torch.device("cpu"), seq_len=context)
    taken = at_context(config, context)
    torch.testing.assert_close(inverse_frequencies(taken), frequencies, rtol=1e-6, atol=0)
    assert taken.rope_scaling.rope_type == ("dynamic" if context == 512 else "default")
    with pytest.raises(ConfigError, match="context=2049 is above the 2048 tokens"):
        at_context(config, 2049)


def test_a_network_of_dynamic_scaling_is_that_of_transformers(tmp_path: Path, tiny_checkpoint: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    changes = {"rope_parameters": rope, "max_position_embeddings": 64}
    reference = save(tmp_path / "hf", tiny_checkpoint, "llama", changes)
    usual = import_model(str(tmp_path / "hf"), tmp_path / "usual")
    beyond = import_model(str(tmp_path / "hf"), tmp_path / "beyond", context=100)
    close(served(usual, SHORT), of_transformers(reference, SHORT))
    with torch.no_grad():
        close(load_model(beyond).model(TEXT), reference(TEXT).logits)


@pytest.mark.parametrize("factor", [1e308, 1e10])
def test_a_factor_that_no_network_has_is_refused(factor: float) -> None:
    hf = {"rope_parameters": {"rope_type": "dynamic", "factor": factor, "rope_theta": 1e4}}
    with pytest.raises(InputError, match=r"factor"):
        decoder_config_from_hf(HF | hf, "config.json")


@pytest.mark.parametrize(("factor", "longest"), [(0.5, 512), (2.0**31 - 1, 2**31 - 1)])
def test_the_longest_context_of_dynamic_scaling_is_one_that_a_folder_can_name(factor: float, longest: int) -> None:
    config = decoder_config_from_hf(
        HF | {"rope_parameters": {"rope_type": "dynamic", "factor": factor, "rope_theta": 1e4}}, "config.json"
    )
    assert at_context(config, usual_context(config)) == config
    assert torch.isfinite(inverse_frequencies(at_context(config, longest))).all()
    with pytest.raises(ConfigError, match=f"above the {longest} tokens"):
        at_context(config, longest + 1)


@pytest.mark.parametrize(
    ("context", "error", "message"),
    [
        (513, ConfigError, "context=513 is above the 512 tokens that the network was published for"),
        (0, ConfigError, "context=0"),
    ],
)
def test_a_context_that_is_none_is_refused(
    context: int, error: type[Exception], message: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    save(tmp_path / "hf", tiny_checkpoint, *CASES["phi3_longrope"][:2])
    with pytest.raises(error, match=message):
        import_model(str(tmp_path / "hf"), tmp_path / "out", context=context)
    assert not (tmp_path / "out").exists()


def test_lists_of_factors_that_do_not_fit_are_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    kind, changes, _ = CASES["phi3_longrope"]
    save(tmp_path / "hf", tiny_checkpoint, kind, changes)
    import json

    path = tmp_path / "hf" / "config.json"
    rope = {"rope_parameters": LONGROPE | {"long_factor": [1.0, 2.0]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | rope))
    with pytest.raises(InputError, match="long_factor has 2 numbers, short_factor 6"):
        import_model(str(tmp_path / "hf"), tmp_path / "out")


def test_a_server_of_a_run_rotates_as_the_run_does(tmp_path: Path, tiny_checkpoint: Path) -> None:
    save(tmp_path / "hf", tiny_checkpoint, *CASES["phi3_longrope"][:2])
    folder = import_model(str(tmp_path / "hf"), tmp_path / "out", context=512)
    for most in (None, 65, 512):
        FAMILY.check(folder, EngineConfig(take_weights=True, max_model_len=most))
    FAMILY.check(folder, EngineConfig(max_model_len=64))
    with pytest.raises(ConfigError, match=r"factors of its original 64 tokens, and a run .* those of its 512"):
        FAMILY.check(folder, EngineConfig(take_weights=True, max_model_len=64))


def test_a_table_of_positions_is_as_long_as_the_context_that_is_taken(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """It stayed whole, and nothing read the checkpoint."""
    reference = save(tmp_path / "hf", tiny_checkpoint, *CASES["gpt2"][:2])
    out = import_model(str(tmp_path / "hf"), tmp_path / "out", context=64)
    loaded = load_model(out)
    assert loaded.model.model.embed_positions.weight.shape == (64, 48)
    with torch.no_grad():
        close(loaded.model(SHORT), reference(SHORT).logits)
    close(served(out, SHORT), of_transformers(reference, SHORT))
