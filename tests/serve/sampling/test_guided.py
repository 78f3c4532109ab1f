"""Answers held to a form: what a random model writes under it is parsed by readers that we did not write."""

from __future__ import annotations

import json
import re
import time
from random import Random
from typing import Any
from unittest.mock import Mock

import jsonschema
import pytest

from penjing.core.errors import OverloadedError, RequestError
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.engine.request import Request, RequestOutput
from penjing.serve.sampling import constraint as constraint_module
from penjing.serve.sampling.constraint import Constraint, Constraints, allowed
from penjing.serve.sampling.guided import MARKS, MAX_BYTES, MAX_DEPTH, Guided
from penjing.serve.sampling.params import SamplingParams
from tests.serve.tiny import EOS, byte_tokenizer, generate, ids_of, run_all, text_of, tiny_engine, tiny_model

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["pine", "maple"]},
        "height": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["kind", "height", "tags"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "maxLength": 4, "pattern": "^[a-z]+$"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "water", "parameters": {**SCHEMA}}},
    {"type": "function", "function": {"name": "prune", "parameters": {"type": "object", "maxProperties": 0}}},
]


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return tiny_engine(tiny_model(seed=3))


def ask(engine: LLMEngine, guided: dict[str, Any], **params: Any) -> list[RequestOutput]:
    sampling = SamplingParams.from_json({"guided": guided, "max_tokens": 150, **params})
    (outputs,) = run_all(engine, [Request("only", "a", sampling)]).values()
    return outputs


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0}, {"top_p": 0.9, "repetition_penalty": 1.3}, {"top_k": 4}])
def test_answers_satisfy_their_schema(engine: LLMEngine, seed: int, sampling: dict[str, Any]) -> None:
    outputs = ask(engine, {"kind": "json_schema", "value": SCHEMA}, seed=seed, **sampling)
    assert outputs[-1].finish_reason == "stop"
    jsonschema.validate(json.loads(text_of(outputs)), SCHEMA)


def random_schema(random: Random, depth: int = 0) -> dict[str, Any]:
    """A schema of finite answers: every text and list is bounded."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "anyOf"]
    kind = random.choice(kinds + ["object", "array"] * 3 if depth < 3 else kinds)
    if kind == "object":
        names = random.sample(["a", "b c", "ü", 'q"', "name", "height"], random.randint(0, 4))
        properties = {name: random_schema(random, depth + 1) for name in names}
        required = [name for name in names if random.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        least = random.randint(0, 2)
        return {"type": "array", "items": random_schema(random, depth + 1), "minItems": least, "maxItems": least + 1}
    if kind == "anyOf":
        return {"anyOf": [random_schema(random, depth + 2) for _ in range(random.randint(1, 3))]}
    low = random.randint(-50, 50)
    return {
        "string": {"type": "string", "minLength": random.randint(0, 2), "maxLength": random.randint(2, 6)},
        "integer": {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 999)},
        "number": {"type": "number", "minimum": low, "exclusiveMaximum": low + 0.5, "multipleOf": 0.25},
        "enum": {"enum": random.sample(["x", 1, None, True, -2.5, "ä\n"], random.randint(1, 4))},
        "const": {"const": random.choice(["v", 7, False])},
        "pattern": {"type": "string", "pattern": random.choice(["^[a-c]{1,3}$", "^(ab|c)d?$", "^x[0-9]$"])},
    }.get(kind, {"type": kind})


def check_random_schemas(num_schemas: int) -> None:
    engine = tiny_engine(tiny_model(seed=3, max_position_embeddings=600), num_blocks=2000)
    schemas = [random_schema(Random(number)) for number in range(num_schemas)]
    requests = [
        Request(
            f"{number} {seed}",
            "a",
            SamplingParams.from_json(
                {"guided": {"kind": "json_schema", "value": schema}, "max_tokens": 550, "seed": seed}
            ),
        )
        for number, schema in enumerate(schemas)
        for seed in range(5)
    ]
    outputs = run_all(engine, requests)
    assert len(outputs) == 5 * num_schemas
    for (name, _), parts in outputs.items():
        assert parts[-1].finish_reason == "stop", (name, schemas[int(name.split()[0])], text_of(parts)[:200])
        jsonschema.validate(json.loads(text_of(parts)), schemas[int(name.split()[0])])


def test_answers_satisfy_random_schemas() -> None:
    check_random_schemas(20)


@pytest.mark.full
def test_answers_satisfy_200_random_schemas() -> None:
    check_random_schemas(200)


@pytest.mark.parametrize("seed", range(5))
def test_other_forms(engine: LLMEngine, seed: int) -> None:
    pattern = r"[0-9]{3}-(ab|cd)"
    assert re.fullmatch(pattern, text_of(ask(engine, {"kind": "regex", "value": pattern}, seed=seed)))
    choices = ["yes", 'n"o\n', "maybe é"]
    assert text_of(ask(engine, {"kind": "choice", "value": choices}, seed=seed)) in choices
    grammar = 'start: "(" start ")" | DIGIT\nDIGIT: /[0-9]/'
    nested = text_of(ask(engine, {"kind": "grammar", "value": grammar}, seed=seed))
    assert isinstance(eval(nested, {}), int)  # noqa: S307 (digits in brackets)
    free = ask(engine, {"kind": "json_object"}, seed=seed, logit_bias={ord("}"): 20.0})
    assert isinstance(json.loads(text_of(free)), dict)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("choice", ["required", "water", "auto"])
def test_calls_of_tools_have_their_parameters(engine: LLMEngine, seed: int, choice: str) -> None:
    value = {"tools": TOOLS, "choice": choice, "parallel": False}
    bias = {256: 100.0} if choice == "auto" else None
    outputs = ask(engine, {"kind": "tools", "value": value}, seed=seed, logit_bias=bias)
    assert outputs[-1].finish_reason == "stop"
    text = text_of(outputs)
    if choice == "auto":
        assert text == "", "an answer without a call may end where the model likes"
        return
    called = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text)
    assert called is not None
    call = json.loads(called[1])
    assert list(call) == ["name", "arguments"]
    assert call["name"] == choice if choice == "water" else call["name"] in ("water", "prune")
    parameters = next(tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == call["name"])
    jsonschema.validate(call["arguments"], parameters)


def test_a_call_that_was_begun_freely_is_held_to_its_parameters(engine: LLMEngine) -> None:
    constraint = engine.constraints.make(
        SamplingParams.from_json({"guided": {"kind": "tools", "value": {"tools": TOOLS}}}).guided  # pyright: ignore
    )
    text = 'Well: <tool_call>\n{"name": "prune", "arguments": {}}\n</tool_call> and <tool_call>\n{"name": "w'
    for byte in text.encode():
        constraint.fill()
        assert constraint.mask[byte // 32] >> (byte % 32) & 1
        constraint.push(byte)
    constraint.fill()
    assert constraint.mask.nonzero()[0].tolist() == [ord("a") // 32]
    assert int(constraint.mask[ord("a") // 32]) == 1 << ord("a") % 32


@pytest.mark.parametrize("seed", range(5))
def test_a_token_is_allowed_exactly_if_its_bit_is_set(engine: LLMEngine, seed: int) -> None:
    """Answers are chosen by the one or by the other."""
    random = Random(seed)
    guided = Guided(kind="tools", value={"tools": TOOLS}) if seed == 0 else Guided(kind="json_schema", value=SCHEMA)
    constraint = engine.constraints.make(guided)
    for _ in range(120):
        constraint.fill()
        bits = allowed(constraint.mask, engine.model_config.vocab_size)
        assert [bool(constraint.num_allowed([token])) for token in range(len(bits))] == bits.tolist()
        if constraint.push(random.choice(bits.nonzero()[0].tolist())):
            return


def test_answers_do_not_depend_on_what_else_runs(engine: LLMEngine) -> None:
    guided = {"kind": "json_schema", "value": SCHEMA}
    alone = [ids_of(ask(engine, guided, seed=seed, n=1)) for seed in range(4)]
    requests = [
        Request(str(seed), "a", SamplingParams.from_json({"guided": guided, "max_tokens": 150, "seed": seed}))
        for seed in range(4)
    ]
    requests.append(Request("free", "a", SamplingParams(max_tokens=40, seed=1)))
    small = tiny_engine(tiny_model(seed=3), num_blocks=32)  # some are preempted
    together = run_all(small, requests)
    assert [ids_of(together[str(seed), 0]) for seed in range(4)] == alone
    assert small.stats().num_preemptions > 0


def test_several_answers_of_a_request_are_held_each_by_itself(engine: LLMEngine) -> None:
    params = {"guided": {"kind": "json_schema", "value": SCHEMA}, "max_tokens": 150, "seed": 5, "n": 4}
    outputs = run_all(engine, [Request("r", "abcdefgh" * 3, SamplingParams.from_json(params))])
    texts = [text_of(outputs["r", index]) for index in range(4)]
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("guided", "words"),
    [
        ({"kind": "json_schema", "value": {"type": "foo"}}, "this json_schema is refused: Invalid type: foo"),
        ({"kind": "json_schema", "value": {"$ref": "#/x"}}, "'/x' does not exist"),
        ({"kind": "json_schema", "value": {"not": {}}}, 'Unimplemented keys: ["not"]'),
        ({"kind": "json_schema", "value": _nested(MAX_DEPTH)}, f"more than {MAX_DEPTH} levels"),
        ({"kind": "json_schema", "value": {"enum": ["a" * MAX_BYTES]}}, f"more than {MAX_BYTES} bytes"),
        ({"kind": "json_schema", "value": {"enum": [1] * 10_001}}, "10000 entries"),
        ({"kind": "json_schema"}, "for kind json_schema the value must be a JSON schema"),
        ({"kind": "json_schema", "value": True}, "the value must be a JSON schema"),
        ({"kind": "regex", "value": "(?=a)b"}, "look-around"),
        ({"kind": "regex", "value": 3}, "the value must be a regular expression"),
        ({"kind": "choice", "value": []}, "a list of 1 to 1000 texts"),
        ({"kind": "grammar", "value": "start: x"}, 'unknown name: "x"'),
        ({"kind": "tools", "value": {"tools": []}}, 'an object with "tools"'),
        ({"kind": "tools", "value": {"tools": TOOLS, "choice": "dig"}}, 'an object with "tools"'),
        ({"kind": "xml", "value": ""}, "guided must be an object with kind"),
        ({"value": ""}, "guided must be an object with kind"),
        ("{", "guided must be an object with kind"),
        ({"kind": "json_schema", "value": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "refused"),
    ],
)
def test_what_cannot_be_is_refused_in_words(engine: LLMEngine, guided: Any, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        engine.prepare(Request("r", "a", SamplingParams.from_json({"guided": guided})))
    assert words in str(caught.value)
    assert len(str(caught.value)) < 600


FORMS: list[tuple[dict[str, Any], str, str]] = [  # with a text that it allows, and one that it does not
    ({"kind": "json_schema", "value": SCHEMA}, '{"kind": "pine", "height": 7, "tags": []}', '{"kind": "oak"'),
    ({"kind": "json_object"}, '{"a": [1, "</think"]}', "[1]"),
    ({"kind": "regex", "value": r"a/b\/c\\/\n[0-9]{2}"}, "a/b/c\\/\n12", "a/b/c/"),
    ({"kind": "choice", "value": ["yes", 'n"o']}, 'n"o', "maybe"),
    ({"kind": "grammar", "value": 'start: pair+\npair: /[a-z]/ "{" DIGIT "}"\nDIGIT: /[0-9]/'}, "a{1}b{2}", "a{x"),
    (
        {"kind": "tools", "value": {"tools": TOOLS, "choice": "required"}},
        '<tool_call>\n{"name": "prune", "arguments": {}}\n</tool_call>',
        "I",
    ),
]
THINKING = "I {see}: tool_call> or\n[1], maybe yes.</think>"


@pytest.mark.parametrize(("guided", "fits", "does_not"), FORMS, ids=[str(form[0]["kind"]) for form in FORMS])
@pytest.mark.parametrize("control", [False, True], ids=["as text", "as control tokens"])
def test_a_form_may_begin_behind_a_thought(guided: dict[str, Any], fits: str, does_not: str, control: bool) -> None:
    tokenizer = byte_tokenizer(MARKS if control else ())
    constraints = Constraints(tokenizer, tokenizer.backend.get_vocab_size())

    def taken(thought: str | None, text: str) -> tuple[int, int]:
        """How many tokens of `text` are allowed, and how many there are."""
        ids = tokenizer.encode(text)
        constraint = constraints.make(Guided.model_validate(guided | ({"thought": thought} if thought else {})))
        return constraint.num_allowed(ids), len(ids)

    for thought, lead in (("begun", THINKING), ("begun", "</think>"), ("open", f"<think>{THINKING}"), ("open", "")):
        for blank in ("", "\n\n") if lead else ("",):
            allowed_ids, count = taken(thought, lead + blank + fits)
            assert allowed_ids == count, (thought, lead, blank)
        before = len(tokenizer.encode(lead))
        allowed_ids, count = taken(thought, lead + does_not)
        assert before <= allowed_ids < count, (thought, lead)
    assert taken(None, fits)[0] == taken(None, fits)[1]
    assert taken(None, "<think>a</think>" + fits)[0] <= len("<t"), "a thought is no part of a form by itself"
    assert taken("begun", "only thought")[0] == taken("begun", "only thought")[1]


def test_a_wrong_form_behind_a_thought_is_told_in_its_own_lines(engine: LLMEngine) -> None:
    words = []
    for thought in ({}, {"thought": "open"}):
        guided = {"kind": "grammar", "value": "start: x"} | thought
        with pytest.raises(RequestError) as caught:
            engine.prepare(Request("r", "a", SamplingParams.from_json({"guided": guided})))
        words.append(str(caught.value))
    assert words[0] == words[1]


@pytest.mark.parametrize("thought", [{}, {"thought": "open"}])
@pytest.mark.parametrize("regex", ["a\\", "\\", "a\\\\\\"])
def test_a_regex_does_not_end_in_half_an_escape(engine: LLMEngine, regex: str, thought: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="ends in a backslash that escapes nothing"):
        ask(engine, {"kind": "regex", "value": regex} | thought)
    ask(engine, {"kind": "regex", "value": "a\\\\"} | thought)


def test_a_schemas_own_options_hold_behind_a_thought_too() -> None:
    tokenizer = byte_tokenizer(())
    constraints = Constraints(tokenizer, tokenizer.backend.get_vocab_size())
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema["x-guidance"] = {"key_separator": "  :  "}
    tools = {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}], "choice": "required"}
    called = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    for guided, text in (
        ({"kind": "json_schema", "value": schema}, "%s"),
        ({"kind": "json_schema", "value": schema, "thought": "open"}, "%s"),
        ({"kind": "json_schema", "value": schema, "thought": "begun"}, "hm</think>%s"),
        ({"kind": "tools", "value": tools}, called),
    ):
        constraint = constraints.make(Guided.model_validate(guided))
        ids = tokenizer.encode(text % '{"a"  :  5}')
        assert constraint.num_allowed(ids) == len(ids), guided
        blanks = tokenizer.encode(text % '{ "a"  :  5}')
        assert constraints.make(Guided.model_validate(guided)).num_allowed(blanks) < len(blanks), guided


@pytest.mark.parametrize("function", [{"name": "now"}, {"name": "now", "parameters": None}])
def test_a_function_without_parameters_takes_none(function: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer(())
    value = {"tools": [{"type": "function", "function": function}], "choice": "required"}
    for arguments, taken in (("{}", True), ('{"a": 1}', False)):
        ids = tokenizer.encode(f'<tool_call>\n{{"name": "now", "arguments": {arguments}}}\n</tool_call>')
        constraint = Constraints(tokenizer, 258).make(Guided(kind="tools", value=value))
        assert (constraint.num_allowed(ids) == len(ids)) is taken, arguments


def test_what_no_text_can_be_ends_that_answer_alone(engine: LLMEngine) -> None:
    bad = SamplingParams.from_json({"guided": {"kind": "json_schema", "value": {"$ref": "#"}}})
    outputs = run_all(
        engine, [Request("bad", "a", bad), Request("good", "a", SamplingParams(temperature=0, max_tokens=4))]
    )
    assert outputs["bad", 0][-1].finish_reason == "error"
    assert isinstance(outputs["bad", 0][-1].error, RequestError)
    assert "no text has this form" in str(outputs["bad", 0][-1].error)
    assert ids_of(outputs["good", 0]) == ids_of(generate(engine, "a", temperature=0, max_tokens=4))


def test_a_form_that_proves_too_complex_is_the_requests_fault(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = RequestError("too complex")
    monkeypatch.setattr(Constraint, "push", Mock(side_effect=refused))
    (output,) = ask(engine, {"kind": "regex", "value": "a+"}, n=1)
    assert (output.finish_reason, output.error) == ("error", refused)


def test_lenient_schemas_leave_out_what_is_not_supported(engine: LLMEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "maxProperties": 1, "not": {}}
    outputs = ask(engine, {"kind": "json_schema", "value": schema, "strict": False}, logit_bias={ord("}"): 20.0})
    assert json.loads(text_of(outputs))["a"] == 1


def test_min_tokens_is_refused_beside_a_form() -> None:
    with pytest.raises(RequestError, match="min_tokens cannot be combined with guided"):
        SamplingParams.from_json({"guided": {"kind": "json_object"}, "min_tokens": 2})


@pytest.mark.parametrize("n", [1, 4])
def test_an_ambiguous_grammar_ends_before_it_holds_others_up(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """Each further token took longer, 0.6 s at the 800th, and every answer of the engine waited for it."""
    spent = 0.0
    fill = Constraint.fill

    def timed_fill(constraint: Constraint) -> None:
        nonlocal spent
        started = time.thread_time()
        try:
            fill(constraint)
        finally:
            spent += time.thread_time() - started

    monkeypatch.setattr(Constraint, "fill", timed_fill)
    monkeypatch.setattr(constraint_module, "SECONDS_A_TOKEN", 0.0001)
    monkeypatch.setattr(constraint_module, "SECONDS_AT_ONCE", 0.05)
    grammar = {"kind": "grammar", "value": "start: e\ne: e e e | /[a-z]/"}
    values = {"guided": grammar, "max_tokens": 240, "logit_bias": {EOS: -100}, "n": n, "seed": 0}
    sampling = SamplingParams.from_json(values)
    found = run_all(engine, [Request("only", "a", sampling), Request("other", "b", SamplingParams(seed=0))])
    assert "takes too long" in str(found["only", 0][-1].error)
    assert found["other", 0][-1].error is None
    assert spent < 0.5, "the answers of a request have one account"


def test_a_form_that_takes_long_to_read_is_refused_and_holds_no_other_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had one of the two threads that read long prompts for as long as it took, which may be hours."""
    monkeypatch.setattr(constraint_module, "READING_SECONDS", 0.05)
    monkeypatch.setattr(constraint_module, "MOST_UNREAD", 1)
    engine = tiny_engine()
    with pytest.raises(RequestError, match="to read this form takes more than"):
        ask(engine, {"kind": "json_schema", "value": {"type": "integer", "multipleOf": 30_011}})  # a second
    with pytest.raises(OverloadedError, match="are still read"):
        ask(engine, {"kind": "choice", "value": ["fast"]})
    monkeypatch.setattr(constraint_module, "READING_SECONDS", 60.0)
    deadline = time.monotonic() + 60
    while True:
        try:
            found = ask(engine, {"kind": "choice", "value": ["fast"]})
            break
        except OverloadedError:
            assert time.monotonic() < deadline, "the slow form has been read, and others are read again"
            time.sleep(0.05)
    assert text_of(found) == "fast"
