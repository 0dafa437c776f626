"""The pieces of a state whose workers hold other blocks than the stages of a checkpoint, on several hosts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np

from swift.checkpoint.hosts.shared_files import Piece
from swift.checkpoint.partial.expert_units import StateSplit
from swift.pipeline.reconfigure.block_transfer import LocalPiece, local_pieces
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.train_state import TrainState


def begin_block_pieces(
    split: StateSplit, spec: StepSpec, state: TrainState, chosen_LK: np.ndarray
) -> Callable[[], list[Piece]]:
    """Starts to copy what a checkpoint saves of a state, see ``begin_pieces``; each host copies what it has.

    Args:
        split: division of a state with one row for each stage.
        spec: spec of the state.
        state: the state; may be donated after this returns.
        chosen_LK: the chosen classes of every MoE layer of the model.

    Returns:
        A function that waits for the copy and returns the pieces that this host has, for any thread.
    """
    copies = [
        (name, piece if name not in split.expert_names else _chosen(split, piece, chosen_LK))
        for name, pieces in local_pieces(replace(state, slots={}), spec, spec.stored).items()
        for piece in pieces
        if name not in split.expert_names or _layers(split, piece)
    ]
    return partial(_fetch, copies)


def _fetch(copies: list[tuple[str, LocalPiece]]) -> list[Piece]:
    for _, piece in copies:
        piece.values.copy_to_host_async()
    return [Piece(name, piece.place, np.asarray(piece.values)) for name, piece in copies]


def _layers(split: StateSplit, piece: LocalPiece) -> range:
    """MoE layers of the model that an experts' piece of one stage has; none where it is padding."""
    stage, stack, *_ = piece.place
    return split.layers_of_stages[stage.start][stack]


def _chosen(split: StateSplit, piece: LocalPiece, chosen_LK: np.ndarray) -> LocalPiece:
    """The classes of a piece that are saved, in their order."""
    if chosen_LK.shape[-1] == split.num_classes:
        return piece
    stage, stack, *_ = piece.place
    index_LK = split.by_stage(chosen_LK)[stage.start, stack]
    return LocalPiece(piece.place, jnp.take_along_axis(piece.values, index_LK[None, :, None, :, None], axis=3))
