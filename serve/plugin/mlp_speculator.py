"""The MLP speculator inside vLLM: the trainer's own module, and the proposers that run it. See `serve/plugin/__init__.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.drafters.layout import Source
from draftsmith.drafters.mlp_speculator import MlpConfig, MlpDrafter
from draftsmith.serve.plugin import require_known_vllm


class MlpSpeculator(nn.Module):
    """What vLLM loads for our architecture. Whole on every rank: so are the states and tokens it reads.

    Raises:
        RuntimeError: this vLLM is none whose proposers ours replace.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        require_known_vllm()
        record = vllm_config.speculative_config.draft_model_config.hf_config.to_dict()
        # vLLM has filled it up with what a Llama has; conversion made sure of what was in the file.
        ours = {path.partition(".")[0] for entry in MlpDrafter.vllm_layout.fields for path in entry.paths}
        record = {name: value for name, value in record.items() if name in ours}
        config = MlpConfig.from_dict(MlpDrafter.vllm_layout.read(Source(record, {})))
        # vLLM hands over states after the target's final norm.
        self.drafter = MlpDrafter(config, torch.ones(config.hidden_size))

    @torch.inference_mode()
    def draft(self, states: torch.Tensor, tokens: torch.Tensor, steps: int) -> torch.Tensor:
        """Guess greedily.

        Args:
            states: [rows, H], the target's last, after its final norm.
            tokens: int [rows], sampled after them.
            steps: 0 to the `n_predict` that it was trained for.

        Returns:
            int64 [rows, steps]
        """
        state, drafts = self.drafter.first_state(states), []
        for step in range(steps):
            state, head = self.drafter.step(step, state, tokens)
            tokens = F.linear(state, head).argmax(-1)
            drafts.append(tokens)
        return torch.stack(drafts, dim=1) if drafts else tokens.new_empty((len(tokens), 0), dtype=torch.int64)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        own = dict(self.drafter.named_parameters())
        loaded = set()
        for name, tensor in weights:
            own[name].data.copy_(tensor)  # conversion has made sure that there are these and no others
            loaded.add(f"drafter.{name}")
        return loaded

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        raise NotImplementedError("it drafts through `draft`")

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """vLLM looks for it in every model of a text generator."""
        raise NotImplementedError("it drafts through `draft`")

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("it drafts through `draft`")


def proposer_v1(base: type[Any]) -> type[Any]:
    """For vLLM's first model runner (vllm/v1/spec_decode/llm_base_proposer.py), which its CPU build has."""

    class MlpProposer(base):
        model: MlpSpeculator

        def load_model(self, target_model: nn.Module) -> None:
            self.supports_mm_inputs = False
            self._draft_attn_layer_names: set[str] = set()
            self.model = self._get_model()

        def initialize_attn_backend(self, kv_cache_config: Any, kernel_block_sizes: Any = None) -> None:
            # The runner gives attention's metadata to the group of the drafter's cache alone, and drafts zeros without a word
            # where it has none. Ours reads the metadata for where sequences end: any group's will do.
            self.kv_cache_gid = 0

        def validate_same_kv_cache_group(self, kv_cache_config: Any) -> None:
            pass

        def dummy_run(self, *arguments: Any, **named: Any) -> None:
            pass

        def propose(
            self, num_speculative_tokens: int, target_token_ids: torch.Tensor, target_positions: torch.Tensor,
            target_hidden_states: torch.Tensor, next_token_ids: torch.Tensor, token_indices_to_sample: torch.Tensor | None,
            common_attn_metadata: Any, *_: Any, **__: Any,
        ) -> torch.Tensor:  # fmt: skip
            self._last_draft_probs = None  # a greedy guess is its own distribution
            rows = token_indices_to_sample
            if rows is None:
                rows = common_attn_metadata.query_start_loc[1:] - 1
            return self.model.draft(target_hidden_states[rows], next_token_ids, num_speculative_tokens)

    return MlpProposer


def proposer_v2(base: type[Any]) -> type[Any]:
    """For vLLM's second model runner (vllm/v1/worker/gpu/spec_decode), which needs Triton."""

    class MlpSpeculatorV2(base):
        model: MlpSpeculator

        def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
            from vllm.model_executor.model_loader import get_model

            return get_model(vllm_config=self.vllm_config, model_config=self.draft_model_config)

        def set_attn(self, *arguments: Any, **named: Any) -> None:
            self.attn_groups: list[Any] = []

        def init_cudagraph_manager(self, *arguments: Any, **named: Any) -> None:
            pass

        def capture(self, *arguments: Any, **named: Any) -> None:
            pass

        @torch.inference_mode()
        def propose(
            self, input_batch: Any, attn_metadata: Any, slot_mappings: Any, last_hidden_states: torch.Tensor,
            aux_hidden_states: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor, last_sampled: torch.Tensor,
            next_prefill_tokens: torch.Tensor, *_: Any, num_speculative_tokens: int | None = None, **__: Any,
        ) -> torch.Tensor:  # fmt: skip
            count = input_batch.num_reqs
            steps = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
            rows = input_batch.query_start_loc[1 : count + 1] - 1 - num_rejected[:count]
            place = input_batch.idx_mapping[:count]
            # A prompt that is not read to its end yet has sampled nothing: its next token is known.
            following = torch.where(
                num_sampled[:count] > 0, last_sampled.view(-1)[place], next_prefill_tokens.view(-1)[place]
            )
            self.draft_tokens[:count, :steps] = self.model.draft(last_hidden_states[rows], following, steps)
            return self.draft_tokens[:count]  # the runner itself marks what is beyond `steps`

    return MlpSpeculatorV2
