"""What the integration tests share: the real target, and prompts for it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from draftsmith.config.loading import load_recipe
from draftsmith.config.recipe import Recipe
from draftsmith.convert.convert import run_convert
from draftsmith.drafters import drafter_class
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.extract.extract import run_extract
from draftsmith.store.reader import Store
from draftsmith.target.prepare import prepare_target
from draftsmith.target.tensors import load_target_tensors
from draftsmith.train.train import run_train
from tests.families import save_tokenizer

FAKE_KERNELS = Path(__file__).with_name("record_with_fake_kernels.py")
_ROOT = Path(__file__).parents[2]


@pytest.fixture
def every_core() -> Iterator[None]:
    """The machine's cores for a test that needs several, where tests have a part of them each."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    part = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    yield
    os.sched_setaffinity(0, part)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in float32, the demo's target, as a Hugging Face directory."""
    return prepare_target(load_recipe(_ROOT / "recipes" / "demo.yaml").target)


TINY_HIDDEN, TINY_LAYERS, TINY_HEADS, TINY_VOCAB = 64, 3, 2, 320


def make_target(directory: Path) -> None:
    """A random Llama, tiny, with a tokenizer of single bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=TINY_HIDDEN,
        intermediate_size=128,
        num_hidden_layers=TINY_LAYERS,
        num_attention_heads=TINY_HEADS,
        num_key_value_heads=TINY_HEADS,
        head_dim=32,
        vocab_size=TINY_VOCAB,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=256,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory)


def make_mtp_target(directory: Path) -> None:
    """A random model of MiMo's kind, tiny: Qwen2 with one layer that guesses one token more (multi-token prediction).

    No model with such layers is small enough for tests, so the weights are random and few guesses are right.
    """
    make_target(directory)  # for its tokenizer
    torch.manual_seed(1)
    hidden = 64
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=TINY_VOCAB,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=256,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    block = {name: value for name, value in weights.items() if name.startswith("model.layers.1.")}
    mtp = {name.replace("model.layers.1.", "model.mtp_layers.0."): value.clone() for name, value in block.items()}
    mtp |= {f"model.mtp_layers.0.{name}_layernorm.weight": torch.ones(hidden) for name in ("token", "hidden", "final")}
    mtp["model.mtp_layers.0.input_proj.weight"] = torch.randn(hidden, 2 * hidden) / 8
    save_file(weights | mtp, directory / "model.safetensors", {"format": "pt"})
    written = json.loads((directory / "config.json").read_text())
    written |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(written))


def train_drafters(
    target: Path, folder: Path, drafters: dict[str, dict[str, Any]], *, prompt: str, temperature: float
) -> dict[str, Path]:
    """Drafters for a tiny target, as vLLM loads them: by name, their options, and returned their run directories.

    A random target's drafter guesses something right only where it has learned answers to the very prompt.
    """
    runs = {}
    for name, options in drafters.items():
        recipe = load_recipe(
            write_recipe(
                folder,
                target,
                [prompt],
                ["Name three rivers."],
                extract={"backend": "transformers", "max_tokens": 32, "temperature": temperature, "samples": 64},
                train={"drafter": options, "epochs": 2, "tokens_per_step": 256, "ttt_steps": 2, "precision": "float32"},
                evaluate={"k": [1, 2, 3], "acceptance_k": 3},
            )
        )
        run_extract(recipe, folder / "run")
        runs[name] = folder / name
        runs[name].mkdir()
        (runs[name] / "store").symlink_to(folder / "run" / "store")
        run_train(recipe, runs[name])
        run_convert(recipe, runs[name])
    return runs


def load_drafter(run_dir: Path, target: Path) -> Drafter:
    """A run's drafter, as trained."""
    checkpoint = Checkpoint.load(run_dir / "checkpoint")
    kind = drafter_class(checkpoint.kind)
    config = kind.config_class.from_dict(checkpoint.config)
    drafter = kind.from_target(config, load_target_tensors(target), checkpoint.draft_token_ids)
    drafter.load_state_dict(checkpoint.tensors)
    return drafter.eval()


def demo_prompts(count: int) -> list[str]:
    """The first training prompts of the demo."""
    lines = (_ROOT / "recipes" / "prompts" / "demo-train.jsonl").read_text().splitlines()[:count]
    return [json.loads(line)["prompt"] for line in lines]


def reference_states(model: LlamaForCausalLM, token_ids: torch.Tensor, layer_ids: tuple[int, ...]) -> torch.Tensor:
    """transformers' own residual stream [tokens, layers, hidden] in vLLM's layer numbering.

    `output_hidden_states` gives what enters each layer, but its last entry is normed already: the last layer's own
    output is caught by a hook.
    """
    caught = []
    hook = model.model.layers[-1].register_forward_hook(lambda module, inputs, output: caught.append(output))
    with torch.no_grad():
        entering = model(token_ids[None].long(), output_hidden_states=True).hidden_states
    hook.remove()
    last = caught[0][0] if isinstance(caught[0], tuple) else caught[0]
    states = [last.reshape(entering[0].shape) if i == len(model.model.layers) else entering[i] for i in layer_ids]
    return torch.stack([state[0] for state in states], dim=1)


def write_recipe(folder: Path, target: Path, prompts: list[str], held_out: list[str], **sections: dict) -> Path:
    """A recipe file with its prompt files beside it; `sections` are merged over small defaults."""
    for name, texts in (("train", prompts), ("held", held_out)):
        rows = [json.dumps({"id": f"{name}-{i}", "prompt": text}) for i, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    recipe = {
        "name": "test",
        "target": {"model": str(target), "dtype": "float32"},
        "engine": {"max_model_len": 512, "kv_cache_gib": 0.5},
        "extract": {"prompts": {"path": "train.jsonl"}, "held_out": {"path": "held.jsonl"}, "max_tokens": 24, "max_num_seqs": 16},
    }  # fmt: skip
    for name, values in sections.items():
        recipe[name] = {**recipe.get(name, {}), **values}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def recipe_from(path: Path) -> Recipe:
    return load_recipe(path)


@pytest.fixture(scope="session")
def whole(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A recipe, and a run directory with the store that one engine made of it, never interrupted: 15 sequences."""
    return extract_conversations(tmp_path_factory.mktemp("whole"), smollm2, samples=2)


def extract_conversations(folder: Path, target: Path, *, samples: int, **extract: Any) -> tuple[Path, Path]:
    """The same for any target, with so many samples of seven conversations.

    They have one to three user turns, answered turn by turn; some answers are ended by a text.
    """
    path = write_recipe(
        folder,
        target,
        ["unused"],
        ["Hello there"],
        extract={
            "turns": "all",
            "temperature": 0.8,
            "top_p": 0.9,
            "samples": samples,
            "stop": [".", "!"],
            "max_tokens": 12,
            "max_num_seqs": 2,
            "shard_tokens": 64,
            **extract,
        },
    )
    prompts = demo_prompts(12)
    rows = []
    for number in range(7):
        turns = [{"role": "user", "content": prompt} for prompt in prompts[number : number + 1 + number % 3]]
        talk = [message for turn in turns for message in (turn, {"role": "assistant", "content": "not used"})]
        rows.append(json.dumps({"messages": talk[:-1]}))
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    run_extract(load_recipe(path), folder / "run")
    return path, folder / "run"


def check_same(directory: Path, expected: Path) -> None:
    """Two stores hold the same sequences, each once, with the same tokens and states."""
    ours, reference = Store(directory), Store(expected)
    assert len(ours) == ours.counts["sequences"] == len(reference)
    for a, b in zip(ours, reference, strict=True):
        assert (a.sample_id, a.held_out) == (b.sample_id, b.held_out)
        assert torch.equal(a.token_ids, b.token_ids)
        assert torch.equal(a.loss_mask, b.loss_mask)
        # Batches differ between the runs, so sums are taken in another order.
        torch.testing.assert_close(a.hidden_states, b.hidden_states, rtol=1e-3, atol=1e-3)
