import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers

from onward.data import DataLoader
from onward.data.packing import PackOptions, TextOptions, pack
from onward.data.packing import documents as documents_module
from onward.data.packing import source as source_module
from onward.errors import DataError, ParametersError, UserError

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "mix",
    "potions",
]


def make_text(lines, seed=0):
    random = np.random.default_rng(seed)
    return "".join(" ".join(random.choice(WORDS, random.integers(4, 12))) + ".\n" for _ in range(lines))


def pack_text(source, dest, test_fraction=0.0, seed=0, **options):
    return pack(
        source, dest, PackOptions(source=TextOptions(**options), test_fraction=test_fraction, seed=seed, progress=False)
    )


def load(folder):
    batches = list(DataLoader({}, folder).one_pass(1000))
    return {name: np.concatenate([batch.features[name] for batch in batches]) for name in batches[0].features}


def test_bytes_become_tokens_and_each_is_a_label_once(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.txt").write_bytes(b"world")
    (tmp_path / "in" / "a.txt").write_bytes("héllo\n".encode())
    summary = pack_text(tmp_path / "in", tmp_path / "out", sequence_length=4)
    stream = [*"héllo\n".encode(), 256, *b"world", 256]
    features = load(tmp_path / "out")
    np.testing.assert_array_equal(features["tokens"], [stream[0:4], stream[4:8], stream[8:12]])
    np.testing.assert_array_equal(features["labels"], [stream[1:5], stream[5:9], stream[9:13]])
    details = summary.folders[tmp_path / "out"].details
    assert (details["vocabulary_size"], details["token_count"], details["tokens_left_over"]) == (257, 14, 2)


def test_pieces_do_not_change_the_tokens(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(make_text(200) + "é" * 3000)
    for tokenizer in ("bytes", "bpe"):
        pack_text(
            tmp_path / "a.txt", tmp_path / f"{tokenizer}1", tokenizer=tokenizer, sequence_length=16, vocabulary_size=300
        )
    monkeypatch.setattr(documents_module, "CHUNK_BYTES", 101)
    for tokenizer in ("bytes", "bpe"):
        pack_text(
            tmp_path / "a.txt", tmp_path / f"{tokenizer}2", tokenizer=tokenizer, sequence_length=16, vocabulary_size=300
        )
    assert (tmp_path / "bytes1" / "shard-000000.pb").read_bytes() == (
        tmp_path / "bytes2" / "shard-000000.pb"
    ).read_bytes()
    for folder in ("bpe1", "bpe2"):
        tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / folder / "tokenizer.json"))
        tokens = load(tmp_path / folder)["tokens"].reshape(-1)
        assert (tmp_path / "a.txt").read_text().startswith(tokenizer.decode(tokens.tolist()).rstrip("�"))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_the_tokenizer_file_turns_tokens_back_into_text_and_text_into_tokens(tmp_path, tokenizer):
    text = make_text(100) + "Grüße, 世界! \t\x00 ~\n"
    (tmp_path / "a.txt").write_text(text)
    summary = pack_text(
        tmp_path / "a.txt", tmp_path / "out", tokenizer=tokenizer, sequence_length=1, vocabulary_size=400
    )
    features = load(tmp_path / "out")
    ids = [*features["tokens"][:, ...].reshape(-1).tolist(), int(features["labels"].reshape(-1)[-1])]
    loaded = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    details = summary.folders[tmp_path / "out"].details
    assert loaded.get_vocab_size() == details["vocabulary_size"] <= 400
    assert loaded.token_to_id("<|endoftext|>") == details["special_tokens"]["<|endoftext|>"] == ids[-1]
    assert loaded.decode(ids) == text
    assert loaded.encode(text).ids == ids[:-1]


def test_a_bpe_is_trained_the_same_twice(tmp_path):
    (tmp_path / "a.txt").write_text(make_text(300))
    for out in ("one", "two"):
        pack_text(tmp_path / "a.txt", tmp_path / out, tokenizer="bpe", vocabulary_size=350, sequence_length=8)
    for name in ("tokenizer.json", "shard-000000.pb", "pack.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_tokenizer_from_elsewhere_is_used(tmp_path):
    (tmp_path / "a.txt").write_text(make_text(50))
    pack_text(tmp_path / "a.txt", tmp_path / "one", tokenizer="bpe", vocabulary_size=300, sequence_length=8)
    file = str(tmp_path / "one" / "tokenizer.json")
    pack_text(tmp_path / "a.txt", tmp_path / "two", tokenizer=file, sequence_length=8)
    np.testing.assert_array_equal(load(tmp_path / "one")["tokens"], load(tmp_path / "two")["tokens"])
    with pytest.raises(DataError, match=r"lacks the token \[PAD\], \[CLS\], \[SEP\], \[MASK\], which bert needs"):
        pack_text(tmp_path / "a.txt", tmp_path / "no", tokenizer=file, objective="bert")
    with pytest.raises(DataError, match="lacks the token </s>, which causal needs; name its own with --end-of-text"):
        pack_text(tmp_path / "a.txt", tmp_path / "no", tokenizer=file, end_of_text="</s>")
    with pytest.raises(DataError, match="tokenizer 'wordpiece' does not exist; give 'bytes', 'bpe' or the path"):
        pack_text(tmp_path / "a.txt", tmp_path / "no", tokenizer="wordpiece")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DataError, match=r"broken\.json' cannot be read"):
        pack_text(tmp_path / "a.txt", tmp_path / "no", tokenizer=str(tmp_path / "broken.json"))


def test_position_ids_count_from_zero(tmp_path):
    (tmp_path / "a.txt").write_text("hello world")
    pack_text(tmp_path / "a.txt", tmp_path / "out", sequence_length=5, position_ids=True)
    np.testing.assert_array_equal(load(tmp_path / "out")["position_ids"], [[0, 1, 2, 3, 4]] * 2)


def test_text_columns_of_jsonl_and_parquet_hold_documents(tmp_path):
    import pyarrow
    import pyarrow.parquet

    texts = [f"text number {k} " * 3 for k in range(600)]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"id": k, "body": text}) + "\n" for k, text in enumerate(texts))
    )
    pyarrow.parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "b.parquet")
    stream = b"\0".join(text.encode() for text in texts) + b"\0"
    expected = np.frombuffer(stream, np.uint8).astype(np.int64)
    expected = np.where(expected == 0, 256, expected)[
        : len(stream) // 10 * 10 if len(stream) % 10 else len(stream) - 10
    ]
    for name in ("a.jsonl", "b.parquet"):
        pack_text(tmp_path / name, tmp_path / f"{name}.out", text_field="body", sequence_length=10)
        np.testing.assert_array_equal(load(tmp_path / f"{name}.out")["tokens"].reshape(-1), expected)
    with pytest.raises(DataError, match=r"a\.jsonl', line 1: no text under 'text' \(there are 'id', 'body'\)"):
        pack_text(tmp_path / "a.jsonl", tmp_path / "no")
    with pytest.raises(DataError, match=r"no column 'text' \(there are 'body'\)"):
        pack_text(tmp_path / "b.parquet", tmp_path / "no")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(DataError, match=r"b\.parquet' cannot be read"):
        pack_text(tmp_path / "b.parquet", tmp_path / "no")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text"')
    with pytest.raises(DataError, match=r"a\.jsonl', line 2: not JSON"):
        pack_text(tmp_path / "a.jsonl", tmp_path / "no")


def test_documents_of_many_are_split_whole(tmp_path):
    """Every document is one letter, so that a sample tells which it came from."""
    (tmp_path / "in").mkdir()
    for k in range(26):
        (tmp_path / "in" / f"{k:02d}.txt").write_text(chr(97 + k) * 100)
    summary = pack_text(tmp_path / "in", tmp_path / "out", test_fraction=0.3, sequence_length=10)
    letters = [set(np.unique(load(tmp_path / "out" / split)["tokens"])) - {256} for split in ("train", "test")]
    assert letters[0] | letters[1] == set(range(97, 123))
    assert not letters[0] & letters[1]
    assert letters[1]
    assert summary.folders[tmp_path / "out" / "test"].details["split_by"] == "document"


def test_blank_lines_can_end_documents(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\n \nthree\n")
    pack_text(tmp_path / "a.txt", tmp_path / "out", documents="blank-line", sequence_length=1)
    assert bytes((load(tmp_path / "out")["tokens"] % 256).tolist()) == b"one\ntwo\n\0three\n"


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"good and long enough")
    (tmp_path / "in" / "b.txt").write_bytes(b"caf\xe9 and more")
    options = {"tokenizer": "bpe", "vocabulary_size": 260, "sequence_length": 1}
    with pytest.raises(DataError, match=r"b\.txt' \(document 1\) is not UTF-8: .* at byte 3\. .*--undecodable skip"):
        pack_text(tmp_path / "in", tmp_path / "no", **options)
    decode = {}
    for how in ("skip", "replace"):
        summary = pack_text(tmp_path / "in", tmp_path / how, undecodable=how, **options)
        tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / how / "tokenizer.json"))
        decode[how] = tokenizer.decode(load(tmp_path / how)["tokens"].reshape(-1).tolist())
        assert ("documents_not_utf8" in summary.folders[tmp_path / how].details) == (how == "skip")
    assert decode == {"skip": "good and long enough", "replace": "good and long enoughcaf\ufffd and more"}
    pack_text(tmp_path / "in", tmp_path / "bytes", sequence_length=1)
    assert b"caf\xe9 and more" in bytes((load(tmp_path / "bytes")["tokens"] % 256).tolist())


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match=r"has 6 tokens, fewer than one sample of sequence_length 256 .* \(257\)"):
        pack_text(tmp_path / "a.txt", tmp_path / "out")
    (tmp_path / "a.txt").write_text("\n \n")
    with pytest.raises(DataError, match="only empty lines"):
        pack_text(tmp_path / "a.txt", tmp_path / "out", objective="bert")


def test_bad_options_are_refused(tmp_path):
    with pytest.raises(ParametersError, match="sequence_length is 4; bert needs at least 5"):
        TextOptions(objective="bert", sequence_length=4)
    with pytest.raises(ParametersError, match=r"masked_lm_probability is 1\.5"):
        TextOptions(masked_lm_probability=1.5)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ParametersError, match="vocabulary_size is 200; a byte-level BPE needs at least 257"):
        pack_text(tmp_path / "a.txt", tmp_path / "out", tokenizer="bpe", vocabulary_size=200)


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(source_module.importlib, "import_module", missing)
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(UserError, match=r"needs the Python package 'tokenizers', .* pip install onward\[pack\]"):
        pack_text(tmp_path / "a.txt", tmp_path / "out", tokenizer="bpe")
    pack_text(tmp_path / "a.txt", tmp_path / "out", sequence_length=2)


# --------------------------------------------------------------------------------------------------------------- BERT


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    (folder / "in").mkdir()
    for k in range(30):
        (folder / "in" / f"{k:02d}.txt").write_text(make_text(60, seed=k))
    pack_text(
        folder / "in", folder / "out", objective="bert", sequence_length=64, max_predictions_per_seq=12,
        tokenizer="bpe", vocabulary_size=330, seed=1,
    )  # fmt: skip
    features = load(folder / "out")
    return folder, features


def test_bert_features_are_those_of_the_original(bert):
    _, features = bert
    count = len(features["input_ids"])
    assert {name: (array.shape, array.dtype) for name, array in features.items()} == {
        "input_ids": ((count, 64), np.int64),
        "segment_ids": ((count, 64), np.int64),
        "input_mask": ((count, 64), np.int64),
        "masked_lm_positions": ((count, 12), np.int64),
        "masked_lm_ids": ((count, 12), np.int64),
        "next_sentence_label": ((count,), np.int64),
    }
    assert count > 300


def test_bert_samples_are_two_segments_between_special_tokens(bert):
    _, features = bert
    for ids, segments, mask in zip(features["input_ids"], features["segment_ids"], features["input_mask"], strict=True):
        length = int(mask.sum())
        assert (mask == (np.arange(64) < length)).all()
        assert (ids[length:] == 0).all()
        assert (segments[length:] == 0).all()
        assert ids[0] == 2  # [CLS]
        assert (ids[:length] != 0).all()
        separators = np.flatnonzero(ids == 3)
        assert len(separators) == 2
        assert separators[1] == length - 1
        assert (segments[:length] == (np.arange(length) > separators[0])).all()


def test_bert_masks_15_percent_of_which_80_10_10(bert):
    """Shares within four standard deviations of a binomial's."""
    _, features = bert
    ids, positions, labels = (features[name] for name in ("input_ids", "masked_lm_positions", "masked_lm_ids"))
    real = labels != 0
    rows = np.arange(len(ids))[:, None]
    found = ids[rows, positions]
    assert (np.diff(positions, axis=1)[real[:, 1:]] > 0).all()
    assert (positions[~real] == 0).all()
    assert not np.isin(labels[real], [1, 2, 3, 4]).any()
    assert (features["input_mask"][rows, positions][real] == 1).all()
    tokens = features["input_mask"].sum(1) - 3
    np.testing.assert_array_equal(real.sum(1), np.minimum(np.maximum(1, np.round(tokens * 0.15)), 12))
    count = real.sum()
    masked, kept = (found[real] == 4).sum(), (found[real] == labels[real]).sum()
    assert abs(masked - 0.8 * count) < 4 * np.sqrt(0.16 * count)
    assert abs(kept - 0.1 * count) < 4 * np.sqrt(0.09 * count) + count / 325
    assert not np.isin(found[real & (found != 4)], [0, 1, 2, 3]).any()


def test_bert_second_segments_follow_or_come_from_elsewhere(bert):
    """Unmasked, a sample whose label is 0 is in one document as it is; of the others almost none does."""
    folder, features = bert
    texts = [path.read_text() for path in sorted((folder / "in").iterdir())]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "out" / "tokenizer.json"))
    joined = []
    for k, ids in enumerate(features["input_ids"]):
        real = features["masked_lm_ids"][k] != 0
        ids = ids.copy()
        ids[features["masked_lm_positions"][k][real]] = features["masked_lm_ids"][k][real]
        text = "".join(tokenizer.decode(ids[ids > 4].tolist()).split())
        joined.append(any(text in "".join(whole.split()) for whole in texts))
    labels = features["next_sentence_label"]
    joined = np.array(joined)
    assert 0.4 < labels.mean() < 0.6
    # Segments shortened at their inner ends do not stand together any more.
    assert joined[labels == 0].mean() > 0.3
    assert joined[labels == 1].mean() < 0.05


def test_bert_packing_is_deterministic_and_seeded(bert, tmp_path):
    folder, features = bert
    options = {"objective": "bert", "sequence_length": 64, "max_predictions_per_seq": 12, "tokenizer": "bpe"}
    pack_text(folder / "in", tmp_path / "same", vocabulary_size=330, seed=1, **options)
    pack_text(folder / "in", tmp_path / "other", vocabulary_size=330, seed=2, **options)
    same, other = load(tmp_path / "same"), load(tmp_path / "other")
    assert all((same[name] == features[name]).all() for name in features)
    count = min(len(other["input_ids"]), len(features["input_ids"]))
    assert (other["masked_lm_positions"][:count] != features["masked_lm_positions"][:count]).any()


def test_bert_takes_lines_longer_than_a_sample_and_single_words(tmp_path):
    (tmp_path / "a.txt").write_text("x\n" + "y" * 500 + "\nz\n")
    pack_text(tmp_path / "a.txt", tmp_path / "out", objective="bert", sequence_length=16, max_predictions_per_seq=3)
    features = load(tmp_path / "out")
    assert (features["input_mask"].sum(1) <= 16).all()
    assert len(features["input_ids"]) > 30


def test_files_that_hold_no_text_are_named(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "n": [3]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet': no column 'text' \(there are 'body', 'n'\).*--text-field"):
        pack_text(tmp_path / "a.parquet", tmp_path / "out")
    with pytest.raises(DataError, match=r"a\.parquet', row 0: column 'n' holds 3, not text"):
        pack_text(tmp_path / "a.parquet", tmp_path / "out", text_field="n")
    (tmp_path / "b.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match=r"Parquet file '.*b\.parquet' cannot be read"):
        pack_text(tmp_path / "b.parquet", tmp_path / "out")
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n{"text" "b"}\n')
    with pytest.raises(DataError, match=r"c\.jsonl', line 2: not JSON \(Expecting ':'"):
        pack_text(tmp_path / "c.jsonl", tmp_path / "out")


def test_tokenizers_that_do_not_fit_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer '.*broken\.json' cannot be read"):
        pack_text(tmp_path / "a.txt", tmp_path / "out", tokenizer=str(tmp_path / "broken.json"))
    marks = ["[CLS]", "[PAD]", "[SEP]", "[MASK]"]
    model = tokenizers.models.WordLevel({mark: k for k, mark in enumerate(marks)}, unk_token="[MASK]")
    tokenizers.Tokenizer(model).save(str(tmp_path / "late.json"))
    with pytest.raises(DataError, match=r"has \[PAD\] at 1; BERT samples are padded with 0.*must be token 0"):
        pack_text(tmp_path / "a.txt", tmp_path / "out", objective="bert", tokenizer=str(tmp_path / "late.json"))
    with pytest.raises(ParametersError, match="max_predictions_per_seq is 0; expected at least 1"):
        TextOptions(max_predictions_per_seq=0)
