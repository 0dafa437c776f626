"""Data: documents or samples from a source, and the batches of token sequences that any worker can load by number.

- Settings: ``config``, ``tokenizer``; sources of documents in ``sources``, of records in ``records`` and ``tables``.
- From documents to batches: ``corpus`` makes tokens, ``index`` keeps them in files, ``stream`` joins those of a split,
  ``windows`` cuts and orders them, and ``loader`` batches them.
- Pipelines of operators: ``pipeline`` and ``operators`` are what a user writes, ``samples`` yields what they make.
  ``input_profile`` measures operators and ``input_optimizer`` plans how they run; ``survey`` finds out once which
  records stay, ``sample_store`` and ``encoding`` keep samples, ``remote_records`` has other hosts make them, and
  ``sample_checks`` compares them with those of the plain order.
"""

from typing import TYPE_CHECKING

from swift.lazy_names import lazy_names

if TYPE_CHECKING:
    from swift.data.config import DataConfig, Mixture, Split
    from swift.data.corpus import training_pipelines
    from swift.data.index import find_index
    from swift.data.loader import Loader, check_same_data
    from swift.data.pipeline import InputPlan, Pipeline, plain_plan
    from swift.data.records import Rows
    from swift.data.remote_records import ConnectHosts
    from swift.data.samples import Samples
    from swift.data.sources import (
        DataError,
        Document,
        InMemory,
        StandardLibrary,
        StreamSource,
        TextFiles,
        TextSource,
        TokenFile,
    )
    from swift.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerFile, prompt_tokens, text_tokens
    from swift.data.windows import Batch

_MODULES = {
    "swift.data.config": ["DataConfig", "Mixture", "Split"],
    "swift.data.corpus": ["training_pipelines"],
    "swift.data.index": ["find_index"],
    "swift.data.loader": ["Loader", "check_same_data"],
    "swift.data.pipeline": ["InputPlan", "Pipeline", "plain_plan"],
    "swift.data.records": ["Rows"],
    "swift.data.remote_records": ["ConnectHosts"],
    "swift.data.samples": ["Samples"],
    "swift.data.sources": [
        "DataError",
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
    "prompt_tokens",
    "text_tokens",
    "training_pipelines",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
