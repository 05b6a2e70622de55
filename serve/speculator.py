"""What a run speculates with: its own drafter, or, in a recipe that trains none, a method that needs none of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.config.loading import digest
from draftsmith.config.methods import DraftModel, Method, NoSpeculation, Suffix, TrainedDrafter
from draftsmith.config.recipe import Recipe
from draftsmith.drafters.checkpoint import checkpoint_sha256
from draftsmith.engine.speculation import (
    drafter_name,
    drafter_sha256,
    longest_draft,
    method_config,
    model_content,
    own_drafter,
)
from draftsmith.run import stage
from draftsmith.run.errors import UserError
from draftsmith.target.hub import local_directory
from draftsmith.target.info import TargetInfo

_USUAL_K = 5  # the most draft tokens that are tried, unless `tune.k` says others
Ranges = tuple[tuple[int, int, int], ...]
"""From, to, K, as vLLM's `num_speculative_tokens_per_batch_size`."""


def is_trained_since(run_dir: Path) -> bool:
    """Whether the run was trained again after its drafter was made (`draftsmith convert`)."""
    converted, trained = stage.read(run_dir / "vllm"), stage.read(run_dir / "checkpoint")
    made_from = converted["figures"].get("checkpoint_sha256") if converted else None
    return bool(made_from and trained and made_from != checkpoint_sha256(run_dir / "checkpoint"))


@dataclass(frozen=True)
class Speculator:
    """What is measured at every K, and tuned."""

    method: Method
    """Without a number of tokens that varies with the load: that is for tuning to find."""
    drafter_dir: Path
    """The run's drafter, whether there is one or not."""
    name: str
    """For people."""
    sha256: Mapping[str, str]
    """SHA-256 of the own drafter's files by name; if it is not the run's own, of the method's options and its model's files."""
    listed_as: str | None = None
    """Its name in `evaluate.methods`, if it comes from there."""

    @property
    def own(self) -> bool:
        """Whether it is the run's own drafter."""
        return isinstance(self.method, TrainedDrafter) and self.method.model is None

    def config(
        self, target: TargetInfo, tensor_parallel_size: int, *, k: int | None = None, ranges: Ranges | None = None
    ) -> dict[str, Any] | None:
        """vLLM's `speculative_config` with K tokens, or with K by load.

        Raises:
            UserError: it cannot serve this target, or draft so many tokens.
        """
        changes: dict[str, Any] = {"num_speculative_tokens_per_batch_size": ranges}
        if k is not None:
            changes["num_speculative_tokens"] = k
        return method_config(
            self.method.model_copy(update=changes),
            target,
            own_drafter=self.drafter_dir,
            tensor_parallel_size=tensor_parallel_size,
        )

    def longest_draft(self) -> int | None:
        """The most tokens that it was trained to draft; None for any number."""
        if not isinstance(self.method, TrainedDrafter):
            return None
        return longest_draft(
            self.drafter_dir if self.own else local_directory(str(self.method.model), revision=self.method.revision)
        )

    def measured(self, recipe: Recipe) -> Recipe:
        """The recipe for measuring it, with `tune.k`: a method that takes the place of a drafter is not measured once more beside itself, and at its own
        number of tokens unless `evaluate.k` and `tune.k` say others; suffix decoding, whose drafts have any length up to that, at no other."""
        evaluate, tune = recipe.evaluate, recipe.tune
        if tune.k is None:
            usual = range(1, 1 + min(_USUAL_K, self.longest_draft() or _USUAL_K))
            recipe = recipe.model_copy(update={"tune": tune.model_copy(update={"k": tuple(usual)})})
        if self.own:
            return recipe
        others = {name: method for name, method in evaluate.methods.items() if name != self.listed_as}
        changes: dict[str, Any] = {"methods": others}
        further: dict[str, Any] = {}
        k = self._own_k()
        if k is not None:
            fixed = isinstance(self.method, Suffix)
            if fixed or "k" not in evaluate.model_fields_set:
                changes["k"] = (k,)
            if fixed or "acceptance_k" not in evaluate.model_fields_set:
                changes["acceptance_k"] = k
            if fixed or "k" not in tune.model_fields_set:
                further["k"] = (k,)
        return recipe.model_copy(
            update={"evaluate": evaluate.model_copy(update=changes), "tune": recipe.tune.model_copy(update=further)}
        )

    def _own_k(self) -> int | None:
        """The number of tokens that the recipe gives the method; None if it leaves it open."""
        if isinstance(self.method, Suffix):
            return self.method.num_speculative_tokens or self.method.suffix_decoding_max_tree_depth
        return self.method.num_speculative_tokens if "num_speculative_tokens" in self.method.model_fields_set else None


def trains_no_drafter(recipe: Recipe, run_dir: Path) -> bool:
    """Whether there is no drafter of the run's own and nothing to train one from."""
    return recipe.extract.prompts is None and not (run_dir / "vllm").exists()


def speculator(recipe: Recipe, run_dir: Path) -> Speculator:
    """The run's drafter; if the recipe trains none, `serve.method`, or the first of `evaluate.methods`.

    Args:
        run_dir: `runs/NAME`.

    Raises:
        UserError: the drafter is missing, or there is neither a drafter nor a method that needs none.
    """
    drafter_dir = run_dir / "vllm"
    if not trains_no_drafter(recipe, run_dir):
        hashes = drafter_sha256(drafter_dir)
        return Speculator(own_drafter(drafter_dir), drafter_dir, drafter_name(drafter_dir), hashes)
    listed: list[tuple[str, str | None, Method]] = [
        (f"evaluate.methods.{name}", name, method) for name, method in recipe.evaluate.methods.items()
    ]
    if recipe.serve.method is not None and not isinstance(recipe.serve.method, NoSpeculation):
        listed.insert(0, ("serve.method", None, recipe.serve.method))
    if not listed:
        raise UserError(
            f"There is nothing to speculate with: the run has no drafter in {drafter_dir}, the recipe has no `extract.prompts` to train one "
            "from, and neither `serve.method` nor `evaluate.methods` names a method that needs none, as in `serve.method: { method: ngram }`."
        )
    where, name, method = listed[0]
    if isinstance(method, TrainedDrafter) and method.model is None:
        raise UserError(
            f"`{where}` needs a drafter: the run has none of its own in {drafter_dir}, and the recipe has no `extract.prompts` to train one "
            f"from. Name one, as in `{where}.model: OWNER/NAME`, or choose a method that needs none."
        )
    same = next((key for _, key, other in listed if key is not None and other == method), name)
    plain = method.model_copy(update={"num_speculative_tokens_per_batch_size": None})
    shown = method.method
    if isinstance(method, TrainedDrafter | DraftModel):
        model = str(method.model)  # of a folder its name alone: results are published, and paths are of one machine
        shown += f" ({Path(model).name if Path(model).is_absolute() else model})"
    # The same folder may hold another model tomorrow.
    identity = {"method": digest(plain.model_dump(mode="json"))} | model_content(plain)
    return Speculator(plain, drafter_dir, shown, identity, same)
