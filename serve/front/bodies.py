"""The bodies of requests: OpenAI's fields with OpenAI's types, and vLLM's beside them. An unknown field is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import from_json

from penjing.core.errors import RequestError
from penjing.serve.gate.errors import ApiError
from penjing.serve.gate.fields import CacheMarks, Part, Unused
from penjing.serve.gate.finite import finite
from penjing.serve.sampling.params import MAX_STOP_LENGTH, MAX_STOP_STRINGS, SamplingParams
from penjing.serve.sight.wire import from_data_url

MAX_MESSAGES = 4096
MAX_TOOLS = 128
TokenIds = list[Annotated[int, Field(ge=0, lt=1 << 31)]]
TOKEN_NAME = "^[0-9]{1,10}$"
TokenName = Annotated[str, Field(pattern=TOKEN_NAME)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


def sampling_parameter(name: str, description: str) -> Any:
    """A parameter of the engine's with its bounds, so that `/openapi.json` tells them."""
    rules = SamplingParams.model_fields[name].metadata
    bounds = {key: getattr(rule, key) for rule in rules for key in ("ge", "gt", "le", "lt") if hasattr(rule, key)}
    return Field(default=None, description=description, **bounds)


class Body(Part):
    """Of one request."""

    model: str = Field(description="What `/v1/models` lists.")


class StreamOptions(Part):
    """What a stream has beside its text."""

    include_usage: bool | None = Field(default=None, description="A last chunk says how many tokens there were.")
    include_obfuscation: bool | None = Field(default=None, description="Is not done.")


class Sampling(Body):
    """How an answer's tokens are chosen, the same in every interface; null is the default."""

    temperature: float | None = sampling_parameter("temperature", "0 takes the most likely token each time; 1.")
    top_p: float | None = sampling_parameter("top_p", "Of the most likely tokens with this probability together.")
    seed: int | None = sampling_parameter("seed", "The same for the same answer.")
    presence_penalty: float | None = sampling_parameter("presence_penalty", "Against tokens that were there.")
    frequency_penalty: float | None = sampling_parameter("frequency_penalty", "Against tokens, by how often.")
    logit_bias: dict[TokenName, Bias] | None = Field(
        default=None,
        description="Added to tokens' scores; by token id.",
        json_schema_extra={"propertyNames": {"pattern": TOKEN_NAME}},  # pydantic's schema lets other names through
    )
    stream: bool | None = Field(default=None, description="The answer comes as server-sent events.")
    top_k: int | None = sampling_parameter("top_k", "Of the most likely so many tokens; 0 is all.")
    min_p: float | None = sampling_parameter("min_p", "Of tokens at least so likely, beside the most likely one.")
    repetition_penalty: float | None = sampling_parameter(
        "repetition_penalty", "Against tokens that were there; 1 is none."
    )
    min_tokens: int | None = sampling_parameter("min_tokens", "No end before so many tokens.")
    stop_token_ids: TokenIds | None = Field(default=None, description="The answer ends with one of these tokens.")
    ignore_eos: bool | None = Field(default=None, description="The model's own end does not count.")
    include_stop_str_in_output: bool | None = Field(default=None, description="The text that ended it is shown.")
    skip_special_tokens: bool | None = Field(default=None, description="Control tokens are not shown; true.")
    guided_json: dict[str, Any] | None = Field(default=None, description="The answer fulfils this JSON schema.")
    guided_regex: str | None = Field(default=None, description="The answer matches this regular expression.")
    guided_choice: list[str] | None = Field(default=None, description="The answer is one of these.")
    guided_grammar: str | None = Field(default=None, description="The answer is of this grammar, llguidance's Lark.")
    priority: int | None = Field(default=None, ge=-(1 << 31), lt=1 << 31, description="Lower ones come first.")


class Generation(Sampling, Unused):
    """What completions and chats have in common."""

    n: int | None = sampling_parameter("n", "So many answers.")
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS)] | None = Field(
        default=None, description="The answer ends before one of these texts."
    )
    stream_options: StreamOptions | None = Field(default=None, description="Of a stream.")
    user: str | None = Field(default=None, description="Of several versions of a model, a user has always the same.")

    def sampling(self) -> dict[str, Any]:
        """The engine's parameters: those that were given."""
        values = {name: value for name in _ENGINE_FIELDS if (value := getattr(self, name)) is not None}
        if (guided := self.guided()) is not None:
            values["guided"] = guided
        return values

    def guided(self) -> dict[str, Any] | None:
        """What the answer must look like, as the engine's parameter.

        Raises:
            ApiError: in two ways at once.
        """
        forms = {name: getattr(self, field) for field, name in _FORMS.items() if getattr(self, field) is not None}
        if len(forms) > 1:
            raise ApiError(
                400, "Give one of guided_json, guided_regex, guided_choice and guided_grammar.", param="guided"
            )
        return next(({"kind": kind, "value": value} for kind, value in forms.items()), None)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


_FORMS = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_OF_THE_FRONT = {*Body.model_fields, *Unused.model_fields, *_FORMS, "stream", "stream_options", "user"}
_ENGINE_FIELDS = tuple(set(Generation.model_fields) - _OF_THE_FRONT)


class CompletionBody(Generation):
    """Of `/v1/completions`."""

    prompt: str | list[str] | TokenIds | list[TokenIds] = Field(
        description="A text, a list of texts, or token ids of one prompt or of several."
    )
    max_tokens: int | None = Field(default=None, ge=0, description="New tokens at most; 16. 0 only scores the prompt.")
    echo: bool | None = Field(default=None, description="The answer begins with the prompt.")
    logprobs: int | None = sampling_parameter("logprobs", "So many likely tokens with each token.")
    best_of: int | None = Field(default=None, description="May be n only.")
    suffix: str | None = Field(default=None, description="May be null only.")


class TextPart(CacheMarks):
    """A part of a message."""

    type: Literal["text"] = Field(description="Other parts are not read.")
    text: str = Field(description="Its text.")


class ImageUrl(Part):
    """Where an image is."""

    url: str = Field(description="data:image/jpeg;base64,... or data:image/png;base64,...; nothing is fetched.")
    detail: Literal["auto", "low", "high"] | None = Field(default=None, description="Is not used.")


class ImagePart(CacheMarks):
    """An image in a message, for a model that sees."""

    type: Literal["image_url"] = Field(description="An image.")
    image_url: ImageUrl = Field(description="Where it is.")


class FunctionCall(Part):
    """A call that an assistant made."""

    name: str = Field(description="Of the function.")
    arguments: str = Field(description="JSON.")


class ToolCall(Part):
    """A call that an assistant made."""

    id: str = Field(description="The tool's message refers to it.")
    type: Literal["function"] = Field(default="function", description="Others are not known.")
    function: FunctionCall = Field(description="What it called.")
    index: int | None = Field(default=None, description="Of a stream's; is not used.")


class ChatMessage(CacheMarks):
    """One message; fields that only an answer has may come back with it."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="Who speaks.")
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None = Field(
        default=None, description="Text, or parts: texts, and images of a user."
    )
    name: str | None = Field(default=None, description="Of the speaker.")
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MAX_TOOLS, description="Of an assistant.")
    tool_call_id: str | None = Field(default=None, description="Of a tool: what it answers.")
    refusal: str | None = Field(default=None, description="Is not used.")
    annotations: list[Any] | None = Field(default=None, description="Is not used.")
    audio: None = Field(default=None, description="May be null only.")
    function_call: None = Field(default=None, description="May be null only.")
    reasoning_content: str | None = Field(default=None, description="Of an assistant: what it thought before.")
    reasoning: str | None = Field(default=None, description="The same, as newer vLLM calls it.")
    thinking_blocks: list[Any] | None = Field(default=None, description="Is not used: reasoning_content is.")
    provider_specific_fields: dict[str, Any] | None = Field(default=None, description="Is not used.")

    def images(self) -> list[bytes]:
        """The files of its images.

        Raises:
            RequestError: one lies elsewhere, or is no base64; or they are not a user's.
        """
        urls = [part.image_url.url for part in self.content or [] if isinstance(part, ImagePart)]
        if urls and self.role != "user":
            raise RequestError(f"images are a user's: a message of the role {self.role!r} has some")
        return [from_data_url(url) for url in urls]

    def rendered(self) -> dict[str, Any]:
        """As chat templates know messages."""
        content = self.content
        if content is None:
            content = ""  # many templates add texts without a look
        elif isinstance(content, list):
            parts = [
                {"type": "text", "text": p.text} if isinstance(p, TextPart) else {"type": "image"} for p in content
            ]
            content = (
                parts if any(part["type"] == "image" for part in parts) else "".join(part["text"] for part in parts)
            )
        values: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        values |= {key: value for key in ("name", "tool_call_id") if (value := getattr(self, key)) is not None}
        if self.role == "assistant" and (thought := self.reasoning_content or self.reasoning):
            values["reasoning_content"] = thought
        if self.tool_calls:
            values["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": _arguments(c)}}
                for c in self.tool_calls
            ]
        return values


def _arguments(call: ToolCall) -> Any:
    """Templates write arguments by themselves, from an object."""
    try:
        return finite(from_json(call.function.arguments))
    except ValueError:
        return call.function.arguments


class JsonSchema(Part):
    """A schema with a name."""

    name: str = Field(description="Is not used.")
    schema_: dict[str, Any] = Field(alias="schema", description="The answer is JSON that fulfils it.")
    strict: bool | None = Field(default=None, description="Refuse keywords that are not known, or leave them out.")
    description: str | None = Field(default=None, description="Is not used.")


class ResponseFormat(Part):
    """Of the answer."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="Any text, any object, or by a schema.")
    json_schema: JsonSchema | None = Field(default=None, description="The schema.")

    @model_validator(mode="after")
    def _schema_is_there(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("the type json_schema needs the field json_schema, and no other type has it")
        return self


class Function(Part):
    """What a tool is."""

    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,64}$", description="What it is called as.")
    description: str | None = Field(default=None, description="For the model.")
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema of its arguments; none has none.")
    strict: bool | None = Field(default=None, description="Refuse keywords that are not known, or leave them out.")


class Tool(CacheMarks):
    """What the model may call."""

    type: Literal["function"] = Field(description="Others are not known.")
    function: Function = Field(description="What it is.")


class NamedFunction(Part):
    """A tool's name."""

    name: str = Field(description="Of the tool.")


class NamedTool(Part):
    """The tool that the model must call."""

    type: Literal["function"] = Field(description="Others are not known.")
    function: NamedFunction = Field(description="Which.")


class ChatBody(Generation):
    """Of `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, description="The conversation so far.")
    max_tokens: int | None = Field(default=None, ge=1, description="New tokens at most; as many as there is room for.")
    max_completion_tokens: int | None = Field(default=None, ge=1, description="The same.")
    logprobs: bool | None = Field(default=None, description="Each token comes with its log probability.")
    top_logprobs: int | None = sampling_parameter("logprobs", "So many likely tokens with each token.")
    response_format: ResponseFormat | None = Field(default=None, description="Of the answer.")
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS, description="What the model may call.")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        default=None, description="Whether it must; auto."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="Several calls in one answer; true.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Further variables of the template.")
    reasoning_effort: Effort | None = Field(
        default=None, description="How much a model that thinks is to think, as far as its template knows; none: not."
    )
    modalities: list[Literal["text"]] | None = Field(default=None, description="Answers are text.")
    verbosity: Literal["medium"] | None = Field(default=None, description="May be medium or null only.")
    prediction: dict[str, Any] | None = Field(default=None, description="Is not used: it would change no answer.")

    def variables(self) -> dict[str, Any]:
        """What the template is told beside the messages: `enable_thinking` is Qwen3's and SmolLM3's."""
        found = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            found.setdefault("enable_thinking", self.reasoning_effort not in ("none", "minimal"))
            found.setdefault("reasoning_effort", self.reasoning_effort)
        if offered := self.offered:
            found["tools"] = offered
        return found

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call now."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or []]

    def guided(self) -> dict[str, Any] | None:
        """See `Generation.guided`; `response_format` and `tools` are other ways."""
        found = super().guided()
        wanted = [] if found is None else [found]
        format_ = self.response_format
        if format_ is not None and format_.type == "json_object":
            wanted.append({"kind": "json_object"})
        if format_ is not None and format_.json_schema is not None:
            schema = format_.json_schema
            wanted.append({"kind": "json_schema", "value": schema.schema_, "strict": schema.strict is True})
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ApiError(400, "tool_choice needs tools.", code="invalid_value", param="tool_choice")
        if offered := self.offered:
            choice, parallel = self.tool_choice or "auto", self.parallel_tool_calls is not False
            if isinstance(choice, NamedTool):  # said without its name, which may be "auto" or "required"
                name = choice.function.name
                offered = [tool for tool in offered if tool["function"]["name"] == name]
                if not offered:
                    raise ApiError(400, f"There is no tool {name!r:.80}.", code="invalid_value", param="tool_choice")
                choice, parallel = "required", False
            wanted.append({"kind": "tools", "value": {"tools": offered, "choice": choice, "parallel": parallel}})
        if len(wanted) > 1:
            text = "An answer has one form: give one of response_format, tools and guided_*."
            raise ApiError(400, text, code="invalid_value", param="response_format")
        return wanted[0] if wanted else None
