"""Shards on disk, batches in memory, and packing of other formats into shards."""

from onward.data.batches import Batch, BatchSource, DataCursor, LastBatch
from onward.data.in_memory import InMemoryDataLoader, SyntheticFeature, make_synthetic_loader
from onward.data.loader import DataLoader
from onward.data.shard import FeatureSpec, Shard, load_shard
from onward.data.shard_format import ShardIndex, index_shard, read_samples, write_sample
from onward.data.shard_writer import ShardWriter

__all__ = [
    "Batch",
    "BatchSource",
    "DataCursor",
    "DataLoader",
    "FeatureSpec",
    "InMemoryDataLoader",
    "LastBatch",
    "Shard",
    "ShardIndex",
    "ShardWriter",
    "SyntheticFeature",
    "index_shard",
    "load_shard",
    "make_synthetic_loader",
    "read_samples",
    "write_sample",
]
