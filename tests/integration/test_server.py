"""`draftsmith serve` with clients as people write them: answers, counters, keys, and nothing left behind."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml

from draftsmith.config.drafters import KINDS
from draftsmith.config.evaluation import ServeConfig
from draftsmith.config.loading import load_recipe
from draftsmith.config.recipe import Recipe
from draftsmith.convert.convert import run_convert
from draftsmith.extract.extract import run_extract
from draftsmith.serve.evaluation.evaluate import run_evaluate
from draftsmith.train.train import run_train
from tests.integration.conftest import demo_prompts, make_mtp_target, make_target, write_recipe
from tests.integration.test_evaluate import alive, make_drafter, tiny_recipe
from tests.soak import in_soak

pytestmark = pytest.mark.integration

KEY = "a key of the tests"


@contextmanager
def serving(recipe: Recipe, folder: Path, *options: str, key: str | None = None) -> Iterator[tuple[str, Any]]:
    """The command's process and the server's address, once it has said that it is ready."""
    (folder / "served.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_none=True)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [
        sys.executable, "-m", "draftsmith.cli", "serve", str(folder / "served.yaml"), "--runs", str(folder / "runs"),
        "--port", str(port), *options,
    ]  # fmt: skip
    environment = os.environ | ({"VLLM_API_KEY": key} if key else {})
    process = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if "curl" in line:
            break
    assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in said, said[-3000:]
    assert ('-H "Authorization: Bearer $VLLM_API_KEY"' in said) == (key is not None)
    assert KEY not in said
    threading.Thread(target=process.stderr.read, daemon=True).start()  # or the pipe fills up
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(90)


def family(process: Any) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def drafts(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        found = re.search(r"^vllm:spec_decode_num_drafts_total\S* (\S+)$", answer.read().decode(), re.M)
    return float(found[1]) if found else 0.0


def ask(client: openai.OpenAI, model: str, text: str, *, max_tokens: int = 24) -> str:
    """The greedy answer, whole; and the same in pieces."""
    question: Any = [{"role": "user", "content": text}]
    options: Any = {"model": model, "messages": question, "temperature": 0, "max_tokens": max_tokens}
    whole = client.chat.completions.create(**options).choices[0].message.content or ""
    pieces = client.chat.completions.create(**options, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == whole
    return whole


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """A server's address and process. Alone a request gets three draft tokens a step, and beside others one. When told to stop, it leaves
    nothing behind."""
    folder = tmp_path_factory.mktemp("served")
    make_target(folder / "target")
    make_drafter(folder / "runs" / "tiny" / "vllm", folder / "target")
    method = {"method": "eagle3", "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 7, 1]]}
    options = {"max_num_seqs": 7, "per_request_spec_decode_metrics": "detailed"}
    serve = ServeConfig.model_validate({"method": method, "vllm_args": options})
    with serving(tiny_recipe(folder).model_copy(update={"serve": serve}), folder, key=KEY) as (url, process):
        yield url, process
        children = family(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not any(alive(child.pid) for child in children)


def test_serve(served: tuple[str, Any]) -> None:
    """It says when it is ready, lets in who has the key, and drafts."""
    url, process = served
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="another").models.list()
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
    (model,) = client.models.list().data
    ask(client, model.id, "Hello?")
    answer = client.completions.create(model=model.id, prompt="Hello", max_tokens=4, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    pieces = client.completions.create(
        model=model.id, prompt="Hello", max_tokens=4, temperature=0, echo=False, n=1, stream=True
    )
    assert "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text
    assert drafts(url) > 0
    command = " ".join(word for child in family(process) for word in child.cmdline())
    assert "--max-num-seqs 7" in command
    assert KEY not in command


def test_a_schedule_and_what_each_request_accepted(served: tuple[str, Any]) -> None:
    """The schedule is followed, and each answer says what was drafted for it."""

    def asked(text: str, **more: Any) -> dict[str, Any]:
        body = _question(text) | {"max_tokens": 120, "ignore_eos": True} | more
        headers = {"Authorization": f"Bearer {KEY}"}
        answer = httpx.post(f"{served[0]}/v1/chat/completions", json=body, headers=headers, timeout=120)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()["metrics"]["speculative_decoding"]
        return found

    alone = asked("Hello?")
    assert set(alone["per_step_drafted"]) == {3}
    assert alone["num_spec_steps"] == len(alone["per_step_accepted"])
    assert alone["mean_acceptance_length"] == pytest.approx(
        1 + sum(alone["per_step_accepted"]) / len(alone["per_step_accepted"])
    )
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda n: asked(f"Question {n}?", temperature=0.7, top_p=0.9), range(4)))
    # One may be through before the others begin, which have each other.
    assert sum(1 in one["per_step_drafted"] for one in together) >= 2
    steps = [drafted for one in together for drafted in one["per_step_drafted"]]
    assert steps.count(1) > steps.count(3)


@in_soak
def test_a_killed_parent_leaves_no_server(tmp_path: Path) -> None:
    make_target(tmp_path / "target")
    with serving(tiny_recipe(tmp_path), tmp_path, "-s", "serve.method={method: ngram}") as (_, process):
        children = family(process)
        assert len(children) > 1  # the server, and its engine
        process.kill()
        process.wait()
        deadline = time.monotonic() + 20
        while any(alive(child.pid) for child in children) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [child.pid for child in children if alive(child.pid)]


@in_soak
def test_a_dead_server_says_why(tmp_path: Path) -> None:
    make_target(tmp_path / "target")
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(tiny_recipe(tmp_path).model_dump(mode="json", exclude_none=True))
    )
    done = subprocess.run(
        [
            sys.executable, "-m", "draftsmith.cli", "serve", str(tmp_path / "recipe.yaml"), "--port", "8123",
            "-s", "serve.method={method: none}", "-s", "serve.vllm_args={block_size: 7}",
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert re.search(r"error: vLLM's server ended by itself with status \d+: .*[Bb]lock", done.stderr), done.stderr[
        -3000:
    ]


@in_soak
def test_every_method_answers_as_the_baseline(smollm2: Path, tmp_path: Path) -> None:
    """The real target through the server, by every way of speculating: the same texts, and tokens were drafted."""
    recipe_path = write_recipe(
        tmp_path,
        smollm2,
        demo_prompts(40),
        ["What is a comet?", "Name three rivers."],
        extract={"max_num_seqs": 42, "max_tokens": 32},
    )
    run_extract(load_recipe(recipe_path), tmp_path / "runs" / "test")
    methods: dict[str, dict[str, Any]] = {
        "none": {"method": "none"},
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4},
        "draft_model": {"method": "draft_model", "model": str(smollm2)},
        "suffix": {"method": "suffix"},
    }
    for kind in KINDS:
        recipe = load_recipe(
            recipe_path,
            [f"train.drafter.kind={kind}", "train.epochs=1", "train.tokens_per_step=512", "evaluate.k=[1,2,3]"],
        )
        run_dir = tmp_path / kind
        run_dir.mkdir()
        (run_dir / "store").symlink_to(tmp_path / "runs" / "test" / "store")
        run_train(recipe, run_dir)
        run_convert(recipe, run_dir)
        methods[kind] = {"method": kind, "model": str(run_dir / "vllm"), "num_speculative_tokens": 3}
    answers: dict[str, list[str]] = {}
    for name, method in methods.items():
        recipe = load_recipe(recipe_path, [f"serve.method={json.dumps(method)}"])
        with serving(recipe, tmp_path) as (url, _):
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
            model = client.models.list().data[0].id
            answers[name] = [ask(client, model, text, max_tokens=48) for text in demo_prompts(44)[40:]]
            assert (drafts(url) > 0) == (name != "none"), name
        assert answers[name] == answers["none"], name


@in_soak
def test_a_target_s_own_layers_guess(tmp_path: Path) -> None:
    """`mtp` through the server, on a tiny target with random weights: answers are the baseline's, and tokens were drafted."""
    make_mtp_target(tmp_path / "target")
    recipe = tiny_recipe(tmp_path)
    answers: dict[str, list[list[int]]] = {}
    for name in ("none", "mtp"):
        served = recipe.model_copy(update={"serve": ServeConfig.model_validate({"method": {"method": name}})})
        with serving(served, tmp_path) as (url, _):
            asked = (
                httpx.post(f"{url}/v1/chat/completions", json=_question(f"{n * n}?"), timeout=60) for n in range(40)
            )
            answers[name] = [answer.json()["choices"][0]["token_ids"] for answer in asked]
            ask(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), "target", "And in pieces?")
            assert (drafts(url) > 0) == (name == "mtp")
    assert answers["mtp"] == answers["none"]
    assert len(set(map(tuple, answers["none"]))) > 20


@in_soak
def test_rates_with_real_servers(tmp_path: Path) -> None:
    """vLLM's load generator against two servers, and what it says in the results."""
    make_target(tmp_path / "target")
    make_drafter(tmp_path / "runs" / "tiny" / "vllm", tmp_path / "target")
    recipe = tiny_recipe(tmp_path)
    options = recipe.evaluate.model_copy(
        update={"only": ("other",), "request_rates": (4.0, 50.0), "request_prompts": 3}
    )
    found = run_evaluate(recipe.model_copy(update={"evaluate": options}), tmp_path / "runs" / "tiny")
    assert set(found["rates"]) == {"4", "50"}
    for rate in found["rates"].values():
        assert (rate["suite"], rate["requests"]) == ("other", 3)
        for at_rate in (rate["baseline"], rate["speculative"]):
            assert at_rate["seconds_per_token"] > 0
            assert at_rate["first_token_seconds"] > 0
            assert at_rate["first_token_seconds_p99"] is None, "of three requests"
            assert at_rate["tokens_per_second"] == pytest.approx(12 * at_rate["requests_per_second"], rel=0.5)
    assert found["rates"]["4"]["baseline"]["requests_per_second"] <= 4
    assert "By request rate" in (tmp_path / "runs" / "tiny" / "eval" / "report.html").read_text()


REQUESTS, IN_FLIGHT = 500, 500


@in_soak
def test_hundreds_of_clients_of_all_manners(tmp_path: Path) -> None:
    """500 requests at once, some cut off, some nonsense: who waits gets the baseline's answer, and nothing grows."""
    make_target(tmp_path / "target")
    make_drafter(tmp_path / "runs" / "tiny" / "vllm", tmp_path / "target")
    recipe = tiny_recipe(tmp_path)
    # A small cache: it is faulted in as it is used, which must not look like a leak.
    recipe = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"kv_cache_gib": 0.05})})
    texts = [f"question {number * number}?" for number in range(40)]
    with serving(recipe, tmp_path, "-s", "serve.method={method: none}") as (url, _):
        expected = {}
        for text in texts:
            answer = httpx.post(f"{url}/v1/chat/completions", json=_question(text), timeout=60)
            expected[text] = answer.json()["choices"][0]["token_ids"]
    assert len(set(map(tuple, expected.values()))) > len(texts) // 2
    with serving(recipe, tmp_path) as (url, process):
        asyncio.run(_crowd(url, expected, REQUESTS, seed=1))  # warms up, with as many at once
        before = _size(process)
        counts = asyncio.run(_crowd(url, expected, REQUESTS, seed=2))
        time.sleep(2)
        after = _size(process)
        assert min(counts.values()) > REQUESTS // 20, counts
        assert sum(counts.values()) == REQUESTS
        assert after[0] < before[0] + 64 * 2**20, (before, after)
        assert after[1] <= before[1] + 8, (before, after)
        assert httpx.get(f"{url}/health").status_code == 200
        assert drafts(url) > 0
        children = family(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not any(alive(child.pid) for child in children)


def _question(text: str) -> dict[str, Any]:
    """Asks for tokens: most of the tiny target's have no text."""
    messages = [{"role": "user", "content": text}]
    return {"model": "target", "messages": messages, "temperature": 0, "max_tokens": 32, "return_token_ids": True}


def _size(process: Any) -> tuple[int, int]:
    """Memory and open files of the server and its engine."""
    found = family(process)
    return sum(one.memory_info().rss for one in found), sum(one.num_fds() for one in found)


async def _crowd(url: str, expected: dict[str, list[int]], count: int, *, seed: int) -> dict[str, int]:
    """How many requests ended how."""
    chooser = random.Random(seed)
    counts = dict.fromkeys(("answered", "cut off", "nonsense"), 0)
    slots = asyncio.Semaphore(IN_FLIGHT)
    limits = httpx.Limits(max_connections=IN_FLIGHT)

    async def one(client: httpx.AsyncClient, manner: str, text: str, wait: float) -> None:
        body = _question(text)
        async with slots:
            if manner == "nonsense":
                wrong: list[Any] = [
                    b"{",
                    b"\xff\x00",
                    json.dumps(body | {"max_tokens": -1}),
                    json.dumps(body | {"messages": 5}),
                ]
                answer = await client.post(
                    "/v1/chat/completions",
                    content=wrong[int(wait * 1e6) % 4],
                    headers={"Content-Type": "application/json"},
                )
                assert 400 <= answer.status_code < 500, answer.text
            elif manner == "cut off":
                with_stream = body | {"stream": True, "max_tokens": 200}
                async with client.stream("POST", "/v1/chat/completions", json=with_stream) as answer:
                    async for _ in answer.aiter_bytes():
                        if chooser.random() < 0.3:
                            break  # the connection is closed with the rest unread
            else:
                answer = await client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["token_ids"] == expected[text], text
        counts[manner] += 1

    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        tasks = []
        for _ in range(count):
            manner = chooser.choices(list(counts), (6, 3, 1))[0]
            tasks.append(one(client, manner, chooser.choice(list(expected)), chooser.random()))
        await asyncio.gather(*tasks)
    return counts
