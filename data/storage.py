"""Features on disk: float16 as they are, or int8 with an offset and a scale per feature.

int8 halves the size. Codes -127 to 127 divide a feature's range in the data set into 254 equal steps, so a value read
back is wrong by half a step at most (`largest_error`); code -128 is exactly 0, which stands for "nobody" and "nothing".
"""
import numpy as np

from data.layout import FEATURES

ZERO, STEPS = -128, 254


def value_ranges(chunks):
    """{part: [least values, largest values]} by feature over arrays of float16 frames, zeros left out."""
    low, high = ({name: np.full(len(columns), x) for name, columns in FEATURES.items()} for x in (np.inf, -np.inf))
    for records in chunks:
        for name, columns in FEATURES.items():
            values = records[name].reshape(-1, len(columns)).astype(np.float32)
            low[name] = np.minimum(low[name], np.where(values == 0, np.inf, values).min(0))
            high[name] = np.maximum(high[name], np.where(values == 0, -np.inf, values).max(0))
    return {name: [np.where(low[name] > high[name], 0, bound[name]).tolist() for bound in (low, high)]  # 0: always 0
            for name in FEATURES}


def largest_error(ranges):
    """{part: {feature: largest error of a value read back}}."""
    return {name: dict(zip(FEATURES[name], (half_step(low, high)).round(6).tolist()))
            for name, (low, high) in ranges.items()}


def half_step(low, high):
    return (np.asarray(high) - np.asarray(low)) / STEPS / 2


def scale_and_offset(low, high):
    """value = scale * code + offset, float32 by feature."""
    scale = 2 * half_step(low, high)
    return scale.astype(np.float32), (np.asarray(low) + 127 * scale).astype(np.float32)


def encode(values, low, high):
    """int8 codes of features [..., C] in the range [low, high] by feature."""
    scale, offset = scale_and_offset(low, high)
    codes = np.rint((values.astype(np.float32) - offset) / np.where(scale > 0, scale, 1))
    return np.where(values == 0, ZERO, codes.clip(-127, 127)).astype(np.int8)


def decode(codes, low, high):
    """float32 features from `encode`'s codes."""
    scale, offset = scale_and_offset(low, high)
    return np.where(codes == ZERO, np.float32(0), codes * scale + offset)


def features(records, name, ranges):
    """float32 values of one part of an array of frames, however it is stored."""
    return decode(records[name], *ranges[name]) if ranges else records[name].astype(np.float32)
