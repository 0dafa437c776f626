"""Rows that workers hold, for tests of states that move between them."""

import jax


def rows_of(spec, state):
    """The bytes that each mesh row holds of a state, by array and position in the model; padding is left out."""
    found, host = [], jax.device_get(state)
    for row, holding in enumerate(spec.holding_R):
        mine = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(host):
            name = next((entry.key for entry in path if hasattr(entry, "key")), None)
            if path[0].name == "placement":
                name = "router"
            if not {"embedding": spec.chunks.holds_HC[holding, 0], "head": spec.chunks.holds_HC[holding, -1]}.get(
                name, True
            ):
                continue
            rows = spec.model_index[name][holding] if name else [0]
            values = leaf[row] if name else leaf[row][None]
            mine |= {(str(path), int(block)): values[at].tobytes() for at, block in enumerate(rows) if block >= 0}
        found.append(mine)
    return found
