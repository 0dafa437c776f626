"""Reports on runs for people: a table, pictures, and one self-contained HTML page.

``page`` writes the HTML page of the parts that ``html_parts`` formats. ``figures`` and ``together`` decide what it
shows, ``sections`` draws it, ``chart_data`` hands the charts to the page's script, which is in ``assets``; ``compare``
makes the table, and ``seeds`` finds the runs that differ in their seed alone.
"""
