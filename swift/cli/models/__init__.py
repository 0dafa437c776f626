"""Commands on the models of runs and of model directories: ``evaluate``, ``import`` and ``export --format hf``."""

from swift.cli.models.evaluation import evaluate
from swift.cli.models.hub import export_to_hub, import_model

__all__ = ["evaluate", "export_to_hub", "import_model"]
