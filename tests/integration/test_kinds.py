"""What is served is what was trained, for every kind of drafter: stock vLLM, or with our plugin, proposes what the module proposes.

Tiny drafters with random weights, one engine for each. Kinds whose authors have a format of their own come in it, named in a recipe: what
is served is the copy that `draftsmith serve` makes of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from draftsmith.cli.published import for_serving
from draftsmith.config.drafters import KINDS
from draftsmith.config.loading import load_recipe
from draftsmith.config.methods import TrainedDrafter
from draftsmith.convert.convert import read, recognize
from draftsmith.convert.formats import FORMATS
from draftsmith.drafters import drafter_class
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import UNKNOWN_TARGET, Checkpoint
from draftsmith.drafters.dflash import DFlashConfig
from draftsmith.engine import environment, speculation
from draftsmith.run.errors import DraftsmithError
from draftsmith.run.weights import in_memory
from draftsmith.serve.proposals import RECORDER, Served, compare_proposals, record
from draftsmith.target.info import describe_target
from draftsmith.target.tensors import load_target_tensors
from tests.integration.conftest import FAKE_KERNELS, TINY_LAYERS, TINY_VOCAB, make_target, write_recipe
from tests.soak import in_soak

pytestmark = pytest.mark.integration

K, TOKENS, DRAFT_VOCAB = 4, 64, 200
PROMPTS = [[(7 * number + 3 * place * place) % 250 for place in range(5 + 3 * number)] for number in range(16)]
LAYER_IDS = (1, 2, TINY_LAYERS)


@dataclass(frozen=True)
class Case:
    """A drafter."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    """As in a recipe."""
    format: str = "vllm"
    """The published format in which the recipe names it."""
    further: dict[str, Any] = field(default_factory=dict)
    """Fields of its config that no option sets, and published drafters have."""


CASES = {
    "eagle": Case("eagle", format="eagle", further={"fc_bias": True, "attention_bias": True}),
    "eagle3": Case("eagle3", {"draft_vocab_size": DRAFT_VOCAB, "fc_norm": False}, format="specforge"),
    "p_eagle": Case("p_eagle", {"draft_vocab_size": DRAFT_VOCAB, "num_layers": 2, "num_depths": K}),
    "dflash": Case("dflash", {"draft_vocab_size": DRAFT_VOCAB, "num_layers": 1, "block_size": K + 2}),
    "dflash-layers": Case("dflash", {"draft_vocab_size": DRAFT_VOCAB, "num_layers": 3, "block_size": K + 2}),
    "dflash-causal": Case(
        "dflash", {"draft_vocab_size": DRAFT_VOCAB, "num_layers": 2, "block_size": K + 2, "causal": True}
    ),
    "dspark": Case("dspark", {"draft_vocab_size": DRAFT_VOCAB, "num_layers": 2, "block_size": K + 2}),
    "medusa": Case("medusa", {"num_heads": K}, format="medusa"),
    "mlp_speculator": Case("mlp_speculator", {"n_predict": K}, format="ibm"),
}


def make_drafter(case: Case, target: Path) -> Drafter:
    """Random weights with which draft tokens depend on every tensor and on the whole context."""
    torch.manual_seed(0)
    kind, about = drafter_class(case.kind), describe_target(target)
    options = KINDS[case.kind].model_validate(case.options)
    vocabulary = options.draft_vocab_size or TINY_VOCAB
    ids = LAYER_IDS if "layer_ids" in KINDS[case.kind].model_fields else (TINY_LAYERS,)
    config = replace(kind.make_config(options, about, ids, vocabulary), **case.further)
    drafter = kind.from_target(
        config, load_target_tensors(target), torch.randperm(TINY_VOCAB)[:vocabulary].sort().values
    )
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.3, 3)
        elif parameter.ndim == 1:
            nn.init.normal_(parameter, mean=float("weight" in name), std=0.3)
        else:
            nn.init.normal_(parameter, std=2 * parameter.shape[1] ** -0.5)
    return drafter.eval()


def checkpoint_of(drafter: Drafter, case: Case) -> Checkpoint:
    weights = in_memory(drafter.state_dict())
    return Checkpoint(
        case.kind, drafter.config.to_dict(), dict(UNKNOWN_TARGET), drafter.draft_token_ids, weights
    ).check()


def save(drafter: Drafter, case: Case, target: Path, folder: Path) -> Path:
    """Write it in its format; returns the directory that vLLM loads."""
    folder.mkdir()
    FORMATS[case.format].write(checkpoint_of(drafter, case), folder)
    loaded = as_served(folder, case.kind, target)
    assert (loaded == folder) == (case.format == "vllm")
    return loaded


def as_served(folder: Path, kind: str, target: Path) -> Path:
    """The directory that vLLM loads for the drafter in a folder that a recipe names: the folder or a converted copy."""
    method = {"method": speculation.method_of(kind), "model": str(folder)}
    path = write_recipe(folder, target, ["Hello"], ["Hi"], serve={"method": method})
    served = for_serving(load_recipe(path)).serve.method
    assert isinstance(served, TrainedDrafter)
    assert served.model is not None
    return Path(served.model)


@dataclass(frozen=True)
class Made:
    drafter: Drafter
    directory: Path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kinds") / "target"
    make_target(directory)
    return directory


@pytest.fixture(scope="module")
def made(target: Path) -> dict[str, Made]:
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTSMITH_CACHE", str(target.parent / "cache"))
        for name, case in CASES.items():
            drafter = make_drafter(case, target)
            found[name] = Made(drafter, save(drafter, case, target, target.parent / name))
    return found


def serve(made: dict[str, Made], names: list[str], target: Path) -> dict[str, Served]:
    directories = [made[name].directory for name in names]
    asked = [(directory, speculation.speculative_config(directory, K)["method"]) for directory in directories]
    return dict(zip(names, record(asked, target, PROMPTS, k=K, max_tokens=TOKENS), strict=True))


@pytest.fixture(scope="module")
def served(made: dict[str, Made], target: Path) -> dict[str, Served]:
    """What vLLM proposed: stock for the kinds that it serves by itself, with the plugin for the others."""
    ours = [
        name
        for name, one in made.items()
        if speculation.needs_plugin(one.directory) or speculation.needs_mend(one.directory)
    ]
    mended = ["dflash-layers", "dflash-causal", "dspark"] if environment.is_cpu() else []
    assert ours == [*mended, "mlp_speculator"]
    return serve(made, [name for name in made if name not in ours], target) | serve(made, ours, target)


@contextmanager
def negated(parameter: nn.Parameter) -> Iterator[None]:
    parameter.data.neg_()
    try:
        yield
    finally:
        parameter.data.neg_()


def test_every_kind_is_here() -> None:
    assert {case.kind for case in CASES.values()} == set(KINDS)


@pytest.mark.parametrize("name", CASES)
def test_trained_equals_served(
    made: dict[str, Made], served: dict[str, Served], target: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, found = made[name].drafter, served[name]
    compared = compare_proposals(found, drafter, target)
    assert len(compared) == K
    assert min(compared) > 500, compared
    # A drafter that reads less than it should may be equal too, if its draft tokens hardly depend on anything.
    drafts = {tuple(proposal["draft"]) for proposal in found.proposals}
    last = {proposal["context"][-1] for proposal in found.proposals}
    tokens = [len(set(at_place)) for at_place in zip(*drafts, strict=True)]
    print(f"{name}: {len(drafts)} drafts after {len(last)} last tokens, tokens by draft position: {tokens}")
    assert len(drafts) > 2 * len(last) > 200, "one that reads the last token alone has a draft for each"
    assert min(tokens) > DRAFT_VOCAB / 4
    # In one answer already, vLLM computes with every tensor: with the opposite sign of any, the module's drafts are others.
    request = found.proposals[0]["request"]
    one = replace(found, proposals=[proposal for proposal in found.proposals if proposal["request"] == request])
    for parameter in drafter.parameters():
        with negated(parameter), pytest.raises(DraftsmithError, match="computes other draft tokens"):
            compare_proposals(one, drafter, target)
    if isinstance(drafter.config, DFlashConfig):  # so do drafts whose rows see later ones, or do not
        monkeypatch.setattr(drafter, "config", replace(drafter.config, causal=not drafter.config.causal))
        with pytest.raises(DraftsmithError, match="computes other draft tokens"):
            compare_proposals(one, drafter, target)


@pytest.mark.skipif(not environment.is_cpu(), reason="the stand-ins for kernels are for CPUs")
@pytest.mark.parametrize("scheme", ["int8", pytest.param("fp8", marks=in_soak), "int8-dynamic"])
def test_blocks_with_8_bit_weights(
    made: dict[str, Made], served: dict[str, Served], target: Path, tmp_path: Path, scheme: str
) -> None:
    """Kinds of which vLLM takes some layers in 8 bits and others not. Weights alone in 8 bits: vLLM's own loader and slow kernels propose what
    the weights in the files say. Inputs too, by vLLM's kernel: often what the drafter in floating point proposes, although rounding weighs
    heavily in these drafters, whose weights are random; by chance one in 200 would be the same."""
    drafters = {}
    for name in ("p_eagle", "dflash-layers", "dspark"):
        drafters[name] = tmp_path / name
        drafters[name].mkdir()
        FORMATS["vllm"].write(checkpoint_of(made[name].drafter, CASES[name]), drafters[name], quantize=scheme)
    # The method is that of the drafter in floating point: the engine's refusal of what has no kernel on CPUs is not asked.
    asked = [
        (folder, speculation.speculative_config(made[name].directory, K)["method"]) for name, folder in drafters.items()
    ]
    recorder = RECORDER if scheme == "int8-dynamic" else FAKE_KERNELS
    found = record(asked, target, PROMPTS, k=K, max_tokens=TOKENS, recorder=recorder)
    for (name, folder), one in zip(drafters.items(), found, strict=True):
        if scheme == "int8-dynamic":
            exact = {tuple(proposal["context"]): proposal["draft"][0] for proposal in served[name].proposals}
            both = [proposal for proposal in one.proposals if tuple(proposal["context"]) in exact]
            same = sum(proposal["draft"][0] == exact[tuple(proposal["context"])] for proposal in both)
            print(f"{name}: {same} of {len(both)} first draft tokens are the same")
            assert len(both) > 300
            assert same > 0.2 * len(both)
            continue
        held = read(folder, recognize(folder)).drafter(load_target_tensors(target))
        assert min(compare_proposals(one, held, target)) > 500
        with pytest.raises(DraftsmithError, match="computes other draft tokens"):
            compare_proposals(one, made[name].drafter, target)


@pytest.mark.skipif(not environment.is_cpu(), reason="a mend of vLLM's on CPUs")
def test_without_the_plugin_s_mend_draft_tokens_are_others(
    made: dict[str, Made], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "needs_mend", lambda _: False)
    found = serve(made, ["dflash-layers"], target)["dflash-layers"]
    with pytest.raises(DraftsmithError, match="computes other draft tokens"):
        compare_proposals(found, made["dflash-layers"].drafter, target)
