"""Commands on models of runs and model directories: ``generate``, ``evaluate``, ``import``, ``export --format hf``."""
