"""Prompts with images go the whole way, with tiny targets that read images: files and data URLs become states that are transformers'
own for the same pixels, a drafter is trained on them, and vLLM serves it with images and proposes what the trained module proposes."""

import base64
import hashlib
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from draftsmith.config.loading import load_recipe
from draftsmith.convert.convert import run_convert
from draftsmith.extract.extract import run_extract
from draftsmith.serve.proposals import compare_proposals, record
from draftsmith.store.reader import Store
from draftsmith.target.reference_states import reference_model, states_of
from draftsmith.train.train import run_train
from tests.families import LAYERS
from tests.integration.conftest import load_drafter, write_recipe
from tests.integration.test_families import check_answers
from tests.seeing import save_image, save_seeing_target

pytestmark = pytest.mark.integration

RECORDER = Path(__file__).with_name("record_with_images.py")
ASKED = {"one": ["a"], "Which is larger?": ["b", "c"], "Describe the picture, please.": ["c"], "no picture": []}
"""The images of each prompt."""
HELD_OUT = {"held out with a picture": ["b"]}
SIZES = {"a": (30, 40), "b": (64, 33), "c": (80, 100)}


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="vLLM's models that see images need torchvision, which the CPU install leaves out",
)
@pytest.mark.parametrize(
    ("kind", "drafter"),
    [
        ("llava", {"kind": "eagle3", "draft_vocab_size": 128}),
        ("qwen2_5_vl", {"kind": "medusa"}),  # the model runner on CPUs gives an EAGLE-3 drafter M-RoPE's positions
    ],
    ids=["llava", "qwen2_5_vl"],
)
def test_images_go_the_whole_way(
    kind: str, drafter: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, run = tmp_path / "target", tmp_path / "run"
    save_seeing_target(target, kind)
    (tmp_path / "pictures").mkdir()
    files = {
        name: save_image(tmp_path / "pictures" / f"{name}.png", seed, *size)
        for seed, (name, size) in enumerate(SIZES.items())
    }
    path = write_recipe(
        tmp_path,
        target,
        [],
        [],
        engine={"max_model_len": 256, "kv_cache_gib": 0.25},
        extract={"max_tokens": 48, "max_num_seqs": 8, "layer_ids": [LAYERS, 1, 2]},
        train={"drafter": drafter, "epochs": 4, "tokens_per_step": 128, "ttt_steps": 2},
        evaluate={"k": [1, 2, 3], "acceptance_k": 3},
    )
    for name, asked in (("train", ASKED), ("held", HELD_OUT)):
        rows = [{"messages": [message(text, images, files)]} for text, images in asked.items()]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = load_recipe(path)
    run_extract(recipe, run, training_follows=True)

    store, prompts = Store(run / "store"), Prompts(target, files, ASKED | HELD_OUT)
    check_states(store, prompts)

    # The images count, not where they lie: the finished store is that of the same images elsewhere.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("recipe.yaml", "train.jsonl", "held.jsonl", "pictures"):
        shutil.move(tmp_path / name, elsewhere / name)
    files = {name: elsewhere / "pictures" / file.name for name, file in files.items()}
    manifest = (run / "store" / "manifest.json").read_bytes()
    run_extract(load_recipe(elsewhere / "recipe.yaml"), run)
    assert (run / "store" / "manifest.json").read_bytes() == manifest

    run_train(recipe, run)
    run_convert(recipe, run)
    monkeypatch.setenv("PYTEST_IMAGES", json.dumps([[str(files[name]) for name in names] for names in prompts.images]))

    (served,) = record(
        [(run / "vllm", drafter["kind"])], target, prompts.unexpanded, k=3, max_tokens=48, recorder=RECORDER
    )
    compared = compare_proposals(served, load_drafter(run, target), target, images_of=prompts.pixels)
    assert sum(compared) > 3 * 40
    check_answers(served.proposals, store)


def message(text: str, images: list[str], files: dict[str, Path]) -> dict[str, Any]:
    """A question as rows have it; the images are files of both kinds of parts, and data URLs."""
    parts: list[dict[str, Any]] = []
    for number, name in enumerate(images):
        if number:
            data = base64.b64encode(files[name].read_bytes()).decode()
            parts.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
        elif name == "a":
            parts.append({"type": "image_url", "image_url": {"url": f"pictures/{files[name].name}"}})
        else:
            parts.append({"type": "image", "image": f"pictures/{files[name].name}"})
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


class Prompts:
    """The prompts as transformers' processor makes them."""

    def __init__(self, target: Path, files: dict[str, Path], asked: dict[str, list[str]]) -> None:
        processor = AutoProcessor.from_pretrained(target)
        self.model = reference_model(target, torch.float32)
        self.images = list(asked.values())
        self.digests: list[tuple[str, ...]] = []
        self.unexpanded: list[list[int]] = []
        self._expanded: list[list[int]] = []
        self._inputs: list[dict[str, torch.Tensor]] = []
        for text, names in asked.items():
            parts = [*({"type": "image"} for _ in names), {"type": "text", "text": text}]
            rendered = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
            self.unexpanded.append(processor.tokenizer(rendered, add_special_tokens=False)["input_ids"])
            images = [Image.open(files[name]).convert("RGB") for name in names]
            inputs = dict(processor(text=[rendered], images=images or None, return_tensors="pt"))
            self._expanded.append(inputs.pop("input_ids")[0].tolist())
            inputs.pop("attention_mask")
            self._inputs.append(inputs if names else {})
            self.digests.append(tuple(hashlib.sha256(files[name].read_bytes()).hexdigest() for name in names))
        self.image_token = self.model.config.image_token_id

    def number(self, context: list[int]) -> int:
        """Which prompt a text begins with."""
        (found,) = (i for i, ids in enumerate(self._expanded) if context[: len(ids)] == ids)
        return found

    def pixels(self, context: list[int]) -> dict[str, torch.Tensor]:
        """What the model reads beside the tokens."""
        inputs = dict(self._inputs[self.number(context)])
        if inputs and self.model.config.model_type == "qwen2_5_vl":
            inputs["mm_token_type_ids"] = (torch.tensor([context]) == self.image_token).long()
        return inputs


def check_states(store: Store, prompts: Prompts) -> None:
    """The store has each prompt with its images' placeholders expanded as by transformers, their digests, and transformers' states."""
    seen = set()
    for sequence in store:
        ids = sequence.token_ids[: len(sequence.hidden_states)].long()
        number = prompts.number(ids.tolist())
        seen.add(number)
        assert sequence.images == prompts.digests[number]
        assert not sequence.loss_mask[sequence.token_ids == prompts.image_token].any()
        expected = states_of(prompts.model, ids, store.identity.layer_ids, prompts.pixels(ids.tolist()))
        limit = 1e-4 * expected.abs().amax(dim=(0, 2)).max().item()
        torch.testing.assert_close(sequence.hidden_states, expected, rtol=1e-4, atol=limit)
        if sequence.images:  # the states depend on the images
            blind = states_of(prompts.model, ids, store.identity.layer_ids)
            assert (sequence.hidden_states - blind).abs().max() > 100 * limit
    assert seen == set(range(len(prompts.unexpanded)))
