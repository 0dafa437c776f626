"""The text of tokens, piece by piece."""

from collections.abc import Sequence

import numpy as np

from swift.data.tokenizer import Tokenizer

_TOKENS_BEFORE = 16
"""Tokens with which those after them are decoded."""


class Shown:
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
