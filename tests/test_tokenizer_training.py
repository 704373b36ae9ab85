"""Tests of the tokenizer builder: Qwen2's format as transformers reads it, and determinism."""

import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from tools.base_models import qwen_tokenizer
from tools.base_models.point_tokenizer import PointTokens
from tools.base_models.spelling_tokenizer import SpellingTokenizer

TEXTS = [
    *[f"click({17 * n % 400}, {31 * n % 300})" for n in range(100)],
    *['Click the button "Save".', "keys(ctrl+c)", "scroll(down, 100)", "terminate(success)"] * 20,
]
SAMPLES = [
    "click(100, 200)",
    "I'LL don't\n\n  naïve 漢字 😀 \t x\r\n",
    "e\u0301 is two code points",  # NFC makes it one
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>hi<|im_end|>",
    "",
]


@pytest.fixture(scope="module")
def tokenizer():
    return qwen_tokenizer.train_tokenizer(TEXTS, 400)


@pytest.fixture(scope="module")
def loaded(tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    qwen_tokenizer.save(tokenizer, directory)
    return AutoTokenizer.from_pretrained(directory)


def test_ids_are_bytes_then_merges_then_special_tokens_in_qwens_order(tokenizer):
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    by_id = sorted(vocab, key=vocab.get)
    assert sorted(vocab.values()) == list(range(len(vocab)))
    assert len(vocab) <= 400
    assert all(len(token) == 1 for token in by_id[:256])
    assert by_id[-14:] == list(qwen_tokenizer.SPECIAL_TOKENS)


def test_smallest_vocabulary_still_encodes_every_byte():
    tokenizer = qwen_tokenizer.train_tokenizer(TEXTS, qwen_tokenizer.MIN_VOCAB_SIZE)
    assert tokenizer.get_vocab_size() == 270
    text = "".join(map(chr, range(0x300))) + "漢字😀\x00"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    with pytest.raises(ValueError, match="at least 270"):
        qwen_tokenizer.train_tokenizer(TEXTS, 269)


def test_action_text_is_short_and_digits_stand_alone(tokenizer):
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("click(100, 200)").ids]
    assert pieces == ["click", "(", "1", "0", "0", ",", " ", "2", "0", "0", ")"]


def test_training_in_another_process_gives_the_same_file(tokenizer):
    """Another hash seed, other threads: the ids must not depend on them."""
    program = (
        "import json, sys; from tools.base_models import qwen_tokenizer as b;"
        "sys.stdout.buffer.write(b.train_tokenizer(json.load(sys.stdin), 400).to_str().encode())"
    )
    again = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(TEXTS).encode(),
        capture_output=True,
        check=True,
    )
    assert again.stdout.decode() == tokenizer.to_str()


@pytest.mark.parametrize("text", SAMPLES)
def test_transformers_loads_the_directory_and_gives_the_same_ids(tokenizer, loaded, text):
    ids = tokenizer.encode(text).ids
    assert loaded(text)["input_ids"] == ids
    assert loaded.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_transformers_sees_qwens_class_and_special_tokens(tokenizer, loaded):
    assert type(loaded).__name__ in ("Qwen2Tokenizer", "Qwen2TokenizerFast")
    assert loaded.eos_token_id == tokenizer.token_to_id("<|im_end|>")
    assert loaded.pad_token_id == tokenizer.token_to_id("<|endoftext|>")
    assert set(loaded.all_special_tokens) == set(qwen_tokenizer.SPECIAL_TOKENS)


def test_transformers_own_qwen2_vl_split_is_ours(tokenizer, loaded):
    """Built from vocabulary and merges alone, transformers' class splits text by its own regex."""
    model = json.loads(tokenizer.to_str())["model"]
    built = type(loaded)(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    for text in SAMPLES[:3]:
        assert built(text)["input_ids"] == tokenizer.encode(text).ids


MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Go"}]}]
USER = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Go<|im_end|>\n"


def test_chat_template_without_system_prompt_has_no_system_block(loaded):
    text = loaded.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == USER + "<|im_start|>assistant\n"
    system = [{"role": "system", "content": "S"}, *MESSAGES]
    text = loaded.apply_chat_template(system, tokenize=False)
    assert text == "<|im_start|>system\nS<|im_end|>\n" + USER


def test_chat_template_system_prompt_is_text_and_no_jinja(tokenizer, tmp_path):
    prompt = 'Say "hi" to {{ x }}\n{% y %} naïve 😀'
    qwen_tokenizer.save(tokenizer, tmp_path, system_prompt=prompt)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = loaded.apply_chat_template(MESSAGES, tokenize=False)
    assert text == f"<|im_start|>system\n{prompt}<|im_end|>\n" + USER


def test_tokens_of_places_are_those_of_the_published_reader(tmp_path):
    """transformers takes added tokens from tokenizer_config.json, too."""
    maker = PointTokens(qwen_tokenizer)
    tokenizer = maker.train_tokenizer(["Click the red button."] * 20, 300)
    maker.save(tokenizer, tmp_path)
    text = "Click<x_3><y_16> click"
    ids = tokenizer.encode(text).ids
    assert [tokenizer.token_to_id(token) for token in ("<x_3>", "<y_16>")] == [
        number for number in ids if number >= tokenizer.token_to_id("<x_0>")
    ]
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == ids
    listed = json.loads((tmp_path / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert {listed[str(tokenizer.token_to_id(f"<{axis}_63>"))]["content"] for axis in "xy"} == {
        "<x_63>",
        "<y_63>",
    }


def test_spelling_tokenizer_knows_its_words_after_a_space_and_spells_all_else(tmp_path):
    maker = SpellingTokenizer(("click", "clicking", "on"))
    tokenizer = maker.train_tokenizer((), 300)

    def pieces(text: str) -> list[str]:
        return [tokenizer.decode([number]) for number in tokenizer.encode(text).ids]

    assert pieces(" click on") == [" click", " on"]
    assert pieces(" clicking") == [" clicking"]
    assert pieces('"click" One') == [*'"click"', " ", *"One"]
    assert pieces(" close") == [" cl", *"ose"]  # as a known word begins
    # Whoever reads the files, or the vocabulary and the merges alone, gets the same.
    maker.save(tokenizer, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    built = type(loaded)(vocab=model["vocab"], merges=merges)
    for text in (*SAMPLES, 'Click on "click clicking clicked".'):
        ids = tokenizer.encode(text).ids
        assert loaded(text)["input_ids"] == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == loaded.decode(ids)
    assert built(" clicking on")["input_ids"] == tokenizer.encode(" clicking on").ids


def test_spelling_tokenizer_refuses_what_it_cannot_hold():
    with pytest.raises(ValueError, match="'Click', expected lower-case"):
        SpellingTokenizer(("Click",)).train_tokenizer((), 300)
    assert SpellingTokenizer(("on",)).train_tokenizer((), 272).get_vocab_size() == 272
    with pytest.raises(ValueError, match="vocab_size=271, these words need 272"):
        SpellingTokenizer(("on",)).train_tokenizer((), 271)
