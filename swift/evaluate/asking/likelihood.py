"""Continuations of texts, as tokens whose log-probability is wanted."""

from collections.abc import Sequence
from dataclasses import dataclass

from swift.data.tokenizer import Tokenizer, text_tokens
from swift.generate.request import Request


@dataclass(frozen=True)
class Continuation:
    """A text and, at its end, the part that is scored.

    Attributes:
        tokens: tokens of both that the model sees.
        scored_from: number of the first token of the part.
        unseen_tokens: tokens before those that the model sees.
    """

    tokens: tuple[int, ...]
    scored_from: int
    unseen_tokens: int

    @property
    def request(self) -> Request:
        """The request that scores it."""
        return Request(self.tokens, scored_from=self.scored_from)


def continuation_of(tokenizer: Tokenizer, begin: str, end: str, num_positions: int) -> Continuation | None:
    """Makes the tokens of a text and its continuation.

    The whole text is cut into tokens, and those are scored that the beginning alone does not have: a token may reach
    across the boundary, as that of `` yes`` does after a beginning with a space at its end.

    Args:
        tokenizer: tokenizer of the model.
        begin: text before, which begins as prompts do; with no tokens, the model sees the one that ends a document.
        end: text whose likelihood is wanted.
        num_positions: positions of the model; of a longer text it sees the last tokens. The last token of all takes no
            position, since nothing follows it.

    Returns:
        The continuation; None if it has no tokens, or does not fit into the positions with a token before it.
    """
    whole, before = (text_tokens(tokenizer, text) for text in (begin + end, begin))
    start = common_beginning(whole, before)
    if start == 0:
        whole, start = [tokenizer.separator, *whole], 1
    return seen(whole, start, num_positions)


def seen(tokens: Sequence[int], scored_from: int, num_positions: int) -> Continuation | None:
    """Drops the first tokens of a text that is longer than the positions; None if nothing to score is left."""
    unseen = max(0, len(tokens) - num_positions - 1)
    if not unseen < scored_from < len(tokens):
        return None
    return Continuation(tuple(tokens[unseen:]), scored_from - unseen, unseen)


def common_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Counts the tokens that two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))
