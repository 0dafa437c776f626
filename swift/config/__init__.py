"""The settings of a run, and the files that they are read from.

``experiment`` has all settings, and builds the loader, mesh, step and engine from them. ``checks`` refuses settings
that exclude each other. ``layouts`` and ``cuts`` choose weight layouts, the attention kernel, and the layers of each
stage. ``gin_reader`` reads gin files, and ``mistakes`` translates gin's errors for users. ``stored`` is the
configuration kept with a run or a model: it is read as data, and never executed.
"""
