"""Checks of what Draftsmith takes a target for, against transformers' own model and vLLM's RoPE: of tests of facts and of whole runs."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import LlamaConfig

from draftsmith.drafters import decoder
from draftsmith.drafters.attention import Attention
from draftsmith.drafters.decoder import DecoderConfig
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.norm import FinalNorm
from draftsmith.target.info import describe_target
from draftsmith.target.reference_states import states_of
from draftsmith.target.tensors import load_target_tensors
from draftsmith.train.loss import capped
from tests.families import HIDDEN, LAYERS, VOCAB

POSITIONS = torch.tensor([0, 1, 2, 63, 255, 511])


def check_facts(model: Any, directory: Path) -> None:
    """What a family's row rests on beside its states: the teacher, the embedding, and RoPE of a new drafter."""
    check_teacher(model, directory)
    check_embedding(model, directory)
    facts = describe_target(directory).facts
    check_rope(shape_of(facts.rope_parameters, facts.head_dim), POSITIONS)


def check_teacher(model: Any, directory: Path) -> None:
    """Final norm and logits that training computes from the last hidden state equal the model's own."""
    info, tensors = describe_target(directory), load_target_tensors(directory)
    ids = torch.randint(0, VOCAB, (24,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    last = states_of(model, ids, (LAYERS,))[:, 0]
    normed = FinalNorm.of(tensors, info.facts.norm_eps)(last)
    logits = capped(F.linear(normed, tensors.lm_head), tensors.logit_soft_cap)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.01, "logits that are nearly equal would hide a wrong scale"


def check_embedding(model: Any, directory: Path) -> None:
    """Drafters read the embedding that vLLM gives them: transformers' own module where its backend serves the target, and else the table."""
    family, tensors = describe_target(directory).facts.family, load_target_tensors(directory)
    ids = torch.arange(8)
    plain = tensors.embedding[ids].float()
    with torch.no_grad():
        module = model.get_input_embeddings()(ids).float()
    through_backend = family.states == "backend" or family.scaled_embedding == "always"
    found = tensors.shared_embedding(reads_layers=True)[ids]
    torch.testing.assert_close(found, module if through_backend else plain)
    always = family.scaled_embedding == "always"
    torch.testing.assert_close(tensors.shared_embedding(reads_layers=False)[ids], module if always else plain)


def check_rope(shape: DecoderConfig, positions: torch.Tensor) -> None:
    """The module turns queries as vLLM does after reading the drafter's config.json."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    attention = Attention(HIDDEN, HIDDEN, heads=2, kv_heads=1, head_dim=shape.head_dim, bias=False)
    x = torch.randn(len(positions), HIDDEN)
    cos, sin = decoder.rotary_embedding(shape)(x, positions[None])
    with torch.no_grad():
        found = attention.queries(x, (cos[0], sin[0]))
        plain = attention.q_proj(x)
    read = LlamaConfig.from_dict(json.loads(json.dumps(Eagle3Drafter.vllm_layout.write(shape))))
    before = dict(os.environ)
    vllm_config = VllmConfig()
    for name in os.environ.keys() - before.keys() | {"LD_PRELOAD"} & os.environ.keys():  # which engines would inherit
        os.environ.pop(name)
    os.environ.update(before)
    with set_current_vllm_config(vllm_config):
        rope = get_rope(
            read.head_dim,
            max_position=read.max_position_embeddings,
            rope_parameters=read.rope_parameters,
            dtype=torch.float32,
        )
        expected, _ = rope.forward_native(positions, plain.clone(), plain[:, : shape.head_dim].clone())
    torch.testing.assert_close(found, expected.view_as(found), rtol=1e-4, atol=1e-4)


def shape_of(rope: dict[str, Any], head_dim: int = 32) -> Eagle3Config:
    return Eagle3Config(
        layer_ids=(1,),
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_parameters=rope,
        max_position_embeddings=512,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        norm_before_residual=False,
        fc_norm=False,
        norm_output=False,
    )
