"""Data as Python programs hold them: arrays, frames, data sets, loaders, iterables and folders become batches."""
