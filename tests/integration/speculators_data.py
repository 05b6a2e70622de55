"""Speculators' own data set class and training step, in its environment: `python speculators_data.py FOLDER`.

`FOLDER/job.json` names the data set (`data`), its `train_data_ratio`, and the server (`endpoint`) that is asked for states that are
not there. What the class returns goes to `FOLDER/rows.safetensors`, as `SPLIT.NUMBER.NAME`. With `target` and `layer_ids`, the drafter that
`tests/benchmarks/peer_driver.py` puts together also takes two steps on the first batch; `FOLDER/losses.json` has the losses.
Imports nothing of Draftsmith.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.train.data import ArrowDataset
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from peer_driver import Peer

TOKENS_PER_STEP = 128


def data_set(job: dict[str, Any], split: str) -> ArrowDataset:
    endpoint = job.get("endpoint")
    asked = {"on_missing": "generate", "vllm_endpoint": endpoint} if endpoint else {"on_missing": "raise"}
    ratio = job["train_data_ratio"]
    return ArrowDataset(
        TOKENS_PER_STEP, job["data"], train_ratio=ratio, split=split, hidden_states_dtype=torch.float32, **asked
    )


def losses(job: dict[str, Any], rows: ArrowDataset) -> list[float]:
    frequencies = torch.load(Path(job["data"]) / "token_freq.pt", weights_only=True)
    d2t, t2d = build_vocab_mappings_from_distribution(frequencies, job["draft_vocab_size"], job["vocab_size"])
    last = rows[0]["verifier_last_hidden_states"]
    options = {
        "kind": "eagle3", "options": {}, "target": job["target"], "layer_ids": job["layer_ids"], "epochs": 1, "lr": 1e-3, "tokens_per_step": TOKENS_PER_STEP,
        "attention": "sdpa",
    }  # fmt: skip
    peer = Peer(options, {"d2t": d2t, "t2d": t2d, "last_states": last}, rows)
    batch = next(peer.batches(0))
    return [peer.step(batch, scheduled=False) for _ in range(2)]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    found = {}
    for split in ("train", "val") if job["train_data_ratio"] < 1 else ("train",):
        rows = data_set(job, split)
        for number in range(len(rows)):
            found |= {f"{split}.{number}.{name}": tensor.contiguous() for name, tensor in rows[number].items()}
    save_file(found, folder / "rows.safetensors")
    if "target" in job:
        (folder / "losses.json").write_text(json.dumps(losses(job, data_set(job, "train"))))
