"""A plugin for ``--load-format dummy``: the token table that an EAGLE-3 draft's weights would bring.

The draft's vocabulary is smaller than the target's; the map between them comes with the checkpoint. Without
one the first tokens stand for themselves: what is drafted does not matter where acceptance is simulated.
"""

from __future__ import annotations

from typing import Any


def give_table(result: Any, draft: Any, *_: Any, **__: Any) -> Any:
    """Run after the draft model's constructor."""
    import torch

    size = getattr(draft.config, "draft_vocab_size", None)
    if size and size != draft.config.vocab_size:
        draft.hot_token_id = torch.arange(size, dtype=torch.int64)
    return result


def load() -> None:
    """SGLang's entry point for plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.models.llama_eagle3.LlamaForCausalLMEagle3.__init__"
    HookRegistry.register(target, give_table, HookType.AFTER)
