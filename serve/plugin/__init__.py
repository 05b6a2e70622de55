"""A vLLM plugin that serves MLP speculators and, on CPUs, DSpark, hands hidden states to extraction, and mends five things of vLLM 0.32.

**MLP speculators.** vLLM 0.32 has their config but no code to run them. They take EAGLE's place: vLLM's EAGLE proposer gets what an
MLP speculator reads, namely the target's final hidden states, the tokens sampled after them, and the rows to continue from,
corrected for rejected draft tokens. A converted MLP speculator names an architecture of this plugin, which begins with `Eagle` as vLLM
requires, and for that architecture vLLM's proposer classes construct the plugin's proposers, without attention or cache.
Nothing changes for other drafters, and no module of vLLM is imported that vLLM does not import itself.

**DSpark on CPUs.** vLLM 0.32 has it in its model runner V2 alone, which needs a GPU. Its model is that of DFlash with a Markov head, and in
model runner V1 it takes DFlash's place: the plugin registers the architecture under the name that vLLM gives it there, and for it DFlash's
proposer takes the draft tokens one by one, through that head.

**Hidden states.** vLLM's `extract_hidden_states` method keeps states in the KV cache, where they take up to 94 times what keys and
values take (`make bench ONLY=tokens_at_once`). With Draftsmith's connector, the layer that would cache them gets the cache of one
more of the target's attention layers, which stays unused, and with it that layer's block table; each step's states and slots go to
the connector. Nothing changes with other connectors.

**Sampling on CPUs.** vLLM 0.32 verifies sampled draft tokens at the wrong temperature, top-k and top-p: the CPU stand-in for the kernel
that repeats a request's settings for each draft token writes into a copy of its output, which keeps whatever was in memory
(`_expand_batch_to_tokens`). Greedy decoding does not use it. Found by `tests/integration/test_lossless.py`.

**Seeded requests on CPUs.** vLLM 0.32 samples a token after every part of a prompt that it reads in several steps, drops all but the last,
and turns the generator of a request with a seed back by moving its offset. Generators of CPUs have none, and the engine ends
("CPU Generator does not use offset"). The plugin keeps the generator's state instead. Found by `tests/integration/test_extract.py`.

**Layer id 0 in eager mode on GPUs.** vLLM 0.32 passes wrong states to drafters and to extraction: they are the same tensor as the
first layer's residual stream, to which the fused norm kernel adds in place, layer after layer. The plugin passes a copy. Found
by `tests/v2/test_states.py`.

**DFlash on CPUs.** vLLM 0.32 norms the keys of the context of all layers in one call of a kernel, with each layer's own weights. The kernel for
CPUs takes those of the first layer for all of them, and drafters with several layers only have fewer draft tokens accepted. Found by
`tests/integration/test_kinds.py`.

**Suffix decoding in measurements.** It drafts from all earlier answers, also to the same prompt. `evaluate` and `tune` ask prompts
more than once, where a greedy answer would be drafted from itself. In their engines (`suffix.MEASURING`) a prompt that is asked again
finds no earlier answer of its own; a server's own is as it was.

**Starting on CPUs.** Before its first use on a machine, vLLM looks at a model's class in a new Python process, which imports vLLM for
that: so CUDA stays untouched in the engine's own. Where there is no CUDA the class is looked at in the engine's process, which imports
it anyway.
"""

from types import ModuleType
from typing import Any

from draftsmith.serve.plugin.versions import KNOWN

ARCHITECTURE = "EagleMLPSpeculatorModel"
"""The same as in `draftsmith/drafters/mlp_speculator.py`, which is not imported here because it imports torch."""

DSPARK = "DFlashQwen3DSparkModel"
"""What vLLM makes of the architecture in `draftsmith/config/drafters.py` where its method is `dflash`."""

_CONNECTOR = "draftsmith.extract.connector"
"""The module of extraction's connector, which is not imported here: stages do not import each other."""


def register() -> None:
    """Entry point of the group `vllm.general_plugins`, called in every process of vLLM, in some more than once."""
    import wrapt
    from vllm import ModelRegistry, __version__

    if ARCHITECTURE in ModelRegistry.get_supported_archs():
        return
    ModelRegistry.register_model(ARCHITECTURE, "draftsmith.serve.plugin.mlp_speculator:MlpSpeculator")
    if __version__.startswith(KNOWN):
        # In others it stays unknown: the class is vLLM's own, and under DFlash's proposer would draft without its Markov head.
        ModelRegistry.register_model(DSPARK, "vllm.model_executor.models.qwen3_dspark:Qwen3DSparkForCausalLM")
        wrapt.register_post_import_hook(_in_v1, "vllm.v1.spec_decode.eagle")
        wrapt.register_post_import_hook(_in_v2, "vllm.v1.worker.gpu.spec_decode.eagle.speculator")
        wrapt.register_post_import_hook(_in_sampling, "vllm.v1.sample.rejection_sampler")
        wrapt.register_post_import_hook(_in_cpu_runner, "vllm.v1.worker.cpu_model_runner")
        wrapt.register_post_import_hook(_in_registry, "vllm.model_executor.models.registry")
        wrapt.register_post_import_hook(_in_models, "vllm.model_executor.models.interfaces")
        wrapt.register_post_import_hook(_in_dflash_v1, "vllm.v1.spec_decode.dflash")
        wrapt.register_post_import_hook(_in_dflash, "vllm.model_executor.models.qwen3_dflash")
        wrapt.register_post_import_hook(_in_extraction, "vllm.model_executor.models.extract_hidden_states")
        wrapt.register_post_import_hook(_in_suffix, "vllm.v1.spec_decode.suffix_decoding")


def _in_v1(module: ModuleType) -> None:
    from draftsmith.serve.plugin.mlp_speculator import proposer_v1

    _divert(module.EagleProposer, proposer_v1(module.EagleProposer), ARCHITECTURE)


def _in_v2(module: ModuleType) -> None:
    from draftsmith.serve.plugin.mlp_speculator import proposer_v2

    _divert(module.EagleSpeculator, proposer_v2(module.EagleSpeculator), ARCHITECTURE)


def _in_sampling(module: ModuleType) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        module.expand_batch_to_tokens = _expand_batch_to_tokens  # type: ignore[attr-defined]


def _in_cpu_runner(module: ModuleType) -> None:
    runner = module.CPUModelRunner
    sample, take_stock = runner._sample, runner._bookkeeping_sync

    def dropped(self: Any) -> dict[int, Any]:
        """Generators by the index of their request, of the requests whose token is dropped."""
        drops = self.discard_request_mask.np
        return {index: generator for index, generator in self.input_batch.generators.items() if drops[index]}

    def sample_and_turn_back(self: Any, *arguments: Any, **named: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in dropped(self).values()]
        sampled = sample(self, *arguments, **named)
        for generator, state in states:
            generator.set_state(state)
        return sampled

    def take_stock_without(self: Any, *arguments: Any, **named: Any) -> Any:
        generators = self.input_batch.generators
        apart = {index: generators.pop(index) for index in dropped(self)}  # vLLM moves the offsets of those it finds
        try:
            return take_stock(self, *arguments, **named)
        finally:
            generators.update(apart)

    runner._sample, runner._bookkeeping_sync = sample_and_turn_back, take_stock_without


def _in_registry(module: ModuleType) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        module._run_in_subprocess = lambda inspect: inspect()  # type: ignore[attr-defined]


def _in_models(module: ModuleType) -> None:
    mixin = module.EagleModelMixin
    original = mixin._maybe_add_hidden_state

    def with_copy(self: Any, aux_hidden_states: Any, layer_idx: int, hidden_states: Any, residual: Any) -> Any:
        # With a residual the original passes a sum, which is a tensor of its own.
        if residual is None and layer_idx in self.aux_hidden_state_layers:
            hidden_states = hidden_states.clone()
        return original(self, aux_hidden_states, layer_idx, hidden_states, residual)

    mixin._maybe_add_hidden_state = with_copy


def _in_dflash_v1(module: ModuleType) -> None:
    from draftsmith.serve.plugin.dspark import proposer_v1

    _divert(module.DFlashProposer, proposer_v1(module.DFlashProposer), DSPARK)


def _in_suffix(module: ModuleType) -> None:
    from draftsmith.serve.plugin.suffix import forget_repeated_prompts

    forget_repeated_prompts(module.SuffixDecodingProposer)


def _in_dflash(module: ModuleType) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        module.DFlashQwen3Model._normalize_context_k = _normalize_context_k


def _normalize_context_k(self: Any, keys: Any) -> Any:
    """Takes the place of the method of the same name: RMSNorm of each head of `keys` [layers, rows, heads, head size] with its layer's
    weights. Returns the same dtype and shape, contiguous."""
    wide = keys.float()
    scale = (wide.pow(2).mean(-1, keepdim=True) + self._rms_norm_eps).rsqrt()
    return (wide * scale * self._k_norm_weights[:, None, None].float()).to(keys.dtype)


def _in_extraction(module: ModuleType) -> None:
    layer_type = module.CacheOnlyAttentionLayer
    original = layer_type.get_kv_cache_spec

    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector_module_path != _CONNECTOR:
            return original(self, vllm_config)
        self.impl.do_kv_cache_update = _hand_over
        return _whole_sequence_spec(vllm_config, layer_type)

    layer_type.get_kv_cache_spec = get_kv_cache_spec
    layer_type.hands_states_over = True  # extraction's connector checks it


def _hand_over(layer: Any, states: Any, cache: Any, slots: Any) -> None:
    """Takes the place of the layer's write into its cache, with the same arguments."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():  # not while vLLM profiles and warms up
        get_kv_transfer_group().take(slots, states)


def _whole_sequence_spec(vllm_config: Any, apart_from: type) -> Any:
    """The cache spec of an attention layer of the target that keeps all tokens of a sequence, so that their slots stay theirs.

    Raises:
        RuntimeError: the target has no attention.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, RSWASpec, replace_as
    from vllm.v1.worker.utils import customize_attention_spec

    specs = []
    for layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values():
        if not isinstance(layer, apart_from) and isinstance(
            spec := layer.get_kv_cache_spec(vllm_config), AttentionSpec
        ):
            specs.append(customize_attention_spec(layer.get_attn_backend(), spec))
    for spec in specs:
        if isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec) and spec.tokens_per_state == 1:
            return spec
    if not specs:
        raise RuntimeError("extraction of hidden states needs a target with attention layers")
    return replace_as(specs[0], FullAttentionSpec, drop=("extra_retained_tokens",))  # each layer has a sliding window


def _expand_batch_to_tokens(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    """`expand_batch_to_tokens` of vLLM's rejection sampler: repeat each value of `x` [requests] for its request's draft tokens, of which
    int `cu_num_tokens` [requests] has the cumulative numbers. Returns `x`'s dtype [num_tokens]."""
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts, output_size=num_tokens)


def _divert(original: type, replacement: type, architecture: str) -> None:
    """Have `original(vllm_config, ...)` construct the replacement if the drafter has that architecture."""

    def new(cls: type, vllm_config: Any, *arguments: Any, **named: Any) -> Any:
        architectures = vllm_config.speculative_config.draft_model_config.architectures or []
        return object.__new__(replacement if cls is original and architecture in architectures else cls)

    original.__new__ = new  # type: ignore[assignment, method-assign]
