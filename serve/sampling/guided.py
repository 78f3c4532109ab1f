"""What an answer must look like: the sampling parameter `guided`, checked for size before any library reads it, as a
grammar of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penjing.core.text.tool_words import CALL_BEGIN, CALL_END
from penjing.serve.sampling.formats import with_readable_times

MAX_BYTES = 64 << 10
MAX_DEPTH = 48  # of nested lists and objects; the library's own reader stops at 128
MAX_NODES = 10_000
MAX_CHOICES = 1000
THOUGHT_BEGIN, THOUGHT_END = "<think>", "</think>"
_OPTIONS = "x-guidance"
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}  # as OpenAI's interface means it
MARKS = (CALL_BEGIN, THOUGHT_BEGIN, THOUGHT_END)  # some are control tokens of some tokenizers

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "tools"]


class Guided(BaseModel):
    """An answer's form.

    Raises:
        ValueError: the value is not what its kind needs, or too large.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Kind = Field(description="Which form: docs/serve.md says what each needs as value.")
    value: Any = Field(default=None, description="The form itself, as its kind needs it.")
    strict: bool = Field(
        default=True, description="Refuse a JSON schema with keywords that are not known; false leaves them out."
    )
    thought: Literal["open", "begun"] | None = Field(
        default=None,
        description="What may stand before the form. open: a thought between <think> and </think>; begun: the rest of "
        "one that the prompt begins, up to </think>.",
    )

    @model_validator(mode="after")
    def _value_fits(self) -> Guided:
        _check_size(self.value)
        check = {
            "json_object": lambda value: value is None,
            "json_schema": lambda value: isinstance(value, dict),
            "regex": lambda value: isinstance(value, str),
            "grammar": lambda value: isinstance(value, str),
            "choice": _is_choice,
            "tools": _is_tools,
        }[self.kind]
        if not check(self.value):
            raise ValueError(f"guided: for kind {self.kind} the value must be {_VALUES[self.kind]}")
        if self.kind == "regex" and (len(self.value) - len(self.value.rstrip("\\"))) % 2:
            raise ValueError("guided: the regular expression ends in a backslash that escapes nothing")
        return self

    def grammar(self, control: Collection[str] = ()) -> str:
        """llguidance's form of it. `control`: those of MARKS that are control tokens of the tokenizer."""
        from llguidance import LLMatcher

        if self.thought is None and self.kind == "regex":
            return LLMatcher.grammar_from_regex(self.value)
        if self.thought is None and self.kind in ("json_object", "json_schema"):
            return LLMatcher.grammar_from_json_schema(json.dumps(self._schema()), defaults=_json_options(self.strict))
        form = self._lark(control)
        return LLMatcher.grammar_from_lark(form if self.thought is None else _behind(self.thought, form, control))

    def _schema(self) -> dict[str, Any]:
        return {"type": "object"} if self.kind == "json_object" else with_readable_times(self.value)

    def _lark(self, control: Collection[str]) -> str:
        if self.kind == "regex":
            return f"start: /{_in_slashes(self.value)}/"
        if self.kind == "choice":
            return "start: " + " | ".join(map(_quoted, self.value))
        if self.kind == "grammar":
            return self.value
        if self.kind == "tools":
            return _tools_grammar(self.value, control)
        return "start: %json " + json.dumps(_with_options(self._schema(), self.strict))


_VALUES = {
    "json_object": "left out",
    "json_schema": "a JSON schema",
    "regex": "a regular expression",
    "grammar": "a grammar in llguidance's dialect of Lark",
    "choice": f"a list of 1 to {MAX_CHOICES} texts",
    "tools": 'an object with "tools" (a list of functions as OpenAI has them), "choice" ("auto", "required" or the '
    'name of one of them) and "parallel" (true or false)',
}
DESCRIPTION = (
    "an object with kind (json_object, json_schema, regex, choice, grammar or tools), value, strict and thought, of at "
    f"most {MAX_BYTES} bytes, {MAX_DEPTH} levels and {MAX_NODES} entries, and without min_tokens"
)


def _check_size(value: Any) -> None:
    num_bytes = num_nodes = 0
    stack: list[tuple[Any, int]] = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        num_nodes += 1
        num_bytes += len(item) if isinstance(item, str) else 8
        if isinstance(item, dict | list | tuple):
            if depth > MAX_DEPTH:
                raise ValueError(f"guided: more than {MAX_DEPTH} levels are nested")
            stack.extend((child, depth + 1) for child in (item.values() if isinstance(item, dict) else item))
            num_bytes += sum(map(len, item)) if isinstance(item, dict) else 0
        if num_nodes > MAX_NODES or num_bytes > MAX_BYTES:
            raise ValueError(f"guided: there is more than {MAX_BYTES} bytes or {MAX_NODES} entries")


def _is_choice(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 1 <= len(value) <= MAX_CHOICES
        and all(isinstance(text, str) and text for text in value)
    )


def _is_tools(value: Any) -> bool:
    if not isinstance(value, dict) or not {"tools"} <= set(value) <= {"tools", "choice", "parallel"}:
        return False
    if not isinstance(value.get("parallel", True), bool) or not isinstance(value["tools"], list) or not value["tools"]:
        return False
    names = []
    for tool in value["tools"]:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            return False
        if not isinstance(function.get("parameters") or {}, dict):
            return False
        names.append(function["name"])
    return value.get("choice", "auto") in ["auto", "required", *names]


def _json_options(strict: bool) -> Any:
    # As `json.dumps` writes it: with free white space a small model may go on with blanks for ever.
    return {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": not strict}


def _with_options(schema: dict[str, Any], strict: bool) -> dict[str, Any]:
    """A schema inside of a grammar, with its own options before ours."""
    own = schema.get(_OPTIONS, {})
    return {**schema, _OPTIONS: {**_json_options(strict), **own} if isinstance(own, dict) else own}


def _behind(thought: str, form: str, control: Collection[str]) -> str:
    """A form that begins behind a thought."""
    begin, end = _mark(THOUGHT_BEGIN, control), _mark(THOUGHT_END, control)
    lead = f"thought: TEXT {end}" if THOUGHT_END in control else f"thought[lazy]: TEXT {end}"
    start = "thought BLANK form" if thought == "begun" else f"({begin} thought BLANK)? form"
    rules = [f"start: {start}", lead, "TEXT: /(.|\\n)*/", "BLANK: /[ \\n]{0,4}/", f"form: %lark {{\n{form}\n}}"]
    return "\n".join(rules) + "\n"


def _in_slashes(regex: str) -> str:
    """A regular expression as Lark has it between slashes."""
    return re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), regex, flags=re.DOTALL)


def _mark(mark: str, control: Collection[str]) -> str:
    return mark if mark in control else _quoted(mark)


def _tools_grammar(value: dict[str, Any], control: Collection[str]) -> str:
    """Calls as `<tool_call>\\n{"name": …, "arguments": …}\\n</tool_call>`, which Hermes, Qwen and SmolLM2 were trained
    on; with "auto" there may be text before, between and after them, or no call at all."""
    choice, parallel = value.get("choice", "auto"), value.get("parallel", True)
    functions = [tool["function"] for tool in value["tools"]]
    wanted = [function for function in functions if choice in ("auto", "required", function["name"])]
    begin, special = _mark(CALL_BEGIN, control), CALL_BEGIN in control
    lines = list(_call_rules(wanted))
    calls = " | ".join(f"call_{index}" for index in range(len(wanted)))
    lines.append(f"body: {_quoted(chr(10))} ({calls}) {_quoted(chr(10) + CALL_END)}")
    if choice == "auto":
        lines += ["TEXT: /(.|\\n)*/", "rest: TEXT"]
        lines += [f"lead: TEXT {begin}" if special else f"lead[lazy]: TEXT {begin}"]
        lines += ["start: (lead body)* rest" if parallel else "start: (lead body)? rest"]
    else:
        lines += [f"call: {begin} body"]
        lines += ["start: call (" + _quoted("\n") + " call)*" if parallel and choice == "required" else "start: call"]
    return "\n".join(reversed(lines)) + "\n"


def _call_rules(functions: list[dict[str, Any]]) -> Iterator[str]:
    for index, function in enumerate(functions):
        # The parameters stay a schema of their own: references in it begin at its root.
        parameters = function.get("parameters")
        parameters = _NO_PARAMETERS if parameters is None else parameters or {"type": "object"}
        schema = _with_options(with_readable_times(parameters), function.get("strict") is True)
        begin = _quoted(f'{{"name": {json.dumps(function["name"])}, "arguments": ')
        yield f"call_{index}: {begin} %json {json.dumps(schema)} {_quoted('}')}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
