"""Render chat templates as HuggingFace does: messages -> the prompt's text.

The environment follows transformers' `utils/chat_template_utils.py`: an immutable sandbox, trimmed
blocks, loop controls, the `generation` tag, `raise_exception`, `strftime_now` and a `tojson` that
keeps characters outside ASCII.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

if TYPE_CHECKING:
    from blinkc.bundle.reader import Bundle

# Fields of a message that carry something to show or to do: a template that never reads one would
# drop it without a word.
_COUNTED_ON = (
    "tool_calls", "function_call", "prefix", "partial", "images", "videos", "audio",
)  # fmt: skip
# Above what a body of the default limit becomes: a template that multiplies its input would keep
# the tokenizer busy for minutes, and other chats waiting.
_MAX_CHARACTERS = 32 << 20
# Rounds of loops and calls of macros: above what a body of the default limit has parts, and enough
# for each of some thousand messages to look through all others; seconds where there is no end.
_MAX_STEPS = 1_000_000
_MAX_STEPS_OF_A_MESSAGE = 10_000
_MAX_POWER_BITS = 4096  # a large one holds all threads, and nothing can stop it
_STEP = "a step"  # what counts them: no template can write such a name
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplateError(ValueError):
    """The template refused these messages: the client's to fix, and what it is told."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja source of the checkpoint.
        special_tokens: names such as `bos_token` -> text, which templates refer to.

    Raises:
        ChatTemplateError: the source is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            tree = environment.parse(source)
            names = jinja2.meta.find_undeclared_variables(tree)
            self._template = environment.from_string(_with_counted_steps(environment.parse(source)))
        # The last two come of one that is nested too deeply.
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error
        # Jinja copies the globals once a rendering: from a plain dict that costs a third.
        self._template.globals = dict(self._template.globals)
        self._takes_tools = "tools" in names
        self._unread = tuple(name for name in _COUNTED_ON if name not in _names_read(tree))
        self._special_tokens = dict(special_tokens)

    @property
    def takes_tools(self) -> bool:
        """Whether the template says anything about tools."""
        return self._takes_tools

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt of a chat.

        Args:
            messages: as OpenAI's API has them, but for the arguments of earlier calls, which are
                objects.
            tools: descriptions of functions, as OpenAI's API has them; None and none are the same.

        Raises:
            ChatTemplateError: the template called `raise_exception`, or cannot take these messages,
                or would leave out what one of them holds, or finds no end.
        """
        kwargs = dict(kwargs or {})
        if clash := sorted(_RESERVED & kwargs.keys()):
            raise ChatTemplateError(f"chat_template_kwargs must not set '{clash[0]}'")
        self._refuse_unread(messages)
        max_steps = _MAX_STEPS + _MAX_STEPS_OF_A_MESSAGE * len(messages)
        context = {
            **self._special_tokens,
            **kwargs,
            _STEP: _Steps(max_steps),
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(context)
            text.encode()  # halves of characters, which nothing behind here takes
        except _TooManyStepsError as error:
            raise ChatTemplateError(
                f"the model's chat template found no end within {max_steps} rounds of its loops "
                "and calls of its macros; use /v1/completions, or compile the model with a chat "
                "template that ends"
            ) from error
        except Exception as error:  # a template is a program: whatever it raises, it refuses
            said = str(error).encode(errors="backslashreplace").decode() or type(error).__name__
            raise ChatTemplateError(f"the chat template refused the messages: {said}") from error
        if len(text) > _MAX_CHARACTERS:
            raise ChatTemplateError(
                f"the chat template makes {len(text)} characters of the messages; at most "
                f"{_MAX_CHARACTERS} are allowed"
            )
        return text

    def _refuse_unread(self, messages: list[dict[str, Any]]) -> None:
        for number, message in enumerate(messages):
            for name in self._unread:
                if message.get(name):
                    raise ChatTemplateError(
                        f"'messages[{number}].{name}' is not supported: this model's chat template "
                        "does not read it"
                    )

    def __call__(self, text: str) -> str:
        """Render the front end's JSON: messages, tools, add_generation_prompt, kwargs -> prompt."""
        request = json.loads(text)
        return self.render(
            request["messages"],
            add_generation_prompt=request["add_generation_prompt"],
            tools=request.get("tools"),
            kwargs=request["kwargs"],
        )


def load_chat_template(bundle: Bundle) -> ChatTemplate | None:
    """Return the bundle's chat template, or None where it has none."""
    tokenizer = bundle.manifest.tokenizer
    if tokenizer.chat_template is None:
        return None
    named = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    source = bundle.read_bytes(tokenizer.chat_template).decode()
    return ChatTemplate(source, {name: text for name, text in named.items() if text is not None})


def refuse_chats(_: str) -> str:
    """Stand for the template of a model that has none."""
    raise ChatTemplateError("this model has no chat template; use /v1/completions")


def _names_read(tree: jinja2.nodes.Template) -> set[str]:
    """Return what may name a field in a template: attributes and texts."""
    attributes = {node.attr for node in tree.find_all(jinja2.nodes.Getattr)}
    constants = (node.value for node in tree.find_all(jinja2.nodes.Const))
    return attributes | {value for value in constants if isinstance(value, str)}


class _TooManyStepsError(Exception):
    """A rendering used up its steps."""


@dataclass(slots=True)
class _Steps:
    """The steps that a rendering may still take: renderings run on several threads at a time."""

    num_left: int


def _with_counted_steps(tree: jinja2.nodes.Template) -> jinja2.nodes.Template:
    """Make each round of a loop and each call of a macro or block count as a step."""
    loops = list(tree.find_all(jinja2.nodes.For))
    bodies = [loop.body for loop in loops]
    bodies += [macro.body for macro in tree.find_all(jinja2.nodes.Macro)]
    bodies += [block.body for block in tree.find_all(jinja2.nodes.Block)]
    for body in bodies:
        body.insert(0, jinja2.nodes.ExprStmt(_step_node()))
    for loop in loops:
        if loop.test is not None:  # what it leaves out is a round, too
            loop.test = jinja2.nodes.And(_step_node(), loop.test)
    return tree


def _step_node() -> jinja2.nodes.Filter:
    # Filters are what Jinja calls without asking the sandbox, which takes several times as long.
    return jinja2.nodes.Filter(jinja2.nodes.ContextReference(), _STEP, [], [], None, None)


def _count_step(context: jinja2.runtime.Context) -> bool:
    steps: _Steps = context.parent[_STEP]
    steps.num_left -= 1
    if steps.num_left < 0:
        raise _TooManyStepsError
    return True


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; it does nothing here."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    @staticmethod
    def _render(caller: Callable[[], str]) -> str:
        return caller()


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, without powers that a processor has no time for."""

    intercepted_binops = frozenset({"**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        are_integers = isinstance(left, int) and isinstance(right, int)
        if are_integers and right * (left.bit_length() - 1) > _MAX_POWER_BITS:
            raise ValueError(f"a power has more than {_MAX_POWER_BITS} bits")
        return super().call_binop(context, operator, left, right)


def _environment() -> jinja2.Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.filters[_STEP] = _count_step
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes for HTML; templates of language models do not want that.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
