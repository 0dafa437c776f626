"""Divides an experiment's model into stages or runs of layers, and into chunks that all pipelines share.

The cut follows the sizes that the user sets, or else estimated costs.
"""

from collections.abc import Sequence
from typing import Any

from swift.config.experiment import Experiment
from swift.errors import SettingError, renamed_settings
from swift.experts.config import ExpertConfig
from swift.models.config import ModelConfig
from swift.models.cuts import Chunks, Cut, make_cut
from swift.schedules.planners.names import shape_of
from swift.schedules.problem import Chunk, Costs, Problem, common_chunks, cut_by_costs


def model_cuts(experiment: Experiment) -> tuple[Cut, ...]:
    """Returns, for each pipeline, how the model is cut into stages, or into runs if stages hold several runs of layers.

    With ``Experiment.cut`` = None, the parts are of equal length if that makes them all alike; otherwise the cost of
    the most expensive part is minimized.

    Raises:
        SettingError: there are more parts than layers, a part has no layer, or the sizes do not add up.
    """
    shape = shape_of(experiment.planner, experiment.topology.num_stages)
    return _cuts(experiment, experiment.cut, len(shape))


def checkpoint_cut(experiment: Experiment) -> Cut:
    """Returns the layers of each stage in a checkpoint: the first pipeline's cut, unless stages hold several runs."""
    first, num_stages = model_cuts(experiment)[0], experiment.topology.num_stages
    return first if first.num_stages == num_stages else _cuts(experiment, None, num_stages)[0]


def model_chunks(experiment: Experiment) -> Chunks:
    """Returns the chunks of the model, common to all pipelines' cuts, and the workers that hold them."""
    every_cut, shape = model_cuts(experiment), shape_of(experiment.planner, experiment.topology.num_stages)
    sizes, parts = common_chunks([cut.sizes for cut in every_cut])
    return Chunks(
        every_cut[0].moe_layers,
        sizes,
        tuple(tuple(shape[part] for part in pipeline_parts) for pipeline_parts in parts),
    )


def planning_problem(experiment: Experiment, costs: Costs, chunk_costs: tuple[Chunk, ...] = ()) -> Problem:
    """Builds the planning problem of a window on all workers; without ``chunk_costs``, all chunks cost the same.

    Raises:
        SettingError: there is too little memory for a single micro-batch.
    """
    problem = Problem(
        experiment.topology,
        experiment.microbatches or experiment.num_microbatches,
        costs=costs,
        num_iterations=experiment.window,
        chunks=chunk_costs,
        stage_of_chunk=model_chunks(experiment).stage_DC,
    )
    with renamed_settings({"Problem.memory_limit": "Experiment.memory_limit"}):
        return problem.limited(experiment.memory_limit)


def cuts_text(cuts: Sequence[Cut], num_stages: int) -> str:
    """Describes the stages of all pipelines in a few words.

    >>> cuts_text([Cut((True,) * 4, (3, 1)), Cut((True,) * 4, (1, 3))], 2)
    '2 stages (3, 1; 1, 3 layers)'
    >>> cuts_text([Cut((True,) * 4, (1, 1, 1, 1))] * 2, 2)
    '2 stages of 2 runs (1, 1, 1, 1 layers)'
    """
    num_runs = cuts[0].num_stages // num_stages
    if len(set(cuts)) == 1 and num_runs == 1:
        return cuts[0].text
    sizes = "; ".join(", ".join(map(str, cut.sizes)) for cut in (cuts if len(set(cuts)) > 1 else cuts[:1]))
    return f"{num_stages} stages{f' of {num_runs} runs' if num_runs > 1 else ''} ({sizes} layers)"


def layers_of_stages(cuts: Sequence[Cut]) -> list[Any]:
    """Returns the number of layers in each stage or run, for JSON; one list per pipeline if their cuts differ."""
    return list(cuts[0].sizes) if len(set(cuts)) == 1 else [list(cut.sizes) for cut in cuts]


def layer_costs(model: ModelConfig, experts: ExpertConfig, vocab_size: int) -> tuple[list[float], float, float]:
    """Estimates the costs of a model's layers, in matmul FLOPs per token, forward and backward.

    Returns:
        (costs of each layer, cost of the embedding, cost of the head).
    """
    dim, width = model.model_dim, model.num_heads * model.channels
    # Projections for queries and outputs, then for keys and values; scores and weighted sums over all T positions.
    attention = 2 * dim * (2 * width + 2 * model.kv_heads * model.channels) + 4 * model.sequence_length * width
    network = 2 * dim * (3 if model.activation == "swiglu" else 2)  # FLOPs for each hidden channel of an FFN
    served = experts.top_k * (experts.capacity.factor or 1.0) + model.num_shared_experts
    mixture = network * model.expert_width * served + 2 * dim * experts.num_classes
    dense = network * model.ffn_dim
    # The embedding has one matmul, in its gradient; the head has one for its output and two for its gradients.
    vocabulary = 2.0 * dim * vocab_size
    # Times 3: each matmul of the forward pass requires two more in the backward pass.
    costs = [3.0 * (attention + (mixture if is_moe else dense)) for is_moe in model.moe_layers]
    return costs, vocabulary, 3 * vocabulary


def _cuts(experiment: Experiment, sizes: Any, num_parts: int) -> tuple[Cut, ...]:
    """Cuts the model into ``num_parts`` parts for each pipeline, by given sizes or, with None, by costs."""
    model, topology = experiment.model, experiment.topology
    num_pipelines, num_stages = topology.num_pipelines, topology.num_stages
    num_runs = num_parts // num_stages
    if isinstance(sizes, tuple | list) and any(isinstance(size, tuple | list) for size in sizes):
        if len(sizes) != num_pipelines:
            allowed = f"must have one list of numbers for each of Topology.num_pipelines = {num_pipelines}"
            raise SettingError("Experiment.cut", sizes, allowed)
        return tuple(
            make_cut(model.moe_layers, num_stages, () if row is None else row, f"Experiment.cut[{d}]", num_runs)
            for d, row in enumerate(sizes)
        )
    if sizes is None and num_parts < model.num_layers and not _are_alike(model, num_parts):
        costs, first, last = layer_costs(model, experiment.experts, experiment.vocab_size)
        sizes = cut_by_costs(costs, num_parts, first, last)
    return (make_cut(model.moe_layers, num_stages, sizes, "Experiment.cut", num_runs),) * num_pipelines


def _are_alike(model: ModelConfig, num_parts: int) -> bool:
    if model.num_layers % num_parts:
        return False
    return make_cut(model.moe_layers, num_parts, None, "Experiment.cut").is_uniform
