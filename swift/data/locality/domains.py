"""Domains of documents: where in a stream of tokens which domain is.

Shapes: R runs of documents of one domain that follow each other, D domains.
"""

import re
from array import array
from typing import NamedTuple

import numpy as np


class DomainRuns(NamedTuple):
    """Runs of documents of one domain, in the order of a stream of tokens."""

    starts_R: np.ndarray  # int64, position of the first token of each run
    domains_R: np.ndarray  # int64, number of the domain of each run, in the order in which the domains come first


class RunsBuilder:
    """Runs of the documents that are added, in the order of the stream."""

    def __init__(self) -> None:
        self._numbers, self._end = dict[str, int](), 0
        self._starts, self._domains = array("q"), array("q")  # a run may be as short as a document

    def add(self, domain: str, num_tokens: int) -> None:
        """Adds the next tokens, of a document of a domain."""
        number = self._numbers.setdefault(domain, len(self._numbers))
        if not self._domains or self._domains[-1] != number:
            self._starts.append(self._end)
            self._domains.append(number)
        self._end += num_tokens

    def runs(self) -> DomainRuns:
        """Returns the runs so far."""
        return DomainRuns(np.array(self._starts, np.int64), np.array(self._domains, np.int64))


def domain_of(name: str) -> str:
    """Returns the domain of a document without a field that says it: its name without the part after the last / or :.

    That is the directory of a text file, and the file of a record.

    >>> domain_of("asyncio/queues.py"), domain_of("code/part-3.jsonl:17"), domain_of("record 5")
    ('asyncio', 'code/part-3.jsonl', '')
    """
    return re.split(r"[/:](?=[^/:]*$)", name, maxsplit=1)[0] if re.search("[/:]", name) else ""
