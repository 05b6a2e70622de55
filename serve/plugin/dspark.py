"""DSpark in vLLM's model runner V1, which its CPU build uses: DFlash's proposer, with the Markov head. See `serve/plugin/__init__.py`."""

from typing import Any

import torch


def proposer_v1(base: type[Any]) -> type[Any]:
    """From vLLM's proposer for DFlash (vllm/v1/spec_decode/dflash.py)."""

    class DSparkProposer(base):
        num_speculative_tokens: int

        @property
        def _known_rows(self) -> int:
            """Rows of a block before the first that a draft token is predicted from. An absent key is what vLLM's V2 takes it for."""
            return 0 if getattr(self.draft_model_config.hf_config, "sample_from_anchor", True) else 1

        def set_inputs_first_pass(self, *arguments: Any, **named: Any) -> tuple[int, torch.Tensor, Any]:
            """See the base. It lays out a row more than it drafts, so for blocks whose first row drafts too it is asked for one draft token
            less, and draft tokens are taken from all rows."""
            if self._known_rows:
                return super().set_inputs_first_pass(*arguments, **named)
            steps: int = self.num_speculative_tokens
            self.num_speculative_tokens = steps - 1
            try:
                rows, _, metadata = super().set_inputs_first_pass(*arguments, **named)
            finally:
                self.num_speculative_tokens = steps
            return rows, self.arange[:rows], metadata

        def _sample_draft_tokens(self, hidden_states: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:
            """Draft greedily, int64 [requests * K], from the states of the blocks' rows [requests * K, H]."""
            steps = self.num_speculative_tokens
            logits = self.model.compute_draft_logits(hidden_states).unflatten(0, (-1, steps))
            rows, drafts = steps + self._known_rows, []
            tokens = self.input_ids[: len(logits) * rows : rows]  # the blocks' anchors
            for step in range(steps):
                of_last = self.model.markov_bias(self.model.markov_embed(tokens))
                tokens = self.model.map_draft_to_target((logits[:, step] + of_last).argmax(-1))
                drafts.append(tokens)
            return torch.stack(drafts, dim=1).flatten(), None

    return DSparkProposer
