"""Tokenizers: bytes, or the vocabulary of a Hugging Face ``tokenizers`` file."""

import functools
import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np

from swift.errors import SettingError
from swift.files import read_regular


class Tokenizer(Protocol):
    """The tokenizer interface that the data pipeline requires."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: one more than the largest token."""
        ...

    @property
    def separator(self) -> int:
        """The token that ends a document."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of a text, [length], without a separator."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """Decodes tokens, [length]; invalid parts become U+FFFD."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """A tokenizer with one token per UTF-8 byte; byte 0, which texts do not contain, ends a document."""

    @property
    def vocab_size(self) -> int:
        """Number of byte values."""
        return 256

    @property
    def separator(self) -> int:
        """The token that ends a document."""
        return 0

    def encode(self, text: str) -> np.ndarray:
        """Returns the UTF-8 bytes of a text, uint8[length]."""
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, tokens: np.ndarray) -> str:
        """Decodes tokens, [length]; invalid UTF-8 and tokens that are not bytes become U+FFFD."""
        tokens = np.asarray(tokens)
        # 0xFF occurs nowhere in UTF-8; a plain cast would turn token 321 into "A".
        in_range = (tokens >= 0) & (tokens < self.vocab_size)
        return np.where(in_range, tokens, 0xFF).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


@dataclass(frozen=True)
class TokenizerFile:
    """The tokenizer in a Hugging Face ``tokenizers`` JSON file, read at first use. Needs the extra ``tokenizers``.

    Args:
        path: path of the JSON file.
        end_of_document: EOS token, which ends a document.
        begin_of_prompt: BOS token, with which prompts begin. Set it if an imported model was trained on documents that
            begin with it; None for no BOS token.

    Raises:
        SettingError: at first use, if the extra is missing, the file cannot be read, or it lacks one of the tokens.
    """

    path: str
    end_of_document: str = "<|endoftext|>"
    begin_of_prompt: str | None = None

    @functools.cached_property
    def vocab_size(self) -> int:
        """Size of the vocabulary: one more than the largest token, added tokens included."""
        # The library's vocabulary size counts tokens, but the token numbers of a file may have gaps.
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @functools.cached_property
    def separator(self) -> int:
        """The token that ends a document."""
        return self._number("end_of_document", self.end_of_document)

    @functools.cached_property
    def begin(self) -> int | None:
        """The BOS token, with which prompts begin, or None if there is none."""
        return None if self.begin_of_prompt is None else self._number("begin_of_prompt", self.begin_of_prompt)

    def put_before(self) -> str | None:
        """Returns the special token that the file's post-processor prepends to a text, or None if it prepends none."""
        encoded = self._tokenizer.encode("a", add_special_tokens=True)
        return encoded.tokens[0] if encoded.special_tokens_mask[:1] == [1] else None

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of a text, uint32[length], without special tokens."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    def encode_rendered(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokenizes a text that contains its special tokens as text, such as a rendered chat.

        Returns:
            (tokens, uint32[length]; for each, its first letter and the letter after its last, int64[length, 2]).
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(encoding.ids, np.uint32), np.asarray(encoding.offsets, np.int64).reshape(-1, 2)

    @functools.cached_property
    def special(self) -> tuple[str, ...]:
        """Texts of the special tokens."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    def number_of(self, text: str) -> int | None:
        """Returns the token with a text, or None if there is none."""
        return self._tokenizer.token_to_id(text)

    def decode(self, tokens: np.ndarray) -> str:
        """Decodes tokens, [length], special tokens included."""
        return self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)

    def to_json(self) -> str:
        """Serializes the tokenizer to JSON in the library's format."""
        return self._tokenizer.to_str()

    def text_bytes(self) -> np.ndarray | None:
        """Counts the bytes of text that each token stands for, see the function ``text_bytes``."""
        facts = json.loads(self.to_json())
        decoder = facts.get("decoder") or {}
        if not any(part.get("type") == "ByteLevel" for part in (decoder, *decoder.get("decoders", ()))):
            return None
        # In the vocabulary of a byte-level tokenizer, each letter stands for a byte.
        lengths = {token: len(text) for text, token in self._tokenizer.get_vocab(with_added_tokens=False).items()}
        for added in facts.get("added_tokens", ()):
            lengths[added["id"]] = 0 if added["special"] else len(added["content"].encode())
        sizes = np.zeros(self.vocab_size, np.int64)
        sizes[list(lengths)] = list(lengths.values())
        return sizes

    def digest(self) -> str:
        """Returns a digest of everything that determines a text's tokens: the file and the library's version."""
        tokenizer = self._tokenizer
        return hashlib.sha256(f"{version('tokenizers')} {tokenizer.to_str()}".encode()).hexdigest()

    def _number(self, setting: str, text: str) -> int:
        token = self.number_of(text)
        if token is None:
            raise SettingError(f"TokenizerFile.{setting}", text, f"{self.path} has no such token")
        return token

    @functools.cached_property
    def _tokenizer(self) -> Any:
        try:
            import tokenizers
        except ImportError:
            allowed = "needs the extra 'tokenizers': pip install 'swift-moe[tokenizers]'"
            raise SettingError("TokenizerFile.path", self.path, allowed) from None
        try:
            text = read_regular(self.path).decode("utf-8")
        except OSError as error:
            raise SettingError("TokenizerFile.path", self.path, f"cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SettingError("TokenizerFile.path", self.path, f"is not UTF-8 text (byte {error.start})") from error
        try:
            tokenizer = tokenizers.Tokenizer.from_str(text.removeprefix("\ufeff"))
        except Exception as error:  # the library raises bare Exception for every kind of malformed file
            raise SettingError("TokenizerFile.path", self.path, f"is not a tokenizers file: {error}") from error
        # A file stores the truncation and padding that were last set; they would cut or pad documents here.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


def text_bytes(tokenizer: Tokenizer) -> np.ndarray | None:
    """Counts the UTF-8 bytes of text that each token stands for, int64[vocab_size]; None if they are unknown.

    Special tokens, such as the separator, stand for no text. The bytes are known of ``ByteTokenizer`` and of byte-level
    tokenizers; any other tokenizer may drop or merge spaces.
    """
    if type(tokenizer) is ByteTokenizer:  # a subclass may encode otherwise
        return np.array([0] + [1] * (tokenizer.vocab_size - 1))
    return tokenizer.text_bytes() if isinstance(tokenizer, TokenizerFile) else None


def prompt_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenizes a prompt as ``text_tokens`` does, or returns a single separator if that gives no tokens."""
    return text_tokens(tokenizer, text) or [tokenizer.separator]


def text_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenizes a text that starts a sequence; prepends the BOS token if the tokenizer has ``begin_of_prompt``."""
    begin = tokenizer.begin if isinstance(tokenizer, TokenizerFile) else None
    return ([] if begin is None else [begin]) + [int(token) for token in tokenizer.encode(text)]
