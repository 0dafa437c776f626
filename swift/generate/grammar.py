"""Constraints of an answer: texts of a regular expression, and texts that end before given ones."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from swift.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerFile
from swift.errors import SettingError
from swift.generate.pieces import Shown

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
        self._shown, self._stops, self._inner = Shown(tokenizer, before), tuple(stops), inner
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
