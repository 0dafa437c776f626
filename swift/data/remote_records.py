"""Offloading of records to input hosts: requests, answers, and the fallback to this machine.

A host builds the same pipeline from its own copy of the configuration, so a request only names operators and never
contains code. The answer is a sample, see ``encoded``. Records that no host returns are produced locally.
"""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from swift.data.encoding import Unencodable, decoded, encoded
from swift.data.operators import draws, name_of
from swift.data.pipeline import InputPlan, Pipeline, plain_plan
from swift.data.sample_checks import MisdeclaredOperator, PartialSample, apply_operators, is_same
from swift.errors import error_line

_DIGEST_BYTES, _MOST_ECHOED = 16, 1 << 26


class InputHosts(Protocol):
    """The connected input hosts, which have the same pipeline as this machine. Implementations must be thread-safe."""

    @property
    def num_workers(self) -> int:
        """Number of host processes that produce samples; 0 once all are lost."""
        ...

    def ask(self, request: bytes) -> tuple[str, bytes] | None:
        """Sends a request; returns the host's name and answer, or None if no host is free or the host was lost."""
        ...

    def tell(self, host: str, line: str) -> None:
        """Reports to the user that a host could not answer, but not again for every request."""
        ...


ConnectHosts = Callable[[Pipeline, Callable[[str], None]], AbstractContextManager[InputHosts]]
"""Connects to input hosts for a ``with`` block; takes the pipeline, and a function that reports a line to the user."""


@dataclass(frozen=True)
class RecordRequest:
    """A request to read a record and run the first operators of a plan on it.

    Attributes:
        number: number of the record.
        end: number of operators to run.
        epoch: (seed, epoch) of the sample; None for a survey, in which filters apply and digests are computed.
    """

    number: int
    end: int
    epoch: tuple[int, int] | None = None


@dataclass(frozen=True)
class RecordAnswer:
    """A host's answer to a request.

    Attributes:
        begun: the record after its first operators, or None if the host could not produce it.
        took_s: seconds that the host took to produce it.
        reason: why the host could not produce it; empty if it could.
    """

    begun: PartialSample | None
    took_s: float = 0.0
    reason: str = ""


def make_request(plan: InputPlan, request: RecordRequest) -> bytes:
    """Serializes a request together with the plan's order of record operators."""
    return json.dumps(asdict(request) | {"order": plan.orders[0]}).encode()


def handle_request(pipeline: Pipeline, content: bytes) -> bytes:
    """Answers a request on a host with the same pipeline; never raises, since errors are sent as answers."""
    begun_s = time.perf_counter()
    try:
        fields = json.loads(content)
        if "echo" in fields:
            return _answer(PartialSample(0, {"echo": np.zeros(min(int(fields["echo"]), _MOST_ECHOED), np.uint8)}), 0.0)
        order = tuple(map(str, fields.pop("order")))
        if sorted(order) != sorted(map(name_of, pipeline.levels[0].elements)):
            raise ValueError(f"{', '.join(order)} are not the operators of this pipeline")
        plain = plain_plan(pipeline)
        plan = replace(plain, orders=(order, *plain.orders[1:]))
        return _answer(run_locally(plan, RecordRequest(**fields)), time.perf_counter() - begun_s)
    except Unencodable as error:
        return error_response(f"it cannot be sent: {error}")
    except Exception as error:  # the source's files may be readable on the client but not on this host
        return error_response(error_line(error))


def error_response(reason: str) -> bytes:
    """Returns the answer to a request that a host cannot fulfill."""
    return encoded({"reason": reason})


def run_locally(plan: InputPlan, request: RecordRequest) -> PartialSample:
    """Reads the requested record and runs its first operators in this process."""
    number, epoch = request.number, request.epoch
    begun = PartialSample(0, plan.pipeline.source[number])
    draw = draws(*(epoch or (0, 0)), number)
    return apply_operators(plan, begun, plan.elements(0)[: request.end], draw, chooses=epoch is None)


def _answer(begun: PartialSample, elapsed_s: float) -> bytes:
    if begun.error is not None:
        return error_response(begun.error)
    sample: dict[str, Any] = {} if begun.sample is None else {"sample": encoded(begun.sample)}
    digests = b"".join(digest for _, digest in begun.digests)
    head = {"num_done": begun.num_done, "names": [name for name, _ in begun.digests], "digests": digests}
    return encoded(head | {"took_s": elapsed_s} | sample)


def read_answer(content: bytes) -> RecordAnswer:
    """Parses an answer.

    Raises:
        ValueError: the bytes are not a valid answer.
    """
    try:
        fields = decoded(content)
        if "reason" in fields:
            return RecordAnswer(None, reason=str(fields["reason"]))
        digests = fields["digests"]
        parts = [digests[first : first + _DIGEST_BYTES] for first in range(0, len(digests), _DIGEST_BYTES)]
        sample = decoded(fields["sample"]) if "sample" in fields else None
        named = tuple(zip(map(str, fields["names"]), parts, strict=True))
        return RecordAnswer(PartialSample(int(fields["num_done"]), sample, named), float(fields["took_s"]))
    except Exception as error:  # arbitrary bytes may cause any error
        raise ValueError(f"the answer is none: {error_line(error)}") from error


def fetch_remote_records(hosts: InputHosts, plan: InputPlan, request: RecordRequest) -> PartialSample | None:
    """Lets an input host run the first operators on a record; returns None if this machine must run them itself.

    One record in every ``InputPlan.check_every`` is also produced locally and compared.

    Raises:
        MisdeclaredOperator: the host's sample differs from the local one.
    """
    reply = hosts.ask(make_request(plan, request))
    if reply is None:
        return None
    host, content = reply
    place = plan.pipeline.source.place(request.number)
    try:
        answer = read_answer(content)
        if answer.begun is not None and answer.begun.num_done != request.end:
            answer = RecordAnswer(None, reason=f"{answer.begun.num_done} operators have run instead of {request.end}")
    except ValueError as error:
        answer = RecordAnswer(None, reason=str(error))
    if answer.begun is None:
        hosts.tell(host, f"cannot make {place}: {answer.reason}")
        return None
    if plan.check_every and request.number % plan.check_every == 0:
        local = run_locally(plan, request)
        if answer.begun.digests != local.digests or not is_same(answer.begun.sample, local.sample):
            reason = "makes another sample of it than this machine: a library, a file or an operator differs"
            raise MisdeclaredOperator(f"{place}: input host {host} {reason}")
    return answer.begun
