"""`serve/record_proposals.py` for prompts with images: the environment variable PYTEST_IMAGES has a list of files for each prompt."""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def add_images() -> None:
    import vllm
    from PIL import Image

    images, generate = json.loads(os.environ["PYTEST_IMAGES"]), vllm.LLM.generate

    def with_images(llm: Any, prompts: list[Any], *arguments: Any, **named: Any) -> Any:
        for prompt, paths in zip(prompts, images, strict=True):
            if paths:
                prompt["multi_modal_data"] = {"image": [Image.open(path) for path in paths]}
        return generate(llm, prompts, *arguments, **named)

    vllm.LLM.generate = with_images  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.modules["draftsmith"] = None  # type: ignore[assignment]
    add_images()
    runpy.run_path(str(Path(__file__).parents[2] / "serve" / "record_proposals.py"), run_name="__main__")
