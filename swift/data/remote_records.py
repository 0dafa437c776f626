"""Records that other hosts begin: the request, the answer, and what happens where no host answers.

A host has the pipeline itself, from the same configuration, so that a request names operators and never holds a
program; the answer is a sample, see ``encoded``. Whatever a host does not or cannot answer is made here.
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
    """Other hosts with the pipeline of this one; threads may share them."""

    @property
    def num_workers(self) -> int:
        """Number of processes that make samples there; 0 once all are lost."""
        ...

    def ask(self, request: bytes) -> tuple[str, bytes] | None:
        """Returns the name of a host and its answer; None: none is free, or the one that was asked is lost."""
        ...

    def tell(self, host: str, line: str) -> None:
        """Tells the user about a host that could not answer, not for every request again."""
        ...


ConnectHosts = Callable[[Pipeline, Callable[[str], None]], AbstractContextManager[InputHosts]]
"""Connects to other hosts for a block, by the pipeline that they need, too, and a function that shows a line."""


@dataclass(frozen=True)
class RecordRequest:
    """A request for a record that has passed the first operators of a plan.

    Attributes:
        number: number of the record.
        end: number of operators.
        epoch: the seed, and the epoch; None: a survey asks, for which filters choose and digests are made.
    """

    number: int
    end: int
    epoch: tuple[int, int] | None = None


@dataclass(frozen=True)
class RecordAnswer:
    """An answer to a request.

    Attributes:
        begun: the record; None: the host could not make it.
        took_s: seconds that this took the host.
        reason: reason why it could not.
    """

    begun: PartialSample | None
    took_s: float = 0.0
    reason: str = ""


def make_request(plan: InputPlan, request: RecordRequest) -> bytes:
    """Returns a request as bytes."""
    return json.dumps(asdict(request) | {"order": plan.orders[0]}).encode()


def handle_request(pipeline: Pipeline, content: bytes) -> bytes:
    """Answers a request, as a host that has the same pipeline; whatever goes wrong is an answer, too."""
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
    except Exception as error:  # of the source, which this host may not see as the other does
        return error_response(error_line(error))


def error_response(reason: str) -> bytes:
    """Returns the answer to a request that a host cannot fulfil."""
    return encoded({"reason": reason})


def run_locally(plan: InputPlan, request: RecordRequest) -> PartialSample:
    """Makes what a request asks for."""
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
    """Reads an answer.

    Raises:
        ValueError: it is none.
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
    except Exception as error:  # whatever bytes may cause
        raise ValueError(f"the answer is none: {error_line(error)}") from error


def fetch_remote_records(hosts: InputHosts, plan: InputPlan, request: RecordRequest) -> PartialSample | None:
    """Asks other hosts to begin a record; None: it has to be made here.

    One record in ``InputPlan.check_every`` is made here, too, and compared.

    Raises:
        UntrueOperator: the host makes something else of it.
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
