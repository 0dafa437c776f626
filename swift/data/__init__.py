"""Data: documents from a source, cut into batches of token sequences that any worker can load by number."""

from swift.data.config import DataConfig, Split
from swift.data.loader import Loader
from swift.data.sources import Document, StandardLibrary, TextFiles, TextSource, TokenFile
from swift.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerFile
from swift.data.windows import Batch

__all__ = [
    "Batch",
    "ByteTokenizer",
    "DataConfig",
    "Document",
    "Loader",
    "Split",
    "StandardLibrary",
    "TextFiles",
    "TextSource",
    "TokenFile",
    "Tokenizer",
    "TokenizerFile",
]
