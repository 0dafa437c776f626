"""Sections of a report and their pictures: curves, timelines, plans, checkpoint coverage, simulations, ranks.

Each function ``*_section(run, history, prefix)`` makes the section on one run, with ``history_of(run)`` and a prefix
for the names of its pictures. It raises SettingError if the record is damaged.
"""

from swift.tools.report.sections.axes import draw_bars, new_figure
from swift.tools.report.sections.coverage import coverage_section
from swift.tools.report.sections.curves import Band, Chart, Curve, draw_curves
from swift.tools.report.sections.evaluations import answers_section, answers_together
from swift.tools.report.sections.layers import LayerMaps, draw_drops, draw_layer, layer_maps
from swift.tools.report.sections.parts import Picture, Section, Table, seconds_text
from swift.tools.report.sections.plans import plans_section
from swift.tools.report.sections.rank_loads import rank_loads_file
from swift.tools.report.sections.series import (
    ClassSeries,
    bins_of,
    class_series,
    mean_and_range,
    points_of_a_line,
    shares,
)
from swift.tools.report.sections.simulation import simulation_file
from swift.tools.report.sections.timeline import timeline_section

__all__ = [
    "Band",
    "Chart",
    "ClassSeries",
    "Curve",
    "LayerMaps",
    "Picture",
    "Section",
    "Table",
    "answers_section",
    "answers_together",
    "bins_of",
    "class_series",
    "coverage_section",
    "draw_bars",
    "draw_curves",
    "draw_drops",
    "draw_layer",
    "layer_maps",
    "mean_and_range",
    "new_figure",
    "plans_section",
    "points_of_a_line",
    "rank_loads_file",
    "seconds_text",
    "shares",
    "simulation_file",
    "timeline_section",
]
