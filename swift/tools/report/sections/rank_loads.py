"""Picture of the loads of expert ranks under several placements or splits, a panel for each layer."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
from jaxtyping import Float

from swift.tools.figure_file import figure_file
from swift.tools.palette import INK, POLICY_COLORS
from swift.tools.report.sections.axes import new_figure, put_legend, put_title

_MOST_LAYERS = 24


def rank_loads_file(loads: Mapping[str, Float[np.ndarray, "L N"]], suffix: Literal["svg", "png"] = "svg") -> bytes:
    """Draws the loads of the ranks over their mean, the fullest first, as the content of a file.

    Args:
        loads: loads of the ranks by name: of a policy, or of a split.
        suffix: format of the file.
    """
    num_layers = min(len(next(iter(loads.values()))), _MOST_LAYERS)
    colors = {name: POLICY_COLORS.get(name, INK) for name in loads}
    figure, panels = new_figure(height=0.9 + 1.7 * num_layers, num_rows=num_layers)
    for layer, axes in enumerate(panels):
        for name, load_LN in loads.items():
            load_N = np.sort(load_LN[layer])[::-1]
            edges = np.arange(load_N.size + 1)
            axes.stairs(load_N / (load_N.mean() or 1), edges, baseline=None, color=colors[name], linewidth=1.8)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("load / mean")
        put_title(axes, f"layer {layer}")
    panels[-1].set_xlabel("ranks, the fullest first")
    put_legend(figure, list(colors.items()))
    return figure_file(figure, suffix)
