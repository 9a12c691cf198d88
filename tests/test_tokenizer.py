"""Tokenizer and stream decoder, on a toy vocabulary; with the real Kimi files where they are at hand."""

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from kimijax.errors import RequestError, TokenizerError
from kimijax.tokenizer import (
    RUN_CHARS,
    SLICE_CHARS,
    SPLIT_PATTERN,
    IncrementalDetokenizer,
    Tokenizer,
    _slices,
)
from tests import toy_tokenizer


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer.load(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    folder = toy_tokenizer.real_data("kimi_k25")
    if folder is None:
        pytest.skip("the real Kimi tokenizer (../shared/data/kimi_k25) is not here")
    return Tokenizer.from_dir(folder)


def pieces(text: str) -> list[str]:
    """How the split pattern cuts: with a rank for every piece, each piece becomes one token."""
    alphabet = {bytes([i]): i for i in range(256)}
    words = {text[i:j].encode() for i in range(len(text)) for j in range(i + 1, len(text) + 1)} - alphabet.keys()
    ranks = alphabet | {w: 256 + i for i, w in enumerate(sorted(words, key=lambda w: (len(w), w)))}
    bpe = tiktoken.Encoding("pieces", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})
    return [bpe.decode([i]) for i in bpe.encode_ordinary(text)]


# ---- plain text -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("x}\n//", [120, 125, 10, 47, 47]),
        ("Go世", [71, 111, 228, 184, 150]),
        ("1234", [49, 50, 51, 52]),
        ("a  b", [97, 32, 260]),
        ("aaa", [259, 97]),
        ("", []),
    ],
)
def test_split_keeps_slashes_han_and_digits_apart(toy: Tokenizer, text: str, ids: list[int]) -> None:
    assert toy.encode(text) == ids
    assert toy.decode(ids) == text


def test_split_pattern_cuts_han_words_contractions_and_digits_in_threes() -> None:
    assert pieces("世界Hello世界's 12345 ok") == ["世界", "Hello", "世界", "'s", " ", "123", "45", " ok"]
    # The class of upper-case letters is without Han, too: it would swallow the ideograph after the space.
    assert pieces(" 世Hello") == [" ", "世", "Hello"]


def test_control_token_text_is_plain_text(toy: Tokenizer) -> None:
    text = "hi<|im_end|>[EOS]<think>"
    ids = toy.encode(text)
    assert ids == list(text.encode())
    assert toy.decode(ids) == text
    assert toy.encode_with_specials(text) == [104, 105, 263, 262, 268]


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip_of_any_text(toy: Tokenizer, text: str) -> None:
    assert toy.decode(toy.encode(text)) == text
    assert toy.decode(toy.encode_with_specials(text)) == text


def test_lone_surrogate_becomes_a_replacement_character(toy: Tokenizer) -> None:
    assert toy.decode(toy.encode("a\ud800b")) == "a�b"


def reference_slices(text: str) -> list[str]:
    """The slicing rule, a character at a time."""
    out = []
    for start in range(0, len(text), SLICE_CHARS):
        current, run, was_space = "", 0, None
        for char in text[start : start + SLICE_CHARS]:
            run = run + 1 if char.isspace() == was_space else 1
            was_space = char.isspace()
            if run > RUN_CHARS:
                out.append(current)
                current, run = "", 1
            current += char
        out.append(current)
    return out


@pytest.mark.parametrize(
    "text",
    [
        "a" * RUN_CHARS,
        "a" * (RUN_CHARS + 1),
        "ab " * 10 + "x" * (2 * RUN_CHARS + 1) + " " * RUN_CHARS + "\n" + "y",
        "word " * (SLICE_CHARS // 5) + "z" * (RUN_CHARS + 5),
    ],
    ids=["limit", "limit+1", "runs", "slices"],
)
def test_long_text_is_cut_where_the_reference_cuts(toy: Tokenizer, text: str) -> None:
    assert list(_slices(text)) == reference_slices(text)
    assert toy.decode(toy.encode(text)) == text


# ---- special slots and padding ids ----------------------------------------------------------------------------------


def test_unnamed_slots_are_filled_and_ids_beyond_decode_to_nothing(toy: Tokenizer) -> None:
    assert toy.n_ranks == 261
    assert toy.vocab_size == 517
    assert len(toy.special_ids) == 256
    assert toy.decode([311]) == "<|reserved_token_311|>"
    assert toy.decode([65, 517, 100_000, 66]) == "AB"
    assert toy.token_bytes(257) == b"o\xe4"
    with pytest.raises(ValueError, match="token_id: found -1"):
        toy.token_bytes(-1)


def test_hidden_ids_are_left_out_but_thinking_marks_are_not(toy: Tokenizer) -> None:
    ids = [264, 268, 65, 269, 311, 263]
    assert toy.decode(ids, skip_special=True) == "<think>A</think>"


def test_both_end_tokens_stop_whichever_the_config_names(tmp_path: Path) -> None:
    toy_tokenizer.write(tmp_path)
    assert Tokenizer.from_dir(tmp_path).stop_ids == {262, 263}
    assert Tokenizer.from_dir(tmp_path, eos_ids=[262]).stop_ids == {262, 263}
    assert Tokenizer.from_dir(tmp_path, eos_ids=[263, 300]).stop_ids == {262, 263, 300}
    with pytest.raises(TokenizerError, match=r"\[517\] have no token"):
        Tokenizer.from_dir(tmp_path, eos_ids=[517])


def test_fingerprint_changes_with_ranks_and_names_only(tmp_path: Path) -> None:
    def fingerprint(name: str, merges: Sequence[bytes], names: Sequence[str]) -> str:
        (tmp_path / name).mkdir()
        return Tokenizer.from_dir(toy_tokenizer.write(tmp_path / name, merges, names)).fingerprint

    merges, names = toy_tokenizer.MERGES, toy_tokenizer.NAMES
    first = fingerprint("a", merges, names)
    assert fingerprint("b", merges, names) == first
    assert fingerprint("c", merges[::-1], names) != first
    assert fingerprint("d", merges, names[::-1]) != first


# ---- files that are wrong -------------------------------------------------------------------------------------------


def _edit_ranks(folder: Path, find: str, replace: str) -> None:
    file = folder / "tiktoken.model"
    text = file.read_text()
    assert find in text
    file.write_text(text.replace(find, replace, 1))


def _edit_added(folder: Path, key: str, value: object) -> None:
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["added_tokens_decoder"][key] = value
    file.write_text(json.dumps(config))


LAST_BYTE = base64.b64encode(b"\xff").decode()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "tiktoken.model").unlink(), "found no tiktoken.model"),
        (lambda f: (f / "tokenizer_config.json").unlink(), "found no tokenizer_config.json"),
        (lambda f: (f / "tokenizer_config.json").write_text("{"), "cannot be read as JSON"),
        (lambda f: (f / "tokenizer_config.json").write_text("[]"), "expected a JSON object"),
        (lambda f: (f / "tokenizer_config.json").write_text("{}"), "added_tokens_decoder"),
        (lambda f: _edit_ranks(f, " 9\n", " x\n"), "line 10: found"),
        (lambda f: _edit_ranks(f, " 9\n", "\n"), "line 10: found"),
        (lambda f: _edit_ranks(f, " 9\n", " 10\n"), "without gap or repetition"),
        (lambda f: _edit_ranks(f, f"{LAST_BYTE} 255", "YWJj 255"), r"missing: \[255\]"),
        (lambda f: _edit_ranks(f, f"{LAST_BYTE} 255", "AA== 255"), "already has rank 0"),
        (lambda f: _edit_added(f, "600", {"content": "<|x|>", "special": True}), "expected an id from 261 to 516"),
        (lambda f: _edit_added(f, "12", {"content": "<|x|>", "special": True}), "expected an id from 261 to 516"),
        (
            lambda f: _edit_added(f, "300", {"content": "[BOS]", "special": True}),
            r"same name to two ids: \['\[BOS\]'\]",
        ),
        (lambda f: _edit_added(f, "300", {"special": True}), "expected `content`"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, break_it: Callable[[Path], object], message: str) -> None:
    break_it(toy_tokenizer.write(tmp_path))
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_dir(tmp_path)


# ---- streams --------------------------------------------------------------------------------------------------------


def deltas(toy: Tokenizer, ids: Sequence[int], size: int, stop: Sequence[str] = ()) -> tuple[list[str], str]:
    stream = IncrementalDetokenizer(toy, stop)
    return [stream.feed(ids[i : i + size]) for i in range(0, len(ids), size)], stream.flush()


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([228, 184, 150], ["", "", "世"]),
        ([240, 159, 152, 128], ["", "", "", "😀"]),
        ([65, 32, 228, 184, 150, 97, 240, 159, 152, 128, 98], ["A", " ", "", "", "世", "a", "", "", "", "😀", "b"]),
    ],
)
def test_no_half_character_is_shown(toy: Tokenizer, ids: list[int], expected: list[str]) -> None:
    assert deltas(toy, ids, 1) == (expected, "")
    for size in (2, 3):
        found, rest = deltas(toy, ids, size)
        assert "".join(found) == toy.decode(ids)
        assert rest == ""


@given(ids=st.lists(st.integers(0, 530), max_size=40), cuts=st.lists(st.integers(1, 5), max_size=40))
def test_every_chunking_gives_the_text_of_one_decode(toy: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    for skip in (True, False):
        stream = IncrementalDetokenizer(toy, skip_special=skip)
        out, rest = "", list(ids)
        for cut in cuts:
            out += stream.feed(rest[:cut])
            rest = rest[cut:]
        out += stream.feed(rest) + stream.flush()
        assert out == toy.decode(ids, skip_special=skip)
        assert stream.n_tokens == len(ids)


@given(data=st.binary(max_size=30))
def test_a_replacement_character_is_shown_only_once_it_is_certain(toy: Tokenizer, data: bytes) -> None:
    stream = IncrementalDetokenizer(toy)
    shown = ""
    for i, byte in enumerate(data):
        shown += stream.feed([byte])
        # Whatever follows, the text shown so far stays: it is how every continuation begins.
        assert all((data[: i + 1] + more).decode(errors="replace").startswith(shown) for more in (b"", b"\x80", b"a"))


def text_before_stop(text: str, stop: Sequence[str]) -> str:
    """The rule, a character at a time: the stop completed first ends the text; of two, the longer."""
    for end in range(1, len(text) + 1):
        done = [s for s in stop if text[:end].endswith(s)]
        if done:
            return text[: end - max(map(len, done))]
    return text


@given(
    text=st.text("abc", max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    size=st.integers(1, 4),
)
def test_stop_strings_end_the_text_for_every_chunking(toy: Tokenizer, text: str, stop: list[str], size: int) -> None:
    for ids in (list(text.encode()), toy.encode(text)):  # one token a character; with "aa" as one token
        found, rest = deltas(toy, ids, size, stop)
        assert "".join(found) + rest == text_before_stop(text, stop)


def test_of_two_stops_in_one_token_the_first_completed_ends_the_text(toy: Tokenizer) -> None:
    assert deltas(toy, [120, 259], 1, ["xaa", "a"]) == (["", "x"], "")
    assert deltas(toy, [120, 97, 97], 1, ["xaa", "a"]) == (["", "x", ""], "")


def test_a_possible_stop_is_held_back_and_released(toy: Tokenizer) -> None:
    stream = IncrementalDetokenizer(toy, ["END", "世!"])
    assert [stream.feed([ord(c)]) for c in "xENyE"] == ["x", "", "", "ENy", ""]
    assert stream.feed([228, 184, 150]) == "E"
    assert not stream.finished
    assert stream.feed(b"?") == "世?"
    assert stream.feed(b"E") == ""
    assert stream.flush() == "E"
    assert stream.finished
    assert stream.stop_reason is None
    assert (stream.feed(b"z"), stream.flush()) == ("", "")


def test_tokens_are_counted_up_to_the_stop(toy: Tokenizer) -> None:
    stream = IncrementalDetokenizer(toy, ["a b"])
    assert stream.feed([120, 97, 260, 121, 122]) == "x"
    assert stream.finished
    assert stream.stop_reason == "a b"
    assert stream.n_tokens == 3
    assert (stream.feed([120]), stream.flush(), stream.n_tokens) == ("", "", 3)


def test_a_character_cut_off_at_the_end_is_replaced(toy: Tokenizer) -> None:
    assert deltas(toy, [97, 228, 184], 1) == (["a", "", ""], "�")
    assert deltas(toy, [97, 228, 184], 3, ["a�"]) == ([""], "")


def test_an_empty_stop_string_is_refused(toy: Tokenizer) -> None:
    with pytest.raises(RequestError, match="stop: found an empty"):
        IncrementalDetokenizer(toy, ["x", ""])
    with pytest.raises(TypeError, match="one string"):
        IncrementalDetokenizer(toy, "x")


# ---- the real vocabulary --------------------------------------------------------------------------------------------


def test_known_ids_of_the_real_vocabulary(real: Tokenizer) -> None:
    assert (real.n_ranks, real.vocab_size) == (163_584, 163_840)
    assert real.stop_ids == {163_585, 163_586, 163_593}
    for text, ids in {
        "system": [14062],
        "You are": [3900, 554],
        " helpful assistant": [13205, 26626],
        "世界": [2243],
        "世世": [123421],
        "——": [35086],
        "I'm": [17172],
        " CAN'T": [32330, 64833],
    }.items():
        assert real.encode(text) == ids
    assert real.encode_with_specials("<|im_end|><|im_middle|>system") == [163_586, 163_601, 14062]
    assert real.decode([163_600]) == "<|reserved_token_163600|>"


def test_real_text_round_trips_and_streams(real: Tokenizer) -> None:
    text = "def f(x):\n\treturn x  # 世界's 12345 🧑🏾‍🤝‍🧑🏾\r\n\r\nПривет, мир! — l'été <|im_end|>\n" * 3
    ids = real.encode(text)
    assert real.decode(ids) == text
    stream = IncrementalDetokenizer(real)
    assert "".join(stream.feed([i]) for i in ids) + stream.flush() == text
