"""The variants that an evaluation compares: vLLM's configuration of each, and the engines that run them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from draftsmith.config.methods import Method
from draftsmith.config.recipe import Recipe
from draftsmith.engine.speculation import method_config, own_drafter
from draftsmith.serve.evaluation.configurations import Configuration, configurations
from draftsmith.serve.evaluation.engine import EngineSpec
from draftsmith.serve.evaluation.lineup import Lineup, engine_starter, find_placement
from draftsmith.serve.evaluation.schema import Variant
from draftsmith.serve.evaluation.suites import SuiteInput
from draftsmith.target.info import TargetInfo


class Variants:
    """The baseline, the run's drafter at each K, and the recipe's other methods.

    Raises:
        UserError: a method cannot serve the target, or two engines do not fit on this machine.
    """

    def __init__(
        self, recipe: Recipe, target: TargetInfo, drafter_dir: Path, suites: Sequence[SuiteInput], log_dir: Path
    ) -> None:
        options = recipe.evaluate
        self._recipe, self._target, self._drafter_dir = recipe, target, drafter_dir
        self._configs: dict[Variant, dict[str, Any] | None] = {0: None}
        self.ks = sorted({*options.k, options.acceptance_k})
        """Each K that is measured on the first suite."""
        every: list[Variant] = [0, *self.ks, *options.methods]
        in_flight, longest = max((1, *options.concurrency)), max(map(_longest, suites))
        self.placement = find_placement(
            recipe.engine, target, [self.speculative_config(one) for one in every],
            dtypes=sorted({one.dtype for one in configurations(recipe, self.ks[-1])}),
            tokens=max(options.acceptance_batch_size, in_flight) * longest, at_least=in_flight * (longest + options.timing_tokens),
            smaller="evaluate.concurrency",
        )  # fmt: skip
        self._start = engine_starter(log_dir, warm_up=suites[0].prompts[0].token_ids)

    @property
    def fit_together(self) -> bool:
        """Whether the engines of all variants can be up at once, in one dtype."""
        at_once = self.placement.at_once
        return at_once is None or at_once >= 1 + len(self.ks) + len(self._recipe.evaluate.methods)

    def speculative_config(self, variant: Variant) -> dict[str, Any] | None:
        """vLLM's `speculative_config`; None for the baseline."""
        if variant not in self._configs:
            if isinstance(variant, str):
                method: Method = self._recipe.evaluate.methods[variant]
            else:
                method = own_drafter(self._drafter_dir).model_copy(update={"num_speculative_tokens": variant})
            self._configs[variant] = method_config(
                method, self._target, own_drafter=self._drafter_dir,
                tensor_parallel_size=self._recipe.engine.tensor_parallel_size,
            )  # fmt: skip
        return self._configs[variant]

    def num_speculative_tokens(self, variant: Variant) -> int:
        """K; 0 for the baseline."""
        config = self.speculative_config(variant)
        return int(config["num_speculative_tokens"]) if config else 0

    def lineup(self, number: int = 0) -> Lineup[Any]:
        """The engines of one engine start; none is started yet."""
        return Lineup(self.placement, self._start, number)

    def engines_in_batches(self, ks: Iterable[int], *, methods: bool) -> dict[Variant, EngineSpec]:
        """Engines of the baseline, of the drafter at each K and of the other methods, in the recipe's dtype."""
        options = self._recipe.evaluate
        names: dict[Variant, str] = {0: "baseline"}
        for k in ks:
            names[k] = f"k{k}"
        for name in options.methods if methods else ():
            names[name] = "method-" + re.sub(r"[^\w.-]", "_", name)
        return {
            variant: self._spec(name, variant, self._recipe.target.dtype, options.acceptance_batch_size)
            for variant, name in names.items()
        }

    def timed_engines(self, of: Iterable[Configuration]) -> dict[Configuration, EngineSpec]:
        """The engines of these configurations."""
        most = max((1, *self._recipe.evaluate.concurrency))
        return {one: self._spec(one.file_name, one.speculation, one.dtype, most) for one in of}

    def _spec(self, name: str, variant: Variant, dtype: str, max_num_seqs: int) -> EngineSpec:
        return EngineSpec(
            name=name, target=str(self._target.path), dtype=dtype, engine=self._recipe.engine,
            speculative=self.speculative_config(variant), max_num_seqs=max_num_seqs,
        )  # fmt: skip


def _longest(suite: SuiteInput) -> int:
    """About how many tokens a suite's longest sequence can have: each turn a question as long as the longest, and an answer."""
    prompt = max(len(turn.token_ids) for turn in suite.prompts)
    return max(1 + len(turn.later) for turn in suite.prompts) * (prompt + suite.max_tokens)
