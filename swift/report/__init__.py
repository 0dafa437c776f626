"""Reports on runs for people: a table, pictures, and one self-contained HTML page.

``page`` writes the HTML page, whose script and styles are in ``assets``, of the ``parts`` that ``figures`` lists.
``sections`` makes those on one run from its ``history``; ``compare`` makes the table and the charts of several runs,
and groups those that differ in their seed alone. ``swift.draw`` draws the charts.
"""
