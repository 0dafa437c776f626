"""A corpus's index: files with its tokens, or with the spans of a token file's splits, that all processes read.

An index is a directory named by a digest of everything that determines it: names, sizes and modification times of the
corpus files, the tokenizer, and the validation share. It is complete or absent, and outlives its run.

One process of a machine reads the corpus, and all others use its index (``find_index``). The builder holds a lock,
which the kernel releases if the process dies, and touches the lock file while it is alive. A process that has waited
too long for a frozen builder builds the index itself; concurrent builds do not interfere with each other.
"""

import fcntl
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, get_args
from uuid import uuid4

import numpy as np

from swift.data.config import DataConfig, Mixture, Split
from swift.data.corpus import PlanReading, corpora_of, pipeline_tokens, plain_reading, tokens_plan
from swift.data.pipeline import Pipeline
from swift.data.remote_records import ConnectHosts
from swift.data.sample_checks import MisdeclaredOperator
from swift.data.sample_store import NoDigest, survey_digest
from swift.data.sources import (
    ChangedFile,
    DataError,
    DomainRuns,
    RunsBuilder,
    StreamSource,
    TextSource,
    TokenFile,
    TokenReader,
    WeightReader,
)
from swift.data.stream import SequentialStream, Spans, TokenStream, joint_digest, new_digest, open_stream, spans_of
from swift.data.tokenizer import ByteTokenizer, TokenizerFile
from swift.errors import SettingError
from swift.files import replace_file, sync_directory

_VERSION = 2
_HEAD, _RUNS = "index.json", "domains"
_WEIGHTS: Mapping[Split, str] = {"train": "train_weights", "validation": "validation_weights"}
"""Files with the weight of every token's loss, float32, beside the tokens of each split."""
_SETTLED_NS = 2_000_000_000
"""Nanoseconds after a write in which another write may leave the file's time stamp unchanged (coarse clocks)."""

_BEAT_S, _PAUSE_S, _PATIENCE_S, _REPORT_S = 1.0, 0.2, 10.0, 5.0
_KEPT_S = 30 * 86_400
"""Seconds after which an unused index is removed."""


@dataclass(frozen=True)
class IndexProgress:
    """Progress of building an index."""

    num_documents: int
    num_done: int
    num_bytes: int


class CorpusState(NamedTuple):
    """Identity of a corpus, determined without reading it.

    Attributes:
        name: name of the index.
        newest_ns: time of the last write to one of its files, in nanoseconds since 1970.
    """

    name: str
    newest_ns: int


def _corpus_state(config: DataConfig) -> CorpusState | None:
    """Returns the current state of a corpus, or None if it cannot be determined.

    It cannot be determined for streams, documents without a file, tokenizers from outside ``swift.data``, and pipelines
    without a digest, or if a file is missing.

    Raises:
        SettingError: the source has no documents.
    """
    if isinstance(config.source, Pipeline):
        return _pipeline_state(config)
    tokenizer, newest_ns = config.tokenizer, 0
    parts: list[Any] = [_VERSION, config.validation_share]
    for source in config.sources:
        if isinstance(source, StreamSource):
            return None
        if isinstance(source, TokenFile):
            # Finding the document ends reads all tokens and checks them against this vocabulary.
            parts += ["tokens", source.dtype, source.end_of_document, config.vocab_size]
            named: dict[str, str | None] = {"": source.path}
        else:
            assert isinstance(source, TextSource)
            named = {document.name: document.path for document in source.documents()}
            if isinstance(tokenizer, ByteTokenizer):
                parts += ["texts", "bytes"]
            elif isinstance(tokenizer, TokenizerFile):
                parts += ["texts", tokenizer.digest(), tokenizer.end_of_document]
            else:
                return None
        for name, path in named.items():
            if path is None:
                return None
            try:
                status = os.stat(path)
            except OSError:
                return None  # the source gives the better error when it reads the file
            parts.append([name, os.path.abspath(path), status.st_size, status.st_mtime_ns])
            newest_ns = max(newest_ns, status.st_mtime_ns)
    return CorpusState(hashlib.sha256(json.dumps(parts).encode()).hexdigest(), newest_ns)


def _pipeline_state(config: DataConfig) -> CorpusState | None:
    """Identifies pipelines by digests of their sources, settings and code."""
    try:
        digests = [survey_digest(tokens_plan(corpus.pipeline)) for corpus in corpora_of(config)]
    except (NoDigest, DataError):  # if something is wrong, reading the source gives the better error
        return None
    parts = [_VERSION, "pipeline", config.validation_share, config.separator, *digests]
    return CorpusState(hashlib.sha256(json.dumps(parts).encode()).hexdigest(), 0)


def make_index(
    config: DataConfig,
    path: Path,
    report: Callable[[IndexProgress], None],
    say: Callable[[str], None] = lambda _: None,
    connect: ConnectHosts | None = None,
    plan: PlanReading = plain_reading,
) -> None:
    """Reads a corpus once and writes its index.

    Args:
        config: data settings.
        path: directory of the index. If another process has created it in the meantime, that index is kept.
        report: called with the progress.
        say: called with a line, see ``pipeline_tokens``.
        connect: see ``pipeline_tokens``.
        plan: see ``pipeline_tokens``.

    Raises:
        SettingError: the source cannot be read, a split would have no document, or an input host has different data or
            operators.
        DataError: a token is beyond the vocabulary, or a token file changes while it is read.
        OSError: the index cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    temporary.mkdir(mode=0o700)
    try:
        start_ns = time.time_ns()
        if isinstance(config.source, TokenFile):
            files = _write_spans(config, temporary, report)
        else:
            files = _write_texts(config, temporary, report, say, connect, plan)
        # The head comes last and the rename is atomic, so no other process ever sees an incomplete index.
        replace_file(temporary / _HEAD, json.dumps({"version": _VERSION, "begun": start_ns, "files": files}).encode())
        sync_directory(temporary)
        if not path.exists():
            temporary.rename(path)
    finally:
        _remove_index(temporary)


def _remove_index(path: Path) -> None:
    """Removes an index, whether it is complete or not."""
    if path.exists():
        for file in path.iterdir():
            file.unlink(missing_ok=True)
        path.rmdir()


def is_intact(path: Path, newest_ns: int) -> bool:
    """Whether an index is complete and undamaged, and no corpus file can have changed unnoticed since.

    Args:
        path: directory of the index.
        newest_ns: time of the last write to a corpus file, in nanoseconds since 1970.
    """
    try:
        head = _head(path)
        # A file written just before the build may have been written again during it, with the same time stamp.
        if newest_ns > head["begun"] - _SETTLED_NS:
            return False
        files = head["files"]
        is_whole = set(get_args(Split)) <= set(files)
        return is_whole and all(_digest(path / name) == entry["digest"] for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def indexed_stream(path: Path, config: DataConfig, split: Split) -> TokenStream:
    """Opens the token stream of a split in an intact index.

    Raises:
        OSError: the index is gone, or a file does not have the size that was written.
        SettingError: the source is a token file that cannot be read.
        DataError: a token is beyond the vocabulary.
    """
    files = _head(path)["files"]
    head = files[split]
    for name in {split, _RUNS, _WEIGHTS[split]} & set(files):
        if (path / name).stat().st_size != files[name]["bytes"]:
            raise OSError(f"{path / name} does not have the {files[name]['bytes']} bytes that were written")
    source = config.source_of(split)
    if isinstance(source, TokenFile):
        starts_S, offsets_S = np.fromfile(path / split, np.int64).reshape(2, -1)
        return TokenStream(source.tokens(config.vocab_size), starts_S, offsets_S, head["num_tokens"])
    vocab_size = config.tokenizer.vocab_size
    tokens_N = TokenReader(str(path / split), np.min_scalar_type(vocab_size - 1), vocab_size)
    runs = DomainRuns(*np.fromfile(path / _RUNS, np.int64).reshape(2, -1)) if split == "train" else None
    weights_N, digest = None, head["digest"]
    if config.weighs_tokens:
        weights_N = WeightReader(str(path / _WEIGHTS[split]))
        digest = joint_digest(digest, files[_WEIGHTS[split]]["digest"])
    zero_1 = np.zeros(1, np.int64)
    return TokenStream(tokens_N, zero_1, zero_1, len(tokens_N), digest, runs, weights_N)


def corpus_streams(config: DataConfig, split: Split, path: Path | None) -> list[TokenStream | SequentialStream]:
    """Opens a split's token streams: one for each source of a mixture, or a single one; see ``corpus_stream``.

    Args:
        config: data settings.
        split: split to open.
        path: result of ``find_index``.
    """
    if not isinstance(config.source, Mixture):
        return [corpus_stream(config, split, path)]
    streams = []
    for component in config.components:
        state = None if path is None else _corpus_state(component)
        index = path / state.name if path is not None and state is not None else None
        streams.append(corpus_stream(component, split, index if index is not None and index.is_dir() else None))
    return streams


def corpus_stream(config: DataConfig, split: Split, path: Path | None) -> TokenStream | SequentialStream:
    """Opens the token stream of a split from its index; reads the corpus if there is no usable index.

    Raises:
        SettingError: the source cannot be read, or a split would have no document.
    """
    if path is not None:
        try:
            return indexed_stream(path, config, split)
        except SettingError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"the corpus is read again: {error}", file=sys.stderr)
    return open_stream(config, split)


class _Written:
    """An index file that is being written; ``close`` returns its entry for the head."""

    def __init__(self, file: BinaryIO):
        self._file, self._digest = file, new_digest()
        self.num_bytes = 0

    def add(self, array: np.ndarray) -> None:
        content = np.ascontiguousarray(array).data
        self._file.write(content)
        self._digest.update(content)
        self.num_bytes += content.nbytes

    def close(self, num_tokens: int) -> dict[str, Any]:
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self.num_bytes, "digest": self._digest.hexdigest(), "num_tokens": num_tokens}


def _write_texts(
    config: DataConfig,
    path: Path,
    report: Callable[[IndexProgress], None],
    say: Callable[[str], None],
    connect: ConnectHosts | None,
    plan: PlanReading,
) -> dict[str, Any]:
    dtype, builder = np.min_scalar_type(config.tokenizer.vocab_size - 1), RunsBuilder()
    splits = get_args(Split)
    names = [*splits, *(_WEIGHTS[split] for split in splits if config.weighs_tokens)]
    with ExitStack() as stack:
        written = {name: _Written(stack.enter_context((path / name).open("wb"))) for name in names}

        def add(split: Split, domain: str, tokens: np.ndarray, weights: np.ndarray | None) -> None:
            written[split].add(tokens)
            if weights is not None:
                written[_WEIGHTS[split]].add(weights)
            if split == "train":
                builder.add(domain, len(tokens))

        def tell(num_done: int, num: int) -> None:
            report(IndexProgress(num, num_done, sum(written[split].num_bytes for split in splits)))

        pipeline_tokens(config, add, tell, say, connect=connect, plan=plan)
        counts = {split: written[split].num_bytes // dtype.itemsize for split in splits}
        files = {name: file.close(counts.get(name, 0)) for name, file in written.items()}
    with (path / _RUNS).open("wb") as file:
        runs = _Written(file)
        runs.add(np.stack(builder.runs()))
        return files | {_RUNS: runs.close(0)}


def _write_spans(config: DataConfig, path: Path, report: Callable[[IndexProgress], None]) -> dict[str, Any]:
    splits: dict[str, Any] = {}
    spans_by_source: dict[Any, dict[Split, Spans]] = {}
    for split in get_args(Split):
        source = config.source_of(split)
        assert isinstance(source, TokenFile)
        if source not in spans_by_source:
            spans_by_source[source] = spans_of(config, source.document_ends(source.tokens(config.vocab_size)))
        spans = spans_by_source[source][split]
        with (path / split).open("wb") as file:
            spans_file = _Written(file)
            spans_file.add(spans.starts_S)
            spans_file.add(spans.offsets_S)
            splits[split] = spans_file.close(spans.num_tokens)
        report(IndexProgress(len(spans.starts_S), len(spans.starts_S), spans_file.num_bytes))
    return splits


def _head(path: Path) -> dict[str, Any]:
    return json.loads((path / _HEAD).read_text())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, new_digest).hexdigest()


def find_index(
    config: DataConfig,
    cache: Path,
    report: Callable[[str], None],
    patience_s: float = _PATIENCE_S,
    connect: ConnectHosts | None = None,
    plan: PlanReading = plain_reading,
) -> Path | None:
    """Finds the index of a corpus, and builds it if there is none.

    Args:
        config: data settings.
        cache: directory of indexes; created if it is missing.
        report: called with a line about the progress, or about why there is no index.
        patience_s: seconds without a heartbeat from the process that builds the index, after which others stop waiting
            for it.
        connect: connects to input hosts, which help to read texts and pipelines while the index is built. For a
            mixture it is called for one source after another. None for no hosts.
        plan: plans how texts and pipelines are read while the index is built.

    Returns:
        The directory of the index; for a mixture, the directory that holds the indexes of its sources. None if the
        corpus cannot be identified, or the index cannot be written; every process then reads the corpus itself.

    Raises:
        SettingError: the source cannot be read, a split would have no document, or an input host has different data or
            operators.
    """
    if isinstance(config.source, Mixture):
        indexes = [find_index(component, cache, report, patience_s, connect, plan) for component in config.components]
        return cache if any(indexes) else None
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in range(2):  # a second try, since a file may be written to while it is read
            state = _corpus_state(config)
            if state is None:
                return None
            path = cache / state.name
            try:
                was_made = _make_unless_found(config, path, state, report, patience_s, connect, plan)
            except ChangedFile:
                if isinstance(config.source, Pipeline):  # its operators may have run for an hour
                    raise
                continue
            if not was_made or state == _corpus_state(config):
                _forget_old(cache, but=path)
                return path
        report("the corpus changes while it is read: every process reads it for itself")
    except DataError as error:
        if isinstance(config.source, Pipeline) or isinstance(error, MisdeclaredOperator):  # by an input host
            raise SettingError("DataConfig.source", config.source, str(error)) from error
        # Otherwise return None: each process then reads the file itself, and reports the error better.
    except OSError as error:
        report(f"the corpus is not kept in {cache} ({error.strerror or error}): every process reads it for itself")
    return None


def _make_unless_found(
    config: DataConfig,
    path: Path,
    state: CorpusState,
    report: Callable[[str], None],
    patience_s: float,
    connect: ConnectHosts | None,
    plan: PlanReading,
) -> bool:
    """Ensures that there is an intact index; returns whether this call built it."""
    lock, seen, since = path.with_suffix(".lock"), 0, time.monotonic()
    while not is_intact(path, state.newest_ns):
        with _alone(lock) as is_alone:
            beat = lock.stat().st_mtime_ns
            if beat != seen:
                seen, since = beat, time.monotonic()
            if not is_alone and time.monotonic() - since < patience_s:
                time.sleep(_PAUSE_S)
                continue
            if is_alone:  # with the lock held, unfinished directories can only belong to dead processes
                for half in path.parent.glob(f".{path.name}.*"):
                    _remove_index(half)
            _remove_index(path)
            with _heartbeat(lock):
                make_index(config, path, _progress_report(report), report, connect, plan)
            return True
    with suppress(OSError):  # the cache may be read-only; the time tells ``_forget_old`` that the index is in use
        os.utime(path)
    return False


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Tries to lock a file while the block runs; yields False if another process or thread holds the lock."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_alone = True
        except OSError:  # the lock is held, or the file system has no locks
            is_alone = False
        yield is_alone


@contextmanager
def _heartbeat(path: Path) -> Iterator[None]:
    """Touches a file every second while the block runs, as a heartbeat."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(_BEAT_S):
            with suppress(OSError):
                os.utime(path)

    os.utime(path)
    thread = threading.Thread(target=beat, name="index", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _progress_report(report: Callable[[str], None]) -> Callable[[IndexProgress], None]:
    """Returns a function that reports the progress at most once in ``_REPORT_S`` seconds."""
    reported = time.monotonic()

    def say(progress: IndexProgress) -> None:
        nonlocal reported
        if time.monotonic() - reported > _REPORT_S:
            reported = time.monotonic()
            done, num = progress.num_done, progress.num_documents
            report(f"reads the corpus: {done:,} of {num:,} documents, {progress.num_bytes / 1e6:,.0f} MB")

    return say


def _forget_old(cache: Path, but: Path) -> None:
    """Removes indexes that no run has used for ``_KEPT_S`` seconds."""
    for path in cache.iterdir():
        with suppress(OSError):
            if path != but and time.time() - path.stat().st_mtime > _KEPT_S:
                if path.is_dir():
                    _remove_index(path)
                else:
                    path.unlink()
