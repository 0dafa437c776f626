"""What a run did, for people: a table, pictures, and one self-contained HTML page.

Training imports this package, which therefore imports nothing of training but its types.
"""

from swift.report.compare import comparison_rows, comparison_table, run_labels
from swift.report.figures import Picture, draw_pictures, save_figures
from swift.report.page import write_report

__all__ = [
    "Picture",
    "comparison_rows",
    "comparison_table",
    "draw_pictures",
    "run_labels",
    "save_figures",
    "write_report",
]
