"""The work of a stage on one rank: a block as a function, the loop over blocks, F, B and W, and the ops on buffers."""
