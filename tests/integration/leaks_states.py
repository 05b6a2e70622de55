"""A fault planted in vLLM for test_fidelity.py: a twentieth of the previous position's state leaks into every verified token's.

An engine with the `worker_extension_cls` `Extension` of this module imports it in its own process only. Its drafts have K = 3 tokens, so
the states for logits come in fours while all sequences decode.
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
    """A worker extension without content; importing it plants the fault."""
