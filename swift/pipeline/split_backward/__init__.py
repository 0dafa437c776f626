"""The backward pass split into input gradient B and weight gradient W.

A stage's jaxpr, which equations belong to F, B and W, and the smallest set of values to keep between them.
"""
