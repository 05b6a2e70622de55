"""A run in miniature up to its store, made without an engine: a random target and sequences that it wrote greedily."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.config.recipe import Recipe, TargetConfig
from draftsmith.convert.convert import run_convert
from draftsmith.run import stage
from draftsmith.store.format import Sequence, StoreIdentity
from draftsmith.store.writer import StoreWriter
from draftsmith.target.info import describe_target
from draftsmith.train.train import run_train

HIDDEN, LAYERS, VOCAB = 32, 3, 80


def make_run(
    folder: Path,
    *,
    tied: bool = False,
    sequences: int = 12,
    tokens: int = 24,
    prompt: int = 6,
    sizes: tuple[float, float, float] = (1, 1, 1),
) -> Path:
    """`folder/target` and `folder/run/store`, one in six sequences held out; returns the run directory. `sizes`: what the states of each
    layer id are multiplied by."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder / "target")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "target" / "tokenizer.json"))
    target = describe_target(folder / "target")
    directory = folder / "run" / "store"
    stage.claim(directory, fresh=True)
    identity = StoreIdentity(
        target=target.name,
        target_revision=target.revision,
        target_config_hash=target.config_hash,
        tokenizer_hash=target.tokenizer_hash,
        chat_template_hash=target.chat_template_hash,
        layer_ids=(1, 2, LAYERS),
        hidden_size=HIDDEN,
        dtype="float32",
        sampling={"mode": "generate", "temperature": 0.0, "max_tokens": tokens - prompt},
    )
    writer = StoreWriter(directory, identity, shard_tokens=100)
    last: list[torch.Tensor] = []
    model.model.layers[-1].register_forward_hook(lambda module, inputs, output: last.append(output))
    for number in range(sequences):
        ids = torch.randint(0, VOCAB, (1, prompt), generator=torch.Generator().manual_seed(number))
        with torch.no_grad():
            ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_length=tokens, do_sample=False)
            entering = model(ids[:, :-1], output_hidden_states=True).hidden_states
        states = torch.stack([entering[1][0], entering[2][0], last[-1].reshape(-1, HIDDEN)], dim=1)
        states *= torch.tensor(sizes)[:, None]
        held_out = number % 6 == 5
        writer.append(Sequence(number, held_out, ids[0].int(), torch.arange(ids.shape[1]) >= prompt, states))
    writer.close()
    stage.StageRun("extract", directory).finish("tiny", {}, recipe={})
    return directory.parent


def make_recipe(folder: Path, **train: object) -> Recipe:
    """Twenty steps of training on that store, on every processor in float32."""
    options = {
        "precision": "float32",
        "epochs": 5,
        "tokens_per_step": 70,
        "ttt_steps": 3,
        "state_dropout": 0,
        "save_every_steps": 100,
        **train,
    }
    target = TargetConfig(model=str(folder / "target"), dtype="float32")
    return Recipe.model_validate({
        "name": "run", "target": target.model_dump(), "extract": {"prompts": {"path": "unused"}}, "train": options,
        "evaluate": {"k": [1, 2], "acceptance_k": 2},
    })  # fmt: skip


def make_converted(folder: Path, drafter: dict[str, object], *, epochs: float) -> Path:
    """The run directory of such a drafter, trained and converted."""
    run_dir, recipe = make_run(folder), make_recipe(folder, drafter=drafter, epochs=epochs)
    run_train(recipe, run_dir)
    run_convert(recipe, run_dir)
    return run_dir
