"""Input pipelines: how one is planned by its profile, and how samples are made on several machines.

``optimizer`` plans, by what ``profile`` measures; ``server`` makes samples for another machine, ``client`` asks it.
Both sides prove that they have the same key, and compare versions, data and operators. What is sent are numbers and
samples, never a program. As between the nodes of a run, messages are neither signed nor encrypted afterwards.
"""
