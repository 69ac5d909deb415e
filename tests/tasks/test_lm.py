"""Perplexity by position is that of the whole documents, each read alone."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from atlas_memory.data import DataConfig, RowsConfig, SourceConfig, make_loader, open_store
from atlas_memory.tasks import lm
from tests.models.support import small_model
from tests.train.support import write_texts


def test_buckets_are_those_of_whole_documents(tmp_path: Path) -> None:
    model = small_model(backbone="mag", vocab_size=258)
    data = DataConfig(
        source=SourceConfig(kind="text", path=str(write_texts(tmp_path / "texts")), limit=5),
        rows=RowsConfig(kind="segments", batch=3, length=10, shuffle=False, epochs=1),
        cache=str(tmp_path / "cache"),
    )
    found = lm.by_position(model, make_loader(data, "all", progress=False), first=8)
    store = open_store(data, "all", progress=False)
    losses = []
    for document in range(len(store)):
        ids = torch.from_numpy(store.document(document).astype("int64"))[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        losses.append(F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none"))
    for bucket in found:
        inside = torch.cat([loss[max(bucket.begin, 1) - 1 : bucket.end - 1] for loss in losses])
        assert bucket.tokens == len(inside)
        torch.testing.assert_close(torch.tensor(bucket.loss), inside.mean().float())
    total = lm.total(found)
    assert total.tokens == sum(map(len, losses))
    torch.testing.assert_close(torch.tensor(total.loss), torch.cat(losses).mean().float())
