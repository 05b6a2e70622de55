"""The MLP speculator inside vLLM: the trainer's own module and the proposers that run it. See `serve/plugin/__init__.py`."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.drafters.layout import Source
from draftsmith.drafters.mlp_speculator import MlpConfig, MlpDrafter
from draftsmith.drafters.norm import FinalNorm
from draftsmith.serve.plugin.versions import require_known_vllm


class MlpSpeculator(nn.Module):
    """The model that vLLM loads for the plugin's architecture. Replicated on every rank, as its inputs are.
    Raises RuntimeError: this vLLM's proposers were not replaced."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        require_known_vllm()
        record = vllm_config.speculative_config.draft_model_config.hf_config.to_dict()
        # vLLM has added a Llama's fields; conversion has checked those in the file.
        known = {path.partition(".")[0] for entry in MlpDrafter.vllm_layout.fields for path in entry.paths}
        record = {name: value for name, value in record.items() if name in known}
        config = MlpConfig.from_dict(MlpDrafter.vllm_layout.read(Source(record, {})))
        # vLLM passes states after the target's final norm.
        self.drafter = MlpDrafter(config, FinalNorm(torch.ones(config.hidden_size), eps=config.rms_norm_eps))

    @torch.inference_mode()
    def draft(self, states: torch.Tensor, tokens: torch.Tensor, steps: int) -> torch.Tensor:
        """Draft greedily, int64 [rows, steps], after the target's states [rows, H], which its final norm has normed, and the tokens
        (int [rows]) sampled after them; 0 to `n_predict` steps."""
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
            own[name].data.copy_(tensor)  # conversion has checked that there are exactly these
            loaded.add(f"drafter.{name}")
        return loaded

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        raise NotImplementedError("call `draft`")

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """vLLM expects it in every text generation model."""
        raise NotImplementedError("call `draft`")

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("call `draft`")


def proposer_v1(base: type[Any]) -> type[Any]:
    """For vLLM's model runner V1 (vllm/v1/spec_decode/llm_base_proposer.py), which its CPU build uses."""

    class MlpProposer(base):
        model: MlpSpeculator

        def load_model(self, target_model: nn.Module) -> None:
            self.supports_mm_inputs = False
            self._draft_attn_layer_names: set[str] = set()
            self.model = self._get_model()

        def initialize_attn_backend(self, kv_cache_config: Any, kernel_block_sizes: Any = None) -> None:
            # The runner passes attention metadata to the drafter's cache group only, and silently drafts zeros if there is
            # none. This proposer reads only sequence ends from the metadata, so any group's will do.
            self.kv_cache_gid = 0

        def validate_same_kv_cache_group(self, kv_cache_config: Any) -> None:
            pass

        def dummy_run(self, *arguments: Any, **named: Any) -> None:
            pass

        def propose(
            self,
            num_speculative_tokens: int,
            target_token_ids: torch.Tensor,
            target_positions: torch.Tensor,
            target_hidden_states: torch.Tensor,
            next_token_ids: torch.Tensor,
            token_indices_to_sample: torch.Tensor | None,
            common_attn_metadata: Any,
            *_: Any,
            **__: Any,
        ) -> torch.Tensor:
            self._last_draft_probs = None  # a greedy draft token has probability 1
            rows = token_indices_to_sample
            if rows is None:
                rows = common_attn_metadata.query_start_loc[1:] - 1
            return self.model.draft(target_hidden_states[rows], next_token_ids, num_speculative_tokens)

    return MlpProposer


def proposer_v2(base: type[Any]) -> type[Any]:
    """For vLLM's model runner V2 (vllm/v1/worker/gpu/spec_decode), which needs Triton."""

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
            self,
            input_batch: Any,
            attn_metadata: Any,
            slot_mappings: Any,
            last_hidden_states: torch.Tensor,
            aux_hidden_states: Any,
            num_sampled: torch.Tensor,
            num_rejected: torch.Tensor,
            last_sampled: torch.Tensor,
            next_prefill_tokens: torch.Tensor,
            *_: Any,
            num_speculative_tokens: int | None = None,
            **__: Any,
        ) -> torch.Tensor:
            count = input_batch.num_reqs
            steps = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
            rows = input_batch.query_start_loc[1 : count + 1] - 1 - num_rejected[:count]
            place = input_batch.idx_mapping[:count]
            # A partially prefilled prompt has sampled nothing: its next token is known.
            next_tokens = torch.where(
                num_sampled[:count] > 0, last_sampled.view(-1)[place], next_prefill_tokens.view(-1)[place]
            )
            self.draft_tokens[:count, :steps] = self.model.draft(last_hidden_states[rows], next_tokens, steps)
            return self.draft_tokens[:count]  # the runner itself masks positions beyond `steps`

    return MlpSpeculatorV2
