"""DSpark in vLLM's model runner V1, which its CPU build uses: DFlash's proposer, with the Markov head. See `serve/plugin/__init__.py`."""

from typing import Any

import torch


def proposer_v1(base: type[Any]) -> type[Any]:
    """From vLLM's proposer for DFlash (vllm/v1/spec_decode/dflash.py)."""

    class DSparkProposer(base):
        def _sample_draft_tokens(self, hidden_states: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:
            """Draft greedily, int64 [requests * K], from the states of the blocks' masks [requests * K, H]."""
            steps = self.num_speculative_tokens
            logits = self.model.compute_draft_logits(hidden_states).unflatten(0, (-1, steps))
            tokens, drafts = self.input_ids[: len(logits) * (steps + 1) : steps + 1], []  # the blocks' anchors
            for step in range(steps):
                of_last = self.model.markov_bias(self.model.markov_embed(tokens))
                tokens = self.model.map_draft_to_target((logits[:, step] + of_last).argmax(-1))
                drafts.append(tokens)
            return torch.stack(drafts, dim=1).flatten(), None

    return DSparkProposer
