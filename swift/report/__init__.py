"""Reports on runs for people: a table, pictures, and one self-contained HTML page.

``page`` writes the HTML page from the ``parts`` that ``figures`` lists; its script and styles are in ``assets``.
``sections`` describes one run, from its ``history``. ``compare`` makes the table and the charts of several runs, and
groups runs that differ only in their seed. ``swift.draw`` draws the charts.
"""
