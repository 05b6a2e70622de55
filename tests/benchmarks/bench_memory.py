"""What a training step keeps in memory: EAGLE-3 at 8,192 tokens and a vocabulary of 131,072.

The step runs in a process of its own. What it needs is the peak of its resident set less what the imports took, set
against twice the weights and the activations of one layer, both counted from the shapes:

    weights      what is trained and what is only read: the drafter's, the target's embedding, and the head's rows
    activations  what the products and norms of the decoder layer read, for every row and chain step

One float32 tensor [tokens, vocabulary] would be 4 GiB.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.figures import Figure, figure

TOKENS, VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, STEPS, LAYERS = 8192, 131_072, 1024, 2816, 16, 8, 64, 2, 3
DOCUMENTS = 8


def step_memory() -> dict[str, Figure]:
    """`train.step_memory_ratio`."""
    done = subprocess.run([sys.executable, "-m", __name__], check=True, capture_output=True, text=True)
    imported, weights, peak = json.loads(done.stdout)
    allowed = 2 * (weights + activations_of_a_layer())
    return {
        "train.step_memory_ratio": figure(
            [(peak - imported) / allowed], "ratio",
            f"twice the weights and a layer's activations, {allowed / 2**30:.2f} GiB", direction="lower", bar=1.0,
        ),
    }  # fmt: skip


def activations_of_a_layer() -> int:
    """Bytes that the layer's products and norms read, in float32, over all chain steps."""
    attention = 2 * HIDDEN + (HEADS + 2 * KV_HEADS) * HEAD_DIM + HEADS * HEAD_DIM  # read; q, k and v; mixed values
    mlp = 2 * HIDDEN + 3 * INNER  # its input before and after the norm; gate, up and their product
    return 4 * TOKENS * STEPS * (HIDDEN + attention + mlp)


def _measure() -> tuple[int, int, int]:
    """In the process that is measured: bytes resident after the imports, bytes of all weights, and the step's peak."""
    import torch

    from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
    from draftsmith.store.format import Sequence
    from draftsmith.train.loss import ChainLoss
    from draftsmith.train.packing import pack

    imported = peak_of_resident_set()
    config = Eagle3Config(
        layer_ids=tuple(range(LAYERS)),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        max_position_embeddings=TOKENS,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        norm_before_residual=False,
        fc_norm=True,
        norm_output=False,
    )
    drafter = Eagle3Drafter(config, torch.randn(VOCAB, HIDDEN), torch.arange(VOCAB))
    drafter.lm_head.requires_grad_(False)
    loss = ChainLoss(
        drafter,
        teacher_norm=torch.nn.RMSNorm(HIDDEN),
        teacher_head=drafter.lm_head.weight.detach().clone(),
        ttt_steps=STEPS,
        ttt_loss_decay=0.8,
    )
    length = TOKENS // DOCUMENTS
    batch = pack(
        (
            Sequence(
                i,
                False,
                torch.randint(0, VOCAB, (length + 1,)),
                torch.arange(length + 1) >= 2,
                torch.randn(length, LAYERS, HIDDEN),
            )
            for i in range(DOCUMENTS)
        ),
        steps=STEPS,
    )
    loss(replace(batch, last_states=torch.randn(TOKENS, HIDDEN))).loss.backward()
    return imported, sum(x.nbytes for x in (*loss.parameters(), *loss.buffers())), peak_of_resident_set()


def peak_of_resident_set() -> int:
    """Largest resident set of this process so far, in bytes. `getrusage` would start from the parent's."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(_measure()))
