"""What a conversion costs beside a copy: an EAGLE-3 drafter of 4.6 GB, from vLLM's layout to speculators'.

What limits both is the disk. Copy and conversion take turns; each ends when its bytes are on the disk. Memory is measured in a
process of its own: the peak of its resident set less what the imports took, less the largest tensor.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.figures import Figure, figure

ROUNDS = 5
HIDDEN, INNER, VOCAB = 4096, 14336, 100_000


def convert_costs() -> dict[str, Figure]:
    """`convert.copy_time_ratio` and `convert.extra_memory_bytes`."""
    from draftsmith.convert.convert import convert_checkpoint

    with tempfile.TemporaryDirectory(dir="runs/bench") as folder:
        root = Path(folder)
        largest = _checkpoint(root / "source")
        size = (root / "source" / "model.safetensors").stat().st_size
        copies, conversions = [], []
        for turn in range(ROUNDS):
            for taker in ("copy", "convert") if turn % 2 == 0 else ("convert", "copy"):
                out = root / "out"
                begun = time.perf_counter()
                if taker == "copy":
                    _copy(root / "source", out)
                    copies.append(time.perf_counter() - begun)
                else:
                    convert_checkpoint(root / "source", out, to="speculators")
                    conversions.append(time.perf_counter() - begun)
                shutil.rmtree(out)
        command = [sys.executable, "-m", __name__, str(root / "source"), str(root / "out")]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        imported, peak = json.loads(done.stdout)
    ratios = [ours / theirs for ours, theirs in zip(conversions, copies, strict=True)]
    extra = peak - imported - largest
    return {
        "convert.copy_time_ratio": figure(
            ratios, "ratio", f"copying its {size / 1e9:.1f} GB, {statistics.median(copies):.1f} s",
            direction="lower", bar=1.3,
        ),
        "convert.extra_memory_bytes": figure(
            [extra], "bytes", f"the largest tensor, {largest / 1e9:.1f} GB; peak {(peak - imported) / 1e9:.2f} GB",
            direction="lower", bar=1e9,
        ),
    }  # fmt: skip


def _checkpoint(directory: Path) -> int:
    """Write the checkpoint; returns the bytes of its largest tensor."""
    import torch

    from draftsmith.convert.formats import FORMATS
    from draftsmith.drafters.checkpoint import EMBEDDING, UNKNOWN_TARGET, Checkpoint
    from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
    from draftsmith.run.weights import Weight

    config = Eagle3Config(
        layer_ids=(2, 16, 29),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        norm_before_residual=False,
        fc_norm=False,
        norm_output=False,
    )
    shapes = {**Eagle3Drafter.shapes(config), EMBEDDING: (VOCAB, HIDDEN)}
    weights = {name: Weight.of(torch.randn(shape)) for name, shape in shapes.items()}
    directory.mkdir()
    checkpoint = Checkpoint("eagle3", config.to_dict(), UNKNOWN_TARGET, torch.arange(VOCAB), weights)
    FORMATS["vllm"].write(checkpoint.check(), directory)
    return max(weight.bytes for weight in weights.values())


def _copy(source: Path, out: Path) -> None:
    out.mkdir()
    for file in source.iterdir():
        with file.open("rb") as opened, (out / file.name).open("wb") as written:
            left, start = file.stat().st_size, 0
            while start < left:
                start += os.sendfile(written.fileno(), opened.fileno(), start, left - start)
            os.fsync(written.fileno())


def _measure(source: Path, out: Path) -> tuple[int, int]:
    """In the process that is measured: bytes resident after the imports, and the peak."""
    from draftsmith.convert.convert import convert_checkpoint
    from tests.benchmarks.bench_memory import peak_of_resident_set

    imported = peak_of_resident_set()
    convert_checkpoint(source, out, to="speculators")
    return imported, peak_of_resident_set()


if __name__ == "__main__":
    print(json.dumps(_measure(Path(sys.argv[1]), Path(sys.argv[2]))))
