"""Layers that a checkpoint holds, for tests of runs that other cuts of the same layers continue."""

import jax

from swift.checkpoint.reader import plan_restore
from swift.mesh.live import storage_mesh
from swift.train.build import make_step_spec
from swift.train.saved_state import load_state


def layers(experiment, directory, step):
    """(master weights, moments, experts in the slots) of every layer in the model's order, by group."""
    spec, checkpoints = (
        make_step_spec(experiment, storage_mesh(experiment.topology)).checkpoint_spec,
        directory / "checkpoints",
    )
    state = load_state(checkpoints, plan_restore(checkpoints, experiment.identity(), step), spec)
    moments = jax.tree.leaves(state.moments, is_leaf=lambda part: isinstance(part, dict))

    def in_order(name, slices):
        rows = spec.model_index[name]
        if name in ("embedding", "head"):
            return slices[0 if name == "embedding" else -1]
        assert not slices[rows < 0].any()
        return slices[rows >= 0]

    trees = [tree for tree in (state.master, *moments) if isinstance(tree, dict)]
    placement = state.placement[spec.model_index["router"] >= 0]
    return [{name: in_order(name, slices) for name, slices in tree.items()} for tree in trees], placement
