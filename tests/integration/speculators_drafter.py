"""Speculators' own EAGLE-3 class, in its environment: `python speculators_drafter.py make|load FOLDER...`.

`make` builds a drafter with random weights as `FOLDER/job.json` says and saves it to `FOLDER/made` as speculators saves
drafters; `load` opens `FOLDER/converted`. Either writes its logits for `FOLDER/inputs.safetensors`, at every chain step with
true tokens, to `FOLDER/make.safetensors` or `load.safetensors`: [steps, rows, draft vocabulary]. Imports nothing of Draftsmith.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig


def make(folder: Path) -> Eagle3DraftModel:
    job = json.loads((folder / "job.json").read_text())
    layer = LlamaConfig(**job["layer"])
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=job["target"], architectures=["LlamaForCausalLM"]),
        ),
        **job["options"],
    )
    model = Eagle3DraftModel(config)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.3)
        if "norm" in name:
            parameter.data.add_(1)
    if model.d2t is not None:
        ids = torch.randperm(len(model.t2d))[: len(model.d2t)].sort().values
        model.t2d[ids] = True
        model.d2t.copy_(ids - torch.arange(len(ids)))
    model.save_pretrained(folder / "made")
    return model


def load(folder: Path) -> Eagle3DraftModel:
    config = Eagle3SpeculatorConfig.from_pretrained(folder / "converted")
    config.transformer_layer_config._attn_implementation = "eager"
    return Eagle3DraftModel.from_pretrained(folder / "converted", config=config)


def write_logits(model: Eagle3DraftModel, folder: Path, out: Path) -> None:
    inputs = load_file(folder / "inputs.safetensors")
    ids, states = inputs["token_ids"], inputs["hidden_states"]
    heard: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, arguments, output: heard.append(output[0]))
    rows = len(states)
    with torch.no_grad():
        model(
            hidden_states=states.flatten(1)[None], input_ids=ids[None, 1 : rows + 1],
            document_ids=torch.zeros(1, rows, dtype=torch.long), ttt_steps=3,
        )  # fmt: skip
    save_file({"logits": torch.stack(heard).contiguous()}, out)


if __name__ == "__main__":
    for folder in map(Path, sys.argv[2:]):
        model = {"make": make, "load": load}[sys.argv[1]](folder).float().eval()
        write_logits(model, folder, folder / f"{sys.argv[1]}.safetensors")
