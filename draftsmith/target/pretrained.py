"""A target's config, its language model's part of it, its tokenizer and its model, as transformers reads them.

Every reading goes through here, because transformers would otherwise ask at the terminal whether a target's own Python code may run,
and because vLLM knows types of models that transformers does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.run.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

_LANGUAGE_MODELS = ("llm_config", "language_config", "thinker_config")
"""Where configs keep their language model's, beside the names that transformers' `get_text_config` knows."""
_WITH_TEMPLATE = {"mistral_format": False}
"""Of Mistral's models, the tokenizer of `tokenizer.json`: beside a `tekken.json` transformers otherwise takes mistral-common's, which has no
chat template and no character offsets. Releases before 5.16 know only the former, and ignore this."""


def config_of(place: str | Path, *, trust_remote_code: bool = False, revision: str | None = None) -> PretrainedConfig:
    """The whole config; `language_config` of it is the language model's.

    Args:
        place: the Hugging Face directory, or a Hub id.
        trust_remote_code: whether the target's own code may run (`target.trust_remote_code`).
        revision: on the Hub.

    Raises:
        UserError: there is no readable config, or neither transformers nor vLLM knows this type of model, or the target's own code
            would have to run, or failed.
    """
    from transformers import AutoConfig

    try:
        with _own_code("config", place, trust_remote_code):
            try:
                return AutoConfig.from_pretrained(place, revision=revision, trust_remote_code=trust_remote_code)
            except ValueError:
                config = _vllm_config(place, revision)
                if config is None:
                    raise
                return config
    except UserError:
        raise
    except Exception as error:  # what a wrong value breaks depends on the config's class
        why = " ".join(str(error).split())
        raise UserError(f"Cannot read the target's config in {place}: {why[:500] or type(error).__name__}") from error


def language_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a config that describes the language model: all of it, unless the target holds several models.

    Raises:
        UserError: there is none, or the model reads its prompt with an encoder.
    """
    text: Any = next(
        (found for name in _LANGUAGE_MODELS if hasattr(found := getattr(config, name, None), "model_type")), config
    )
    try:
        text = text.get_text_config()
    except ValueError as error:
        raise UserError(f"The target {config.name_or_path} has several language models: {error}") from None
    if not text.name_or_path:  # for messages
        text.name_or_path = config.name_or_path
    if text is not config and hasattr(config, "quantization_config"):  # stated for all models together
        text.quantization_config = config.quantization_config
    if getattr(text, "is_encoder_decoder", False):
        raise UserError(
            f"The target {config.name_or_path} (type `{config.model_type}`) reads its prompt with an encoder. Draftsmith makes drafters for "
            "causal language models, which have a decoder alone."
        )
    return text


def tokenizer_of(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer.

    Args:
        trust_remote_code: as for `config_of`.

    Raises:
        UserError: there is no readable tokenizer, or the target's own code would have to run, or failed.
        PermissionError: a file may not be read.
    """
    from transformers import AutoTokenizer

    try:
        with _own_code("tokenizer", directory, trust_remote_code):
            return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code, **_WITH_TEMPLATE)
    except (UserError, PermissionError):
        raise
    except Exception as error:  # the library for tokenizer.json raises plain ones, transformers many kinds
        files = ", ".join(sorted(path.name for path in directory.glob("tokenizer*"))) or "none is there"
        why = " ".join(str(error).split())[:300]
        raise UserError(
            f"The tokenizer of the target in {directory} cannot be read ({type(error).__name__}: {why}). Its files ({files}) are damaged or "
            "incomplete: download or save them again."
        ) from error


def processor_of(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """What makes images and text the target's inputs: a tokenizer and an image processor.

    Args:
        trust_remote_code: as for `config_of`.

    Raises:
        UserError: the target reads text only, or its processor cannot be loaded here, or does not say how many tokens an image takes.
    """
    from transformers import AutoProcessor

    config = config_of(directory, trust_remote_code=trust_remote_code)
    if getattr(config, "vision_config", None) is None:
        raise UserError(
            f"The target {directory} (type `{config.model_type}`) reads text only: its config has no `vision_config`. Use one that "
            "reads images, or leave rows with images out."
        )
    try:
        with _own_code("processor", directory, trust_remote_code):
            processor: Any = AutoProcessor.from_pretrained(
                directory, trust_remote_code=trust_remote_code, **_WITH_TEMPLATE
            )
    except UserError:
        raise
    except Exception as error:  # missing files, or packages that are not installed
        why = " ".join(str(error).split())[:300]
        raise UserError(
            f"The processor of the target {directory}, which images need, cannot be loaded: {why or type(error).__name__}. If its files are "
            "all there, install the package that it names; torchvision must be built for the installed torch."
        ) from None
    if not hasattr(processor, "_get_num_multimodal_tokens"):
        raise UserError(
            f"The processor of the target {directory} ({type(processor).__name__}) does not say how many tokens an image takes, which "
            "prompts with images need. Use another target, or leave rows with images out."
        )
    return processor


def model_of(
    directory: Path, dtype: torch.dtype, *, trust_remote_code: bool = False, attention: str | None = None
) -> Any:
    """The causal language model, for inference on the CPU; with what sees images, where the target has that.

    Args:
        trust_remote_code: as for `config_of`.
        attention: transformers' `attn_implementation`; None for its choice.

    Raises:
        UserError: the target's own code would have to run, or failed.
        OSError, ValueError, KeyError: there is no readable model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind = config_of(directory, trust_remote_code=trust_remote_code).model_type
    sees = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    with _own_code("model", directory, trust_remote_code):
        model: Any = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(
            directory, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation=attention
        )
        return model.eval()


@contextmanager
def _own_code(what: str, place: str | Path, trusted: bool) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # code that comes with a target can raise anything
        if "trust_remote_code" in str(error) and not trusted:
            files = ", ".join(sorted(path.name for path in Path(place).glob("*.py"))) or "Python files beside it"
            raise UserError(
                f"The target {place} comes with Python code of its own ({files}), which would run on this machine, with your rights, to "
                f"read its {what}. Draftsmith runs no such code unless it is told to. Read the code, and if you trust it, set "
                "`target.trust_remote_code: true` in the recipe (`--trust-remote-code` for a conversion): transformers and vLLM then run it in every stage."
            ) from None
        if isinstance(error, OSError | ValueError | KeyError) or not trusted:
            raise
        raise UserError(
            f"The Python code that comes with the target {place} failed to read its {what} ({type(error).__name__}: {error}). It may need "
            "another version of transformers, or packages that are not installed here."
        ) from error


def _vllm_config(place: str | Path, revision: str | None) -> PretrainedConfig | None:
    """The config of a model whose type transformers does not know and vLLM does; None for types that
    transformers knows, and for those with code of their own.

    Raises:
        UserError: vLLM does not know it either, or is not installed.
    """
    import transformers
    from transformers import CONFIG_MAPPING, PretrainedConfig

    fields, _ = PretrainedConfig.get_config_dict(place, revision=revision)
    kind = fields.get("model_type")
    if kind is None or kind in CONFIG_MAPPING:
        return None
    if find_spec("vllm") is None:
        said = "vLLM, which may know it, is not installed here"
    else:
        from vllm.transformers_utils.config import _CONFIG_REGISTRY, get_config

        if kind in _CONFIG_REGISTRY:
            return get_config(place, trust_remote_code=False, revision=revision)
        said = "the installed vLLM does not know it either"
    if "AutoConfig" in fields.get("auto_map", {}):
        return None  # that its own code is needed, or has failed, says more
    raise UserError(
        f"The target {place} is of the type `{kind}`, which transformers {transformers.__version__} does not know, and {said}. Use a "
        "release of them that does, or another target."
    )
