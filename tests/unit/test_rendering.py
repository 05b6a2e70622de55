"""Rendering: the loss is on what the assistant says, token by token, for every kind of chat template."""

import json
import random
import re

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from draftsmith.data.chat_template import Renderer, Unrenderable
from draftsmith.data.conversations import Conversation
from draftsmith.run.errors import UserError
from tests.unit.chat_templates import CHATML, GEMMA, LLAMA3, MISTRAL, QWEN3

CONVERSATIONS = 1000
SPECIAL = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    "gemma": ["<bos>", "<start_of_turn>", "<end_of_turn>"],
}  # fmt: skip
NOT_SPECIAL = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # added to Qwen3's vocabulary as plain words
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3, "mistral": MISTRAL, "gemma": GEMMA}
BOS = {"llama3": "<|begin_of_text|>", "mistral": "<s>", "gemma": "<bos>"}
EOS = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "qwen3": "<|im_end|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
}

CORPUS = [
    "so the answer is that user and assistant said system model hello world\n\nAssistant: yes. User: no. 12 34"
] * 4


def make_tokenizer(template: str | None, special: list[str], bos: str | None = None, eos: str | None = None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # as many real ones do
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if "<|im_end|>" in special:
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in NOT_SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, bos_token=bos, eos_token=eos)


def renderer_of(kind: str) -> tuple[Renderer, PreTrainedTokenizerFast]:
    tokenizer = make_tokenizer(TEMPLATES[kind], SPECIAL[kind], BOS.get(kind), EOS[kind])
    return Renderer(tokenizer), tokenizer


# ---- the independent computation: who says what, turn by turn, written out by hand for each kind ----

Said = list[tuple[str, bool]]  # a piece of text and whether the assistant produces it


def dumps(value) -> str:
    return json.dumps(value, ensure_ascii=False)


def chatml(messages: list[dict], tools) -> Said:
    said: Said = []
    for m in messages:
        said.append((f"<|im_start|>{m['role']}\n", False))
        answer = m["role"] == "assistant"
        said += [(m["content"], answer), ("<|im_end|>", answer), ("\n", False)]
    return said


def llama3(messages: list[dict], tools) -> Said:
    said: Said = [("<|begin_of_text|>", False)]
    first_question = next(i for i, m in enumerate(messages) if m["role"] == "user")
    for i, m in enumerate(messages):
        role, text = m["role"], m["content"].strip()
        if role == "tool":
            role, text = "ipython", dumps(m["content"])
        elif m.get("tool_calls"):
            call = m["tool_calls"][0]["function"]
            text = '{"name": "' + call["name"] + '", "parameters": ' + dumps(call["arguments"]) + "}"
        elif tools and i == first_question:
            text = (
                "Answer with a function call where it helps.\n\n"
                + "".join(dumps(tool) + "\n\n" for tool in tools)
                + text
            )
        said += [(f"<|start_header_id|>{role}<|end_header_id|>\n\n", False), (text + "<|eot_id|>", role == "assistant")]
    return said


def qwen3(messages: list[dict], tools) -> Said:
    said: Said = []
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    if tools:
        start = f"{system}\n\n" if system else ""
        lines = "".join("\n" + dumps(tool) for tool in tools)
        said.append((f"<|im_start|>system\n{start}# Tools\n<tools>{lines}\n</tools><|im_end|>\n", False))
    elif system:
        said.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    last_question = max(i for i, m in enumerate(messages) if m["role"] == "user")
    for i, m in enumerate(messages):
        text = m["content"]
        if m["role"] == "user":
            said.append((f"<|im_start|>user\n{text}<|im_end|>\n", False))
        elif m["role"] == "tool":
            opens = messages[i - 1]["role"] != "tool"
            closes = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
            said.append(("<|im_start|>user" if opens else "", False))
            said.append((f"\n<tool_response>\n{text}\n</tool_response>", False))
            said.append(("<|im_end|>\n" if closes else "", False))
        elif m["role"] == "assistant":
            thinking = m.get("reasoning_content", "")
            if not thinking and "</think>" in text:
                thinking, text = text.removeprefix("<think>\n").split("\n</think>\n\n")
            shown = bool(text)
            if i > last_question and (thinking or i + 1 == len(messages)):
                text = f"<think>\n{thinking}\n</think>\n\n" + text.lstrip("\n")
            for number, call in enumerate(m.get("tool_calls", [])):
                text += "\n" if number or shown else ""
                f = call["function"]
                text += f'<tool_call>\n{{"name": "{f["name"]}", "arguments": {dumps(f["arguments"])}}}\n</tool_call>'
            said += [("<|im_start|>assistant\n", False), (text + "<|im_end|>", True), ("\n", False)]
    return said


def mistral(messages: list[dict], tools) -> Said:
    said: Said = [("<s>", False)]
    system = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
    last_question = max(i for i, m in enumerate(messages) if m["role"] == "user")
    for i, m in enumerate(messages):
        if m["role"] == "user":
            if i == last_question and tools:
                said.append((f"[AVAILABLE_TOOLS] {dumps(tools)}[/AVAILABLE_TOOLS]", False))
            said.append((f"[INST] {system if i == last_question else ''}{m['content']}[/INST]", False))
        elif m["role"] == "tool":
            result = f'{{"content": {dumps(m["content"])}, "call_id": "{m["tool_call_id"]}"}}'
            said.append((f"[TOOL_RESULTS] {result}[/TOOL_RESULTS]", False))
        elif m.get("tool_calls"):
            calls = ", ".join(
                f'{{"name": "{c["function"]["name"]}", "arguments": {dumps(c["function"]["arguments"])}, "id": "{c["id"]}"}}'
                for c in m["tool_calls"]
            )
            said.append((f"[TOOL_CALLS] [{calls}]</s>", True))
        elif m["role"] == "assistant":
            said.append((f" {m['content'].strip()}</s>", True))
    return said


def gemma(messages: list[dict], tools) -> Said:
    said: Said = [("<bos>", False)]
    for m in messages:
        answer = m["role"] == "assistant"
        said.append((f"<start_of_turn>{'model' if answer else 'user'}\n", False))
        said += [(m["content"].strip() + "<end_of_turn>", answer), ("\n", False)]
    return said


BY_HAND = {"chatml": chatml, "llama3": llama3, "qwen3": qwen3, "mistral": mistral, "gemma": gemma}


def mask_by_bytes(tokenizer, ids: list[int], said: Said) -> list[bool]:
    """Who says each token's first byte, counting the bytes of the tokens themselves and not asking for offsets."""
    producer = [answer for text, answer in said for _ in range(len(text.encode()))]
    added = set(tokenizer.added_tokens_decoder)
    mask, place = [], 0
    for i in ids:
        mask.append(producer[place])
        # In a byte-level vocabulary every character of a token stands for one byte.
        token = tokenizer.convert_ids_to_tokens(i)
        place += len(token.encode()) if i in added else len(token)
    assert place == len(producer)
    return mask


# ---- conversations ----

WORDS = ["the", "answer", "is", "0", "9", "12", "é", "日本", "😀", "user", "assistant\n", "\n", "\n\n", "  ", "{", '"', "}",
         "Assistant: yes", "<|im_end|>", "</s>", "[/INST]", "<end_of_turn>", "<start_of_turn>model\n", "\t", "x", "<|eot_id|>"]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def some_text(rng: random.Random) -> str:
    text = "".join(rng.choice(WORDS) + rng.choice(["", " ", " "]) for _ in range(rng.randint(1, 8)))
    return text if text.strip() else "ok"


def some_call(rng: random.Random) -> dict:
    arguments = {
        rng.choice("ab"): rng.choice([1, "0", "9", {"x": [1]}, some_text(rng)]) for _ in range(rng.randint(0, 2))
    }
    name = rng.choice(["add", "f", "0g", "f9"])
    id = f"call{rng.randint(10000, 99999)}"
    return {"type": "function", "function": {"name": name, "arguments": arguments}, "id": id}


def conversation(kind: str, rng: random.Random) -> tuple[list[dict], list[dict] | None]:
    """Some turns that end with the assistant's; now and then a question is left without its answer."""
    messages = []
    with_tools = kind in ("llama3", "qwen3", "mistral") and rng.random() < 0.4
    if kind != "gemma" and rng.random() < 0.4:
        messages.append({"role": "system", "content": some_text(rng)})
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": some_text(rng)})
        for _ in range(rng.randint(0, 2) if with_tools else 0):
            content = some_text(rng) if kind == "qwen3" and rng.random() < 0.5 else ""
            calls = [some_call(rng) for _ in range(1 if kind == "llama3" else rng.randint(1, 2))]
            messages.append({"role": "assistant", "content": content, "tool_calls": calls} | some_thinking(kind, rng))
            for call in calls:
                messages.append({"role": "tool", "content": some_text(rng), "tool_call_id": call["id"]})
        answer = {"role": "assistant", "content": some_text(rng)} | some_thinking(kind, rng)
        if kind == "qwen3" and "reasoning_content" not in answer and rng.random() < 0.3:
            answer["content"] = f"<think>\nso {rng.randint(0, 99)}\n</think>\n\n{answer['content'].strip()}"
        messages.append(answer)
    return messages, TOOLS if with_tools and rng.random() < 0.7 else None


def some_thinking(kind: str, rng: random.Random) -> dict:
    return {"reasoning_content": some_text(rng).strip("\n")} if kind == "qwen3" and rng.random() < 0.3 else {}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_loss_is_on_what_the_assistant_says(kind: str):
    renderer, tokenizer = renderer_of(kind)
    rng = random.Random(kind)
    turns = 0
    for number in range(CONVERSATIONS):
        messages, tools = conversation(kind, rng)
        said = BY_HAND[kind](messages, tools)
        text = "".join(piece for piece, _ in said)
        assert text == tokenizer.apply_chat_template(messages, tools=tools, tokenize=False), "the computation by hand"
        if rng.random() < 0.2:  # a question without an answer teaches nothing and is left out
            asked = [*messages, {"role": "user", "content": some_text(rng)}]
            found = renderer.text(Conversation("x", asked, tools))
        else:
            found = renderer.text(Conversation("x", messages, tools))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert found.token_ids == ids
        wanted = mask_by_bytes(tokenizer, ids, said)
        assert found.loss_mask == wanted, f"{kind} {number}: {messages}"
        turns += sum(message["role"] == "assistant" for message in messages)

        # The last answer follows what the target is given to answer, and ends with its end-of-turn token.
        asked = tokenizer.apply_chat_template(messages[:-1], tools=tools, add_generation_prompt=True, tokenize=False)
        assert text.startswith(asked)
        assert renderer.prompt(Conversation("x", messages[:-1], tools)) == tokenizer(asked)["input_ids"]
        learned = [i for i, learn in zip(ids, found.loss_mask, strict=True) if learn]
        assert tokenizer.convert_ids_to_tokens(learned[-1]) == EOS[kind]
    assert turns > 2 * CONVERSATIONS


@pytest.mark.parametrize("kind", ["chatml", "llama3", "gemma"])
def test_turn_by_turn_with_the_template_itself(kind: str):
    """Where a template leaves earlier turns alone, each turn is what rendering one message more adds."""
    renderer, tokenizer = renderer_of(kind)
    rng = random.Random(7)
    for _ in range(100):
        messages, tools = conversation(kind, rng)
        said: Said = []
        rendered = ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = tokenizer.apply_chat_template(
                messages[:i], tools=tools, add_generation_prompt=True, tokenize=False
            )
            after = tokenizer.apply_chat_template(messages[: i + 1], tools=tools, tokenize=False)
            end = after.rindex(EOS[kind]) + len(EOS[kind])
            said += [(prompt[len(rendered) :], False), (after[len(prompt) : end], True), (after[end:], False)]
            rendered = after
        found = renderer.text(Conversation("x", messages, tools))
        assert found.loss_mask == mask_by_bytes(tokenizer, found.token_ids, said)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_answers_are_found_in_tokens_alone(kind: str):
    """Of texts that hold no special tokens, and begin with no line break that could join the template's."""
    renderer, _ = renderer_of(kind)
    rng = random.Random(kind)
    words = [word for word in WORDS if not re.search(r"[<\[]", word)]
    for _ in range(100):
        texts = [f"x{' '.join(rng.choices(words, k=5))}" for _ in range(2 * rng.randint(1, 3))]
        found = renderer.text(Conversation("x", chat(*texts)))
        assert renderer.answers_in(found.token_ids) == found.loss_mask
        cut = rng.randint(found.loss_mask.index(True) + 1, len(found.token_ids))  # as at a limit of tokens
        assert renderer.answers_in(found.token_ids[:cut]) == found.loss_mask[:cut]
        asked = renderer.prompt(Conversation("x", chat(*texts)[:1]))
        with pytest.raises(Unrenderable, match="no answer"):
            renderer.answers_in(asked)


def learned_text(renderer: Renderer, tokenizer, messages: list[dict], tools=None) -> str:
    found = renderer.text(Conversation("x", messages, tools))
    return tokenizer.decode([i for i, learn in zip(found.token_ids, found.loss_mask, strict=True) if learn])


def chat(*texts: str) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_thinking_is_learned_where_the_template_keeps_it():
    renderer, tokenizer = renderer_of("qwen3")
    messages = chat("a", "<think>\nold\n</think>\n\nb", "c", "<think>\nnew\n</think>\n\nd")
    assert learned_text(renderer, tokenizer, messages) == "b<|im_end|><think>\nnew\n</think>\n\nd<|im_end|>"


# ---- tokens across a boundary ----

SPACED = (  # the generation prompt ends with a space, which byte-level tokenizers join with the word after it
    "{% for m in messages %}{{ ('User: ' if m.role == 'user' else 'Assistant: ') + m.content + "
    "('<eos>\n' if m.role == 'assistant' else '\n') }}{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)


def test_a_token_belongs_to_the_side_of_its_first_character():
    tokenizer = make_tokenizer(SPACED, ["<eos>"], eos="<eos>")
    found = Renderer(tokenizer).text(Conversation("x", chat("the user", "the answer is")))
    tokens = tokenizer.convert_ids_to_tokens(found.token_ids)
    at = found.loss_mask.index(True)
    assert tokens[at - 1] == "Ġthe", "the space is the prompt's, so the token that it begins is, too"
    assert tokenizer.decode(found.token_ids[at:]) == " answer is<eos>\n"
    assert found.loss_mask[at:] == [token != "Ċ" for token in tokens[at:]]


# ---- templates that mark the answers themselves ----


def test_a_template_with_generation_blocks_is_believed():
    marked = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
        "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    tokenizer = make_tokenizer(marked, SPECIAL["chatml"], eos="<|im_end|>")
    renderer, _ = renderer_of("chatml")
    for texts in (("a", "b"), ("the answer", " is that", "said", " é ")):
        conversation = Conversation("x", chat(*texts))
        assert Renderer(tokenizer).text(conversation) == renderer.text(conversation)
    assert learned_text(Renderer(tokenizer), tokenizer, chat("a", "b", "c", "d")) == "b<|im_end|>d<|im_end|>"


# ---- what cannot be done exactly is said ----

DEEPSEEK = (  # asks for thinking in the generation prompt and takes it out of every answer
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}"
    "<|assistant|>{{ m.content.split('</think>')[-1] }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
ENDLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.mark.parametrize(
    ("template", "messages", "tools", "reason"),
    [
        (DEEPSEEK, chat("a", "<think>\nhm</think>b"), None, "generation prompt is not how it begins"),
        (ENDLESS, chat("a", "b"), None, "no special token"),
        (GEMMA, [{"role": "system", "content": "s"}, *chat("a", "b")], None, "refuses it: System role not supported"),
        (GEMMA, [*chat("a", "b"), *chat("c", "d")][:3] + chat("e", "f")[1:] * 2, None, "alternate"),
        (CHATML, chat("a", "b"), TOOLS, "no place for tools"),
        (CHATML, [*chat("a"), {"role": "assistant", "content": "", "tool_calls": [some_call(random.Random(1))]}], None,
         "leaves out a turn or its tool calls"),
        (CHATML, [*chat("a"), {"role": "assistant"}], None, "refuses it"),
    ],
)  # fmt: skip
def test_what_cannot_be_exact_is_refused(template, messages, tools, reason):
    tokenizer = make_tokenizer(
        template, [*SPECIAL["chatml"], "<eos>", "<|user|>", "<|assistant|>"], "<|im_start|>", "<eos>"
    )
    with pytest.raises(Unrenderable, match=reason):
        Renderer(tokenizer).text(Conversation("x", messages, tools))


def test_without_a_template_only_text_and_tokens():
    tokenizer = make_tokenizer(None, [])
    renderer = Renderer(tokenizer)
    with pytest.raises(UserError, match="no chat template"):
        renderer.prompt(Conversation("x", chat("a")))
    found = renderer.text(Conversation("x", document="the answer is"))
    assert tokenizer.decode(found.token_ids) == "the answer is"
    assert all(found.loss_mask)
    assert renderer.prompt(Conversation("x", token_ids=[1, 2])) == [1, 2]
    given = renderer.text(Conversation("x", token_ids=[1, 2, 3], loss_mask=[False, True, True]))
    assert (given.token_ids, given.loss_mask) == ([1, 2, 3], [False, True, True])
    with pytest.raises(Unrenderable, match="not in the target's vocabulary"):
        renderer.text(Conversation("x", token_ids=[10**6]))


def test_a_prompt_alone_is_learned_whole():
    renderer, tokenizer = renderer_of("chatml")
    found = renderer.text(Conversation("x", chat("a")))
    assert tokenizer.decode(found.token_ids) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert all(found.loss_mask)
