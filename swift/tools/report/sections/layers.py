"""Pictures of the expert layers of a run: dropped tokens, and heat maps of popularity and replicas.

Shape suffixes: T steps, B bins of steps, L MoE layers, E experts.
"""

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from swift.runlog.analysis.measures import ratio
from swift.tools.palette import EXPERT_COLORS, INK, LAYER_COLORS
from swift.tools.report.sections.axes import FONT_SIZE, new_figure, put_legend, put_title
from swift.tools.report.sections.series import shares, smooth, thin

MAX_LAYER_LABELS = 8


@dataclass(frozen=True)
class LayerMaps:
    """Data of the two heat maps of a layer.

    Attributes:
        first_step, last_step: steps at the edges.
        num_bins: bins of steps that are drawn.
        num_merged: drawn bins of each bin of the arrays; the last one may have fewer.
        tokens_BE, replicas_BE: share of the layer's tokens and replicas by bin of steps and expert, in percent.
    """

    first_step: int
    last_step: int
    num_bins: int
    num_merged: int
    tokens_BE: np.ndarray
    replicas_BE: np.ndarray


def layer_maps(steps_T: np.ndarray, popularity_BE: np.ndarray, replicas_BE: np.ndarray, num_merged: int) -> LayerMaps:
    """Computes what the heat maps of a layer show, with some bins merged."""
    starts = np.arange(0, len(popularity_BE), num_merged)
    tokens_BE, held_BE = (100 * shares(np.add.reduceat(one_BE, starts)) for one_BE in (popularity_BE, replicas_BE))
    return LayerMaps(int(steps_T[0]), int(steps_T[-1]), len(popularity_BE), num_merged, tokens_BE, held_BE)


def draw_drops(steps_T: np.ndarray, dropped_TL: np.ndarray, routed_TL: np.ndarray) -> Figure:
    """Draws the smoothed share of tokens that each MoE layer drops; deeper layers are greener."""
    num_layers = routed_TL.shape[1]
    drops_TL = 100 * ratio(dropped_TL, routed_TL)
    colors = layer_colors(num_layers)
    figure, (axes,) = new_figure(height=3.0)
    for layer, color in enumerate(colors):
        smooth_T = smooth(drops_TL[:, layer])
        points = thin(smooth_T)
        marker = "o" if len(points) == 1 else None
        axes.plot(steps_T[points], smooth_T[points], color=color, linewidth=1.6, marker=marker)
    axes.set_ylim(0.0, max(1.0, axes.get_ylim()[1]))
    axes.set_ylabel("tokens dropped (%)")
    axes.set_xlabel("step")
    shown = sorted(set(np.linspace(0, num_layers - 1, min(num_layers, MAX_LAYER_LABELS)).astype(int).tolist()))
    put_legend(figure, [(f"layer {layer}", colors[layer]) for layer in shown])
    return figure


def layer_colors(num_layers: int) -> list[str]:
    """Chooses the colours of layers: steps from the first of ``LAYER_COLORS`` to the last."""
    scale = LinearSegmentedColormap.from_list("layers", LAYER_COLORS)
    return [to_hex(scale(layer / max(1, num_layers - 1))) for layer in range(num_layers)]


def draw_layer(layer: int, steps_T: np.ndarray, popularity_BE: np.ndarray, replicas_BE: np.ndarray) -> Figure:
    """Draws how the replicas of one MoE layer follow the popularity of its experts.

    Above, the experts whose share of tokens varies most, as lines: tokens thin, replicas thick. Below, all experts:
    a heat map of shares of tokens, and one of shares of replicas in the same colours.
    """
    tokens_BE, replicas_BE = (100 * shares(counts_BE) for counts_BE in (popularity_BE, replicas_BE))
    figure, (lines, *maps) = new_figure(height=6.6, num_rows=3)
    put_title(lines, f"layer {layer}, what varies most: tokens thin, replicas thick")
    _draw_classes(lines, np.linspace(steps_T[0], steps_T[-1], len(tokens_BE)), tokens_BE, replicas_BE)
    classes = _varying_classes(tokens_BE)
    put_legend(figure, [(f"expert {expert}", color) for expert, color in zip(classes, EXPERT_COLORS, strict=False)])
    largest = max(np.nanmax(both_BE, initial=1.0) for both_BE in (tokens_BE, replicas_BE))
    # Most experts have a small share; the square root spreads small shares over the colours.
    norm = PowerNorm(0.5, vmin=0.0, vmax=largest)
    extent = (steps_T[0] - 0.5, steps_T[-1] + 0.5, tokens_BE.shape[1] - 0.5, -0.5)
    for axes, shares_BE, title in zip(maps, (tokens_BE, replicas_BE), ("tokens", "replicas"), strict=True):
        image = axes.imshow(shares_BE.T, aspect="auto", norm=norm, interpolation="nearest", extent=extent)
        put_title(axes, f"layer {layer}, all experts: share of {title}")
        axes.set_ylabel("expert")
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        axes.grid(visible=False)
    maps[-1].set_xlabel("step")
    bar = figure.colorbar(image, ax=maps, pad=0.02, aspect=30)
    bar.set_label("share in the layer (%)", fontsize=FONT_SIZE, color=INK)
    bar.ax.tick_params(colors=INK, labelsize=FONT_SIZE - 1)
    return figure


def _draw_classes(axes: Axes, steps_B: np.ndarray, tokens_BE: np.ndarray, replicas_BE: np.ndarray) -> None:
    for expert, color in zip(_varying_classes(tokens_BE), EXPERT_COLORS, strict=False):
        markers = ("o", "s") if len(steps_B) == 1 else (None, None)
        axes.plot(steps_B, tokens_BE[:, expert], color=color, linewidth=0.8, alpha=0.6, marker=markers[0])
        axes.plot(steps_B, replicas_BE[:, expert], color=color, linewidth=2.0, drawstyle="steps-mid", marker=markers[1])
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("share (%)")


def _varying_classes(tokens_BE: np.ndarray) -> list[int]:
    """Selects the experts with the widest range of shares, as many as there are colours, in order."""
    range_E = np.nanmax(tokens_BE, axis=0, initial=0.0) - np.nanmin(tokens_BE, axis=0, initial=100.0)
    return sorted(np.argsort(-range_E, kind="stable")[: len(EXPERT_COLORS)].tolist())
