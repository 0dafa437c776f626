"""Reports on runs for people: a table, pictures, and one self-contained HTML page.

``page`` writes the HTML page of the parts that ``html_parts`` formats. ``figures`` and ``together`` decide what it
shows, ``sections`` draws it, ``chart_data`` hands the charts to the page's script, which is in ``assets``; ``compare``
makes the table, and ``seeds`` finds the runs that differ in their seed alone.
"""

from swift.tools.report.compare import comparison_rows, comparison_table, run_labels
from swift.tools.report.figures import save_figures, sections_of, sections_of_all
from swift.tools.report.page import write_report
from swift.tools.report.sections import Table, mean_and_range

__all__ = [
    "Table",
    "comparison_rows",
    "comparison_table",
    "mean_and_range",
    "run_labels",
    "save_figures",
    "sections_of",
    "sections_of_all",
    "write_report",
]
