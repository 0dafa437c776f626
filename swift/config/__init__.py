"""The settings of a run, and the files that they are read from.

``experiment`` has all settings and what follows from them, with ``checks`` for those that exclude each other and
``layouts`` for layouts and cuts that follow from several. ``gin_reader`` reads gin files, ``mistakes`` turns gin's
errors into the user's, and ``stored`` is the configuration kept with a run or a model, which is data.
"""
