"""Chat templates give the same text as transformers' own rendering."""

from __future__ import annotations

import json
from typing import Any

import pytest

from blink_runtime import chat_template
from blink_runtime.chat_template import ChatTemplate, ChatTemplateError

LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.last = loop.index0 %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
BLOCKS = """{% for m in messages %}
    {% if m['role'] == 'user' %}
  U: {{ m['content'] }}
    {% else %}
{% generation %}A: {{ m['content'] }}{% endgeneration %}

    {% endif %}
{% endfor %}
{{ messages | tojson }} {{ {'b': 'é<>', 'a': [1, none]} | tojson(indent=2) }}
{%- if tools %}tools{% endif %}{% if tools is none %} none{% endif %}
"""
# All that repeats: counting its rounds changes no text.
REPEATS = """
{%- macro show(message, mark='-') %}{{ mark }}{{ message.role }}{{ caller() if caller }}
{%- endmacro %}
{%- for m in messages if m.role != 'system' %}
{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}
    {{- loop.previtem.role if not loop.first }}{{ loop.nextitem.role if not loop.last }}
    {{- loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}{{ show(m) }}
    {%- for c in m.content if c == 'e' %}{{ c }}{% if loop.index > 1 %}{% break %}{% endif %}
    {%- else %}none{% endfor %}
{% else %}
nobody
{%- endfor %}
{%- for m in [] %}{{ m }}{% else %}empty{% endfor %}
{%- for x in [1, [2, [3]]] recursive %}{{ loop.depth }}{{ x if x is number else loop(x) }}
{%- endfor %}
{%- for m in messages %}{% call show(m, mark='+') %}!{% endcall %}{% endfor %}
{%- set block %}{% for key, value in messages[0] | items %}{{ key }}={{ value }};{% endfor %}
{%- endset %}
{%- block tail scoped %}{{ block | upper }}{% for i in range(3) %}{{ i }}{% endfor %}{% endblock %}
{{- self.tail() }}{% filter replace('a', 'b') %}{% for m in messages %}a{% endfor %}{% endfilter %}
"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "  Be brief. "},
        {"role": "user", "content": 'Say "é" <b> & 😀\n\n'},
        {"role": "assistant", "content": "é"},
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
    ],
]
SOURCES = {"llama3": LLAMA_3, "chatml": CHATML, "blocks": BLOCKS, "repeats": REPEATS}
TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end|>"}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("chat", CHATS, ids=["short", "long"])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
def test_equals_transformers(
    source: str, chat: list[dict[str, Any]], adds: bool, kwargs: dict[str, Any]
) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    (expected,), _ = utils.render_jinja_template(
        conversations=[chat],
        chat_template=source,
        add_generation_prompt=adds,
        **TOKENS,
        **kwargs,
    )
    template = ChatTemplate(source, TOKENS)
    assert template.render(chat, add_generation_prompt=adds, kwargs=kwargs) == expected
    request = {"messages": chat, "add_generation_prompt": adds, "kwargs": kwargs}
    assert template(json.dumps(request)) == expected


# In the manner of ChatML models: tools as JSON lines, calls with their tags, answers of tools.
WITH_TOOLS = """
{%- if tools %}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- 'Write <tool_call>{"name": ..., "arguments": ...}</tool_call>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- message.role }}{%- if message.content %}{{- ': ' + message.content }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name }}{{- call.function.arguments | tojson }}
    {%- endfor %}
    {{- '\\n' }}
{%- endfor %}
"""


def test_tools_equal_transformers() -> None:
    """Guards key order, characters outside ASCII and the test for "no tools"."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    function = {"name": "f", "description": "Grüße <b>", "parameters": {"z": 1, "a": [None, 0.5]}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"q": "é"}}}
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    template = ChatTemplate(WITH_TOOLS, TOKENS)
    assert template.takes_tools and not ChatTemplate(LLAMA_3, TOKENS).takes_tools
    for tools in ([{"type": "function", "function": function}], None):
        (expected,), _ = utils.render_jinja_template(
            conversations=[chat], tools=tools, chat_template=WITH_TOOLS, **TOKENS
        )
        assert template.render(chat, tools=tools) == expected
        request = {"messages": chat, "tools": tools or [], "add_generation_prompt": False}
        assert template(json.dumps({**request, "kwargs": {}})) == expected


def test_clients_cannot_replace_what_the_server_sets() -> None:
    template = ChatTemplate(LLAMA_3, TOKENS)
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(ChatTemplateError, match=name):
            template.render(CHATS[0], kwargs={name: []})
    # A name that Python's functions use for themselves is the template's as any other.
    plain = ChatTemplate("{{ messages[0].content }}{{ args }}", {})
    assert plain.render(CHATS[0], kwargs={"self": 1, "args": 2}) == CHATS[0][0]["content"] + "2"


CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_calls", [CALL]),
        ("function_call", {"name": "f", "arguments": "{}"}),
        ("prefix", True),
        ("partial", True),
        ("images", ["aGVsbG8="]),
        ("videos", ["aGVsbG8="]),
        ("audio", {"id": "audio_1"}),
    ],
)
def test_what_a_template_would_drop_is_refused(name: str, value: Any) -> None:
    """The bug: a field that this model's template never reads was ignored in silence."""
    template = ChatTemplate(LLAMA_3, TOKENS)
    chat = [*CHATS[0], {"role": "assistant", "content": "The", name: value}]
    with pytest.raises(ChatTemplateError, match=rf"messages\[1\]\.{name}"):
        template.render(chat)
    # What says nothing passes, and what the template reads in any way.
    for nothing in (None, False, [], {}):
        plain = template.render([*CHATS[0], {"role": "assistant", "content": "The"}])
        assert template.render([*chat[:-1], {**chat[-1], name: nothing}]) == plain
    for read in (f"m.{name}", f"m['{name}']", f"m.get('{name}')"):
        source = f"{{% for m in messages %}}{{% if {read} %}}!{{% endif %}}{{% endfor %}}"
        assert ChatTemplate(source, {}).render(chat) == "!"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ messages.append(1) }}",  # the sandbox is immutable
        "{{ ''.__class__.__mro__ }}",
        "{{ (1).__class__.__base__.__subclasses__() }}",
        "{{ messages[0].content + 1 }}",
        "{% include 'x' %}",
        "{{ 1 / 0 }}",
        "{{ 'x' * 10 ** 12 }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ '\\ud800' }}",  # half a character: no tokenizer takes it
        "{{ raise_exception('\\ud800') }}",
        "{{ 'x' * (2 ** 25 + 1) }}",
    ],
)
def test_what_a_template_may_not_do(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render(CHATS[0])


LOOP = "{% for i in range(1000) %}"
END = "{% endfor %}"
MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
BLOCK = (
    "{% set ns = namespace(depth=0) %}{% block a %}{% set ns.depth = ns.depth + 1 %}"
    "{% if ns.depth < 16 %}{{ self.a() }}{{ self.a() }}{% endif %}"
    "{% set ns.depth = ns.depth - 1 %}{% endblock %}"
)


# Of an end that comes after all, so that without the limit the test fails instead of hanging.
@pytest.mark.parametrize(
    "source",
    [
        LOOP + LOOP + END + END,
        LOOP + LOOP + "{% continue %}" + END + "{{ loop.index }}" + END,
        LOOP + "{% for i in range(1000) if not i %}" + END + END,
        LOOP + "{% block a scoped %}" + LOOP + END + "{% endblock %}" + END,
        "{% for i in [9, 9] recursive %}{{ loop([9, 9]) if loop.depth < 16 }}{% endfor %}",
        MACRO + "{{ f(16) }}",
        BLOCK,
    ],
    ids=["nested", "continue", "left out", "scoped", "recursive", "macro", "block"],
)
def test_a_template_without_end_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: such a template held the network's thread, and with it the whole server."""
    monkeypatch.setattr(chat_template, "_MAX_STEPS", 20_000)
    template = ChatTemplate(source, {})
    with pytest.raises(ChatTemplateError, match=r"found no end within 30000 .*/v1/completions"):
        template.render(CHATS[0])
    # A client cannot give itself more.
    with pytest.raises(ChatTemplateError, match=r"found no end within 30000"):
        template.render(CHATS[0], kwargs={chat_template._STEP: None})


def test_many_messages_may_take_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message looks through all others, as templates do that look for the last question."""
    monkeypatch.setattr(chat_template, "_MAX_STEPS", 10)
    source = (
        "{% for m in messages %}{% for other in messages %}{% if loop.last %}{{ m.role }}"
        "{% endif %}{% endfor %}{% endfor %}"
    )
    assert ChatTemplate(source, {}).render(CHATS[0] * 300) == "user" * 300


def test_powers_are_bounded() -> None:
    """The bug: a power held the server, or its start where both terms are constants."""
    allowed = ChatTemplate("{{ 2 ** 10 }} {{ 2 ** 0.5 > 1 }} {{ 2 ** -1 }} {{ 1 ** 99999 }}", {})
    assert allowed.render(CHATS[0]) == "1024 True 0.5 1"
    for source in (
        "{{ 7 ** 99999 > 1 }}",
        "{% set n = messages | length * 99999 %}{{ 7 ** n > 1 }}",
    ):
        with pytest.raises(ChatTemplateError, match="a power has more than 4096 bits"):
            ChatTemplate(source, {}).render(CHATS[0])


def test_a_refusal_can_be_told() -> None:
    # Guards: half a character in it left the client with "std::bad_cast".
    with pytest.raises(ChatTemplateError) as refusal:
        ChatTemplate("{{ raise_exception('\\ud800') }}", {}).render(CHATS[0])
    assert str(refusal.value).encode().endswith(b"\\ud800")
    # The bug: an exception without a text, such as that of too little memory, gave no reason.
    with pytest.raises(ChatTemplateError, match=r"refused the messages: MemoryError$"):
        ChatTemplate("{{ 'x' * 10 ** 18 }}", {}).render(CHATS[0])


@pytest.mark.parametrize(
    "source",
    ["{% for %}", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{% if 1 %}" * 400],
    ids=["syntax", "parentheses", "blocks"],
)
def test_a_text_that_is_no_template(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate(source, {})


def test_date() -> None:
    assert len(ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}).render(CHATS[0])) == 11
