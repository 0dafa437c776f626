"""The settings of a run, and the files that they are read from.

``experiment`` has all settings, ``failures`` parses those of workers, ``checks`` refuses settings that exclude each
other, and ``cuts`` divides the model. ``gin_reader`` reads experiments: ``bindings`` parses gin files, and ``maker``
makes objects of them. ``stored`` is the configuration kept with a run or a model, which is read as data.
"""
