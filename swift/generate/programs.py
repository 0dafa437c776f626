"""Programs that write texts with a model: prompts that grow by given and by generated parts.

As in SGLang (arXiv 2312.07104, section 2). A prompt is lazy: adding a part returns at once, and reading an answer runs
the engine until it is there. All prompts of a ``Writer`` are written at the same time, and share what they can.
"""

import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from swift.data import Tokenizer
from swift.errors import SettingError, check_count
from swift.generate.engine import TextEngine
from swift.generate.grammar import Grammar, Until
from swift.generate.pieces import decoded
from swift.generate.request import Answer, Request
from swift.generate.sampling import Sampling

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Gen:
    """A part of a prompt that the model writes.

    Attributes:
        name: name of the answer, by which it is read.
        max_tokens: its tokens at most.
        sampling: choice of the tokens.
        stop: texts at which it ends; they are not part of it.
        regex: regular expression that it matches as a whole.
        choices: texts of which the likeliest is taken, by the sum of the log-probabilities of its tokens.
    """

    name: str
    max_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    stop: str | Sequence[str] = ()
    regex: str | None = None
    choices: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_count("Gen.max_tokens", self.max_tokens, least=1)
        choices = self.choices
        if choices is None:
            return
        if not choices or not all(choices):
            raise SettingError("Gen.choices", list(choices), "must be at least one text, and none of them empty")
        for choice in choices:
            if sum(other.startswith(choice) for other in choices) > 1:
                allowed = "must not be the beginning of another choice, which could never be likelier"
                raise SettingError("Gen.choices", choice, allowed)

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts at which it ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class Writer:
    """An engine, and the tokenizer of its texts.

    Args:
        engine: engine that answers.
        tokenizer: tokenizer of the texts.
    """

    def __init__(self, engine: TextEngine, tokenizer: Tokenizer):
        self.engine, self.tokenizer = engine, tokenizer
        self._grown: deque[Prompt] = deque()
        self._busy: list[Prompt] = []
        self._condition, self._is_stepping = threading.Condition(), False
        self._grammar: Grammar | None = None

    def prompt(self, text: str = "") -> "Prompt":
        """Begins a prompt."""
        begun = Prompt(self)
        begun += text
        return begun

    def run(
        self, program: Callable[..., _Result], arguments: Iterable[Sequence[object]], most_at_once: int = 64
    ) -> list[_Result]:
        """Passages a program for each of several tuples of arguments, all at once.

        Args:
            program: function of a new prompt and the arguments.
            arguments: arguments of each run.
            most_at_once: runs at once at most.

        Returns:
            What each run returns.
        """
        with ThreadPoolExecutor(most_at_once, "program") as threads:
            futures = [threads.submit(program, self.prompt(), *values) for values in arguments]
            return [future.result() for future in futures]

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Runs the engine until a condition holds; of several threads that wait, one runs it for all."""
        with self._condition:
            while not is_done():
                if self._is_stepping:
                    self._condition.wait()
                    continue
                self._is_stepping = True
                self._condition.release()
                try:
                    self._step()
                finally:
                    self._condition.acquire()
                    self._is_stepping = False
                    self._condition.notify_all()

    def has_grown(self, prompt: "Prompt") -> None:
        """Notes that a prompt has a new part."""
        self._grown.append(prompt)

    def grammar(self) -> Grammar:
        """The regular expressions of the tokenizer, made at first use."""
        if self._grammar is None:
            self._grammar = Grammar(self.tokenizer, self.engine.gpt.vocab_size)
        return self._grammar

    def _step(self) -> None:
        while self._grown:
            prompt = self._grown.popleft()
            if prompt not in self._busy:
                self._busy.append(prompt)
        self._busy = [prompt for prompt in self._busy if prompt.advance()]
        self.engine.step()
        self._busy = [prompt for prompt in self._busy if prompt.advance()]


class Prompt:
    """A text that grows by given parts (``+= "text"``) and by those that the model writes (``+= Gen("name")``).

    Args:
        writer: writer of the parts.
        branch: number of the fork at every fork so far.
    """

    def __init__(self, writer: Writer, branch: tuple[int, ...] = ()):
        self._writer, self._branch = writer, branch
        self._parts: deque[str | Gen] = deque()
        self._tokens: list[int] = []
        self._text, self._unread = "", ""
        self._answers: dict[str, str] = {}
        self._current: tuple[Gen, list[Answer]] | None = None
        self._error: SettingError | None = None

    def __iadd__(self, part: str | Gen) -> "Prompt":
        """Adds a part; nothing is computed yet."""
        self._parts.append(part)
        self._writer.has_grown(self)
        return self

    def __getitem__(self, name: str) -> str:
        """The answer of a name, as soon as it is there.

        Raises:
            KeyError: no part has the name.
            SettingError: it cannot be answered.
        """
        self._wait(lambda: name in self._answers or self._is_settled)
        return self._answers[name]

    @property
    def text(self) -> str:
        """The whole text, as soon as all of it is there."""
        self._wait(lambda: self._is_settled)
        return self._text + self._unread

    def fork(self, count: int) -> "list[Prompt]":
        """Makes prompts that go on from this one, each by itself and with choices of its own."""
        self._wait(lambda: self._is_settled)
        forks = []
        for number in range(count):
            other = Prompt(self._writer, (*self._branch, number))
            other._tokens, other._text, other._unread = list(self._tokens), self._text, self._unread
            other._answers = dict(self._answers)
            forks.append(other)
        return forks

    def join(self, forks: "Sequence[Prompt]") -> dict[str, list[str]]:
        """Waits for forks; returns, by name, the answers of each that this prompt has not."""
        for other in forks:
            other._wait(lambda other=other: other._is_settled)  # type: ignore[misc]
        names = {name for other in forks for name in other._answers if name not in self._answers}
        return {name: [other._answers[name] for other in forks if name in other._answers] for name in sorted(names)}

    def advance(self) -> bool:
        """Goes on as far as is possible without the engine; called by whoever runs it.

        Returns:
            Whether the prompt waits for an answer.
        """
        try:
            while self._error is None:
                if self._current is not None:
                    gen, answers = self._current
                    if any(answer.reason is None for answer in answers):
                        return True
                    self._take(gen, answers)
                    self._current = None
                if not self._parts:
                    break
                part = self._parts.popleft()
                if isinstance(part, str):
                    self._unread += part
                else:
                    self._current = (part, self._ask(part))
        except SettingError as error:
            self._error = error
        return False

    @property
    def _is_settled(self) -> bool:
        return self._error is not None or (not self._parts and self._current is None)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        self._writer.wait(lambda: self._error is not None or is_done())
        if self._error is not None:
            raise self._error

    def _ask(self, gen: Gen) -> list[Answer]:
        """Submits what a part needs."""
        writer, encode = self._writer, self._writer.tokenizer.encode
        self._tokens += [int(token) for token in encode(self._unread)]
        self._text, self._unread = self._text + self._unread, ""
        tokens = self._tokens or [writer.tokenizer.separator]
        if gen.choices is not None:
            ends = [[int(token) for token in encode(choice)] for choice in gen.choices]
            return [writer.engine.submit(Request([*tokens, *end], scored_from=len(tokens))) for end in ends]
        constraint = None if gen.regex is None else writer.grammar().matching(gen.regex)
        request = Request(
            tokens,
            gen.max_tokens,
            replace(gen.sampling, stream=zlib.crc32(repr((self._branch, len(self._answers))).encode())),
            frozenset({writer.tokenizer.separator}),
            Until(writer.tokenizer, gen.stops, constraint) if gen.stops else constraint,
        )
        return [writer.engine.submit(request)]

    def _take(self, gen: Gen, answers: Sequence[Answer]) -> None:
        """Adds what a part has become."""
        tokenizer = self._writer.tokenizer
        if gen.choices is not None:
            sums = [float(answer.text_log_probs.sum()) for answer in answers]
            chosen = sums.index(max(sums))
            text = gen.choices[chosen]
            tokens = list(answers[chosen].request.tokens[len(self._tokens or [0]) :])
        else:
            tokens = [token for token in answers[0].tokens if token != tokenizer.separator]
            text = decoded(tokenizer, tokens, self._tokens)
            at = min((place for stop in gen.stops if (place := text.find(stop)) >= 0), default=None)
            if at is not None:
                text = text[:at]
                tokens = [int(token) for token in tokenizer.encode(text)]
        self._tokens += tokens
        self._text += text
        self._answers[gen.name] = text
