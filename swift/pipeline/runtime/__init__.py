"""The step functions of a pipeline and all they are made of."""
