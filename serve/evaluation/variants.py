"""The variants that an evaluation compares: vLLM's configuration of each, and the engines that run them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from draftsmith.config.methods import Method
from draftsmith.config.recipe import Recipe
from draftsmith.engine.speculation import method_config, own_drafter
from draftsmith.serve.evaluation.configurations import Configuration, configurations
from draftsmith.serve.evaluation.engine import EngineSpec
from draftsmith.serve.evaluation.lineup import Lineup, engine_starter, find_placement, serves_every_k
from draftsmith.serve.evaluation.schema import Variant
from draftsmith.serve.evaluation.suites import SuiteInput
from draftsmith.target.info import TargetInfo


class Variants:
    """The baseline, the run's drafter at each K, and the recipe's other methods.

    Args:
        further_ks: other K than the recipe's at which the drafter is timed; 0 counts for none.

    Raises:
        UserError: a method cannot serve the target, or two engines do not fit on this machine.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: TargetInfo,
        drafter_dir: Path,
        suites: Sequence[SuiteInput],
        log_dir: Path,
        further_ks: Iterable[int],
    ) -> None:
        options = recipe.evaluate
        self._recipe, self._target, self._drafter_dir = recipe, target, drafter_dir
        self._drafter = own_drafter(drafter_dir)
        self._configs: dict[Variant, dict[str, Any] | None] = {0: None}
        self.ks = sorted({*options.k, options.acceptance_k})
        """Each K that is measured on the first suite."""
        in_flight, longest = max((1, *options.concurrency)), max(map(_longest, suites))
        self._max_num_seqs = max(options.acceptance_batch_size, in_flight)
        self._for_every_k: dict[str, Any] | None = None
        """`speculative_config` of the engine that drafts at every K; None if each K has its own."""
        if serves_every_k(self._drafter, recipe.engine):
            self._for_every_k = self._config(
                self._drafter.model_copy(
                    update={"num_speculative_tokens_per_batch_size": self._at_every_load(max([*self.ks, *further_ks]))}
                )
            )
        every: list[Variant] = [0, *self.ks, *options.methods]
        self.placement = find_placement(
            recipe.engine, target, [self.speculative_config(one) for one in every],
            dtypes=sorted({one.dtype for one in configurations(recipe, self.ks[-1])}),
            tokens=max(options.acceptance_batch_size, in_flight) * longest, at_least=in_flight * (longest + options.timing_tokens),
            smaller="evaluate.concurrency",
        )  # fmt: skip
        self._start = engine_starter(log_dir, warm_up=suites[0].prompts[0].token_ids)

    def speculative_config(self, variant: Variant) -> dict[str, Any] | None:
        """vLLM's `speculative_config`; None for the baseline."""
        if variant not in self._configs:
            if isinstance(variant, str):
                method: Method = self._recipe.evaluate.methods[variant]
            else:
                method = self._drafter.model_copy(update={"num_speculative_tokens": variant})
            self._configs[variant] = self._config(method)
        return self._configs[variant]

    def num_speculative_tokens(self, variant: Variant) -> int:
        """K; 0 for the baseline."""
        config = self.speculative_config(variant)
        return int(config["num_speculative_tokens"]) if config else 0

    def lineup(self) -> Lineup[Any]:
        """The engines that are up; none is started yet."""
        return Lineup(self.placement, self._start)

    def engines(self, variants: Iterable[Variant]) -> dict[Variant, EngineSpec]:
        """The engines of these variants in the recipe's dtype."""
        return {variant: self.engine(Configuration(variant, self._recipe.target.dtype)) for variant in variants}

    def engine(self, of: Configuration) -> EngineSpec:
        """The engine of a configuration."""
        name, config, k_by_load = of.file_name, self.speculative_config(of.speculation), None
        if isinstance(of.speculation, int) and of.speculation and self._for_every_k is not None:
            name, config = f"drafter-{of.dtype}", self._for_every_k
            k_by_load = self._at_every_load(of.speculation)
        return EngineSpec(
            name=name, target=str(self._target.path), dtype=of.dtype, engine=self._recipe.engine,
            trust_remote_code=self._target.trust_remote_code, speculative=config, max_num_seqs=self._max_num_seqs, k_by_load=k_by_load,
            sampling=self._recipe.evaluate.sampling,
        )  # fmt: skip

    def _at_every_load(self, k: int) -> tuple[tuple[int, int, int], ...]:
        return ((1, self._max_num_seqs, k),)

    def _config(self, method: Method) -> dict[str, Any] | None:
        return method_config(
            method, self._target, own_drafter=self._drafter_dir,
            tensor_parallel_size=self._recipe.engine.tensor_parallel_size,
        )  # fmt: skip


def _longest(suite: SuiteInput) -> int:
    """About how many tokens a suite's longest sequence can have: each turn a question as long as the longest, and an answer."""
    prompt = max(len(turn.token_ids) for turn in suite.prompts)
    return max(1 + len(turn.later) for turn in suite.prompts) * (prompt + suite.max_tokens)
