"""P-EAGLE: the packed drafts against one plain forward pass over them, what they see, and what they are trained on."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from draftsmith.config.drafters import PEagleOptions
from draftsmith.config.methods import TrainedDrafter
from draftsmith.convert.convert import read, recognize
from draftsmith.drafters import decoder
from draftsmith.drafters.attention import attend
from draftsmith.drafters.p_eagle import PEagleConfig, PEagleDrafter
from draftsmith.engine.speculation import drafts_fixed_k, longest_draft, method_config, own_drafter, speculative_config
from draftsmith.run.errors import UserError
from draftsmith.store.format import Sequence
from draftsmith.target.info import describe_target
from draftsmith.train.packing import pack
from tests.unit.planted import Fault, as_in, late, norms_of, other_config, reads_next_token, sees, without
from tests.unit.test_eagle3 import DRAFT, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, make_sequence
from tests.unit.tiny_run import make_converted, make_recipe, make_run

DEPTHS, MASK = 4, 7


def make_drafter(**changes: object) -> PEagleDrafter:
    fields: dict = {
        "layer_ids": (1, 2, 3), "hidden_size": HIDDEN, "intermediate_size": 20, "num_layers": 2, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "max_position_embeddings": 64,
        "vocab_size": VOCAB, "draft_vocab_size": DRAFT, "norm_before_residual": False, "fc_norm": True, "norm_output": False,
        "num_depths": DEPTHS, "mask_token_id": MASK,
    }  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randperm(VOCAB)[:DRAFT].sort().values
    drafter = PEagleDrafter(PEagleConfig(**fields | changes), torch.randn(VOCAB, HIDDEN), ids).double()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return drafter


def plain_drafts(
    d: PEagleDrafter,
    sequence: Sequence,
    p: int,
    weights: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Logits [DEPTHS, V] of all slots drafted from position p: one causal forward pass over p + DEPTHS rows, as it is served."""

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + d.config.rms_norm_eps).sqrt() * weights[name]

    real, masks = p + 1, DEPTHS - 1
    tokens = [*sequence.token_ids[1 : real + 1].tolist(), *[MASK] * masks]
    states = torch.cat([sequence.hidden_states[:real], weights["mask_hidden"].view(1, 3, -1).expand(masks, -1, -1)])
    if d.config.fc_norm:
        states = torch.stack([rms(states[:, i], f"fc_norm.{i}.weight") for i in range(3)], dim=1)
    state = states.flatten(1) @ weights["fc.weight"].T
    positions = torch.arange(real + masks)
    frequencies = 1 / (100.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))  # rounded as transformers rounds
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]

    def rope(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    for index in range(d.config.num_layers):
        layer = f"layers.{index}."
        if index == 0:
            embeds = rms(d.embedding[tokens], layer + "input_layernorm.weight")
            x = torch.cat([embeds, rms(state, layer + "hidden_norm.weight")], dim=-1)
        else:
            x = rms(state, layer + "input_layernorm.weight")
        q, k, v = (
            (x @ weights[f"{layer}self_attn.{name}_proj.weight"].T).unflatten(1, (-1, HEAD_DIM)) for name in "qkv"
        )
        if d.config.qk_norm:
            q, k = (rms(each, f"{layer}self_attn.{name}_norm.weight") for each, name in ((q, "q"), (k, "k")))
        q, k = rope(q), rope(k)
        mixed = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = q[:, head] @ k[:, group].T / math.sqrt(HEAD_DIM)
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            if d.config.sliding_window:
                hidden |= positions <= positions[:, None] - d.config.sliding_window
                hidden[real:, p] = False  # of its own draft, a slot sees all that came before
                hidden[real:, real:] &= ~torch.ones(masks, masks, dtype=torch.bool).tril()
            mixed.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, group])
        state = state + torch.cat(mixed, dim=-1) @ weights[layer + "self_attn.o_proj.weight"].T
        y = rms(state, layer + "post_attention_layernorm.weight")
        gate, up, down = (weights[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        state = state + (F.silu(y @ gate) * (y @ up)) @ down
    return rms(state[p:], "norm.weight") @ weights["lm_head.weight"].T


DOCUMENTS = [make_sequence(9, 4, 1), make_sequence(14, 6, 2), make_sequence(6, 2, 3)]


def compare_with_plain(drafter: PEagleDrafter, right: PEagleDrafter) -> None:
    """Logits, and gradients of a random function of them; `right` is the same drafter without the fault that may be planted in the first."""
    batch = pack(DOCUMENTS, steps=DEPTHS)
    rows = batch.loss_weights.sum(1).nonzero()[:, 0]
    weights = {name: value.detach().clone().requires_grad_() for name, value in right.state_dict().items()}
    found = torch.stack([drafter.lm_head(step.normed) for step in drafter.chain(batch, steps=DEPTHS)], dim=1)
    places = zip(batch.documents[rows].tolist(), batch.positions[rows].tolist(), strict=True)
    expected = torch.stack([plain_drafts(right, DOCUMENTS[document], p, weights) for document, p in places])
    counted = (batch.loss_weights[rows] > 0)[..., None]
    assert counted.sum() > 40
    torch.testing.assert_close(found * counted, expected * counted, rtol=1e-9, atol=1e-9)
    picks = torch.randn_like(found) * counted
    (found * picks).sum().backward()
    (expected * picks).sum().backward()
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"num_layers": 1}, {"num_layers": 3, "fc_norm": False}, {"sliding_window": 5, "qk_norm": True}, {"sliding_window": 2},
    ],
)  # fmt: skip
def test_packed_drafts_equal_a_forward_pass_over_them(changes: dict) -> None:
    compare_with_plain(make_drafter(**changes), make_drafter(**changes))


def has_no_masks(drafter: PEagleDrafter, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drafter, "mask_inputs", lambda: None)


def mask_is_zero(drafter: PEagleDrafter, _: pytest.MonkeyPatch) -> None:
    drafter.mask_hidden.data.zero_()


def forgets_slots(_: PEagleDrafter, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decoder, "attend", lambda queries, context, own, visible: attend(queries, context, own[-1:], visible))


NORMS = (
    "norm",
    *(f"fc_norm.{place}" for place in range(3)),
    "layers.0.hidden_norm",
    *(f"layers.{index}.{name}" for index in range(2) for name in ("input_layernorm", "post_attention_layernorm")),
)
FAULTS: dict[str, Fault] = {
    **{f"without {norm}": without(norm) for norm in NORMS},
    "norm of another state": as_in("fc_norm.1", "fc_norm.0"),
    "slots late": late(1),
    "slots early": late(-1),
    "context of a row more": sees(decoder, further=1),
    "context of a row less": sees(decoder, further=-1),
    "context of other documents": sees(decoder, other_documents=True),
    "slots see themselves alone": forgets_slots,
    "another mask token": other_config(mask_token_id=MASK + 1),
    "mask is zero": mask_is_zero,
    "drafts from its own states": has_no_masks,
    "tokens one too late": reads_next_token("chain"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_would_notice(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter()
    assert norms_of(drafter) == set(NORMS)
    FAULTS[fault](drafter, monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        compare_with_plain(drafter, make_drafter())


def test_a_draft_depends_on_nothing_later_and_on_no_other_document() -> None:
    drafter, at = make_drafter(), 9

    def drafts(documents: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch = pack(documents, steps=DEPTHS)
        rows = batch.loss_weights.sum(1).nonzero()[:, 0]
        normed = torch.stack([step.normed for step in drafter.chain(batch, steps=DEPTHS)], dim=1)
        return batch.documents[rows], batch.positions[rows], normed * (batch.loss_weights[rows] > 0)[..., None]

    document, position, before = drafts(DOCUMENTS)
    states, tokens = DOCUMENTS[1].hidden_states.clone(), DOCUMENTS[1].token_ids.clone()
    states[at] += 1
    tokens[at + 1] = (tokens[at + 1] + 1) % VOCAB
    # Row `at` reads both the state and the token after it: drafts from it and from later rows change, and no others.
    _, _, after = drafts([DOCUMENTS[0], replace(DOCUMENTS[1], hidden_states=states, token_ids=tokens), DOCUMENTS[2]])
    changed = (before != after).flatten(1).any(1)
    assert changed.tolist() == ((document == 1) & (position >= at)).tolist()
    assert changed.any()


def test_dropped_draft_tokens_change_no_other() -> None:
    """Slots that are not trained are not computed, and those that are, are as without the drop-out."""
    drafter = make_drafter()
    options = PEagleOptions(num_depths=DEPTHS, down_sample_ratio=0.5, down_sample_ratio_min=0.2)
    batch = pack([make_sequence(40, 10, 1), make_sequence(30, 4, 2)], steps=DEPTHS)
    generator = torch.Generator().manual_seed(0)
    parts = [PEagleDrafter.trained_rows(options, part, generator) for part in batch.loss_weights.split([39, 29])]
    thinned = replace(batch, loss_weights=torch.cat(parts))
    kept, all_rows = (thinned.loss_weights > 0), (batch.loss_weights > 0)
    assert torch.equal(kept[:, 0], all_rows[:, 0])
    for depth in range(1, DEPTHS):
        of_rows = sum(
            int(part.any(1).sum() * 0.5**depth if depth < 3 else part.any(1).sum() * 0.2)
            for part in all_rows.split([39, 29])
        )
        assert 0.6 * of_rows <= kept[:, depth].sum() <= of_rows, "rows near the ends have no token to predict"
        assert not (kept[:, depth] & all_rows[:, depth - 1] & ~kept[:, depth - 1]).any(), (
            "drafts are whole up to their last token"
        )
    rows = [each.loss_weights.any(1).nonzero()[:, 0] for each in (thinned, batch)]
    some, every = (
        torch.stack([s.normed for s in drafter.chain(each, steps=DEPTHS)], dim=1) for each in (thinned, batch)
    )
    every = every[torch.isin(rows[1], rows[0])]
    counted = kept[rows[0]]
    torch.testing.assert_close(some[counted], every[counted], rtol=1e-9, atol=1e-9)
    skipped = (some == 0).all(-1)
    assert not (skipped & counted).any()
    assert skipped.sum() > 0.5 * (~counted).sum()


@pytest.mark.parametrize("window", [None, 5])
def test_draft_tokens_at_once_are_those_one_by_one(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, and the gradients of all weights, of rows that become fewer."""
    drafter = make_drafter(sliding_window=window)
    batch = pack([make_sequence(40, 10, 1), make_sequence(30, 4, 2)], steps=DEPTHS)
    options = PEagleOptions(num_depths=DEPTHS, down_sample_ratio=0.5, down_sample_ratio_min=0.2)
    weights = PEagleDrafter.trained_rows(options, batch.loss_weights, torch.Generator().manual_seed(0))
    thinned, groups, outcomes = replace(batch, loss_weights=weights), [], []
    together = decoder._together
    for share in (0, 1):

        def grouped(steps: list[Any], rows: int, share: int = share) -> list[list[Any]]:
            groups.append(together(steps, rows=share * rows))
            return groups[-1]

        monkeypatch.setattr(decoder, "_together", grouped)
        drafter.zero_grad()
        found = torch.stack([step.normed for step in drafter.chain(thinned, steps=DEPTHS)])
        found.sin().sum().backward()
        outcomes.append([found.detach(), *(p.grad for p in drafter.parameters() if p.grad is not None)])
    assert [len(each) for each in groups] == [DEPTHS - 1, 1]
    assert len(outcomes[0]) > 10
    for found, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_steps_that_are_taken_at_once_have_so_many_rows_at_most() -> None:
    def sizes(rows: list[int], most: int) -> list[list[int]]:
        steps = [SimpleNamespace(rows=torch.zeros(count)) for count in rows]
        return [[len(step.rows) for step in group] for group in decoder._together(steps, rows=most)]

    assert sizes([7, 5, 3, 2], 20) == [[7, 5, 3, 2]]
    assert sizes([7, 7, 7, 7, 7], 14) == [[7, 7], [7, 7], [7]]
    assert sizes([7, 5, 3], 0) == [[7], [5], [3]]
    assert sizes([], 5) == []


def test_with_rope_on_part_of_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not turn of the masks' keys and queries is one row for all; alone, a draft token has that row for itself."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 2 / 3}
    drafter = make_drafter(rope_parameters=rope)
    assert 2 * len(drafter.inverse_frequencies()) < HEAD_DIM
    batch = pack([make_sequence(20, 5, 1)], steps=DEPTHS)
    rows = batch.loss_weights.any(1).nonzero()[:, 0]
    found = torch.stack([step.normed for step in drafter.chain(batch, steps=DEPTHS)])
    together = decoder._together
    monkeypatch.setattr(decoder, "_together", lambda steps, rows: together(steps, rows=0))
    for place in (0, 3, len(rows) - DEPTHS):
        weights = torch.zeros_like(batch.loss_weights)
        weights[rows[place]] = 1
        alone = drafter.chain(replace(batch, loss_weights=weights), steps=DEPTHS)
        torch.testing.assert_close(
            found[:, place], torch.stack([step.normed[0] for step in alone]), rtol=1e-9, atol=1e-9
        )


def test_what_is_drawn_differs_by_step_and_not_by_process(tmp_path: Path) -> None:
    from draftsmith.store.reader import Store
    from draftsmith.train.data import TrainingData

    make_run(tmp_path)
    recipe = make_recipe(tmp_path, drafter={"kind": "p_eagle", "num_depths": 3})

    def drawn(step: int, rows: list[int], *, number: int = 0, processes: int = 1) -> list[list[float]]:
        accelerator = type(
            "Accelerator", (), {"num_processes": processes, "process_index": number, "device": torch.device("cpu")}
        )
        store = Store(tmp_path / "run" / "store")
        data = TrainingData(recipe, accelerator, store, columns=[0], last_column=2, ttt_steps=3)  # type: ignore[arg-type]
        weights: list[list[float]] = data.micro_batches(step, rows)[0].batch.loss_weights.tolist()
        return weights

    together = drawn(0, [0, 1])
    assert sorted(drawn(0, [0, 1], processes=2) + drawn(0, [0, 1], number=1, processes=2)) == sorted(together)
    assert drawn(0, [0, 1]) == together != drawn(1, [0, 1])


def test_it_is_served_in_parallel_and_with_no_more_tokens_than_were_trained(tmp_path: Path) -> None:
    run_dir = make_converted(tmp_path, {"kind": "p_eagle", "num_depths": 3, "num_layers": 2}, epochs=0.1)
    folder = run_dir / "vllm"
    config = json.loads((folder / "config.json").read_text())
    assert (config["mask_token_id"], config["num_depths"], config["num_hidden_layers"]) == (79, 3, 2)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert speculative_config(folder, 3) == {
        "method": "eagle3",
        "parallel_drafting": True,
        "model": str(folder),
        "num_speculative_tokens": 3,
    }
    with pytest.raises(UserError, match=r"at most 3 tokens, and 4 were requested.*train\.drafter\.num_depths"):
        speculative_config(folder, 4)
    assert own_drafter(folder).method == "p_eagle"
    assert drafts_fixed_k(own_drafter(folder))
    assert '"parallel_drafting": true' in (folder / "README.md").read_text()


@pytest.mark.parametrize("token", ["ptd_token_id", "pard_token"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"])
def test_one_of_others_in_vllm_s_plain_form(
    token: str, architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """EAGLE-3's architecture with a `mask_hidden`, which vLLM passes over with a warning unless it is told to draft in parallel
    (llama_eagle3.py, `load_weights`)."""
    run_dir = make_converted(tmp_path, {"kind": "p_eagle", "num_depths": 3, "num_layers": 2}, epochs=0.1)
    folder, target = run_dir / "vllm", describe_target(tmp_path / "target")
    ours = read(folder, recognize(folder))
    record = json.loads((folder / "config.json").read_text())
    del record["draftsmith"], record["num_depths"]
    record |= {token: record.pop("mask_token_id"), "architectures": [architecture]}

    def write(**changes: Any) -> None:
        (folder / "config.json").write_text(json.dumps(record | changes))

    def config(**keys: Any) -> dict[str, Any] | None:
        method = TrainedDrafter.model_validate({"model": str(folder), **keys})
        return method_config(method, target, own_drafter=tmp_path / "no")

    write()
    assert own_drafter(folder).method == "p_eagle"
    assert longest_draft(folder) is None
    expected = {"method": "eagle3", "parallel_drafting": True, "model": str(folder), "num_speculative_tokens": 5}
    assert speculative_config(folder, 5) == expected
    capsys.readouterr()
    assert config(method="p_eagle", num_speculative_tokens=5) == expected
    said = " ".join(capsys.readouterr().err.split())
    assert "does not say how many draft tokens it was trained for (`num_depths`); it drafts 5" in said
    assert config(method="eagle3", parallel_drafting=True, num_speculative_tokens=5) == expected
    with pytest.raises(UserError, match="for the method `p_eagle`, but the recipe's method is `eagle3`"):
        config(method="eagle3")
    with pytest.raises(UserError, match="vLLM's `p_eagle` drafts the same number of tokens at every load"):
        config(method="p_eagle", num_speculative_tokens_per_batch_size=[[1, 4, 3], [5, 8, 1]])
    # A schedule of a single K says no more than K, and vLLM's first runner would give up its full CUDA graphs for it.
    scheduled = config(method="p_eagle", num_speculative_tokens_per_batch_size=[[1, 4, 5], [5, 8, 5]])
    assert scheduled == expected
    write(**{token: None})
    with pytest.raises(UserError, match="its config does not say which token stands for those that are not known yet"):
        config(method="p_eagle")

    write()
    assert recognize(folder).kind == "p_eagle"
    with pytest.raises(UserError, match=r"does not say how many draft tokens .* was trained for \(`num_depths`\)"):
        read(folder, recognize(folder))
    write(num_depths=3)
    theirs = read(folder, recognize(folder))
    assert theirs.config == ours.config
    assert all(torch.equal(theirs.tensors[name], value) for name, value in ours.tensors.items())
    assert longest_draft(folder) == 3

    # Without the tensor, vLLM could not draft in parallel: EAGLE-3.
    write()
    weights = load_file(folder / "model.safetensors")
    del weights["mask_hidden"]
    save_file(weights, folder / "model.safetensors")
    assert own_drafter(folder).method == recognize(folder).kind == "eagle3"
    assert speculative_config(folder, 5) == {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 5}


def test_a_mask_token_that_the_target_lacks(tmp_path: Path) -> None:
    make_run(tmp_path)
    target = describe_target(tmp_path / "target")
    with pytest.raises(UserError, match=r"`train\.drafter\.mask_token_id` is 80, and .* has 80 tokens"):
        PEagleDrafter.make_config(PEagleOptions(mask_token_id=80), target, (1, 2, 3), 80)
