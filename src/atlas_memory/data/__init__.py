"""From files to batches: sources, tokenizers, a memory-mapped store, rows, and a loader that resumes exactly."""

from atlas_memory.data.batch import IGNORED, Batch
from atlas_memory.data.lessons import Exercise, Lessons, StoredLessons, make_exercise
from atlas_memory.data.loader import Loader, make_loader
from atlas_memory.data.options import DataConfig, ExerciseConfig, RowsConfig, SourceConfig
from atlas_memory.data.rows import PackedRows, Rows, SegmentRows, make_rows
from atlas_memory.data.sources import Document, EmptySourceError, read_documents
from atlas_memory.data.store import DamagedStoreError, Store, open_store
from atlas_memory.data.tokenizers import load_tokenizer, train_tokenizer

__all__ = [
    "DataConfig",
    "ExerciseConfig",
    "SourceConfig",
    "RowsConfig",
    "Document",
    "read_documents",
    "EmptySourceError",
    "load_tokenizer",
    "train_tokenizer",
    "Store",
    "open_store",
    "DamagedStoreError",
    "Lessons",
    "StoredLessons",
    "Exercise",
    "make_exercise",
    "Rows",
    "PackedRows",
    "SegmentRows",
    "make_rows",
    "Batch",
    "IGNORED",
    "Loader",
    "make_loader",
]
