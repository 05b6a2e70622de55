"""Targets: tiny random models saved here, whole and sharded, tied and untied."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.config.recipe import TargetConfig
from draftsmith.config.sources import FileSource
from draftsmith.run.errors import UserError
from draftsmith.target.info import describe_target
from draftsmith.target.layer_ids import check_layer_ids, default_layer_ids
from draftsmith.target.prepare import prepare_target, target_name
from draftsmith.target.shards import shards, shared_files
from draftsmith.target.tensors import load_target_tensors, require_readable
from tests.families import change_config

LAYERS, HIDDEN, VOCAB = 3, 16, 50


def save_model(folder, *, tied=False, max_shard_size="1GB", seed=0):
    """A random Llama with a tokenizer beside it; returns its state dict."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=24,
        vocab_size=VOCAB,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return model.state_dict()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_size", ["1GB", "5KB"])
def test_tensors_are_the_models_own(tmp_path, tied, max_shard_size):
    state = save_model(tmp_path, tied=tied, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "5KB")
    tensors = load_target_tensors(tmp_path)
    assert torch.equal(tensors.embedding, state["model.embed_tokens.weight"])
    assert torch.equal(tensors.lm_head, state["lm_head.weight"])
    assert (tensors.lm_head is tensors.embedding) == tied
    assert torch.equal(tensors.final_norm_weight, state["model.norm.weight"])


@pytest.mark.parametrize("max_shard_size", ["1GB", "5KB"])
def test_a_head_of_its_own_is_read_although_the_config_ties_it(tmp_path, max_shard_size):
    """As transformers and vLLM do: a config may say so by default, or be stale."""
    state = save_model(tmp_path, tied=False, max_shard_size=max_shard_size)
    change_config(tmp_path, tie_word_embeddings=True)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path).lm_head.weight
    tensors = load_target_tensors(tmp_path)
    assert not torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    assert torch.equal(tensors.lm_head, state["lm_head.weight"])
    assert torch.equal(tensors.lm_head, loaded)
    if max_shard_size == "5KB":
        head = shards(tmp_path, "model.safetensors")["lm_head.weight"]
        assert head in shared_files(tmp_path, "model.safetensors")
        (tmp_path / head).unlink()
        for read in (load_target_tensors, require_readable):
            with pytest.raises(UserError, match=rf"{head}, the shard with lm_head\.weight, is missing"):
                read(tmp_path)


def test_copies_of_the_embedding_and_heads_of_other_models_leave_the_head_tied(tmp_path):
    state = save_model(tmp_path, tied=True)
    embedding = state["model.embed_tokens.weight"]
    weights = {name: value.clone() for name, value in state.items()}
    for head in ({"lm_head.weight": embedding.clone()}, {"mtp.lm_head.weight": embedding + 1}):
        save_file(
            {name: value for name, value in weights.items() if name != "lm_head.weight"} | head,
            tmp_path / "model.safetensors",
        )
        tensors = load_target_tensors(tmp_path)
        assert tensors.lm_head is tensors.embedding
        assert torch.equal(tensors.embedding, embedding)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Gemma", "Gemma3Text"])
@pytest.mark.parametrize("tied", [True, False])
def test_head_and_norm_give_the_model_s_logits(tmp_path, kind, tied):
    """What teaches a drafter: the head on the normed last state, whatever family the target is of."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        num_hidden_layers=1,
        hidden_size=HIDDEN,
        intermediate_size=24,
        vocab_size=VOCAB,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.model.norm.weight.uniform_(-0.5, 0.5)
    model.save_pretrained(tmp_path)
    entering = []
    model.model.norm.register_forward_hook(lambda module, inputs, output: entering.append(inputs[0]))
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]])).logits
    tensors = load_target_tensors(tmp_path)
    eps = config.rms_norm_eps
    normed = torch.nn.functional.rms_norm(entering[0], (HIDDEN,), tensors.final_norm_weight, eps)
    torch.testing.assert_close(normed @ tensors.lm_head.T, logits, rtol=1e-4, atol=1e-5)


def test_what_is_missing_is_named(tmp_path):
    save_model(tmp_path, max_shard_size="5KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = tmp_path / index["weight_map"]["model.norm.weight"]
    moved = shard.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=shard.name):
        load_target_tensors(tmp_path)
    moved.rename(shard)
    for name in ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"):
        fewer = {key: file for key, file in index["weight_map"].items() if key != name}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": fewer}))
        with pytest.raises(UserError, match=name.removeprefix("model.")):
            load_target_tensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        load_target_tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="is damaged"):
        load_target_tensors(tmp_path)


def test_describing(tmp_path):
    save_model(tmp_path / "one", seed=0)
    info = describe_target(tmp_path / "one")
    assert (info.name, info.num_hidden_layers, info.hidden_size, info.vocab_size) == ("one", LAYERS, HIDDEN, VOCAB)
    assert describe_target(tmp_path / "one", name="owner/one").name == "owner/one"
    assert describe_target(tmp_path / "one", TargetConfig(model="owner/two")).name == "owner/two"

    # A copy is the same target; a fine-tune of it is not, although its config is equal.
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    copy = describe_target(tmp_path / "copy")
    assert (copy.revision, copy.config_hash, copy.tokenizer_hash) == (
        info.revision,
        info.config_hash,
        info.tokenizer_hash,
    )
    save_model(tmp_path / "tuned", seed=1)
    tuned = describe_target(tmp_path / "tuned")
    assert tuned.config_hash == info.config_hash
    assert tuned.revision != info.revision


def test_a_hub_snapshot_is_known_by_its_commit(tmp_path):
    folder = tmp_path / "snapshots" / "0123abcd"
    save_model(folder)
    assert describe_target(folder).revision == "0123abcd"


def test_hashes_see_what_they_name(tmp_path):
    save_model(tmp_path)
    before = describe_target(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "transformers_version": "5.0.0"}))
    assert describe_target(tmp_path).config_hash == before.config_hash
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert describe_target(tmp_path).config_hash != before.config_hash
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")  # where newer tokenizers keep the same template
    assert describe_target(tmp_path).chat_template_hash == before.chat_template_hash
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}!")
    assert describe_target(tmp_path).chat_template_hash != before.chat_template_hash
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer"):
        describe_target(tmp_path)


def test_local_targets(tmp_path):
    save_model(tmp_path / "model")
    assert prepare_target(TargetConfig(model=str(tmp_path / "model"))) == tmp_path / "model"
    with pytest.raises(UserError, match="does not exist"):
        prepare_target(TargetConfig(model=str(tmp_path / "none")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no config\.json"):
        prepare_target(TargetConfig(model=str(tmp_path / "empty")))


def test_hub_targets_that_are_not_there(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="Could not download the model owner/no-such-model"):
        prepare_target(TargetConfig(model="owner/no-such-model"))
    with pytest.raises(UserError, match="is not a Hub id"):
        prepare_target(TargetConfig(model="not a name"))


def test_gguf_without_its_package_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[demo\]'"):
        prepare_target(TargetConfig(gguf=FileSource(path=str(tmp_path / "model.gguf"))))


def test_others_may_read_a_prepared_gguf(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    saved = SimpleNamespace(save_pretrained=lambda folder: (folder / "saved").touch())
    for name in ("AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(transformers, name, SimpleNamespace(from_pretrained=lambda *_, **__: saved))
    monkeypatch.setattr(transformers, "GgufConfig", lambda **_: None, raising=False)
    prepared = prepare_target(TargetConfig(gguf=FileSource(path=str(tmp_path / "model.gguf"))))
    assert (prepared / "saved").is_file()
    assert prepared.stat().st_mode & 0o777 == 0o755


def test_names_for_people():
    assert target_name(TargetConfig(model="owner/name")) == "owner/name"
    assert target_name(TargetConfig(model="/models/mine")) == "mine"
    assert target_name(TargetConfig(gguf=FileSource(path="/models/mine.Q4.gguf"))) == "mine.Q4"


def test_default_layer_ids_of_known_depths():
    assert default_layer_ids(30) == (2, 15, 27, 30)
    assert default_layer_ids(32) == (2, 16, 29, 32)
    assert default_layer_ids(7) == (2, 3, 4, 7)


@given(st.integers(1, 200))
def test_default_layer_ids_are_always_valid(n):
    ids = default_layer_ids(n)
    check_layer_ids(ids, n)
    assert list(ids) == sorted(ids)
    assert ids[-1] == n


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((2, 31), "names 31, outside"),
        ((-1,), "names -1, outside"),
        ((2, 2, 5), "names 2 more than once"),
        ((), "empty"),
    ],
)
def test_wrong_layer_ids_are_told_the_range(ids, message):
    with pytest.raises(UserError, match=message) as caught:
        check_layer_ids(ids, 30)
    assert "0 (the embedding) to 30" in str(caught.value)


@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize("trust", [True, False])
def test_of_a_hub_model_only_what_is_needed_is_downloaded(tmp_path, monkeypatch, others, trust):
    """PyTorch's files where there are no safetensors, and code where it may run."""
    hub, cache = tmp_path / "hub", tmp_path / "cache"
    save_model(hub)
    torch.save({}, hub / "pytorch_model.bin")
    for name in ("training_args.bin", "modeling_own.py"):
        (hub / name).write_text("")
    if not others:
        (hub / "model.safetensors").unlink()

    def snapshot(model, *, revision, allow_patterns, ignore_patterns):
        cache.mkdir(exist_ok=True)
        names = [path.name for path in hub.iterdir()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            shutil.copy(hub / name, cache)
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert prepare_target(TargetConfig(model="owner/name", trust_remote_code=trust)) == cache
    names = {path.name for path in cache.iterdir()}
    assert {"config.json", "tokenizer.json"} <= names
    assert ("pytorch_model.bin" in names) != others
    assert ("modeling_own.py" in names) == trust
    assert "training_args.bin" not in names
