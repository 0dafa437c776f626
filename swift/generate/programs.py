"""Language model programs: prompts built from given and generated parts, as in SGLang (arXiv 2312.07104, section 2).

A prompt is lazy: adding a part returns immediately, and reading a generated part runs the engine until it is complete.
All prompts of a ``Writer`` run at the same time and share prefixes. A generated part (``Gen``) may be constrained to a
regular expression, or end at stop texts. ``StreamedText`` decodes a stream of tokens.
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
"""Number of preceding tokens that are decoded together with new ones, as context."""

_NOTHING = "matches no text that the tokens can spell"

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Gen:
    """Part of a prompt that the model generates.

    Attributes:
        name: name by which the part is read.
        max_tokens: maximum number of tokens.
        sampling: rule by which tokens are chosen; every part and every fork of a prompt has its own random stream.
        stop: text or texts at which the part ends; they are not included in it.
        regex: regular expression that the whole part must match, unless ``max_tokens`` cuts it short.
        choices: texts to choose from; the one with the largest sum of its tokens' log-probabilities is chosen.

    Raises:
        SettingError: a value is invalid.
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
                raise SettingError(f"Gen.{name}", value, "cannot be combined with choices")
        for choice in choices:
            if sum(other.startswith(choice) for other in choices) > 1:
                allowed = "must not be the beginning of another choice, which could never be likelier"
                raise SettingError("Gen.choices", choice, allowed)

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts at which the part ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class StreamedText:
    """Streaming decoder: converts tokens to pieces of text that have only whole characters.

    Args:
        tokenizer: tokenizer of the tokens.
        before: preceding tokens, which are used as context but not returned, since some tokenizers drop the first space
            of a text.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer, self._seen = tokenizer, list(before[-_TOKENS_BEFORE:])
        self._shown = tokenizer.decode(np.array(self._seen)) if self._seen else ""

    def after(self, token: int) -> str:
        """Adds a token and returns the text that it completes, or "" inside a character that spans several tokens."""
        self._seen.append(token)
        text = self._tokenizer.decode(np.array(self._seen))
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        piece = text[len(self._shown) :]
        self._seen = self._seen[-_TOKENS_BEFORE:]
        self._shown = self._tokenizer.decode(np.array(self._seen))
        return piece


def decoded(tokenizer: Tokenizer, tokens: Sequence[int], before: Sequence[int] = ()) -> str:
    """Decodes tokens, with the preceding tokens ``before`` as context."""
    seen = list(before[-_TOKENS_BEFORE:])
    shown = tokenizer.decode(np.array(seen)) if seen else ""
    return tokenizer.decode(np.array([*seen, *tokens]))[len(shown) :] if tokens else ""


class Grammar:
    """Compiles regular expressions for a tokenizer's tokens; needs the extra ``regex`` (llguidance).

    Args:
        tokenizer: tokenizer of the texts.
        vocab_size: V, vocabulary size of the model; tokens that the tokenizer lacks are never allowed.

    Raises:
        SettingError: the extra is not installed, or the tokenizer cannot provide the bytes of its tokens.
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
        """Creates a constraint that lets one answer match a regular expression.

        Raises:
            SettingError: the expression is malformed, or no text can match it.
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
    """Constraint by which the whole answer must match a regular expression."""

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> np.ndarray:
        """Returns which tokens may come next, bool[V]."""
        allowed_V = np.zeros(self._vocab_size, bool)
        if not self._matcher.is_stopped():
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
            size = min(len(bits), self._vocab_size)
            allowed_V[:size] = bits[:size]
        # For some expressions, llguidance detects only here that nothing matches.
        return allowed_V & (not self._matcher.is_error())

    def accept(self, token: int) -> None:
        """Updates the constraint with the chosen token, which must be allowed."""
        if not self._matcher.consume_token(token):
            raise ValueError(f"token {token} was not allowed: {self._matcher.get_error()}")


class Until:
    """Constraint by which the answer ends as soon as it contains a stop text.

    Args:
        tokenizer: tokenizer of the answer.
        before: tokens before the answer.
        stops: stop texts.
        vocab_size: vocabulary size of the model, V.
        inner: another constraint that the answer must satisfy; None for none.
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
        """Returns which tokens may come next, bool[V], or None if all may."""
        if any(stop in self._end for stop in self._stops):
            return self._none_V
        return None if self._inner is None else self._inner.allowed()

    def accept(self, token: int) -> None:
        """Updates the constraint with the chosen token, which must be allowed."""
        piece = self._shown.after(token)
        # A stop text may begin in an earlier piece, so keep as many characters before this piece as the longest one
        # has.
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
    """Adapter that gives ``ByteTokenizer`` the interface that llguidance expects."""

    eos_token_id, bos_token_id = 0, None
    tokens = tuple(bytes([byte]) for byte in range(256))
    special_token_ids = (0,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class Writer:
    """Runs prompts on an engine, from any number of threads; nothing else may use the engine at the same time.

    Args:
        engine: engine that answers the prompts' requests.
        tokenizer: tokenizer of the texts.
    """

    def __init__(self, engine: TextEngine, tokenizer: Tokenizer):
        self.engine, self.tokenizer = engine, tokenizer
        self.condition = threading.Condition()
        self._growing: dict[Prompt, None] = {}
        self._is_stepping = False
        self._grammar: Grammar | None = None

    def prompt(self, text: str = "") -> "Prompt":
        """Creates a prompt with ``text`` as its first part."""
        begun = Prompt(self)
        if text:
            begun += text
        return begun

    def run(
        self, program: Callable[..., _Result], arguments: Iterable[Sequence[object]], most_at_once: int = 64
    ) -> list[_Result]:
        """Runs a program once for each tuple of arguments, with many runs at the same time.

        Args:
            program: function that is called with a new prompt and the arguments.
            arguments: arguments of each run.
            most_at_once: maximum number of simultaneous runs; each has a thread.

        Returns:
            Results of the runs, in the order of ``arguments``.

        Raises:
            Exception: the error of the first run that failed, in the order of ``arguments``; other runs are cancelled.
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
        """Runs the engine until ``is_done()``; if several threads wait, one of them runs the engine for all."""
        with self.condition:
            while not is_done():
                if self._is_stepping:
                    self.condition.wait()
                    continue
                self._is_stepping = True
                try:
                    self._advance()
                    # Without the lock, so that other threads can add parts during the step.
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
        """Registers that a prompt has a new part; the caller must hold ``condition``."""
        self._growing[prompt] = None

    def grammar(self) -> Grammar:
        """Returns the compiler of regular expressions, which is created at first use."""
        if self._grammar is None:
            self._grammar = Grammar(self.tokenizer, self.engine.gpt.vocab_size)
        return self._grammar

    def _advance(self) -> None:
        self._growing = {prompt: None for prompt in self._growing if prompt.advance()}

    def _cancel(self) -> None:
        """Cancels all unfinished prompts, once no thread is running the engine."""
        with self.condition:
            self.condition.wait_for(lambda: not self._is_stepping)
            for prompt in self._growing:
                prompt.cancel()
            self._growing = {}
            self.condition.notify_all()


class Prompt:
    """Text built from given parts (``+= "text"``) and parts that the model generates (``+= Gen("name")``).

    Consecutive given parts are joined before they are tokenized; generated parts separate them.

    Args:
        writer: writer that runs the prompt.
        branch: fork numbers on the path from the original prompt, which give every fork its own random streams.
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
        """Adds a part without computing anything yet.

        Raises:
            SettingError: an earlier part has the same name.
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
        """Returns the text of a named part; waits until it is complete.

        Raises:
            KeyError: no part has the name.
            SettingError: the part cannot be generated.
        """
        self._wait(name)
        return self._texts[name]

    def answer(self, name: str) -> Answer:
        """Returns the engine's answer for a named part, or for the text chosen among its ``choices``."""
        self._wait(name)
        return self._answers[name]

    @property
    def text(self) -> str:
        """Whole text of the prompt; waits until all parts are complete."""
        self._wait()
        return self._text + self._unread

    def fork(self, count: int) -> "list[Prompt]":
        """Returns independent continuations of this prompt, with different random streams."""
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
        """Waits for forks; returns, by part name, the forks' texts of the parts that this prompt does not have."""
        for other in forks:
            other._wait()
        names = {name for other in forks for name in other._texts if name not in self._names}
        return {name: [other._texts[name] for other in forks if name in other._texts] for name in sorted(names)}

    def advance(self) -> bool:
        """Advances as far as possible without running the engine; the caller must hold the writer's condition.

        Returns:
            Whether the prompt waits for the engine.
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
        """Cancels the prompt; the caller must hold the writer's condition, and no thread may run the engine."""
        self._error = self._error or CancelledError()
        for answer in self._asked or ():
            self._writer.engine.cancel(answer)

    def _wait(self, name: str | None = None) -> None:
        """Waits for a named part, or for all parts."""
        self._writer.wait(lambda: name in self._texts or self._error is not None or not self._parts)
        if self._error is not None and name not in self._texts:
            raise self._error

    def _ask(self, gen: Gen) -> list[Answer]:
        """Submits the requests for a generated part: one, or one per choice."""
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
        """Appends the completed text of a generated part."""
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
            # Cut at the stop text; if it begins inside a token, the characters before it are tokenized again.
            if at is not None:
                text = text[:at]
                while tokens and len(decoded(tokenizer, tokens, self._tokens)) > at:
                    tokens.pop()
                rest = text[len(decoded(tokenizer, tokens, self._tokens)) :]
                tokens += [int(token) for token in tokenizer.encode(rest)]
        self._tokens += tokens
        self._text += text
        self._texts[gen.name], self._answers[gen.name] = text, answer
