"""A good start: a drafter whose vocabulary comes from the store and whose weights come from the target."""

from __future__ import annotations

import torch

from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.recipe import Eagle3Options
from draftsmith.target import TargetInfo, TargetTensors


def choose_draft_vocabulary(counts: torch.Tensor, size: int | None) -> torch.Tensor:
    """The most frequent tokens of the training responses.

    Args:
        counts: int64 [vocab]; how often each token occurs.
        size: how many to keep; all when None or larger than the vocabulary.

    Returns:
        int64 [V], ascending target ids. Tokens that never occur fill up by lowest id, which byte-pair
        vocabularies give to the pieces merged first, the common ones.
    """
    size = min(size or len(counts), len(counts))
    order = torch.sort(counts, descending=True, stable=True).indices  # stable: ties and zeros by lowest id
    return order[:size].sort().values


def eagle3_config(
    options: Eagle3Options, target: TargetInfo, layer_ids: tuple[int, ...], draft_vocab_size: int
) -> Eagle3Config:
    """The drafter's shape: the target's decoder layer, with what the recipe sets."""
    text = target.config
    heads = text.num_attention_heads
    return Eagle3Config(
        layer_ids=layer_ids,
        hidden_size=text.hidden_size,
        intermediate_size=options.intermediate_size or text.intermediate_size,
        num_layers=options.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        hidden_act="silu",
        rms_norm_eps=text.rms_norm_eps,
        rope_parameters=dict(text.rope_parameters),
        max_position_embeddings=text.max_position_embeddings,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=options.norm_before_residual,
        fc_norm=options.fc_norm,
        norm_output=options.norm_output,
    )


@torch.no_grad()
def start_from_target(drafter: Eagle3Drafter, tensors: TargetTensors, num_target_layers: int) -> None:
    """Initialise the drafter in place from the target's weights.

    The head and the final norm are the target's own. The decoder layer is the target's last one; its q, k and v
    read the state half of their input as the target's did, and the embedding half starts small. `fc` passes on the deepest
    state, so that the drafter begins by repeating what the target already knew, and learns the one-token shift.
    """
    config = drafter.config
    hidden = config.hidden_size
    drafter.lm_head.weight.copy_(tensors.lm_head[drafter.draft_token_ids])
    drafter.norm.weight.copy_(tensors.final_norm_weight)
    for offset, layer in enumerate(reversed(drafter.layers)):
        source = tensors.layer(num_target_layers - 1 - offset)
        for name, parameter in layer.named_parameters():
            if name == "hidden_norm.weight":
                continue
            value = source.get(name)
            if value is not None and value.shape == parameter.shape:
                parameter.copy_(value)
            elif value is not None and value.shape[1] * 2 == parameter.shape[1]:
                parameter[:, hidden:].copy_(value)
                parameter[:, :hidden].copy_(value)
    drafter.layers[0].hidden_norm.weight.copy_(drafter.layers[0].input_layernorm.weight)
    drafter.fc.weight.normal_(std=0.2 / hidden**0.5)
    drafter.fc.weight[:, -hidden:].add_(torch.eye(hidden))
