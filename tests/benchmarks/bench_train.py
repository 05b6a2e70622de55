"""How near the EAGLE-3 training step comes to what limits it: floating-point work.

The shapes are SmolLM2-135M's with the demo's options, the data is random, and only the step is timed. Its useful work
is counted from the formulas: two operations for each weight a row meets forward, twice that backward, and none for
the gradient of the frozen head. The limit is the rate of one plain matrix product, measured in the same run.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.store import Sequence
from draftsmith.train.loss import ChainLoss
from draftsmith.train.packing import pack

RUNS, DOCUMENTS, TOKENS, PROMPT = 7, 6, 170, 70
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, DRAFT, STEPS, LAYERS = 576, 1536, 9, 3, 64, 49152, 12288, 3, 4


def training_step() -> dict[str, dict[str, Any]]:
    """`train.tokens_per_second` and `train.fraction_of_matmul`."""
    torch.manual_seed(0)
    config = Eagle3Config(
        layer_ids=tuple(range(LAYERS)), hidden_size=HIDDEN, intermediate_size=INNER, num_layers=1,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, hidden_act="silu", rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, max_position_embeddings=2048, vocab_size=VOCAB,
        draft_vocab_size=DRAFT, norm_before_residual=False, fc_norm=True, norm_output=False,
    )  # fmt: skip
    drafter = Eagle3Drafter(config, torch.randn(VOCAB, HIDDEN), torch.arange(DRAFT))
    drafter.lm_head.requires_grad_(False)
    loss = ChainLoss(
        drafter, teacher_norm=torch.nn.RMSNorm(HIDDEN), teacher_head=torch.randn(DRAFT, HIDDEN) / HIDDEN**0.5,
        chain_steps=STEPS, chain_decay=0.8,
    )  # fmt: skip
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    sequences = [
        Sequence(i, False, torch.randint(0, DRAFT, (TOKENS,)), torch.arange(TOKENS) >= PROMPT, torch.randn(TOKENS - 1, LAYERS, HIDDEN))
        for i in range(DOCUMENTS)
    ]  # fmt: skip
    batch = pack(sequences, steps=STEPS)
    last_states = torch.randn(len(batch.positions), HIDDEN)

    def step() -> None:
        loss(batch, last_states).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    a, b = torch.randn(1024, 1536), torch.randn(1536, 1536)

    def matmul() -> None:
        for _ in range(20):
            a @ b

    step()
    matmul()
    times: dict[str, list[float]] = {"step": [], "matmul": []}
    for _ in range(RUNS):
        for name, work in (("step", step), ("matmul", matmul)):
            begun = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - begun)
    limit = [20 * 2 * 1024 * 1536 * 1536 / seconds for seconds in times["matmul"]]
    rate = [useful_operations(batch) / seconds for seconds in times["step"]]
    fractions = [done / possible for done, possible in zip(rate, limit, strict=True)]
    tokens = [len(batch.positions) / seconds for seconds in times["step"]]
    return {
        "train.tokens_per_second": {
            "value": statistics.median(tokens), "unit": "tokens/s", "runs": tokens, "against": "nothing; noisy machine",
            "limit": None,
        },
        "train.fraction_of_matmul": {
            "value": statistics.median(fractions), "unit": "ratio", "runs": fractions, "against": "one [1024, 1536] product",
            "limit": 1.0,
        },
    }  # fmt: skip


def useful_operations(batch: Any) -> float:
    """Floating-point operations of one step that the mathematics asks for."""
    rows, queries = len(batch.positions), int((batch.counts.sum(1) > 0).sum())
    keys_values = 2 * HIDDEN * 2 * KV_HEADS * HEAD_DIM
    others = 2 * HIDDEN * HEADS * HEAD_DIM + HEADS * HEAD_DIM * HIDDEN + 3 * HIDDEN * INNER
    head = HIDDEN * DRAFT
    every_row = 6 * (LAYERS * HIDDEN * HIDDEN + keys_values)
    later_keys = 6 * keys_values * (STEPS - 1)
    # 6 = forward, gradient of the input, gradient of the weight; the head is frozen: 4, and 2 more for the teacher.
    return rows * every_row + queries * (later_keys + STEPS * (6 * others + 4 * head) + 2 * head)
