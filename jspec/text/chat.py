"""Chat templates: a model's Jinja template, rendered in a sandbox as in transformers."""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation: `{"role": "system" | "user" | "assistant", "content": text}` in turn."""

ChatTemplate: TypeAlias = str | Mapping[str, str]
"""A Jinja template, or several by name; `default` is used if no name is given."""


def render_chat(
    messages: Messages,
    template: ChatTemplate | None,
    special_tokens: Mapping[str, str] | None = None,
    *,
    name: str | None = None,
) -> str:
    """Renders a conversation with the model's chat template and a generation prompt.

    The result is the text of transformers' `apply_chat_template(..., add_generation_prompt=True)`
    without tools and documents.

    Args:
      messages: the conversation, oldest first; a template may read other keys of a message, too.
      template: of the model.
      special_tokens: texts of `bos_token`, `eos_token` and others, for the template.
      name: of the template, where there are several.

    Returns:
      The prompt with special tokens: encode it without adding any.

    Raises:
      ImportError: the `jinja2` package is missing.
      ValueError: there is no message, or one without role or content; there is no template of that
        name; the template cannot be parsed, refuses the messages or fails.

    Source: transformers utils/chat_template_utils.py, render_jinja_template.

    Example:
      render_chat([{"role": "user", "content": "Hi"}], template, {"bos_token": "<s>"})
    """
    if not messages or any({"role", "content"} - message.keys() for message in messages):
        raise ValueError(
            f"chat: `messages` is {messages!r}, wanted at least one "
            "{'role': ..., 'content': ...}. Add the missing key."
        )
    compiled = _compile(choose_template(template, name))
    given = [{key: value for key, value in m.items() if value is not None} for m in messages]
    try:
        return compiled.render(
            messages=given,
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **(special_tokens or {}),
        )
    except _Refusal as error:
        raise ValueError(
            f"chat: the model's chat template refuses these messages: {error}. Change them, or "
            "continue a text without the chat form (--raw)."
        ) from error
    except Exception as error:  # of the template's code
        raise ValueError(
            f"chat: the model's chat template fails with these messages: {error}. It may need "
            "tools or documents, which it is not given, a key that a message lacks, or a special "
            "token that tokenizer_config.json does not name. Choose another template "
            "(--chat-template), or continue a text without the chat form (--raw)."
        ) from error


def choose_template(template: ChatTemplate | None, name: str | None = None) -> str:
    """Returns the template of a name, by default `default`.

    Raises:
      ValueError: there is no such template.
    """
    if isinstance(template, str) and name in (None, "default"):
        return template
    named = {"default": template} if isinstance(template, str) else template or {}
    wanted = "default" if name is None else name
    if wanted in named:
        return named[wanted]
    if not named:
        raise ValueError(
            "chat: the model has no chat template, so that messages have no form. Pass a template "
            "(--chat-template FILE), or continue a text without the chat form (--raw)."
        )
    raise ValueError(
        f"chat: the model has no chat template {wanted!r}, only {', '.join(map(repr, named))}. "
        "Choose one of them: --chat-template NAME, or Tokenizer.chat(..., template=NAME)."
    )


class _Refusal(Exception):
    """The error that a template raises with `raise_exception`."""


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> Any:
    """Parses a template."""
    try:
        import jinja2
        from jinja2 import ext, nodes, sandbox
    except ImportError as error:
        raise ImportError(
            "chat templates need the `jinja2` package. Run: pip install 'jspec-decode[demo]'"
        ) from error

    class Generation(ext.Extension):
        """`{% generation %}`: marks the assistant's text for training; renders its content."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_content")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _content(self, caller: Any) -> str:
            return caller()

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"chat: the model's chat template cannot be read, line {error.lineno}: "
            f"{error.message}. Fetch it again, or pass another one (--chat-template FILE)."
        ) from error


def _refuse(message: Any) -> None:
    raise _Refusal(str(message).rstrip("."))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's own filter, which escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
