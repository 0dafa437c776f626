"""The chunks that each worker holds: where they are in its stacks, and which workers are peers.

C chunks, H holdings, L layers of a group in the model, R mesh rows.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from swift.mesh.live import LiveMesh
from swift.mesh.peer_reduce import how_unequal
from swift.models.cuts.chunks import Chunks
from swift.models.gpt import GPT
from swift.pipeline.chunk_rounds import Rounds
from swift.pipeline.train_state import EMBEDDING_AND_HEAD, KINDS


@dataclass(frozen=True, kw_only=True)
class WorkerChunks:
    """The chunks that each live worker holds.

    Attributes:
        gpt: model architecture.
        live: mesh of the live workers.
        chunks: chunks of the model, and which of them each worker holds.
    """

    gpt: GPT
    live: LiveMesh
    chunks: Chunks

    @property
    def num_stages(self) -> int:
        """P."""
        return self.live.topology.num_stages

    @cached_property
    def num_moe_layers(self) -> int:
        """L, layers with experts in a worker's stacks: as many as the worker has that has most."""
        return self.chunks.stack_size(True)

    @cached_property
    def model_index(self) -> dict[str, np.ndarray]:
        """Index in the model of each layer of each holding, int64[H, layers] by group; negative: padding.

        Where pipelines are cut alike and a chunk is a stage, the holdings are the stages.
        """
        ends = np.zeros((len(self.chunks.holdings), 1), int)
        return {
            name: ends if name in EMBEDDING_AND_HEAD else self.chunks.model_index(KINDS[name])
            for name in self.gpt.groups
        }

    @cached_property
    def num_layers(self) -> dict[str, int]:
        """Layers of a worker's stack, by group."""
        return {name: index.shape[1] for name, index in self.model_index.items()}

    @cached_property
    def holding_R(self) -> np.ndarray:
        """The holding of the worker of each mesh row, int32."""
        return np.array([self.chunks.holding(*row.role) for row in self.live.rows], np.int32)

    def is_held_as(self, other: "WorkerChunks") -> bool:
        """Whether the workers of the mesh rows hold what they do in another one, on the same rows."""
        return self.chunks == other.chunks and np.array_equal(self.holding_R, other.holding_R)

    @cached_property
    def peers_C(self) -> tuple[tuple[int, ...], ...]:
        """Mesh rows whose workers hold each chunk, ascending: peers, as to this chunk."""
        holds_RC = self.chunks.holds_HC[self.holding_R]
        return tuple(tuple(np.flatnonzero(holds_R).tolist()) for holds_R in holds_RC.T)

    @cached_property
    def rounds(self) -> Rounds:
        """The sums over the workers that hold the same chunk."""
        unequal = how_unequal(self.live.mesh.devices.flat[0].platform)
        return Rounds.of(self.peers_C, self.chunks.holds_HC, unequal)

    @property
    def sums_need_all(self) -> bool:
        """Whether all workers take part in a sum over some of them."""
        return self.ties_stages or any(peer_sum.is_tree for peer_sum in self.rounds.sums)

    @property
    def ties_stages(self) -> bool:
        """Whether the head reads the embedding, and they are in different chunks.

        Then every worker keeps an embedding that is up to date: its gradient is the sum over all workers.
        """
        return self.gpt.config.tied_embeddings and len(self.chunks.sizes) > 1

    def locations(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(lowest mesh row that has it, index in its stack) of each of the model's layers of a group, int64[L] each."""
        index_RL = self.model_index[name][self.holding_R]
        if name in EMBEDDING_AND_HEAD:
            chunk = 0 if name == "embedding" else len(self.chunks.sizes) - 1
            return np.array([self.peers_C[chunk][0]]), np.zeros(1, int)
        worker, layer = np.nonzero(index_RL >= 0)
        _, first = np.unique(index_RL[worker, layer], return_index=True)
        return worker[first], layer[first]
