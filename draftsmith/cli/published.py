"""Published drafters in a recipe's methods: converted for vLLM once, into the cache, unless vLLM serves them as they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.config.loading import digest
from draftsmith.config.methods import Method, NoSpeculation, TrainedDrafter
from draftsmith.config.recipe import Recipe
from draftsmith.run.errors import UserError

if TYPE_CHECKING:
    from draftsmith.convert.convert import Found
    from draftsmith.target.info import TargetInfo

_VERSION = 3
"""Counted up when conversions change, so that copies of before are made anew."""


def for_serving(recipe: Recipe) -> Recipe:
    """The recipe with a converted copy in the place of the drafter of `serve.method`, if that is in another format than vLLM's; of the first of
    `evaluate.methods`, if that is served for want of both (`speculator.py`).

    A copy is verified as by `draftsmith convert --verify`, and kept under the digest of what it was made from.

    Raises:
        UserError: the drafter cannot be downloaded, its format cannot be converted, or vLLM would compute something else.
        DraftsmithError: the copy computes something else than its source.
    """
    if recipe.serve.method is not None:
        method = _loadable(recipe.serve.method, recipe)
        return recipe.model_copy(update={"serve": recipe.serve.model_copy(update={"method": method})})
    return _with_first_method(recipe) if recipe.extract.prompts is None else recipe


def for_evaluation(recipe: Recipe) -> Recipe:
    """The same for all drafters of `evaluate.methods`, and for that of `serve.method` if it is measured in the place of the run's own."""
    return _with_methods(for_tuning(recipe), list(recipe.evaluate.methods))


def for_tuning(recipe: Recipe) -> Recipe:
    """The same for what `tune` measures: a run's own drafter, or what is served in the place of it."""
    if recipe.extract.prompts is not None:
        return recipe
    return _with_first_method(recipe) if isinstance(recipe.serve.method, NoSpeculation) else for_serving(recipe)


def _with_first_method(recipe: Recipe) -> Recipe:
    return _with_methods(recipe, list(recipe.evaluate.methods)[:1])


def _with_methods(recipe: Recipe, names: list[str]) -> Recipe:
    loadable = {name: _loadable(recipe.evaluate.methods[name], recipe) for name in names}
    methods = recipe.evaluate.methods | loadable
    return recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"methods": methods})})


def _loadable(method: Method, recipe: Recipe) -> Method:
    """The method with a drafter that vLLM loads."""
    if not isinstance(method, TrainedDrafter) or method.model is None:
        return method
    from draftsmith.convert.convert import convert_checkpoint, recognize
    from draftsmith.run import stage
    from draftsmith.target.downloads import cache_dir
    from draftsmith.target.hub import is_snapshot, local_directory
    from draftsmith.target.info import describe_target
    from draftsmith.target.prepare import prepare_target

    source = local_directory(method.model, revision=method.revision)
    try:
        found = recognize(source)
    except UserError:
        return method  # of a kind that only vLLM knows, or no drafter: serving says which
    if _is_loaded_by_vllm(source, found):
        _check_config(source, found)
        return method
    target = describe_target(prepare_target(recipe.target), recipe.target)
    named = source.parent.parent if is_snapshot(source) else source.resolve()
    label = named.name.removeprefix("models--")  # as the Hub's cache names a repository
    place = cache_dir() / "drafters" / f"{label}-{_digest(source, target)[:16]}"
    if stage.read(place) is None:
        try:
            convert_checkpoint(source, place, to="vllm", target=target, verify=True)
        except (OSError, UserError):
            if stage.read(place) is None:  # otherwise another process was faster, with the same result
                raise
    return method.model_copy(update={"model": str(place), "revision": None})


def _is_loaded_by_vllm(source: Path, found: Found) -> bool:
    """Whether vLLM serves a drafter in this format here as it is, and rightly."""
    from draftsmith.convert.formats import FORMATS
    from draftsmith.engine import environment
    from draftsmith.run.atomic_io import read_json

    name = found.format
    if name not in FORMATS or not FORMATS[name].complete_for_vllm(read_json(source / "config.json"), found.kind):
        return False
    if not _has_offsets(source):
        return False
    if name == "vllm":
        return True  # or serving says what is missing
    where = FORMATS[name].loaded_by_vllm
    one_file = (source / "model.safetensors").is_file()  # serving takes no other
    return one_file and (where == "everywhere" or (where == "on GPUs" and not environment.is_cpu()))


def _has_offsets(source: Path) -> bool:
    """Whether the draft vocabulary is stored as vLLM reads it, if it is stored: some trainers write ids in the place of offsets."""
    from draftsmith.convert.vocabulary import reads_as_offsets
    from draftsmith.run.atomic_io import read_json
    from draftsmith.run.weights import open_weights

    weights, vocabulary = open_weights(source), read_json(source / "config.json").get("vocab_size")
    if "d2t" not in weights or not isinstance(vocabulary, int):
        return True
    mask = weights["t2d"].tensor() if "t2d" in weights else None
    return reads_as_offsets(weights["d2t"].tensor().flatten(), mask, vocabulary=vocabulary)


def _check_config(source: Path, found: Found) -> None:
    """Raises UserError: vLLM would load this drafter, and compute something else, without a word."""
    from draftsmith.convert.formats import FORMATS
    from draftsmith.drafters.layout import Source
    from draftsmith.run.atomic_io import read_json

    config = Source(read_json(source / "config.json"), {})
    for reason in FORMATS[found.format].misread_by_vllm:
        if (why := reason(config)) is not None:
            raise UserError(f"{source}, read as {found.format} ({found.kind}): It cannot be served: {why}.")


def _digest(source: Path, target: TargetInfo) -> str:
    from draftsmith.engine.speculation import content_of

    return digest([_VERSION, content_of(source), target.config_hash, target.revision])
