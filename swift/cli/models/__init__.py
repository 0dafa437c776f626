"""Commands on models of runs and model directories: ``generate``, ``evaluate``, ``import``, ``export --format hf``."""

from swift.cli.models.evaluation import evaluate
from swift.cli.models.generation import generate
from swift.cli.models.hub import export_to_hub, import_model

__all__ = ["evaluate", "export_to_hub", "generate", "import_model"]
