"""vLLM's `speculative_config`, made and checked in one place for evaluation, tuning and serving.

Everything that can be known before an engine starts is checked here. vLLM reports such errors only after loading the target, in its
own terms, or not at all.
"""

import json
from collections.abc import Collection, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from draftsmith.config.drafters import KINDS, MASK_OF_P_EAGLE, ServingSpec, kind_of_architecture, method_of, methods_of
from draftsmith.config.methods import DraftModel, Method, ModelMethod, Mtp, NoSpeculation, Suffix, TrainedDrafter
from draftsmith.engine import environment
from draftsmith.engine.flags import flag_name
from draftsmith.run import stage
from draftsmith.run.atomic_io import sha256_of
from draftsmith.run.errors import UserError
from draftsmith.run.progress import console
from draftsmith.run.weights import open_weights, weight_files
from draftsmith.target.hub import is_snapshot, local_directory
from draftsmith.target.info import TargetInfo
from draftsmith.target.pretrained import config_of, language_config

_FILES = ("config.json", "model.safetensors")
_CONTENT = ("*.json", "*.safetensors", "*.bin", "*.pt")
_USUAL_K = 3  # speculative tokens of a drafter if nothing says how many
_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Fields of targets' configs with the number of multi-token prediction layers."""
_MTP_UNCOUNTED = {"mimo_v2", "nemotron_h", "longcat_flash", "step3p5", "dots3"}
"""Targets that have such layers but no such field."""
_MASK_TOKENS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""Where vLLM looks for the token in the place of P-EAGLE's unknown draft tokens (vllm/v1/spec_decode/llm_base_proposer.py)."""
_FIXED_K = {"suffix", *(method_of(kind) for kind, options in KINDS.items() if options.serving.fixed_k)}
_SYNCHRONOUS = {"ngram", "suffix", "medusa"}
"""Methods that vLLM does not schedule asynchronously."""
DEPENDING_ON_K = {method_of(kind) for kind, options in KINDS.items() if options.serving.depends_on_k}
"""Methods of recipes whose draft tokens can depend on how many are drafted."""


def method_config(
    method: Method, target: TargetInfo, *, own_drafter: Path, tensor_parallel_size: int = 1
) -> dict[str, Any] | None:
    """vLLM's `speculative_config` for a method of the recipe; None for no speculation.

    Args:
        own_drafter: the run's drafter (`runs/NAME/vllm`), for methods that name no other.
        tensor_parallel_size: the target's.

    Raises UserError: the method cannot serve this target here.
    """
    if isinstance(method, NoSpeculation):
        return None
    environment.require_full_attention(target.config, target=target.name)
    config = method.keys()
    if method.num_speculative_tokens_per_batch_size:
        highest = max(k for _, _, k in method.num_speculative_tokens_per_batch_size)
        if highest == 0:
            return None
        if "num_speculative_tokens" not in method.model_fields_set:
            config.pop("num_speculative_tokens", None)
        _override(
            config, "num_speculative_tokens", highest, "the most that `num_speculative_tokens_per_batch_size` has"
        )
    if isinstance(method, ModelMethod):
        _check_split(method, tensor_parallel_size)
    if isinstance(method, Suffix):
        if find_spec("arctic_inference") is None:
            raise UserError(
                "Suffix decoding needs the package arctic-inference, which is not installed. Install its build requirements "
                "and then the package, in an activated environment: `pip install nanobind==2.9.2 cmake ninja wheel` and `pip "
                "install --no-deps --no-build-isolation arctic-inference==0.3.0`; in a checkout, `make suffix`."
            )
        config.setdefault("num_speculative_tokens", method.suffix_decoding_max_tree_depth)
    elif isinstance(method, Mtp):
        _override(config, "method", "mtp", "vLLM's older name of it")
        layers = max(int(getattr(target.config, name, 0) or 0) for name in _MTP_LAYERS)
        if not layers and target.config.model_type not in _MTP_UNCOUNTED:
            raise UserError(
                f"{target.name} has no layers for multi-token prediction: its config has none of {', '.join(_MTP_LAYERS)}. "
                "Choose another method."
            )
    elif isinstance(method, DraftModel):
        directory = local_directory(method.model, revision=method.revision)
        size = _config(directory, "a model").get("vocab_size")
        if size != target.vocab_size and not config.get("use_heterogeneous_vocab"):
            raise UserError(
                f"The model {method.model} has a vocabulary of {size} tokens and {target.name} one of {target.vocab_size}: it "
                "cannot draft for it. Choose a smaller model of the same family."
            )
        config["model"] = str(directory)  # vLLM always splits it over the GPUs as the target
    elif isinstance(method, TrainedDrafter):
        directory = local_directory(method.model, revision=method.revision) if method.model else own_drafter
        longest = longest_draft(directory)
        # Of the tokens that a config says it predicts, vLLM drafts all.
        all_of_them = serving_spec(directory).k_field == "n_predict"
        usual = longest if longest is not None and all_of_them else min(_USUAL_K, longest or _USUAL_K)
        found = speculative_config(directory, config.get("num_speculative_tokens", usual))
        expected = method_of(_kind(directory))
        in_parallel = bool(method.parallel_drafting) and found["method"] == method.method  # as vLLM names P-EAGLE
        if expected != method.method and not in_parallel:
            raise UserError(
                f"{directory} holds a drafter for the method `{expected}`, but the recipe's method is `{method.method}`."
            )
        check_target(directory, target)
        if longest is None and serving_spec(directory).k_field is not None:
            _say(
                f"speculation: {directory} does not say how many draft tokens it was trained for "
                f"(`{serving_spec(directory).k_field}`); it drafts {found['num_speculative_tokens']}"
            )
        by_plugin = found["method"] == serving_spec(directory).method_on_cpus
        if by_plugin and config.get("draft_sample_method", "greedy") != "greedy":
            why = "on CPUs the plugin drafts the likeliest tokens with this kind"
            _override(config, "draft_sample_method", "greedy", why)
        if "parallel_drafting" in found:
            _override(config, "parallel_drafting", True, "the drafter was trained to draft so")
        config |= found
        if tensor_parallel_size > 1 and serving_spec(directory).whole_on_each_gpu:
            # Else vLLM checks heads in its config, of which it has none.
            config.setdefault("draft_tensor_parallel_size", 1)
        else:
            require_drafter_split(
                SimpleNamespace(**_config(directory)), tensor_parallel_size, drafter=f"in {directory}"
            )
            if "draft_tensor_parallel_size" in config:
                why = "vLLM's layers are split as the target's whatever it says"
                _override(config, "draft_tensor_parallel_size", tensor_parallel_size, why)
    schedule = method.num_speculative_tokens_per_batch_size
    if schedule and drafts_fixed_k(method) and len({k for _, _, k in schedule}) > 1:
        raise UserError(
            f"vLLM's `{method.method}`{' with `parallel_drafting`' if method.method not in _FIXED_K else ''} drafts the same number of tokens at every load, but "
            "`num_speculative_tokens_per_batch_size` has several. Give num_speculative_tokens instead."
        )
    if schedule and drafts_fixed_k(method):
        # Any schedule, of a single K too, costs vLLM's first runner its full CUDA graphs (vllm/config/vllm.py).
        config.pop("num_speculative_tokens_per_batch_size")
    return config


def drafts_fixed_k(method: Method) -> bool:
    """Whether vLLM drafts the same number of tokens with it at every load. With `parallel_drafting`, under whatever method's name, its
    proposer gives each request as many rows as the largest K has, and with a smaller one takes those of other requests for drafts
    (vllm/v1/spec_decode/llm_base_proposer.py). On GPUs a draft model drafts as many as the largest K has, whatever is asked for, and the rest is
    thrown away (vllm/v1/worker/gpu/spec_decode/standalone_ar/speculator.py)."""
    if isinstance(method, DraftModel) and not environment.is_cpu():
        return True
    return method.method in _FIXED_K or bool(getattr(method, "parallel_drafting", None))


def _check_split(method: ModelMethod, tensor_parallel_size: int) -> None:
    """Check over how many GPUs the method splits its model. Raises UserError: vLLM cannot."""
    split = method.draft_tensor_parallel_size
    allowed = {tensor_parallel_size} if isinstance(method, DraftModel) else {1, tensor_parallel_size}
    if split is not None and split not in allowed:
        raise UserError(
            f"`draft_tensor_parallel_size` is {split}, and vLLM splits the model of `{method.method}` over {' or '.join(map(str, sorted(allowed)))} "
            f"GPUs where `engine.tensor_parallel_size` is {tensor_parallel_size}. Give one of these, or leave it out."
        )


def drafter_split(speculative: Mapping[str, Any], tensor_parallel_size: int) -> int:
    """GPUs that vLLM splits a drafter over: as the target, unless a `speculative_config` of `method_config` says otherwise."""
    return int(speculative.get("draft_tensor_parallel_size", tensor_parallel_size))


def require_drafter_split(config: Any, tensor_parallel_size: int, *, drafter: str) -> None:
    """Check that vLLM can give each GPU its part of a drafter's heads. Raises UserError: it cannot, and would fail after loading the target.

    Args:
        config: the drafter's, with `num_attention_heads` and `num_key_value_heads` if it has any.
        drafter: which one it is, as in `in FOLDER`.
    """
    if hasattr(config, "num_attention_heads") and not environment.divides_heads(tensor_parallel_size, config):
        shared = getattr(config, "num_key_value_heads", None)
        raise UserError(
            f"engine.tensor_parallel_size is {tensor_parallel_size}, and vLLM splits the drafter {drafter} as the target: its {config.num_attention_heads} "
            f"attention heads{'' if shared is None else f' and {shared} key/value heads'} cannot be divided so. Choose another size, or another drafter."
        )


def _override(config: dict[str, Any], key: str, value: Any, why: str) -> None:
    """Set a key of the configuration, and say so where the recipe gave it another value."""
    if (given := config.get(key, value)) != value:
        _say(f"speculation: {key} {given} -> {value}: {why}")
    config[key] = value


@cache
def _say(line: str) -> None:
    """Print a line once: an evaluation makes many configurations of a method."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def longest_draft(drafter_dir: Path) -> int | None:
    """The most tokens that the drafter was trained to draft; None for any number."""
    spec = serving_spec(drafter_dir)
    config = _config(drafter_dir)
    if spec.k_field is None:
        return None
    # Some of z-lab's files have it in the section of their other keys.
    said = config.get(spec.k_field) or (config.get("dflash_config") or {}).get(spec.k_field)
    if said is None:
        return None
    # vLLM takes an absent `sample_from_anchor` for true.
    all_rows = spec.all_rows_field is not None and config.get(spec.all_rows_field, True)
    return int(said if all_rows else said - spec.rows_before_drafts)


def own_drafter(drafter_dir: Path) -> TrainedDrafter:
    """The recipe's method that serves the drafter in a folder."""
    return TrainedDrafter.model_validate({"method": method_of(_kind(drafter_dir))})


def check_target(drafter_dir: Path, target: TargetInfo) -> None:
    """Check that a drafter fits this target.
    Raises UserError: sizes or layers do not fit. vLLM would fail after loading the target, or draft nonsense."""
    config = _config(drafter_dir)
    made_for = (config.get("draftsmith") or {}).get("target", {}).get("name")
    advice = f"It was made for {made_for}." if made_for else "Choose a drafter that was made for it."
    sizes = [("vocabulary", "vocab_size", target.vocab_size)]
    if "target_hidden_size" in config:
        sizes.append(("hidden state", "target_hidden_size", target.hidden_size))
    elif not needs_plugin(drafter_dir):  # there, `hidden_size` is that of its own layers
        sizes.append(("hidden state", "hidden_size", target.hidden_size))
    for what, key, expected in sizes:
        if (config.get(key) or expected) != expected:
            raise UserError(
                f"The drafter in {drafter_dir} is for a target with a {what} of {config[key]}, and {target.name} has one of "
                f"{expected}. {advice}"
            )
    layers = _layer_ids(config)
    if not all(0 <= layer <= target.num_hidden_layers for layer in layers):
        raise UserError(
            f"The drafter in {drafter_dir} reads the target's layers {layers}, and {target.name} has {target.num_hidden_layers}. "
            f"{advice}"
        )


def _layer_ids(config: Mapping[str, Any]) -> list[int]:
    name = "eagle_aux_hidden_state_layer_ids"
    outputs = (config.get("dflash_config") or config).get("target_layer_ids") or ()  # output i enters layer i + 1
    return list(config.get(name) or (config.get("eagle_config") or {}).get(name) or [layer + 1 for layer in outputs])


def check_graph_sizes(options: Mapping[str, Any], speculative: Mapping[str, Any] | None) -> None:
    """Check that the user's sizes for full CUDA graphs are usable with a `speculative_config`; None for no speculation. Raises UserError: one is
    not a multiple of K + 1, the rows of a decoding sequence in a step, for any K that is drafted: no step would ever have that size."""
    named = {key.replace("-", "_"): value for key, value in options.items()}
    compilation = named.get("compilation_config")
    given = compilation if isinstance(compilation, Mapping) else {}
    if not str(given.get("cudagraph_mode", "")).upper().startswith("FULL"):
        return  # piecewise graphs also serve mixed steps, of any size
    sizes = given.get("cudagraph_capture_sizes") or named.get("cudagraph_capture_sizes") or ()
    rows = sorted(rows_per_step(speculative))
    if wrong := [size for size in sizes if all(size % each for each in rows)]:
        tokens, multiples = (" or ".join(map(str, numbers)) for numbers in ([each - 1 for each in rows], rows))
        raise UserError(
            f"cudagraph_capture_sizes has {', '.join(map(str, wrong))}, not a multiple of {multiples}: with {tokens} speculative tokens every "
            f"decoding sequence has {multiples} rows in a step. Give multiples, or leave the sizes to vLLM."
        )


def rows_per_step(speculative: Mapping[str, Any] | None) -> set[int]:
    """Rows of a decoding sequence in a step, 1 + K, for every K that a `speculative_config` drafts; None for no speculation."""
    if speculative is None:
        return {1}
    schedule = speculative.get("num_speculative_tokens_per_batch_size")
    return {1 + k for _, _, k in schedule} if schedule else {1 + speculative["num_speculative_tokens"]}


def speculative_config(drafter_dir: Path, k: int) -> dict[str, Any]:
    """vLLM's `speculative_config` for a drafter directory, with K speculative tokens.
    Raises UserError: the directory holds no drafter that this version can serve, one that drafts fewer tokens, one whose mask vLLM would not
    find, or weights beside the drafter's own."""
    spec = serving_spec(drafter_dir)
    others = sorted(path.name for path in drafter_dir.glob("*.safetensors") if path.name not in _FILES)
    if others and not (drafter_dir / "model.safetensors.index.json").is_file():  # it would say which ones to load
        raise UserError(
            f"{drafter_dir} has other weights beside model.safetensors: {', '.join(others)}. vLLM would load all of them, and tensors "
            "of the same name over each other. Move the others to another folder."
        )
    for name in spec.further_files:
        if (tensor := Path(name).stem) in _tensor_names(drafter_dir) and not (drafter_dir / name).is_file():
            raise UserError(
                f"{drafter_dir} has no {name}, from which alone vLLM takes `{tensor}`: the tensor of that name beside the other weights is passed "
                f"over, and another would be served without a word. Get the folder again, with all files, or write the file from the "
                f"tensor: `draftsmith convert {drafter_dir} --to vllm --out OUT`."
            )
    if spec.parallel_drafting and all(_config(drafter_dir).get(key) is None for key in _MASK_TOKENS):
        raise UserError(
            f"{drafter_dir} drafts all tokens in one forward pass, and its config does not say which token stands for those that are not "
            "known yet. Add it as its authors state it: `mask_token_id` in config.json."
        )
    most = longest_draft(drafter_dir)
    if most is not None and k > most:  # vLLM would fail, or silently use untrained heads
        raise UserError(
            f"{drafter_dir} drafts at most {most} tokens, and {k} were requested. Request fewer, or train it for more "
            f"(train.drafter.{spec.k_field})."
        )
    if environment.is_cpu() and has_8_bit_weights(drafter_dir) and not rounds_inputs(drafter_dir):
        raise UserError(
            f"The drafter in {drafter_dir} has 8-bit weights for floating-point arithmetic, which vLLM supports on GPUs only. On a CPU "
            "serve one converted with `int8-dynamic`, or without --quantize (convert.quantize)."
        )
    other = {"method": spec.method_on_cpus} if spec.method_on_cpus and environment.is_cpu() else {}
    return spec.speculative | other | {"model": str(drafter_dir), "num_speculative_tokens": k}


def target_arguments(
    target: Path,
    speculative: Mapping[str, Any] | None,
    *,
    options: Mapping[str, Any] = {},
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Arguments of `vllm.LLM` with which vLLM serves the target in a directory with a `speculative_config` of this method: those by which it
    hands out the hidden states that EAGLE-3, DFlash and DSpark read (`states_arguments`), and the size of the vocabulary where Medusa looks for
    it."""
    method = None if speculative is None else speculative.get("method")
    reads_layers, needs_vocab_size = (
        method in methods_of(trait) for trait in (lambda spec: spec.reads_layers, lambda spec: spec.needs_vocab_size)
    )
    if not (reads_layers or needs_vocab_size) or not (target / "config.json").is_file():
        return {}
    whole = config_of(target, trust_remote_code=trust_remote_code)
    config = language_config(whole)
    if reads_layers:
        return environment.states_arguments(config, options)
    if config is whole:
        return {}
    return {"hf_overrides": {**options.get("hf_overrides", {}), "vocab_size": config.vocab_size}}


def usable_options(options: Mapping[str, Any], speculative: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options of vLLM's engine or server without those with which it would refuse to start, as `VllmConfig` does (vllm/config/vllm.py), and
    says so: a recipe's options are of all its methods. These are `async_scheduling: true` with some methods, where vLLM itself then chooses
    synchronous scheduling, and `per_request_spec_decode_metrics` without speculation."""
    if speculative is None:
        refused, why = "per-request-spec-decode-metrics", "vLLM takes it only where it speculates"
    else:
        refused, synchronous = "async-scheduling", None
        if (method := speculative.get("method")) in _SYNCHRONOUS:
            synchronous = f"`{method}`"
        elif speculative.get("disable_padded_drafter_batch"):
            synchronous = "`disable_padded_drafter_batch`"
        if synchronous is None:
            return dict(options)
        why = f"vLLM schedules engines with {synchronous} synchronously"
    left_out = [key for key, value in options.items() if flag_name(key) == refused and value]
    for key in left_out:
        _say(f"speculation: {key} is left out: {why}")
    return {key: value for key, value in options.items() if key not in left_out}


def drafter_files(drafter_dir: Path) -> list[str]:
    """Names of the files that vLLM reads. Those that a drafter from elsewhere may have or not are among them if they are there."""
    further = serving_spec(drafter_dir).further_files if (drafter_dir / "config.json").is_file() else ()
    own = further and "kind" in (_config(drafter_dir).get("draftsmith") or {})
    return [*_FILES, *(name for name in further if own or (drafter_dir / name).is_file())]


def drafter_sha256(drafter_dir: Path) -> dict[str, str]:
    """SHA-256 of the drafter's config and weights, by file name. Raises UserError: a file is missing."""
    names = drafter_files(drafter_dir)
    for name in names:
        if not (drafter_dir / name).is_file():
            raise UserError(
                f"There is no drafter in {drafter_dir} ({name} is missing). `draftsmith run RECIPE` makes it; if it is trained already, "
                "`draftsmith convert RECIPE` is enough."
            )
    return {name: sha256_of(drafter_dir / name) for name in names}


def content_of(directory: Path) -> dict[str, str]:
    """What identifies a model's files: SHA-256 by name, or the commit of a snapshot in the Hub's cache."""
    if is_snapshot(directory):
        return {"repository": directory.parent.parent.name, "commit": directory.name}
    files = (path for pattern in _CONTENT for path in directory.glob(pattern))
    return {path.name: sha256_of(path) for path in sorted(files) if path.name != stage.MARKER}  # which has times in it


def model_content(method: Method) -> dict[str, str]:
    """The same of the model that a method names by its folder; empty for others. A Hub id, whose model need not be here, stands for itself."""
    named = method.model if isinstance(method, DraftModel | TrainedDrafter) else None
    return content_of(Path(named)) if named is not None and Path(named).is_dir() else {}


def serving_spec(drafter_dir: Path) -> ServingSpec:
    """How vLLM serves the drafter. Raises UserError: the directory holds no drafter that this version can serve."""
    return KINDS[_kind(drafter_dir)].serving


def _kind(drafter_dir: Path) -> str:
    config = _config(drafter_dir)
    architecture = (config.get("architectures") or ["none"])[0]
    kind: str | None = str((config.get("draftsmith") or {}).get("kind"))  # some kinds have their architecture in common
    if kind not in KINDS or architecture not in KINDS[kind].serving.architectures:
        kind = kind_of_architecture(architecture)
        if kind == "eagle3" and any(MASK_OF_P_EAGLE in name for name in _tensor_names(drafter_dir)):
            kind = "p_eagle"
    if kind is None:
        raise UserError(
            f"{drafter_dir} holds the architecture {architecture}, which is not a drafter of a kind that can be served "
            f"({', '.join(KINDS)}). If it is one in another format, convert it: `draftsmith convert DIR --to vllm --out OUT`."
        )
    return kind


def _tensor_names(drafter_dir: Path) -> Collection[str]:
    """Names of the tensors in a drafter's files; none if there are no such files, or damaged ones, which vLLM reports."""
    try:
        return open_weights(drafter_dir).keys() if weight_files(drafter_dir) else ()
    except UserError:
        return ()


def needs_plugin(drafter_dir: Path) -> bool:
    """Whether vLLM needs the plugin to serve it (`serve/plugin`)."""
    return serving_spec(drafter_dir).needs_plugin


def reads_embeddings(drafter_dir: Path) -> bool:
    """Whether the drafter reads layer id 0, whose states vLLM's eager mode gets wrong on GPUs without the plugin (`serve/plugin`)."""
    return 0 in _layer_ids(_config(drafter_dir))


def needs_mend(drafter_dir: Path) -> bool:
    """Whether vLLM computes the drafter wrongly on this machine without the plugin (`serve/plugin`)."""
    spec = serving_spec(drafter_dir)
    several = _config(drafter_dir).get("num_hidden_layers", 1) > 1
    return environment.is_cpu() and (spec.method_on_cpus is not None or (spec.mended_on_cpus and several))


def has_8_bit_weights(drafter_dir: Path) -> bool:
    """Whether the drafter's linear layers are quantized."""
    return "quantization_config" in _config(drafter_dir)


def rounds_inputs(drafter_dir: Path) -> bool:
    """Whether the drafter's quantization also rounds the inputs of its layers."""
    groups = _config(drafter_dir).get("quantization_config", {}).get("config_groups", {}).values()
    return any(group.get("input_activations") for group in groups)


def drafter_name(drafter_dir: Path) -> str:
    """The drafter's display name: its architecture and its run."""
    architecture = (_config(drafter_dir).get("architectures") or ["drafter"])[0]
    return f"{architecture} ({drafter_dir.resolve().parent.name})"


def _config(directory: Path, what: str = "a drafter") -> dict[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        config = None
    if not isinstance(config, dict):
        raise UserError(
            f"There is no readable config.json in {directory}, which should hold {what} that vLLM can load. For the run's own "
            "drafter, `draftsmith run RECIPE` makes it; if it is trained already, `draftsmith convert RECIPE` is enough."
        )
    return config
