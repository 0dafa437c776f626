"""Exports the model of a run or a model directory, in Hugging Face format or as plain arrays for one device."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from swift.checkpoint.manifest import committed_steps, step_named
from swift.checkpoint.reader import RestorePlan, plan_restore
from swift.checkpoint.units import by_name
from swift.config.experiment import Experiment
from swift.config.stored import copy_config
from swift.data.config import DataConfig
from swift.data.sources import TokenFile
from swift.data.tokenizer import TokenizerFile
from swift.errors import SettingError
from swift.experts.routers import TopK
from swift.files import check_room
from swift.hub.architectures import FAMILIES, Decoder, read_decoder, write_decoder
from swift.hub.companions import CONFIG, END, GENERATION, generation_of, special_tokens, write_tokenizer
from swift.hub.tensors import TensorLocation, tensor_locations, write_tensors
from swift.mesh.live import storage_mesh
from swift.models.gpt import GPT, Weights
from swift.train.interrupt import Interrupt
from swift.train.model_directory import check_new, new_model, pure, write_model
from swift.train.saved_state import load_state

_MOST_FILE_BYTES = 5 * 10**9


def export_hugging_face(
    experiment: Experiment,
    load: Callable[[], tuple[GPT, Weights]],
    out: Path,
    dtype: str | None,
    most: int = _MOST_FILE_BYTES,
) -> None:
    """Writes a model directory that ``transformers`` loads.

    Args:
        experiment: settings of the model.
        load: function that reads (architecture, parameters of the whole model). It is called only after checking that a
            supported architecture matches the model and that ``out`` can be created.
        out: directory to create.
        dtype: dtype of the tensors; None for the dtype of each parameter.
        most: maximum bytes per file of tensors, unless a single tensor is larger.

    Raises:
        SettingError: no supported architecture matches the model, or ``out`` cannot be created.
        RunError: the directory cannot be written; no files are left behind.
        KeyboardInterrupt: a signal arrived; no files are left behind.
    """
    check_new(out)
    decoder, tokenizer = decoder_of(experiment), experiment.data.tokenizer
    generation = _generation(experiment.data)
    gpt, weights = load()
    arrays = {name: np.asarray(leaf) for name, leaf in by_name(pure(weights)).items()}
    locations = list(tensor_locations(decoder.family, gpt))
    types = [np.dtype(dtype or arrays[location.parameter].dtype) for location in locations]
    sizes = [int(np.prod(location.shape)) * kind.itemsize for location, kind in zip(locations, types, strict=True)]
    config = write_decoder(decoder, str(Counter(types).most_common(1)[0][0]))
    config |= special_tokens(generation, decoder.vocab_size)
    with new_model(out) as (model_dir, interrupt):
        check_room(model_dir, sum(sizes))
        write_tensors(model_dir, _tensors(arrays, locations, types, interrupt), sizes, most)
        (model_dir / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        (model_dir / GENERATION).write_text(json.dumps(generation, indent=2) + "\n")
        if isinstance(tokenizer, TokenizerFile):
            write_tokenizer(tokenizer, model_dir)


def _generation(data: DataConfig) -> dict[str, Any]:
    """Returns the generation settings; without a tokenizer file, only the EOS token is known."""
    if isinstance(data.tokenizer, TokenizerFile):
        return generation_of(data.tokenizer)
    end = data.source.end_of_document if isinstance(data.source, TokenFile) else data.tokenizer.separator
    return {} if end is None else {END: end}


def decoder_of(experiment: Experiment) -> Decoder:
    """Finds the supported architecture whose computation equals that of an experiment's model.

    Raises:
        SettingError: no supported architecture matches.
    """
    model, experts, router = experiment.model, experiment.experts, experiment.experts.router
    if not isinstance(router, TopK) or replace(router, normalize_gates=None) != TopK():
        allowed = "no model on the hub has: only @TopK(), with no other settings than normalize_gates, can be written"
        raise SettingError("ExpertConfig.router", router, allowed)
    for family in FAMILIES.values():
        decoder = Decoder(
            family,
            replace(model, vocab_size=experiment.vocab_size),
            experts.num_classes,
            experts.top_k,
            router.normalizes(experts.top_k),
            experts.aux_loss_coefficient,
        )
        if _is_of_family(decoder):
            return decoder
    allowed = f"is not a model of {', '.join(FAMILIES)}, the only ones that can be written for the hub"
    raise SettingError("ModelConfig", repr(model), allowed)


def _is_of_family(decoder: Decoder) -> bool:
    """Whether a family's ``config.json`` can express all settings of a model, which is checked by a round trip."""
    try:
        again = read_decoder(write_decoder(decoder, "float32"), "")
    except SettingError:
        return False
    return _said(again) == _said(decoder)


def _said(decoder: Decoder) -> Any:
    """Normalizes a decoder for comparison, so that equivalent settings are equal and those without effect are reset."""
    model = decoder.model.explicit
    model = replace(model, moe_pattern=(True,) if all(model.moe_pattern) else model.moe_pattern)
    if all(model.moe_layers):
        model = replace(model, ffn_dim=model.expert_width)
    if model.rope_scaling == "none":
        model = replace(model, rope_factor=1.0)
    if model.rope_scaling != "yarn":
        model = replace(model, rope_length=1)
    return replace(decoder, model=model, aux_loss_coefficient=0.0)  # every value can be expressed, but is rounded


def _tensors(
    arrays: Mapping[str, np.ndarray],
    locations: Sequence[TensorLocation],
    types: Sequence[np.dtype],
    interrupt: Interrupt,
) -> Iterator[tuple[str, np.ndarray]]:
    for location, kind in zip(locations, types, strict=True):
        interrupt.check()
        yield location.name, np.ascontiguousarray(location.part_of(arrays[location.parameter]), dtype=kind)


def export_model(
    experiment: Experiment, run_dir: Path, out: Path, step: int | Literal["best"] | None = None
) -> RestorePlan:
    """Writes the master weights of a run's checkpoint as one plain array per parameter, such as ``head.0.out.kernel``.

    The run's configuration is copied as well.

    Args:
        experiment: settings of the run.
        run_dir: run directory.
        out: directory to create.
        step: iteration of the checkpoint, or ``best``; None for the newest intact one.

    Returns:
        The plan by which the weights were read; with partial checkpoints, some experts are from older iterations.

    Raises:
        SettingError: there is no such checkpoint, it is damaged, or ``out`` exists.
        RunError: the model cannot be written; no files are left behind.
    """
    check_new(out)
    plan = find_checkpoint(experiment, run_dir, step)
    gpt, weights = load_weights(experiment, run_dir, plan)
    with new_model(out) as (model_dir, _):
        write_model(model_dir, gpt, pure(weights), plan.step)
        copy_config(run_dir, model_dir)
    return plan


def find_checkpoint(experiment: Experiment, run_dir: Path, step: int | Literal["best"] | None) -> RestorePlan:
    """Finds and verifies the checkpoint to export.

    Args:
        experiment: settings of the run.
        run_dir: run directory.
        step: iteration of the checkpoint, or ``best`` for the lowest validation loss; None for the newest intact one.

    Raises:
        SettingError: there is no such checkpoint, or it is damaged.
    """
    steps, step = committed_steps(run_dir / "checkpoints"), step_named(run_dir / "checkpoints", step)
    if not steps:
        raise SettingError("RUN_DIR", str(run_dir), "holds no checkpoint to export")
    if step is not None and step not in steps:
        raise SettingError("--step", step, f"must be one of {', '.join(map(str, steps))}, which have a checkpoint")
    return plan_restore(run_dir / "checkpoints", experiment.identity(), step)


def load_weights(experiment: Experiment, run_dir: Path, plan: RestorePlan) -> tuple[GPT, Weights]:
    """Reads a checkpoint's master weights; returns (architecture, weights of whole experts, on the host)."""
    from swift.train.build import make_step_spec, on_storage_mesh  # imported on use, as only runs need it

    spec = make_step_spec(on_storage_mesh(experiment), storage_mesh(experiment.topology))
    state = load_state(run_dir / "checkpoints", plan, spec)
    return replace(spec.gpt, head_ranks=1, embedding_ranks=1), spec.gpt.unpack(
        spec.checkpoint_spec.gather_master_weights(state)
    )
