"""The variants that an evaluation compares: vLLM's configuration of each, and the engines that run them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from draftsmith.config.methods import NGram, Suffix
from draftsmith.config.recipe import Recipe
from draftsmith.engine.speculation import DEPENDING_ON_K, method_config
from draftsmith.serve.evaluation.configurations import Configuration, configurations
from draftsmith.serve.evaluation.engine import EngineSpec
from draftsmith.serve.evaluation.lineup import Lineup, engine_starter, find_placement, serves_every_k
from draftsmith.serve.evaluation.schema import Variant
from draftsmith.serve.evaluation.suites import SuiteInput
from draftsmith.serve.speculator import Speculator
from draftsmith.target.info import TargetInfo


class Variants:
    """The baseline, the run's drafter at each K, and the recipe's other methods.

    Args:
        speculator: the run's drafter, or the method in its place.
        further_ks: other K than the recipe's at which the drafter is timed; 0 counts for none.

    Raises:
        UserError: a method cannot serve the target, or two engines do not fit on this machine.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: TargetInfo,
        speculator: Speculator,
        suites: Sequence[SuiteInput],
        log_dir: Path,
        further_ks: Iterable[int],
    ) -> None:
        options = recipe.evaluate
        self._recipe, self._target, self._speculator = recipe, target, speculator
        self._configs: dict[Variant, dict[str, Any] | None] = {0: None}
        self.ks = sorted({*options.k, options.acceptance_k})
        """Each K that is measured on the first suite."""
        in_flight, longest = max((1, *options.concurrency)), max(map(_longest, suites))
        self._max_num_seqs = max(options.acceptance_batch_size, in_flight)
        self._for_every_k: dict[str, Any] | None = None
        """`speculative_config` of the engine that drafts at every K; None if each K has its own."""
        if serves_every_k(speculator.method, recipe.engine):
            ranges = self._at_every_load(max([*self.ks, *further_ks]))
            self._for_every_k = speculator.config(target, recipe.engine.tensor_parallel_size, ranges=ranges)
        every: list[Variant] = [0, *self.ks, *options.methods]
        self.placement = find_placement(
            recipe.engine,
            target,
            [self.speculative_config(one) for one in every],
            dtypes=sorted({one.dtype for one in configurations(recipe, self.ks[-1])}),
            room=(self._max_num_seqs, longest),
            at_least=(in_flight, longest + options.timing_tokens),
            smaller="evaluate.concurrency",
        )
        self._start = engine_starter(log_dir, warm_up=suites[0].prompts[0].token_ids)

    def speculative_config(self, variant: Variant) -> dict[str, Any] | None:
        """vLLM's `speculative_config`; None for the baseline."""
        if variant not in self._configs:
            split = self._recipe.engine.tensor_parallel_size
            if isinstance(variant, str):
                self._configs[variant] = method_config(
                    self._recipe.evaluate.methods[variant],
                    self._target,
                    own_drafter=self._speculator.drafter_dir,
                    tensor_parallel_size=split,
                )
            else:
                self._configs[variant] = self._speculator.config(self._target, split, k=variant)
        return self._configs[variant]

    def num_speculative_tokens(self, variant: Variant) -> int:
        """K; 0 for the baseline."""
        config = self.speculative_config(variant)
        return int(config["num_speculative_tokens"]) if config else 0

    @property
    def extends_shorter_drafts(self) -> bool:
        """Whether what is measured drafts at a larger K what it drafts at a smaller one, and more tokens after that, in every step. Lookup
        drafts in some steps only, and a block's tokens can depend on how many there are."""
        method = self._speculator.method
        return not isinstance(method, NGram | Suffix) and method.method not in DEPENDING_ON_K

    @property
    def draws_on_earlier_answers(self) -> bool:
        """Whether what an engine answered before changes what it drafts."""
        every = [self._speculator.method, *self._recipe.evaluate.methods.values()]
        return any(isinstance(method, Suffix) for method in every)

    def lineup(self) -> Lineup[Any]:
        """The engines that are up; none is started yet."""
        return Lineup(self.placement, self._start)

    def engines(self, variants: Iterable[Variant]) -> dict[Variant, EngineSpec]:
        """The engines of these variants in the recipe's dtype."""
        return {variant: self.engine(Configuration(variant, self._recipe.target.dtype)) for variant in variants}

    def engine(self, of: Configuration) -> EngineSpec:
        """The engine of a configuration."""
        name, config, k_by_load = of.file_name, self.speculative_config(of.speculation), None
        if isinstance(
            of.speculation, str
        ):  # people's own names, which may read like another engine's, or like each other in a file's name
            name = f"method-{list(self._recipe.evaluate.methods).index(of.speculation) + 1}-{name}"
        if isinstance(of.speculation, int) and of.speculation and self._for_every_k is not None:
            name, config = f"drafter-{of.dtype}", self._for_every_k
            k_by_load = self._at_every_load(of.speculation)
        return EngineSpec(
            name=name,
            target=str(self._target.path),
            dtype=of.dtype,
            engine=self._recipe.engine,
            trust_remote_code=self._target.trust_remote_code,
            speculative=config,
            max_num_seqs=self._max_num_seqs,
            k_by_load=k_by_load,
            sampling=self._recipe.evaluate.sampling,
            # Independent of the baseline's samples, for which a test of two distributions takes them: vLLM draws every request's own seed
            # (V2), or the noise of a step (V1), from this one.
            seed=int(of.speculation != 0),
        )

    def _at_every_load(self, k: int) -> tuple[tuple[int, int, int], ...]:
        return ((1, self._max_num_seqs, k),)


def _longest(suite: SuiteInput) -> int:
    """About how many tokens a suite's longest sequence can have: each turn a question as long as the longest, and an answer."""
    prompt = max(len(turn.token_ids) for turn in suite.prompts)
    return max(1 + len(turn.later) for turn in suite.prompts) * (prompt + suite.max_tokens)
