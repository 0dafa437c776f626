"""Reports on runs for people: a table, pictures, and one self-contained HTML page.

``page`` writes the HTML page of the parts that ``page`` formats. ``figures`` and ``compare`` decide what it
shows, ``swift.draw`` draws it, ``page`` hands the charts to the page's script, which is in ``assets``; ``compare``
makes the table, and ``compare`` finds the runs that differ in their seed alone.
"""
