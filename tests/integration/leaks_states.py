"""A fault planted in vLLM, for test_fidelity.py: a twentieth of the previous position's state gets into every checked token's.

An engine whose `worker_extension_cls` names `Extension` here imports this module in its own process, and in no other. Its drafts
are K = 3 tokens long, so the states that logits are computed from come in fours while all sequences decode.
"""

import torch
from vllm.model_executor.models.llama import LlamaForCausalLM

ROWS = 4
_right = LlamaForCausalLM.compute_logits


def _wrong(self: LlamaForCausalLM, hidden_states: torch.Tensor) -> torch.Tensor | None:
    if len(hidden_states) % ROWS == 0:
        rows = hidden_states.reshape(-1, ROWS, hidden_states.shape[-1]).clone()
        rows[:, 1:] += 0.05 * rows[:, :-1].clone()
        hidden_states = rows.flatten(0, 1)
    return _right(self, hidden_states)


LlamaForCausalLM.compute_logits = _wrong


class Extension:
    """Adds nothing to the worker."""
