"""Training data: documents or records from a source, and batches of token sequences that any worker loads by number.

- Settings: ``config``, ``tokenizer``. Sources of documents: ``sources``; of records: ``records`` and ``tables``.
- From documents to batches: ``corpus`` tokenizes, ``index`` stores the tokens in files, ``stream`` concatenates the
  documents of a split, ``windows`` cuts the stream into sequences and orders them, and ``loader`` batches them.
- Input pipelines: users write a ``pipeline`` of ``operators``, and ``samples`` returns its samples by number.
  ``survey`` determines once which records pass the filters, ``sample_store`` and ``encoding`` cache samples,
  ``remote_records`` lets other hosts produce samples, and ``sample_checks`` compares samples with those produced in the
  order as written.

The optimizer that plans how a pipeline runs, and the input hosts, are in ``swift.input``.
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
