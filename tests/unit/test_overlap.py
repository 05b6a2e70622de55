"""Near-duplicates: what counts as the same prompt, and what only looks like it."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.config.evaluation import SuiteConfig
from draftsmith.config.recipe import ExtractConfig
from draftsmith.config.sources import Prompts
from draftsmith.data.conversations import RejectedRows
from draftsmith.data.overlap import TRAINING_PROMPTS, Known, PromptsFile, numbers_of, read_prompts_file
from draftsmith.data.prompts import split
from draftsmith.run.errors import UserError

QUESTION = (
    "A lighthouse keeper climbs forty steps every evening, rests on the landing for six minutes, and then climbs the "
    "remaining ninety steps without a pause. How long does she need if each step takes two seconds?"
)
INSTRUCTION = (
    "You are a careful assistant of a public library. Answer in two short sentences, name the shelf where the visitor "
    "can read more, never recommend a book that is out of print, and end with a friendly question. The visitor asks: "
)
words = st.lists(st.text("abcdefghij", min_size=1, max_size=4), min_size=16, max_size=60)


def write(path: Path, texts: list[str]) -> Prompts:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return Prompts(path=str(path))


def known(*texts: str) -> Known:
    found = Known()
    for text in texts:
        found.add(text, "suite")
    return found


def kind(a_known: Known, text: str) -> str | None:
    return a_known.find([numbers_of(text)]).get("suite")


def parts(extract: ExtractConfig, **suites: SuiteConfig) -> tuple[list[str], list[str], dict[str, int]]:
    rejected = RejectedRows()
    found = list(split(extract, whole=False, rejected=rejected, apart_from=suites))
    kept, held_out = ([one.text for one, held in found if held == part] for part in (False, True))
    return kept, held_out, {reason: entry["rows"] for reason, entry in rejected.figures().items()}


# ---- one text and another ----


@pytest.mark.parametrize(
    "changed",
    [
        QUESTION.upper(),
        QUESTION.replace(" ", "\n\t "),
        QUESTION.replace(",", "").replace(".", " ...") + "!!",
        "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in QUESTION),  # full-width
    ],
)
def test_case_punctuation_and_white_space_change_nothing(changed):
    assert kind(known(QUESTION), changed) == "verbatim"


@pytest.mark.parametrize(
    "changed",
    [
        "Please solve this one for me, step by step: " + QUESTION,
        "The guard of a tower " + QUESTION.partition("keeper ")[2],
        QUESTION.partition("How long")[0] + "Say after how many minutes she is at the top, and show your work.",
        QUESTION + " Think of the way down as well, and answer in French.",
        QUESTION.replace("six", "7"),
    ],
)
def test_a_changed_beginning_ending_or_middle_is_found(changed):
    assert kind(known(QUESTION), changed) == "near"


def test_another_question_is_another():
    other = "A lighthouse keeper reads forty pages every evening. How long does she need for a book of nine hundred?"
    assert kind(known(QUESTION), other) is None
    assert kind(known(other), QUESTION) is None


def test_short_texts_match_word_for_word_only():
    assert kind(known("What is the meaning of life?"), "what is the meaning of LIFE") == "verbatim"
    assert kind(known("What is the meaning of life?"), "What is the meaning of art?") is None
    assert kind(known("What is the meaning of life?"), "Tell me, what is the meaning of life?") is None
    assert kind(known("?!"), "? !") == "verbatim"
    assert kind(known("?!"), "...") is None


def test_text_without_spaces_has_words_too():
    text = "请用简单的语言解释为什么天空是蓝色的,并举一个例子。"
    assert kind(known(text), "你好!" + text) == "near"
    assert kind(known(text), "请写一首关于秋天的诗,不超过四行。") is None


def test_short_later_turns_are_no_overlap():
    found = Known()
    found.add(QUESTION, "suite")
    found.add("Go on.", "suite", opening=False)
    found.add(INSTRUCTION, "suite", opening=False)
    for turns, expected in (
        (["Go on."], {}),
        (["Hello there", "Go on."], {}),
        (["Hello there", "Now this. " + INSTRUCTION], {"suite": "near"}),
    ):
        assert found.find([numbers_of(turn) for turn in turns]) == expected


@settings(deadline=None, max_examples=60)
@given(text=words, before=words, after=words)
def test_a_text_put_into_another_is_always_found(text, before, after):
    a_known = known(" ".join(text))
    assert kind(a_known, " ".join(text)) == "verbatim"
    assert kind(a_known, " ".join([*before, *text, *after])) is not None
    assert kind(a_known, " ".join([*before, *text[len(text) // 4 :]])) is not None, "a quarter is not the text"


def test_numbers_are_the_same_in_every_process():
    code = "from draftsmith.data.overlap import numbers_of as n; t = n('One two three four five six seven eight nine'); print(t.whole, list(map(int, t.ngrams)))"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    here = numbers_of("One two three four five six seven eight nine")
    assert printed == {f"{here.whole} {list(map(int, here.ngrams))}\n"}


# ---- one instruction before many prompts ----


def behind_one_instruction(count: int) -> list[str]:
    chosen = random.Random(0)
    things = [
        "maps",
        "bees",
        "glass",
        "opera",
        "bridges",
        "salt",
        "clocks",
        "whales",
        "kites",
        "rivers",
        "bread",
        "ice",
    ]
    verbs = ["makes", "moves", "sells", "paints", "counts", "hides"]
    return [
        f"{INSTRUCTION}who {chosen.choice(verbs)} {chosen.choice(things)} in year {number}, and why with {chosen.choice(things)}?"
        for number in range(count)
    ]


@pytest.mark.parametrize("fraction", [0.005, 0.05, 0.3])
def test_prompts_behind_one_instruction_stay(tmp_path, fraction):
    texts = behind_one_instruction(400)
    kept, held_out, _ = parts(ExtractConfig(prompts=write(tmp_path / "p.jsonl", texts), held_out_fraction=fraction))
    assert held_out
    assert len(kept) + len(held_out) >= 0.99 * len(texts)


@pytest.mark.parametrize("held", [1, 5, 60])
def test_prompts_behind_the_instruction_of_a_held_out_file_stay(tmp_path, held):
    texts = behind_one_instruction(400)
    files = write(tmp_path / "p.jsonl", texts[held:]), write(tmp_path / "h.jsonl", texts[:held])
    kept, held_out, _ = parts(ExtractConfig(prompts=files[0], held_out=files[1]))
    assert len(held_out) == held
    assert len(kept) >= 0.99 * (len(texts) - held)


def test_behind_one_instruction_the_rest_is_compared(tmp_path):
    texts = behind_one_instruction(400)
    rest = texts[0].removeprefix(INSTRUCTION)
    copies = [f"{INSTRUCTION}\n\n{rest.upper()}", f"Hello! {texts[0]}", f"{texts[0]} Answer in French, please."]
    files = write(tmp_path / "p.jsonl", texts[5:] + copies), write(tmp_path / "h.jsonl", texts[:5])
    kept, _, reasons = parts(ExtractConfig(prompts=files[0], held_out=files[1]))
    assert not set(kept) & set(copies)
    assert reasons == {"nearly as in the held-out prompts": 2, "as in the held-out prompts": 1}


# ---- suites ----


def test_a_whole_suite_is_kept_out_not_what_is_drawn_of_it(tmp_path):
    asked = [f"Question {i} of the suite, about {i * i} apples" for i in range(50)]
    suite = SuiteConfig(prompts=write(tmp_path / "suite.jsonl", asked).model_copy(update={"limit": 3, "max_chars": 40}))
    prompts = write(tmp_path / "p.jsonl", ["A prompt of its own", *asked])
    kept, _, reasons = parts(ExtractConfig(prompts=prompts, held_out_fraction=0), mine=suite)
    assert kept == ["A prompt of its own"]
    assert reasons == {"as in the suite `mine`": 50}


def test_second_turns_of_a_suite_are_kept_out(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"question_id": 81, "category": "writing", "turns": ["Write about Hawaii.", QUESTION]}))
    prompts = write(tmp_path / "p.jsonl", ["A prompt of its own", "Now: " + QUESTION])
    for turns, left in (("first", 2), ("all", 1)):
        suite = SuiteConfig(prompts=Prompts(path=str(path)), turns=turns)
        assert len(parts(ExtractConfig(prompts=prompts, held_out_fraction=0), mt_bench=suite)[0]) == left


def test_nothing_but_a_suite_is_an_error(tmp_path):
    prompts = write(tmp_path / "p.jsonl", ["One prompt", "Another prompt"])
    with pytest.raises(UserError, match=r"No training prompts are left: .*evaluated on"):
        parts(ExtractConfig(prompts=prompts, held_out_fraction=0), mine=SuiteConfig(prompts=prompts))


# ---- what a store says ----


def test_a_prompts_file_gives_back_what_was_added(tmp_path):
    conversations = [[QUESTION, "Go on."], ["Hi"], [INSTRUCTION, QUESTION, QUESTION]]
    file = PromptsFile(tmp_path)
    for texts in conversations:
        file.add(texts)
    file.publish(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [TRAINING_PROMPTS]
    for found, texts in zip(read_prompts_file(tmp_path), conversations, strict=True):
        for one, other in zip(found, map(numbers_of, texts), strict=True):
            assert (one.whole, one.words, one.ngrams.tolist()) == (other.whole, other.words, other.ngrams.tolist())
    path = tmp_path / TRAINING_PROMPTS
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="ends in the middle"):
        list(read_prompts_file(tmp_path))
