"""A corpus in memory, so that most tests need no file."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from swift.data.loader import Loader
from swift.data.sources import Document


@dataclass(frozen=True)
class MemoryTexts:
    texts: tuple[str, ...]

    def documents(self) -> list[Document]:
        return [Document(f"text-{number}", lambda text=text: text) for number, text in enumerate(self.texts)]


@pytest.fixture(scope="session")
def memory_texts() -> type[MemoryTexts]:
    return MemoryTexts


@pytest.fixture(scope="session")
def make_loader() -> Callable[..., Loader]:
    def make(config, split="train", *, shape=(2, 3, 5), seed=0, num_kept=1, corpus=None, draws_keys=False) -> Loader:
        num_microbatches, sequences_per_microbatch, sequence_length = shape
        return Loader(
            config,
            split,
            num_microbatches=num_microbatches,
            sequences_per_microbatch=sequences_per_microbatch,
            sequence_length=sequence_length,
            seed=seed,
            num_kept=num_kept,
            corpus=corpus,
            draws_keys=draws_keys,
        )

    return make
