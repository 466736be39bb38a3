"""The exported model, loaded by `transformers` as an independent implementation."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tools.demo_model.common.chat_format import EOS, SPECIAL_TOKENS


class ExportedModel(nn.Module):
    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        super().__init__()
        transformers = importlib.import_module("transformers")
        transformers.utils.logging.disable_progress_bar()
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self.model: Any = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
        self.eval()

    @property
    def context_tokens(self) -> int:
        return int(self.model.config.max_position_embeddings)

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, positions, vocabulary] for token ids [batch, positions]."""
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def complete_texts(self, texts: Sequence[str], max_tokens: int) -> list[tuple[str, bool]]:
        """Continue each text greedily by `max_tokens` at most.

        Returns each continuation, and whether the model ended it.
        """
        return self._generate_greedily([self._tokenizer.encode(text) for text in texts], max_tokens)

    def answer_question(self, question: str, max_tokens: int) -> str:
        messages = [{"role": "user", "content": question}]
        ids = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return self._generate_greedily([ids], max_tokens)[0][0]

    @torch.no_grad()
    def _generate_greedily(
        self, prompts: Sequence[list[int]], max_tokens: int
    ) -> list[tuple[str, bool]]:
        """Continue all prompts in one batch, padded on the left."""
        end = SPECIAL_TOKENS.index(EOS)
        width = max(map(len, prompts))
        rows = torch.tensor([[end] * (width - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
        out = self.model.generate(
            rows, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=end
        )
        return [(self.decode(row), end in row) for row in out[:, width:].tolist()]
