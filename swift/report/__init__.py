"""Reports on runs for users: a table, pictures, and one self-contained HTML page.

``page`` writes the HTML page from the sections that ``figures`` builds; its script and styles are in ``assets``.
``parts`` defines sections, pictures and tables. ``sections`` describes one run, from its ``history``. ``compare``
creates the table and the charts of several runs, and groups runs that differ only in their seed. ``swift.draw`` draws
the charts.
"""
