"""The plugin, without vLLM: who is made instead of whom, what is drafted from which rows, and what is refused."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.config.drafters import DSparkOptions, MlpOptions
from draftsmith.drafters.mlp_speculator import MlpConfig, MlpDrafter
from draftsmith.drafters.norm import FinalNorm
from draftsmith.serve import plugin
from draftsmith.serve.plugin.mlp_speculator import MlpSpeculator, proposer_v1, proposer_v2

CONFIG = MlpConfig(
    layer_ids=(5,),
    hidden_size=16,
    rms_norm_eps=1e-5,
    vocab_size=40,
    draft_vocab_size=40,
    inner_size=12,
    n_predict=3,
    tie_weights=False,
    scale_input=True,
)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    fake: Any = ModuleType("vllm")
    fake.__version__ = "0.32.0+cpu"
    known: dict[str, str] = {}
    fake.ModelRegistry = SimpleNamespace(get_supported_archs=known.keys, register_model=known.__setitem__, known=known)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    return fake


def config_for(architecture: str) -> Any:
    record = {
        **MlpDrafter.vllm_layout.write(CONFIG),
        "torch_dtype": "float32",
        "model_type": "eagle",
        "model": {"head_dim": 16},
    }
    hf_config = SimpleNamespace(to_dict=lambda: record)
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            draft_model_config=SimpleNamespace(architectures=[architecture], hf_config=hf_config)
        )
    )


class Proposer:
    """As much of vLLM's as ours relies on."""

    def __init__(self, vllm_config: Any, device: str = "cpu") -> None:
        self.device, self.num_speculative_steps = device, 3
        self.draft_tokens = torch.full((8, 3), -1)


@pytest.fixture
def speculator(vllm: ModuleType) -> MlpSpeculator:
    torch.manual_seed(0)
    made = MlpSpeculator(vllm_config=config_for(MlpOptions.serving.architecture))
    trained = MlpDrafter(CONFIG, FinalNorm(torch.ones(16), eps=1e-5))
    loaded = made.load_weights(trained.state_dict().items())
    assert loaded == dict(made.named_parameters()).keys()
    assert all(torch.equal(value, trained.state_dict()[name]) for name, value in made.drafter.state_dict().items())
    return made


def test_only_our_architecture_gets_our_proposer(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("vllm.v1.spec_decode.eagle")
    module.EagleProposer = type("EagleProposer", (Proposer,), {})
    for name in ("vllm.v1", "vllm.v1.spec_decode"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    plugin.register()
    plugin.register()
    assert vllm.ModelRegistry.known == {
        plugin.ARCHITECTURE: "draftsmith.serve.plugin.mlp_speculator:MlpSpeculator",
        plugin.DSPARK: "vllm.model_executor.models.qwen3_dspark:Qwen3DSparkForCausalLM",
    }
    assert f"DFlash{DSparkOptions.serving.architecture}" == plugin.DSPARK
    assert MlpOptions.serving.architecture == plugin.ARCHITECTURE
    ours = module.EagleProposer(config_for(MlpOptions.serving.architecture), device="meta")
    assert (type(ours).__name__, ours.device) == ("MlpProposer", "meta")
    assert type(module.EagleProposer(config_for("EagleLlamaForCausalLM"))) is module.EagleProposer
    inheriting = type("Other", (module.EagleProposer,), {})
    assert type(inheriting(config_for(MlpOptions.serving.architecture))) is inheriting


def test_an_unknown_vllm_is_said(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.__version__ = "0.33.0"
    hooked: list[str] = []
    monkeypatch.setattr("wrapt.register_post_import_hook", lambda hook, name: hooked.append(name))
    plugin.register()
    assert not hooked
    assert plugin.DSPARK not in vllm.ModelRegistry.known, "vLLM says that it does not know the architecture"
    with pytest.raises(RuntimeError, match=r"in vLLM 0\.32\.x, and this is vLLM 0\.33\.0"):
        MlpSpeculator(vllm_config=config_for(MlpOptions.serving.architecture))


def test_first_runner_drafts_from_the_rows_it_is_given(speculator: MlpSpeculator) -> None:
    states, tokens = torch.randn(7, 16), torch.tensor([3, 9])
    proposer = proposer_v1(Proposer)(None)
    proposer.model = speculator
    metadata = SimpleNamespace(query_start_loc=torch.tensor([0, 3, 7]))
    last = proposer.propose(3, None, None, states, tokens, None, metadata, None)
    assert torch.equal(last, speculator.draft(states[[2, 6]], tokens, 3))
    after_rejection = proposer.propose(2, None, None, states, tokens, torch.tensor([1, 4]), metadata, None)
    assert torch.equal(after_rejection, speculator.draft(states[[1, 4]], tokens, 2))
    assert proposer.propose(0, None, None, states, tokens, None, metadata, None).shape == (2, 0)


def test_second_runner_corrects_for_rejections_and_unfinished_prompts(speculator: MlpSpeculator) -> None:
    proposer = proposer_v2(Proposer)(None)
    proposer.model = speculator
    states = torch.randn(9, 16)
    batch = SimpleNamespace(num_reqs=3, query_start_loc=torch.tensor([0, 4, 6, 9]), idx_mapping=torch.tensor([2, 0, 1]))
    last_sampled, next_prefill = torch.tensor([[11], [12], [13]]), torch.tensor([21, 22, 23])
    found = proposer.propose(
        batch, None, None, states, None, torch.tensor([2, 1, 0]), torch.tensor([2, 0, 0]), last_sampled, next_prefill
    )
    # Rows: 4 - 1 - 2 rejected, 6 - 1, 9 - 1; the third is in the middle of its prompt.
    assert torch.equal(found, speculator.draft(states[[1, 5, 8]], torch.tensor([13, 11, 22]), 3))
    for steps in (1, 0):  # with fewer steps too the runner takes all columns, and marks those beyond itself
        fewer = proposer.propose(
            batch,
            None,
            None,
            states,
            None,
            torch.tensor([2, 1, 0]),
            torch.tensor([2, 0, 0]),
            last_sampled,
            next_prefill,
            num_speculative_tokens=steps,
        )
        assert fewer.shape == (3, 3)
        assert torch.equal(fewer[:, :steps], found[:, :steps])


def test_embeddings_handed_out_stay_as_they_are() -> None:
    """Layer id 0: what vLLM's layers do to their input in place, norms on GPUs do so, does not reach what was handed out."""

    class Mixin:
        aux_hidden_state_layers = (0, 2)

        def _maybe_add_hidden_state(self, found: list, layer: int, hidden: torch.Tensor, residual: Any) -> None:
            if layer in self.aux_hidden_state_layers:
                found.append(hidden if residual is None else hidden + residual)

    module: Any = ModuleType("vllm.model_executor.models.interfaces")
    module.EagleModelMixin = Mixin
    plugin._in_models(module)
    hidden, found = torch.ones(3), []
    for layer, residual in ((0, None), (1, hidden), (2, hidden)):
        Mixin()._maybe_add_hidden_state(found, layer, hidden, residual)
        hidden += 1
    assert [tensor.tolist() for tensor in found] == [[1.0] * 3, [6.0] * 3]


@pytest.fixture(params=[True, False], ids=["cpu", "gpu"])
def on_cpu(request: pytest.FixtureRequest, vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> bool:
    platforms: Any = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: request.param)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    return bool(request.param)


def test_a_cpu_engine_looks_at_models_itself(on_cpu: bool) -> None:
    """Elsewhere vLLM does in another process."""
    registry: Any = ModuleType("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda inspect: "elsewhere"
    plugin._in_registry(registry)
    assert registry._run_in_subprocess(lambda: "here") == ("here" if on_cpu else "elsewhere")


def test_gpus_keep_the_kernels_of_vllm(on_cpu: bool) -> None:
    """What stands in for them computes what CPUs have no kernel for, or a wrong one."""
    sampler: Any = ModuleType("vllm.v1.sample.rejection_sampler")
    sampler.expand_batch_to_tokens = kernel = object()
    plugin._in_sampling(sampler)
    assert sampler.expand_batch_to_tokens is (plugin._expand_batch_to_tokens if on_cpu else kernel)

    dflash: Any = ModuleType("vllm.model_executor.models.qwen3_dflash")
    dflash.DFlashQwen3Model = type("DFlashQwen3Model", (), {"_normalize_context_k": kernel})
    plugin._in_dflash(dflash)
    used = vars(dflash.DFlashQwen3Model)["_normalize_context_k"]
    assert used is (plugin._normalize_context_k if on_cpu else kernel)


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 4)), min_size=1),
    st.sampled_from([torch.float32, torch.int32]),
)
def test_settings_are_repeated_for_each_draft_token(requests: list[tuple[float, int]], dtype: torch.dtype) -> None:
    """What stands in for vLLM's kernel on CPUs, against a loop; 0 (greedy) is replaced by 1, as vLLM asks."""
    values = torch.tensor([value for value, _ in requests]).to(dtype)
    counts = torch.tensor([count for _, count in requests])
    found = plugin._expand_batch_to_tokens(
        values, counts.cumsum(0).to(torch.int32), int(counts.sum()), replace_from=0, replace_to=1
    )
    expected = [value or 1 for value, (_, count) in zip(values.tolist(), requests, strict=True) for _ in range(count)]
    assert found.dtype == dtype
    assert found.tolist() == expected


def test_keys_of_a_context_are_normed_with_their_layer_s_weights() -> None:
    layers = SimpleNamespace(_rms_norm_eps=1e-5, _k_norm_weights=torch.rand(3, 8) + 0.5)
    keys = torch.randn(3, 5, 2, 8)
    found = plugin._normalize_context_k(layers, keys)
    for layer, weight in enumerate(layers._k_norm_weights):
        torch.testing.assert_close(found[layer], torch.nn.functional.rms_norm(keys[layer], (8,), weight, 1e-5))
    assert plugin._normalize_context_k(layers, keys.bfloat16()).dtype == torch.bfloat16
