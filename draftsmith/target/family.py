"""What is special about a family of targets, in one place: its final norm, its logits, its tensors' names, and what vLLM hands out.

A family is a `model_type` of the language model's config. The facts are those of transformers 5.19's modeling files and of
vLLM 0.32's models. A family that is not here is read like Llama if its config and transformers' own modules agree with that, and
refused otherwise: a teacher with the wrong norm trains a drafter without an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from draftsmith.run.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the models of a family differ from Llama."""

    norm: Literal["rms", "layer"] = "rms"
    """The norm before the head. `layer`: LayerNorm, with a bias if the files hold one."""
    norm_plus_one: bool = False
    """The norm multiplies by 1 + weight."""
    eps: str | float = "rms_norm_eps"
    """The norm's epsilon: a key of the config, or the number."""
    multiplier: str | None = None
    """Key of the number that logits are multiplied by."""
    divisor: str | None = None
    """Key of the number that logits are divided by."""
    soft_cap: str | None = None
    """Key of c, where logits become c * tanh(logits / c); null there for none."""
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    """Names of the tensors, after what the language model's tensors all begin with."""
    lowest_layer_id: int = 0
    """The lowest layer id that vLLM hands out."""
    states: Literal["own", "backend", "none"] = "own"
    """What of vLLM hands out hidden states: its own model of the family, or only its transformers backend, or nothing."""
    serves_eagle: bool = True
    """Whether vLLM serves drafters with layers of attention: they share an embedding that vLLM must find."""
    has_lm_head: bool = True
    """Whether vLLM's own model of the family has a head of its own under that name, which `eagle` shares. Others use the embedding's."""
    last_state_is_normed: bool = True
    """Whether vLLM's own model gives the drafter its last state after the final norm, as drafters of the last state are trained. Others norm it on
    the way to the logits."""
    scaled_state: bool = False
    """vLLM puts the factor of the logits into that state; transformers puts it into the logits."""
    scaled_embedding: Literal["never", "backend", "always"] = "never"
    """Where the module of vLLM's that embeds tokens, which drafters share, multiplies by the root of the hidden size: in its transformers
    backend, which has transformers' module; `always` where it has no other model of the family."""


_LLAMA_LIKE = (
    "apertus", "arcee", "dots1", "ernie4_5", "glm", "gpt_oss", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama",
    "llama4_text", "minimax", "minimax_m2", "ministral", "ministral3", "mistral", "olmo2", "olmo3", "phi3", "qwen2",
    "qwen2_5_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss",
    "smollm3",
)  # fmt: skip
_WITHOUT_OWN_STATES = (
    "ernie4_5_moe",
    "exaone4",
    "glm4",
    "glm4_moe",
    "glm4v_moe_text",
    "glm4v_text",
    "mixtral",
    "olmoe",
    "qwen2_moe",
)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_LLAMA_LIKE, Family()),
    **dict.fromkeys(_WITHOUT_OWN_STATES, Family(states="backend")),
    # vLLM adds the residual, which layer 0 does not have yet.
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), Family(lowest_layer_id=1)),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), Family(norm_plus_one=True)),
    "minimax_m3_vl_text": Family(norm_plus_one=True),
    "mimo": Family(states="none", last_state_is_normed=False),
    "step3p5": Family(norm_plus_one=True, states="none", last_state_is_normed=False),
    "gemma": Family(norm_plus_one=True, states="backend", scaled_embedding="backend"),
    "gemma2": Family(
        norm_plus_one=True, soft_cap="final_logit_softcapping", states="backend", scaled_embedding="backend", has_lm_head=False
    ),
    "gemma3_text": Family(
        norm_plus_one=True, soft_cap="final_logit_softcapping", states="backend", scaled_embedding="backend"
    ),
    "qwen2_vl_text": Family(states="none"),
    "vaultgemma": Family(norm_plus_one=True, soft_cap="final_logit_softcapping", scaled_embedding="always"),
    "gemma3n_text": Family(
        soft_cap="final_logit_softcapping", states="backend", scaled_embedding="backend", has_lm_head=False
    ),
    "gemma4_text": Family(soft_cap="final_logit_softcapping"),
    **dict.fromkeys(("granite", "granite_swa"), Family(divisor="logits_scaling")),
    **dict.fromkeys(
        ("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
        Family(divisor="logits_scaling", states="backend"),
    ),
    "minicpm3": Family(divisor="logits_scaling", scaled_state=True),
    "hyperclovax": Family(multiplier="logits_scaling", states="backend"),
    "falcon_h1": Family(multiplier="lm_head_multiplier", final_norm="final_layernorm", states="backend"),
    **dict.fromkeys(
        ("cohere", "cohere2"),
        Family(norm="layer", eps="layer_norm_eps", multiplier="logit_scale", states="backend", has_lm_head=False),
    ),
    "nemotron": Family(norm="layer", norm_plus_one=True, eps="norm_eps", states="backend"),
    "nemotron_h": Family(eps="layer_norm_epsilon", embedding="embeddings", final_norm="norm_f"),
    "opt": Family(norm="layer", eps=1e-5, final_norm="final_layer_norm", states="none", serves_eagle=False),
    "phimoe": Family(norm="layer", states="backend"),
    "stablelm": Family(norm="layer", eps="layer_norm_eps", states="backend"),
    "starcoder2": Family(norm="layer", eps="norm_epsilon"),
    "gpt_neox": Family(
        norm="layer", eps="layer_norm_eps", embedding="embed_in", final_norm="final_layer_norm", serves_eagle=False
    ),
}  # fmt: skip

_OTHER_LOGITS = (
    "final_logit_softcapping", "lm_head_multiplier", "logit_scale", "logits_scaling", "logits_soft_cap", "output_multiplier",
)  # fmt: skip
"""Keys of configs whose models do more to their logits than the product with the head."""
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Kinds of RoPE that transformers and vLLM compute alike at every length, and the keys that each needs."""
_ROPE_OPTIONS = {"yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What training, and the shape of a new drafter, take from a target's config."""

    family: Family
    norm_eps: float
    logit_scale: float
    """Factor of the logits, before the soft cap."""
    logit_soft_cap: float | None
    num_attention_heads: int
    """Of a new drafter; likewise all below."""
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    sliding_window: int | None
    """The window of all of the target's layers, which vLLM gives to the drafter's too; None where a layer attends to everything. Drafters
    are trained without one."""


def target_facts(config: PretrainedConfig) -> TargetFacts:
    """Read the facts from the config of a language model.

    Raises:
        UserError: its family is not known and not like Llama, or a number is missing or makes no sense.
    """
    for key in ("vocab_size", "num_hidden_layers"):
        size_of(config, key)
    family = FAMILIES.get(config.model_type) or _read_like_llama(config)
    scale = _number(config, family.multiplier) if family.multiplier else 1.0
    scale /= _number(config, family.divisor) if family.divisor else 1.0
    capped = family.soft_cap and _get(config, family.soft_cap) is not None
    heads, kv_heads, head_dim = _heads(config)
    return TargetFacts(
        family=family,
        norm_eps=family.eps if isinstance(family.eps, float) else _number(config, family.eps),
        logit_scale=scale,
        logit_soft_cap=_number(config, family.soft_cap) if family.soft_cap and capped else None,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_mlp_width(config),
        rope_parameters=_rope(config),
        max_position_embeddings=size_of(config, "max_position_embeddings", default=1 << 17),
        sliding_window=window_of_all_layers(config),
    )


def window_of_all_layers(config: PretrainedConfig) -> int | None:
    """`TargetFacts.sliding_window`, of any config."""
    return None if "full_attention" in (_get(config, "layer_types") or ()) else _get(config, "sliding_window")


def _heads(config: PretrainedConfig) -> tuple[int, int, int]:
    """Heads, key/value heads and head size: the target's, as far as a Llama config allows them.

    Latent attention (DeepSeek's) has a head size for each part and as many keys as queries, in a cache of its own kind. A
    drafter has none of that: its heads are as wide as the target's values, and it has eight key/value heads.
    """
    hidden, heads = size_of(config, "hidden_size"), size_of(config, "num_attention_heads")
    kv_heads = size_of(config, "num_key_value_heads", default=heads)
    head_dim = size_of(config, "head_dim", default=max(1, hidden // heads))
    if _get(config, "kv_lora_rank"):
        head_dim = size_of(config, "v_head_dim", default=head_dim)
        heads, kv_heads = max(1, hidden // head_dim), 8
    # GLM-4.5-Air has 96 heads for a hidden size of 4096: LlamaConfig, which vLLM reads the drafter's config with, refuses that.
    heads = _largest_divisor(hidden, at_most=heads)
    return heads, _largest_divisor(heads, at_most=kv_heads), head_dim


def has_experts(config: PretrainedConfig) -> bool:
    """Whether its MLPs are mixtures of experts."""
    experts = _first(config, _EXPERTS)
    return isinstance(experts, int) and experts > 1


def active_experts(config: PretrainedConfig) -> int | None:
    """Experts that a token is routed to; the most of a layer where that differs (Hunyuan). None without experts."""
    active = _first(config, _ACTIVE_EXPERTS)
    return max(active) if isinstance(active, list | tuple) else active


def _mlp_width(config: PretrainedConfig) -> int:
    """Width of a new drafter's MLP: the target's.

    With experts, that of all that a token goes through, as in Automodel (active experts times their width, and shared ones),
    but two to four times the hidden size. A config's `intermediate_size` may be that of one expert, such as half the hidden size.
    """
    hidden, dense = size_of(config, "hidden_size"), dense_width(config)
    if not has_experts(config):
        return dense
    of_one = _get(config, "moe_intermediate_size") or dense
    if not isinstance(of_one, int) or of_one < 1:
        return 4 * hidden
    shared = _first(config, _SHARED_WIDTH) or of_one * (_first(config, _SHARED_EXPERTS) or 0)
    return min(max((active_experts(config) or 1) * of_one + shared, 2 * hidden), 4 * hidden)


def _rope(config: PretrainedConfig) -> dict[str, Any]:
    """RoPE of a new drafter, in the form that its config.json has and every engine reads alike.

    Its whole heads turn, with the base of the target's layers: where these have several, of those that attend to everything, as
    the drafter does. Scaling that depends on the length or that engines compute differently is left out, and so are
    sections for images, which are all the same position in text. Targets without RoPE have Llama's base.
    """
    stated = _get(config, "rope_parameters") or {}
    of_layers = {name: value for name, value in stated.items() if isinstance(value, dict)}
    if of_layers:
        stated = of_layers.get("full_attention") or next(iter(of_layers.values()))
    theta = stated.get("rope_theta") or _get(config, "rope_theta") or 10000.0
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < 1e15:
        raise _wrong(config, "rope_theta", theta, "a number above 0")
    kind = stated.get("rope_type", "default")
    needed = _ROPE_KEYS.get(kind) if isinstance(kind, str) else None
    if needed is None or any(stated.get(key) is None for key in needed):
        kind, needed = "default", ()
    kept = (*needed, *(key for key in _ROPE_OPTIONS.get(kind, ()) if stated.get(key) is not None))
    return {"rope_type": kind, "rope_theta": float(theta)} | {key: stated[key] for key in kept}


def uses_mrope(config: PretrainedConfig) -> bool:
    """Whether the target's tokens of an image have positions in three dimensions (M-RoPE), instead of their places in the text."""
    return "mrope_section" in (_get(config, "rope_parameters") or {})


def _read_like_llama(config: PretrainedConfig) -> Family:
    """The family of a type that is not in the table: like Llama, if what can be checked agrees with that.

    Raises:
        UserError: it does not, or cannot be checked.
    """
    why = next((f"its config has `{key}`" for key in _OTHER_LOGITS if _get(config, key) is not None), None)
    if why is None and _get(config, "rms_norm_eps") is None:
        why = "its config has no `rms_norm_eps`, so it has no RMSNorm before its head"
    why = why or _unlike_llama(config)
    if why:
        raise UserError(
            f"Draftsmith does not know targets of the type `{config.model_type}` ({config.name_or_path}), and cannot treat one like "
            f"Llama: {why}. A drafter would be trained on a wrong target without an error. The documentation lists the types that it "
            "knows; a new one is an entry in draftsmith/target/family.py."
        )
    return Family()


def _unlike_llama(config: PretrainedConfig) -> str | None:
    """Try the norm and the head that transformers has for this type; returns what is not like Llama's."""
    import torch
    from transformers import AutoModelForCausalLM

    own_code = type(config).__module__.startswith(
        "transformers_modules."
    )  # which was trusted, or there would be no config
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=own_code)
        norm, head = model.get_decoder().norm, model.get_output_embeddings()
        norm = norm.to_empty(device="cpu").float()
        factors = torch.linspace(0.5, 1.5, config.hidden_size)
        norm.weight.data.copy_(factors)
        x = torch.linspace(-1, 3, config.hidden_size)
        expected = torch.nn.functional.rms_norm(x, x.shape, factors, config.rms_norm_eps)
        if not torch.allclose(norm(x[None])[0], expected, atol=1e-5):
            return "the norm before its head computes something else"
        return None if getattr(head, "bias", None) is None else "its head has a bias"
    except Exception as error:  # whatever modules of other kinds lack
        return f"transformers' model of it cannot be checked ({' '.join(str(error).split())[:200]})"


# ---- numbers of a config ----


def layer_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """The config of each layer; the whole model's unless numbers differ between layers, as the head size does in Gemma 4."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * int(config.num_hidden_layers)


def head_size(layer: PretrainedConfig) -> int:
    """Numbers of a head in one of `layer_configs`."""
    return int(getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)


def dense_width(config: PretrainedConfig) -> int:
    """Width of the widest MLP without experts; four times the hidden size where the config has none."""
    dense = _get(config, "intermediate_size") or _get(config, "ffn_dim")
    dense = max(dense) if isinstance(dense, list | tuple) and dense else dense  # one for each layer
    return dense if isinstance(dense, int) and dense > 0 else 4 * int(config.hidden_size)


def _get(config: PretrainedConfig, key: str) -> Any:
    """The value, or None; where it differs between layers (Gemma 4), the last layer's."""
    try:
        return getattr(config, key, None)
    except RuntimeError:  # transformers refuses to give one value for all
        return getattr(config.per_layer_config[config.num_hidden_layers - 1], key, None)


def size_of(config: PretrainedConfig, key: str, *, default: int | None = None) -> int:
    """A whole number above 0 of a config.

    Raises:
        UserError: it is missing and has no default, or is something else.
    """
    value = _get(config, key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(config, key, value, "a whole number above 0")
    return value


def _number(config: PretrainedConfig, key: str) -> float:
    value = _get(config, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _wrong(config, key, value, "a number above 0")
    return float(value)


def _wrong(config: PretrainedConfig, key: str, value: Any, wanted: str) -> UserError:
    found = "is missing" if value is None else f"is {str(value)[:80]!r}"
    return UserError(
        f"`{key}` {found} in the config of the target {config.name_or_path} (type `{config.model_type}`), where {wanted} should be. "
        "Draftsmith trains drafters for causal language models with attention; if this is one, its config.json is damaged: download or "
        "save it again."
    )


def _first(config: PretrainedConfig, keys: tuple[str, ...]) -> Any:
    return next((value for key in keys if (value := _get(config, key)) is not None), None)


def _largest_divisor(number: int, *, at_most: int) -> int:
    return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)
