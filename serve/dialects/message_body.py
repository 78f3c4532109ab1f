"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, and the chat that they ask for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from penjing.serve.dialects.translation import Chat, image_part, joined, kinds, tag, text_part
from penjing.serve.front.bodies import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Body,
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
    StopText,
    TextPart,
    Tool,
    ToolCall,
)
from penjing.serve.gate.errors import ApiError
from penjing.serve.gate.fields import Part
from penjing.serve.sampling.params import MAX_STOP_STRINGS


class _Block(Part):
    cache_control: dict[str, Any] | None = Field(default=None, description="Is not used: every prompt is cached.")


class TextBlock(_Block):
    """A part that is text."""

    type: Literal["text"] = Field(description="What the block is.")
    text: str = Field(description="Its text.")
    citations: list[Any] | None = Field(default=None, description="Is not used.")


class Base64Source(Part):
    """An image itself."""

    type: Literal["base64"] = Field(description="Others are not known: nothing is fetched, and no files are kept.")
    media_type: Literal["image/jpeg", "image/png"] = Field(description="What it is.")
    data: str = Field(description="Its file in base64.")


class ImageBlock(_Block):
    """An image of a user, for a model that sees."""

    type: Literal["image"] = Field(description="What the block is.")
    source: Base64Source = Field(description="Where it is.")


class ToolUseBlock(_Block):
    """A call that the model made."""

    type: Literal["tool_use"] = Field(description="What the block is.")
    id: str = Field(description="The result refers to it.")
    name: str = Field(description="Of the tool.")
    input: dict[str, Any] = Field(description="Its arguments.")
    caller: dict[str, Any] | None = Field(default=None, description="Is not used.")


class ToolResultBlock(_Block):
    """What a tool answered."""

    type: Literal["tool_result"] = Field(description="What the block is.")
    tool_use_id: str = Field(description="The call that it answers.")
    content: str | list[TextBlock] | None = Field(default=None, description="Text, or blocks that are text.")
    is_error: bool | None = Field(default=None, description="Is not used: the text says it.")


class ThinkingBlock(_Block):
    """What the model thought before."""

    type: Literal["thinking"] = Field(description="What the block is.")
    thinking: str = Field(description="The thought.")
    signature: str | None = Field(default=None, description="Is not used.")


Block = Annotated[
    Annotated[TextBlock, tag("text")]
    | Annotated[ImageBlock, tag("image")]
    | Annotated[ToolUseBlock, tag("tool_use")]
    | Annotated[ToolResultBlock, tag("tool_result")]
    | Annotated[ThinkingBlock, tag("thinking")],
    kinds("text", "image", "tool_use", "tool_result", "thinking"),
]


class Turn(Part):
    """One message."""

    role: Literal["user", "assistant"] = Field(description="Who speaks.")
    content: str | list[Block] = Field(
        description="Text, or blocks: text, thoughts and calls of an assistant, images and results of a user."
    )


class MessageTool(_Block):
    """What the model may call."""

    type: Literal["custom"] | None = Field(default=None, description="Others are not known.")
    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,64}$", description="What it is called as.")
    description: str | None = Field(default=None, description="For the model.")
    input_schema: dict[str, Any] = Field(description="JSON schema of its input, an object.")
    strict: bool | None = Field(default=None, description="Refuse keywords that are not known, or leave them out.")

    @field_validator("input_schema")
    @classmethod
    def _is_object(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value.get("type") != "object":
            raise ValueError('it needs "type": "object"')
        return value


class MessageToolChoice(Part):
    """Whether a tool must be called."""

    type: Literal["auto", "any", "tool", "none"] = Field(description="As the model likes, any, one, or none.")
    name: str | None = Field(default=None, description="Of the one.")
    disable_parallel_tool_use: bool | None = Field(default=None, description="At most one call in an answer.")


class MessageFormat(Part):
    """Of the answer."""

    type: Literal["json_schema"] = Field(description="Others are not known.")
    schema_: dict[str, Any] = Field(alias="schema", description="The answer is JSON that fulfils it.")


class OutputConfig(Part):
    """Of the answer."""

    format: MessageFormat | None = Field(default=None, description="What it must look like.")
    effort: None = Field(default=None, description="May be null only.")


class Thinking(Part):
    """Whether the model thinks first."""

    type: Literal["enabled", "adaptive", "disabled"] = Field(
        description="Disabled: it does not, as far as its template knows."
    )
    budget_tokens: int | None = Field(default=None, ge=1, description="Is not used: max_tokens ends an answer.")
    display: str | None = Field(default=None, description="Is not used: thoughts are shown as they are.")


_EFFORTS: dict[str, Effort] = {"enabled": "medium", "adaptive": "medium", "disabled": "none"}


class Metadata(Part):
    """Of the request."""

    user_id: str | None = Field(default=None, description="Stays with one version of the model.")


class CountBody(Body):
    """Of `/v1/messages/count_tokens`."""

    messages: list[Turn] = Field(min_length=1, max_length=MAX_MESSAGES, description="The conversation so far.")
    system: str | list[TextBlock] | None = Field(default=None, description="A system message before everything else.")
    tools: list[MessageTool] | None = Field(default=None, max_length=MAX_TOOLS, description="What may be called.")
    tool_choice: MessageToolChoice | None = Field(default=None, description="Whether a tool must be called; auto.")
    output_config: OutputConfig | None = Field(default=None, description="Of the answer.")
    thinking: Thinking | None = Field(default=None, description="Whether a model that can think does.")
    cache_control: dict[str, Any] | None = Field(default=None, description="Is not used: every prompt is cached.")

    def chat(self) -> ChatBody:
        """What a chat is asked for.

        Raises:
            ApiError: blocks stand where they cannot, or the answer would have two forms.
        """
        return self._chat(Sampling(model=self.model))

    def _chat(self, sampling: Sampling, **values: Any) -> ChatBody:
        form = None if self.output_config is None else self.output_config.format
        choice = self.tool_choice
        if form is not None and self.tools and (choice is None or choice.type != "none"):
            text = "An answer has one form: give output_config.format or tools."
            raise ApiError(400, text, code="invalid_value", param="output_config.format")
        schema = None if form is None else JsonSchema(name="answer", schema=form.schema_, strict=True)
        return self._conversation().body(
            sampling,
            response_format=None if schema is None else ResponseFormat(type="json_schema", json_schema=schema),
            tools=None if self.tools is None else [_tool(tool) for tool in self.tools],
            tool_choice=None if choice is None else _choice(choice),
            parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
            reasoning_effort=None if self.thinking is None else _EFFORTS[self.thinking.type],
            **values,
        )

    def _conversation(self) -> Chat:
        chat = Chat()
        if self.system is not None:
            chat.say("system", joined(self.system))
        for index, turn in enumerate(self.messages):
            blocks = [TextBlock(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
            _check_blocks(turn.role, blocks, index)
            for block in blocks:
                if isinstance(block, ToolResultBlock):
                    chat.result(block.tool_use_id, joined(block.content or ""))
            chat.think("".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)))
            parts = [_part(block) for block in blocks if isinstance(block, TextBlock | ImageBlock)]
            if parts or not any(isinstance(block, ToolResultBlock | ThinkingBlock) for block in blocks):
                chat.say(turn.role, parts)
            for block in blocks:
                if isinstance(block, ToolUseBlock):
                    function = FunctionCall(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False))
                    chat.call(ToolCall(id=block.id, function=function))
        if self.messages[-1].role == "assistant":
            text = "The last message is the assistant's: going on with it is not supported; end with the user's."
            raise ApiError(400, text, code="unsupported", param=f"messages.{len(self.messages) - 1}.role")
        return chat


class MessageBody(CountBody, Sampling):
    """Of `/v1/messages`."""

    max_tokens: int = Field(ge=1, description="New tokens at most.")
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS)] | None = Field(
        default=None, description="The answer ends before one of these texts."
    )
    metadata: Metadata | None = Field(default=None, description="Of the request.")
    service_tier: str | None = Field(default=None, description="Is not used.")

    def chat(self) -> ChatBody:
        """See `CountBody.chat`."""
        # A text that ended the answer is shown, so that the answer can name it; it is cut off afterwards.
        shown = True if self.stop_sequences else self.include_stop_str_in_output
        stops = self.stop_sequences or None
        user = None if self.metadata is None else self.metadata.user_id
        return self._chat(self, max_tokens=self.max_tokens, stop=stops, include_stop_str_in_output=shown, user=user)


def _check_blocks(role: str, blocks: Sequence[Block], index: int) -> None:
    wrong = ("tool_result", "image") if role == "assistant" else ("tool_use", "thinking")
    for number, block in enumerate(blocks):
        if block.type in wrong:
            where = f"messages.{index}.content.{number}.type"
            raise ApiError(
                400, f"{where}: no {block.type} is in a message of {role}.", code="invalid_value", param=where
            )


def _part(block: TextBlock | ImageBlock) -> TextPart | ImagePart:
    if isinstance(block, TextBlock):
        return text_part(block.text)
    return image_part(f"data:{block.source.media_type};base64,{block.source.data}")


def _tool(tool: MessageTool) -> Tool:
    same = {"name": tool.name, "parameters": tool.input_schema}
    given = {name: value for name in ("description", "strict") if (value := getattr(tool, name)) is not None}
    return Tool(type="function", function=Function(**same, **given))


def _choice(choice: MessageToolChoice) -> Literal["none", "auto", "required"] | NamedTool:
    if (choice.type == "tool") != (choice.name is not None):
        text = "tool_choice: a name belongs to the type tool."
        raise ApiError(400, text, code="invalid_value", param="tool_choice.name")
    if choice.name is not None:
        return NamedTool(type="function", function=NamedFunction(name=choice.name))
    return "required" if choice.type == "any" else "none" if choice.type == "none" else "auto"
