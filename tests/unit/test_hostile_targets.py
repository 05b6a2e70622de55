"""Target folders that are damaged, odd or not language models: each works as it should, or ends in one paragraph that says what is
wrong and where."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, MambaConfig, T5Config

from draftsmith.config.drafters import KINDS
from draftsmith.drafters import drafter_class, layer_ids_to_read
from draftsmith.run.errors import UserError
from draftsmith.target.info import describe_target
from draftsmith.target.tensors import TargetTensors, load_target_tensors
from tests.families import FAMILIES, HIDDEN, LAYERS, VOCAB, change_config

Damage = Callable[[Path], Any]
LONGEST = 900
"""Characters of a message: a paragraph, not a page."""


def read_all(folder: Path) -> TargetTensors:
    """Everything that training takes from a target, up to the shapes of a drafter of each kind."""
    target = describe_target(folder)
    tensors = load_target_tensors(folder)
    for kind, options in KINDS.items():
        drafter, chosen = drafter_class(kind), options()
        saved = (2, target.num_hidden_layers)
        ids = layer_ids_to_read(chosen, target, saved, where="the store")
        drafter.shapes(drafter.make_config(chosen, target, ids, target.vocab_size))
    return tensors


def named(name: str) -> Damage:
    """Another family's folder."""
    return next(each for each in FAMILIES if each.name == name).save


def config(**fields: Any) -> Damage:
    return lambda folder: change_config(folder, **fields)


def written(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def removed(*names: str) -> Damage:
    return lambda folder: [(folder / name).unlink() for name in names]


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    """The weights after `change`, which returns them or alters them in place."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights = change(weights) or weights
        save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")

    return damage


def without(*names: str) -> Damage:
    return tensors(lambda weights: {name: value for name, value in weights.items() if name not in names})


def with_value(name: str, value: float) -> Damage:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[name].view(-1)[-1] = value

    return tensors(change)


def replaced(name: str, by: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return tensors(lambda weights: weights | {name: by(weights[name])})


def cut(name: str, keep: float) -> Damage:
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])

    return damage


def sharded(change: Callable[[dict[str, Any], Path], Any]) -> Damage:
    """Two shards with an index, which `change` alters."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(weights)
        files = {name: f"model-{1 + 2 * i // len(names):05}-of-00002.safetensors" for i, name in enumerate(names)}
        for file in sorted({*files.values()}):
            save_file({name: weights[name] for name in names if files[name] == file}, folder / file)
        index: dict[str, Any] = {"weight_map": files}
        index = change(index, folder) or index
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return damage


def other_model(made: Any) -> Damage:
    return lambda folder: made.save_pretrained(folder)


def another_language_model(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return weights | {name.replace("model.", "draft.", 1): value.clone() for name, value in weights.items()}


def remote_code(folder: Path) -> None:
    (folder / "configuration_mine.py").write_text("raise SystemExit('code of the target ran')\n")
    change_config(folder, model_type="mine", auto_map={"AutoConfig": "configuration_mine.MineConfig"})


EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"

REFUSED: dict[str, tuple[Damage, str]] = {
    # config.json
    "no config": (removed("config.json"), r"no config\.json"),
    "empty config": (written("config.json", ""), r"config\.json is not JSON"),
    "truncated config": (cut("config.json", 0.5), r"config\.json is not JSON"),
    "config is a list": (written("config.json", "[]"), "holds a list"),
    "config is bytes": (written("config.json", b"\xff\xfe\x00\x01"), r"config\.json is not JSON"),
    "config is nested a thousand times": (written("config.json", "[" * 100_000), r"config\.json is not JSON"),
    "config is a folder": (
        lambda folder: [removed("config.json")(folder), (folder / "config.json").mkdir()], r"config\.json is not JSON",
    ),
    "unknown type": (config(model_type="not_a_model"), "is of the type `not_a_model`, which transformers .* does not know"),
    "no type": (config(model_type=None, architectures=None), "Cannot read the target's config"),
    "type is a number": (config(model_type=7), "is of the type `7`, which transformers .* does not know"),
    "remote code": (remote_code, r"comes with Python code of its own.*target\.trust_remote_code"),
    "hidden size is text": (config(hidden_size="wide"), "Cannot read the target's config.*hidden_size"),
    "hidden size is 0": (config(hidden_size=0), "hidden_size"),
    "hidden size is missing": (config(hidden_size=None), r"is \[320, 64\], and the target's config says"),
    "hidden size is negative": (config(hidden_size=-64), "hidden_size"),
    "vocabulary is 0": (config(vocab_size=0), "`vocab_size` is '?0"),
    "vocabulary is another": (config(vocab_size=VOCAB + 1), r"is \[320, 64\], and the target's config says \[321, 64\]"),
    "no layers": (config(num_hidden_layers=0), "`num_hidden_layers` is '?0"),
    "more layers than in the files": (config(num_hidden_layers=LAYERS + 1), "must have one tensor"),
    "no heads": (config(num_attention_heads=0), "num_attention_heads|Cannot read"),
    "heads do not divide": (config(num_attention_heads=5), "Cannot read the target's config"),
    "no epsilon": (config(rms_norm_eps=0.0), "`rms_norm_eps`"),
    "negative epsilon": (config(rms_norm_eps=-1e-6), "`rms_norm_eps`"),
    "epsilon is text": (config(rms_norm_eps="small"), "Cannot read the target's config.*rms_norm_eps"),
    "theta is text": (config(rope_theta="large", rope_parameters=None), "rope_theta|Cannot read"),
    "theta is negative": (config(rope_parameters={"rope_type": "default", "rope_theta": -1.0}), "`rope_theta`"),
    "RoPE is a list": (config(rope_parameters=[1, 2]), "Cannot read the target's config"),
    "an encoder and a decoder": (other_model(T5Config(d_model=64, num_layers=2)), "reads its prompt with an encoder"),
    "an encoder": (other_model(BertConfig(hidden_size=64, num_hidden_layers=2)), "does not know targets of the type `bert`"),
    "no attention": (other_model(MambaConfig(hidden_size=64, num_hidden_layers=2)), "mamba"),
    "logits divided by 0": (
        lambda folder: [named("Granite")(folder), change_config(folder, logits_scaling=0.0)], "`logits_scaling`",
    ),
    "negative soft cap": (
        lambda folder: [named("Gemma 2")(folder), change_config(folder, final_logit_softcapping=-2.0)],
        "`final_logit_softcapping`",
    ),
    # tensors
    "no weights": (removed("model.safetensors"), r"no model\.safetensors"),
    "a dangling link": (
        lambda folder: [removed("model.safetensors")(folder), (folder / "model.safetensors").symlink_to("gone")],
        r"no model\.safetensors",
    ),
    "safetensors under another name": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), r"pytorch_model\.bin holds more than tensors",
    ),
    "empty weights": (written("model.safetensors", b""), r"model\.safetensors is damaged"),
    "weights are text": (written("model.safetensors", "version https://git-lfs"), r"model\.safetensors is damaged"),
    "truncated weights": (cut("model.safetensors", 0.9), "is damaged"),
    "truncated header": (cut("model.safetensors", 0.001), "is damaged"),
    "header of a petabyte": (written("model.safetensors", b"\xff" * 7 + b"\x00{}"), "is damaged"),
    "unknown dtype": (
        written("model.safetensors", b'\x4d\x00\x00\x00\x00\x00\x00\x00{"lm_head.weight":{"dtype":"F37","shape":[1],"data_offsets":[0,4]}}     1234'),
        "is damaged",
    ),
    "no embedding": (without(EMBEDDING), r"one tensor named \*embed_tokens\.weight"),
    "no head": (without(HEAD), r"must have one tensor lm_head\.weight"),
    "no norm": (without(NORM), r"has no tensor model\.norm\.weight"),
    "two language models": (tensors(another_language_model), r"draft\.embed_tokens\.weight"),
    "NaN in the embedding": (with_value(EMBEDDING, float("nan")), "embed_tokens.*not finite"),
    "infinity in the head": (with_value(HEAD, float("inf")), "lm_head.*not finite"),
    "NaN in the norm": (with_value(NORM, float("nan")), r"model\.norm.*not finite"),
    "embedding in 8 bits": (replaced(EMBEDDING, lambda value: value.to(torch.int8)), "embed_tokens.*torch.int8"),
    "head in FP8": (replaced(HEAD, lambda value: value.to(torch.float8_e4m3fn)), "lm_head.*float8"),
    "packed embedding": (
        tensors(lambda w: {("model.embed_tokens.qweight" if name == EMBEDDING else name): value for name, value in w.items()}),
        r"embed_tokens\.weight in .* is quantized in a way",
    ),
    "transposed embedding": (replaced(EMBEDDING, lambda value: value.T), r"is \[64, 320\]"),
    "narrow head": (replaced(HEAD, lambda value: value[:, :32]), r"is \[320, 32\]"),
    "long norm": (replaced(NORM, lambda value: value.repeat(2)), r"is \[128\]"),
    "norm is a number": (replaced(NORM, lambda value: value.sum()), r"is \[\]"),
    "head with a bias": (tensors(lambda weights: weights | {"lm_head.bias": torch.ones(VOCAB)}), "has a bias"),
    # shards
    "missing shard": (
        sharded(lambda index, folder: (folder / "model-00001-of-00002.safetensors").unlink()), "00001-of-00002",
    ),
    "truncated shard": (
        sharded(lambda index, folder: [cut(f"model-0000{i}-of-00002.safetensors", 0.9)(folder) for i in (1, 2)] and None),
        "is damaged",
    ),
    "index without a map": (sharded(lambda index, folder: {"metadata": {}}), "does not map tensors to files beside it"),
    "index maps to numbers": (sharded(lambda index, folder: {"weight_map": {EMBEDDING: 1}}), "does not map tensors to files beside it"),
    "index leads out of the folder": (
        sharded(lambda index, folder: {"weight_map": {EMBEDDING: "../../secret.safetensors"}}), "does not map tensors to files beside it",
    ),
    "index is a list": (sharded(lambda index, folder: [1, 2]), "does not map tensors to files beside it"),
    "index names the wrong shard": (
        sharded(lambda index, folder: {"weight_map": dict.fromkeys(index["weight_map"], "model-00002-of-00002.safetensors")}),
        "is damaged",
    ),
    # tokenizer
    "no tokenizer": (removed("tokenizer.json"), "has no tokenizer"),
    "tokenizer's config is not JSON": (
        lambda folder: [
            (folder / "chat_template.jinja").unlink(missing_ok=True), written("tokenizer_config.json", "{")(folder),
        ],
        r"tokenizer_config\.json is not JSON",
    ),
    "template is not text": (written("chat_template.jinja", b"\xff\xfe{{"), "not text in UTF-8"),
}  # fmt: skip

WORKS: dict[str, Damage] = {
    "as saved": lambda folder: None,
    "no theta": config(rope_parameters=None, rope_theta=None),
    "old spelling of RoPE": config(rope_parameters=None, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}),
    "unknown type of RoPE": config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
    "RoPE in pieces": config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
    "unknown keys": config(favorite_color="blue", quantization_note=[1, {"a": None}]),
    "tied, and no head in the file": lambda folder: [
        without(HEAD)(folder), change_config(folder, tie_word_embeddings=True),
    ],
    "in bfloat16": tensors(lambda weights: {name: value.bfloat16() for name, value in weights.items()}),
    "in float16": tensors(lambda weights: {name: value.half() for name, value in weights.items()}),
    "shards": sharded(lambda index, folder: None),
    "another template's file": written("chat_template.jinja", "{{ messages }}"),
    "a model beside its own draft layers": tensors(
        lambda weights: weights | {"mtp.embed_tokens.weight": weights[EMBEDDING] + 1, "mtp.norm.weight": weights[NORM] + 1}
    ),
    "files of other programs": written("consolidated.00.pth", b"not read"),
    "long": config(max_position_embeddings=1 << 24),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "target"
    named("Llama")(path)
    return path


def test_there_are_enough() -> None:
    assert len(REFUSED) + len(WORKS) >= 50


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_a_paragraph(name: str, folder: Path) -> None:
    damage, reason = REFUSED[name]
    damage(folder)
    with pytest.raises(UserError, match=reason) as caught:
        read_all(folder)
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < LONGEST
    assert str(folder) in said, "it must say which folder"


@pytest.mark.parametrize("name", WORKS)
def test_it_works(name: str, folder: Path) -> None:
    before = load_file(folder / "model.safetensors")[EMBEDDING]
    WORKS[name](folder)
    found = read_all(folder)
    assert found.embedding.shape == (VOCAB, HIDDEN)
    torch.testing.assert_close(found.embedding.float(), before, rtol=1e-2, atol=1e-2)
