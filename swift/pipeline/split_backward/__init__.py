"""The backward pass split into input gradient B and weight gradient W.

``split`` traces a stage and its gradient as one jaxpr and divides it into three functions: F, B and W. ``partition``
assigns the equations to them so that as few bytes as possible are kept in between. ``equations`` inlines, selects, runs
and counts equations.
"""
