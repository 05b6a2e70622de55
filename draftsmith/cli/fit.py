"""Whether a whole run fits into this machine, told before its first stage: extraction and training may take days."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.cli.plan import config_of_target, drafter_on_meta
from draftsmith.config.recipe import Recipe
from draftsmith.engine import environment
from draftsmith.engine.fit import require_extraction, require_two_engines
from draftsmith.engine.memory import BYTES, engine_memory, weight_bytes
from draftsmith.engine.quantization import require_drafter_dtype, require_quantization
from draftsmith.engine.speculation import require_drafter_split
from draftsmith.engine.step_cost import target_sizes
from draftsmith.run import stage
from draftsmith.run.errors import UserError
from draftsmith.target.layer_ids import default_layer_ids
from draftsmith.target.prepare import prepare_target, read_config, target_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_run_fits(recipe: Recipe, run_dir: Path) -> None:
    """Compare what the engines of extraction and evaluation need with what this machine has.

    Only what is known before a download and without a drafter counts; the stages check again with the rest.

    Args:
        recipe: the whole recipe.
        run_dir: `RUNS/NAME`: its finished stages need nothing.

    Raises:
        UserError: a stage that is left does not fit, or the target cannot be read.
    """
    model = Path(recipe.target.model or "")
    local = prepare_target(recipe.target) if recipe.target.gguf is not None or model.is_absolute() else None
    try:
        config = read_config(recipe.target)
    except UserError:
        return  # extraction says what it misses
    extracted = stage.read(run_dir / "store") is not None
    evaluated = stage.read(run_dir / recipe.evaluate.output) is not None
    check_fits(recipe, config, local, extraction=not extracted, evaluation=not evaluated)


def check_fits(
    recipe: Recipe,
    config: PretrainedConfig,
    local: Path | None = None,
    *,
    extraction: bool = True,
    evaluation: bool = True,
) -> None:
    """The same for a target of which the config is known.

    Args:
        recipe: the whole recipe.
        config: of the target's language model.
        local: the target's directory; None if it is not on this machine.
        extraction: whether to check it.
        evaluation: likewise.

    Raises:
        UserError: one of them does not fit.
    """
    dtype, name = recipe.target.dtype, target_name(recipe.target)
    quantization = recipe.engine.options.get("quantization")

    def target_bytes(dtype: str) -> int:
        if local and (found := weight_bytes(local, dtype, quantization)):
            return found
        sizes = target_sizes(config, quantization=quantization, trust_remote_code=recipe.target.trust_remote_code)
        return sizes.weight_bytes(BYTES[dtype])

    layer_ids = recipe.extract.layer_ids or default_layer_ids(config.num_hidden_layers)
    if extraction and recipe.extract.backend == "vllm" and recipe.extract.machines is None:
        require_extraction(
            recipe.engine,
            recipe.extract,
            config,
            target=name,
            target_bytes=target_bytes(dtype),
            dtype=dtype,
            layers=len(layer_ids),
        )
    if not evaluation:
        return
    from draftsmith.serve.evaluation.configurations import timed_dtypes
    from draftsmith.serve.evaluation.lineup import place

    environment.require_parallelism(recipe.engine, config)
    drafter = drafter_on_meta(recipe, config, layer_ids)
    split = 1
    if not recipe.train.drafter.serving.whole_on_each_gpu:
        split = recipe.engine.tensor_parallel_size
        require_drafter_split(drafter.config, split, drafter="of `train.drafter`")
    parameters = sum(math.prod(shape) for shape in drafter.shapes(drafter.config).values())
    gpus = environment.gpus()
    for timed in dict.fromkeys([dtype, *timed_dtypes(recipe, config)]):
        require_quantization(recipe.engine, config, target=name, dtype=timed)
        if recipe.convert.quantize is not None:
            require_drafter_dtype(timed, drafter=f"with `convert.quantize: {recipe.convert.quantize}`")
        weights, trained = target_bytes(timed), BYTES[timed] * parameters
        if not gpus:
            require_two_engines(
                recipe.engine, config, target=name, target_bytes=weights, drafter_bytes=trained, dtype=timed
            )
            continue
        need = engine_memory(
            config,
            target_bytes=weights,
            drafter_bytes=trained,
            dtype=timed,
            tokens=recipe.engine.max_model_len,
            engine=recipe.engine,
            sequences=1,
            drafter_split=split,
        )
        place(recipe.engine, gpus, [need], target=name, smaller="evaluate.concurrency")


def misfit(recipe: Recipe) -> str | None:
    """For `--plan`: why the run's engines do not fit into this machine; None if they do, or if the plan is for other hardware."""
    assumed = recipe.plan
    assert assumed is not None
    try:
        if assumed.hardware is not None and (assumed.hardware.memory_gib is None) != environment.is_cpu():
            return None
        check_fits(recipe, config_of_target(recipe, assumed))
    except UserError as error:
        return str(error)
    return None
