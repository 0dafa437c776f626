"""Programs that write texts with a model: prompts that grow by given and by generated parts.

As in SGLang (arXiv 2312.07104, section 2). A prompt is lazy: adding a part returns at once, and reading an answer runs
the engine until it is there. All prompts of a ``Writer`` are written at the same time, and share what they can. A
generated part (``Gen``) may be held to a regular expression or end before given texts, and shows its text piece by
piece.
"""

import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from swift.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerFile, prompt_tokens
from swift.errors import SettingError, check_count
from swift.generate.engine import TextEngine
from swift.generate.request import Answer, Request, Sampling

_TOKENS_BEFORE = 16
"""Tokens with which those after them are decoded."""

_NOTHING = "matches no text that the tokens can spell"

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Gen:
    """A part of a prompt that the model writes.

    Attributes:
        name: name of the part, by which it is read.
        max_tokens: its tokens at most.
        sampling: choice of the tokens; parts and forks of a prompt have choices of their own.
        stop: texts at which it ends; they are not part of it.
        regex: regular expression that it matches as a whole, unless ``max_tokens`` cuts it short.
        choices: texts of which the likeliest is taken, by the sum of the log-probabilities of its tokens.

    Raises:
        SettingError: a value cannot be.
    """

    name: str
    max_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    stop: str | Sequence[str] = ()
    regex: str | None = None
    choices: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_count("Gen.max_tokens", self.max_tokens, least=1)
        if not all(self.stops):
            raise SettingError("Gen.stop", self.stop, "must not be empty")
        if self.choices is not None:
            self._check_choices(self.choices)

    def _check_choices(self, choices: Sequence[str]) -> None:
        if isinstance(choices, str) or not choices or not all(choices):
            raise SettingError("Gen.choices", choices, "must be a list of texts, none of them empty")
        for name, value in (("regex", self.regex), ("stop", self.stop)):
            if value:
                raise SettingError(f"Gen.{name}", value, "must not be given beside choices")
        for choice in choices:
            if sum(other.startswith(choice) for other in choices) > 1:
                allowed = "must not be the beginning of another choice, which could never be likelier"
                raise SettingError("Gen.choices", choice, allowed)

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts at which it ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class StreamedText:
    """The text of tokens, in pieces of whole characters.

    Args:
        tokenizer: tokenizer that decodes them.
        before: tokens that they follow, and that are not shown: some tokenizers begin a text without its first space.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer, self._seen = tokenizer, list(before[-_TOKENS_BEFORE:])
        self._shown = tokenizer.decode(np.array(self._seen)) if self._seen else ""

    def after(self, token: int) -> str:
        """The text that a token completes; empty within a character of several tokens."""
        self._seen.append(token)
        text = self._tokenizer.decode(np.array(self._seen))
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        piece = text[len(self._shown) :]
        self._seen = self._seen[-_TOKENS_BEFORE:]
        self._shown = self._tokenizer.decode(np.array(self._seen))
        return piece


def decoded(tokenizer: Tokenizer, tokens: Sequence[int], before: Sequence[int] = ()) -> str:
    """The text of tokens that follow others."""
    seen = list(before[-_TOKENS_BEFORE:])
    shown = tokenizer.decode(np.array(seen)) if seen else ""
    return tokenizer.decode(np.array([*seen, *tokens]))[len(shown) :] if tokens else ""


class Grammar:
    """Regular expressions over the tokens of a tokenizer; needs the extra ``regex`` (llguidance).

    Args:
        tokenizer: tokenizer of the texts.
        vocab_size: tokens that the model knows, V; those beyond the tokenizer's are never allowed.

    Raises:
        SettingError: the extra is missing, or the tokenizer is not one whose tokens are known as bytes.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        try:
            import llguidance
        except ImportError:
            allowed = "needs the extra 'regex': pip install 'swift-moe[regex]'"
            raise SettingError("Gen.regex", "a regular expression", allowed) from None
        self._library, self._vocab_size = llguidance, vocab_size
        self._tokenizer = llguidance.LLTokenizer(_wrapped(llguidance, tokenizer), eos_token=tokenizer.separator)
        self._matchers: dict[str, Any] = {}

    def matching(self, regex: str) -> "Matching":
        """Makes the constraint of one answer.

        Raises:
            SettingError: the expression is malformed, or nothing can satisfy it.
        """
        if regex not in self._matchers:
            grammar = self._library.LLMatcher.grammar_from_regex(regex)
            self._matchers[regex] = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
        matcher = self._matchers[regex].deep_copy()
        if matcher.is_error():
            raise SettingError("Gen.regex", regex, f"cannot be used: {matcher.get_error().splitlines()[0]}")
        constraint = Matching(matcher, self._vocab_size)
        if not constraint.allowed().any():
            raise SettingError("Gen.regex", regex, _NOTHING)
        return constraint


class Matching:
    """The constraint that an answer matches a regular expression as a whole."""

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> np.ndarray:
        """Tells which tokens may come next, bool[V]."""
        allowed_V = np.zeros(self._vocab_size, bool)
        if not self._matcher.is_stopped():
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
            size = min(len(bits), self._vocab_size)
            allowed_V[:size] = bits[:size]
        # Some expressions are found to match nothing only here.
        return allowed_V & (not self._matcher.is_error())

    def accept(self, token: int) -> None:
        """Adds a token that was allowed."""
        if not self._matcher.consume_token(token):
            raise ValueError(f"token {token} was not allowed: {self._matcher.get_error()}")


class Until:
    """The constraint that an answer ends when it holds one of some texts.

    Args:
        tokenizer: tokenizer of the answer.
        before: tokens before the answer.
        stops: the texts.
        vocab_size: tokens that the model knows, V.
        inner: constraint that holds, too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        before: Sequence[int],
        stops: Sequence[str],
        vocab_size: int,
        inner: Matching | None = None,
    ):
        self._shown, self._stops, self._inner = StreamedText(tokenizer, before), tuple(stops), inner
        self._longest, self._end = max(map(len, stops)), ""
        self._none_V = np.zeros(vocab_size, bool)

    def allowed(self) -> np.ndarray | None:
        """Tells which tokens may come next, bool[V]; None: all."""
        if any(stop in self._end for stop in self._stops):
            return self._none_V
        return None if self._inner is None else self._inner.allowed()

    def accept(self, token: int) -> None:
        """Adds a token that was allowed."""
        piece = self._shown.after(token)
        self._end = (self._end + piece)[-(self._longest + len(piece)) :]
        if self._inner is not None:
            self._inner.accept(token)


def _wrapped(library: Any, tokenizer: Tokenizer) -> Any:
    if isinstance(tokenizer, TokenizerFile):
        return tokenizer.to_json()
    if isinstance(tokenizer, ByteTokenizer):
        return library.TokenizerWrapper(_Bytes())
    raise SettingError(
        "DataConfig.tokenizer", tokenizer, "must be ByteTokenizer or TokenizerFile for regular expressions"
    )


class _Bytes:
    """The tokens of ``ByteTokenizer``, as the library wants them."""

    eos_token_id, bos_token_id = 0, None
    tokens = tuple(bytes([byte]) for byte in range(256))
    special_token_ids = (0,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class Writer:
    """An engine, and the tokenizer of its texts. While a writer has an engine, nobody else may use it.

    Args:
        engine: engine that answers.
        tokenizer: tokenizer of the texts.
    """

    def __init__(self, engine: TextEngine, tokenizer: Tokenizer):
        self.engine, self.tokenizer = engine, tokenizer
        self.condition = threading.Condition()
        self._growing: dict[Prompt, None] = {}
        self._is_stepping = False
        self._grammar: Grammar | None = None

    def prompt(self, text: str = "") -> "Prompt":
        """Begins a prompt."""
        begun = Prompt(self)
        if text:
            begun += text
        return begun

    def run(
        self, program: Callable[..., _Result], arguments: Iterable[Sequence[object]], most_at_once: int = 64
    ) -> list[_Result]:
        """Runs a program for each of several tuples of arguments, many at once.

        Args:
            program: function of a new prompt and the arguments.
            arguments: arguments of each run.
            most_at_once: runs at once at most.

        Returns:
            Results in the order of the arguments.

        Raises:
            Exception: whatever a run raises; it ends the others.
        """
        threads = ThreadPoolExecutor(most_at_once, "program")
        try:
            futures = [threads.submit(lambda args: program(self.prompt(), *args), values) for values in arguments]
            return [future.result() for future in futures]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            self._cancel()
            raise
        finally:
            threads.shutdown()

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Runs the engine until a condition holds; of several threads that wait, one runs it for all."""
        with self.condition:
            while not is_done():
                if self._is_stepping:
                    self.condition.wait()
                    continue
                self._is_stepping = True
                try:
                    self._advance()
                    self.condition.release()
                    try:
                        self.engine.step()
                    finally:
                        self.condition.acquire()
                    self._advance()
                finally:
                    self._is_stepping = False
                    self.condition.notify_all()

    def has_grown(self, prompt: "Prompt") -> None:
        """Notes that a prompt has a new part; the caller holds the condition."""
        self._growing[prompt] = None

    def grammar(self) -> Grammar:
        """The regular expressions of the tokenizer, made at first use."""
        if self._grammar is None:
            self._grammar = Grammar(self.tokenizer, self.engine.gpt.vocab_size)
        return self._grammar

    def _advance(self) -> None:
        self._growing = {prompt: None for prompt in self._growing if prompt.advance()}

    def _cancel(self) -> None:
        """Ends all prompts that are being written."""
        with self.condition:
            self.condition.wait_for(lambda: not self._is_stepping)
            for prompt in self._growing:
                prompt.cancel()
            self._growing = {}
            self.condition.notify_all()


class Prompt:
    """A text that grows by given parts (``+= "text"``) and by those that the model writes (``+= Gen("name")``).

    Given parts that follow each other become tokens together, each sequence of them by itself.

    Args:
        writer: writer of the parts.
        branch: number of the fork at every fork so far.
    """

    def __init__(self, writer: Writer, branch: tuple[int, ...] = ()):
        self._writer, self._branch = writer, branch
        self._parts: deque[str | Gen] = deque()
        self._names: set[str] = set()
        self._tokens: list[int] = []
        self._text, self._unread = "", ""
        self._texts: dict[str, str] = {}
        self._answers: dict[str, Answer] = {}
        self._asked: list[Answer] | None = None
        self._num_asked = self._num_forks = 0
        self._error: BaseException | None = None

    def __iadd__(self, part: str | Gen) -> "Prompt":
        """Adds a part; nothing is computed yet.

        Raises:
            SettingError: the name of the part is taken.
        """
        if not isinstance(part, str | Gen):
            raise TypeError(f"a part of a prompt is a text or a Gen, not {part!r}")
        if isinstance(part, Gen):
            if part.name in self._names:
                raise SettingError("Gen.name", part.name, "must not be that of an earlier part of the prompt")
            self._names.add(part.name)
        with self._writer.condition:
            self._parts.append(part)
            self._writer.has_grown(self)
        return self

    def __getitem__(self, name: str) -> str:
        """The text of a named part, as soon as it is there.

        Raises:
            KeyError: no part has the name.
            SettingError: it cannot be answered.
        """
        self._wait(name)
        return self._texts[name]

    def answer(self, name: str) -> Answer:
        """The tokens of a named part, why they ended and how likely they are; of choices, those of the chosen one."""
        self._wait(name)
        return self._answers[name]

    @property
    def text(self) -> str:
        """The whole text, as soon as all of it is there."""
        self._wait()
        return self._text + self._unread

    def fork(self, count: int) -> "list[Prompt]":
        """Makes prompts that continue this one, each by itself and with choices of its own."""
        self._wait()
        forks = []
        for _ in range(count):
            other = Prompt(self._writer, (*self._branch, self._num_forks))
            self._num_forks += 1
            other._tokens, other._text, other._unread = list(self._tokens), self._text, self._unread
            other._names, other._num_asked = set(self._names), self._num_asked
            other._texts, other._answers = dict(self._texts), dict(self._answers)
            forks.append(other)
        return forks

    def join(self, forks: "Sequence[Prompt]") -> dict[str, list[str]]:
        """Waits for forks; returns, by name, the texts of each that this prompt has not."""
        for other in forks:
            other._wait()
        names = {name for other in forks for name in other._texts if name not in self._names}
        return {name: [other._texts[name] for other in forks if name in other._texts] for name in sorted(names)}

    def advance(self) -> bool:
        """Continues as far as possible without the engine; called by whoever runs it, who holds the condition.

        Returns:
            Whether the prompt waits for an answer.
        """
        try:
            while self._parts and self._error is None:
                part = self._parts[0]
                if isinstance(part, str):
                    self._unread += part
                else:
                    if self._asked is None:
                        self._asked = self._ask(part)
                    if any(answer.reason is None for answer in self._asked):
                        return True
                    self._take(part, self._asked)
                    self._asked = None
                self._parts.popleft()
        except Exception as error:
            self._error = error
        return False

    def cancel(self) -> None:
        """Ends the prompt; the caller holds the condition, and nobody runs the engine."""
        self._error = self._error or CancelledError()
        for answer in self._asked or ():
            self._writer.engine.cancel(answer)

    def _wait(self, name: str | None = None) -> None:
        """Waits for a named part, or for all."""
        self._writer.wait(lambda: name in self._texts or self._error is not None or not self._parts)
        if self._error is not None and name not in self._texts:
            raise self._error

    def _ask(self, gen: Gen) -> list[Answer]:
        """Submits what a part needs."""
        writer, tokenizer = self._writer, self._writer.tokenizer
        if self._tokens:
            self._tokens += [int(token) for token in tokenizer.encode(self._unread)]
        else:
            self._tokens = prompt_tokens(tokenizer, self._unread)
        self._text, self._unread = self._text + self._unread, ""
        if gen.choices is not None:
            ends = [[int(token) for token in tokenizer.encode(choice)] for choice in gen.choices]
            if not all(ends):
                raise SettingError("Gen.choices", list(gen.choices), "must be texts of at least one token")
            return writer.engine.submit_all(
                Request([*self._tokens, *end], scored_from=len(self._tokens)) for end in ends
            )
        constraint = None if gen.regex is None else writer.grammar().matching(gen.regex)
        vocab_size = writer.engine.gpt.vocab_size
        key = repr((gen.sampling.stream, self._branch, self._num_asked))
        request = Request(
            list(self._tokens),
            gen.max_tokens,
            replace(gen.sampling, stream=zlib.crc32(key.encode())),
            frozenset({tokenizer.separator}),
            Until(tokenizer, self._tokens, gen.stops, vocab_size, constraint) if gen.stops else constraint,
        )
        answer = writer.engine.submit(request)
        self._num_asked += 1
        return [answer]

    def _take(self, gen: Gen, answers: Sequence[Answer]) -> None:
        """Adds what a part has become."""
        tokenizer, answer = self._writer.tokenizer, answers[0]
        if answer.error is not None:
            raise answer.error
        if gen.choices is not None:
            sums = [float(answer.text_log_probs.sum()) for answer in answers]
            chosen = sums.index(max(sums))
            text, answer = gen.choices[chosen], answers[chosen]
            tokens = list(answer.request.tokens[len(self._tokens) :])
        else:
            tokens = [token for token in answer.tokens if token != tokenizer.separator]
            text = decoded(tokenizer, tokens, self._tokens)
            at = min((place for stop in gen.stops if (place := text.find(stop)) >= 0), default=None)
            if at is not None:
                text = text[:at]
                while tokens and len(decoded(tokenizer, tokens, self._tokens)) > at:
                    tokens.pop()
                rest = text[len(decoded(tokenizer, tokens, self._tokens)) :]
                tokens += [int(token) for token in tokenizer.encode(rest)]
        self._tokens += tokens
        self._text += text
        self._texts[gen.name], self._answers[gen.name] = text, answer
