"""The cut of a model into stages where the user gives none: by what its layers cost."""

from collections.abc import Sequence

from swift.experts import ExpertConfig
from swift.models import Cut, ModelConfig, make_cut
from swift.schedules import cut_by_costs


def cut_model(
    model: ModelConfig, experts: ExpertConfig, vocab_size: int, num_stages: int, sizes: Sequence[int] | None
) -> Cut:
    """Cuts a model into stages.

    Args:
        model: shape of the model.
        experts: settings of its expert layers.
        vocab_size: size of the vocabulary.
        num_stages: number of stages.
        sizes: layers of each stage; None: equally many where that makes all stages alike, else so that the longest
            stage is as short as it can be.

    Raises:
        SettingError: there are more stages than layers, a stage without a layer, or the sizes do not add up.
    """
    if sizes is None and num_stages < model.num_layers and not _are_alike(model, num_stages):
        costs, first, last = layer_costs(model, experts, vocab_size)
        sizes = cut_by_costs(costs, num_stages, first, last)
    return make_cut(model.moe_layers, num_stages, sizes, "Experiment.cut")


def layer_costs(model: ModelConfig, experts: ExpertConfig, vocab_size: int) -> tuple[list[float], float, float]:
    """Estimates what the parts of a model cost, in FLOPs of matmuls per token, forward and backward.

    Returns:
        (each layer, the embedding, the head).
    """
    dim, width = model.model_dim, model.num_heads * model.channels
    attention = 2 * dim * (2 * width + 2 * model.kv_heads * model.channels) + 4 * model.sequence_length * width
    network = 2 * dim * (3 if model.activation == "swiglu" else 2)  # for each of its hidden channels
    served = experts.top_k * (experts.capacity_factor or 1.0) + model.num_shared_experts
    mixture = network * model.expert_width * served + 2 * dim * experts.num_classes
    dense = network * model.ffn_dim
    # The gradient of the embedding is one matmul; the head has one for its output and two for its gradients.
    vocabulary = 2.0 * dim * vocab_size
    costs = [3.0 * (attention + (mixture if is_moe else dense)) for is_moe in model.moe_layers]
    return costs, vocabulary, 3 * vocabulary


def _are_alike(model: ModelConfig, num_stages: int) -> bool:
    if model.num_layers % num_stages:
        return False
    return make_cut(model.moe_layers, num_stages, None, "Experiment.cut").is_uniform
