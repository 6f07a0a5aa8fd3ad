"""What can be asked of packing: one frozen dataclass per kind of source, for Python callers and the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from onward.errors import ParametersError
from onward.parameters.limits import DEFAULT_LIMITS, Limits


def option(
    default: Any, help: str, *, parse: Callable[[str], Any] = str, choices: tuple[str, ...] = (), repeated: bool = False
) -> Any:
    """A dataclass field that also knows how the command line reads and explains it.

    Args:
        default: its default.
        help: one sentence for `--help`.
        parse: from one command line word to the value (of one repetition).
        choices: the words allowed.
        repeated: the option may be given several times; the value is the tuple of all.
    """
    metadata = {"help": help, "parse": parse, "choices": choices, "repeated": repeated}
    return field(default=default, metadata=metadata)


def parse_size(text: str) -> tuple[int, int]:
    """ "28" -> (28, 28); "24x32" -> (24, 32): height, width."""
    height, _, width = text.lower().partition("x")
    return int(height), int(width or height)


def parse_floats(text: str) -> tuple[float, ...]:
    """ "0.5,0.25" -> (0.5, 0.25)."""
    return tuple(float(part) for part in text.split(","))


def parse_pair(text: str) -> tuple[str, str]:
    """ "name=value" -> (name, value)."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"{text!r} is not NAME=VALUE")
    return name, value


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Plain text, or a text column of JSONL or Parquet, to token sequences.

    The objective `causal` gives the features `tokens` and `labels`, int64 [sequence_length], labels being the tokens
    one position on; documents are joined by an end-of-text token and cut without overlap, so that every token is a
    label once. `masked` gives the same features, a share of the tokens being masked as BERT does, and `labels` holding
    the token that belongs there, -100 elsewhere. `bert` gives the original runner's features: `input_ids`,
    `segment_ids`, `input_mask`, int64 [sequence_length]; `masked_lm_positions`, `masked_lm_ids`, int64
    [max_predictions_per_seq]; `next_sentence_label`, int64 [1]; padding is 0 everywhere.
    """

    objective: Literal["causal", "masked", "bert"] = option(
        "causal",
        "the objective: the next token, masked tokens, or masked tokens and the next sentence",
        choices=("causal", "masked", "bert"),
    )
    sequence_length: int = option(256, "tokens of a sample (of conversations 1024)", parse=int)
    tokenizer: str = option("bytes", "'bytes' (one token per byte), 'bpe' (trained on this text), or a tokenizer.json")
    vocabulary_size: int = option(8192, "tokens of a BPE that is trained here", parse=int)
    tokenizer_training_bytes: int = option(64 << 20, "how much text a BPE is trained on at most", parse=int)
    position_ids: bool = option(False, "also write position_ids, int64 [sequence_length], counting from 0")
    documents: Literal["file", "blank-line"] = option(
        "file",
        "what a document of plain text is: a file, or what is between blank lines",
        choices=("file", "blank-line"),
    )
    text_field: str = option("text", "key or column of JSONL or Parquet that holds the text")
    undecodable: Literal["error", "skip", "replace"] = option(
        "error", "what to do with a file that is not UTF-8, for a BPE", choices=("error", "skip", "replace")
    )
    end_of_text: str = option("<|endoftext|>", "token that separates documents, for causal with a tokenizer.json")
    max_predictions_per_seq: int = option(20, "masked positions of a BERT sample at most", parse=int)
    masked_lm_probability: float = option(0.15, "share of a BERT sample's tokens that are masked", parse=float)
    short_sequence_probability: float = option(0.1, "share of BERT samples that are shorter on purpose", parse=float)

    def __post_init__(self) -> None:
        if self.sequence_length < (5 if self.objective == "bert" else 1):
            raise ParametersError(f"sequence_length is {self.sequence_length}; bert needs at least 5, causal 1.")
        if self.max_predictions_per_seq < 1:
            raise ParametersError(f"max_predictions_per_seq is {self.max_predictions_per_seq}; expected at least 1.")
        for name in ("masked_lm_probability", "short_sequence_probability"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ParametersError(f"{name} is {value}; expected a share from 0 to 1.")


@dataclass(frozen=True)
class ArrayOptions:
    """.npz (each array a feature, named by its key) and .npy (each file a feature, named by the file).

    Axis 0 counts samples. Several .npz files are read one after the other; several .npy files stand side by side.
    """

    arrays: tuple[str, ...] = option((), "names of the arrays to pack; absent: all", repeated=True)


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """CSV, TSV, JSONL and Parquet: columns to features.

    Without `columns`, each column is a feature of its own name. Columns of whole numbers become int64, others float32;
    several columns in one feature become a vector; lists in JSONL and Parquet keep their shape. With `text`, one column
    of text, or two that make a pair, become token ids, int64 [text_length], truncated and padded, with special tokens.
    """

    columns: tuple[tuple[str, str], ...] = option(
        (),
        "a feature from columns: NAME=COLUMN[,COLUMN...], * matching any characters",
        parse=parse_pair,
        repeated=True,
    )
    categories: tuple[str, ...] = option(
        (),
        "a column of words that becomes a class number, by the words' alphabetical order or by a given one: "
        "NAME=WORD,WORD,...; * matches any characters; a feature of its own unless --columns reads it; written to "
        "pack.json",
        repeated=True,
    )
    text: tuple[tuple[str, str], ...] = option(
        (),
        "a feature of token ids from a column of text, or from two that make a pair: NAME=COLUMN[,COLUMN]",
        parse=parse_pair,
        repeated=True,
    )
    text_mask: str = option("", "with --text: name of a feature that is 1 at tokens and 0 at padding")
    text_types: str = option(
        "", "with --text: name of a feature that is 0 in the first text of a pair, 1 in the second"
    )
    text_tokenizer: str = option(
        "", "with --text: a tokenizer.json, a vocab.txt, a vocab.json next to a merges.txt, or a folder that holds one"
    )
    text_length: int = option(128, "with --text: tokens of a sample", parse=int)
    delimiter: str = option(",", "between the columns of CSV; TSV files always use tabs")
    header: bool = option(True, "the first line of CSV names the columns; else they are column_0, column_1, ...")
    missing: Literal["error", "skip", "keep"] = option(
        "error",
        "what to do with a row without a value (an empty cell; among numbers also NA, nan, null and ?); keep makes it "
        "NaN in a column of numbers, for a model that imputes values",
        choices=("error", "skip", "keep"),
    )

    def __post_init__(self) -> None:
        if self.text_length < 3:
            raise ParametersError(f"text_length is {self.text_length}; expected at least 3.")


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """A folder with one folder of images per class.

    Gives `image`, float32 [channels, height, width], (pixel / 255 - mean) / std, and `label`, int64, the number of the
    class in the order of names. The list of images is shuffled, so that shards hold all classes.
    """

    image_size: tuple[int, int] = option(
        (224, 224), "height and width of the packed images: 224 or 224x320", parse=parse_size
    )
    image_mode: Literal["rgb", "grayscale"] = option("rgb", "three channels or one", choices=("rgb", "grayscale"))
    resize: Literal["crop", "stretch"] = option(
        "crop", "fill the size and crop the center, or stretch to it", choices=("crop", "stretch")
    )
    mean: tuple[float, ...] = option((0.0,), "subtracted: one number, or one per channel", parse=parse_floats)
    std: tuple[float, ...] = option((1.0,), "divided by: one number, or one per channel", parse=parse_floats)
    unreadable: Literal["error", "skip"] = option(
        "error", "what to do with a file that cannot be decoded", choices=("error", "skip")
    )
    shuffle_images: bool = option(True, "shuffle the classes; otherwise images are in the order of their classes")

    def __post_init__(self) -> None:
        channels = 3 if self.image_mode == "rgb" else 1
        for name in ("mean", "std"):
            value = getattr(self, name)
            if len(value) not in (1, channels):
                raise ParametersError(f"{name} has {len(value)} numbers; expected 1 or {channels} ({self.image_mode}).")
        if min(self.std) <= 0 or min(self.image_size) < 1:
            raise ParametersError(f"std {self.std} and image_size {self.image_size} must be above 0.")


@dataclass(frozen=True, kw_only=True)
class AudioOptions:
    """A folder with one folder of recordings per class.

    Gives `audio`, float32 [audio_length], the mean of the channels with full scale at -1 and 1, and `label`, int64, the
    number of the class in the order of names. Recordings are resampled to one rate; longer ones are cut at their end,
    shorter ones padded there with silence.
    """

    sample_rate: int = option(0, "samples per second of the packed recordings, in Hz; 0: as most files have", parse=int)
    audio_length: int = option(0, "samples of a packed recording; 0: as the longest file has", parse=int)
    unreadable: Literal["error", "skip"] = option(
        "error", "what to do with a file that cannot be decoded", choices=("error", "skip")
    )
    shuffle_audio: bool = option(True, "shuffle the classes; otherwise recordings are in the order of their classes")

    def __post_init__(self) -> None:
        for name in ("sample_rate", "audio_length"):
            if getattr(self, name) < 0:
                raise ParametersError(f"{name} is {getattr(self, name)}; expected at least 1, or leave it out.")


@dataclass(frozen=True, kw_only=True)
class ConversationOptions:
    """What chat, instructions and preferences have in common.

    Gives `input_ids`, `attention_mask` (1 at tokens, 0 at padding) and `labels`, int64 [sequence_length]: labels are
    the tokens one position on, -100 where no answer is.
    """

    tokenizer: str = option("bytes", "'bytes', 'bpe' (trained on these texts), a tokenizer.json, or a folder with one")
    chat_template: str = option(
        "",
        "a file with the Jinja template that writes conversations; absent: chat_template.jinja or "
        "tokenizer_config.json next to the tokenizer, ChatML for a tokenizer that is made here",
    )
    sequence_length: int = option(1024, "tokens of a sample", parse=int)
    too_long: Literal["cut", "skip", "error"] = option(
        "cut",
        "what to do with a conversation of more tokens: cut its end, leave it out, or stop",
        choices=("cut", "skip", "error"),
    )
    loss_on: Literal["answers", "all"] = option(
        "answers", "which tokens are labels: those of the assistant, or all", choices=("answers", "all")
    )
    position_ids: bool = option(False, "also write position_ids, int64 [sequence_length], counting from 0")
    vocabulary_size: int = option(8192, "tokens of a BPE that is trained here", parse=int)
    tokenizer_training_bytes: int = option(64 << 20, "how much text a BPE is trained on at most", parse=int)

    def __post_init__(self) -> None:
        if self.sequence_length < 2:
            raise ParametersError(f"sequence_length is {self.sequence_length}; expected at least 2.")


@dataclass(frozen=True, kw_only=True)
class _PackedConversationOptions(ConversationOptions):
    """With `several_per_sequence`, conversations share sequences: `position_ids` begin at 0 in each of them."""

    several_per_sequence: bool = option(
        False, "fill sequences with several conversations that do not see each other, instead of padding"
    )
    mask_type: Literal["segments", "bool", "float"] = option(
        "segments",
        "with --several-per-sequence: segment_ids, int64 [sequence_length], 1 for the first conversation and 0 for "
        "padding; or attention_mask [1, sequence_length, sequence_length], true where a token sees another (bool), or "
        "float32, 0 there and the lowest number elsewhere",
        choices=("segments", "bool", "float"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_type != "segments" and not self.several_per_sequence:
            raise ParametersError(
                f"mask_type is {self.mask_type!r}, which has no effect without several_per_sequence; set both."
            )


@dataclass(frozen=True, kw_only=True)
class ChatOptions(_PackedConversationOptions):
    """Conversations: JSONL or Parquet with `messages`, a list of turns with `role` and `content`, and maybe `tools`."""

    messages_field: str = option("messages", "key or column that holds the turns")


@dataclass(frozen=True, kw_only=True)
class InstructOptions(_PackedConversationOptions):
    """Instructions: JSONL, CSV or Parquet with `instruction`, `output`, and maybe `input` and `system` (Alpaca)."""

    prompt_field: str = option("instruction", "key or column that holds what is asked")
    input_field: str = option("input", "key or column of a text that belongs to what is asked")
    answer_field: str = option("output", "key or column that holds the answer")


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions(ConversationOptions):
    """Preferences: JSONL or Parquet with `prompt`, `chosen` and `rejected`, each a text or a list of turns.

    Every feature is [2, sequence_length]: the chosen conversation, then the rejected one.
    """


SourceOptions = (
    TextOptions
    | ArrayOptions
    | TableOptions
    | ImageOptions
    | AudioOptions
    | ChatOptions
    | InstructOptions
    | PreferenceOptions
)

KINDS: Mapping[str, type[SourceOptions]] = {
    "text": TextOptions,
    "arrays": ArrayOptions,
    "table": TableOptions,
    "images": ImageOptions,
    "audio": AudioOptions,
    "chat": ChatOptions,
    "instruct": InstructOptions,
    "preference": PreferenceOptions,
}
"""Kind of source -> its options."""


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """What applies to every kind of source; `source` holds what applies to one (None: found out, with defaults)."""

    source: SourceOptions | None = None
    pattern: str = option(
        "", "which files of a source folder to read, as *.py; absent: those of the kind's own suffixes"
    )
    exclude: tuple[str, ...] = option(
        (), "names of files and folders in a source folder to leave out, as test*", repeated=True
    )
    samples_per_file: int = option(1024, "samples of a shard", parse=int)
    test_fraction: float = option(
        0.0,
        "share of the samples (of the documents, for text of many) that goes to DEST/test, the rest to DEST/train",
        parse=float,
    )
    test_source: str = option(
        "",
        "a second file or folder of the same kind, which goes to DEST/test, SOURCE to DEST/train; found out where "
        "SOURCE is a folder of nothing but train and val (or valid, validation, dev, test, eval)",
    )
    shuffle_buffer: int = option(
        0, "shuffle the samples within a buffer of this many before they are written", parse=int
    )
    seed: int = option(0, "of splitting, shuffling and masking", parse=int)
    transform: tuple[tuple[str, str], ...] = option(
        (),
        "an operation on a feature, in the order given: NAME=transpose:2,0,1, reshape:1x28x28, resize:224x224, "
        "repeat:3, scale:0.0039, shift:-1, normalize:MEANS/DEVIATIONS, one-hot:10; or a feature made from it: "
        "NAME=next-token:LABELS, ones:NEW, zeros:NEW, positions:NEW",
        parse=parse_pair,
        repeated=True,
    )
    cast: tuple[tuple[str, str], ...] = option((), "a feature's dtype: NAME=DTYPE", parse=parse_pair, repeated=True)
    overwrite: bool = option(False, "replace the shards that DEST already holds")
    progress: bool = option(True, "show a progress bar")
    limits: Limits = DEFAULT_LIMITS

    def __post_init__(self) -> None:
        if self.samples_per_file < 1:
            raise ParametersError(f"samples_per_file is {self.samples_per_file}; expected at least 1.")
        if not 0 <= self.test_fraction < 1:
            raise ParametersError(f"test_fraction is {self.test_fraction}; expected a share from 0 to below 1.")
        if self.test_source and self.test_fraction:
            raise ParametersError(
                f"test_fraction is {self.test_fraction:g}, but the test data are {self.test_source!r}; leave one out."
            )
        if self.shuffle_buffer < 0 or self.seed < 0:
            raise ParametersError(f"shuffle_buffer {self.shuffle_buffer} and seed {self.seed} must be at least 0.")

    @property
    def splits(self) -> tuple[str, ...]:
        """The folders of shards that are written in DEST; "" is DEST itself."""
        return ("train", "test") if self.test_fraction > 0 or self.test_source else ("",)

    def to_dict(self, source: SourceOptions) -> dict[str, Any]:
        """JSON-able; what does not change the shards is left out."""
        values = dataclasses.asdict(self)
        for name in ("source", "overwrite", "progress", "limits", *(() if self.test_source else ("test_source",))):
            del values[name]
        return {name: _as_json(value) for name, value in {**values, **dataclasses.asdict(source)}.items()}


def _as_json(value: Any) -> Any:
    return [_as_json(part) for part in value] if isinstance(value, tuple) else value


def kind_of(options: SourceOptions) -> str:
    """The kind of source that options belong to."""
    return next(kind for kind, options_type in KINDS.items() if type(options) is options_type)
