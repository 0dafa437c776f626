"""Chats as tokens: a tokenizer's chat template, and which tokens of a rendered chat are answers of the assistant.

A template is a jinja2 file that somebody else wrote. It is rendered in a sandbox, as ``transformers`` renders it, and
sees only the messages and the tokenizer's special tokens. It sees no clock, since the same chat must always give the
same tokens.

Answers are what the template marks with ``{% generation %}``. In a template without marks, an answer is what a message
adds to the chat before it and to the prompt for an answer.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swift.data.sources import DataError
from swift.data.tokenizer import TokenizerFile
from swift.errors import SettingError, first_line
from swift.files import read_regular

TEMPLATE, TOKENIZER_CONFIG, SPECIAL_TOKENS = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MARK = re.compile(r"{%-?\s*generation\s*-?%}")
ASSISTANT = "assistant"
"""Role of the messages that are answers."""
_ANSWERS, _PIECES = "_answers", "_pieces"
"""Names of the lists, in a template's context, to which a rendering adds the answers and the text so far."""

Messages = Sequence[Mapping[str, Any]]


class Rendered(NamedTuple):
    """A rendered chat."""

    text: str
    answers: list[tuple[int, int]]  # first letter of each answer, and the letter after its last


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template.

    Attributes:
        path: file of the template, for errors.
        source: the template.
        special_tokens: special tokens by their names in templates, such as ``eos_token``.
    """

    path: str
    source: str
    special_tokens: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, tokenizer: TokenizerFile) -> "ChatTemplate":
        """Reads the template of a tokenizer from the files beside it.

        Raises:
            SettingError: there is no template, a file is damaged, or the extra is missing.
        """
        if find_spec("jinja2") is None:
            allowed = "needs the extra 'tokenizers': pip install 'swift-moe[tokenizers]'"
            raise SettingError("Chat.tokenizer", tokenizer, allowed)
        directory = Path(tokenizer.path).parent
        config = _read_object(directory / TOKENIZER_CONFIG)
        path = directory / TEMPLATE
        source: Any = _read_text(path)
        if source is None:
            path, source = directory / TOKENIZER_CONFIG, config.get("chat_template")
        if isinstance(source, list):  # several templates with their names
            named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
            source = named[0].get("template") if named else None
        if not isinstance(source, str):
            allowed = f"has no chat template in its directory: put one there as {TEMPLATE}"
            raise SettingError("Chat.tokenizer", tokenizer, allowed)
        known = {"eos_token": tokenizer.end_of_document, "bos_token": tokenizer.begin_of_prompt}
        found = known | _read_object(directory / SPECIAL_TOKENS) | config
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
        special = [(name, texts.get(name)) for name in _SPECIAL]
        return cls(str(path), source, tuple((name, text) for name, text in special if isinstance(text, str)))

    def chat(self, messages: Messages, special: Sequence[str]) -> Rendered:
        """Renders a chat and finds its answers.

        Args:
            messages: messages with a ``role`` and usually a ``content``.
            special: special tokens of the tokenizer. White space after one that ends an answer is not the answer's.

        Raises:
            DataError: the template cannot render the chat, or has no marks and renders the beginning of a chat in
                another way than the same beginning of a longer one.
        """
        text, answers = self._render(messages)
        if _MARK.search(self.source):
            return Rendered(text, answers)
        numbers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        return Rendered(text, [self._answer(text, messages, number, special) for number in numbers])

    def _answer(self, text: str, messages: Messages, number: int, special: Sequence[str]) -> tuple[int, int]:
        how = "mark the answers in the template with {% generation %} and {% endgeneration %}"
        if not number:
            raise DataError(f"the first message is an answer, and {self.path} does not say where answers begin: {how}")
        before = messages[:number]
        prompt, through = self._render(before, prompts=True).text, self._render(messages[: number + 1]).text
        if not (text.startswith(through) and through.startswith(prompt)):
            raise DataError(
                f"{self.path} renders what stands before the end of message {number + 1} in another way when more "
                f"follows, so answers cannot be told apart: {how}"
            )
        content = messages[number].get("content")
        is_first = isinstance(content, str) and through[len(prompt) :].lstrip().startswith(content.strip())
        if not is_first and prompt == self._render(before).text:
            raise DataError(f"{self.path} does not say where the answer of message {number + 1} begins: {how}")
        end = through.rstrip()
        return len(prompt), len(end) if end.endswith(tuple(special)) else len(through)

    def _render(self, messages: Messages, *, prompts: bool = False) -> Rendered:
        import jinja2

        pieces, answers = list[str](), list[tuple[int, int]]()
        names = {**dict(self.special_tokens), "tools": None, "documents": None, _ANSWERS: answers, _PIECES: pieces}
        try:
            for piece in self._compiled.generate(messages=messages, add_generation_prompt=prompts, **names):
                pieces.append(piece)  # at once, since a mark counts the letters before it
        except jinja2.TemplateError as error:
            raise DataError(f"{self.path} cannot render the chat: {first_line(error)}") from error
        return Rendered("".join(pieces), answers)

    @functools.cached_property
    def _compiled(self) -> Any:
        import jinja2

        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateError as error:
            raise DataError(f"{self.path} is not a chat template: {first_line(error)}") from error

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields; the receiving process compiles the template."""
        return {name: getattr(self, name) for name in ("path", "source", "special_tokens")}


def messages_of(field: str, value: Any) -> Messages:
    """Checks that a field holds a chat; returns its messages without empty entries, as templates expect them."""
    is_list = isinstance(value, list | tuple) and all(isinstance(message, Mapping) for message in value)
    if not is_list or not all(isinstance(message.get("role"), str) for message in value):
        raise DataError(f"the field {field!r} is not a list of messages, each with a role")
    if not any(message["role"] == ASSISTANT for message in value):
        raise DataError(f"a chat has no message of the role {ASSISTANT!r}, so nothing is learned from it: leave it out")
    return [{name: entry for name, entry in message.items() if entry is not None} for message in value]


def answer_weights(offsets_N2: np.ndarray, answers: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns the weight of each token's loss, float32[N]: 1 if the token has a letter of an answer, else 0.

    Args:
        offsets_N2: int64, first letter of each token, and the letter after its last.
        answers: see ``Rendered``.
    """
    weights_N = np.zeros(len(offsets_N2), np.float32)
    for begin, end in answers:
        weights_N[(offsets_N2[:, 0] < end) & (offsets_N2[:, 1] > begin)] = 1
    return weights_N


@functools.cache
def _environment() -> Any:
    """Returns the environment in which templates are compiled: the sandbox of ``transformers``, without a clock."""
    from jinja2 import TemplateError, nodes, pass_context
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Marks(Extension):
        """The statement ``{% generation %}``, which marks an answer."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        @pass_context
        def marked(self, context: Any, caller: Any) -> str:
            text, begin = caller(), sum(map(len, context[_PIECES]))
            context[_ANSWERS].append((begin, begin + len(text)))
            return text

    class PlainNamespace(Namespace):
        """A namespace without private names, which would lead out of the sandbox."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a namespace has no attribute {name!r}")
            super().__setitem__(name, value)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Marks, loopcontrols], autoescape=False
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": refuse,
        "namespace": PlainNamespace,
        "dict": lambda *values, **named: dict(*values, **named),
    }
    return environment


def _read_text(path: Path) -> str | None:
    """Reads a text file; None if there is no such file."""
    try:
        return read_regular(str(path)).decode("utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SettingError("Chat.tokenizer", str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingError("Chat.tokenizer", str(path), f"is not UTF-8 text (byte {error.start})") from error


def _read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; an empty one if there is no such file."""
    text = _read_text(path)
    try:
        value = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingError("Chat.tokenizer", str(path), f"is not JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise SettingError("Chat.tokenizer", str(path), "is not a JSON object")
    return value
