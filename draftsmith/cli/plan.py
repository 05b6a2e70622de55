"""`draftsmith run --plan`: estimate the cost of a run from the target's config and the recipe, without loading a model.

Units: FLOP (floating-point operations, two per weight and token of a matrix product), bytes, seconds. Rates are those of
`plan.hardware` times the share of them that the work is assumed to reach. Mean lengths stand for distributions, so hours are
orders of magnitude; docs/log.md compares them with measurements.

Not counted: downloads, predicting acceptance length between epochs, attention inside the drafter, and stores of other runs
(`train.extra_stores`) that are not there yet.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.cli.plan_engines import plan_evaluate, plan_extract
from draftsmith.cli.plan_stage import planned_prompts
from draftsmith.cli.plan_training import plan_convert, plan_train
from draftsmith.config.hardware import Assumptions
from draftsmith.config.recipe import Recipe
from draftsmith.drafters import drafter_class, layer_ids_to_read
from draftsmith.drafters.base import Drafter
from draftsmith.engine.environment import require_divided_heads, states_arguments
from draftsmith.engine.options import check_options
from draftsmith.engine.step_cost import target_sizes
from draftsmith.run.atomic_io import read_json
from draftsmith.run.errors import UserError
from draftsmith.target.downloads import fetch
from draftsmith.target.family import size_of
from draftsmith.target.info import TargetInfo
from draftsmith.target.layer_ids import check_layer_ids, default_layer_ids
from draftsmith.target.prepare import read_config, target_name
from draftsmith.target.pretrained import language_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def make_plan(recipe: Recipe) -> dict[str, Any]:
    """Estimate every stage.

    Returns:
        JSON values: `run`, `stages` (a `StagePlan` by name), `total_hours`, `target`, `assumptions`.

    Raises:
        UserError: the recipe lacks assumptions or contradicts them, the target's config cannot be read, or vLLM has not the engine options,
            cannot divide the target as asked, or hands out no states.
    """
    assumed = recipe.plan
    if assumed is None:
        raise UserError(
            "A plan needs the mean lengths of texts: add `plan: { prompt_tokens: 100, response_tokens: 200 }` with your own to the "
            "recipe, and `plan.hardware` for hours. Most recipes that come with Draftsmith have both."
        )
    check_options(recipe.engine)
    check_lengths(recipe, assumed)
    config = config_of_target(recipe, assumed)
    require_divided_heads(recipe.engine.tensor_parallel_size, config)
    if recipe.extract.backend == "vllm":
        states_arguments(config, recipe.engine.options)  # raises where vLLM hands out no states
    sizes = target_sizes(
        config,
        quantization=recipe.engine.options.get("quantization"),
        trust_remote_code=recipe.target.trust_remote_code,
    )
    layer_ids = recipe.extract.layer_ids or default_layer_ids(config.num_hidden_layers)
    check_layer_ids(layer_ids, config.num_hidden_layers)
    drafter = drafter_on_meta(recipe, config, layer_ids)
    stages = {
        "extract": plan_extract(recipe, assumed, sizes, layer_ids, config),
        "train": plan_train(recipe, assumed, drafter, layers=len(layer_ids)),
        "convert": plan_convert(recipe, drafter),
        "evaluate": plan_evaluate(recipe, assumed, sizes, drafter, config),
    }
    hours = [stage.hours for stage in stages.values()]
    return {
        "run": recipe.name,
        "stages": {name: asdict(stage) for name, stage in stages.items()},
        "total_hours": None if assumed.hardware is None else sum(hour for hour in hours if hour is not None),
        "target": {"name": target_name(recipe.target), "parameters": sizes.parameters},
        "assumptions": assumed.model_dump(mode="json") | {"conversations": planned_prompts(recipe, assumed)},
    }


def check_lengths(recipe: Recipe, assumed: Assumptions) -> None:
    """
    Raises:
        UserError: conversations with the mean lengths are none that extraction would make, or it would leave them out.
    """
    options, room = recipe.extract, recipe.engine.max_model_len
    prompt, response, key = assumed.prompt_tokens, assumed.response_tokens, "plan.response_tokens"
    if options.mode == "generate" and options.turns == "first":
        if response > options.max_tokens:
            raise UserError(
                f"`plan.response_tokens: {response:g}` is more than `extract.max_tokens: {options.max_tokens}`, the longest response. Lower "
                "the first, or raise the second."
            )
        response, key = options.max_tokens, "extract.max_tokens"  # a prompt is used if it leaves room for the longest
    if prompt + response > room:
        raise UserError(
            f"`plan.prompt_tokens: {prompt:g}` and `{key}: {response:g}` are together more than `engine.max_model_len: {room}`: extraction "
            "would leave such prompts out. Raise engine.max_model_len, or lower the others."
        )


def config_of_target(recipe: Recipe, assumed: Assumptions) -> PretrainedConfig:
    """`plan.target_config`, which needs no network, or the target's own config."""
    if assumed.target_config is None:
        return read_config(recipe.target)
    from transformers import AutoConfig

    path = fetch(assumed.target_config)
    try:
        fields = read_json(path)
        config: PretrainedConfig = AutoConfig.for_model(fields.pop("model_type"), **fields)
    except Exception as error:  # what a wrong value breaks depends on the config's class
        raise UserError(
            f"`plan.target_config`: {path} is not the config.json of a model: {str(error).rstrip('.')}."
        ) from None
    config = language_config(config)
    config.name_or_path = target_name(recipe.target)  # for messages
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        size_of(config, name)  # raises where it is none
    return config


def drafter_on_meta(recipe: Recipe, config: PretrainedConfig, layer_ids: tuple[int, ...]) -> Drafter:
    """The recipe's drafter on torch's meta device, without memory for its tensors."""
    options = recipe.train.drafter
    kind = drafter_class(options.kind)
    vocabulary, last = config.vocab_size, config.num_hidden_layers
    target = TargetInfo(
        path=Path(),
        name="",
        revision="",
        config_hash="",
        tokenizer_hash="",
        chat_template_hash=None,
        num_hidden_layers=last,
        hidden_size=config.hidden_size,
        vocab_size=vocabulary,
        config=config,
    )
    draft_vocabulary = min(options.draft_vocab_size or vocabulary, vocabulary)
    reads = layer_ids_to_read(options, target, layer_ids, where="this recipe's store")
    return kind.on_meta(kind.make_config(options, target, reads, draft_vocabulary))
