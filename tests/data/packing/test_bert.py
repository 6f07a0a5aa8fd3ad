"""Samples of BERT's pretraining, as the original makes them."""

import numpy as np
import pytest
import tokenizers

from tests.data.packing.texts import load, make_text, pack_text


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
