"""Input pipelines on several machines: processes that make samples for another one, and the connections to them.

Both sides prove that they have the same key, and compare versions, data and operators. What is sent are numbers and
samples, never a program. As between the nodes of a run, messages are neither signed nor encrypted afterwards.
"""
