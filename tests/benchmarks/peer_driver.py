"""Trains a drafter of speculators on tensors handed over: `python peer_driver.py FOLDER`, in speculators' environment.

Imports nothing of Draftsmith. Model, loss, packing, optimizers and every option not named in `job.json` are speculators'
own defaults; the loop is that of its `Trainer.train_epoch`, which itself needs a GPU. What a CPU makes necessary: `sdpa` attention
(flex attention has no backward pass on a CPU) and the eager loss (the fused one needs Triton). Its bfloat16 autocast is taken with
`bfloat16`; states are float32 either way. What gives it its best: with `muon_float32`, Muon's Newton-Schulz products in float32.

FOLDER holds `job.json` and `data.safetensors` (see `peer_speculators.py`, which writes them). Without `steps`, trains
and leaves `epoch-N.safetensors`, `check.safetensors` and `figures.json`. With `steps`, waits for lines on standard input and
answers each with the seconds that one optimizer step on the first batch took. Either way it ends when that input does, so it does not
outlive the benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import shift_batch
from speculators.train.cli import create_transformer_layer_config, set_seed
from speculators.train.config import TrainConfig
from speculators.train.data import BaseDataset, CollateFn
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from speculators.train.optimizers import build_optimizers
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

MODELS = {
    "eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel", "dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel",
}  # fmt: skip
"""The class of each kind in `speculators.models.KIND.core`."""
SHIFTED = ("eagle3", "peagle")
"""Kinds that read each state with the token after it; it takes a token from each sequence."""


class HandedOver(BaseDataset):
    """The sequences of `data.safetensors`, in the form of speculators' own data sets."""

    def __init__(self, tensors: dict[str, torch.Tensor], max_len: int) -> None:
        self._tensors = tensors
        self._lengths = tensors["lengths"].tolist()
        self._ends = tensors["lengths"].cumsum(0).tolist()
        super().__init__(max_len, torch.float32)

    def __len__(self) -> int:
        return len(self._lengths)

    def _compute_approx_lengths(self) -> list[int]:
        return self._lengths

    def _get_raw_data(self, index: int) -> dict[str, torch.Tensor]:
        rows = slice(self._ends[index] - self._lengths[index], self._ends[index])
        names = {
            "hidden_states": "hidden_states",
            "input_ids": "token_ids",
            "verifier_last_hidden_states": "last_states",
            "loss_mask": "loss_mask",
        }
        return {theirs: self._tensors[ours][rows] for theirs, ours in names.items()}


class Peer:
    """Model, batches and optimizers, as speculators' command line would put them together."""

    def __init__(
        self, job: dict[str, Any], tensors: dict[str, torch.Tensor], dataset: BaseDataset | None = None
    ) -> None:
        self.kind = job["kind"]
        self.bfloat16 = job.get("bfloat16", False)
        options = {
            "speculator_type": self.kind,
            "verifier_name_or_path": job["target"],
            "target_layer_ids": job["layer_ids"],
            "draft_vocab_size": len(tensors["d2t"]),
            "total_seq_len": job["tokens_per_step"],
            "epochs": job["epochs"],
            "lr": job["lr"],  # Muon's too: its own default is this one
            "draft_attn_impl": job["attention"],
            "loss_implementation": "eager",
            "hidden_states_dtype": "float32",
            **job["options"],
        }
        flat = TrainConfig.from_flat(options).flatten()
        args = argparse.Namespace(**flat)
        set_seed(args.seed)
        layer = create_transformer_layer_config(
            args.verifier_name_or_path,
            args.num_layers,
            args.draft_arch,
            args.draft_hidden_act,
            args.sliding_window,
            args.full_attention_indices,
        )
        self.core = import_module(f"speculators.models.{self.kind}.core")
        self.model = getattr(self.core, MODELS[self.kind]).from_training_args(
            verifier_config=layer, t2d=tensors["t2d"], d2t=tensors["d2t"], **flat
        )
        self.model.train()
        self.call_arguments = self.model.get_trainer_kwargs(**flat)[0]
        dataset = dataset or HandedOver(tensors, args.total_seq_len)
        self.sampler = MultipackDistributedBatchSamplerV2(
            batch_max_length=args.total_seq_len, lengths=dataset.approx_lengths, num_replicas=1, rank=0, seed=args.seed
        )
        collate = CollateFn(
            args.total_seq_len,
            tensors["last_states"].shape[1],
            len(job["layer_ids"]),
            torch.float32,
            shift_batch if self.kind in SHIFTED else None,
        )
        self.loader = DataLoader(dataset, batch_sampler=self.sampler, collate_fn=collate)
        self.optimizers = build_optimizers(self.model, args)
        total = args.epochs * len(self.loader)
        self.schedules = [
            get_linear_schedule_with_warmup(one, num_warmup_steps=total // 100, num_training_steps=total)
            for one in self.optimizers
        ]

    def batches(self, epoch: int) -> Iterator[dict[str, Any]]:
        self.sampler.set_epoch(epoch)
        yield from self.loader

    def step(self, batch: dict[str, Any], *, scheduled: bool = True) -> float:
        """One optimizer step; the loss."""
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            _, loss, _ = self.model(**tensors, **self.call_arguments)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        if scheduled:
            for schedule in self.schedules:
                schedule.step()
        return float(loss.detach())

    def weights(self) -> dict[str, torch.Tensor]:
        """What it trained, with the head; not what it shares with the target. P-EAGLE trains the embedding too."""
        shared = ("verifier_", "d2t", "t2d", "rotary_emb")
        shared += () if self.model.embed_tokens.weight.requires_grad else ("embed_tokens",)
        return {
            name: value.contiguous() for name, value in self.model.state_dict().items() if not name.startswith(shared)
        }

    @torch.no_grad()
    def logits(self) -> dict[str, torch.Tensor]:
        """Its logits for the first sequence, true tokens read at every step: `logits` [N, draft vocabulary], with `rows` [N], the
        positions whose state is the last that is read, and `steps` [N], how many draft tokens come before."""
        heard: list[torch.Tensor] = []
        hook = self.model.lm_head.register_forward_hook(lambda module, inputs, output: heard.append(output[0]))
        told: dict[str, Any] = {}
        of_loss = self.core.compute_metrics

        def listen(*arguments: Any, **named: Any) -> Any:
            told.update(named, **({"logits": arguments[0]} if arguments else {}))
            return of_loss(*arguments, **named)

        if self.kind in ("dflash", "dspark"):
            backbone = import_module("speculators.models.dflash.core")
            choose = backbone.select_anchors

            def chosen(*arguments: Any) -> Any:
                told["anchors"], told["valid"] = choose(*arguments)
                return told["anchors"], told["valid"]

            backbone.select_anchors = chosen
        self.core.compute_metrics = listen
        collate = self.loader.collate_fn
        batch = collate([self.loader.dataset[0]])
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        self.model(**tensors, **self.call_arguments)
        hook.remove()
        length = int((tensors["document_ids"] == 0).sum())
        if self.kind == "eagle3":
            logits = torch.stack(heard)[:, :length]
            steps, rows = torch.meshgrid(torch.arange(len(heard)), torch.arange(length), indexing="ij")
        elif self.kind == "peagle":
            logits, rows, steps = told["logits"][0], told["anchor_pos"], told["depth"]
        else:
            size, first = self.model.block_size, 0 if self.model.config.sample_from_anchor else 1
            blocks = told["logits"][0].unflatten(0, (-1, size))[told["valid"], first:]
            logits = blocks[:64]  # enough of them
            anchors = told["anchors"][told["valid"]][:64]
            rows, steps = torch.meshgrid(anchors - 1, torch.arange(size - first), indexing="ij")
        logits, rows, steps = logits.reshape(rows.numel(), -1), rows.flatten(), steps.flatten()
        here = rows < length
        return {"logits": logits[here].contiguous(), "rows": rows[here].contiguous(), "steps": steps[here].contiguous()}

    def config(self) -> dict[str, Any]:
        """What of its config says how the weights are meant."""
        config = self.model.config
        if self.kind in SHIFTED:
            return {
                name: getattr(config, name)
                for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
            }
        names = ("enable_confidence_head", "confidence_head_with_markov") if self.kind == "dspark" else ()
        return {
            # A layer with a sliding window, longer than any text here, sees no later row of its block.
            "causal": not self.model.uses_full_attn and not self.model.sliding_window_non_causal,
            "sample_from_anchor": config.sample_from_anchor,
            **{name: getattr(config, name) for name in names},
        }


def muon_in_float32() -> None:
    """Replace the Newton-Schulz iteration of torch.optim.Muon by the same in the gradient's own dtype."""
    from torch.optim import _muon

    def orthogonalize(
        gradient: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
    ) -> torch.Tensor:
        a, b, c = coefficients
        x = gradient.T if gradient.shape[0] > gradient.shape[1] else gradient
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if gradient.shape[0] > gradient.shape[1] else x

    assert hasattr(_muon, "_zeropower_via_newtonschulz")  # else the patch would change nothing
    _muon._zeropower_via_newtonschulz = orthogonalize


def tokens_of(batch: dict[str, Any], *, shifted: bool) -> int:
    """Tokens handed over in a batch; shifting has taken one from each sequence."""
    documents = batch["document_ids"]
    return int((documents != -1).sum() + (documents.max() + 1 if shifted else 0))


def train(peer: Peer, job: dict[str, Any], folder: Path, seconds: float) -> None:
    """All epochs. `seconds`: what building the model took, which counts as training."""
    epochs, tokens = [], 0
    for epoch in range(job["epochs"]):
        begun = time.perf_counter()
        losses = []
        for batch in peer.batches(epoch):
            losses.append(peer.step(batch))
            tokens += tokens_of(batch, shifted=peer.kind in SHIFTED)
        seconds += time.perf_counter() - begun
        epochs.append({"loss": sum(losses) / len(losses), "steps": len(losses), "tokens": tokens, "seconds": seconds})
        save_file(peer.weights(), folder / f"epoch-{epoch + 1}.safetensors")
        print(f"speculators, epoch {epoch + 1}: {json.dumps(epochs[-1])}", flush=True)
    save_file(peer.logits(), folder / "check.safetensors")
    temporary = folder / "figures.json.tmp"
    temporary.write_text(json.dumps({"epochs": epochs, "config": peer.config()}))
    temporary.replace(folder / "figures.json")


def answer_lines(peer: Peer) -> None:
    """One step for each line on standard input, on the same batch: only the clock matters."""
    (batch, *_) = peer.batches(0)
    peer.step(batch, scheduled=False)
    print("ready", flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        peer.step(batch, scheduled=False)
        print(time.perf_counter() - begun, flush=True)


def end_with_input() -> None:
    """End this process as soon as standard input ends: whoever started it is gone."""

    def wait() -> None:
        while os.read(
            sys.stdin.fileno(), 1
        ):  # a reader of `sys.stdin` would hold a lock that the interpreter's end needs
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(job["threads"])
    if job["muon_float32"]:
        muon_in_float32()
    tensors = load_file(folder / "data.safetensors")
    begun = time.perf_counter()
    peer = Peer(job, tensors)
    building = time.perf_counter() - begun
    if "steps" in sys.argv[2:]:
        answer_lines(peer)
    else:
        end_with_input()
        train(peer, job, folder, building)


if __name__ == "__main__":
    main()
