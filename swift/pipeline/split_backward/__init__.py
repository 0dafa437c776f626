"""A stage taken apart into forward, input gradient and weight gradient."""
