"""The body of `/v1/responses`, and the chat that it asks for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from penjing.serve.dialects.translation import Chat, image_part, joined, kinds, tag, text_part
from penjing.serve.front.bodies import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatBody,
    Effort,
    Function,
    FunctionCall,
    ImagePart,
    JsonSchema,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Sampling,
    TextPart,
    Tool,
    ToolCall,
    sampling_parameter,
)
from penjing.serve.gate.errors import ApiError
from penjing.serve.gate.fields import Part, Unused

LOGPROBS = "message.output_text.logprobs"


def _off(value: bool) -> bool:
    if value:
        raise ValueError("nothing is done in the background here")
    return value


Off = Annotated[bool, AfterValidator(_off), Field(json_schema_extra={"const": False})]
"""Not `Literal[False]`, to which 0 is false too."""


class ItemText(Part):
    """A part of an item's content; fields that only an answer has may come back with it."""

    type: Literal["input_text", "output_text", "text"] = Field(description="Other parts are not read.")
    text: str = Field(description="Its text.")
    annotations: list[Any] | None = Field(default=None, description="Is not used.")
    logprobs: list[Any] | None = Field(default=None, description="Is not used.")


class ItemImage(Part):
    """An image of a user, for a model that sees."""

    type: Literal["input_image"] = Field(description="An image.")
    image_url: str = Field(description="data:image/jpeg;base64,... or data:image/png;base64,...; nothing is fetched.")
    detail: Literal["auto", "low", "high", "original"] | None = Field(default=None, description="Is not used.")
    file_id: None = Field(default=None, description="May be null only: no files are kept.")


_TEXTS = ("input_text", "output_text", "text")
ItemPart = Annotated[
    Annotated[ItemText, tag("text")] | Annotated[ItemImage, tag("input_image")],
    kinds(*_TEXTS, "input_image", alike=dict.fromkeys(_TEXTS, "text")),
]


class _Item(Part):
    id: str | None = Field(default=None, description="Is not used.")
    status: str | None = Field(default=None, description="Is not used.")


class MessageItem(_Item):
    """What somebody said."""

    type: Literal["message"] = Field(default="message", description="What the item is.")
    role: Literal["system", "developer", "user", "assistant"] = Field(description="Who speaks.")
    content: str | list[ItemPart] = Field(description="Text, or parts: texts, and images of a user.")
    phase: str | None = Field(default=None, description="Is not used.")


class CallItem(_Item):
    """A call that the model made."""

    type: Literal["function_call"] = Field(description="What the item is.")
    call_id: str = Field(description="The output refers to it.")
    name: str = Field(description="Of the function.")
    arguments: str = Field(description="JSON.")


class CallOutputItem(_Item):
    """What a function answered."""

    type: Literal["function_call_output"] = Field(description="What the item is.")
    call_id: str = Field(description="The call that it answers.")
    output: str | list[ItemText] = Field(description="Text, or parts that are text.")


class ThoughtText(Part):
    """A piece of a thought."""

    type: Literal["reasoning_text", "summary_text"] = Field(description="What it is.")
    text: str = Field(description="The piece.")


class ThoughtItem(_Item):
    """What the model thought."""

    type: Literal["reasoning"] = Field(description="What the item is.")
    summary: list[ThoughtText] | None = Field(default=None, description="Is not used.")
    content: list[ThoughtText] | None = Field(default=None, description="The thought.")
    encrypted_content: str | None = Field(default=None, description="Is not used: no model here writes it.")


_TYPES = ("message", "function_call", "function_call_output", "reasoning")
Item = Annotated[
    Annotated[MessageItem, tag("message")]
    | Annotated[CallItem, tag("function_call")]
    | Annotated[CallOutputItem, tag("function_call_output")]
    | Annotated[ThoughtItem, tag("reasoning")],
    kinds(*_TYPES, default="message"),
]


class TextFormat(Part):
    """Of the answer."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="Any text, any object, or by a schema.")
    name: str | None = Field(default=None, description="Of the schema; is not used.")
    schema_: dict[str, Any] | None = Field(default=None, alias="schema", description="The answer fulfils it.")
    strict: bool | None = Field(default=None, description="Refuse keywords that are not known, or leave them out.")
    description: str | None = Field(default=None, description="Is not used.")

    @model_validator(mode="after")
    def _schema_is_there(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("the type json_schema needs the field schema, and no other type has it")
        return self

    def of_chat(self) -> ResponseFormat:
        """As a chat has it."""
        schema = None
        if self.schema_ is not None:
            schema = JsonSchema(name=self.name or "", schema=self.schema_, strict=self.strict)
        return ResponseFormat(type=self.type, json_schema=schema)


class TextOptions(Part):
    """Of the answer's text."""

    format: TextFormat | None = Field(default=None, description="What it must look like.")
    verbosity: Literal["medium"] | None = Field(default=None, description="May be medium or null only.")


class _OfFunction(Part):
    type: Literal["function"] = Field(description="Others are not known.")


class FunctionTool(Function, _OfFunction):
    """What the model may call."""


class FunctionChoice(NamedFunction, _OfFunction):
    """The tool that the model must call."""


class ResponseStreamOptions(Part):
    """Of a stream."""

    include_obfuscation: bool | None = Field(default=None, description="Is not done.")


class Reasoning(Part):
    """How the model thinks before it answers."""

    effort: Effort | None = Field(default=None, description="How much, as far as its template knows; none: not.")
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        default=None, description="Is not made: thoughts are shown as they are."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(default=None, description="The same.")


class ResponseBody(Sampling, Unused):
    """Of `/v1/responses`. Nothing is kept of an answer: each request brings the whole conversation."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)] = Field(
        description="A text, or the items of the conversation so far."
    )
    instructions: str | None = Field(default=None, description="A system message before everything else.")
    max_output_tokens: int | None = Field(
        default=None, ge=1, description="New tokens at most; as many as there is room for."
    )
    text: TextOptions | None = Field(default=None, description="Of the answer's text.")
    tools: list[FunctionTool] | None = Field(default=None, max_length=MAX_TOOLS, description="What may be called.")
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = Field(
        default=None, description="Whether a tool must be called; auto."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="Several calls in one answer; true.")
    top_logprobs: int | None = sampling_parameter("logprobs", "So many likely tokens with each token.")
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        default=None, description="Log probabilities of the tokens; no model here has the other."
    )
    stream_options: ResponseStreamOptions | None = Field(default=None, description="Of a stream.")
    store: bool | None = Field(default=None, description="May be false or null only: nothing is kept.")
    previous_response_id: str | None = Field(default=None, description="May be null only: nothing is kept.")
    conversation: None = Field(default=None, description="May be null only.")
    background: Off | None = Field(default=None, description="May be false or null only.")
    truncation: Literal["disabled"] | None = Field(default=None, description="Nothing is left out of a long input.")
    max_tool_calls: None = Field(default=None, description="May be null only.")
    prompt: None = Field(default=None, description="May be null only.")
    reasoning: Reasoning | None = Field(default=None, description="Of a model that thinks before it answers.")
    metadata: dict[str, str] | None = Field(default=None, description="The answer repeats it.")
    user: str | None = Field(default=None, description="Of several versions of a model, a user has always the same.")

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer says how likely its tokens are."""
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())

    def chat(self) -> ChatBody:
        """What a chat is asked for.

        Raises:
            ApiError: something is asked for that would have to be kept, or the answer would have two forms.
        """
        for name, value in (("store", self.store), ("previous_response_id", self.previous_response_id)):
            if value:
                text = f"{name} is not supported, since nothing is kept here; send the whole conversation as input."
                raise ApiError(400, text, code="unsupported", param=name)
        format_ = None if self.text is None or self.text.format is None else self.text.format
        if format_ is not None and format_.type != "text" and self.tools and self.tool_choice != "none":
            text = "An answer has one form: give text.format or tools."
            raise ApiError(400, text, code="invalid_value", param="text.format")
        choice = self.tool_choice
        if isinstance(choice, FunctionChoice):
            choice = NamedTool(type="function", function=NamedFunction(name=choice.name))
        return self._conversation().body(
            self,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs,
            response_format=None if format_ is None else format_.of_chat(),
            tools=None if self.tools is None else [_tool(tool) for tool in self.tools],
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            user=self.user,
        )

    def _conversation(self) -> Chat:
        chat = Chat()
        if self.instructions is not None:
            chat.say("system", self.instructions)
        for item in [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            if isinstance(item, MessageItem):
                chat.say(item.role, _parts(item.content))
            elif isinstance(item, ThoughtItem):
                chat.think(joined(item.content or ""))
            elif isinstance(item, CallItem):
                function = FunctionCall(name=item.name, arguments=item.arguments)
                chat.call(ToolCall(id=item.call_id, function=function))
            else:
                chat.result(item.call_id, joined(item.output))
        return chat


def _parts(content: str | list[ItemPart]) -> str | list[TextPart | ImagePart]:
    if isinstance(content, str):
        return content
    return [image_part(part.image_url) if isinstance(part, ItemImage) else text_part(part.text) for part in content]


def _tool(tool: FunctionTool) -> Tool:
    values = tool.model_dump(include=set(Function.model_fields), exclude_unset=True)
    return Tool(type="function", function=Function(**values))
