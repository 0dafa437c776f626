"""Data: documents from a source, cut into batches of token sequences that any worker can load by number."""

from swift.data.config import DataConfig, Mixture, Split
from swift.data.corpus import readings
from swift.data.files import DataError
from swift.data.index_cache import find_index
from swift.data.loader import Loader, check_same_data
from swift.data.pipeline import ConnectHosts, InputPlan, Pipeline, Resources, Samples, plain_plan, plan_input
from swift.data.records import Rows
from swift.data.sources import Document, InMemory, StandardLibrary, StreamSource, TextFiles, TextSource, TokenFile
from swift.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerFile, prompt_tokens, text_tokens
from swift.data.windows import Batch

__all__ = [
    "Batch",
    "ByteTokenizer",
    "ConnectHosts",
    "DataConfig",
    "DataError",
    "Document",
    "InMemory",
    "InputPlan",
    "Loader",
    "Mixture",
    "Pipeline",
    "Resources",
    "Rows",
    "Samples",
    "Split",
    "StandardLibrary",
    "StreamSource",
    "TextFiles",
    "TextSource",
    "TokenFile",
    "Tokenizer",
    "TokenizerFile",
    "check_same_data",
    "find_index",
    "plain_plan",
    "plan_input",
    "prompt_tokens",
    "readings",
    "text_tokens",
]
