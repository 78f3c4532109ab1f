import tomllib
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, model_validator

from penjing.core.config import Config, OutputFolder, apply_override, dump_toml, load_recipe, parse_config
from penjing.core.errors import ConfigError
from penjing.core.models.config import DecoderConfig

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


class Section(Config):
    alpha: float = 0.5
    scheme: str = "w8a8"


class Recipe(Config):
    name: str
    quantize: Section = Section()


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('name = "x"\n[quantize]\nalpha = 0.25\n')
    return path


def test_override_beats_recipe_and_bare_words_are_strings(recipe):
    loaded = load_recipe(Recipe, recipe, ["quantize.alpha=0.75", "quantize.scheme=w8a16"])
    assert loaded.quantize == Section(alpha=0.75, scheme="w8a16")
    assert load_recipe(Recipe, recipe).quantize.alpha == 0.25


class Trim(Config):
    kind: Literal["trim"]
    ratio: float


class Teach(Config):
    kind: Literal["teach", "tune"]
    epochs: int = 1


class Steps(Config):
    steps: tuple[Annotated[Trim | Teach, Field(discriminator="kind")], ...]


@pytest.fixture
def listed(tmp_path):
    path = tmp_path / "steps.toml"
    path.write_text('[[steps]]\nkind = "trim"\nratio = 0.5\n[[steps]]\nkind = "tune"\n')
    return path


def test_override_reaches_into_lists(listed):
    loaded = load_recipe(Steps, listed, ["steps.0.ratio=0.25", "steps.1.epochs=3"])
    assert loaded.steps == (Trim(kind="trim", ratio=0.25), Teach(kind="tune", epochs=3))
    assert load_recipe(Steps, listed, ['steps.1={kind="trim", ratio=1.0}']).steps[1] == Trim(kind="trim", ratio=1.0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps.2.ratio=1", "'2' is no place in a list of 2; they count from 0"),
        ("steps.first.ratio=1", "'first' is no place in a list of 2"),
        ("steps.0.ratoi=1", r"unknown key 'steps.0.ratoi'; did you mean 'ratio'\? Valid keys: kind, ratio$"),
        ("steps.1.ratio=1", r"unknown key 'steps.1.ratio'. Valid keys: epochs, kind$"),
        (
            "steps.0.kind=trimm",
            r"steps.0.kind: 'trimm' is unknown; did you mean 'trim'\? Choose one of trim, teach, tune$",
        ),
        ("steps.0.kind=cut", r"steps.0.kind: 'cut' is unknown. Choose one of trim, teach, tune$"),
        ('steps={kind="trim"}', "steps: input should be a list \\(got "),
        ("steps.0={ratio=1.0}", "steps.0.kind: field required; choose one of trim, teach, tune$"),
    ],
)
def test_wrong_entries_of_lists_are_named(listed, override, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(Steps, listed, [override])


def test_unknown_key_lists_valid_ones_and_the_nearest(recipe):
    with pytest.raises(ConfigError, match=r"'quantize.alhpa'; did you mean 'alpha'\? Valid keys: alpha, scheme"):
        load_recipe(Recipe, recipe, ["quantize.alhpa=1"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("quantize.alpha", "section.key=value"),
        ("=3", "section.key=value"),
        ("name.deep=1", "is a value, not a section"),
        ("quantize.alpha=high", "valid number"),
        ("quantize.alpha=nan", "finite"),
    ],
)
def test_bad_override_names_itself(recipe, override, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(Recipe, recipe, [override])


def test_missing_and_malformed_recipes(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_recipe(Recipe, tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_recipe(Recipe, tmp_path / "bad.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"is a folder, not a recipe; name a TOML file"):
        load_recipe(Recipe, tmp_path)
    with pytest.raises(ConfigError, match="cannot be read: it is UTF-16; convert it, for example by iconv"):
        load_recipe(Recipe, tmp_path / "binary.toml")
    (tmp_path / "binary.toml").write_bytes(b"name = '\xe9'")
    with pytest.raises(ConfigError, match="cannot be read: byte 0xe9 at place 8 is no UTF-8; save it as UTF-8"):
        load_recipe(Recipe, tmp_path / "binary.toml")


def test_a_recipe_saved_on_windows_is_read(recipe):
    wanted = load_recipe(Recipe, recipe)
    recipe.write_bytes(b"\xef\xbb\xbf" + recipe.read_bytes().replace(b"\n", b"\r\n"))
    assert load_recipe(Recipe, recipe) == wanted


def test_a_list_is_not_too_short_for_want_of_wrong_entries():
    class Entry(Config):
        count: Annotated[int, Field(ge=1)]

    class Many(Config):
        pools: Annotated[tuple[Entry, ...], Field(min_length=1)]

    with pytest.raises(ConfigError) as caught:
        parse_config(Many, {"pools": [{"count": -1}]}, "c.toml")
    assert str(caught.value) == "c.toml: pools.0.count: input should be greater than or equal to 1 (got -1)"
    with pytest.raises(ConfigError, match=r"^c.toml: pools: list should have at least 1 item after validation, not 0"):
        parse_config(Many, {"pools": []}, "c.toml")


@pytest.mark.parametrize("output", ["", ".", "/", "a\0b"])
def test_a_folder_to_make_needs_a_name(output):
    class Making(Config):
        output: OutputFolder

    with pytest.raises(ConfigError, match=r"output: .* is no name of a folder of its own"):
        parse_config(Making, {"output": output}, "recipe")


def test_configs_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Section().alpha = 1.0  # type: ignore[misc]


def test_heads_must_divide():
    with pytest.raises(ConfigError, match="num_attention_heads=4 is not a multiple of num_key_value_heads=3"):
        parse_config(DecoderConfig, {**SIZES, "num_key_value_heads": 3}, "config.json")


def test_layer_window():
    config = DecoderConfig.model_validate(
        {**SIZES, "sliding_window": 8, "layer_types": ("full_attention", "sliding_attention")}
    )
    assert [config.layer_window(layer) for layer in range(2)] == [None, 8]
    assert DecoderConfig.model_validate({**SIZES, "sliding_window": 8}).layer_window(0) == 8
    assert DecoderConfig.model_validate(SIZES).layer_window(0) is None


def test_layer_types_repeat_and_are_checked():
    mixed = {
        **SIZES,
        "num_hidden_layers": 5,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "lsh_attention"],
    }
    config = DecoderConfig.model_validate(mixed)
    expected = ["sliding_attention", "lsh_attention", "sliding_attention", "lsh_attention", "sliding_attention"]
    assert [config.layer_type(layer) for layer in range(5)] == expected
    assert [config.layer_window(layer) for layer in range(5)] == [8, None, 8, None, 8]
    plain = DecoderConfig.model_validate({**SIZES, "layer_types": ["full_attention"]})
    assert plain == DecoderConfig.model_validate(SIZES)  # what is implied is not stated
    for changes, message in (
        ({"sliding_window": None}, "set sliding_window"),
        ({"layer_types": ["lsh_attention"]}, "names no sliding_attention"),
        ({"num_hidden_layers": 1}, "names 2 layers"),
        ({"layer_types": ["local"]}, "layer_types"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_config(DecoderConfig, mixed | changes, "recipe")


def override_of(text):
    values: dict[str, Any] = {}
    apply_override(values, text)
    return values


def test_names_with_dots_are_quoted():
    values: dict[str, Any] = {}
    apply_override(values, 'space."clip.norm"=[0.1, 10.0]')
    apply_override(values, 'space."a b.c".low=1')
    assert values == {"space": {"clip.norm": [0.1, 10.0], "a b.c": {"low": 1}}}
    assert override_of("a..b=1") == {"a": {"": {"b": 1}}}  # no name is left out in silence
    assert override_of('a."b=1') == {'a."b': 1}
    values["inline"] = [[{"x.y": 1}], {"z": {"§.\n": "a"}}]
    assert tomllib.loads(dump_toml(values)) == values


def test_a_rule_of_all_values_together_is_told_without_them():
    class Range(Config):
        low: int
        high: int

        @model_validator(mode="after")
        def _in_order(self):
            if self.low > self.high:
                raise ValueError("low is above high; swap them")
            return self

    with pytest.raises(ConfigError, match=r"^--range: low is above high; swap them$"):
        parse_config(Range, {"low": 2, "high": 1}, "--range")
    with pytest.raises(ConfigError, match=r"^--range: edge: low is above high; swap them \(got "):
        parse_config(Range, {"low": 2, "high": 1}, "--range", "edge.")
