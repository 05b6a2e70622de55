"""The extraction connector in vLLM's own server: started, asked and read as docs/extraction-server.md says, and attacked."""

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draftsmith.config.recipe import EngineConfig
from draftsmith.engine import environment as engine_environment
from tests.integration.conftest import reference_states
from tests.integration.test_exchange import read_by_speculators
from tests.soak import in_soak

pytestmark = pytest.mark.integration

_DOCUMENT = Path(__file__).parents[2] / "docs" / "extraction-server.md"
_LAYER_IDS = (2, 15, 27, 30)  # in the document's command


@dataclass
class Server:
    folder: Path
    """Its working directory; `handoff` is in it."""
    url: str
    model: str
    commands: list[str]
    """Those of the document's code blocks that run here, for this target and port: start, ask, read."""
    process: subprocess.Popen[bytes]

    @property
    def handoff(self) -> Path:
        return self.folder / "handoff"

    def ask(self, path: str = "/v1/completions", request_id: str | None = None, **body: Any) -> dict[str, Any]:
        """Its answer to a POST; the body of a refusal where it refuses."""
        body = {"model": self.model, "max_tokens": 8, "temperature": 0, "return_token_ids": True} | body
        headers = {"Content-Type": "application/json"} | ({"X-Request-Id": request_id} if request_id else {})
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as refusal:
            return {"refused": refusal.code, "said": refusal.read().decode(errors="replace")}

    def log(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")


def commands(target: Path, port: int) -> list[str]:
    """The document's code blocks with this target and port in place of its own; without the one for GPUs, which
    `tests/unit/test_extraction_arguments.py` parses."""
    start, _, ask, read = re.findall(r"```(?:bash|python)\n(.*?)```", _DOCUMENT.read_text(), re.DOTALL)
    return [
        block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(target)).replace("8000", str(port))
        for block in (start, ask, read)
    ]


def environment() -> dict[str, str]:
    values = os.environ | engine_environment.vllm_environment(EngineConfig())
    del values["VLLM_ENABLE_V1_MULTIPROCESSING"]  # a server keeps its engine in a process of its own
    # The commands say `python`; a small cache, because an engine would take most of this machine's memory otherwise.
    return values | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "VLLM_CPU_KVCACHE_SPACE": "1"}


def run(folder: Path, command: str) -> subprocess.Popen[bytes]:
    with open(folder / "server.log", "wb") as log:
        return subprocess.Popen(
            ["bash", "-ec", command], cwd=folder, env=environment(), stdout=log, stderr=log, start_new_session=True
        )


def end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def started(target: Path, folder: Path, *changes: tuple[str, str]) -> Iterator[Server]:
    """A server in a folder of its own, ready; ended in all cases.

    Args:
        changes: to the document's command: what to replace, and by what.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    blocks = commands(target, port)
    for ours, other in changes:
        assert ours in blocks[0]
        blocks[0] = blocks[0].replace(ours, other)
    process = run(folder, blocks[0])
    server = Server(folder, f"http://127.0.0.1:{port}", str(target), blocks, process)
    try:
        deadline = time.monotonic() + 300
        while True:
            assert process.poll() is None, server.log()[-3000:]
            assert time.monotonic() < deadline, server.log()[-3000:]
            with suppress(OSError), urllib.request.urlopen(f"{server.url}/health", timeout=2):
                break
            time.sleep(0.5)
        yield server
    finally:
        end(process)


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(smollm2, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def server_as_vllm(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One whose connector is configured in the words of vLLM's example connector, for its clients.

    In every run of the tests, `tests/unit/test_connector.py` has these words."""
    changes = ("mkdir -p handoff\n", ""), ('"handoff_directory"', '"shared_storage_path"')
    with started(smollm2, tmp_path_factory.mktemp("server"), *changes) as server:
        yield server


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


def written(server: Server, answer: dict[str, Any]) -> Path:
    """The file that an answer names, once it is there. Nothing is asked meanwhile: an idle server writes it too."""
    path = server.handoff / answer["kv_transfer_params"]["draftsmith_handoff_file"]
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not appear\n{server.log()[-3000:]}"
        time.sleep(0.01)
    return path


def take(server: Server, answer: dict[str, Any]) -> dict[str, torch.Tensor]:
    """An answer's file, read and deleted."""
    path = written(server, answer)
    tensors = load_file(path)
    path.unlink()
    return tensors


def check_true(tensors: dict[str, torch.Tensor], model: Any, prompt: list[int], response: list[int]) -> None:
    """Tokens are prompt and answer without its last; states are transformers' own."""
    assert tensors["token_ids"].tolist() == (prompt + response)[: len(prompt) + max(0, len(response) - 1)]
    expected = reference_states(model, tensors["token_ids"], _LAYER_IDS)
    assert tensors["hidden_states"].shape == expected.shape
    error = (tensors["hidden_states"] - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))
    assert (error < 1e-4).all(), f"relative error by layer: {error}"


def check_answer(server: Server, model: Any, answer: dict[str, Any]) -> None:
    choice = answer["choices"][0]
    prompt = choice["prompt_token_ids"] if "text" in choice else answer["prompt_token_ids"]
    assert len(choice["token_ids"]) > 1
    check_true(take(server, answer), model, prompt, choice["token_ids"])


def test_the_document(server: Server) -> None:
    """Its commands, one after the other, on a server that has nothing else to do."""
    _, ask, read = server.commands
    subprocess.run(["bash", "-ec", ask], cwd=server.folder, env=environment(), check=True, timeout=120)
    said = subprocess.run(
        [sys.executable, "-c", read], cwd=server.folder, check=True, timeout=60, capture_output=True, text=True
    ).stdout
    match = re.fullmatch(r"torch.Size\(\[(\d+)\]\)\ntorch.Size\(\[(\d+), 4, 576\]\)\n", said)
    assert match, said
    usage = json.loads((server.folder / "answer.json").read_text())["usage"]
    assert int(match[1]) == int(match[2]) == usage["total_tokens"] - 1
    assert not list(server.handoff.iterdir()), "the one file was taken"


def files(folder: Path) -> set[tuple[Path, int]]:
    """Every file below, with its time of change."""
    return {(path, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_clients_choose_no_file(server: Server, model: Any) -> None:
    """Completions and a chat ask for a path, for one another's name and for one another's request id."""
    outside = server.folder / "outside"
    outside.mkdir()
    (outside / "theirs.safetensors").write_text("theirs")
    before = files(server.folder.parent)
    paths = {
        "hidden_states_path": f"{outside}/evil",
        "handoff_directory": str(outside),
        "draftsmith_handoff_file": "../evil",
    }

    def asked(name: str) -> dict[str, Any]:
        return {"draftsmith_name": name, **paths}

    same = {"request_id": "same"}
    first = server.ask(**same, prompt="The sky is", kv_transfer_params=asked("../../evil"))
    second = server.ask(**same, prompt="Roses are", kv_transfer_params=asked(written(server, first).name))
    chat = server.ask(
        "/v1/chat/completions",
        request_id="same",
        messages=[{"role": "user", "content": "Why is the sky blue?"}],
        kv_transfer_params=asked("../../evil"),
    )
    again = server.ask(request_id="same", prompt="The sky is", kv_transfer_params=asked(f"{outside}/theirs"))

    answers = [first, second, chat, again]
    names = [answer["kv_transfer_params"]["draftsmith_handoff_file"] for answer in answers]
    assert len(set(names)) == 4
    assert all(re.fullmatch(r"[0-9a-f]{32}\.safetensors", name) for name in names)
    for answer in answers:
        assert set(answer["kv_transfer_params"]) == {"draftsmith_handoff_file"}
        check_answer(server, model, answer)
    assert not list(server.handoff.iterdir()), "four files, no more"
    changed = {path for path, _ in before ^ files(server.folder.parent)}
    assert changed <= {server.folder / "server.log"}


def test_malformed_parameters_harm_nobody(server: Server, model: Any) -> None:
    """Refused or ignored, and the engine lives: an ordinary request is answered after each."""
    ignored: list[dict[str, Any]] = [
        {"kv_transfer_params": {"draftsmith_name": value}} for value in (5, None, ["a"], {"a": 1}, "a" * 100_000, "\0")
    ]
    ignored += [{"kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": [], "remote_block_ids": "x"}}]
    refused = [{"kv_transfer_params": value} for value in (["draftsmith_name"], 5, "draftsmith_name")]
    refused += [{"vllm_xargs": {"kv_transfer_params": value}} for value in (["draftsmith_name"], 5, "draftsmith_name")]
    for body in ignored + refused:
        answer = server.ask(prompt="The sky is", **body)
        assert ("refused" in answer) == (body in refused), (body, answer)
        assert server.process.poll() is None, server.log()[-3000:]
        check_answer(server, model, server.ask(prompt="Roses are") if "refused" in answer else answer)
    assert not list(server.handoff.iterdir())


def test_what_a_client_may_ask_for(server: Server, model: Any) -> None:
    """The prompt alone; nothing; and a stop text, after which nothing is saved."""
    answer = server.ask(prompt="The sky is", kv_transfer_params={"draftsmith_prompt_only": True})
    check_true(take(server, answer), model, answer["choices"][0]["prompt_token_ids"], [])
    discarded = server.ask(prompt="The sky is", kv_transfer_params={"draftsmith_discard": True})
    word = discarded["choices"][0]["text"].split()[1]
    stopped = server.ask(prompt="The sky is", stop=[word], kv_transfer_params={"draftsmith_name": "mine"})
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert word not in stopped["choices"][0]["text"]
    for unsaved in (discarded, stopped):
        assert unsaved["kv_transfer_params"] is None
    check_answer(server, model, server.ask(prompt="Roses are"))  # whatever came before it is written by now
    assert not list(server.handoff.iterdir())


def test_a_failed_write_ends_an_idle_server(server: Server) -> None:
    """Rather than clients that wait for ever. The last test of this server."""
    server.handoff.rmdir()
    server.ask(prompt="The sky is")
    server.process.wait(60)  # vLLM calls an end without its engine a success
    assert "No such file or directory" in server.log()


@in_soak
@pytest.mark.parametrize("asked", [None, {}, {"include_output_tokens": True}, {"include_output_tokens": False}])
def test_clients_of_vllm_s_example_connector(asked: dict[str, Any] | None, server_as_vllm: Server, model: Any) -> None:
    """Its own reader, at once: it waits for the lock until the file is there. The response's states are for those who ask."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        cleanup_hidden_states,
        load_hidden_states,
    )

    server, outside = server_as_vllm, server_as_vllm.folder / "outside.safetensors"
    if asked is not None:
        asked = asked | {"hidden_states_path": str(outside), "draftsmith_handoff_file": "../outside.safetensors"}
    answer = server.ask(prompt="The sky is", kv_transfer_params=asked)
    assert set(answer["kv_transfer_params"]) == {"hidden_states_path", "draftsmith_handoff_file"}
    path = answer["kv_transfer_params"]["hidden_states_path"]
    tensors = load_hidden_states(path)
    assert tensors["token_ids"].dtype == torch.int64
    choice = answer["choices"][0]
    check_true(
        tensors,
        model,
        choice["prompt_token_ids"],
        choice["token_ids"] if asked and asked.get("include_output_tokens") else [],
    )
    assert Path(path).parent == server.handoff
    cleanup_hidden_states(path)
    assert not list(server.handoff.iterdir())
    assert not outside.exists()


@in_soak
def test_speculators_own_client(server_as_vllm: Server, model: Any, tmp_path: Path) -> None:
    """Its data set class asks the server for the states of rows that have none, many rows after one another."""
    texts = [f"{text} {number}" for number in range(10) for text in ("The sky is", "Roses are")]
    tokens = [server_as_vllm.ask(prompt=text)["choices"][0]["prompt_token_ids"] for text in texts]
    rows = [{"input_ids": ids, "loss_mask": [1] * len(ids), "seq_len": len(ids)} for ids in tokens]
    Dataset.from_list(rows).with_format("torch").save_to_disk(tmp_path / "data")
    for path in server_as_vllm.handoff.iterdir():
        path.unlink()
    job = {"data": str(tmp_path / "data"), "train_data_ratio": 1.0, "endpoint": f"{server_as_vllm.url}/v1"}
    found = read_by_speculators(tmp_path, job)
    for number, ids in enumerate(tokens):
        states, last = (found[f"train.{number}.{name}"] for name in ("hidden_states", "verifier_last_hidden_states"))
        together = torch.cat([states.unflatten(1, (len(_LAYER_IDS) - 1, -1)), last.unsqueeze(1)], dim=1)
        check_true({"token_ids": found[f"train.{number}.input_ids"], "hidden_states": together}, model, ids, [])
    assert not list(server_as_vllm.handoff.iterdir()), "speculators deletes what it has read, and the locks"


@in_soak
@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        (
            "mkdir -p handoff\n",
            "handoff, where no file can be written (No such file or directory). Create that folder",
        ),
        ("--no-enable-prefix-caching ", "Start it with --no-enable-prefix-caching."),
    ],
)
def test_a_wrong_start_says_why(left_out: str, said: str, smollm2: Path, tmp_path: Path) -> None:
    start = commands(smollm2, 8000)[0]
    assert left_out in start
    process = run(tmp_path, start.replace(left_out, ""))
    try:
        assert process.wait(300) != 0
    finally:
        end(process)
    log = (tmp_path / "server.log").read_text()
    assert "UserError: " in log, log[-3000:]
    assert said in log
