"""What a reader of a published card does: copy its command, and have vLLM download both models and serve them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from draftsmith.config.recipe import Recipe
from draftsmith.convert.convert import run_convert
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.run import stage
from draftsmith.run.weights import in_memory
from draftsmith.serve.evaluation.evaluate import run_evaluate
from draftsmith.target.info import describe_target
from draftsmith.target.tensors import load_target_tensors
from tests.hub_server import TOKEN, Hub, serve_hub
from tests.integration.conftest import make_target
from tests.integration.test_evaluate import alive, tiny_recipe
from tests.unit.test_publish import serve_command

pytestmark = pytest.mark.integration

TARGET, REPO, PORT = "you/target", "me/drafter", 8000
"""The port is vLLM's own: the command names none."""


def make_checkpoint(directory: Path, recipe: Recipe, target_dir: Path) -> None:
    """An untrained drafter, as training leaves one."""
    target = describe_target(target_dir, name=TARGET)
    config = Eagle3Drafter.make_config(recipe.train.drafter, target, (1, 2, target.num_hidden_layers), 64)
    assert isinstance(config, Eagle3Config)
    torch.manual_seed(0)
    drafter = Eagle3Drafter.from_target(config, load_target_tensors(target_dir), torch.arange(64))
    training = {"steps": 1, "tokens": 1, "parameters_trained": 1}
    stage.claim(directory, fresh=True)
    Checkpoint(
        kind="eagle3",
        config=config.to_dict(),
        draft_token_ids=torch.arange(64),
        weights=in_memory(drafter.state_dict()),
        training=training,
        target={"name": target.name, "revision": target.revision, "config_hash": target.config_hash},
    ).save(directory)
    sections = recipe.model_dump(mode="json", include={"seed", "target", "train"})
    stage.StageRun("train", directory).finish("untrained", training, recipe=sections)


def draftsmith(hub: Hub, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "draftsmith.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment(hub),
    )
    assert done.returncode == 0, done.stderr


def environment(hub: Hub) -> dict[str, str]:
    return os.environ | {
        "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip


def port_is_free() -> bool:
    with socket.socket() as port:
        return port.connect_ex(("127.0.0.1", PORT)) != 0


@pytest.mark.skipif(not port_is_free(), reason=f"the command of a card serves on port {PORT}, which is in use")
def test_the_card_s_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate, publish, and run the command of the card as it is written."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    make_target(tmp_path / "target")
    recipe = tiny_recipe(tmp_path)
    # Few engines: what an evaluation measures is test_evaluate's.
    few = {"k": (2,), "concurrency": (), "dtypes": ("float32",), "only": ("other",)}
    recipe = recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update=few)})
    runs = tmp_path / "runs"
    make_checkpoint(runs / "tiny" / "checkpoint", recipe, tmp_path / "target")
    run_convert(recipe, runs / "tiny")
    run_evaluate(recipe, runs / "tiny")
    with serve_hub() as hub:
        hub.add(TARGET, {file.name: file.read_bytes() for file in (tmp_path / "target").iterdir()})
        draftsmith(hub, "publish", str(runs / "tiny"), "--repo", REPO, "--base-model", TARGET)
        card = hub.repos[REPO].files()["README.md"].data.decode()
        results = json.loads((runs / "tiny" / "eval" / "results.json").read_text())
        measured = {result.metric_type: result.metric_value for result in ModelCard(card).data.eval_results}
        assert measured["speedup"] == round(results["suites"]["other"]["speedup"], 3)
        run_as_written(serve_command(card), hub)


def run_as_written(command: str, hub: Hub) -> None:
    """Serve, ask something, and see that tokens were drafted."""
    server = subprocess.Popen(["bash", "-c", command], env=environment(hub), start_new_session=True)
    url = f"http://127.0.0.1:{PORT}"
    try:
        deadline = time.monotonic() + 300
        while True:
            assert server.poll() is None, command
            assert time.monotonic() < deadline
            with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
                break
            time.sleep(0.5)
        body = {"model": TARGET, "prompt": "Hello?", "temperature": 0, "max_tokens": 16}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] > 0
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            drafts = re.search(r"^vllm:spec_decode_num_drafts_total\S* (\S+)$", answer.read().decode(), re.M)
        assert drafts is not None
        assert float(drafts[1]) > 0
        assert hub.requested(f"GET /{REPO}/resolve/") > 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert not alive(server.pid)
