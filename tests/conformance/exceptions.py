"""The cases of the standard that onward does not pass, each group with the reason. Everything else must pass."""

from __future__ import annotations

from fnmatch import fnmatchcase

EXCEPTIONS: dict[str, str] = {
    "test_equal_string*": "strings have no torch type",
    "test_regex_full_match_*": "strings have no torch type",
    "test_string_*": "strings have no torch type",
    "test_strnorm*": "strings have no torch type",
    "test_image_decoder_*": "decoding image files is no tensor computation",
    "test_ai_onnx_ml_label_encoder_string_*": "strings have no torch type",
    "test_ai_onnx_ml_label_encoder_tensor_mapping": "strings have no torch type",
    "test_ai_onnx_ml_label_encoder_tensor_value_only_mapping": "strings have no torch type",
    "test_bernoulli*": "the expected numbers come from numpy's random generator; ours are torch's",
    "test_training_dropout": "the expected mask comes from numpy's random generator; ours is torch's",
    "test_training_dropout_mask": "the expected mask comes from numpy's random generator; ours is torch's",
    "test_training_dropout_default": "the expected mask comes from numpy's random generator; ours is torch's",
    "test_training_dropout_default_mask": "the expected mask comes from numpy's random generator; ours is torch's",
    "test_attention_4d_fp16": "one or two of 192 fp16 results round to the neighboring number",
    "test_attention_4d_causal_fp16*": "one or two of 192 fp16 results round to the neighboring number",
    "test_dft_inverse*": "imaginary parts that are 0 are expected as numpy's rounding error of 1e-6",
}

CHANNELS_FIRST: dict[str, str] = {
    "test_squeezenet": "all its weights are alike, its logits 1e10, and the softmax of them is expected of equal ones: "
    "every channel has to be summed up in the same order, as torch's convolution of channels first does",
}
"""Cases computed with the channels of an image as they come, and why."""


def reason_for(name: str) -> str | None:
    """Why a case is an exception, or None for a case that must pass."""
    return next((reason for pattern, reason in EXCEPTIONS.items() if fnmatchcase(name, pattern)), None)
