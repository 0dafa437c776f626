"""Data: documents from a source, cut into batches of token sequences that any worker can load by number."""

from typing import TYPE_CHECKING

from swift.lazy_names import lazy_names

if TYPE_CHECKING:
    from swift.data.config import DataConfig, Mixture, Split
    from swift.data.corpus import readings
    from swift.data.files import DataError
    from swift.data.index_cache import find_index
    from swift.data.loader import Loader, check_same_data
    from swift.data.pipeline.elsewhere import ConnectHosts
    from swift.data.pipeline.optimizer.cost import Resources
    from swift.data.pipeline.optimizer.passes import plan_input
    from swift.data.pipeline.pipeline import Pipeline
    from swift.data.pipeline.plan import InputPlan, plain_plan
    from swift.data.pipeline.samples import Samples
    from swift.data.records.protocol import Rows
    from swift.data.sources import Document, InMemory, StandardLibrary, StreamSource, TextFiles, TextSource, TokenFile
    from swift.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerFile, prompt_tokens, text_tokens
    from swift.data.windows import Batch

_MODULES = {
    "swift.data.config": ["DataConfig", "Mixture", "Split"],
    "swift.data.corpus": ["readings"],
    "swift.data.files": ["DataError"],
    "swift.data.index_cache": ["find_index"],
    "swift.data.loader": ["Loader", "check_same_data"],
    "swift.data.pipeline.elsewhere": ["ConnectHosts"],
    "swift.data.pipeline.optimizer.cost": ["Resources"],
    "swift.data.pipeline.optimizer.passes": ["plan_input"],
    "swift.data.pipeline.pipeline": ["Pipeline"],
    "swift.data.pipeline.plan": ["InputPlan", "plain_plan"],
    "swift.data.pipeline.samples": ["Samples"],
    "swift.data.records.protocol": ["Rows"],
    "swift.data.sources": [
        "Document",
        "InMemory",
        "StandardLibrary",
        "StreamSource",
        "TextFiles",
        "TextSource",
        "TokenFile",
    ],
    "swift.data.tokenizer": ["ByteTokenizer", "Tokenizer", "TokenizerFile", "prompt_tokens", "text_tokens"],
    "swift.data.windows": ["Batch"],
}
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

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
