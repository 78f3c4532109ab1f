"""Chat templates: the same text as transformers gives, and nothing that a hostile template wants."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from penjing.core.errors import InputError, RequestError
from penjing.core.text.chat import MAX_TEMPLATE_CHARS, ChatTemplate
from penjing.core.text.chat_sandbox import MAX_CHARS
from penjing.core.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hi <b>&amp; 'you' 🌱\n"}
CHAT = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Yes."}, USER]

# Written for these tests in the manner of published templates: their constructs, not their text.
TEMPLATES = {
    "llama-2": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
        "{% set system = false %}{% endif %}{% for m in loop_messages %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
        "{% endif %}{% if loop.index0 == 0 and system != false %}"
        "{% set text = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m['content'] %}"
        "{% else %}{% set text = m['content'] %}{% endif %}{% if m['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}{% else %}{{ ' ' + text | trim + ' ' + eos_token }}"
        "{% endif %}{% endfor %}"
    ),
    "llama-3": (
        "{%- set date = date_string | default('26 Jul 2024', true) %}\n{%- set ns = namespace(count=0) %}\n"
        "{{- bos_token }}\n{%- for message in messages %}\n    {%- set ns.count = ns.count + 1 %}\n"
        "    {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' }}\n"
        "    {{- message.content | trim }}{{ '<|eot_id|>' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}\n{%- endif %}"
        "{{ ns.count }} {{ date }} {{ messages | length }}"
    ),
    "qwen": (
        "{%- if tools %}{{- 'tools: ' + (tools | tojson(indent=2)) }}{%- endif %}\n"
        "{%- macro turn(role, text) -%}<|im_start|>{{ role }}\n{{ text }}<|im_end|>\n{% endmacro -%}\n"
        "{%- for message in messages -%}{%- if message.role == 'ignored' -%}{%- continue -%}{%- endif -%}\n"
        "{{ turn(message['role'], message['content']) }}\n"
        "{%- if loop.last and message.role is defined and message.content is string -%}last{%- endif -%}\n"
        "{%- endfor -%}\n"
        "{%- for m in messages[::-1] if m.role != 'system' %}{{ m.role.upper() }},{% endfor -%}\n"
        "{{- messages | map(attribute='role') | list | join('/') }}{{ messages | selectattr('role', 'equalto', 'user')"
        " | list | length }}{{ '\\n'.join(['a', 'b']) }}{{ 'abc'.split('b') | last }}{{ 'x' * 3 }}{{ 7 // 2 }}"
        "{{ messages[0].content.startswith('Be') }}{{ 'a-b'.replace('-', '+') | upper }}{{ {'a': 1}.items() | list }}"
    ),
    "training": (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
        "{% endgeneration %}{% else %}{{ message.content | tojson }}{% endif %}\n{% endfor %}{% break_me %}"
    ).replace("{% break_me %}", ""),
}


def render(template: str, messages: Any = CHAT, **variables: Any) -> str:
    return ChatTemplate(template, "test", {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **variables)


@pytest.fixture(scope="module")
def theirs(tiny_checkpoint: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_same_text_as_transformers(theirs: Any, name: str, prompt: bool) -> None:
    for messages in ([USER], CHAT[:2], CHAT):
        expected = theirs.apply_chat_template(
            messages, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=prompt
        )
        assert render(TEMPLATES[name], messages, add_generation_prompt=prompt) == expected


def test_smollm2_same_text_and_ids_as_transformers(smollm2: Path) -> None:
    template, tokenizer = ChatTemplate.from_folder(smollm2), Tokenizer.from_folder(smollm2)
    theirs = AutoTokenizer.from_pretrained(smollm2)
    assert template is not None
    for messages in ([USER], CHAT):
        text = template.render(messages)
        assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert tokenizer.encode(text, add_special=False) == expected


def test_variables_reach_the_template() -> None:
    assert render("{{ enable_thinking }}{{ tools is none }}", enable_thinking=False) == "FalseTrue"


def test_variables_may_have_any_names() -> None:
    template = ChatTemplate("{{ messages | length }}{{ enable_thinking }}{{ values }}", "test")
    names = {"self": 1, "messages": [], "values": 2, "enable_thinking": 3, "template": 4}
    assert template.render([USER], **names) == "132"


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "ab"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hi", "messages must be a list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "hi"}], r"messages\[0\]\.role must be text"),
        ([USER, {"role": 3, "content": "hi"}], r"messages\[1\]\.role must be text .*got 3"),
        ([{"role": "user"}], r"messages\[0\]\.content must be text"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only parts of type 'text'"),
    ],
)
def test_malformed_messages(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(TEMPLATES["llama-3"], messages)


def test_what_the_template_rejects_is_the_requests_error() -> None:
    with pytest.raises(RequestError, match="the chat template rejects them: roles must alternate"):
        render(TEMPLATES["llama-2"], [USER, USER])
    for failing in ("{{ messages[0].nothing.more }}", "{{ messages + 1 }}", "{{ 1 / 0 }}", "{{ missing() }}"):
        with pytest.raises(RequestError, match="fails on them"):
            render(failing)


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ (messages | attr('__class__')) }}",
    "{{ raise_exception.__globals__['sys'] }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self._TemplateReference__context }}",
    "{{ joiner }}{{ lipsum.__globals__ }}",
    "{{ namespace.__init__ }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ '%s' % messages }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ messages | map('format', '{0.__class__}') | list }}",
    "{{ '{0[0].__class__}'.format(messages) }}",
    "{{ '{m.__class__}'.format_map({'m': messages}) }}",
    "{{ ('{0.__class__}' | string).format(messages) }}",
    "{{ '{}'['format'].__globals__ }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_cannot_leave_the_sandbox(template: str) -> None:
    messages = [dict(USER)]
    try:
        text = render(template, messages)
    except (InputError, RequestError):
        text = ""
    assert "<class" not in text
    assert "uid=" not in text
    assert "object at" not in text.replace("Undefined", "")
    assert "root:" not in text
    assert messages == [USER]


NESTED = "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
DOUBLING = (
    "{% set ns = namespace(x='aaaaaaaaaa') %}{% for i in range(60) %}{% set ns.x = DOUBLE %}{% endfor %}{{ ns.x }}"
)
BOMBS = {
    "output": "{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}",
    "static output": "{% for i in range(100000) %}" + "a" * 1000 + "{% endfor %}",
    "static block": "{% set x %}{% for i in range(100000) %}" + "a" * 1000 + "{% endfor %}{% endset %}",
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "loops over text": "{% set s = 'a' * 1000 %}{% for a in s %}{% for b in s %}{% for c in s %}" + "{% endfor %}" * 3,
    "range": "{% for i in range(10000000000) %}{% endfor %}",
    "product": "{{ ('a' * 100000000000) | length }}",
    "product of a list": "{{ ([1] * 100000000000) | length }}",
    "reversed product": "{{ (100000000000 * 'a') | length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "power of float": "{{ (2 ** 100000000) % 7 }}",
    "number": DOUBLING.replace("'aaaaaaaaaa'", "9").replace("DOUBLE", "ns.x * ns.x").replace("{{ ns.x }}", ""),
    "plus": DOUBLING.replace("DOUBLE", "ns.x + ns.x"),
    "tilde": DOUBLING.replace("DOUBLE", "ns.x ~ ns.x"),
    "join": DOUBLING.replace("DOUBLE", "[ns.x, ns.x] | join"),
    "method join": DOUBLING.replace("DOUBLE", "''.join([ns.x, ns.x])"),
    "replace": DOUBLING.replace("DOUBLE", "ns.x | replace('a', 'aa')"),
    "method replace": DOUBLING.replace("DOUBLE", "ns.x.replace('a', 'aa')"),
    "empty replace": DOUBLING.replace("DOUBLE", "ns.x.replace('', 'aaaaaa')"),
    "block": DOUBLING.replace(
        "{% set ns.x = DOUBLE %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    ),
    "indent": "{{ ('\n' * 100000) | indent(100000) }}",
    "center": "{{ 'a' | center(10000000000) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "zfill": "{{ 'a'.zfill(width=10000000000) }}",
    "format": "{{ '{:>10000000000}'.format('a') }}",
    "format of a long text": DOUBLING.replace("DOUBLE", "'{0}{0}'.format(ns.x)"),
    "percent": "{{ '%10000000000d' % 1 }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "expandtabs": "{{ '\t'.expandtabs(10000000000) }}",
    "nested text": NESTED + "{{ ns.x }}",
    "nested json": NESTED + "{{ ns.x | tojson }}",
    "nested string": NESTED + "{{ ns.x | string | length }}",
    "nested tilde": NESTED + "{{ (ns.x ~ '') | length }}",
    "json indent": "{{ messages | tojson(indent=10000000000) | length }}" + "{{ 'a' * 100000000 }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "branching recursion": (
        "{% macro f(n) %}{% if n < 60 %}{% set a = f(n + 1) %}{% set b = f(n + 1) %}{% endif %}{% endmacro %}{{ f(0) }}"
    ),
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
    "lipsum": "{{ lipsum(n=1000000000) }}",
    "batch": "{{ [1] | batch(10000000000, 0) | list | length }}",
    "sum of lists": "{{ ([[1]] * 2000000) | sum(start=[]) | length }}",
    "sum of texts": "{{ (['a'] * 250000) | sum(start='') | length }}",
    "unique": "{{ (['a' * 1000000] * 200000) | unique | list | length }}",
    "sort": "{{ (['a' * 1000000] * 200000) | sort | length }}",
    "lower": "{% set s = 'aB' * 1000000 %}{% for i in range(100000) %}{% set x = s | lower %}{% endfor %}",
    "contains": "{% set s = [1] * 2000000 %}{% for i in range(100000) %}{% if 2 in s %}{% endif %}{% endfor %}",
    "contains text": (
        "{% set s = 'ab' * 5000000 %}{% for i in range(100000) %}{% if 'ba' * 9 ~ 'x' in s %}{% endif %}{% endfor %}"
    ),
    "is in": "{% set s = [1] * 2000000 %}{% for i in range(100000) %}{% if 2 is in s %}{% endif %}{% endfor %}",
    "select": "{% set s = [1] * 2000000 %}{{ range(100000) | select('in', s) | list | length }}",
    "equal lists": NESTED + NESTED.replace("ns", "nt") + "{{ ns.x == nt.x }}",
    "equal by a test": NESTED + NESTED.replace("ns", "nt") + "{{ ns.x is eq nt.x }}",
    "lists": "{% set s = [1] * 2000000 %}{% for i in range(10000) %}{% set x = s | list %}{% endfor %}",
    "split": "{% set s = 'a ' * 5000000 %}{% for i in range(10000) %}{% set x = s.split() %}{% endfor %}",
    "long recursive loop": (
        "{% for x in [1] recursive %}{{ loop(range(100000)) }}{% endfor %}"
        "{% set s = [1] * 1000000 %}{% for i in range(99999) %}{% set y = s[:-1] %}{% endfor %}"
    ),
    "raise": "{{ raise_exception('a' * 100000000000) }}",
    "date": "{{ strftime_now('%c' * 100000000) }}",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_cannot_run_for_long_or_fill_the_memory(name: str) -> None:
    began = time.process_time()
    with pytest.raises((InputError, RequestError)) as caught:
        render(BOMBS[name])
    assert time.process_time() - began < 3
    assert len(str(caught.value)) < 2000


def test_a_text_is_filled_in_as_python_does() -> None:
    """Tencent's Hunyuan 3 writes its special tokens so."""
    assert render("{% set t = '<{}:x>' %}{{ t.format('a') }}{{ t.format(1.5) }}") == "<a:x><1.5:x>"
    assert render("{{ '{1}{0}{{}}{role}|{}'.replace('|{}', '').format('a', none, role=true) }}") == "Nonea{}True"
    with pytest.raises(RequestError, match="fails on them"):
        render("{{ '{}{}'.format('a') }}")
    with pytest.raises(InputError, match=r"plain fields alone, not '0\.real'"):
        render("{{ '{0.real}'.format(1) }}")


def test_an_ordinary_long_chat_is_within_the_budget() -> None:
    messages = [{"role": role, "content": "word " * 1000} for role in ("user", "assistant")] * 150
    text = render(TEMPLATES["llama-3"], messages)
    assert 1_500_000 < len(text) < MAX_CHARS


def test_threads_have_budgets_of_their_own() -> None:
    template = ChatTemplate("{{ 'a' * 3000000 }}", "test")
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(len(template.render(CHAT)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [3_000_000] * 4


@pytest.mark.parametrize("text", ["{% for %}", "{{ ", "{% unknown %}", "{{ a | no_such_filter }}", "{%" * 5000])
def test_text_that_is_no_template(text: str) -> None:
    with pytest.raises(InputError, match="chat template is no"):
        ChatTemplate(text, "test")


def test_too_long() -> None:
    with pytest.raises(InputError, match="at most"):
        ChatTemplate("a" * (MAX_TEMPLATE_CHARS + 1), "test")


def test_where_templates_come_from(tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))
    config = folder / "tokenizer_config.json"
    values = json.loads(config.read_text())

    def loaded(chat_template: Any) -> str | None:
        config.write_text(json.dumps(values | {"chat_template": chat_template}))
        template = ChatTemplate.from_folder(folder)
        return None if template is None else template.text

    assert loaded("one") == "one"
    assert loaded(None) is None
    assert loaded([{"name": "default", "template": "two"}, {"name": "rag", "template": "three"}]) == "two"
    assert loaded([{"name": "rag", "template": "three"}]) is None
    with pytest.raises(InputError, match="chat_template must be text"):
        loaded(7)
    (folder / "chat_template.jinja").write_text("file {{ bos_token }}")
    template = ChatTemplate.from_folder(folder)
    assert template is not None
    assert template.render([USER]) == "file <|endoftext|>"
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot read"):
        ChatTemplate.from_folder(folder)
    assert ChatTemplate.from_folder(tmp_path) is None


# In the manner of SmolVLM's: it walks over the parts of a message, and writes the image token itself.
OF_PARTS = (
    "{% for m in messages %}{{ m['role'] | capitalize }}{% if m['content'][0]['type'] == 'image' %}:{% else %}: "
    "{% endif %}{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
OF_EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<begin><image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def test_a_template_of_parts_is_given_parts() -> None:
    template = ChatTemplate(OF_PARTS, "a test")
    assert template.form == "parts"
    image, text = {"type": "image"}, {"type": "text", "text": "what?"}
    asked = [{"role": "user", "content": [image, text]}, {"role": "assistant", "content": "a bag"}]
    assert template.render(asked) == "User:<image>what?<end>\nAssistant: a bag<end>\nAssistant:"
    assert template.render([{"role": "user", "content": "what?"}]) == "User: what?<end>\nAssistant:"
    with pytest.raises(RequestError, match="only parts of type 'text'"):
        template.render([{"role": "user", "content": [{"type": "video"}]}])


def test_a_template_of_texts_or_parts_gets_parts_where_there_is_an_image() -> None:
    template = ChatTemplate(OF_EITHER, "a test")
    assert template.form == "both"
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "a<begin><image>b"
    assert template.render([{"role": "user", "content": parts[::2]}]) == "ab"
    with pytest.raises(RequestError, match="only parts of type 'text'"):
        ChatTemplate(TEMPLATES["llama-3"], "a test").render([{"role": "user", "content": parts}])


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_templates_of_texts_are_known_as_such(name: str) -> None:
    assert ChatTemplate(TEMPLATES[name], "a test", {"bos_token": "<s>", "eos_token": "</s>"}).form == "text"


def test_a_template_beside_a_processor_goes_before_that_of_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "tokenizer"}))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.render([{"role": "user", "content": "hello"}]) == "processor"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(InputError, match=r"chat_template\.json: chat_template must be text"):
        ChatTemplate.from_folder(tmp_path)
