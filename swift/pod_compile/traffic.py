"""Bytes that a step exchanges: counted in the compiled program and, for comparison, computed in closed form.

The exchange moves gradients to optimizer slices and weights to slots: 2 * slots * ranks * W * bytes per layer (SYMI,
section 3). Tokens travel to the experts and back, forward and backward: 4 * ranks * rows * D * bytes per layer and
micro-batch. If a token is sent to a rank only once, there is one row for each token and rank.

The weights of a sharded head are exchanged once, instead of once for each rank; in return, a rank's tokens travel to
all ranks, and their gradients travel back. A sharded embedding is not exchanged: its rows travel to the ranks of the
tokens, and their gradients travel back.

Legend: R rows of the axis ``worker``, W parameters of an expert, D model dim.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from swift.experts.state_layouts import Decoupled, FetchedPerMicrobatch
from swift.experts.weight_exchange import exchange_bytes, padded_size
from swift.mesh.hlo_collectives import ALL_TO_ALL, RAGGED, Collective
from swift.models.losses import tokens_per_block
from swift.models.vocabulary.layouts import ColumnSharded, RowSharded
from swift.models.vocabulary.lookup import max_requests_per_round
from swift.pipeline import scopes
from swift.pipeline.state import EMBEDDING_AND_HEAD, KINDS
from swift.pipeline.step.spec import StepSpec
from swift.pod_compile.costs import OpCounts

_EXCHANGE = (scopes.COLLECT, scopes.MATERIALIZE)
_TOKENS = (scopes.FORWARD, scopes.BACKWARD_INPUT, scopes.BACKWARD_WEIGHT, scopes.MICROBATCH)
_SHARES = (scopes.EMBEDDING, scopes.HEAD)


def moved_bytes(collective: Collective, runs_R: np.ndarray, num_ranks: int) -> int:
    """Returns the bytes that a collective exchanges in one call of the program, over all devices.

    Groups of one device exchange nothing.

    Args:
        collective: collective of the program.
        runs_R: number of times that it runs on every row.
        num_ranks: number of devices in a row.
    """
    all_devices = [tuple(range(len(runs_R) * num_ranks))]
    groups = collective.groups or all_devices
    members = [a for a, _ in collective.pairs] or [device for group in groups if len(group) > 1 for device in group]
    return collective.num_bytes * int(sum(runs_R[device // num_ranks] for device in members))


def bytes_by_kind(collectives: Sequence[Collective], runs: OpCounts) -> dict[str, dict[str, float]]:
    """Counts the collectives of an iteration by kind, with their bytes over all devices."""
    count, total = Counter[str](), Counter[str]()
    for collective in collectives:
        runs_R = runs.of(collective)
        count[collective.kind] += int(runs_R.max())
        total[collective.kind] += moved_bytes(collective, runs_R, runs.spec.live.num_ranks)
    K = runs.num_iterations
    return {kind: {"runs": count[kind] / K, "bytes": total[kind] / K} for kind in sorted(count)}


def exchange(collectives: Sequence[Collective], runs: OpCounts) -> dict[str, dict[str, float]]:
    """Returns the bytes of an iteration's weight exchange by parameter group, as compiled and in closed form."""
    spec = runs.spec
    compiled: Counter[str] = Counter()
    for collective in collectives:
        step, _, group = runs.part(collective).partition("/")
        if step in _EXCHANGE:
            compiled[group] += moved_bytes(collective, runs.of(collective), spec.live.num_ranks)
    return {
        name: {"compiled_bytes": compiled[name] / runs.num_iterations, "formula_bytes": _exchange_formula(runs, name)}
        for name, layout in spec.layouts.items()
        if isinstance(layout, Decoupled)
    }


def _exchange_formula(runs: OpCounts, name: str) -> float:
    spec, layout = runs.spec, runs.spec.layouts[name]
    assert isinstance(layout, Decoupled)
    num_ranks = spec.live.num_ranks
    if num_ranks == 1 or isinstance(layout, FetchedPerMicrobatch):
        return 0  # all data stays on the device, or travels inside the ops
    is_first, is_last = runs.end_rows
    embeds = runs.num_updates if spec.ties_stages else is_first.sum()
    num_updates = {"embedding": embeds, "head": is_last.sum()}.get(name, runs.num_updates)
    num_rows = 1 if name in EMBEDDING_AND_HEAD else spec.chunks.ops.stack_size(KINDS[name])
    num_slots = spec.worker_shapes.slots[name].shape[2]
    sizes = [jnp.dtype(dtype).itemsize for dtype in (layout.wire_dtype, layout.compute_dtype)]
    if isinstance(layout, ColumnSharded):
        return int(num_updates) * num_ranks**2 * layout.message_size * sum(sizes)
    exchanged = layout.num_before if isinstance(layout, RowSharded) else layout.size
    both = [exchange_bytes(num_rows, num_ranks, num_slots, exchanged, size) for size in sizes]
    return int(num_updates) * sum(both) / 2


def tokens(collectives: Sequence[Collective], runs: OpCounts, num_sequences: int) -> Mapping[str, float]:
    """Returns the bytes of tokens sent to experts and back in an iteration, as compiled and in closed form.

    With exact capacity, this includes the experts' weights and gradients, which travel in the same ops. With
    recomputation of blocks (``Experiment.remat``), there is no closed form.

    Args:
        collectives: collectives of the program.
        runs: run counts of the program's parts.
        num_sequences: number of sequences of a micro-batch on one rank.
    """
    spec, ranks = runs.spec, runs.spec.live.num_ranks
    compiled = sum(
        moved_bytes(collective, runs.of(collective), ranks)
        for collective in collectives
        if runs.part(collective) in _TOKENS
        and collective.kind in ALL_TO_ALL
        and not set(_SHARES) & set(collective.path)
    )
    total = {"compiled_bytes": compiled / runs.num_iterations}
    if spec.remat == "block":
        return total
    local_tokens = num_sequences * spec.gpt.config.sequence_length
    width = spec.gpt.config.model_dim * jnp.dtype(spec.compute_dtype).itemsize
    at_once = spec.live.mesh.devices.flat[0].platform != "cpu"
    size = spec.experts.capacity.rows_sent(spec.experts, local_tokens, ranks, at_once=at_once) * width
    times = sum(spec.cut.counts(is_moe=True)) * spec.num_microbatches * ranks
    return total | {"formula_bytes": times * (4 * size + _fetched_bytes(spec)) * (ranks > 1)}


def _fetched_bytes(spec: StepSpec) -> int:
    """Returns the bytes to fetch a rank's slots for a micro-batch and layer, with exact capacity; otherwise 0.

    The weights are fetched twice, and their gradients are sent once.
    """
    layout = spec.layouts.get("expert")
    if not isinstance(layout, FetchedPerMicrobatch):
        return 0
    compute, wire = (jnp.dtype(dtype).itemsize for dtype in (layout.compute_dtype, layout.wire_dtype))
    return spec.experts.slots_per_rank * padded_size(layout.size, spec.live.num_ranks) * (2 * compute + wire)


def bytes_in_transit(collectives: Sequence[Collective], runs: OpCounts, num_sequences: int) -> list[Collective]:
    """Scales ragged collectives to the average number of rows that travel; for ``num_sequences`` see ``tokens``.

    A ragged collective moves only the rows that exist, but the program shows only the size of its buffer, which is the
    maximum. On average, tokens are sent to fewer ranks.
    """
    spec, ranks = runs.spec, runs.spec.live.num_ranks
    capacity, shape = spec.experts.capacity, (spec.experts, num_sequences * spec.gpt.config.sequence_length, ranks)
    share = capacity.rows_travelling(*shape) / capacity.rows_sent(*shape, at_once=True)
    return [
        replace(collective, num_bytes=round(collective.num_bytes * share)) if collective.kind == RAGGED else collective
        for collective in collectives
    ]


def head_tokens(collectives: Sequence[Collective], runs: OpCounts, num_sequences: int) -> Mapping[str, float]:
    """Returns the bytes of the loss with a sharded head in an iteration; for ``num_sequences`` see ``tokens``.

    Each token contributes its residual stream, the stream's gradient, its label, whether it counts, and three numbers
    of the loss that are combined over the ranks.
    """
    spec, config, ranks = runs.spec, runs.spec.gpt.config, runs.spec.live.num_ranks
    compiled = sum(
        moved_bytes(collective, runs.of(collective), ranks)
        for collective in collectives
        if scopes.HEAD in collective.path
    )
    per_rank = num_sequences * config.sequence_length
    chunk = tokens_per_block(per_rank, spec.gpt.vocab_size)
    stream = config.model_dim * jnp.dtype(spec.compute_dtype).itemsize
    token = 2 * stream + 4 + 1 + 3 * jnp.dtype(spec.accumulate_dtype).itemsize
    per_device = -(-per_rank // chunk) * chunk * ranks * token
    return {
        "compiled_bytes": compiled / runs.num_iterations,
        "formula_bytes": spec.num_microbatches * ranks * per_device,
    }


def looked_up_rows(collectives: Sequence[Collective], runs: OpCounts, num_sequences: int) -> Mapping[str, float]:
    """Returns the bytes of look-ups in a sharded embedding in an iteration; for ``num_sequences`` see ``tokens``.

    Each request contributes its row number, and the row or its gradient. In addition, the ranks exchange the number of
    rounds, which depends on the tokens.
    """
    spec, config, ranks = runs.spec, runs.spec.gpt.config, runs.spec.live.num_ranks
    compiled = sum(
        moved_bytes(collective, runs.of(collective), ranks)
        for collective in collectives
        if scopes.EMBEDDING in collective.path
    )
    size = max_requests_per_round(num_sequences * config.sequence_length, ranks)
    values = jnp.dtype(spec.compute_dtype).itemsize + jnp.dtype(spec.row_wire_dtype).itemsize
    requests = 2 * 4 + config.model_dim * values  # the row number travels in F and in B
    per_device = runs.look_up_rounds * ranks * size * requests + 2 * 4
    return {
        "rounds": runs.look_up_rounds,
        "compiled_bytes": compiled / runs.num_iterations,
        "formula_bytes": spec.num_microbatches * ranks * per_device,
    }
