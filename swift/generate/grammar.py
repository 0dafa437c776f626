"""Constraints of an answer: texts of a regular expression, and texts that end before given ones."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from swift.data import ByteTokenizer, Tokenizer, TokenizerFile
from swift.errors import SettingError

_NOTHING = "matches no text that the tokens can spell"


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

    def matching(self, regex: str) -> "Matching":
        """Makes the constraint of one answer.

        Raises:
            SettingError: the expression is malformed, or nothing can satisfy it.
        """
        grammar = self._library.LLMatcher.grammar_from_regex(regex)
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
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
        self._matcher.consume_token(token)


class Until:
    """The constraint that an answer ends when it holds one of some texts.

    Args:
        tokenizer: tokenizer of the answer.
        stops: the texts.
        inner: constraint that holds, too.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], inner: Matching | None = None):
        self._tokenizer, self._stops, self._inner = tokenizer, tuple(stops), inner
        self._tokens: list[int] = []
        # A stop of n bytes is within the last n tokens, but for those of a tokenizer with tokens of no bytes.
        self._tail = 2 * max(len(stop.encode()) for stop in stops)

    def allowed(self) -> np.ndarray | None:
        """Tells which tokens may come next, bool[V]; None: all."""
        text = self._tokenizer.decode(np.array(self._tokens[-self._tail :], np.int64)) if self._tokens else ""
        if any(stop in text for stop in self._stops):
            return np.zeros(1, bool)
        return None if self._inner is None else self._inner.allowed()

    def accept(self, token: int) -> None:
        """Adds a token that was allowed."""
        self._tokens.append(token)
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
