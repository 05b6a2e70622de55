"""Speculators' own classes, in its environment: `python speculators_drafter.py make|load|weigh FOLDER...`.

`make` builds a drafter with random weights as `FOLDER/job.json` says and saves it to `FOLDER/made` as speculators saves
drafters; `load` opens `FOLDER/converted`. Either writes its logits for `FOLDER/inputs.safetensors` to `FOLDER/make.safetensors` or
`load.safetensors`, all with true tokens:

- EAGLE-3: of every chain step, [steps, rows, draft vocabulary];
- P-EAGLE: of every depth, with the rows whose tokens would be beyond the text as zeros, [depths, rows, draft vocabulary];
- DFlash, DSpark: of the blocks at `anchors`, [blocks, rows of a block, draft vocabulary].

`weigh` writes D-PACE's weights of draft tokens to `weigh.safetensors`, [blocks, rows of a block], for the smoothing in `FOLDER/job.json` and the
cross-entropies and masks in `inputs.safetensors`.

Layers are as the job says them or, with its `window`, those that speculators' trainer makes by default, with that window.

Only the sampling of what is trained on is replaced, to have all of it. Imports nothing of Draftsmith.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import dpace_loss_decay
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash import core as dflash
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.dspark import core as dspark
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.models.peagle import core as peagle
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.cli import create_transformer_layer_config
from speculators.train.config.schema import TrainConfig
from transformers import LlamaConfig, Qwen3Config

CLASSES: dict[str, tuple[Any, Any, Any]] = {
    "eagle3": (Eagle3DraftModel, Eagle3SpeculatorConfig, LlamaConfig),
    "peagle": (PEagleDraftModel, PEagleSpeculatorConfig, LlamaConfig),
    "dflash": (DFlashDraftModel, DFlashSpeculatorConfig, Qwen3Config),
    "dspark": (DSparkDraftModel, DSparkSpeculatorConfig, Qwen3Config),
}


def job_of(folder: Path) -> tuple[str, dict[str, Any]]:
    job = json.loads((folder / "job.json").read_text())
    return job.get("kind", "eagle3"), job


def trained_by_default(kind: str, job: dict[str, Any]) -> Any:
    defaults = TrainConfig.from_flat({"speculator_type": kind, "verifier_name_or_path": job["target"]}).draft
    layers = job["layer"]["num_hidden_layers"]
    return create_transformer_layer_config(
        job["target"], layers, defaults.draft_arch, None, job["window"], defaults.full_attention_indices
    )


def make(folder: Path) -> Any:
    kind, job = job_of(folder)
    model_class, config_class, layer_class = CLASSES[kind]
    layer = trained_by_default(kind, job) if job.get("window") else layer_class(**job["layer"])
    layer._attn_implementation = "eager"
    config = config_class(
        transformer_layer_config=layer,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=job.get("tokens", 3))],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=job["target"], architectures=["LlamaForCausalLM"]),
        ),
        **job["options"],
    )
    model = model_class(config)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.3)
        if "norm" in name:
            parameter.data.add_(1)
    if model.d2t is not None:
        ids = torch.randperm(len(model.t2d))[: len(model.d2t)].sort().values
        model.t2d[ids] = True
        model.d2t.copy_(ids - torch.arange(len(ids)))
    if kind in ("dflash", "dspark"):  # these always take the target's
        model.load_verifier_weights()
    model.save_pretrained(folder / "made")
    return model


def load(folder: Path) -> Any:
    model_class, config_class, _ = CLASSES[job_of(folder)[0]]
    config = config_class.from_pretrained(folder / "converted")
    config.transformer_layer_config._attn_implementation = "eager"
    return model_class.from_pretrained(folder / "converted", config=config)


def write_logits(model: Any, folder: Path, out: Path) -> None:
    kind, job = job_of(folder)
    inputs = load_file(folder / "inputs.safetensors")
    with torch.no_grad():
        logits = {"eagle3": _of_chain, "peagle": _of_depths}.get(kind, _of_blocks)(model, inputs, job)
    save_file({"logits": logits.contiguous()}, out)


def _of_chain(model: Any, inputs: dict[str, torch.Tensor], job: dict[str, Any]) -> torch.Tensor:
    ids, states = inputs["token_ids"], inputs["hidden_states"]
    heard: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, arguments, output: heard.append(output[0]))
    rows = len(states)
    model(
        hidden_states=states.flatten(1)[None],
        input_ids=ids[None, 1 : rows + 1],
        document_ids=torch.zeros(1, rows, dtype=torch.long),
        ttt_steps=3,
    )
    return torch.stack(heard)


def _of_depths(model: Any, inputs: dict[str, torch.Tensor], job: dict[str, Any]) -> torch.Tensor:
    ids, states, depths = inputs["token_ids"], inputs["hidden_states"], job["tokens"]
    rows = len(states)
    anchors = torch.cat([torch.arange(rows - depth) for depth in range(depths)])
    depth_of = torch.cat([torch.full((rows - depth,), depth) for depth in range(depths)])
    heard: list[torch.Tensor] = []

    def metrics(*, logits: torch.Tensor, **others: Any) -> tuple[None, None]:
        heard.append(logits[0])
        return None, None

    peagle.generate_cod_sample_indices = lambda **options: (anchors, depth_of)
    peagle.compute_metrics = metrics
    model(
        hidden_states=states.flatten(1)[None],
        input_ids=ids[None, 1 : rows + 1],
        document_ids=torch.zeros(1, rows, dtype=torch.long),
        verifier_last_hidden_states=torch.zeros(1, rows, states.shape[-1]),
    )
    found = heard[0].new_zeros(depths, rows, heard[0].shape[-1])
    found[depth_of, anchors] = heard[0]
    return found


def _of_blocks(model: Any, inputs: dict[str, torch.Tensor], job: dict[str, Any]) -> torch.Tensor:
    ids, states, anchors = inputs["token_ids"], inputs["hidden_states"], inputs["anchors"]
    rows = len(states)
    mask = torch.zeros(1, rows)
    mask[0, anchors] = 1  # the anchors are drawn from these, all of them
    heard: list[torch.Tensor] = []

    def metrics(logits: torch.Tensor, *others: Any, **options: Any) -> tuple[None, None]:
        heard.append(logits[0])
        return None, None

    dflash.compute_metrics = dspark.compute_metrics = metrics
    model(
        hidden_states=states.flatten(1)[None],
        input_ids=ids[None, :rows],
        loss_mask=mask,
        verifier_last_hidden_states=torch.zeros(1, rows, states.shape[-1]),
        document_ids=torch.zeros(1, rows, dtype=torch.long),
        max_anchors=len(anchors),
    )
    return heard[0].unflatten(0, (len(anchors), -1))


def weigh(folder: Path) -> None:
    inputs, job = load_file(folder / "inputs.safetensors"), json.loads((folder / "job.json").read_text())
    rows = inputs["mask"].shape[1]
    weights = dpace_loss_decay(
        torch.arange(inputs["mask"].numel())[None] % rows,
        loss_mask=inputs["mask"].view(1, -1),
        block_size=rows,
        dpace_alpha=job["alpha"],
        elementwise_loss=inputs["cross_entropy"].view(1, -1),
    )
    save_file({"weights": weights.view(-1, rows).contiguous()}, folder / "weigh.safetensors")


if __name__ == "__main__":
    for folder in map(Path, sys.argv[2:]):
        if sys.argv[1] == "weigh":
            weigh(folder)
            continue
        model = {"make": make, "load": load}[sys.argv[1]](folder).float().eval()
        write_logits(model, folder, folder / f"{sys.argv[1]}.safetensors")
