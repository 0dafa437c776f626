"""The backward pass split into input gradient B and weight gradient W.

``split`` traces a stage and its gradient as one jaxpr and turns it into three functions. ``partition`` assigns its
equations to F, B and W so that the fewest bytes are kept between them. ``equations`` inlines, selects, runs and counts
equations.
"""
