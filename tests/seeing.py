"""Tiny targets that read images, with random weights, and images for them.

LLaVA, whose tokens all have their places in the text as positions, and Qwen2.5-VL, which has M-RoPE. vLLM loads both with torchvision
only, and transformers the latter.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, CLIPVisionConfig, LlavaConfig, LlavaProcessor, Qwen2_5_VLConfig
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests.families import FAMILIES, HIDDEN, TinyFamily, save_tokenizer

LLAMA = FAMILIES[0]
IMAGE, VIDEO, BEFORE, AFTER = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
"""Qwen's names, which vLLM looks for."""
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}MARK{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_image(path: Path, seed: int, height: int = 30, width: int = 40) -> Path:
    """A PNG file of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def _tokenizer(directory: Path, mark: str) -> Any:
    save_tokenizer(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE, VIDEO, BEFORE, AFTER]})
    tokenizer.chat_template = TEMPLATE.replace("MARK", mark)
    return tokenizer


def save_llava_processor(directory: Path) -> LlavaConfig:
    """What reads images for a tiny LLaVA: four tokens each. Returns its config, saved too."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(directory, IMAGE)
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    LlavaProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
        image_token=IMAGE,
    ).save_pretrained(directory)
    _name_like_published_ones(directory)
    text = LLAMA.config()
    text.architectures = ["LlamaForCausalLM"]
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=4,
        architectures=["LlavaForConditionalGeneration"],
    )
    config.save_pretrained(directory)
    return config


def save_qwen_processor(directory: Path) -> Qwen2_5_VLConfig:
    """What reads images for a tiny Qwen2.5-VL: a token for each 28 x 28 pixels. Returns its config, saved too."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(directory, f"{BEFORE}{IMAGE}{AFTER}")
    size = {"shortest_edge": 28 * 28, "longest_edge": 6 * 28 * 28}
    Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(size=size),
        tokenizer,
        Qwen2VLVideoProcessor(size=size),
        chat_template=tokenizer.chat_template,
    ).save_pretrained(directory)
    text = TinyFamily(
        "",
        "qwen2_5_vl_text",
        LLAMA.fields
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        },
    ).config()
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in (("image", IMAGE), ("video", VIDEO), ("vision_start", BEFORE), ("vision_end", AFTER))
    }
    config = Qwen2_5_VLConfig(
        text_config=text.to_dict(),
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
            "fullatt_block_indexes": [1],
            "window_size": 56,
        },
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        **ids,
    )
    config.save_pretrained(directory)
    return config


def save_seeing_target(directory: Path, kind: str) -> None:
    """A whole target, `llava` or `qwen2_5_vl`, in float32, with norms and biases that are not ones and zeros."""
    from transformers import LlavaForConditionalGeneration, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    if kind == "llava":
        model: Any = LlavaForConditionalGeneration(save_llava_processor(directory))
    else:
        model = Qwen2_5_VLForConditionalGeneration(save_qwen_processor(directory))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand_like(parameter) * 0.5)
            elif "language_model" not in name and "lm_head" not in name:
                parameter.normal_(std=0.2)  # so that images make a difference
        model.lm_head.weight[257:] = 0  # it says no placeholders, which would stand for no image
    model.float().save_pretrained(directory)
    _name_like_published_ones(directory)


def _name_like_published_ones(directory: Path) -> None:
    """Published processors do not name what they run on, and published tensors of LLaVA, which alone vLLM reads, have longer names."""
    for path in directory.glob("*processor_config.json"):
        path.write_text(path.read_text().replace('ImageProcessorPil"', 'ImageProcessor"'))
    for path in directory.glob("model.safetensors"):
        weights = load_file(path)
        longer = {
            re.sub(r"vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name): weights[name]
            for name in weights
        }
        save_file(longer, path, {"format": "pt"})
